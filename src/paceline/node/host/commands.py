"""The requests of a client elsewhere that change jobs on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from paceline.contract.nodejob import StoredJob
from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.journal.state import FINAL
from paceline.node.signals import LEAVE
from paceline.node.spec import NodeSpec
from paceline.node.store import lifecycle, records

if TYPE_CHECKING:
    from paceline.contract import messages
    from paceline.node.store.home import Home


def stop(home: Home, request: messages.Stop) -> messages.Named:
    """Stop those of the given jobs that are here."""
    runs = home.runs(request["names"])
    lifecycle.stop(runs, request["now"])
    return {"names": [run.path.name for run in runs]}


def suspend(home: Home, request: messages.Suspend) -> messages.Named:
    """Have those of the given jobs that are here suspended, or resumed."""
    runs = home.runs(request["names"])
    lifecycle.suspend(runs, request["resumes"])
    return {"names": [run.path.name for run in runs]}


def signal(home: Home, request: messages.Signal) -> messages.Sent:
    """Send a signal to the agent of a job here, which passes it on to the ranks that handle it."""
    return {"sent": records.signal_agent(home.run(request["name"]).path, (request["signal"],))}


def delete(home: Home, request: messages.OfJobs) -> messages.Named:
    """Remove those of the given jobs that are here."""
    runs = home.runs(request["names"])
    for run in runs:
        if run.is_held:
            raise Refused(f"job {run.path.name} has not ended; stop it first: paceline stop {run.path.name}")
    for run in runs:
        home.remove(run)
    return {"names": [run.path.name for run in runs]}


def invite(home: Home, request: messages.OfJob) -> messages.Invitation:
    """What another machine needs to take part in a job that runs here, with its code (tar)."""
    from pathlib import Path

    from paceline.node.machine import environments, processes
    from paceline.node.store import moving
    from paceline.node.store.code_folder import pack

    run = home.run(request["name"])
    node, job, status = NodeSpec.load(run.spec), StoredJob.from_json(read_json(run.job) or {}), run.read_status() or {}
    _check_elastic(node)
    if not run.is_held or status.get("state") in FINAL or not status.get("coordinator"):
        raise Refused(f"job {node.job} does not run here, or has not started yet")
    env = processes.environment(status["agent"]["pid"])
    code = job.code
    # Ranks that join get the newest checkpoint from the others.
    data = b"" if code is None else pack(Path(code["path"]), moving.own_checkpoints(run))
    return {
        "job": job.spec.to_json(), "job_id": node.job_id, "most": node.nodes,
        "door": cast("tuple[str, int]", status["address"]),
        "token": env.get("PACELINE_TOKEN"),
        "secrets": {name: env[name] for name in job.spec.secrets if name in env},
        "sources": job.data, "code": code, "data": data,
        "minor": environments.minor_of(node.python[0]),
    }  # fmt: skip


def leave(home: Home, request: messages.Leave) -> messages.Leaves:
    """Make this machine leave a job, which continues without it."""
    run = home.run(request["name"])
    node = NodeSpec.load(run.spec)
    _check_elastic(node)
    if request["remaining"] < node.least:
        raise Refused(
            f"job {node.job} needs {node.least} node{'s' if node.least > 1 else ''}, and {request['remaining']} would "
            f"be left; add others first, or end it with paceline stop {node.job}"
        )
    if not records.signal_agent(run.path, (LEAVE,)):
        raise Refused(f"job {run.path.name} does not run here")
    return {"leaves": run.path.name}


def open_tensorboard(home: Home, request: messages.OpenTensorboard) -> messages.Url:
    """The address of a job's TensorBoard, on this machine."""
    from paceline.node import tensorboard

    run = home.run(request["name"])
    return {"url": tensorboard.open_for_job((sys.executable,), run.path, request["logdir"])}


def close_tensorboard(home: Home, request: messages.OfJob) -> messages.Ran:
    """End the TensorBoard of a job."""
    from paceline.node import tensorboard

    return {"ran": tensorboard.stop(home.run(request["name"]).path)}


def _check_elastic(node: NodeSpec) -> None:
    if node.least == node.nodes:
        raise Refused(f"job {node.job} has a fixed number of nodes, {node.nodes}; submit it with --nnodes MIN:MAX")
