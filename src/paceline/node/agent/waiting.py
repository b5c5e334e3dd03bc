"""A job that asks for devices waits for its turn in the queue of its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node.devicequeue.policy import impossible
from paceline.node.devicequeue.ticket import Ticket
from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.node.eventloop.loop import Loop
    from paceline.node.journal.status import Waiting
    from paceline.node.spec import Request


class DeviceClaim:
    """A job's claim on devices: waits for its turn, and then holds the devices until `release`."""

    def __init__(self, loop: Loop, request: Request, job: str) -> None:
        """Nothing is queued yet.

        Args:
            loop: event loop of the agent.
            request: the devices that the job requests.
            job: its name.
        """
        self._loop = loop
        self._request = request
        self._ticket = Ticket(request, job)

    @property
    def fd(self) -> int:
        """The descriptor that holds the devices: they stay taken until every process that inherits it has ended."""
        return self._ticket.fd

    def wait(self, report: Callable[[Waiting], None], is_over: Callable[[], bool]) -> tuple[str, ...] | None:
        """Wait for the devices; returns their names, or None if `is_over()` holds before.

        Args:
            report: called with what the job waits for, when that changes.
            is_over: whether the job has ended.

        Raises:
            Refused: there will never be such devices, or the queue cannot be used.
        """
        if why := impossible(self._request):
            raise Refused(f"the job can never start: {why}; correct --devices")
        try:
            return self._wait(report, is_over)
        except OSError as error:
            where = error.filename or self._request.folder
            why = f"cannot queue for devices: {where}: {error.strerror}; set PACELINE_HOME to another folder"
            raise Refused(why) from error
        finally:
            self._ticket.watch.close()

    def _wait(self, report: Callable[[Waiting], None], is_over: Callable[[], bool]) -> tuple[str, ...] | None:
        ticket, reported = self._ticket, None
        while not is_over():
            devices = ticket.look()
            if devices is not None:
                return devices
            waiting: Waiting = {"need": self._request.need, "ahead": ticket.ahead, "problem": ticket.problem}
            if waiting != reported:
                report(waiting)
                reported = waiting
            self._await_change(is_over)
        return None

    def _await_change(self, is_over: Callable[[], bool]) -> None:
        """Wait until the queue changes, it is time to look anyway, or the job has ended."""
        changes: list[bool] = []
        watch = self._ticket.watch
        if watch.fd >= 0:
            self._loop.watch(watch.fd, lambda: changes.append(True))
        self._loop.run_until(lambda: bool(changes) or is_over(), self._ticket.patience)
        self._loop.forget(watch.fd)

    def release(self) -> None:
        """Leave the queue, or give the devices back."""
        self._ticket.release()
