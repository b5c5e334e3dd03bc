"""The fork server: imports the framework once, then forks every rank from itself, as often as the job restarts.

It has a single thread, touches no device, and is the parent of all ranks. What cannot be forked it starts by exec. The
agent sends it messages over a socket (typed in `messages`):

    agent → server   {"do": "start", "ranks": [{"local_rank", "env", "out", "err", "error"}, …]}
                     {"do": "signal", "signal": 15, "ranks": [0, 1]}
                     {"do": "spawn", "name": "mpirun", "command": […], "env": {…}}    a program beside the ranks
                     {"do": "sweep", "grace": 2.0}       end whatever the ranks left behind
    server → agent   {"event": "ready", "method": "fork", "why": "", "seconds": 1.2}
                     {"event": "started", "local_rank": 0, "pid": 4711}
                     {"event": "exited", "local_rank": 0, "status": 256, "time": 12.3}
                     {"event": "spawned", "name": "mpirun", "pid": 4710}
                     {"event": "ended", "name": "mpirun", "status": 0}
                     {"event": "swept"}

When the agent is gone, the server kills all ranks and everything they started, and ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.node import ENTRY
from paceline.node.eventloop.channel import Channel, ChannelClosed
from paceline.node.machine import processes, volumes
from paceline.node.signals import HANDLED
from paceline.node.spec import NodeSpec, Program

from .program import run_program, script_folder
from .rehearsal import folder

if TYPE_CHECKING:
    from .messages import FromServer, RankOrder, ToServer

_OWED_PAUSE = 1.0  # seconds between two looks whether a rank handles a signal by now
_TORCH_FIXED_SEED = 67280421310721  # what every process starts with in the torch versions that do not draw one


class ForkServer:
    """Starts ranks, and reports to the agent how they start and end."""

    def __init__(self, spec: NodeSpec, channel: Channel, threads: int = 0) -> None:
        """Start nothing yet."""
        self.spec = spec
        self.threads = threads
        self.channel = channel
        self.method = spec.start_method
        self.pids: dict[int, int] = {}  # pid → local rank
        self.others: dict[int, str] = {}  # pid → name of a program beside the ranks
        self._owed: set[tuple[int, int]] = set()  # pids and signals that they do not handle yet
        # A scheduler may send its signals to all processes of a job; the agent decides what follows from them.
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in HANDLED}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self._wakeup_write = wakeup_write

    def import_framework(self) -> None:
        """Import what the ranks share, and decide whether they can be forked afterwards."""
        began, before, why = time.monotonic(), len(sys.modules), ""
        for name in self.spec.preload if self.method == "fork" else ():
            try:
                import_shared(name)
            except ImportError:
                pass  # the script's own import reports the error, in the rank, with the user's line
            except BaseException:
                self.method, why = "exec", f"importing {name} failed: {traceback.format_exc(limit=1)}"
            if name == "torch._dynamo" and (tempfile := cast("Any", sys.modules.get("tempfile"))) is not None:
                tempfile.tempdir = None  # torch has asked for this folder, and the script may set TMPDIR afterwards
        is_warm = self.spec.preload and len(sys.modules) == before  # the server has imported them, and looked
        if self.method == "fork" and not why and not is_warm:
            why = unsafe_to_fork()
            self.method = "exec" if why else "fork"
        gc.collect()
        gc.freeze()
        self._send({"event": "ready", "method": self.method, "why": why, "seconds": time.monotonic() - began})

    def serve(self) -> _Forked | None:
        """Handle the agent's messages until it is gone; in a forked rank, return what to run there."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                writes = selectors.EVENT_WRITE if self.channel.wants_write else 0
                selector.modify(self.channel, selectors.EVENT_READ | writes)
                selector.select(_OWED_PAUSE if self._owed else None)  # nothing says that a handler is there
                if self._owed:
                    self._pass_on()
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
                with contextlib.suppress(ChannelClosed):  # the next `receive` raises it too
                    self.channel.flush()
                try:
                    messages: list[ToServer] = self.channel.receive()
                    for message in messages:
                        forked = self._handle(message)
                        if forked is not None:
                            return forked
                except ChannelClosed:
                    self._kill_everything()
                    return None
                self._reap()

    def _handle(self, message: ToServer) -> _Forked | None:
        if message["do"] == "start":
            for order in message["ranks"]:
                forked = self._start(order)
                if forked is not None:
                    return forked
        elif message["do"] == "signal":
            group = self.spec.program.kind == "command"  # a shell does not forward SIGTERM, so its group gets it
            for pid, local_rank in list(self.pids.items()):
                if local_rank in message["ranks"]:
                    processes.signal_process(pid, message["signal"], group)
        elif message["do"] == "pass on":
            self._owed |= {(pid, message["signal"]) for pid in self.pids}
            self._pass_on()
        elif message["do"] == "spawn":
            self._spawn(message["name"], message["command"], message["env"])
        elif message["do"] == "sweep":
            self._sweep(message["grace"])
            self._send({"event": "swept"})
        return None

    def _pass_on(self) -> None:
        """Send ranks the signals that they handle now; a shell waits for what it has started, so that gets them too."""
        group = self.spec.program.kind == "command"
        owed = {(pid, number) for pid, number in self._owed if pid in self.pids}
        self._owed = {(pid, number) for pid, number in owed if not processes.pass_on(pid, number, group)}

    def _start(self, order: RankOrder) -> _Forked | None:
        pid = self._fork()
        if pid:
            self.pids[pid] = order["local_rank"]
            self._send({"event": "started", "local_rank": order["local_rank"], "pid": pid})
            return None
        local_rank, stdin = self.spec.stdin or (-1, "")
        _redirect(order["out"], order["err"], stdin if local_rank == order["local_rank"] else os.devnull)
        if self.spec.numa_binding is not None:
            _bind(self.spec, order["local_rank"])
        os.environ.update(order["env"])
        forked = _Forked(self.spec, order, self.threads)
        if self.method == "exec" or self.spec.program.kind == "command":
            folder.differ(order["env"])
            forked.exec()
        processes.set_title(processes.rank_title(self.spec.program.target, order["env"]))
        return forked

    def _spawn(self, name: str, command: list[str], env: dict[str, str]) -> None:
        """Start a program beside the ranks; its output goes where that of this process goes."""
        pid = self._fork()
        if pid:
            self.others[pid] = name
            self._send({"event": "spawned", "name": name, "pid": pid})
            return
        os.environ.update(env)
        _exec(command)

    def _fork(self) -> int:
        """Fork a process that ends with this one; returns its pid here, 0 there."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # This process ignores these signals: those that come before the fork has its own handlers wait for them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads; unsafe_to_fork has checked
            pid = os.fork()
        if pid == 0:
            processes.die_with(parent)
            os.setsid()
            self._release()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _release(self) -> None:
        """In a fork: close what belongs to the server alone, and restore the signal handling from before."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is signal.SIG_IGN and handler is not None:
                signal.signal(number, handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.channel.close()
        os.close(self._wakeup)
        os.close(self._wakeup_write)

    def _reap(self, block: bool = False) -> None:
        """Reap the children that have ended, adopted orphans included; wait for a first one if `block`."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            block = False
            local_rank = self.pids.pop(pid, None)
            if local_rank is not None:
                self._send({"event": "exited", "local_rank": local_rank, "status": status, "time": time.monotonic()})
            elif pid in self.others:
                self._send({"event": "ended", "name": self.others.pop(pid), "status": status})

    def _sweep(self, grace: float) -> None:
        """End all descendants: SIGTERM, `grace` seconds, SIGKILL."""
        for pid in processes.descendants(os.getpid()):
            processes.signal_process(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while processes.descendants(os.getpid()) and (remaining := deadline - time.monotonic()) > 0:
            select.select([self._wakeup], [], [], remaining)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
            self._reap()
        self._kill_everything()

    def _kill_everything(self) -> None:
        while processes.kill_descendants(os.getpid()):
            self._reap(block=True)
        while self.pids or self.others:  # one that was killed can be reaped only when all its threads have ended
            self._reap(block=True)
        self._reap()

    def _send(self, message: FromServer) -> None:
        with contextlib.suppress(ChannelClosed):  # the next `receive` raises it too, and ends the ranks
            self.channel.send(message)


class _Forked:
    """What a newly forked rank runs."""

    def __init__(self, spec: NodeSpec, order: RankOrder, threads: int) -> None:
        self.spec = spec
        self.order = order
        self.threads = threads
        self.args = spec.program.args
        if spec.local_rank_flag and "LOCAL_RANK" in order["env"]:
            self.args = (f"{spec.local_rank_flag}={order['env']['LOCAL_RANK']}", *self.args)
        if spec.pass_index:
            self.args += ("--process_index", order["env"]["PACELINE_PROCESS_INDEX"])
            self.args += ("--process_num", order["env"]["PACELINE_PROCESS_NUM"])

    def exec(self) -> None:
        """Replace this process by the program; Python programs go through `run_program` there."""
        program = self.spec.program
        if program.kind == "command":
            command = [program.target, *self.args]
        else:
            python = (sys.executable, *self.spec.python[1:]) if self.spec.setup else self.spec.python
            command = [*python, ENTRY, "rank", self.order["error"], program.kind, program.target, *self.args]
        _exec(command)

    def run(self) -> None:
        """Run the program in this process."""
        _reseed()
        if self.threads:  # here, since it starts them
            cast("Any", sys.modules["torch"]).set_num_threads(self.threads)
        program = self.spec.program
        options = list(self.spec.python)
        sys.orig_argv = [*options, *(["-m"] if program.kind == "module" else []), program.target, *self.args]
        run_program(Program(program.kind, program.target, self.args), Path(self.order["error"]))


def _exec(command: list[str]) -> None:
    """Replace this process by a program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would pass that on
    if _is_of_windows(command[0]):
        file = command[0]
        why = f"its lines end with CRLF, as Windows writes them; sed -i 's/\\r$//' {file} makes them Linux's"
        print(f"paceline: cannot start {file}: {why}", file=sys.stderr, flush=True)
        os._exit(127)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"paceline: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _is_of_windows(program: str) -> bool:
    """Whether the first line of a script names an interpreter and a carriage return, which Linux takes for its name."""
    with contextlib.suppress(OSError), open(program, "rb") as file:
        first = file.readline(256)
        return first.startswith(b"#!") and first.endswith(b"\r\n")
    return False


def _redirect(out: str, err: str, stdin: str) -> None:
    """Connect stdin to a file, or a terminal that does not become this session's; stdout and stderr to log files."""
    for descriptor, path, flags in (
        (0, stdin, os.O_RDONLY | os.O_NOCTTY),
        (1, out, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
        (2, err, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)


def _bind(spec: NodeSpec, local_rank: int) -> None:
    """Bind this rank to the cores near its GPU; if that is not possible, print why, and continue with all cores."""
    from paceline.node.machine import numa  # few jobs need it

    assert spec.numa_binding is not None
    try:
        numa.bind(spec.numa_binding, local_rank, spec.nproc, spec.devices)
    except numa.CannotBind as error:
        print(f"paceline: --numa-binding {spec.numa_binding}: {error}; it is not bound", file=sys.stderr, flush=True)


def _reseed() -> None:
    """Give this rank its own random numbers. Python's generator reseeds itself after a fork, these do not."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch_random = sys.modules.get("torch.random")
    if torch_random is not None and torch_random.initial_seed() != _TORCH_FIXED_SEED:
        torch_random.default_generator.seed()


def _fewer_threads() -> int:
    """The threads that this job's torch is to use if it was imported with more, 0 else; numpy uses as many from now on.

    numpy's OpenBLAS starts its threads when it is told, and ends them before the next fork.
    """
    torch: Any = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if torch is None or not wanted.isdecimal() or not 0 < int(wanted) < torch.get_num_threads():
        return 0
    import ctypes  # torch has imported it

    with open("/proc/self/maps") as maps:
        libraries = {line[line.index("/") : -1] for line in maps if "openblas" in line}
    for library in map(ctypes.CDLL, libraries):
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(int(wanted))
    return int(wanted)


def import_shared(name: str) -> None:
    """Import a module that the ranks share, and what it would import at the end of each of them."""
    importlib.import_module(name)
    if name == "torch._dynamo":
        with contextlib.suppress(ImportError):
            importlib.import_module("tabulate")  # for its table of the times of compilation


def unsafe_to_fork() -> str:
    """Why this process must not be forked, or "" when it may.

    Threads do not survive a fork. Thread pools that handle this (numpy's OpenBLAS) stop their threads before a fork. So
    the threads that are left after a trial fork belong to owners that do not handle it.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "an import initialised CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:  # torch.cuda.is_available() starts the driver, of which `is_initialized` says nothing: a fork knows
        os._exit(getattr(cuda, "_is_in_bad_fork", bool)())
    if os.waitpid(pid, 0)[1]:
        return "an import initialised CUDA, as torch.cuda.is_available() does"
    threads = len(os.listdir("/proc/self/task"))
    return f"the imports left {threads - 1} threads running" if threads > 1 else ""


def main(channel_fd: int, spec_path: str, is_warm: bool = False) -> None:
    """Run the fork server of the agent at the other end of `channel_fd`; in a forked rank, run the program."""
    agent = os.getppid()
    processes.die_with(agent)  # while there are no ranks there is nothing to clean up
    processes.adopt_orphans()
    for descriptor in os.listdir("/proc/self/fd"):  # what the server inherited is not for other programs
        if int(descriptor) > 2:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.set_inheritable(int(descriptor), False)
    spec = NodeSpec.load(Path(spec_path))
    processes.set_title(f"paceline: fork server of job {spec.job}")
    if spec.program.kind == "script" and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, script_folder(spec.program.target))
    elif spec.program.kind == "module" and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    volumes.enter(spec.mounts)
    folder.protect(spec, os.path.dirname(os.path.abspath(spec_path)))
    server = ForkServer(spec, Channel(socket.socket(fileno=channel_fd)), _fewer_threads() if is_warm else 0)
    server.import_framework()
    processes.outlive_parent()
    forked = server.serve()
    if forked is None:
        os._exit(0)  # finalization of a framework takes time, and nothing is left to be done
    del server
    forked.run()
