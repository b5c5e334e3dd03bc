"""Why Slurm does not run a job yet, or has ended it, in plain words.

Source: https://slurm.schedmd.com/job_reason_codes.html and https://slurm.schedmd.com/job_state_codes.html.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from paceline.node.journal.fold import Scheduler

if TYPE_CHECKING:
    from paceline.contract.records import Cause, FinalState

_WAITING = {
    "Resources": "the resources that it asks for are in use",
    "Priority": "jobs with a higher priority come first",
    "Dependency": "it waits for the end of another job",
    "BeginTime": "its begin time has not come, or it was requeued a moment ago",
    "JobHeldUser": "its user holds it; let it go with: scontrol release {id}",
    "JobHeldAdmin": "an administrator of the cluster holds it",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows, or these are down",
    "PartitionTimeLimit": "its time limit is longer than its partition allows",
    "PartitionConfig": "its partition does not allow what it asks for",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Licenses": "its licenses are in use",
    "Cleaning": "its previous run is being cleaned up",
    "Prolog": "the nodes are being prepared",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node can ever satisfy what it asks for",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QOS may not be used in this partition",
    "JobArrayTaskLimit": "other tasks of its array come first",
    "JobHoldMaxRequeue": "it was requeued too often, and is held; let it go with: scontrol release {id}",
    "JobLaunchFailure": "it could not be started on a node, and is held; let it go with: scontrol release {id}",
    "launch failed requeued held": "it could not be started on a node; let it go with: scontrol release {id}",
    "DependencyNeverSatisfied": "a job that it waits for did not end as it must, so it never starts",
    "Nodes required for job are DOWN": "nodes that it needs are down, drained or reserved",
    "MaxMemPerLimit": "it asks for more memory than its partition allows",
    "FrontEndDown": "no front end can start it",
    "DeadLine": "it cannot end before its deadline",
    "None": "Slurm has not looked at it yet",
}  # fmt: skip
# Such as QOSMaxJobsPerUserLimit, AssocGrpCpuLimit and QOSMaxWallDurationPerJobLimit.
_LIMIT = re.compile(
    r"(?P<of>QOS|Assoc)(?:iation)?(?P<least>Min)?(?:Grp|Max)?(?P<what>[A-Za-z]*?)"
    r"(?P<per>PerUser|PerAccount|PerAcct|PerJob|PerNode)?(?:Limit|NotSatisfied)?"
)
_OF = {"QOS": "its QOS", "Assoc": "its account"}
_COUNTED = {  # the beginnings of what is limited
    "SubmitJob": "jobs in the queue", "Job": "jobs", "Cpu": "CPUs", "CPU": "CPUs", "Node": "nodes", "Mem": "memory",
    "GRES": "GPUs (GRES)", "Wall": "time", "Time": "time", "Billing": "billed resources", "License": "licenses",
}  # fmt: skip
_WHOSE = {"PerUser": " one user", "PerAccount": " one account", "PerAcct": " one account"}
ENDED = {
    "CANCELLED": "it was cancelled in Slurm",
    "TIMEOUT": "it reached its time limit in Slurm",
    "DEADLINE": "it reached its deadline in Slurm",
    "NODE_FAIL": "a node of it failed",
    "OUT_OF_MEMORY": "it used more memory than it had asked for",
    "PREEMPTED": "Slurm ended it for a job with a higher priority",
    "BOOT_FAIL": "a node of it could not be started",
    "FAILED": "its batch script failed",
    "COMPLETED": "its batch script ended",
    "REVOKED": "it was revoked",
}
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING")
_RESULTS: dict[str, FinalState] = {"COMPLETED": "SUCCEEDED", "CANCELLED": "STOPPED"}  # others mean FAILED
_CAUSES: dict[str, Cause] = {
    "TIMEOUT": "time limit", "DEADLINE": "time limit", "NODE_FAIL": "node lost", "BOOT_FAIL": "node lost",
    "OUT_OF_MEMORY": "out of memory", "PREEMPTED": "preempted",
}  # fmt: skip
PENDING = (
    "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE",
    "EXPEDITING",
)  # fmt: skip


def ended(word: str) -> Scheduler:
    """What it means that a Slurm job has ended in a state: its batch script exits with 0 only if the job succeeded."""
    result = _RESULTS.get(word, "FAILED")
    why = None if result == "SUCCEEDED" else ENDED.get(word, f"Slurm says {word}")
    return Scheduler("ended", why, result, cause=_CAUSES.get(word))


def waiting(reason: str, number: str, start: float | None) -> str:
    """What a job waits for, in one line."""
    word = reason.strip("()").partition(",")[0].strip()
    found = _WAITING.get(word)
    if found is None:
        found = _limit(word) or "Slurm has not started it"
    line = f"{found.format(id=number)} (Slurm: {reason.strip('()') or 'no reason'})"
    if start is not None and start > time.time():
        line += f"; estimated start: {time.strftime('%Y-%m-%d %H:%M', time.localtime(start))}"
    return line


def _limit(word: str) -> str | None:
    """A limit of a QOS or an account that keeps a job waiting; None if the word is not for one."""
    match = _LIMIT.fullmatch(word)
    if match is None:
        return None
    of = _OF[match["of"]]
    what = next((text for begin, text in _COUNTED.items() if match["what"].startswith(begin)), None)
    if what is None:
        return f"a limit of {of} is reached"
    is_time = what == "time"
    if "Minutes" in word:
        is_time, what = True, f"minutes of {what}"
    if match["least"]:
        return f"{of} wants more {what} than it asks for"
    if match["per"] in ("PerJob", "PerNode") or (what == "time" and "Max" in word):
        each = "one node" if match["per"] == "PerNode" else "one job"
        return f"it asks for more {what} than {of} allows {each}, so it does not start"
    if "RunMinutes" in word:
        return f"the running jobs of {of} take all its {what}"
    if is_time:
        return f"{of} has used up its {what}"
    return f"{of} allows{_WHOSE.get(match['per'], '')} no more {what} at the same time"
