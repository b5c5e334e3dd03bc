"""One machine's part of a job."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.contract import HOROVOD, thread_count
from paceline.contract.nodejob import Circumstances, Running
from paceline.contract.placement import MAIN_PORT
from paceline.node.machine import containers, devices
from paceline.node.spec import NodeSpec, Program
from paceline.node.tensorboard import logdir_of

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.contract.nodejob import NodeJob, Order

    from .fitting import Fitted, Here


def node_spec(order: Order, fitted: Fitted, here: Here, *, folder: Path | None = None) -> NodeSpec:
    """This node's part of a job, whose code is, or will be, in `folder`."""
    job = fitted.job
    request = here.request(job)
    (least, nodes), ranks = job.node_range, int(job.ranks)
    env = dict(job.env)
    if "OMP_NUM_THREADS" not in {**os.environ, **env}:
        env["OMP_NUM_THREADS"] = str(thread_count(job.cpus or devices.cores(), ranks))
    if job.devices == 0:
        env.update(devices.visibility(()))
    if (job.framework == "horovod" or job.horovod) and job.horovod != "real":
        env[HOROVOD] = job.horovod or "fallback"
    env.update((source["variable"], source["path"]) for source in order.data)
    if job.checkpoint_dir is not None:
        env["PACELINE_CHECKPOINT_DIR"] = job.checkpoint_dir
    env["PACELINE_JOB_ID"] = job_id = order.job_id or os.urandom(16).hex()
    if nodes > 1 and job.main_port is None:
        job = replace(job, main_port=MAIN_PORT)
    return NodeSpec(
        **order.shared(Circumstances),
        **job.shared(Running),
        job=job.name,
        job_id=job_id,
        program=Program(*job.program, job.args),
        framework=job.framework or "torch",
        nproc=ranks,
        python=here.python,
        working_dir=str(folder or job.working_dir),
        container=containers.described(),
        mounts=tuple((it["path"], it["wanted"]) for it in order.data if it["mount"]),
        env=env,
        start_method=job.start_method or "fork",
        why_exec=fitted.why_exec,
        # A fork server that stays would keep its container.
        keep_warm=None if isinstance(job.keep_warm, str) or containers.is_inside() else job.keep_warm,
        devices=None if request else () if job.devices == 0 else devices.accelerators(),  # the agent requests them
        node_rank=job.node_rank if nodes > 1 else 0,
        nodes=nodes,
        least=least,
        expected=len(order.hosts) or None,
        hang_after=None if job.hang == "off" else job.hang_after,
        restarts_when_hung=job.hang == "restart",
        split_streams=split_of(order, job),
        local_rank_flag=fitted.local_rank_flag,
        tensorboard=_tensorboard(job),
        request=request,
    )


def split_of(order: Order, job: NodeJob) -> tuple[int, ...]:
    """The local ranks of a completed job whose stderr has a file of its own."""
    return tuple(rank for rank in order.split if rank < int(job.ranks))


def _tensorboard(job: NodeJob) -> str | None:
    """The folder that the job's TensorBoard shows, "" for its run directory; None for no TensorBoard."""
    if not job.tensorboard:
        return None
    return logdir_of(job.working_dir, job.tensorboard_dir) if job.tensorboard_dir else ""
