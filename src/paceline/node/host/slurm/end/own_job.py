"""What Slurm says of the job that this process is part of."""

from __future__ import annotations

import math
import re
import time

from paceline.node.errors import Refused
from paceline.node.host.slurm.call import Away, call
from paceline.node.host.slurm.job_folder import own_number
from paceline.node.host.slurm.look.partitions import seconds_of

_TRIES, _PAUSE = 60, 5.0  # while Slurm does not answer; its controller may be restarted
_AT_ONCE = 10.0  # seconds that Slurm may take while a time limit comes near


def scontrol_job() -> str:
    """What `scontrol show job` prints of it; "" if Slurm says nothing for long."""
    for _ in range(_TRIES):
        try:
            return call("scontrol", "show", "job", own_number())
        except Away:
            time.sleep(_PAUSE)  # nothing says when the controller is back
        except Refused:
            break
    return ""


def seconds_left() -> float | None:
    """Seconds until its time limit, `math.inf` if it has none; None if Slurm does not say it at once."""
    try:
        shown = call("scontrol", "show", "job", own_number(), seconds=_AT_ONCE)
    except Refused:
        return None
    fields = dict(re.findall(r"(\w+)=(\S*)", shown))
    limit, run = fields.get("TimeLimit", ""), seconds_of(fields.get("RunTime", ""))
    if limit == "UNLIMITED":
        return math.inf
    whole = seconds_of(limit)
    return None if whole is None or run is None else whole - run
