"""The parent of an agent: it ends what an agent and its fork server leave behind when both are killed together.

Each of the two ends everything when the other one is gone. When both are gone, this process becomes the parent of what
is left, also of processes that ranks have started in other sessions (a subreaper). It does little else, so it is
unlikely to fail: it forwards signals, holds the job's lock as long as any process of the job is left, marks when an
agent was killed, and ends with the agent's status. The agent ends if it ends.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from typing import TYPE_CHECKING

from paceline.node.machine import processes
from paceline.node.signals import HANDLED

if TYPE_CHECKING:
    from collections.abc import Callable

_WOKEN_BY = {*HANDLED, signal.SIGCHLD}


def begin(run: str, at_end: Callable[[int], None]) -> None:
    """Fork: the child continues as the agent of a job; this process becomes its guard, and does not return."""
    processes.adopt_orphans()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WOKEN_BY)
    guard = os.getpid()
    agent = os.fork()
    processes.set_title(f"paceline: {'guard' if agent else 'agent'} of job {os.path.basename(run)}")
    if agent == 0:
        processes.die_with(guard)
        os.setsid()  # signals to a process group reach only one of the two
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    status = _wait_for(agent)
    if os.WIFSIGNALED(status):  # it could not record its end: when that was is that of the last change of its files
        with contextlib.suppress(OSError):
            os.utime(os.path.join(run, "agent.log"))
    _end_others()
    at_end(status)
    _end_as(status)


def _wait_for(agent: int) -> int:
    """Wait for the agent, and forward this process's signals to it; returns its wait status."""
    while True:
        number = signal.sigwait(_WOKEN_BY)
        if number != signal.SIGCHLD:
            processes.signal_process(agent, number)
            continue
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)  # the agent is among its children until it is found here
            if pid == agent:
                return status


def _end_others() -> None:
    """SIGKILL all processes that are left, until there are none but those that this user may not signal."""
    guard = os.getpid()
    try:
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if not processes.kill_descendants(guard) and not _has_zombies(guard):
                    return
                os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _has_zombies(guard: int) -> bool:
    """Whether a child has ended and cannot be reaped yet, as some of its threads have not."""
    return any(it.parent == guard and it.state == "Z" for it in processes.Snapshot().processes.values())


def _end_as(status: int) -> None:
    """End as another process did."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
