"""Before C++ ends the process: gloo throws in a thread of its own where ranks exchange different sizes."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_HANDLER = ctypes.CFUNCTYPE(None)


class BeforeTerminate:
    """Calls a function in the thread whose C++ exception nobody catches, before what is usual: a line and SIGABRT.

    The thread has no lock of Python's, nor of the allocator's, and Python runs as ever meanwhile. Without libstdc++
    nothing is called.
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
        """Give the place back; calling it again does nothing."""
        if self._set is not None:
            self._set(self._old)
            self._set = None
