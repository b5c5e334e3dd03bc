"""Hosts that join or leave a running job."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.backends.environments.jobs import equipped
from paceline.backends.repeated import Repeated
from paceline.contract.nodejob import NodeJob, Order
from paceline.job.errors import UserError
from paceline.job.text import counted

from .parts import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.backends.remote.connection import Body, Host
    from paceline.contract.messages import Invitation, Request, Start
    from paceline.contract.nodejob import RankStreams

    Enter = Callable[[Host, Request, Body | None], None]

_PERIOD = 1.0  # seconds between two looks at which hosts there are, as horovodrun's
_AGAIN = 5.0  # seconds until a host that could not come in is tried again


def invitation(hosts: Iterable[Host], name: str) -> Invitation:
    """What a joining host needs, from the first of these hosts that answers."""
    why = UserError(f"no host of job {name} answers")
    for host in hosts:
        try:
            found: Invitation = host.ask({"do": "invite", "name": name})
            return found
        except UserError as error:
            why = error
    raise why


def request(invited: Invitation, host: Host, rank_streams: RankStreams | None, terminal: dict[str, str]) -> Start:
    """The request that starts a joining host's part of a job."""
    address, port = invited["door"]
    job = replace(
        NodeJob.from_json(invited["job"]), main_address=address, main_port=port, node_rank=None, local_address=None,
        resume_from=None, detached=rank_streams is None,
    )  # fmt: skip
    order = Order(
        job=job,
        data=tuple(invited["sources"]),
        joins=True,
        slots=host.slots,
        reconnect=host.reconnect,
        job_id=invited["job_id"],
        token=invited["token"],
        secrets=invited["secrets"],
        code=invited["code"],
        bytes=len(invited.get("data", b"")),
        rank_streams=rank_streams,
        terminal=terminal,
    )
    return {"do": "start", "order": order.to_json()}


def code_of(invited: Invitation) -> Body | None:
    """The code that came with an invitation; None if there is none."""
    data = invited.get("data", b"")
    return [data] if data else None


def taken(name: str, host: Host) -> UserError:
    """That a host cannot join a job because it has another one of that name."""
    return UserError(f"another job named {name} is on {host.name}; delete that one first")


def join(name: str, hosts: Sequence[Host], invited: Invitation, program: str | None) -> None:
    """Start the parts of a running job on hosts that join it; see `invitation`, and `Options.containers`."""
    body, hosts = code_of(invited), equipped(hosts, invited, program)
    with Parts(name, hosts, lambda host: request(invited, host, None, {}), lambda _: body) as parts:
        try:
            if (host := parts.start()) is not None:
                raise taken(name, host)
            parts.keep()
        except UserError as error:
            able = [host.name for host in hosts if host in parts.started]
            hint = f"; {', '.join(able)} can, if named alone" if 0 < len(able) < len(hosts) else ""
            raise UserError(f"no host joins job {name}, which goes on{hint}: {error}") from None


class Cooldown:
    """For how long hosts are left out that have failed: each time twice as long as the last time."""

    def __init__(self, seconds: Sequence[float]) -> None:  # at first, and at most; empty: for ever
        self._first, self._most = seconds or (math.inf, math.inf)
        self._failures: dict[Host, int] = {}
        self._until: dict[Host, float] = {}

    def begin(self, host: Host, now: float) -> float:
        """A host has failed: leave it out; returns for how many seconds."""
        self._failures[host] = self._failures.get(host, 0) + 1
        seconds = min(self._most, self._first * 2.0 ** (self._failures[host] - 1))
        self._until[host] = now + seconds
        return seconds

    def remaining(self, hosts: Sequence[Host], least: int, now: float) -> list[Host]:
        """The hosts that are not left out; if these are too few, also those that come back next."""
        out = sorted((self._until[host], place) for place, host in enumerate(hosts) if self._until.get(host, now) > now)
        needed = max(0, least - (len(hosts) - len(out)))
        without = {hosts[place] for _, place in out[needed:]}
        return [host for host in hosts if host not in without]


