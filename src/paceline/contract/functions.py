"""A function that other processes call, and what comes of it, as bytes.

By cloudpickle where that is installed, which takes functions and classes of any place; else by pickle.
"""

from __future__ import annotations

import pickle
import traceback
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

CALL, PACKAGES = "call.pkl", "packages"  # in the code of a job that is a function: the function, and what it needs


class RankFailed(RuntimeError):
    """A rank ended without an exception that could be passed on: it was killed, or exited by itself."""

    __module__ = "paceline"  # where users find it


class _RemoteTraceback(Exception):
    """Shows, as the cause of a rank's exception, where in the rank it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class Outcome(NamedTuple):
    """What a function has returned or raised on a rank."""

    is_good: bool  # whether it has returned
    value: Any  # what it has returned, or the exception
    text: str = ""  # the traceback of the exception; "" if there is none

    def to_bytes(self) -> bytes:
        """To send it; if it cannot be pickled, it becomes the error that says so.

        multiprocessing would pass tensors as shared memory, which ends with this process.
        """
        try:
            return _dumped(tuple(self))
        except Exception as error:
            why = f"its result cannot be pickled: {type(error).__name__}: {error}"
            return pickle.dumps((False, RankFailed(why), self.text or traceback.format_exc()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Outcome:
        """What `to_bytes` has made; unpickling it may run code."""
        return cls(*pickle.loads(data))

    def error_of(self, rank: int) -> Exception:
        """The exception, with the traceback of the rank as its cause."""
        error: Exception = self.value
        if self.text:
            error.__cause__ = _RemoteTraceback(f"rank {rank}:\n{self.text}")
        return error


def raised(error: Exception) -> Outcome:
    """The outcome of a function that has raised this; a description, if it cannot be pickled.

    Its traceback begins in the function, below whoever has caught it.
    """
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        pickle.loads(_dumped(error))
    except Exception:
        return Outcome(False, RankFailed(f"{type(error).__name__}: {error}"), text)
    return Outcome(False, error, text)


def dumps(value: object) -> bytes:
    """Pickle an object; by cloudpickle where that is installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return pickle.dumps(value)
    return bytes(cloudpickle.dumps(value))


def _dumped(value: object) -> bytes:
    """Pickle what a rank returns: by name where the one who waits for it finds it by that name."""
    try:
        return pickle.dumps(value)
    except Exception:
        return dumps(value)


class Pickled:
    """A function without arguments that any process can unpickle and call.

    Attributes:
        data: the function, pickled.
    """

    def __init__(self, function: Callable[[], Any], who: str) -> None:
        try:
            self.data = dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            hint = "make what cannot be pickled inside of it"
            if find_spec("cloudpickle") is None:
                hint = "define it at the top level of a module, or install cloudpickle"
            raise pickle.PicklingError(
                f"{who}: the function or its arguments cannot be pickled: {error}; {hint}"
            ) from error

    def __call__(self) -> Any:
        """Unpickle and call it."""
        return pickle.loads(self.data)()
