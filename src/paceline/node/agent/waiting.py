"""A job that asks for devices waits for its turn in the queue of its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node.devicequeue.policy import impossible
from paceline.node.devicequeue.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.node.eventloop.loop import Loop
    from paceline.node.journal.status import Waiting
    from paceline.node.spec import Request


class DeviceClaim:
    """A job's claim on devices: waits for its turn, and then holds the devices until `release`."""

    def __init__(
        self,
        loop: Loop,
        request: Request,
        job: str,
        place: int | None,
        *,
        waits: Callable[[Waiting], None],
        granted: Callable[[tuple[str, ...]], None],
        refused: Callable[[str], None],
    ) -> None:
        """Nothing is queued yet; `place` is where the job was in the queue before, None if it is new there."""
        self._loop = loop
        self._request = request
        self._ticket = Ticket(request, job, place)
        self._waits, self._granted, self._refused = waits, granted, refused
        self._reported: Waiting | None = None
        self._looks = 0  # -1 once it does not wait any more
        self._watched = -1

    @property
    def fd(self) -> int:
        """The descriptor that holds the devices: they stay taken until every process that inherits it has ended."""
        return self._ticket.fd

    @property
    def place(self) -> int | None:
        """The job's place in the queue: jobs with a greater one have come later."""
        return self._ticket.place

    def begin(self) -> None:
        """Join the queue; one of the callbacks says what follows."""
        if why := impossible(self._request):
            self._end()
            self._refused(f"the job can never start: {why}; correct --devices")
        else:
            self._look()

    def _look(self) -> None:
        """Take the devices if it is its turn, else look again when the queue changes, or it is time to."""
        if self._looks < 0:
            return
        ticket = self._ticket
        try:
            devices = ticket.look()
        except OSError as error:
            self._end()
            where = error.filename or self._request.folder
            why = f"cannot queue for devices: {where}: {error.strerror}; set PACELINE_HOME to another folder"
            self._refused(why)
            return
        if devices is not None:
            self._end()
            self._granted(devices)
            return
        waiting: Waiting = {"need": self._request.need, "ahead": ticket.ahead, "problem": ticket.problem}
        if waiting != self._reported:
            self._waits(waiting)
            self._reported = waiting
        self._look_again()

    def _look_again(self) -> None:
        self._looks += 1
        number, watch, patience = self._looks, self._ticket.watch, self._ticket.patience
        self._loop.forget(self._watched)
        self._watched = watch.fd  # another one if the queue's folder was replaced
        if watch.fd >= 0:
            self._loop.watch(watch.fd, self._look)
        if patience is not None:
            self._loop.after(patience, lambda: self._look() if number == self._looks else None)

    def _end(self) -> None:
        """Wait no longer."""
        self._looks = -1
        self._loop.forget(self._watched)
        self._ticket.watch.close()

    def release(self) -> None:
        """Leave the queue, or give the devices back."""
        self._end()
        self._ticket.release()
