"""Starts, stops and removes the jobs of this machine, whose run directories lie in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Union

from paceline.node import ENTRY, tensorboard
from paceline.node.errors import Refused
from paceline.node.files import write_json
from paceline.node.journal.state import NewerVersion
from paceline.node.machine.containers import is_inside
from paceline.node.readers import Begun
from paceline.node.rundir.directory import SAVED, RunDirectory
from paceline.node.rundir.staging import drop_note, note_of, remove_folder
from paceline.node.signals import HANDLED, RESUME, SUSPEND
from paceline.node.warm import start as warm

from . import records
from .code_folder import link

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn

    from paceline.contract.nodejob import StoredJob
    from paceline.node.rundir.staging import Reopened, Staging
    from paceline.node.spec import NodeSpec

    AgentProcess = Union[subprocess.Popen[bytes], warm.WarmAgent]  # guard of an agent: a child of ours, or of a server


_AT_ONCE = 10.0  # seconds for an agent to end everything at once
_AGENT_COMES = 45.0  # seconds for an agent to record its pid; a busy machine may be slow to start it
_ENDING = 2.0  # seconds for an agent that handles no signals any more to be gone
_PAUSE = 0.02  # seconds between two checks


def write_down(directory: RunDirectory, job: StoredJob, node: NodeSpec) -> None:
    """Write job.json, with the requested job and what is known of it, and spec.json, with this node's part."""
    write_json(directory.job, job.to_json())
    node.save(directory.spec)
    directory.spec.chmod(0o600)


def start_agent(
    staging: Staging | Reopened, python: Sequence[str], env: Mapping[str, str], lifeline: socket.socket | None = None
) -> AgentProcess:
    """Start the agent of a settled job; it holds the job's lock from now on, and outlives this process.

    A warm server starts it, if one fits.
    """
    directory, end = staging.directory, -1 if lifeline is None else lifeline.fileno()
    command = _agent_command(staging, python, end)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # it inherits this, until it can handle them
    try:
        with open(directory.agent_log, "ab") as log:
            descriptors = [staging.lock, log.fileno(), *([] if lifeline is None else [end])]
            agent, why = None, ""
            if not is_inside():  # such a server is outside of this container
                agent, why = warm.start_agent(str(directory.path), env, descriptors, {*before, *HANDLED})
            if agent is not None:
                directory.append({"event": "warm"})
                return agent
            if why:
                directory.append({"event": "cold", "why": why})
            return subprocess.Popen(
                command, pass_fds=[staging.lock, *([] if lifeline is None else [end])], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, cwd="/", env=env,
            )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_agent(staging: Staging | Reopened, python: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process with the agent of a settled job, which holds the job's lock from now on."""
    command = _agent_command(staging, python, -1)
    os.set_inheritable(staging.lock, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # the agent inherits this, until it can handle them
    with open(os.devnull, "rb") as null, open(staging.directory.agent_log, "ab") as log:
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), target)
    os.chdir("/")
    os.execvpe(command[0], command, dict(env))


def _agent_command(staging: Staging | Reopened, python: Sequence[str], lifeline: int) -> list[str]:
    return [*python, ENTRY, "agent", str(staging.directory.path), str(staging.lock), str(lifeline)]


def stop(runs: Sequence[RunDirectory], now: bool) -> None:
    """Ask jobs to stop: cleanly, with their grace, or at once. One that has ended is not changed.

    Those that can be stopped are, also if others cannot.
    """
    asked, refused = _signal(runs, signal.SIGQUIT if now else signal.SIGTERM, "stopped")
    for run in asked:
        records.wake_agent(run.path)
    if now:
        for run in _going(asked, _AT_ONCE):
            records.signal_agent(run.path, (signal.SIGKILL,))  # the kernel ends its ranks with it
        _going(asked, _AT_ONCE)
    _refuse(refused)


def suspend(runs: Sequence[RunDirectory], resumes: bool = False) -> None:
    """Have jobs save and give their devices back, or go on; see `stop`. One that has ended is not changed."""
    _, refused = _signal(runs, RESUME if resumes else SUSPEND, "resumed" if resumes else "suspended")
    _refuse(refused)


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        raise Refused("; ".join(reasons))


