"""A job on a Slurm cluster in the foreground: it ends with the client."""

from __future__ import annotations

import itertools
import signal
from typing import TYPE_CHECKING

from paceline.backends.follow import Nodes
from paceline.backends.foreground import Event, Output, Update
from paceline.node.logs.following import update_of
from paceline.node.readers import Ended, Readers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backends.base import Allocation
    from paceline.contract.messages import JobAnswer
    from paceline.contract.records import JobRecord
    from paceline.job.job import Job

    from .start import Opened

_PATIENCE = 2.0  # seconds; a node that was lost never reports a restart


class SlurmRun:
    """Its output and events come over the connection that has submitted it; without that connection it is stopped."""

    def __init__(self, job: Job, opened: Opened, where: str, allocation: Allocation | None) -> None:
        """Take over a job that has been submitted."""
        self.name, self.max_restarts = job.name, job.max_restarts
        place = (
            f"Slurm has it as job {job.external_id}" if allocation is None else f"it is in allocation {allocation.id}"
        )
        self.first_line = f"{place}; see it with: paceline get{where} {job.name}"
        self._opened = opened
        self._ended: JobRecord | None = None
        self._interrupted = 0  # the first signal that asked to stop it

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask to stop the job; asked twice, it is stopped at once."""
        order = signal.SIGQUIT if self._interrupted else number
        self._interrupted = self._interrupted or number
        self._opened.answers.tell(f"signal {int(order)}")

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the agents of all nodes."""
        self._opened.answers.tell(f"signal {number}")

    def leads(self, output: Output) -> bool:
        """Whether this is rank 0."""
        return output.rank == 0

    def updates(self) -> Iterator[Update]:
        """Output of the ranks and events, until the job has ended."""
        readers: Readers[str, JobAnswer] = Readers()
        nodes: Nodes[str] = Nodes(_PATIENCE)
        with self._opened:
            readers.add("", itertools.takewhile(lambda answer: "end" not in answer, self._opened.answers))
            yield from nodes.follow(readers.take, lambda _, answer: self._take(nodes, answer))
        for event in nodes.finish():
            if self._ended is not None and self._ended["state"] == event.details["state"]:
                yield event

    def _take(self, nodes: Nodes[str], answer: JobAnswer | Ended) -> Iterator[Update]:
        if isinstance(answer, Ended):
            if answer.error is not None:
                raise answer.error
        elif "enter" in answer:
            nodes.enter(answer["enter"], start=answer["start"])
        elif "leave" in answer:
            yield from nodes.leave(answer["leave"])
        elif "waiting" in answer:
            yield Event("note", {"why": f"it waits: {answer['waiting']}"})
        elif "ended" in answer:
            self._ended = answer["ended"]
        elif (update := update_of(answer)) is not None:
            yield from nodes.take(answer["node"], update) if "node" in answer else [update]

    def unreported_end(self) -> tuple[int, list[str]]:
        """The job's exit code, and why it ended."""
        found = self._ended
        if found is None:
            return 1, ["the job was deleted"]
        why = f": {found['error']}" if found["error"] else ""
        code = found["exit_code"]
        if code is None:  # no rank has ended
            code = 128 + self._interrupted if self._interrupted and found["state"] == "STOPPED" else 1
        return code, [f"job {self.name} {found['state'].lower()}{why}"]
