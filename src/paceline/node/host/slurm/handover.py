"""What the first node does at the end of a job whose nodes share no disk: nothing of the job can be seen afterwards.

The other nodes' files are gathered here, clients that follow the job are waited for, and how it ended goes into the
comment of its Slurm job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

from paceline.node.errors import Refused

from . import mirror, transfer, view
from .commands import call
from .folder import COMMENT, own_number
from .own_job import shown_by_slurm
from .queue import told_in
from .sender import GATHERED, READERS, wait_for_readers

if TYPE_CHECKING:
    from .folder import JobFolder, Life

_GATHERING = 60.0  # seconds that it may take to get the files of the other nodes
_COMING = 30.0  # seconds until a client in the foreground that follows the job has found it
_LOOK = 0.2
_MOST = 900  # bytes of what a comment says; squeue shows 1024 of the whole
_MOST_NODES = 200  # bytes of their names, if that is too much


def gather(folder: JobFolder, life: Life) -> None:
    """Get the files of the other nodes, when all agents have ended."""
    if not folder.is_broadcast():
        return
    readers, until = folder.of(life) / READERS, time.monotonic() + _COMING
    while folder.read().get("followed") and not (readers.exists() or folder.stop.exists()) and time.monotonic() < until:
        time.sleep(_LOOK)
    others = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1) - 1
    if not others:
        return
    step = ["--overlap", "--relative=1", f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1"]
    before = {run.path.parent for run in folder.runs(life)}
    with contextlib.suppress(Refused, OSError):
        said = transfer.pull(
            folder, life, transfer.command(folder, life, "last", *step), env=dict(os.environ), seconds=_GATHERING
        )
        if said:
            print(f"paceline: not all files of the other nodes came to this one: {said}", flush=True)
    (folder.of(life) / transfer.COMPLETE).unlink(missing_ok=True)
    for run in folder.runs(life):
        if run.path.parent not in before:
            (run.path.parent / GATHERED).touch()


def settled(folder: JobFolder, outcome: dict[str, Any]) -> dict[str, Any]:
    """What follows at the end of a life: a job is not started again where its checkpoints are not."""
    if outcome.get("next") != view.REQUEUE or not folder.is_broadcast():
        return outcome
    if folder.read()["spec"]["checkpoint_dir"] is not None:
        return outcome
    return {"next": None, "state": "FAILED", "exit_code": 1, "why": f"{outcome['why']}; {mirror.AWAY}"}


def report(folder: JobFolder, life: Life, outcome: dict[str, Any], found: dict[str, Any] | None, code: int) -> None:
    """Say in the comment of the Slurm job how the life has ended, and let all who follow it get the rest."""
    if not folder.is_broadcast():
        return
    told = {"state": found["state"], "exit_code": found["exit_code"]} if found else {}
    told = {**told, **{key: value for key, value in outcome.items() if value is not None}}
    if folder.refusals(life):
        told = {**told, "state": "FAILED", "exit_code": 2}
    env = os.environ
    told = {
        "next": outcome.get("next"), "state": told.get("state") or "FAILED", "exit_code": told.get("exit_code", code),
        "why": _public(folder, life, outcome, found), "time": round(time.time(), 1),
        "life": str(life), "attempt": found["attempt"] if found else None,
        "host": env.get("SLURMD_NODENAME"), "nodes": env.get("SLURM_JOB_NODELIST"),
    }  # fmt: skip
    with contextlib.suppress(Refused):
        job_id = folder.read()["job_id"]
        call("scontrol", "update", f"jobid={own_number()}", f"comment={COMMENT}{job_id} {_within(told)}")
    wait_for_readers(folder.of(life))


def _public(folder: JobFolder, life: Life, outcome: dict[str, Any], found: dict[str, Any] | None) -> str | None:
    """Why a life has ended, without what ranks have printed or raised: every user of the cluster sees the comment."""
    more = f"paceline logs {folder.name} has more"
    if refusals := folder.refusals(life):
        return refusals[0]
    if outcome.get("why"):
        return f"no node has started it; {more}" if outcome.get("is_printed") else str(outcome["why"])
    if found is None or not found["error"]:
        return None
    for run in folder.runs(life):
        failure = (run.read_status() or {}).get("failure")
        if failure and failure["rank"] is not None:
            how = f"killed by {failure['signal']}" if failure["signal"] else f"exit code {failure['exit_code']}"
            how = "killed: out of memory" if failure["oom"] else how
            return f"rank {failure['rank']} on {failure['host']}: {how}; {more}"
    return f"it failed on its nodes; {more}"


def _within(told: dict[str, Any]) -> str:
    """What a comment says, and no more than squeue shows."""
    if len(json.dumps(told)) > _MOST and len(told["nodes"] or "") > _MOST_NODES:
        told = {**told, "nodes": None}
    while (over := len(said := json.dumps(told)) - _MOST) > 0 and told["why"]:
        told = {**told, "why": told["why"][: -(over // 12 + 1)]}  # a character takes up to 12 bytes
    return said


def first_attempt(folder: JobFolder, life: Life) -> int:
    """The number of a life's first attempt as far as Slurm knows it: the nodes of the life before may be others."""
    if not life.restarts or not folder.is_broadcast():
        return 0
    said = re.search(r"\bComment=\S+ (\{.*)", shown_by_slurm())
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return int(told_in(said[1])["attempt"]) + 1 if said else life.restarts
    return life.restarts
