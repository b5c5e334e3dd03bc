"""Durations, times and sizes as text."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.contract.records import ProgressRecord

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MANY = 600  # a greater number without a unit is likely to be one of seconds
_EXACT = 1 << 53  # a float holds every whole number up to this one
_LEAST_MEMORY = 64 << 20  # bytes; Python with torch takes more
_BYTES = {"": 1} | {
    letter + i: (1024 if i else 1000) ** (power + 1) for power, letter in enumerate("KMGTP") for i in ("", "i")
}


class NoUnitError(ValueError):
    """A duration without a unit."""


def duration(value: Any, *, usual: str = "d", zero: str = "") -> float | None:
    """Seconds of `"90s"`, `"1.5h"` or `"1h30m"`, or of a timedelta. A number without a unit raises NoUnitError.

    `usual` has the units, a letter each, that the message suggests. `zero` says what to do in the place of no time at
    all, which is refused then.
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    text = str(value).strip()
    if zero and "0" in text and not text.strip("0.smhdw"):
        raise ValueError(f"{value!r} is no time; {zero}")
    if re.fullmatch(r"(\d+(\.\d+)?[smhdw])+", text):
        seconds = sum(float(n) * _SECONDS[unit] for n, unit in re.findall(r"(\d+(?:\.\d+)?)([smhdw])", text))
        if seconds == float("inf"):
            raise ValueError("it is longer than any job; write for example 90s, 10m, 2h or 7d")
        return seconds
    if re.fullmatch(r"\d+(\.\d+)?", text):
        units = usual if 0 < float(text) <= _MANY else "s"
        raise NoUnitError(f"{value!r} has no unit; did you mean {' or '.join(text + unit for unit in units)}?")
    raise ValueError(f"{value!r} is not a duration; write for example 90s, 10m, 2h or 7d")


def duration_or_off(value: Any, *, usual: str = "d") -> float | str | None:
    """The same, or "off" in the place of no time."""
    return "off" if value == "off" else duration(value, usual=usual, zero="write off")


def moment(value: Any) -> float:
    """Seconds since the epoch of a time span before now, or of an ISO 8601 time; one without a zone is local."""
    text = str(value)
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text)).timestamp()
    try:
        return time.time() - (duration(value, usual="m") or 0.0)
    except NoUnitError:
        raise
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write for example 10m, 2h or 2026-05-01T12:00:00") from None


def duration_text(seconds: float) -> str:
    """A duration as `duration` reads it, and exactly this one: `7d`, `90m`, `0.5s`."""
    if float(seconds).is_integer() and 0 <= seconds < _EXACT:
        if not seconds:
            return "0s"
        unit = next(unit for unit in "dhms" if seconds % _SECONDS[unit] == 0)
        return f"{int(seconds) // _SECONDS[unit]}{unit}"
    from decimal import Decimal  # few durations need it

    return f"{Decimal(repr(seconds)):f}s"


def size(value: Any) -> int | None:
    """Bytes of `512`, `"512M"` (10⁶) or `"16Gi"` (2³⁰)."""
    if value is None or isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]?i?)B?", str(value).strip(), re.IGNORECASE)
    unit = "" if match is None else match[2][:1].upper() + match[2][1:].lower()
    if match is None or unit not in _BYTES:
        raise ValueError(f"{value!r} is not a size; write for example 512M or 16Gi")
    return int(float(match[1]) * _BYTES[unit])


def memory(value: Any) -> int | None:
    """Bytes of memory, as `size` reads them; so little that no rank could start is a mistake."""
    found = size(value)
    if found is not None and found < _LEAST_MEMORY:
        number = str(value).strip()
        hint = f"did you mean {number}G?" if re.fullmatch(r"[1-9]\d{0,3}", number) else "ask for 64Mi or more"
        raise ValueError(f"{number} is {show_size(found)}, in which no rank can start; {hint}")
    return found


def show_duration(seconds: float) -> str:
    """`0.4 s`, `42 s`, `3m07s`, `2h05m`, `3d04h`."""
    whole = int(seconds)
    if 0 < seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def show_instant(seconds: float) -> str:
    """`0.35 ms`, `120 ms`, `1.5 s`: of a step, or a part of one."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def show_size(number: float) -> str:
    """`512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def show_time(seconds: float | None) -> str | None:
    """A time since the epoch as RFC 3339 in UTC, as JSON has it."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def replicas_in_words(progress: ProgressRecord | None) -> list[str]:
    """A line that says how often ranks were compared, and were equal; none if they were not compared."""
    seen = (progress or {}).get("replicas")
    if not seen or not seen["compared"]:
        return []
    times = "once" if seen["compared"] == 1 else f"{seen['compared']} times"
    return [f"replicas were compared {times}, and equal, last after step {seen['step']}"]
