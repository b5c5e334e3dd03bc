"""What an agent records of its job: the journal, and status.json, the cache of the state that follows from it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, cast

from paceline.node.journal.records import stamped
from paceline.node.journal.state import reduce
from paceline.node.machine import processes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Unpack

    from paceline.node.journal.records import Record
    from paceline.node.journal.status import Status
    from paceline.node.ranks.launcher import Rank
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.spec import NodeSpec


class JobStatus:
    """The state of a job, and its journal.

    Attributes:
        current: the state that follows from the journal.
    """

    def __init__(self, run: RunDirectory, spec: NodeSpec, host: str) -> None:
        """The state before the job starts; nothing is recorded yet."""
        self._run = run
        self._job = spec.job
        self._offset = -1  # the end of the last record; -1 before the first one
        self._is_broken = False  # the journal cannot be written
        self.current: Status = {
            "job": spec.job, "job_id": spec.job_id, "state": "PENDING" if spec.request else "STARTING",
            "framework": spec.framework,
            "agent": {
                "pid": os.getpid(), "start_time": processes.start_time(os.getpid()), "host": host,
                "boot": processes.boot_id(),
                "guard": {"pid": os.getppid(), "start_time": processes.start_time(os.getppid())},
            },
            "nodes": spec.expected or spec.nodes, "node_rank": spec.node_rank, "world_size": None,
            "attempt": spec.first_attempt, "restarts": spec.restarts, "max_restarts": spec.max_restarts,
            "exit_code": None, "created": time.time(), "started": None, "finished": None, "ranks": [],
            "failure": None, "others": [], "devices": list(spec.devices or ()), "waiting": None, "start": None,
            "coordinator": None, "address": None, "slow": [], "pace": None,
        }  # fmt: skip

    @property
    def node_rank(self) -> int:
        """This node's number; 0 before it has one."""
        return self.current["node_rank"] or 0

    def record(self, current_ranks: Iterable[Rank], *happened: Record, **changes: Unpack[Status]) -> None:
        """Record what has changed in the state and the ranks, and then what has happened."""
        records: list[Record] = []
        if self._offset < 0:
            records.append({"event": "state", "status": {**self.current, **changes}})
        elif changed := {key: value for key, value in changes.items() if self.current.get(key) != value}:
            records.append({"event": "state", "status": cast("Status", changed)})
        described = [rank.describe(self._job) for rank in current_ranks]
        if changed_ranks := [rank for rank in described if rank not in self.current["ranks"]]:
            records.append({"event": "ranks", "ranks": changed_ranks})
        records += happened
        if records:
            try:
                written, self._offset = self._run.append(*records)
                self.current = reduce(self.current, written)
            except OSError:
                self.current = reduce(self.current, stamped(records))
                if not self._is_broken:
                    self._is_broken, self._offset = True, max(self._offset, 0)
                    raise

    def save(self) -> None:
        """Replace status.json by the state that is recorded. A full disk is no error."""
        self._run.write_status(self.current, self._offset)