def _signal(runs: Sequence[RunDirectory], number: int, done: str) -> tuple[list[RunDirectory], list[str]]:
    """Send a signal to the agents of jobs; returns those that have not ended, and why others did not get it."""
    deadline, remaining = time.monotonic() + _AGENT_COMES, list(runs)
    asked: list[RunDirectory] = []
    refused: list[str] = []
    while remaining:
        starting = []
        for run in remaining:
            try:
                is_sent = _send(run, number, done)
            except Refused as error:
                refused.append(str(error))
                continue
            if is_sent is None:
                starting.append(run)
            elif is_sent:
                asked.append(run)
        if starting and time.monotonic() > deadline:
            refused += (f"the agent of job {run.path.name} does not answer; see {run.agent_log}" for run in starting)
            break
        remaining = starting
        if remaining:
            _wait(remaining[0], _PAUSE)
    return asked, refused


def _send(run: RunDirectory, number: int, done: str) -> bool | None:
    """Send a signal to the agent of a job; returns whether it has one, None if that has not begun yet."""
    name = run.path.name
    with contextlib.suppress(OSError, ValueError):
        try:
            run.load_status()
        except NewerVersion as error:
            raise Refused(f"job {name} cannot be {done} here: {error}") from None
    is_sent = records.signal_agent(run.path, (number,))
    if is_sent is False:
        records.wake_agent(run.path)  # it may have ended while its guard is suspended
        return None if run.is_held else False
    if is_sent is None:
        if _wait(run, _ENDING):
            return False
        raise Refused(f"job {name} was started by an older version of paceline, with which it cannot be {done}")
    return True


def _going(runs: Sequence[RunDirectory], seconds: float) -> list[RunDirectory]:
    """Wait until no process works on these jobs any more, at most this time for all; returns the others."""
    deadline = time.monotonic() + seconds
    return [run for run in runs if not _wait(run, max(_PAUSE, deadline - time.monotonic()))]


def _wait(run: RunDirectory, seconds: float) -> bool:
    """Wait until no process works on a job any more, at most this time; returns whether that is so."""
    try:
        Begun(run.wait_until_free).result(seconds)  # only the kernel wakes it
    except TimeoutError:
        return False
    return True


def remove(path: Path, discard: Callable[[], None]) -> None:
    """Remove a job: first its folder's name, in one step, then its files. If it is gone already, do nothing."""
    run = RunDirectory(path.resolve())
    if not run.is_ours and os.path.lexists(run.path):
        with contextlib.suppress(OSError):
            if path.is_symlink() and os.path.basename(os.readlink(path)) == path.name:  # only the link is paceline's
                path.unlink()
        raise Refused(f"{run.path} was not made by paceline and is not removed; remove it by hand")
    with contextlib.suppress(OSError):
        tensorboard.stop(run.path)
    hidden = run.path.with_name(f".{run.path.name}.deleted.{time.monotonic_ns()}")
    note = note_of(hidden, path.parent)
    try:
        with run.owned(_AT_ONCE):  # so it is still the job that has ended, not a new one of that name
            run.path.rename(hidden)
            if path.is_symlink():
                path.unlink()
            discard()
            if not remove_folder(hidden):
                raise Refused(f"cannot remove all of {hidden}; remove it by hand")
            drop_note(note)
    except BlockingIOError:
        drop_note(note)
        raise Refused(
            f"job {path.name} is in use: it has not ended, or is being copied; see paceline get {path.name}"
        ) from None
    except FileNotFoundError:  # another process has removed it
        drop_note(note)
        with contextlib.suppress(OSError):
            if path.is_symlink():
                path.unlink()
    except OSError as error:
        raise Refused(f"cannot remove {error.filename}: {error.strerror}; remove it by hand") from None


def take_checkpoints(old: Path, new: Path) -> None:
    """Give a job the checkpoints that another one kept in its own run directory, and the note that it had some."""
    from paceline.contract.checkpoint import NAME
    from paceline.contract.folder_lock import LOCK  # the two jobs must not share this file

    def taken(source: str, target: str) -> None:
        # Committed checkpoints never change, so both jobs may have the same files; the script's own files may.
        is_committed = any(NAME.fullmatch(part) for part in Path(source).relative_to(old).parts[:-1])
        (link if is_committed else shutil.copy2)(source, target)

    for folder in old.glob("checkpoints*"):
        shutil.copytree(folder, new / folder.name, copy_function=taken, ignore=shutil.ignore_patterns(LOCK))
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(old / SAVED, new / SAVED)
