"""Calls sbatch: to check a job, and to submit it."""

from __future__ import annotations

import contextlib
import getpass
import re
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.host.protocol import client_is_gone
from paceline.node.host.slurm.call import SECONDS, Away, Rejected, Unknown, batch_environment, batch_job, call
from paceline.node.host.slurm.look import partitions
from paceline.node.host.slurm.look.queue import Queue

from . import batch_script

if TYPE_CHECKING:
    from paceline.contract.nodejob import SlurmOrder
    from paceline.node.host.slurm.job_folder import JobFolder

_TRIES = 3  # of sbatch, while Slurm does not answer
_PAUSE = 2.0  # seconds between two of them
_FREE = 60.0  # seconds that sbatch may take
_UNAVAILABLE = "Requested node configuration is not available"  # also if nodes are down; sbatch lets it wait then


def limit(asked: SlurmOrder) -> float | None:
    """The time limit of a job that asks for none, in seconds; None if it needs none, or Slurm does not answer."""
    job, options = asked.order.job, batch_script.given(asked.options["slurm"])
    if job.time_limit is None and "time" not in options:
        with contextlib.suppress(Refused):
            return partitions.limit(options.get("partition", job.queue or ""))
    return None


def tested(batch: str, asked: SlurmOrder) -> list[str]:
    """Let Slurm check a script, and submit nothing; returns notes for the user."""
    try:
        call("sbatch", "--test-only", env=batch_environment({}, None), text=batch)
    except Rejected as error:
        if _UNAVAILABLE in error.output and (down := _missing_nodes(asked)):
            return [f"it waits until nodes are back that are down or drained now: {', '.join(down)}"]
        raise _refusal(error, asked) from None
    return []


def _missing_nodes(asked: SlurmOrder) -> list[str]:
    """The nodes that are not up and without which the job has too few; empty if it has too few with them, too."""
    job, options = asked.order.job, batch_script.given(asked.options["slurm"])
    partition = options.get("partition", job.queue or "")
    gpus = job.devices if isinstance(job.devices, int) else 0
    fitting = [
        node
        for node in partitions.nodes()
        if (not partition or set(partition.split(",")) & set(node["partitions"]))
        and node["gpus"] >= gpus
        and node["cpus"] >= (job.cpus or 0)
        and node["memory"] >= (job.memory or 0)
    ]
    if len(fitting) < job.node_range[0]:
        return []
    return [f"{it['name']} ({it['state']})" for it in fitting if partitions.NOT_UP.search(it["state"])]


def _refusal(error: Rejected, asked: SlurmOrder) -> Refused:
    output = re.sub("^(allocation failure|Batch job submission failed): ", "", error.output)
    wrong = re.search(r"Invalid (--[a-z-]+)", output)
    hint = f"see what there is with paceline top node --on {asked.target}"
    if wrong is not None:
        hint = f"correct {wrong[1]}"
    elif known := _known(output.lower()):
        hint = f"there are {', '.join(known)}"
    return Refused(f"Slurm refuses the job: {output}; {hint}")


def _known(output: str) -> list[str]:
    """The partitions, or the user's accounts, if Slurm does not know the one that was asked for."""
    with contextlib.suppress(Refused):  # who may not see them gets the other hint
        if "invalid partition" in output:
            return sorted({name for node in partitions.nodes() for name in node["partitions"]})
        if "invalid account" in output:
            user = f"user={getpass.getuser()}"
            lines = call("sacctmgr", "--noheader", "--parsable2", "show", "associations", user, "format=Account")
            return sorted(set(filter(None, lines.split())))
    return []


def submitted(folder: JobFolder, asked: SlurmOrder) -> str:
    """The number of the new Slurm job."""
    env = batch_environment(asked.order.secrets, asked.order.token)
    try:
        return batch_job(
            folder.script, env, lambda: _taken(folder), tries=_TRIES, pause=_PAUSE, seconds=_FREE,
            gives_up=client_is_gone,
        )  # fmt: skip
    except Rejected as error:
        raise _refusal(error, asked) from None
    except Unknown as error:
        raise Unknown(f"{error}: see paceline get {folder.name}") from None


def _taken(folder: JobFolder) -> str | None:
    """The number under which Slurm has a job although its sbatch failed; None if it has none."""
    queue = Queue(folder.root, 0.0, SECONDS)
    found = queue.of(folder.identity(folder.read()))
    if not found and queue.problem is not None:
        raise Away(str(queue.problem))
    return (found[0].task.partition("_")[0] or str(found[0].id)) if found else None
