"""Which hosts did not answer a short while ago, so that no verb waits for them again and again."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.backends.remote.connection import Silent, Unreachable
from paceline.job.paths import jobs_folder
from paceline.node.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backends.remote.connection import Host
    from paceline.job.errors import UserError

    from .asking import Outcome

REMEMBERED = 60.0  # seconds
_COSTLY = 1.0  # seconds; what fails sooner delays nobody


class _Here(NamedTuple):
    """A silence in this process: what to say of it, how long the host was waited for, when, and see `Outcome`."""

    error: UserError
    waited: float
    when: float
    is_late: bool


class Silences:
    """Hosts that were silent, in this process and in earlier ones; those are in a file of the user's state folder."""

    def __init__(self) -> None:
        self._path = jobs_folder().parent / "silent.json"
        self._here: dict[Host, _Here] = {}
        self._before = self._read()

    def _read(self) -> dict[str, list[float]]:
        """Host → when it was silent (since the epoch), and for how many seconds."""
        now, found = time.time(), {}
        for name, entry in (read_json(self._path) or {}).items():
            with contextlib.suppress(TypeError, ValueError):  # a damaged file says nothing
                when, waited = map(float, entry)
                if 0 <= now - when < REMEMBERED:
                    found[name] = [when, waited]
        return found

    def in_this_process(self, host: Host) -> tuple[UserError, float] | None:
        """Why a host did not answer this process, and after how many seconds; None if it was not silent."""
        found = self._here.get(host)
        if found is None or time.monotonic() - found.when >= REMEMBERED:
            return None
        return found.error, found.waited

    def is_late(self, host: Host) -> bool:
        """Whether this process did not wait for a host because nearly all others had answered."""
        return self.in_this_process(host) is not None and self._here[host].is_late

    def before(self, host: Host) -> float:
        """How long another process waited for a host in vain; 0 if none did a short while ago."""
        when, waited = self._before.get(_key(host), (0.0, 0.0))
        return waited if 0 <= time.time() - when < REMEMBERED else 0.0

    def explained(self, host: Host) -> Silent:
        """Why a host that was silent before is not waited for."""
        when, waited = self._before[_key(host)]
        within = "" if math.isinf(waited) else f" within {waited:g} s"
        ago = max(0.0, time.time() - when)
        hint = f"it is waited for again {REMEMBERED:g} s after that; see what it does: {host.by_hand}"
        return Silent(f"cannot reach {host.name}: no answer{within} {ago:.0f} s ago, and none now; {hint}")

    def note(self, outcomes: Mapping[Host, Outcome], waited: Mapping[Host, float]) -> None:
        """Remember which hosts have answered, and which have not."""
        file = dict(self._before)
        for host, (answer, seconds, is_late) in outcomes.items():
            if not isinstance(answer, Unreachable):
                self._here.pop(host, None)
                file.pop(_key(host), None)
                continue
            # ssh itself has given up: waiting longer changes nothing
            limit = waited.get(host, self.before(host)) if isinstance(answer, Silent) else math.inf
            limit = seconds if is_late else limit
            self._here[host] = _Here(answer, limit, time.monotonic(), is_late)
            if host in waited and seconds >= _COSTLY:
                file[_key(host)] = [time.time(), limit]
        if file != self._before:
            self._before = file
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_json(self._path, {**self._read(), **file} if file else {})

    @property
    def hosts(self) -> set[str]:
        """The names of the hosts that did not answer this process."""
        return {host.name for host in self._here}


def _key(host: Host) -> str:
    return host.name if host.port is None else f"{host.name}:{host.port}"
