"""`paceline.launch(fn, …)`: start ranks from within a Python program, and return their results."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import multiprocessing as mp
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paceline.contract import CONTRACTS, ERROR_FILE, OWN_CONTRACT, RANK_KEY, Placement, thread_count
from paceline.contract.functions import Outcome, Pickled, RankFailed, raised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

T = TypeVar("T")
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL for the peers of a failed rank
_CAUSE = 30.0  # seconds to wait for the rank that failed first, where another one has already failed because of it
_PR_SET_PDEATHSIG = 1
_KERNEL = frozenset({"ipykernel", "IPython", "debugpy", "pydevd", "_pydevd_bundle", "tqdm"})  # whose threads may run


def launch(
    fn: Callable[..., T], args: Sequence[Any] = (), nproc: int = 1, method: Literal["spawn", "fork"] | None = None
) -> list[T]:
    """Call `fn(*args)` on `nproc` ranks of this machine; each finds the others with `paceline.init()`.

    Args:
        fn: called on each rank. With "spawn", it must be picklable: defined at the top level of a module; in a notebook
            cloudpickle pickles it, if installed.
        args: arguments of `fn`, the same on all ranks.
        nproc: number of ranks.
        method: "spawn" starts fresh interpreters; "fork" copies this process, which must have neither threads nor an
            initialised GPU. By default "spawn"; in a notebook, and wherever else the program is no file, "fork" if
            nothing speaks against it, else "spawn".

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: the one that the first failing rank raised, with its own traceback as the cause; the other ranks
            are ended first.
        RankFailed: the first failing rank was killed or exited.
        RuntimeError: this process cannot be copied, and `fn` cannot be passed to others.
        ValueError: `nproc` is less than 1.
    """
    if nproc < 1:
        raise ValueError(f"nproc={nproc} starts no rank; take 1 or more")
    method, work = _chosen(partial(fn, *args), method)
    context: Any = mp.get_context(method)
    held = _held_port()
    port = held.getsockname()[1]
    processes: list[BaseProcess] = []
    results: dict[Connection, int] = {}
    key = secrets.token_hex(32)
    reports = tempfile.TemporaryDirectory(prefix="paceline-launch-")  # for ranks that end without a result
    try:
        for rank in range(nproc):
            placement = Placement(
                rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, main_port=port, job="launch"
            )
            receiver, sender = context.Pipe(duplex=False)
            own = {RANK_KEY: key, ERROR_FILE: os.path.join(reports.name, str(rank))}
            process = context.Process(target=_rank, args=(work, placement, sender, os.getpid(), own))
            process.start()
            sender.close()  # so that the receiver gets EOF when the rank is gone
            processes.append(process)
            results[receiver] = rank
        return _collect(processes, results, Path(reports.name))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(_GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        held.close()
        reports.cleanup()


launch.__module__ = "paceline"  # where users find it


def _chosen(
    work: partial[T], method: Literal["spawn", "fork"] | None
) -> tuple[Literal["spawn", "fork"], Callable[[], T]]:
    """How ranks start for this function, and what they call."""
    if hasattr(sys.modules["__main__"], "__file__"):
        return method or "spawn", work
    why = against_fork() if method is None else None
    if why is None and method != "spawn":
        return "fork", work
    if find_spec("cloudpickle") is not None:
        return "spawn", Pickled(work, "paceline.launch")
    if getattr(work.func, "__module__", "__main__") != "__main__":
        return "spawn", work
    if why is None:
        raise RuntimeError(
            'paceline.launch: with method="spawn" the function of a notebook goes to its ranks by cloudpickle; '
            "install that, put the function into a module, or leave out method="
        )
    raise RuntimeError(
        f"paceline.launch: ranks cannot be copies of this process, because {why}; restart the kernel and launch before "
        "that, install cloudpickle, or put the function into a module"
    )


def against_fork() -> str | None:
    """Why a copy of this process might hang or fail; None if it works.

    Threads are missing in a copy, and what they have locked stays locked. Those of a notebook's kernel do not matter
    there. Nor do compute threads of OpenMP and BLAS, which have the name of the process: a rank starts its own.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has used a GPU"
    known = set()
    for thread in threading.enumerate():
        known.add(thread.native_id)
        homes = {type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None) or ""}
        if thread is not threading.current_thread() and not any(it.split(".")[0] in _KERNEL for it in homes):
            return f"its thread {thread.name!r} runs"
    own = Path("/proc/self/comm").read_text()
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            name = (folder / "comm").read_text()
            if int(folder.name) not in known and name != own and not name.startswith("ZMQbg/"):
                return f"a library's thread {name.strip()!r} runs"
    return None


