"""`paceline.launch(fn, …)`: start ranks from within a Python program, and return their results."""

from __future__ import annotations

import ctypes
import json
import multiprocessing as mp
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paceline.contract import CONTRACTS, ERROR_FILE, OWN_CONTRACT, RANK_KEY, Placement, thread_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

T = TypeVar("T")
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL for the peers of a failed rank
_CAUSE = 30.0  # seconds to wait for the rank that failed first, where another one has already failed because of it
_PR_SET_PDEATHSIG = 1


class RankFailed(RuntimeError):
    """A rank ended without an exception that could be passed on: it was killed, or exited by itself."""

    __module__ = "paceline"  # where users find it


class _RemoteTraceback(Exception):
    """Shows, as the cause of a rank's exception, where in the rank it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def launch(
    fn: Callable[..., T], args: Sequence[Any] = (), nproc: int = 1, method: Literal["spawn", "fork"] = "spawn"
) -> list[T]:
    """Call `fn(*args)` on `nproc` ranks of this machine; each finds the others with `paceline.init()`.

    Args:
        fn: called on each rank. With "spawn", it must be picklable: defined at the top level of a module.
        args: arguments of `fn`, the same on all ranks.
        nproc: number of ranks.
        method: "spawn" starts fresh interpreters; "fork" copies this process, which must have neither threads nor an
            initialised GPU.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: the one that the first failing rank raised, with its own traceback as the cause; the other ranks
            are ended first.
        RankFailed: the first failing rank was killed or exited.
        ValueError: `nproc` is less than 1.
    """
    if nproc < 1:
        raise ValueError(f"nproc={nproc} starts no rank; take 1 or more")
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
            process = context.Process(target=_rank, args=(partial(fn, *args), placement, sender, os.getpid(), own))
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
                good, value, text = pickle.loads(connection.recv_bytes())
                kind = type(value).__name__
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode or 0
                good, (value, text, kind) = False, _ended(rank, code, reports / str(rank))
            if good:
                returned[rank] = value
                continue
            if text:
                value.__cause__ = _RemoteTraceback(f"rank {rank}:\n{text}")
            if kind != "PeerLost":
                raise value
            if lost is None:
                lost, deadline = value, time.monotonic() + _CAUSE
    if lost is not None:
        raise lost
    return [returned[rank] for rank in range(len(processes))]


def _ended(rank: int, code: int, report: Path) -> tuple[Exception, str, str]:
    """What to raise for a rank that has ended without a result; if it has recorded one, its traceback and its error."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    try:
        recorded = json.loads(report.read_text())
    except FileNotFoundError:
        return RankFailed(f"rank {rank} {how}"), "", ""
    error = RankFailed(f"rank {rank} {how}: {recorded['type']}: {recorded['message']}")
    return error, recorded["traceback"], recorded["type"]


def _rank(work: Callable[[], Any], placement: Placement, sender: Connection, parent: int, own: dict[str, str]) -> None:
    """What each process does.

    Args:
        own: variables for this rank beside those of the placement.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ranks end with the process that launched them
    if os.getppid() != parent:
        os._exit(1)
    threads = thread_count(len(os.sched_getaffinity(0)), placement.local_world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.update(CONTRACTS["torch"].write(placement))
    os.environ.update({**OWN_CONTRACT.write(placement), **own})
    if isinstance(mp.current_process(), mp.get_context("fork").Process) and "torch" in sys.modules:
        # A fork has none of its parent's compute threads, and torch would wait for them.
        sys.modules["torch"].set_num_threads(1)
    try:
        value = work()
        _leave_runs(None)
        sender.send_bytes(_packed(True, value, ""))
    except BaseException as error:
        if isinstance(error, Exception):  # before the other ranks fail because of it
            sender.send_bytes(_packed(False, _portable(error), traceback.format_exc()))
        _leave_runs(error)
        if not isinstance(error, Exception):
            raise


def _leave_runs(error: BaseException | None) -> None:
    if "paceline.train.run" in sys.modules:
        sys.modules["paceline.train.run"].leave_all(error)


def _packed(good: bool, value: Any, text: str) -> bytes:
    """Pickle a result. multiprocessing would pass tensors as shared memory, which ends with this process."""
    try:
        return pickle.dumps((good, value, text))
    except Exception as error:
        why = f"its result cannot be pickled: {type(error).__name__}: {error}"
        return pickle.dumps((False, RankFailed(why), text or traceback.format_exc()))


def _portable(error: Exception) -> Exception:
    """The exception, or a description of it if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankFailed(f"{type(error).__name__}: {error}")
    return error
