"""A job on a cluster in the foreground: its output and events while it runs."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, cast

from paceline.backends.follow import Nodes
from paceline.backends.foreground import Event, Output, Update
from paceline.backends.kubernetes.look.logs import Follower
from paceline.backends.kubernetes.look.pod_log import Entry, PodLog
from paceline.backends.repeated import Repeated
from paceline.job.errors import UserError
from paceline.job.paths import where_flags_of
from paceline.job.text import counted
from paceline.node.readers import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.contract.records import EventRecord
    from paceline.job.job import Job

    from .holding import Lease

_PATIENCE = 2.0  # seconds; the pod of a node that was lost never reports a restart


class KubeRun:
    """A job on a cluster that ends with the client; if that is killed (SIGKILL), at the deadline of the Job."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        look: Callable[[], Job | None],
        lease: Lease,
        *,
        stop: Callable[[bool], None],
        pass_on: Callable[[int], None],
        let_go: Callable[[], None],
        is_plain: bool,
    ) -> None:
        self.name, self.max_restarts = job.name, job.max_restarts
        self.first_line = (
            f"{counted(job.ranks, 'rank')} in {counted(job.nodes, 'pod')}; "
            f"see it with: paceline get{where_flags_of(job.name, cluster.name, cluster.where)} {job.name}"
        )
        self._look, self._stop, self._pass_on, self._lease = look, stop, pass_on, lease
        self._let_go = let_go
        lease.hold()
        self._nodes: Nodes[str] = Nodes(_PATIENCE)
        self._follower: Follower[Entry] = Follower(cluster, job.name, lambda pod: PodLog(
            cluster, pod, self._follower.job_is_over, is_plain=is_plain
        ))  # fmt: skip
        self._stops: list[int] = []  # the signals that have asked to stop it
        self._locals: dict[int, int] = {}

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask to stop the job; asked twice, it is stopped at once."""
        self._stops.append(number)
        now = len(self._stops) > 1
        self._try(lambda: self._stop(now))

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the agents in all pods."""
        self._try(lambda: self._pass_on(number))

    @staticmethod
    def _try(action: Callable[[], None]) -> None:
        def once() -> None:  # a handler of a signal waits for no cluster
            with contextlib.suppress(UserError):  # the job has ended, or is stopped when the next Ctrl-C comes
                action()

        Repeated(once)

    def leads(self, output: Output) -> bool:
        """Whether this is rank 0."""
        return output.rank == 0

    def updates(self) -> Iterator[Update]:
        """Output of the ranks and events, until the job has ended."""
        with contextlib.closing(self._follower.start()) as readers:
            yield from self._nodes.follow(readers.take, self._take)
        self._let_go()
        for event in self._nodes.finish():
            code = self._code(event.details.get("exit_code"))
            yield Event(event.name, {**event.details, "exit_code": code}) if event.name == "finished" else event

    def _code(self, code: int | None) -> int | None:
        """The exit code of a job; one that was stopped from here ends as its signal says, and its pods got SIGTERM."""
        return 128 + self._stops[0] if self._stops and code == 128 + signal.SIGTERM else code

    def _take(self, pod: str, found: Entry | Ended) -> Iterator[Update]:
        """What follows from what a pod writes, or from its end; "" stands for the job."""
        if isinstance(found, Ended):
            if found.error is not None:
                raise found.error
            yield from self._nodes.leave(pod)
            return
        if pod not in self._nodes.present:
            self._nodes.enter(pod)
        if not found.is_traceback:  # it is in the report
            yield from self._nodes.take(pod, self._update(found))

    def _update(self, entry: Entry) -> Update:
        if entry.event is None:
            stream, rank = "both" if entry.stream == "out" else "err", max(entry.rank, 0)
            return Output(entry.attempt, rank, self._locals.get(rank, 0), stream, entry.text)
        left_out = ("event", "ranks")
        details = cast("EventRecord", {key: it for key, it in entry.event.items() if key not in left_out})
        if failure := details.get("failure"):
            details["failure"] = {**failure, "log": ""}  # it goes with the pod
        if entry.event["event"] == "started":
            self._locals.update((rank, local) for rank, local in entry.event.get("ranks") or ())
            details["logs"] = [{"rank": it, "local_rank": local} for it, local in entry.event.get("ranks") or ()]
            details["attempt"] = entry.attempt
        return Event(entry.event["event"], details)

    def unreported_end(self) -> tuple[int, list[str]]:
        """The job's exit code, and why it ended."""
        job = self._look()
        if job is None:
            return 1, ["the job was deleted"]
        why = f": {job.error}" if job.error else ""
        code = self._code(job.exit_code)
        return 1 if code is None else code, [f"job {job.name} {job.state.lower()}{why}"]
