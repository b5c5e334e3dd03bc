"""A hook before C++ ends the process: gloo throws in its own thread if ranks exchange different sizes."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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
