"""The folder of a job of two ranks that has ended, as its agent leaves it: for tests of what reads it."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.contract.nodejob import Order, StoredJob
from paceline.job.spec import JobSpec
from paceline.node.planning.fitting import Fitted, Here
from paceline.node.planning.node_part import node_spec
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store.lifecycle import write_down

if TYPE_CHECKING:
    from tests.conftest import Paceline


def ended(paceline: Paceline, *names: str) -> None:
    """Jobs `python script.py` that have ended just now, each submitted after the one before."""
    here = Here(paceline.home, (sys.executable, "-B", "-u"), lambda: 0, "", "")
    for number, name in enumerate(names):
        then = int(time.time()) - 1.0 - len(names) + number
        asked = JobSpec(name=name, script="script.py", ranks=2, working_dir=str(paceline.folder), detached=True)
        job = replace(asked.for_node(), framework="torch", start_method="fork")
        record = StoredJob(asked.for_node(), None, then)
        run = RunDirectory(paceline.home / "jobs" / name)
        run.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.mark()
        run.lock.touch()
        write_down(run, record, node := node_spec(Order(), Fitted(job), here))
        run.prepare_attempt(0)
        run.agent_log.touch()
        run.times(0).write_text(f"={then + 0.3:.3f} 0o:0 1o:0\n{then + 0.5:.3f} 0o:13 1o:13\n")
        ranks: list[Any] = []
        for rank, role in enumerate(("master", "worker")):
            run.log(0, rank).write_text(f"hello from {rank}\n")
            ranks.append({
                "name": f"{name}-{role}-0", "rank": rank, "local_rank": rank, "node": 0, "state": "SUCCEEDED",
                "pid": 8563 + rank, "exit_code": 0, "log": str(run.log(0, rank)),
            })  # fmt: skip
        logs: list[Any] = [
            {"rank": rank, "local_rank": rank, **dict.fromkeys(("out", "err"), str(run.log(0, rank))),
             "error": str(run.error(0, rank))}
            for rank in range(2)
        ]  # fmt: skip
        process = {"pid": 8552, "start_time": 1454207}
        start = {
            "attempt": 0, "node_rank": 0, "main_address": "127.0.0.1", "main_port": 45387, "job": name,
            "nodes": [{"id": "0", "host": "node0", "address": "127.0.0.1", "listen": 0, "slots": 2, "ports": []}],
        }  # fmt: skip
        status: Any = {
            "job": name, "job_id": node.job_id, "state": "RUNNING", "framework": "torch",
            "agent": {**process, "host": "node0", "boot": "1a58714f-758b-402c-b67e-2a9731b8af0a", "guard": process},
            "nodes": 1, "node_rank": 0, "world_size": 2, "attempt": 0, "restarts": 0, "max_restarts": 0,
            "exit_code": None, "created": then, "started": None, "finished": None, "ranks": ranks, "failure": None,
            "others": [], "devices": [], "waiting": None, "start": start,
        }  # fmt: skip
        run.append(
            {"event": "state", "status": status, "time": then},
            {"event": "started", "attempt": 0, "world_size": 2, "logs": logs, "time": then},
            {"event": "finished", "state": "SUCCEEDED", "exit_code": 0, "failure": None, "others": [], "time": then},
        )
        run.write_status(run.load_status(), run.journal.stat().st_size)
    paceline.home.chmod(0o700)