def _held_port() -> socket.socket:
    """A free port, bound by a socket that does not listen: no other process gets it, but rank 0 can share it."""
    held = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _collect(processes: list[BaseProcess], results: dict[Connection, int], reports: Path) -> list[Any]:
    """Receive the results; the first failure ends the waiting.

    A failure that only follows from another rank's may arrive first: then the other one is waited for.
    """
    returned: dict[int, Any] = {}
    waiting = dict(results)
    lost: Exception | None = None
    deadline = 0.0
    while waiting:
        ready = wait(list(waiting), None if lost is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                outcome = Outcome.from_bytes(connection.recv_bytes())
                kind = type(outcome.value).__name__
            except EOFError:
                processes[rank].join()
                outcome, kind = _ended(rank, processes[rank].exitcode or 0, reports / str(rank))
            if outcome.is_good:
                returned[rank] = outcome.value
                continue
            error = outcome.error_of(rank)
            if kind != "PeerLost":
                raise error
            if lost is None:
                lost, deadline = error, time.monotonic() + _CAUSE
    if lost is not None:
        raise lost
    return [returned[rank] for rank in range(len(processes))]


def _ended(rank: int, code: int, report: Path) -> tuple[Outcome, str]:
    """For a rank that has ended without a result: what to raise, and the type of the error that it has recorded."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    try:
        recorded = json.loads(report.read_text())
    except FileNotFoundError:
        return Outcome(False, RankFailed(f"rank {rank} {how}")), ""
    error = RankFailed(f"rank {rank} {how}: {recorded['type']}: {recorded['message']}")
    return Outcome(False, error, recorded["traceback"]), recorded["type"]


def _rank(work: Callable[[], Any], placement: Placement, sender: Connection, parent: int, own: dict[str, str]) -> None:
    """What each process does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ranks end with the process that launched them
    if os.getppid() != parent:
        os._exit(1)
    threads = thread_count(len(os.sched_getaffinity(0)), placement.local_world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.update(CONTRACTS["torch"].write(placement))
    os.environ.update({**OWN_CONTRACT.write(placement), **own})
    if isinstance(mp.current_process(), mp.get_context("fork").Process):
        if "torch" in sys.modules:  # a fork has none of its parent's compute threads, and torch would wait for them
            sys.modules["torch"].set_num_threads(1)
        for name, number in (("stdout", 1), ("stderr", 2)):
            if type(getattr(sys, name)).__module__.startswith("ipykernel"):  # it needs threads, and tears lines
                setattr(sys, name, os.fdopen(number, "w", 1, "utf-8", closefd=False))
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # so that lines of two ranks do not mix
    try:
        value = work()
        _leave_runs(None)
        sender.send_bytes(Outcome(True, value).to_bytes())
    except BaseException as error:
        if isinstance(error, Exception):  # before the other ranks fail because of it
            sender.send_bytes(raised(error).to_bytes())
        _leave_runs(error)
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches the process that waits too, and is shown there
            sys.exit(128 + signal.SIGINT)
        if not isinstance(error, Exception):
            raise


def _leave_runs(error: BaseException | None) -> None:
    if "paceline.train.run" in sys.modules:
        sys.modules["paceline.train.run"].leave_all(error)
