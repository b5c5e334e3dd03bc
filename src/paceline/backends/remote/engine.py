"""One thread with an event loop, in which all connections of this process are made, read and ended."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Coroutine

    from .login import Login

_CLOSING = 5.0  # seconds
_MOST_WORKERS = 8
_SOONEST, _LATEST = 0.001, 0.05  # seconds between two looks at whether a process has ended

_T = TypeVar("_T")


class _Engine:
    """The thread; it begins when it is needed, and nobody waits for its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.workers = _Workers()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:  # a handler of a signal, for which there is one, waits for no lock
            with self._lock:
                if self._loop is None:
                    loop = asyncio.new_event_loop()
                    self._thread = threading.Thread(target=loop.run_forever, daemon=True)
                    try:
                        self._thread.start()
                    except BaseException:  # there can be no more threads
                        loop.close()
                        raise
                    self._loop = loop
        return self._loop

    def owns(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether a loop is this process's own, and not that of the process of which it is a fork."""
        return loop is self._loop

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def forget(self) -> None:
        """Begin another one when it is needed: a fork has no other thread than the one that forked."""
        self.__init__()  # type: ignore[misc]  # its lock may be held, and nobody releases it here


class _Workers:
    """Threads for what may take long; those of an executor end before the functions of `atexit`."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def do(self, work: Callable[[], None]) -> None:
        """Do this as soon as a thread is free; only for the engine's thread."""
        self._work.put(work)
        if self._idle.acquire(blocking=False) or self._count == _MOST_WORKERS:
            return
        try:
            threading.Thread(target=self._run, daemon=True).start()
            self._count += 1
        except RuntimeError:  # there can be no more, as while the interpreter ends
            if not self._count:
                self._work.get()()

    def _run(self) -> None:
        while True:
            self._work.get()()
            self._idle.release()


_engine = _Engine()
os.register_at_fork(after_in_child=_engine.forget)


def run(work: Coroutine[Any, Any, _T], of: asyncio.AbstractEventLoop | None = None) -> _T:
    """What a coroutine returns; another thread waits for it. If that is interrupted, so is the coroutine.

    `of` is the loop of the connections that it uses, if it uses older ones.
    """
    try:
        loop = _engine.loop
        if of is not None and not _engine.owns(of):
            raise RuntimeError("this connection to a host is of another process, of which this one is a fork")
    except BaseException:
        work.close()  # else Python says that nobody has waited for it
        raise
    is_over, tasks = threading.Event(), list[asyncio.Task[_T]]()

    def begin() -> None:
        tasks.append(loop.create_task(work))
        tasks[0].add_done_callback(ended)

    def cancel() -> None:  # it has begun by then
        tasks[0].cancel()

    def ended(task: asyncio.Task[_T]) -> None:
        if not task.cancelled():
            task.exception()  # else asyncio says that nobody has asked for it, where the wait was interrupted
        is_over.set()

    loop.call_soon_threadsafe(begin)
    try:
        is_over.wait()
    except BaseException:  # a Ctrl-C: what it has opened is closed before this process goes on
        loop.call_soon_threadsafe(cancel)
        is_over.wait(_CLOSING)
        raise
    return tasks[0].result()


def close(work: Coroutine[Any, Any, None], of: asyncio.AbstractEventLoop) -> None:
    """Run a coroutine that closes connections of a loop.

    The garbage collector may do so anywhere: in the engine's own thread nobody waits, and in a fork nothing is done.
    """
    if not _engine.owns(of):
        work.close()
    elif _engine.is_this_thread:
        task = of.create_task(work)
        _closing.add(task)
        task.add_done_callback(_closing.discard)
    else:
        run(work)


_closing: set[asyncio.Task[None]] = set()  # a loop itself does not keep its tasks


def call(do: Callable[..., None], *arguments: Any) -> None:
    """Call a function there soon; also from a handler of a signal. Those of one thread are called in their order."""
    _engine.loop.call_soon_threadsafe(do, *arguments)


def own_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process's connections."""
    return _engine.loop


async def in_thread(do: Callable[..., _T], *arguments: Any) -> _T:
    """What a function returns that may take long, as it waits for a disk or for the start of a process."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[_T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not found.done():  # it may have been cancelled
            set_it(value)

    def work() -> None:
        try:
            value = do(*arguments)
        except BaseException as error:
            loop.call_soon_threadsafe(settle, found.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, found.set_result, value)

    _engine.workers.do(work)
    return await found


async def status_of(process: subprocess.Popen[bytes] | Login, seconds: float) -> int | None:
    """The exit status of a process when it has ended; None if it has not within so many seconds."""
    until, pause = time.monotonic() + seconds, _SOONEST
    while (status := process.poll()) is None and time.monotonic() < until:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LATEST)
    return status
