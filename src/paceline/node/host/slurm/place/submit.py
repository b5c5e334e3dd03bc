"""Submits a job to Slurm, on a machine that has sbatch.

The folder of the job is complete before sbatch is called. The Slurm job has paceline's identifier as its comment. So
whoever is ended meanwhile leaves either nothing in Slurm, or a job that is found by that comment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.contract.nodejob import Order, SlurmOrder
from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.files import write_json
from paceline.node.host.protocol import Bytes, client_is_gone, next_order
from paceline.node.host.slurm.call import SECONDS, Unknown, found
from paceline.node.host.slurm.job_folder import SlurmJob
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.host.slurm.look import job_record
from paceline.node.host.slurm.look.queue import NothingAsked, Queue
from paceline.node.planning.script import program_kind
from paceline.node.readers import Begun

from . import batch_script, container, sbatch, step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.contract.messages import JobAnswer, Kept, SlurmSubmit
    from paceline.contract.nodejob import NodeJob
    from paceline.contract.records import AllocationRecord, JobRecord, SlurmOptions
    from paceline.node.host.slurm.job_folder import JobFolder
    from paceline.node.store.home import Home

_LAST = 300.0  # seconds for which a job is cancelled whose client is gone, while Slurm does not answer


def slurm_submit(home: Home, request: SlurmSubmit) -> Iterator[JobAnswer | Kept]:
    """Check a job, and submit it when the client says so.

    The first answer is the batch script, which Slurm would take, or the folder of a job that has the name. The
    complete order follows on stdin if the job is to be submitted, and then the archive (tar) of its code, of `bytes`
    bytes. The answer to that is the job's record. A job that is not followed is kept once the client has confirmed it
    by another line, which is answered: until then nothing is left of it if the client ends.
    """
    jobs, asked = Jobs(home.root), SlurmOrder.from_json(request["order"])
    found("sbatch" if asked.allocation is None else "srun")
    taken = _taken_folder(jobs, asked)
    if taken is not None:
        yield {"taken": str(taken)}
        return
    _check(jobs, asked.order.job)
    notes: list[str] = []
    if asked.allocation is None:
        asking = Begun(functools.partial(sbatch.limit, asked))  # Slurm is asked both at once
        notes = sbatch.tested(_script(jobs, asked), asked)
        asked = replace(asked, options={**asked.options, "limit": asking.result()})
        notes += batch_script.notes_on_limit(asked.order.job, asked.options)
    yield {"script": _script(jobs, asked), "notes": notes}
    line = next_order()
    if not line:
        return
    asked = replace(asked, order=Order.from_json(json.loads(line)))
    folders = _settled(jobs, asked)
    if folders is None:
        yield {"taken": str(_taken_folder(jobs, asked))}
    elif asked.allocation is not None:
        yield from _run_step(home, folders[0], asked.order, asked.allocation)
    else:
        yield from _run_batch(home, folders, asked)


def _run_batch(home: Home, folders: list[JobFolder], asked: SlurmOrder) -> Iterator[JobAnswer | Kept]:
    """Submit jobs whose folders are complete: one, or an array."""
    jobs, rank_streams = Jobs(home.root), asked.order.rank_streams
    try:
        if client_is_gone():
            raise Refused("the client has ended")
        number = sbatch.submitted(folders[0], asked)
    except Unknown:
        raise
    except BaseException:
        for folder in folders:
            jobs.remove(folder)
        raise
    is_kept = False
    try:
        for folder, task in zip(folders, asked.tasks or [None]):
            folder.add_id(number if task is None else f"{number}_{task}")
        first, *others = [_record(home, folder) for folder in folders]
        yield {"record": first, "id": number, "others": others}
        is_kept = rank_streams is not None or bool(next_order())
    finally:
        if not is_kept:
            _undo(jobs, folders, number)
    if rank_streams is not None:
        from .foreground import follow  # takes long to import

        yield from follow(home, folders[0], rank_streams)
    elif is_kept:
        yield {"kept": True}


def _undo(jobs: Jobs, folders: list[JobFolder], number: str) -> None:
    """Cancel what was just submitted; jobs that have started meanwhile keep their folders, and are stopped."""
    from paceline.node.host.slurm.end.stop import cancel

    for folder in folders:  # nodes that share the disk see this if Slurm does not answer
        folder.stop.write_text(f"{int(signal.SIGTERM)}\n")
    with contextlib.suppress(Refused):
        cancel(number, _LAST)
    queue, identity = Queue(jobs.root, 0.0, SECONDS), folders[0].identity(folders[0].read())
    is_over = all(entry.is_over for entry in queue.of(identity)) and queue.problem is None
    if is_over and not any(folder.starts for folder in folders):
        for folder in folders:
            with contextlib.suppress(Refused):
                jobs.remove(folder)


def _names(asked: SlurmOrder) -> list[str]:
    """The names of the jobs: one, or one for each index of an array."""
    name = asked.order.job.name
    return [f"{name}-{task}" for task in asked.tasks] or [name]


def _taken_folder(jobs: Jobs, asked: SlurmOrder) -> Path | None:
    """The folder of a job that has one of the names already."""
    return next((folder.path for folder in jobs.named(_names(asked))), None)


def _settled(jobs: Jobs, asked: SlurmOrder) -> list[JobFolder] | None:
    """The complete folders of new jobs; None if a name is taken, and then there are none."""
    order = asked.order
    archive = Bytes(order.bytes)
    if _taken_folder(jobs, asked) is not None:
        archive.skip()
        return None
    folders: list[JobFolder] = []
    whole, batch = order.job_id or "", _script(jobs, asked)
    with contextlib.ExitStack() as undo:
        for name, task in zip(_names(asked), asked.tasks or [None]):
            job_id = whole if task is None else f"{whole[:-4]}{task:04x}"[-32:]
            part = replace(asked, order=replace(order.with_job(name=name), job_id=job_id))
            new = _New(part, batch, None if task is None else (whole, task))
            folder = _settled_one(jobs, new, archive, folders[0] if folders else None)
            if folder is None:
                return None
            undo.callback(jobs.remove, folder)
            folders.append(folder)
        undo.pop_all()
    return folders


class _New(NamedTuple):
    """A job to be submitted: what is asked for, its batch script, and which one of an array it is."""

    asked: SlurmOrder
    batch: str
    task: tuple[str, int] | None


def _settled_one(jobs: Jobs, new: _New, archive: Bytes, first: JobFolder | None) -> JobFolder | None:
    """The complete folder of a new job, with the code of the first one of its array; None if its name is taken."""
    building = jobs.new(new.asked.order.job.name)
    try:
        with jobs.filling(building):
            _fill(jobs, building, new, archive, first)
        return jobs.settle(building)
    finally:
        jobs.discard(building)


def _record(home: Home, folder: JobFolder) -> JobRecord:
    """The record of a job that was just made."""
    found = job_record.record(folder, NothingAsked(home.root))
    assert found is not None
    return found


def _run_step(home: Home, folder: JobFolder, order: Order, allocation: AllocationRecord) -> Iterator[JobAnswer]:
    """Start a job in the allocation of its user, and follow it."""
    try:
        env = step.environment(order.secrets, order.token, allocation)
        minder = step.start(folder, env)
    except OSError as error:
        Jobs(home.root).remove(folder)
        raise Refused(f"cannot start the job here: {error.strerror}; nothing of it is left") from None
    from .foreground import follow  # takes long to import

    yield {"record": _record(home, folder), "id": folder.ids[-1], "others": []}
    assert order.rank_streams is not None
    yield from follow(home, folder, order.rank_streams, minder.wait)


def _fill(jobs: Jobs, folder: JobFolder, new: _New, archive: Bytes, first: JobFolder | None) -> None:
    asked, batch, task = new
    job, code = asked.order.job, asked.order.code
    old = _old(jobs, job)
    place = jobs.path / job.name  # where the folder will be
    if job.code is not None:
        from paceline.node.store.code_folder import copy_of, link, unpack  # takes long to import

        if first is not None:
            code = first.read().code or {}
            copy_of(code, folder.code, copy=link)
        elif old is not None:
            code = old.read().code or {}
            copy_of(code, folder.code)
        else:
            unpack(archive, folder.code)
        code = {**(code or {}), "path": str(place / "code" / job.name)}
        working_dir = code["path"]
        _check_program(job, folder.code)
    else:
        working_dir = _working_dir(job)
    index = _index(asked.tasks, task[1]) if task is not None else None if old is None else old.read().index
    node = replace(
        job, code=None, resume_from=None, queue=None, log_dir=None, working_dir=working_dir,
        time_limit=None if asked.allocation is None else job.time_limit,  # in an allocation, the agents see to it
        env={**index, **job.env} if index and task is None else job.env,  # else Slurm sets them
        checkpoint_dir=job.checkpoint_dir or str(place / "checkpoints"),
    )  # fmt: skip
    if old is not None and not job.fresh:
        from paceline.node.store import lifecycle

        lifecycle.take_checkpoints(old.path, folder.path)
    folder.script.write_bytes(os.fsencode(batch))
    stored = SlurmJob(
        asked.order.job_id or "", time.time(), job, node, asked.options, code, asked.order.data, asked.order.terminal,
        asked.allocation, task, index,
    )  # fmt: skip
    write_json(folder.job, stored.to_json())
    folder.job.chmod(0o600)
    (folder.path / "lives").mkdir()  # now, so that no client remembers that they are missing (NFS)
    if asked.allocation is not None:
        folder.add_id(str(asked.allocation["id"]))


def _index(tasks: Sequence[int], task: int) -> dict[str, str]:
    """The variables that say which job of its array one is, for when it is run again without the others."""
    numbers = {"ID": task, "COUNT": len(tasks), "MIN": min(tasks), "MAX": max(tasks)}
    return {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in numbers.items()}


def _check(jobs: Jobs, job: NodeJob) -> None:
    """Check a job, as far as that is possible without its code."""
    old = _old(jobs, job)
    if old is not None and job.options.get("array") not in (None, old.read().spec.options.get("array")):
        raise Refused("--array: one job is run again, not several; leave it out")
    if job.code is None:
        _check_program(job, _working_dir(job))


def _old(jobs: Jobs, job: NodeJob) -> JobFolder | None:
    """The job that this one goes on from."""
    if job.resume_from is None:
        return None
    old = jobs.find(job.resume_from)
    if old is None:
        raise Refused(f"no job {job.resume_from!r} to resume from on this cluster; see paceline list -A")
    if job.code is not None and not old.code.is_dir():
        raise Refused(f"the code of job {old.name} is gone; submit the job again")
    return old


def _working_dir(job: NodeJob) -> str:
    folder: str = os.path.abspath(os.path.expanduser(job.working_dir))
    if not os.path.isdir(folder):
        raise Refused(f"no folder {folder} here; name one on the shared disk with --working-dir, or send the code")
    return folder


def _check_program(job: NodeJob, folder: str | Path) -> None:
    """Check that the script is there; the nodes check the rest, since other things may be installed on them."""
    if job.script is not None:
        program_kind(job.script, Path(folder))


def _script(jobs: Jobs, asked: SlurmOrder) -> str:
    order, job = asked.order, asked.order.job
    place = jobs.path / job.name
    inside = container.described(asked.options["container"], job, place, order.data)
    options: SlurmOptions = {**asked.options, "container": inside}
    if asked.allocation is not None:
        task = batch_script.agent([sys.executable, ENTRY], options)
        return shlex.join(step.argv(place, asked.allocation, batch_script.flags(job, options), task)) + "\n"
    return batch_script.text(job, place, [sys.executable, ENTRY], options, order.job_id or "")
