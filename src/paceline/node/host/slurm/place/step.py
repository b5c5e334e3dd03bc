"""A job in an allocation that its user has made, with salloc or in a batch script: a step of srun.

A process of its own, `slurm-step`, waits for srun and writes down how the step ended. So the job's state is right also
if the client is killed; the job is stopped then. The allocation itself is never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.files import write_json
from paceline.node.host.slurm.call import batch_environment
from paceline.node.host.slurm.job_folder import JobFolder, current_start

from .batch_script import SEES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.contract.records import AllocationRecord, SlurmOutcome
    from paceline.node.host.slurm.job_folder import Start

# Set in all that such a job starts, to the number of its allocation: a `paceline run` there must not start it again.
WITHIN = "PACELINE_ALLOCATION"
# What a step needs of the allocation's variables; others, such as SLURM_NTASKS, would change what srun does.
_KEPT = re.compile(r"SLURM_(CONF|CLUSTERS|CLUSTER_NAME|WORKING_CLUSTER|RESTART_COUNT|JOB_ID|JOBID|ARRAY_.*|SUBMIT_.*)")
_COMPLETING, _PAUSE = 120, 1.0  # looks until Slurm has ended what ran in an allocation, and seconds between two
_LOOK = 0.5  # seconds between two looks for a stop; the kernel does not report what other machines write


def argv(folder: Path, allocation: AllocationRecord, srun: Sequence[str], task: Sequence[str]) -> list[str]:
    """The command that starts the agents."""
    nodes = allocation["nodes"]
    here = [f"--jobid={allocation['id']}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap"]
    return ["srun", *here, *srun, "sh", "-c", SEES, str(folder), *task, str(folder)]


def environment(secrets: Mapping[str, str], token: str | None, allocation: AllocationRecord) -> dict[str, str]:
    """The variables of the step."""
    kept, number = {name: os.environ[name] for name in os.environ if _KEPT.fullmatch(name)}, str(allocation["id"])
    own = {"SLURM_JOB_ID": number, "SLURM_EXPORT_ENV": "ALL", WITHIN: number}
    return {**batch_environment(secrets, token), **kept, **own}


def start(folder: JobFolder, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the step; it is stopped when this process ends."""
    with open(folder.output, "ab") as log:
        return subprocess.Popen(
            [sys.executable, ENTRY, "slurm-step", str(folder.path)],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=dict(env), start_new_session=True,
        )  # fmt: skip


def main(path: str) -> int:
    """Run the step of the job with this folder; returns its exit code."""
    folder, start = JobFolder(Path(path)), current_start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it is to say how the step ended, however that is
        signal.signal(number, lambda *_: None)
    folder.of(start).mkdir(parents=True, exist_ok=True)
    step = subprocess.Popen(
        shlex.split(os.fsdecode(folder.script.read_bytes()), comments=True), stdin=subprocess.DEVNULL
    )
    threading.Thread(target=_stop_with_client, args=(folder,), daemon=True).start()
    is_cancelled = False
    while True:
        try:
            code = step.wait(_LOOK)
            break
        except subprocess.TimeoutExpired:
            if not is_cancelled and folder.is_stopped and folder.step(start) is None:
                step.terminate()  # it still waits for its nodes
                is_cancelled = True
    with contextlib.suppress(OSError):  # the job was deleted
        write_json(folder.of(start) / "outcome.json", {**_outcome(folder, start, code), "time": time.time()})
    return code


def _stop_with_client(folder: JobFolder) -> None:
    """Stop the job when the process that has started this one has ended."""
    from paceline.node.host.slurm.end.stop import stop

    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    with contextlib.suppress(OSError, Refused):
        stop(folder, now=False)


def _outcome(folder: JobFolder, start: Start, code: int) -> SlurmOutcome:
    """How the step ended, if its nodes do not say that."""
    from paceline.node.failure import TIMED_OUT
    from paceline.node.host.slurm.end.finish import scontrol_job, why_unheard
    from paceline.node.host.slurm.look import job_record, reasons

    found = job_record.ended(folder, start)
    state = found["state"] if found else None
    if state in ("SUCCEEDED", "FAILED") or folder.refusals(start):
        return {"next": None}
    if folder.is_stopped:
        return {"next": None, "state": "STOPPED"}
    for _ in range(_COMPLETING):
        word = re.search(r"\bJobState=(\w+)", scontrol_job())
        if word is None or word[1] != "COMPLETING":  # which hides how it ends
            break
        time.sleep(_PAUSE)
    if word is not None and word[1] == "CANCELLED":
        return {"next": None, "state": "STOPPED", "why": "its allocation was cancelled in Slurm, not by paceline"}
    if word is not None and word[1] in reasons.ENDED:
        why = reasons.ENDED[word[1]].replace("it ", "its allocation ", 1)
        return {"next": None, "state": "FAILED", "exit_code": TIMED_OUT if word[1] == "TIMEOUT" else 1, "why": why}
    if state == "STOPPED":
        return {"next": None}
    return {"next": None, "state": "FAILED", "exit_code": code if code > 0 else 1, "why": why_unheard(folder)}
