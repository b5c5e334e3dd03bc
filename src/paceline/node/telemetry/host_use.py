"""What else a machine does while a job runs there: its network, swapping, and cores that heat slows down."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.machine import hardware

from .sampler import over_infiniband, traffic

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.contract.stands import Spent

_PAGE: int = os.sysconf("SC_PAGE_SIZE")
_SWAPPED = re.compile(r"^pswp(?:in|out) (\d+)$", re.MULTILINE)
_STALLED = re.compile(r"^some .*total=(\d+)$", re.MULTILINE)
_BITS = 125_000  # bytes of a Mbit


class _Counters(NamedTuple):
    """What the kernel counts: bytes, bytes, bytes, microseconds, times. None is what it does not."""

    sent: int
    over_infiniband: int | None
    swapped: int
    stalled: int | None
    slowed: int


class HostUse:
    """Compares the counters of this machine with those at the beginning."""

    def __init__(self, proc: Path = hardware.PROC, sys: Path = hardware.SYS) -> None:
        """Begin."""
        self._proc, self._sys = proc, sys
        self._began, self._first = time.monotonic(), self._look()

    def known(self, now: float | None = None) -> Spent:
        """What has happened since; `now` is a time of `time.monotonic`."""
        seconds, before, after = (now or time.monotonic()) - self._began, self._first, self._look()
        if seconds <= 0:
            return {}
        found: Spent = {
            "sent": (after.sent - before.sent) / seconds,
            "swapped": (after.swapped - before.swapped) * _PAGE / seconds,
            "slowed": after.slowed - before.slowed,
        }
        if before.over_infiniband is not None and after.over_infiniband is not None:
            found["infiniband"] = (after.over_infiniband - before.over_infiniband) / seconds
        if before.stalled is not None and after.stalled is not None:
            found["stalled"] = round((after.stalled - before.stalled) / 1e6 / seconds, 3)
        if link := self._link():
            found["link"] = link
        return found

    def _look(self) -> _Counters:
        net, infiniband = self._sys / "class" / "net", self._sys / "class" / "infiniband"
        bands = over_infiniband(infiniband)
        stalled = _STALLED.search(hardware.read(self._proc / "pressure" / "memory"))
        heat = (self._sys / "devices" / "system" / "cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
        return _Counters(
            traffic(self._proc, net, infiniband)[1],
            None if bands is None else bands[1],
            sum(map(int, _SWAPPED.findall(hardware.read(self._proc / "vmstat")))),
            int(stalled[1]) if stalled else None,
            sum(int(count) for count in map(hardware.read, heat) if count.isdecimal()),
        )

    def _link(self) -> float:
        """Bytes per second of the fastest interface with a device; 0 if that is not known."""
        speeds = map(hardware.read, (self._sys / "class" / "net").glob("*/speed"))
        return max((int(speed) * _BITS for speed in speeds if speed.isdecimal()), default=0)
