"""Scripts that hang, and scripts that are slow but right; each begins with PRELUDE."""

from __future__ import annotations

PRELUDE = """
import asyncio, atexit, fcntl, multiprocessing, os, queue, select, signal, socket, subprocess, sys, threading, time
import torch, torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor
t = torch.ones(8)
def join():
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(t)
    return dist.get_rank()
"""


def late(body: str) -> str:
    """A script whose rank 1 does this before it enters a collective that the others wait in."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"rank = join()\nif rank == 1:\n{lines}dist.all_reduce(t)\n"


_POOL = "pool = ThreadPoolExecutor(1)\npool.submit(time.sleep, 9999).result()"
_THREAD = "it = threading.Thread(target=time.sleep, args=(9999,)); it.start()"
_PROCESS = _THREAD.replace("threading.Thread", "multiprocessing.Process")
_LOADER = """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): {what}; return index
loader = torch.utils.data.DataLoader(Slow(), num_workers=2)
rank = join()
for batch in loader:
    dist.all_reduce(t)
"""
_DDP = """
rank = join()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(9):
    if rank == 1 and step == 4:
        time.sleep(9999)
    model(torch.ones(2, 8)).sum().backward()
"""
_HOROVOD = """
import horovod.torch as hvd
hvd.init()
rank = hvd.rank()
for _ in range(3):
    hvd.allreduce(t)
"""
_GROUPS = """
rank = join()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
if rank == 3:
    time.sleep(9999)
