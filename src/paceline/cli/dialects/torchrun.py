"""torchrun, and `python -m torch.distributed.launch`.

Source: torch 2.13, `torch/distributed/run.py` and `torch/distributed/launch.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .engine import Ignored, Line, Tool

if TYPE_CHECKING:
    from .engine import Meaning


def _rendezvous(line: Line, value: str) -> None:
    """Either backend of torch's own means paceline's coordinator."""
    if value not in ("c10d", "static", ""):
        raise UserError(f"--rdzv-backend {value}: paceline's agents find each other without it; leave it out")


_FLAGS: dict[str, Meaning] = {
    "--nnodes N|MIN:MAX": "--nnodes",
    "--nproc-per-node N|gpu|cpu|auto": "-n",
    "--node-rank I": "--node-rank",
    "--master-addr HOST": "--master-addr",
    "--master-port PORT": "--master-port",
    "--local-addr HOST": "--local-addr",
    "--rdzv-endpoint HOST:PORT": "--rdzv-endpoint",
    "--rdzv-id ID": "--rdzv-id",
    "--rdzv-backend NAME": _rendezvous,
    "--rdzv-conf K=V,…": "--rdzv-conf",
    "--standalone": "--standalone",
    "--max-restarts N": "--max-restarts",
    "-m --module": "-m",
    "--no-python": "--no-python",
    "--run-path": Ignored("every script runs inside its rank"),
    "--start-method NAME": "--start-method",
    "--log-dir DIR": "--log-dir",
    "-r --redirects SPEC": "-r",
    "-t --tee SPEC": "-t",
    "--local-ranks-filter RANKS": "--local-ranks-filter",
    "--role NAME": "--role",
    "--numa-binding HOW": "--numa-binding",
    "--virtual-local-rank": "--virtual-local-rank",
    "--shutdown-timeout SECONDS": "--grace {}s",
    "--signals-to-handle NAMES": "--signals-to-handle",
    "--monitor-interval SECONDS": Ignored("paceline waits for events"),
    "--event-log-handler NAME": Ignored("paceline records the events of a job; see paceline events JOB"),
    "--logs-specs NAME": Ignored("--log-dir says where logs go, --tee and --redirects what is shown"),
    "--duplicate-stdout-filters TEXTS": Ignored("all lines are kept; see paceline logs JOB --all --grep TEXT"),
    "--duplicate-stderr-filters TEXTS": Ignored("all lines are kept; see paceline logs JOB --all --grep TEXT"),
}

TORCHRUN = Tool("torchrun", _FLAGS, shortens=True)
# Without --use-env, scripts that declare it get --local_rank here, too.
TORCH_LAUNCH = Tool("torch-launch", {**_FLAGS, "--use-env": "--use-env"}, shortens=True)
