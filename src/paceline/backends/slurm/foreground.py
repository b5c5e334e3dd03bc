"""A job on a Slurm cluster in the foreground: it ends with the client."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from paceline.backends.foreground import Event, Output, Update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backends.base import Allocation
    from paceline.backends.remote.connection import Answer
    from paceline.job.job import Job

    from .start import Opened


class SlurmRun:
    """Its output and events come over the connection that has submitted it; without that connection it is stopped."""

    def __init__(self, job: Job, opened: Opened, where: str, allocation: Allocation | None) -> None:
        """Take over a job that has been submitted.

        Args:
            job: it.
            opened: the connection that has submitted it; it is closed at the end.
            where: the flags that lead to it.
            allocation: in which it runs; None if it has its own.
        """
        self.name, self.max_restarts = job.name, job.max_restarts
        place = (
            f"Slurm has it as job {job.external_id}" if allocation is None else f"it is in allocation {allocation.id}"
        )
        self.first_line = f"{place}; see it with: paceline get{where} {job.name}"
        self._opened = opened
        self._ended: Answer | None = None
        self._interrupted = 0  # the first signal that asked to stop it

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask to stop the job; asked twice, it is stopped at once."""
        order = signal.SIGQUIT if self._interrupted else number
        self._interrupted = self._interrupted or number
        self._opened.answers.say(f"signal {int(order)}")

    def leads(self, output: Output) -> bool:
        """Whether this is rank 0."""
        return output.rank == 0

    def updates(self) -> Iterator[Update]:
        """Output of the ranks and events, until the job has ended."""
        with self._opened:
            for answer in self._opened.answers:
                if "output" in answer:
                    attempt, rank, local_rank, stream = answer["output"]
                    yield Output(attempt, rank, local_rank, stream, answer["data"])
                elif "event" in answer:
                    yield Event(answer["event"], answer["details"])
                elif "waiting" in answer:
                    yield Event("note", {"why": f"it waits: {answer['waiting']}"})
                elif "ended" in answer:
                    self._ended = answer["ended"]
                elif "end" in answer:
                    return

    def unreported_end(self) -> tuple[int, list[str]]:
        """The job's exit code, and why it ended."""
        found: dict[str, Any] | None = self._ended
        if found is None:
            return 1, ["the job was deleted"]
        why = f": {found['error']}" if found["error"] else ""
        code = found["exit_code"]
        if code is None:  # no rank has ended
            code = 128 + self._interrupted if self._interrupted and found["state"] == "STOPPED" else 1
        return code, [f"job {self.name} {found['state'].lower()}{why}"]
