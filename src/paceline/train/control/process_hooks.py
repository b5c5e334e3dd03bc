"""What a run changes in its process: the handlers of signals, of uncaught exceptions and of exits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from paceline.contract import STOP_SIGNALS

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import TracebackType


class Events(Protocol):
    """What the hooks report."""

    def failed(self, error: BaseException) -> None:
        """An uncaught exception ends the process."""

    def exits(self, code: Any) -> None:
        """The main thread has called `sys.exit`."""

    def terminates(self) -> None:
        """C++ is about to end the process, from any thread."""


class ProcessHooks:
    """Installs the hooks, and restores what was there before."""

    def __init__(self, events: Events, wakeup: socket.socket, *, signals: bool, terminate: bool) -> None:
        self._events, self._wakeup = events, wakeup
        self._handlers: dict[int, Any] = {}
        self._old_wakeup: int | None = None
        if signals and threading.current_thread() is threading.main_thread():
            self._catch_signals()
        self._old_hook, sys.excepthook = sys.excepthook, self._on_exception
        self._old_exit, sys.exit = sys.exit, self._on_exit
        self._terminate = BeforeTerminate(events.terminates) if terminate else None

    def catches(self, number: int) -> bool:
        """Whether a signal is still handled here, not by a handler that the script has set since."""
        return number in self._handlers and signal.getsignal(number) == self._on_signal

    def release(self) -> None:
        """Restore everything, except what other code has replaced since."""
        for number, old in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, old)
        self._handlers.clear()
        if self._old_wakeup is not None:
            current = signal.set_wakeup_fd(-1)
            if current != self._wakeup.fileno():
                signal.set_wakeup_fd(current)
            elif self._old_wakeup != -1:
                signal.set_wakeup_fd(self._old_wakeup)
            self._old_wakeup = None
        if sys.exit == self._on_exit:
            sys.exit = self._old_exit
        if self._terminate is not None:
            self._terminate.release()

    def release_exceptions(self) -> None:
        """Restore the handler of uncaught exceptions."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._old_hook

    def _catch_signals(self) -> None:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._on_signal)
        if self._handlers:
            self._old_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def _on_signal(self, number: int, _: object) -> None:
        """Python's handler: passes the signal on if another library has set its own wakeup descriptor."""
        with contextlib.suppress(OSError):
            self._wakeup.send(bytes([number]))

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._events.failed(error)
        self._old_hook(kind, error, trace)

    def _on_exit(self, code: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self._events.exits(code)
        self._old_exit(code)


def die_by(number: int) -> None:
    """End this process by a signal, whatever handler Python has for it."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)


# -- before C++ ends the process ---------------------------------------------------------------------------------------
# A hook before C++ ends the process: gloo throws in its own thread if ranks exchange different sizes.


_HANDLER = ctypes.CFUNCTYPE(None)


class BeforeTerminate:
    """Calls a function in the thread with an uncaught C++ exception, before C++ prints a line and raises SIGABRT.

    The thread holds neither the GIL nor a lock of the allocator, and Python continues meanwhile. Without libstdc++, the
    function is not called.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._handler = _HANDLER(self._call)  # kept: C++ has its address
        self._old: int | None = None
        self._set = None
        with contextlib.suppress(OSError, AttributeError):
            self._set = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE  # std::set_terminate
            self._set.argtypes, self._set.restype = (ctypes.c_void_p,), ctypes.c_void_p
            self._old = self._set(ctypes.cast(self._handler, ctypes.c_void_p))

    def _call(self) -> None:
        with contextlib.suppress(Exception):
            self._function()
        if self._old:
            _HANDLER(self._old)()

    def release(self) -> None:
        """Restore the previous handler. A second call does nothing."""
        if self._set is not None:
            self._set(self._old)
            self._set = None
