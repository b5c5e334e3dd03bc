"""The parent of an agent: it ends what an agent and its fork server leave behind when both are killed together.

Each of the two ends everything when the other one is gone. Processes that ranks have started in sessions of their own
come to this process when both are gone (a subreaper). It does nothing else, and so has no reason to fail: it passes
signals on, keeps the job's lock as long as anything of the job is left, and ends as the agent has ended. The agent dies
with it.
"""

from __future__ import annotations

import os
import resource
import signal

from paceline.node.machine import processes
from paceline.node.signals import HANDLED

_WOKEN_BY = {*HANDLED, signal.SIGCHLD}


def begin(job: str) -> None:
    """Fork: the child goes on as the agent of a job; this process becomes its guard, and does not return."""
    processes.adopt_orphans()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WOKEN_BY)
    guard = os.getpid()
    agent = os.fork()
    processes.set_title(f"paceline: {'guard' if agent else 'agent'} of job {job}")
    if agent == 0:
        processes.die_with(guard)
        os.setsid()  # what is sent to the group of one is not sent to both
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    status = _wait_for(agent)
    _end_others()
    _end_as(status)


def _wait_for(agent: int) -> int:
    """The wait status of the agent, once it has ended; it gets the signals that this process gets."""
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
    """SIGKILL all that is left, until nothing is."""
    try:
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                processes.kill_descendants(os.getpid())
                os.waitpid(-1, 0)
    except ChildProcessError:
        pass


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
