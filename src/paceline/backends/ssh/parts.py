"""The parts of a job on its hosts, from their start until they are kept or dropped."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.backends.check.findings import grouped
from paceline.backends.remote.connection import Silent
from paceline.backends.remote.patience import Patience
from paceline.job.errors import UserError

from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from paceline.backends.remote.connection import Body, Host
    from paceline.contract.messages import JobAnswer, Request
    from paceline.contract.records import Report


class Parts:
    """A job that is being started on hosts: unless it is kept or held, nothing of it stays, even if this process dies.

    Attributes:
        hosts: node 0 first.
        started: their answers about the started parts.
        reports: those of the kept parts.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[Host],
        request: Callable[[Host], Request],
        body: Callable[[Host], Body | None],
    ) -> None:
        self.name = name
        self.hosts = list(hosts)
        self.started: dict[Host, JobAnswer] = {}
        self.reports: dict[Host, Report] = {}
        self.streams = Streams(hosts, request, body, apart=True)

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.streams.close()

    def start(self) -> Host | None:
        """Wait for all parts; returns a host that has a job of the name, and then nothing has been started."""
        answers = self._answers(self.hosts)
        answered = {host: answer for host, answer in answers.items() if not isinstance(answer, UserError)}
        self.started = {host: answer for host, answer in answered.items() if "started" in answer}
        if len(self.started) == len(self.hosts):
            return None
        self._drop()
        in_order = [(host.name, answers[host]) for host in self.hosts if host in answers]
        if failed := [(name, str(answer)) for name, answer in in_order if isinstance(answer, UserError)]:
            raise UserError("\n".join(grouped(failed)))
        return next(host for host in answered if host not in self.started)

    def keep(self) -> None:
        """Let the job go on without the client. Node 0 is confirmed last: before that, there is no job."""
        first, *others = self.hosts
        for hosts in (others, [first]):
            for host in hosts:
                self.streams.say(host, "keep")
            for host, answer in self._answers(hosts, self._patience).items():
                if isinstance(answer, UserError):
                    if host is not first:
                        self._drop()
                    raise answer
                self.reports[host] = answer["kept"]
        for host in self.hosts:
            self.streams.say(host, "done")
        self.streams.finish(self._patience)

    def hold(self) -> None:
        """Let the job run as long as this process, and follow its output and events."""
        for host in self.hosts:
            self.streams.hold(host, self.name, self.started[host]["report"]["part"]["job_id"] or "")

    def _drop(self) -> None:
        for host in self.started:
            self.streams.say(host, "drop")
        self.streams.finish(self._patience)

    @property
    def _patience(self) -> float:
        """Seconds in which a host does what it is told."""
        return max(Patience.of("start", host.limits).copy for host in self.hosts)

    def _answers(self, hosts: Iterable[Host], seconds: float | None = None) -> dict[Host, JobAnswer | UserError]:
        """The next answer of each of these hosts, or that it does not come in time."""
        answers: dict[Host, JobAnswer | UserError] = {}
        remaining = set(hosts)
        deadline = None if seconds is None else time.monotonic() + seconds
        while remaining:
            try:
                found = self.streams.take(None if deadline is None else deadline - time.monotonic())
            except TimeoutError:
                text = f"does not answer within {seconds:g} s; see what it does"
                answers.update({host: Silent(f"{host.name} {text}: {host.by_hand}") for host in remaining})
                break
            if found is None:
                break
            host, answer = found
            answers[host] = answer
            remaining.discard(host)
        return answers
