"""When a host removes jobs whose time to live is over."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from paceline.node.host import queries
from paceline.node.journal.state import cached
from paceline.node.machine import processes
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store.home import Home

from .test_slurm_view import NODE, SPEC


def listed(home: Home) -> list[dict[str, Any]]:
    return list(queries.describe(home, {"names": None, "since": None})["jobs"])


def test_a_job_whose_agent_was_killed_is_kept_since_that_was_seen(tmp_path: Path) -> None:
    home = Home(tmp_path, is_remote=True)
    run = RunDirectory(home.jobs / "it")
    run.path.mkdir(parents=True)
    run.mark()
    run.lock.touch()
    run.job.write_text(json.dumps({"created": 1.0, "framework": None, "spec": {**SPEC, "ttl": 3600.0}}))
    run.spec.write_text(json.dumps(NODE))
    agent = {"pid": 1, "start_time": -1, "host": socket.gethostname(), "boot": processes.boot_id()}
    run.status.write_text(
        json.dumps(cached({"state": "RUNNING", "agent": agent, "started": 2.0, "attempt": 0, "ranks": []}, 0))
    )
    for path in run.path.iterdir():
        os.utime(path, (3.0, 3.0))  # it wrote its last line long ago
    for _ in range(2):
        assert [report["part"]["finished"] for report in listed(home)] == [3.0]
    os.utime(run.noticed, (4.0, 4.0))
    assert listed(home) == [] and not run.path.exists()
