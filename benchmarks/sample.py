"""The result of a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    seconds: float
    cpu: float | None = None  # seconds of user and system time of all processes that took part
    megabytes: float | None = None  # peak growth of the process, in units of 10**6 bytes


class Failed(Exception):
    """A measurement has failed; the message says why and ends with the last output of the program."""
