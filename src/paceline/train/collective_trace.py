"""Where the ranks are among the collectives of a script, and whether they can ever come together; pure state.

Collectives are numbered on each rank. In a correct script, the same number means the same collective on all ranks. If
the sequences of ranks differ, and all ranks wait, they wait forever. A rank that is only slow has the same sequence as
the others, but a shorter one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import CodeType, FrameType


class Place(TypedDict):
    """Where a rank is among its collectives."""

    number: int  # of the collective entered last, counted from 1
    seconds: float | None  # how long it has been inside of it; None if it is in none
    failed: bool  # whether it has failed for a reason that is not known yet
    line: str  # where its main thread is now
    recent: list[Entered]  # of each collective entered last its name, its line, and a checksum of all names until then


Entered = tuple[str, str, int]
_REMEMBERED = 100  # collectives that a rank can name afterwards
SETTLED = 2.0  # seconds in a collective, after which it is not expected to end at any moment
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = (_PACKAGE, sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")
_NAMES = {  # of our own methods, as the script knows them
    "__iter__": "the next batch",
    "_evaluate": "the next batch",
    "__exit__": "close",
    "over_epochs": "epochs",
    "over": "steps",
}
_ours: dict[str, bool | None] = {}  # whether a file is this package's; None if its frames may lie between ours
_VERBS = {"the next batch": "asked for"}


class Trace:
    """The collectives that this rank has entered."""

    def __init__(self) -> None:
        self.number = 0  # of the last one, counted from 1
        self.failed = False  # whether it has failed for a reason that is not known yet
        self._recent: deque[tuple[str, CodeType | None, int, int]] = deque(maxlen=_REMEMBERED)
        self._depth = 0
        self._since = 0.0
        self._sum = 0

    def enter(self, name: str = "") -> None:
        """Note a collective, under the name of the method that the script has called, if none is given."""
        called, code, instruction = _caller()
        name = name or called
        self.number += 1
        self._sum = zlib.crc32(name.encode(), self._sum)
        self._recent.append((name, code, instruction, self._sum))
        self._depth += 1
        self._since = time.monotonic()

    def leave(self) -> None:
        self._since = time.monotonic()
        self._depth -= 1
        self.failed = False

    @property
    def seconds(self) -> float | None:
        """How long this rank has been inside of the collective entered last; None if it is in none."""
        return time.monotonic() - self._since if self._depth > 0 else None

    def last(self) -> str:
        """The last action of this rank, such as `entered barrier (train.py:31)`; "" if there is none."""
        return _did(self._recent[-1][0], _line(*self._recent[-1][1:3])) if self._recent else ""

    def place(self, line: str) -> Place:
        """Where this rank is, for the other ranks."""
        recent = [(name, _line(code, instruction), total) for name, code, instruction, total in self._recent]
        return {
            "number": self.number, "seconds": self.seconds, "failed": self.failed, "line": line, "recent": recent,
        }  # fmt: skip


def mismatch(places: Mapping[int, Place], departed: Mapping[int, Place]) -> str:
    """Why the ranks can never come together; empty as long as they may."""
    settled = all(place["seconds"] is not None and place["seconds"] >= SETTLED for place in places.values())
    if not settled and not any(place["failed"] for place in places.values()):
        return ""
    everybody = {**places, **departed}
    first = min(places)
    for rank in sorted(everybody):
        if (found := difference(everybody[first], everybody[rank])) is not None:
            return f"rank {first} {found[0]} while rank {rank} {found[1]}"
    return ""


def difference(one: Place, other: Place) -> tuple[str, str] | None:
    """The first collective in which two ranks differ, as each rank has it; None if there is none yet."""
    common = min(one["number"], other["number"])
    ours, others = _at(one, common), _at(other, common)
    if ours is None or others is None or ours[2] == others[2]:
        return None
    for number in range(common - _REMEMBERED, common + 1):
        ours, others = _at(one, number), _at(other, number)
        if ours is not None and others is not None and ours[0] != others[0]:
            return _came_to(one, other, number), _came_to(other, one, number)
    return _did(*one["recent"][-1][:2]), _did(
        *other["recent"][-1][:2]
    )  # they have differed for longer than they remember


def _came_to(one: Place, other: Place, number: int) -> str:
    """A rank's collective of that number, and the one before if the other rank has called that elsewhere.

    If a rank calls the same collective once more than the other, this shows only when the next one has another name.
    """
    entry, ours, others = _at(one, number), _at(one, number - 1), _at(other, number - 1)
    assert entry is not None
    if ours is None or others is None or ours[1] == others[1]:
        return _did(*entry[:2])
    return f"{_did(*ours[:2])} and then {_did(*entry[:2])}"


def entered(place: Place) -> str:
    """The last action of a rank, such as `entered barrier (train.py:31)`; "" if there is none."""
    return _did(*place["recent"][-1][:2]) if place["recent"] else ""


def waiting(places: Mapping[int, Place]) -> tuple[int, list[tuple[int, str]]]:
    """Of the ranks in a collective, the one that has come farthest, and the ranks it waits for, with their lines."""
    inside = [rank for rank, place in places.items() if place["seconds"] is not None]
    if not inside:
        return -1, []
    waits = max(inside, key=lambda rank: (places[rank]["number"], -rank))
    late = [
        (rank, place["line"])
        for rank, place in sorted(places.items())
        if place["number"] < places[waits]["number"]
        or (place["seconds"] is None and difference(places[waits], place) is not None)
    ]
    return waits, late


def script_call() -> tuple[CodeType | None, int]:
    """Where the script has called this package, found in about a microsecond."""
    return _caller()[1:]


def line_of(call: tuple[CodeType | None, int]) -> str:
    """The line of a call, such as `train.py:55`."""
    return _line(*call) or "no line of the script"


def script_line() -> str:
    """The line where the script has called this package."""
    return line_of(script_call())


def current_line(thread: int) -> str:
    """Where a thread is in the user's own code, such as `train.py:55`; "" if nowhere."""
    innermost = sys._current_frames().get(thread)
    frame = innermost
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def _at(place: Place, number: int) -> Entered | None:
    """The collective of that number, if the rank remembers it: its name, its line, and a checksum of all until then."""
    index = len(place["recent"]) - 1 - (place["number"] - number)
    return place["recent"][index] if 0 <= index < len(place["recent"]) else None