dist.all_reduce(t, group=groups[rank // 2])
dist.all_reduce(t)
"""

# name → ranks, script, the ranks that are to blame, and what is said of them.
HANGS: dict[str, tuple[int, str, list[int], str]] = {
    "sleep": (2, late("time.sleep(9999)"), [1], "all_reduce 4 .*it sleeps"),
    "lock": (2, late("lock = threading.Lock(); lock.acquire(); lock.acquire()"), [1], "a lock"),
    "with lock": (2, late("lock = threading.Lock()\nwith lock:\n    with lock: pass"), [1], "a lock"),
    "semaphore": (2, late("threading.Semaphore(0).acquire()"), [1], "a lock"),
    "lock of processes": (2, late("lock = multiprocessing.Lock(); lock.acquire(); lock.acquire()"), [1], "a lock"),
    "queue": (2, late("queue.Queue().get()"), [1], "a thread, or for a lock"),
    "event": (2, late("threading.Event().wait()"), [1], "a thread, or for a lock"),
    "condition": (2, late("c = threading.Condition()\nwith c: c.wait()"), [1], "a thread, or for a lock"),
    "thread": (2, late(f"{_THREAD}; it.join()"), [1], "a thread"),
    "future": (2, late(_POOL), [1], "a thread, or for a lock"),
    "process": (2, late(f"{_PROCESS}; it.join()"), [1], "a process that it has started"),
    "program": (2, late("subprocess.run(['sleep', '9999'])"), [1], "a program that it has started"),
    "output of a program": (2, late("subprocess.check_output(['sleep', '9999'])"), [1], "program|read from pipe"),
    "empty pipe": (2, late("r, w = os.pipe(); os.read(r, 1)"), [1], "read from pipe"),
    "full pipe": (2, late("r, w = os.pipe(); os.write(w, b'x' * 10**7)"), [1], "write to pipe.*nobody reads"),
    "full stdout": (2, late("r, w = os.pipe(); os.dup2(w, 1); print('x' * 10**7)"), [1], "write to pipe.*nobody reads"),
    "input": (2, late("r, w = os.pipe(); os.dup2(r, 0); sys.stdin = open(0); input()"), [1], "its standard input"),
    "connection": (2, late("a, b = socket.socketpair(); a.recv(1)"), [1], "a connection"),
    "accept": (2, late("s = socket.create_server(('127.0.0.1', 0)); s.accept()"), [1], "a connection"),
    "full connection": (2, late("a, b = socket.socketpair(); a.sendall(b'x' * 10**8)"), [1], "nobody reads"),
    "stopped": (2, late("os.kill(os.getpid(), signal.SIGSTOP)"), [1], "stopped .SIGSTOP"),
    "lock of a file": (2, "rank = join()\nf = open('lock', 'w')\n"
                       "if rank == 1: dist.barrier()\nfcntl.flock(f, fcntl.LOCK_EX)\n"
                       "if rank == 0: dist.barrier()\ndist.all_reduce(t)\n", [1], "the lock of a file"),
    "select": (2, late("select.select([], [], [])"), [1], ""),
    "pause": (2, late("signal.pause()"), [1], ""),
    "asyncio": (2, late("asyncio.run(asyncio.sleep(9999))"), [1], ""),
    "store": (2, late("dist.distributed_c10d._get_default_store().get('nobody sets it')"), [1], ""),
    "interpreter's lock": (2, "import ctypes\n" + late("ctypes.PyDLL(None).sleep(9999)"), [1], "interpreter's lock"),
    "checkpoint": (2, late("os.mkfifo('saved'); torch.save(t, 'saved')"), [1], "interpreter's lock"),  # C++ opens it
    "exit": (2, late("atexit.register(time.sleep, 9999); sys.exit()"), [1], "it sleeps"),
    "thread that stays": (2, late(f"{_THREAD}; sys.exit()"), [1], ""),
    "asynchronous": (2, "rank = join()\nif rank == 1: time.sleep(9999)\n"
                     "dist.all_reduce(t, async_op=True).wait()\n", [1],
                     "all_reduce 4"),
    "another branch": (2, "rank = join()\nif rank == 1: dist.broadcast(t, 1)\nelse: dist.all_gather([t, t], t)\n", [1],
                       "broadcast 4.*rank 0 in all_?gather"),
    "uneven batches": (3, "rank = join()\nfor _ in range(4 + (rank != 2)):\n    dist.all_reduce(t)\n"
                       "dist.barrier()\n", [2],
                       "barrier.*all_reduce"),
    "gather": (3, "rank = join()\nif rank == 2: time.sleep(9999)\n"
               "dist.gather(t, [t, t, t] if rank == 0 else None)\ndist.barrier()\n", [2], ""),
    "before the group": (2, "if os.environ['RANK'] == '1': time.sleep(9999)\njoin()\n", [1], "a process group"),
    "another group": (2, "rank = join()\nif rank == 0: dist.new_group([0, 1])\ntime.sleep(9999)\n", [1], ""),
    "groups": (4, _GROUPS, [3], "it sleeps"),
    "groups in different orders": (2, "rank = join()\na, b = dist.new_group([0, 1]), dist.new_group([0, 1])\n"
                                   "for group in (b, a) if rank else (a, b): dist.all_reduce(t, group=group)\n", [1],
                                   "in different orders; rank 1 .* and rank 0"),
    "a distributed checkpoint on one rank": (2, "import torch.distributed.checkpoint as dcp\nrank = join()\n"
                                             "if rank == 0: dcp.save({'a': t}, checkpoint_id='saved')\n"
                                             "dist.all_reduce(t)\n", [0], "within a distributed checkpoint"),
    "a killed worker of a pool": (2, late("multiprocessing.get_context('fork').Pool(1).map(os._exit, [1])"), [1],
                                  "workers of a multiprocessing.Pool"),
    "two of four": (4, "rank = join()\nif rank in (1, 2): time.sleep(9999)\ndist.all_reduce(t)\n", [1, 2],
                    "they are at"),
    "backward": (2, _DDP, [1], "it sleeps"),
    "worker of a loader": (2, _LOADER.format(what="os.environ['RANK'] == '1' and index == 5 and time.sleep(9999)"), [1],
                           "a worker of a DataLoader; 2 are there"),
    "stopped worker": (2, _LOADER.format(
        what="os.environ['RANK'] == '1' and index == 4 and os.kill(os.getpid(), signal.SIGSTOP)"), [1],
        "1 of 2 are stopped"),
    "different sources": (2, "rank = join()\ndist.broadcast(t, 1 - rank)\n", [],
                          "all ranks are in broadcast 4 .*, and none goes on; they are at"),
    "horovod": (3, f"{_HOROVOD}if rank == 1: time.sleep(9999)\n"
                "for name in ('xy', 'yx')[rank // 2]: hvd.allreduce_async(t, name=name)\n"  # another order on rank 2
                "hvd.allreduce(t, name='loss')\n", [1], r"allreduce\.y 6 .*it sleeps"),
    "horovod, another name": (2, f"{_HOROVOD}hvd.broadcast(t, 0, name='ab'[rank])\n", [1],
                              r"broadcast\.b 4.*rank 0 in broadcast\.a"),
    "no collective has a number": (4, "f = open('lock', 'w')\n"
                                   "if os.environ['RANK'] == '1':\n"
                                   "    fcntl.flock(f, fcntl.LOCK_EX)\n"
                                   "    open('taken', 'w'); threading.Event().wait()\n"
                                   "while not os.path.exists('taken'): time.sleep(0.1)\n"
                                   "fcntl.flock(f, fcntl.LOCK_EX)\n", [],
                                   "no rank works; rank 1 on .*a lock, while ranks 0, 2, 3 on .*the lock of a file"),
    "one waits for the other": (2, "rank = join()\ndist.recv(t, 1 - rank)\n", [], "no rank works"),
}  # fmt: skip

_SERVER = """
rank = join()
if rank == 1:
    import http.server, urllib.request
    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
            for _ in range(200):
                self.wfile.write(b"x" * 20_000); time.sleep(0.05)
        def log_message(self, *_): pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Slow)
    multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}").read()
