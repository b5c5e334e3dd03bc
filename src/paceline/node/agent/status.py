"""The agent's status.json: the state of its job, for everything that looks at the job from outside."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from paceline.node.machine import processes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Unpack

    from paceline.node.journal.status import Status
    from paceline.node.ranks.launcher import Rank
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.spec import NodeSpec


class JobStatus:
    """The state of a job; each `write` replaces status.json.

    Attributes:
        current: what status.json holds.
    """

    def __init__(self, run: RunDirectory, spec: NodeSpec, host: str) -> None:
        """The state before the job starts; status.json is not written yet."""
        self._run = run
        self._job = spec.job
        self.current: Status = {
            "job": spec.job, "job_id": spec.job_id, "state": "PENDING" if spec.request else "STARTING",
            "framework": spec.framework,
            "agent": {
                "pid": os.getpid(), "start_time": processes.start_time(os.getpid()), "host": host,
                "boot": processes.boot_id(),
                "guard": {"pid": os.getppid(), "start_time": processes.start_time(os.getppid())},
            },
            "nodes": spec.expected or spec.nodes, "node_rank": spec.node_rank, "world_size": None,
            "attempt": spec.first_attempt, "restarts": 0, "max_restarts": spec.max_restarts, "exit_code": None,
            "created": time.time(), "started": None, "finished": None, "ranks": [], "failure": None, "others": [],
            "devices": list(spec.devices or ()), "waiting": None, "start": None, "coordinator": None, "address": None,
        }  # fmt: skip

    @property
    def node_rank(self) -> int:
        """This node's number; 0 before it has one."""
        return self.current["node_rank"] or 0

    def change(self, **changes: Unpack[Status]) -> None:
        """Change the state; the next `write` stores it."""
        self.current.update(changes)

    def write(self, ranks: Iterable[Rank], changes: Status) -> None:
        """Change the state, and replace status.json. A full disk is no error."""
        self.current.update(changes)
        self.current["ranks"] = [rank.describe(self._job) for rank in ranks]
        self._run.write_status(self.current)