def _did(name: str, line: str) -> str:
    if name == "close" and not line:
        return "reached the end of the script"
    return f"{_VERBS.get(name, 'entered')} {name}{line and f' ({line})'}"


def _caller() -> tuple[str, CodeType | None, int]:
    """What the script has called, and where: code and instruction, of which `_line` makes a line when it is needed."""
    frame: FrameType | None = sys._getframe(1)
    called = None
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file not in _ours:
            # Calls of a module come here through torch, `with` blocks of this package through contextlib.
            is_between = file == contextlib.__file__ or f"-packages{os.sep}torch{os.sep}" in file
            _ours[file] = None if is_between else file.startswith(_PACKAGE)
        if _ours[file] is False:
            break
        called, frame = code if _ours[file] else called, frame.f_back
    name = called.co_name if called is not None else ""
    name = _NAMES.get(name, name)
    return (name, frame.f_code, frame.f_lasti) if frame is not None else (name, None, 0)


def _line(code: CodeType | None, instruction: int) -> str:
    if code is None:
        return ""
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return f"{Path(code.co_filename).name}:{line}"
    return Path(code.co_filename).name


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file


# -- when a rank that waits in a collective asks where the others are, and the warning that names late ranks -----------

log = logging.getLogger("paceline")
ASK_SECONDS = 5.0  # in a collective, after which a rank asks where the others are; then less and less often
_LONGEST_PAUSE = 60.0  # seconds between two questions
LATE_SECONDS = 30.0  # in a collective, after which a warning names the ranks that are missing


class LateRanks:
    """The questions of one rank about the others; the caller sends them."""

    def __init__(self, trace: Trace) -> None:
        self.due = time.monotonic() + ASK_SECONDS  # when to look again whether to ask, on `time.monotonic`'s clock
        self._trace = trace
        self._reported: set[str] = set()  # collectives whose late ranks a warning has named

    def is_time_to_ask(self) -> bool:
        """Whether this rank has been in a collective for long enough to ask; sets `due`."""
        seconds = self._trace.seconds
        if seconds is None or seconds < ASK_SECONDS:
            self.due = time.monotonic() + ASK_SECONDS - (seconds or 0.0)
            return False
        self._postpone(seconds)
        return True

    def answer(self) -> Place:
        """Where this rank is. All ranks answer the same question, so this rank's own next question can wait."""
        self._postpone(self._trace.seconds or 0.0)
        return self._trace.place(current_line(threading.main_thread().ident or 0))

    def warn(
        self, late: Sequence[tuple[int, str | None]], waits: int | None = None, place: Place | None = None
    ) -> None:
        """Name, once per collective, the ranks that have not entered the one that a rank is in."""
        seconds, last = self._trace.seconds, self._trace.last()
        if waits is not None and place is not None:
            seconds, last = place["seconds"], entered(place)
        if seconds is None or seconds < LATE_SECONDS or last in self._reported:
            return
        self._reported.add(last)
        rank, line = late[0]
        who = "waiting" if waits is None else f"rank {waits} has been waiting"
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        where = "it does not answer" if line is None else f"it is at {line or 'no line of the script'}"
        log.warning("%s %.0f s for rank %d%s, which has not %s; %s", who, seconds, rank, more, last, where)

    def _postpone(self, seconds: float) -> None:
        self.due = time.monotonic() + min(max(ASK_SECONDS, seconds / 2), _LONGEST_PAUSE)