def _only_slots(wanted: Sequence[Host], present: Sequence[Host]) -> str | None:
    """What is said if the slots of a job's only host have changed: it cannot leave to come back with others."""
    if len(wanted) != 1 or len(present) != 1 or wanted[0] == present[0] or wanted[0].name != present[0].name:
        return None
    name, now = wanted[0].name, wanted[0].slots
    return f"{name} has {counted(now, 'slot')} now, and the job runs on it alone: stop it and run it again to use that"


class Recruiter:
    """Adds hosts to a job in the foreground while it has fewer than its maximum."""

    def __init__(
        self,
        name: str,
        wanted: Callable[[], Sequence[Host]],
        present: Callable[[], Sequence[Host]],
        enter: Callable[[Host, Invitation], None],  # starts its part on a host
        leave: Callable[[Host], None],  # asks a host to leave
        *,
        least: int,  # hosts that the job needs
        cooldown: Cooldown | None,  # None: hosts that have failed are taken back at once
        on_problem: Callable[[str | None], None],  # gets why `wanted` fails, once, and None when it works again
    ) -> None:
        """Begin."""
        self._name, self._wanted, self._present, self._enter, self._leave = name, wanted, present, enter, leave
        self._least, self._cooldown = least, cooldown
        self._on_problem = on_problem
        self._problem: str | None = None
        self._coming: set[Host] = set()
        self._asked: set[Host] = set()  # to leave
        self._not_before: dict[Host, float] = {}
        self._looks = Repeated(self._look, _PERIOD)

    def stop(self) -> None:
        """Add no more hosts."""
        self._looks.stop()

    def has_come(self, host: Host) -> None:
        """Note that a host takes part now."""
        self._coming.discard(host)

    def is_gone(self, host: Host) -> bool:
        """Note that a host has left, or could not join; returns whether it was asked to leave."""
        was_asked = host in self._asked
        self._coming.discard(host)
        self._asked.discard(host)
        self._not_before[host] = time.monotonic() + _AGAIN
        return was_asked

    def has_failed(self, host: Host) -> float:
        """Note that a host is lost, or that a rank has failed there; returns for how many seconds it is left out."""
        return 0.0 if self._cooldown is None else self._cooldown.begin(host, time.monotonic())

    def _look(self) -> float:
        try:
            wanted, present = self._wanted(), self._present()
            problem = _only_slots(wanted, present)
        except UserError as error:  # a script that fails now and then changes nothing
            problem = str(error)
        self._note(problem)
        if problem is None:
            self._change(wanted, present)
        return _PERIOD

    def _change(self, wanted: Sequence[Host], present: Sequence[Host]) -> None:
        now = time.monotonic()
        if self._cooldown is not None:
            wanted = self._cooldown.remaining(wanted, self._least, now)
        for host in present:  # asked again, since one that the job could not do without stays
            if host not in wanted and self._not_before.get(host, 0.0) <= now:
                self._not_before[host] = now + _AGAIN
                self._asked.add(host)
                self._leave(host)
        there = {host.name for host in (*present, *self._coming)}
        missing = [host for host in wanted if host.name not in there and self._not_before.get(host, 0.0) <= now]
        if missing and present:
            self._bring(missing, present)

    def _note(self, problem: str | None) -> None:
        if problem != self._problem and not self._looks.is_over:
            self._problem = problem
            self._on_problem(problem)

    def _bring(self, missing: Sequence[Host], present: Sequence[Host]) -> None:
        try:
            invited = invitation(present, self._name)
        except UserError:  # it has not started, or has ended
            self._not_before.update(dict.fromkeys(missing, time.monotonic() + _AGAIN))
            return
        for host in missing[: max(0, invited["most"] - len(present) - len(self._coming))]:
            if not self._looks.is_over:
                self._coming.add(host)
                self._enter(host, invited)
