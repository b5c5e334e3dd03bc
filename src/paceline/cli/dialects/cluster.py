"""Where the jobs of a tool go, and what that place has."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.job.errors import UserError

from .engine import Line

CLUSTER = "kubernetes"
# What only pods have.
_OF_PODS = (
    "--image", "--worker-image", "--share-memory", "--clean-pods", "--gang", "--selector", "--toleration",
    "--priority-class", "--annotation", "--pull-policy", "--pull-secret", "--git-image", "--host-network",
    "--resources", "--gpu-resource", "--kind", "--namespace",
)  # fmt: skip
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_ROLES = ("--chief", "--ps", "--evaluator")  # of ranks besides the workers


def _has_cluster(line: Line) -> bool:
    """Whether this machine knows a Kubernetes cluster, or the line names its file."""
    return (
        any(word.startswith("KUBECONFIG=") for word in line.before)
        or bool(os.environ.get("KUBECONFIG") or os.environ.get("KUBERNETES_SERVICE_HOST"))
        or Path("~/.kube/config").expanduser().exists()
    )


def place(line: Line) -> str:
    """Add the target, unless it is the default one: the cluster, if there is one; returns its kind of backend."""
    from paceline.backends.registry import HERE, default_target
    from paceline.job.settings import load

    default = default_target()
    target = line.get("--on") or default
    if target == HERE and _has_cluster(line):
        target = CLUSTER
    if line.get("--on") is None and target != default:
        line.flags.insert(0, ("--on", target))
    found = load().targets.get(target)
    return target if found is None else found.backend


def placed(line: Line) -> None:
    """Add the target of a job. Where it is no cluster there are no pods; on this machine, workers are ranks."""
    from paceline.backends.registry import HERE

    if os.path.basename(line.program[0]) in _SHELLS:
        line.add("--no-python")
    kind = place(line)
    for flag in _OF_PODS if kind != CLUSTER else ():
        if line.take(flag) is not None:
            line.notes.append(f"{flag} has no effect: the job does not run in a cluster")
    others = {flag: number for flag in _ROLES if (number := line.get(flag)) is not None}
    for flag, number in others.items():
        if not number.isdecimal():
            raise UserError(f"{flag} {number} is no number; write for example {flag} 2")
    if kind != HERE:
        return
    workers = line.take("--nnodes") or ("1" if others else None)
    if workers is None:
        return
    each, gpus = line.get("-n") or "1", line.take("--gpus")
    if not "".join((workers, each, gpus or "0")).isdecimal():
        raise UserError(f"--workers {workers}: on one machine, write the number of ranks, as -n N")
    if not others:
        line.take("-n")
    if others or line.get("-np") is None:  # which counts the ranks of all workers
        line.flags.insert(0, ("--workers", workers) if others else ("-n", str(int(workers) * int(each))))
    if gpus is not None:
        line.add("--gpus", str((int(workers) + sum(map(int, others.values()))) * int(gpus)))


def has_devices(line: Line) -> bool:
    """Whether this machine has devices; of others it is assumed."""
    if any(line.get(flag) is not None for flag in ("--on", "-H", "--hosts", "--hostfile")):
        return True
    from paceline.backends import registry
    from paceline.backends.base import Metered, able

    return any(node.gpus for node in able(registry.load(), Metered).nodes(lambda _: None))
