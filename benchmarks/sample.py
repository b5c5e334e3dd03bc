"""What a measurement gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    seconds: float
    cpu: float | None = None  # seconds of user and system time, of every process that took part
    megabytes: float | None = None  # that the process grew by at most, in units of 10**6 bytes


class Failed(Exception):
    """A measurement came to nothing; the message says why and ends with what the program last said."""
