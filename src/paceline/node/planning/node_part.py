"""One machine's part of a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import HOROVOD, thread_count
from paceline.contract.placement import MAIN_PORT
from paceline.node.machine import containers, devices
from paceline.node.spec import NodeSpec, Program
from paceline.node.tensorboard import logdir_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.contract.nodejob import NodeJob

    from .fitting import Here


def node_spec(
    job: NodeJob,
    here: Here,
    *,
    split_streams: tuple[int, ...] = (),
    folder: Path | None = None,
    variables: Iterable[tuple[str, str]] = (),
    job_id: str | None = None,
) -> NodeSpec:
    """This node's part of a completed job."""
    request = here.request(job)
    (least, nodes), ranks = job.node_range, int(job.ranks)
    env = dict(job.env)
    if "OMP_NUM_THREADS" not in {**os.environ, **env}:
        env["OMP_NUM_THREADS"] = str(thread_count(job.cpus or devices.cores(), ranks))
    if job.devices == 0:
        env.update(devices.visibility(()))
    if (job.framework == "horovod" or job.horovod) and job.horovod != "real":
        env[HOROVOD] = job.horovod or "fallback"
    env.update(variables)
    if job.checkpoint_dir is not None:
        env["PACELINE_CHECKPOINT_DIR"] = job.checkpoint_dir
    env["PACELINE_JOB_ID"] = job_id = job_id or os.urandom(16).hex()
    return NodeSpec(
        job=job.name,
        job_id=job_id,
        program=Program(*job.program, job.args),
        framework=job.framework or "torch",
        nproc=ranks,
        python=here.python,
        working_dir=str(folder or job.working_dir),
        container=containers.described(),
        env=env,
        setup=job.setup,
        preload=job.preload,
        start_method=job.start_method or "fork",
        # A fork server that stays would keep its container.
        keep_warm=None if isinstance(job.keep_warm, str) or containers.is_inside() else job.keep_warm,
        devices=None if request else () if job.devices == 0 else devices.accelerators(),  # the agent requests them
        node_rank=job.node_rank if nodes > 1 else 0,
        nodes=nodes,
        least=least,
        main_address=job.main_address,
        main_port=job.main_port if nodes == 1 else job.main_port or MAIN_PORT,
        local_address=job.local_address,
        join_timeout=job.join_timeout,
        last_call=job.last_call,
        silence=job.silence,
        max_restarts=job.max_restarts,
        grace=job.grace,
        hang_after=None if job.hang == "off" else job.hang_after,
        restarts_when_hung=job.hang == "restart",
        split_streams=split_streams,
        pass_index=job.pass_index,
        role=job.role,
        numa_binding=job.numa_binding,
        virtual_local_rank=job.virtual_local_rank,
        run_id=job.run_id,
        time_limit=job.time_limit,
        detached=job.detached,
        tensorboard=_tensorboard(job),
        request=request,
    )


def _tensorboard(job: NodeJob) -> str | None:
    """The folder that the job's TensorBoard shows, "" for its run directory; None for no TensorBoard."""
    if not job.tensorboard:
        return None
    return logdir_of(job.working_dir, job.tensorboard_dir) if job.tensorboard_dir else ""
