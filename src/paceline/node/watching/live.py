"""Where the ranks of a job on this machine are now, for somebody who asks while it runs."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.stands import SHORT
from paceline.node.errors import Refused
from paceline.node.eventloop.loop import Loop
from paceline.node.machine.devices import granted
from paceline.node.rundir.directory import RunDirectory
from paceline.node.spec import NodeSpec, device_of

from .asking import Asked, ask, question
from .outside import Activity, Moment, look, look_at_children

if TYPE_CHECKING:
    from paceline.contract.stands import Answer, Stand

SECONDS = 2.0  # for which the ranks are watched: what has not moved meanwhile stands still


def stands(run: RunDirectory) -> list[Stand]:
    """Where the ranks of a job here are; takes `SECONDS`, and a little more if a rank does not answer."""
    status, spec = run.read_status() or {}, NodeSpec.load(run.spec)
    if spec.hang_after is None:
        raise Refused(f"the ranks of job {spec.job} cannot be asked: it was started with --hang off")
    devices = granted(spec, tuple(status.get("devices") or ())).devices
    ranks = {
        number: Asked(
            spec.job_id, status["attempt"], it["rank"], it["node"], it["pid"],
            device_of(devices, it["local_rank"]),
        )
        for number, it in enumerate(status.get("ranks", ())) if it["state"] == "RUNNING" and it["pid"]
    }  # fmt: skip
    if not ranks or not run.is_held:
        raise Refused(f"no rank of job {run.path.name} runs here")
    loop, begin = Loop(), time.monotonic()
    activities = {number: Activity(begin) for number in ranks}
    pids = [rank.pid for rank in ranks.values()]
    before = Moment(pids)
    found: list[list[Stand]] = []

    def heard(activity: Activity, answer: Answer | None) -> None:
        if answer is not None:
            activity.hear(answer, begin)

    for number, rank in ranks.items():
        activities[number].see(look(rank.pid), begin, partial(look_at_children, rank.pid, before))
        activities[number].family = look_at_children(rank.pid, before)  # what they do meanwhile counts
        question(loop, rank, SHORT, lambda answer, it=activities[number]: heard(it, answer))  # type: ignore[misc]
    loop.run_until(lambda: False, SECONDS)
    now, after = time.monotonic(), Moment(pids)
    for number, rank in ranks.items():
        activities[number].see(look(rank.pid), now, partial(look_at_children, rank.pid, after))
    ask(loop, ranks, activities, found.append)
    loop.run_until(lambda: bool(found))
    return found[0]


def main(run: str) -> None:
    """Write where the ranks are to stdout, beside one of them (`paceline attach`); `run` is the run directory."""
    try:
        print(json.dumps(stands(RunDirectory(Path(run)))))
    except Refused as error:
        sys.exit(f"paceline: {error}")
