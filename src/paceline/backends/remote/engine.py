"""One thread with an event loop, in which all connections of this process are made, read and ended."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Coroutine

    from .login import Login

_CLOSING = 5.0  # seconds
_SOONEST, _LATEST = 0.001, 0.05  # seconds between two looks at whether a process has ended

_T = TypeVar("_T")


class _Engine:
    """The thread; it begins when it is needed, and nobody waits for its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:  # a handler of a signal, for which there is one, waits for no lock
            with self._lock:
                if self._loop is None:
                    loop = asyncio.new_event_loop()
                    try:
                        threading.Thread(target=loop.run_forever, daemon=True).start()
                    except BaseException:  # there can be no more threads
                        loop.close()
                        raise
                    self._loop = loop
        return self._loop

    def forget(self) -> None:
        """Begin another one when it is needed: a fork has no other thread than the one that forked."""
        self.__init__()  # type: ignore[misc]  # its lock may be held, and nobody releases it here


_engine = _Engine()
os.register_at_fork(after_in_child=_engine.forget)


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """What a coroutine returns; another thread waits for it. If that is interrupted, so is the coroutine."""
    is_over = threading.Event()

    async def works() -> _T:
        try:
            return await work
        finally:
            is_over.set()

    try:
        loop = _engine.loop
    except BaseException:
        work.close()  # else Python says that nobody has waited for it
        raise
    future = asyncio.run_coroutine_threadsafe(works(), loop)
    try:
        return future.result()
    except BaseException:
        if future.cancel():  # a Ctrl-C: what it has opened is closed before this process goes on
            is_over.wait(_CLOSING)
        raise


def call(do: Callable[..., None], *arguments: Any) -> None:
    """Call a function there soon; also from a handler of a signal. Those of one thread are called in their order."""
    _engine.loop.call_soon_threadsafe(do, *arguments)


async def status_of(process: subprocess.Popen[bytes] | Login, seconds: float) -> int | None:
    """The exit status of a process when it has ended; None if it has not within so many seconds."""
    until, pause = time.monotonic() + seconds, _SOONEST
    while (status := process.poll()) is None and time.monotonic() < until:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LATEST)
    return status
