"""A job on a cluster in the foreground: its output and events while it runs."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from paceline.backends.foreground import Event, Output, Update
from paceline.backends.kubernetes.look.logs import Follower
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.job.job import Job

    from .lease import Lease

_ENDS = ("waiting", "restarting", "finished")  # events that each node reports once


class KubeRun:
    """A job on a cluster that ends with the client; if that is killed (SIGKILL), at the deadline of the Job."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        look: Callable[[], Job | None],
        stop: Callable[[bool], None],
        lease: Lease,
        *,
        let_go: Callable[[], None],
        is_plain: bool,
    ) -> None:
        """Take over a job that has been started.

        Args:
            cluster: where it is.
            job: as it was started.
            look: what it is now.
            stop: stops it, at once if True.
            lease: moves the deadline on, while this process lives.
            let_go: is called when the job has ended.
            is_plain: whether it has no agent.
        """
        self.name, self.max_restarts = job.name, job.max_restarts
        self.first_line = (
            f"{job.ranks} rank{'' if job.ranks == 1 else 's'} in {job.nodes} pod{'' if job.nodes == 1 else 's'}; "
            f"see it with: paceline get{cluster.where} {job.name}"
        )
        self._look, self._stop, self._lease = look, stop, lease
        self._let_go = let_go
        lease.hold()
        self._follower = Follower(cluster, job.name, is_plain=is_plain)
        self._stops = 0
        self._locals: dict[int, int] = {}
        self._said: set[tuple[str, Any]] = set()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask to stop the job; asked twice, it is stopped at once."""
        self._stops += 1
        threading.Thread(target=self._ask, args=(self._stops > 1,), daemon=True).start()

    def _ask(self, now: bool) -> None:
        try:
            self._stop(now)
        except UserError:
            return  # the job has ended, or is stopped when the next Ctrl-C comes

    def leads(self, output: Output) -> bool:
        """Whether this is rank 0."""
        return output.rank == 0

    def updates(self) -> Iterator[Update]:
        """Output of the ranks and events, until the job has ended."""
        attempt, last = 0, None
        for entry in self._follower.entries():
            if entry.is_traceback:  # it is in the report
                continue
            if entry.event is None:
                stream = "both" if entry.stream == "out" else "err"
                rank = max(entry.rank, 0)
                yield Output(attempt, rank, self._locals.get(rank, 0), stream, entry.text)
                continue
            details = dict(entry.event)
            name = details.pop("event")
            if name == "started":
                attempt = max(attempt, int(details.get("attempt") or 0))
                self._locals.update((rank, local) for rank, local in details.get("ranks") or ())
                details["logs"] = [{"rank": rank, "local_rank": local} for rank, local in details.get("ranks") or ()]
            if name == "finished":
                last = _weightier(last, details)
                continue
            if name in _ENDS or name == "stopping":  # every node says so
                key = name, details.get("why") or attempt
                if key in self._said:
                    continue
                self._said.add(key)
            yield Event(name, details)
        self._let_go()
        if last is not None:
            yield Event("finished", last)

    def unreported_end(self) -> tuple[int, list[str]]:
        """The job's exit code, and why it ended."""
        job = self._look()
        if job is None:
            return 1, ["the job was deleted"]
        why = f": {job.error}" if job.error else ""
        code = job.exit_code if job.exit_code is not None else 1
        return code, [f"job {job.name} {job.state.lower()}{why}"]


def _weightier(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Of two reports of the end the one that says more: a failed rank, then a failure, then a success."""

    def weight(details: dict[str, Any]) -> tuple[bool, bool]:
        failure = details.get("failure") or {}
        return failure.get("rank") is not None, details.get("state") == "FAILED"

    return other if one is None or weight(other) > weight(one) else one
