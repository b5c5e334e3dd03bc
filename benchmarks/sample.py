"""The result of a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    seconds: float
    cpu: float | None = None  # seconds of user and system time of all processes that took part
    megabytes: float | None = None  # peak memory of the process, or its growth; in units of 10**6 bytes
    requests: int | None = None  # to a server
    loss: float | None = None  # of a training


class Failed(Exception):
    """A measurement has failed; the message says why and ends with the last output of the program."""


class Skipped(Exception):
    """A measurement needs what this machine does not have; the message says what."""
