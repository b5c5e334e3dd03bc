"""What Slurm says of the job that this process is part of."""

from __future__ import annotations

import time

from paceline.node.errors import Refused
from paceline.node.host.slurm.call import Away, call
from paceline.node.host.slurm.job_folder import own_number

_TRIES, _PAUSE = 60, 5.0  # while Slurm does not answer; its controller may be restarted


def shown_by_slurm() -> str:
    """What `scontrol show job` prints of it; "" if Slurm says nothing for long."""
    for _ in range(_TRIES):
        try:
            return call("scontrol", "show", "job", own_number())
        except Away:
            time.sleep(_PAUSE)  # nothing says when the controller is back
        except Refused:
            break
    return ""