dist.all_reduce(t)
"""
# 20 KiB/s over a connection to a process that is no rank: a download into memory, and an upload.
_TRICKLE = """
rank = join()
if rank == 1:
    server, size = socket.create_server(("127.0.0.1", 0)), 0
    if not os.fork():
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 10_000)
        for _ in range(20):
            {there}; time.sleep(0.5)
        os._exit(0)
    own = socket.create_connection(server.getsockname())
    {here}
    os.wait()
dist.all_reduce(t)
"""
_TIMED = "end = time.monotonic() + 10\nwhile time.monotonic() < end:\n    "
# Slow but right: rank 1 works for ten seconds, and the others wait for it.
SLOW: dict[str, tuple[int, str]] = {
    "Python": (2, late(f"{_TIMED}sum(range(1000))")),
    "one call of C": (2, late("import zlib\nzlib.compress(os.urandom(1 << 20) * 200, 9)")),
    "a call that holds the interpreter's lock": (2, late("sum(range(300_000_000))")),
    "torch": (2, late(f"{_TIMED}torch.randn(300, 300) @ torch.randn(300, 300)")),
    "evaluation": (2, late(f"model = torch.nn.Linear(512, 512)\n{_TIMED}model(torch.randn(64, 512)).sum().item()")),
    "a thread works": (2, late(f"def work():\n    {_TIMED.replace(chr(10), chr(10) + '    ')}sum(range(1000))\n"
                               "it = threading.Thread(target=work); it.start(); it.join()")),
    "a process works": (2, late("subprocess.run([sys.executable, '-c', 'sum(range(300_000_000))'])")),
    "many files": (2, late("import glob\nfiles = glob.glob(os.path.dirname(os.__file__) + '/*.py')\n"
                            f"{_TIMED}[open(f, 'rb').read() for f in files]")),
    "reads": (2, late("open('big', 'wb').write(bytes(50_000_000))\n"
                       f"{_TIMED}open('big', 'rb').read(); time.sleep(0.5)")),
    "saves": (2, late(f"{_TIMED}torch.save(torch.ones(1_000_000), 'saved'); time.sleep(0.5)")),
    "compresses": (2, late(f"import gzip\n{_TIMED}gzip.compress(bytes(1_000_000)); time.sleep(0.1)")),
    "hashes": (2, late(f"import hashlib\n{_TIMED}hashlib.sha256(bytes(10_000_000)).digest()")),
    "sorts": (2, late(f"{_TIMED}sorted(os.urandom(100_000))")),
    "database": (2, late(f"import sqlite3\nd = sqlite3.connect('d')\nd.execute('create table a (b)')\n"
                         f"{_TIMED}d.execute('insert into a values (1)'); d.commit()")),
    "downloads": (2, _SERVER),
    "downloads slowly": (2, _TRICKLE.format(there="peer.sendall(bytes(10_240))", here="while own.recv(9999): pass")),
    "uploads slowly": (2, _TRICKLE.format(
        there="size += len(peer.recv(10_240))",
        here="own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1); own.sendall(bytes(200_000)); own.close()")),
    "all sleep": (2, "rank = join()\ntime.sleep(10)\ndist.all_reduce(t)\n"),
    "all work": (2, f"rank = join()\n{_TIMED}sum(range(1000))\ndist.all_reduce(t)\n"),
    "a slow loader": (2, _LOADER.format(what="[sum(range(20_000_000)) for _ in range(3)]")),
    "before the group": (2, "if os.environ['RANK'] == '1':\n    sum(range(300_000_000))\njoin()\n"),
    "steps of two seconds": (2, "rank = join()\nfor _ in range(5):\n    time.sleep(2)\n    dist.all_reduce(t)\n"),
}  # fmt: skip
