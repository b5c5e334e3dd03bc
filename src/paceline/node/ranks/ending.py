"""The end of a rank that has imported torch: the part of Python's finalization that a script can observe.

Python's own finalization takes torch apart while its communication threads run: a gloo thread that asks for the GIL
meanwhile aborts a rank that was done (torch 2.13: `terminate called without an active exception`), or the process
group waits for it forever. In a forked rank finalization also copies the memory that ranks share (0.2 s of CPU time per
rank). So the modules of torch stay, and everything else is dropped in the order in which Python drops it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import os
import signal
import sys
import threading
import time
import types
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

# Modules that stay: the standard library, and these packages with everything in them. paceline and
# mpi4py are used until the end; torch uses numpy, and its compiler sympy (with mpmath) and tabulate (with wcwidth); the
# garbage collector calls jax, which tensorflow imports.
_STAYS = (
    "paceline", "torch", "functorch", "numpy", "sympy", "mpmath", "tabulate", "wcwidth", "mpi4py", "jax", "jaxlib",
    "tensorflow", "keras",
)  # fmt: skip
_LEAVES_WITHIN = 1.0  # seconds that a daemon thread gets to leave what it runs
_LETS_RUN = 0.001  # seconds
_kept: list[Any] = []  # what is not dropped, although the script has made it


def end(code: int, error_path: Path) -> NoReturn:
    """End this process with exit code `code`, as Python would: threads, atexit functions, objects, files.

    A negative code is the signal that ends it.

    If an atexit function records an error in `error_path`, the exit code is 1: a last checkpoint was not written.

    An open file, archive or data set that a module or an object of the script holds is dropped, and so closed. Daemon
    threads are not waited for.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if code != 0:  # of JAX: it would wait for the other ranks
        atexit.unregister(getattr(sys.modules.get("jax._src.api"), "clean_up", None))  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does first
    _keep_operators()
    atexit._run_exitfuncs()
    if code == 0 and error_path.exists():
        code = 1
    _keep_reducers()
    _drop_everything()
    _close_files()
    ctypes.CDLL(None).fflush(None)
    if mpi and code == 0 and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _keep_operators() -> None:
    """Leave the operators registered that Python code of torch has defined: 30 ms for the compiler's, in each rank."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # nothing public lists them
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", None) == "torch.library":
            finalizer.atexit = False


def _keep_reducers() -> None:
    """Keep what DistributedDataParallel exchanges gradients with until the process is gone.

    It may hold the last reference to a process group, and torch drops it with the interpreter's lock: the group then
    waits for its thread, and that for the lock, where it drops the tensors of the last exchange (torch 2.13).
    """
    ddp = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    if ddp is not None and _has_thread_of_a_group():
        found = (it for it in gc.get_objects() if issubclass(type(it), ddp))
        _kept.extend(it.__dict__.get("reducer") for it in found)


def _has_thread_of_a_group() -> bool:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm", "rb") as file:
            if file.read().startswith((b"pt_gloo", b"pt_nccl")):
                return True
    return False


def _drop_everything() -> None:
    """Drop the modules of the script and of the packages that it has imported, with all that they hold.

    The steps are those of CPython (`finalize_modules` in pylifecycle.c). First the modules are forgotten, so that the
    garbage collector finds most of their objects, and calls `__del__` while the globals that it uses are still there.
    Then the modules that something else holds are emptied.
    """
    _stop_daemon_threads()
    sys.stdout, sys.stderr, sys.stdin = sys.__stdout__, sys.__stderr__, sys.__stdin__
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    modules = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not _stays(name):
            modules.append(weakref.ref(module))
            sys.modules[name] = None  # type: ignore[assignment]  # as Python does: an import of it fails from now on
    del module
    gc.collect()
    for reference in reversed(modules):
        if (left := reference()) is not None:
            _empty(left.__dict__)
    del left
    for namespace in _namespaces_of_other_threads():
        _empty(namespace)
    sys.excepthook, sys.displayhook = sys.__excepthook__, sys.__displayhook__
    gc.collect()


def _stays(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in ("__main__", "__mp_main__") and (top in _STAYS or top in _standard())


@functools.lru_cache(maxsize=1)
def _standard() -> frozenset[str]:
    """The top-level modules of the standard library."""
    names: frozenset[str] | None = getattr(sys, "stdlib_module_names", None)  # from Python 3.10 on
    if names is not None:
        return names
    folder, modules = os.path.dirname(os.__file__) + os.sep, sys.modules.items()
    files = {name: getattr(module, "__file__", None) or "" for name, module in modules if "." not in name}
    return frozenset(
        name for name, file in files.items() if file.startswith(folder) and "-packages" not in file
    ) | frozenset(sys.builtin_module_names)


def _empty(namespace: dict[str, Any]) -> None:
    """Drop what a module holds: first the names with one underscore, then the others, as Python does."""
    for is_first in (True, False):
        for name in list(namespace):
            is_private = name.startswith("_") and not name.startswith("__")
            if name != "__builtins__" and is_private == is_first:
                namespace[name] = None


def _stop_daemon_threads() -> None:
    """Let daemon threads of Python end, silently, as soon as they run again: Python would not let them run at all.

    Threads that C++ has started are left alone: an exception there would end the process.
    """
    threading.excepthook = lambda _: None
    told = []
    for thread in threading.enumerate():
        is_ours = thread is not threading.current_thread() and not isinstance(thread, threading._DummyThread)
        if is_ours and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            told.append(thread)
    until = time.monotonic() + _LEAVES_WITHIN
    while told and time.monotonic() < until:
        time.sleep(_LETS_RUN)  # those that only wait for the interpreter lock get it now, and leave their globals
        told = [thread for thread in told if thread.is_alive() and _runs(thread)]


def _runs(thread: threading.Thread) -> bool:
    """Whether a thread runs, or waits for a core only, as far as that is known."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread.native_id}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"R"
    return False


def _namespaces_of_other_threads() -> list[dict[str, Any]]:
    """The globals that daemon threads keep alive although their modules are gone.

    Python leaves these, and loses what is in an open file there.
    """
    me, found = threading.get_ident(), {}
    for ident, innermost in sys._current_frames().items():
        frame: types.FrameType | None = innermost
        while ident != me and frame is not None:
            if not _stays(str(frame.f_globals.get("__name__"))):
                found[id(frame.f_globals)] = frame.f_globals
            frame = frame.f_back
    return list(found.values())


def _close_files() -> None:
    """Flush what still holds an open file after all, for example a module that stays."""
    for thing in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(thing), (io.TextIOWrapper, io.BufferedWriter)):
            with contextlib.suppress(Exception):  # it is closed, or has given its file to another one (`detach`)
                thing.flush()
