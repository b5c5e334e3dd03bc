"""Why Slurm does not run a job yet, or has ended it, in plain words.

Source: https://slurm.schedmd.com/job_reason_codes.html and https://slurm.schedmd.com/job_state_codes.html.
"""

from __future__ import annotations

import time

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
    "FrontEndDown": "no front end can start it",
    "DeadLine": "it cannot end before its deadline",
    "None": "Slurm has not looked at it yet",
}  # fmt: skip
_LIMITS = {  # the words that reasons such as QOSMaxJobsPerUserLimit and AssocGrpCpuLimit are made of
    "QOS": "a limit of its QOS",
    "Assoc": "a limit of its account",
    "MaxJobs": "a limit on the number of jobs",
}
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
PENDING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


def waiting(reason: str, number: str, start: float | None) -> str:
    """What a job waits for, in one line.

    Args:
        reason: Slurm's word for it.
        number: of the Slurm job.
        start: Slurm's estimate of its start, in seconds since the epoch; None if there is none.
    """
    word = reason.strip("()").partition(",")[0].strip()
    found = _WAITING.get(word)
    if found is None:
        limit = next((text for begin, text in _LIMITS.items() if word.startswith(begin)), None)
        found = f"{limit} is reached" if limit else "Slurm has not started it"
    line = f"{found.format(id=number)} (Slurm: {reason.strip('()') or 'no reason'})"
    if start is not None and start > time.time():
        line += f"; estimated start: {time.strftime('%Y-%m-%d %H:%M', time.localtime(start))}"
    return line
