"""Forks a process for each script that `scripts` asks for; has imported torch for them."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import types
from typing import Any

_IMPORTS = ("torch", "torch._dynamo", "torch.utils.data", "paceline.train.run")
_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each order, and say how it ends. Returns in the process with its order; here at the end."""
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write)
    ends: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if wakeup in ready:
                os.read(wakeup, 4096)
                while ends:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if pid == 0:
                        break
                    with ends.pop(pid) as ended:
                        ended.send(str(status).encode())
            if orders.fileno() not in ready:
                continue
            text, passed, _, _ = socket.recv_fds(orders, 1 << 18, 3)
            if not text:
                return None
            out, err, end = passed
            pid = os.fork()
            ends[pid] = socket.socket(fileno=end)
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.dup2(out, 1)
                os.dup2(err, 2)
                for each in (out, err, wakeup, wakeup_write):
                    os.close(each)
                for ended in ends.values():
                    ended.close()
                return json.loads(text)
            ends[pid].send(str(pid).encode())
            os.close(out)
            os.close(err)


def _show_environment() -> None:
    """Let /proc have the variables of this process: where they are looked for, those of the server would be found."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = b"".join(b"%b=%b\0" % pair for pair in os.environb.items())
    assert len(block) < end - start
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def become(order: dict[str, Any]) -> None:
    """Be `python script.py`."""
    if order["session"]:
        os.setsid()
    if order["host"]:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_HOST_NAME) or libc.sethostname(order["host"].encode(), len(order["host"])):
            raise OSError(ctypes.get_errno(), "cannot set a host name")
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["env"])
    _show_environment()
    sys.argv = order["line"]
    sys.orig_argv = [sys.executable, *order["line"]]
    path = os.path.abspath(sys.argv[0])
    sys.path[0] = os.path.dirname(path)
    sys.path[1:1] = filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    try:
        with open(path, "rb") as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), main.__dict__)
    except Exception as error:
        error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    for name in _IMPORTS:
        importlib.import_module(name)
    tempfile.tempdir = None  # torch has asked for it, and the script may set TMPDIR
    gc.collect()
    gc.freeze()
    orders.send(b".")
    with orders:
        order = serve(orders)
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
