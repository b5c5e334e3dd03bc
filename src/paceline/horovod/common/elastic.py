"""What is kept of a training, and brought back after a failure."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .exceptions import HorovodInternalError, HostsUpdatedInterrupt

T = TypeVar("T")
_RESTART = 4  # in what happened to the hosts: the processes end, and others go on


class HostUpdateResult:
    """What has happened to the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """What all ranks must have in common when they go on.

    Args:
        bcast_object: gives all ranks the object of rank 0.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        # A signal handler may put something in while it is read.
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._restarts = False

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Have functions called after the ranks have changed: to scale the learning rate, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have come or gone; the next `check_host_updates` says so on all ranks."""
        self._host_messages.put((timestamp, update_res))

    def on_restart(self, timestamp: float) -> None:
        """The processes are to end; the next `check_host_updates` says so on all ranks, and `elastic.run` saves."""
        self._host_messages.put((timestamp, HostUpdateResult.mixed | _RESTART))

    def commit(self) -> None:
        """Save the state, and check whether the hosts have changed.

        Raises:
            HostsUpdatedInterrupt: they have.
            HorovodInternalError: a rank is gone.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise on all ranks if the hosts have changed. A collective of all ranks.

        Raises:
            HostsUpdatedInterrupt: they have.
        """
        latest = before = self._last_updated_timestamp
        what = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                what |= update
        before, self._last_updated_timestamp, what = self._bcast_object((before, latest, what))
        if self._last_updated_timestamp > before:
            self._restarts = bool(what & _RESTART)
            raise HostsUpdatedInterrupt(what == HostUpdateResult.removed)

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new ranks."""


class ObjectState(State):
    """A state of plain objects.

    Args:
        bcast_object: gives all ranks the object of rank 0.
        kwargs: names and objects; they become attributes.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """Save the objects."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Return to the objects that were saved last."""
        self._set_attrs()

    def sync(self) -> None:
        """Give all ranks the objects of rank 0."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _committed(self) -> Any:
        """What was saved last, to be pickled."""
        return self._saved_state

    def _take_committed(self, saved: Any) -> None:
        """Return to what `_committed` has returned, in this process or an earlier one."""
        self._saved_state = saved
        self.restore()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


AbstractObjectState = ObjectState  # the name in Horovod's own sources since 0.28


def run_fn(
    func: Callable[..., T],
    reset: Callable[[], None],
    resume: Callable[[Any], None] | None = None,
    restart: Callable[[Any], None] | None = None,
) -> Callable[..., T]:
    """A function that calls `func(state, …)` until it returns.

    Args:
        resume: brings back what an earlier process of this job has committed.
        restart: saves the state and ends this process; called where others are to go on.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> T:
        if resume is not None:
            resume(state)
        is_reset = skips_sync = False
        while True:
            try:
                if is_reset:
                    reset()
                    state.on_reset()
                if not skips_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                skips_sync = False
            except HostsUpdatedInterrupt as interrupt:
                if restart is not None and getattr(state, "_restarts", False):
                    restart(state)
                skips_sync = interrupt.skip_sync
            is_reset = True

    return wrapper
