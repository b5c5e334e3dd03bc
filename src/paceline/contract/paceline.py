"""The variables that every rank of a paceline job gets, whatever its framework."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .placement import PLACEMENT_FIELDS, Placement
from .values import placement_from, split_list

if TYPE_CHECKING:
    from collections.abc import Mapping

# Where a rank records the exception that ends it: a JSON object with type, message, traceback, time (of the monotonic
# clock), pid, log_start and log_end (offsets of the traceback in the log, or null).
ERROR_FILE = "PACELINE_ERROR_FILE"
# Beside that file, with this suffix: the rank wants SIGINT instead of SIGTERM when the job is stopped by Ctrl-C.
WANTS_INTERRUPT = ".interrupt"
# The exit code of a rank that got a signal to stop and has saved its state (EX_TEMPFAIL of sysexits.h: try again).
RESUME_CODE = 75
# The signals that ask ranks to finish their step, save their state and leave with that code.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
# The secret that the nodes of a job share, and the key of its ranks, which is derived from it for one attempt.
TOKEN = "PACELINE_TOKEN"
RANK_KEY = "PACELINE_RANK_KEY"
# What git gets when it fetches the code of a job; no rank has them.
GIT_CREDENTIALS = ("GIT_SYNC_USERNAME", "GIT_SYNC_PASSWORD")
# Set if `import horovod` means paceline.horovod in the ranks: "paceline" in any case, "fallback" where Horovod is not
# installed for the Python that imports it.
HOROVOD = "PACELINE_HOROVOD"


_NUMBERS = {
    "rank": "PACELINE_RANK",
    "world_size": "PACELINE_WORLD_SIZE",
    "local_rank": "PACELINE_LOCAL_RANK",
    "local_world_size": "PACELINE_LOCAL_WORLD_SIZE",
    "node_rank": "PACELINE_NODE_RANK",
    "node_count": "PACELINE_NODE_COUNT",
    "main_port": "PACELINE_MAIN_PORT",
    "attempt": "PACELINE_ATTEMPT",
}


class PacelineContract(Contract):
    """PACELINE_RANK, PACELINE_WORLD_SIZE, …: one variable per field of `Placement`."""

    name: ClassVar[str] = "paceline"
    carries: ClassVar[frozenset[str]] = PLACEMENT_FIELDS

    def write(self, placement: Placement) -> Variables:
        """The whole placement."""
        return {
            **{name: str(getattr(placement, field)) for field, name in _NUMBERS.items()},
            "PACELINE_JOB": placement.job,
            "PACELINE_MAIN_ADDRESS": placement.main_address,
            "PACELINE_DEVICES": ",".join(placement.devices),
            "PACELINE_ENDPOINTS": ",".join(placement.endpoints),
        }

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a rank that paceline started."""
        if "PACELINE_RANK" not in env:
            return None
        return placement_from(
            env,
            _NUMBERS,
            main_address=env.get("PACELINE_MAIN_ADDRESS", "127.0.0.1"),
            devices=split_list(env.get("PACELINE_DEVICES", "")),
            job=env.get("PACELINE_JOB", "none"),
            endpoints=split_list(env.get("PACELINE_ENDPOINTS", "")),
        )
