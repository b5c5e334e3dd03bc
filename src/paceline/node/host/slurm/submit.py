"""Submits a job to Slurm, on a machine that has sbatch.

The folder of the job is complete before sbatch is called. The Slurm job has paceline's identifier as its comment. So
whoever is ended meanwhile leaves either nothing in Slurm, or a job that is found by that comment.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.files import write_json
from paceline.node.host.protocol import Bytes
from paceline.node.planning.script import program_kind
from paceline.node.store import lifecycle
from paceline.node.store.code_copy import copy_of, unpacked

from . import allocated, script, view
from .commands import Away, Rejected, batch_environment, call, found
from .folder import Jobs
from .follow import follow
from .queue import Queue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.node.store.home import Answer, Home, Request

    from .folder import JobFolder

_TRIES = 3  # of sbatch, while Slurm does not answer
_PAUSE = 2.0  # seconds between two of them
_FREE = 60.0  # seconds that sbatch may take
_NUMBER = re.compile(r"^(\d+)", re.MULTILINE)


def slurm_prepare(home: Home, request: Request) -> Answer:
    """What `slurm_submit` would do: the batch script; writes nothing, and asks Slurm whether it would take it.

    Raises:
        Refused: the job cannot run there, or its name is taken.
    """
    jobs, job = Jobs(home.root), request["job"]
    found("sbatch" if request["allocation"] is None else "srun")
    if jobs.find(job["name"]) is not None:
        return {"taken": str(jobs.path / job["name"])}
    _old(jobs, job)
    if job["code"] is None:
        _check_program(job, _working_dir(job))
    batch = _script(jobs.path / job["name"], request)
    notes = _tested(batch, request) if request["allocation"] is None else []
    return {"root": str(home.root), "script": batch, "notes": notes}


def slurm_submit(home: Home, request: Request) -> Iterator[Answer]:
    """Submit a job; the archive (tar) of its code, of `bytes` bytes, follows on stdin.

    Raises:
        Refused: Slurm does not take it; nothing of it is left.
    """
    if request["tasks"]:
        yield from _submit_array(home, request)
        return
    jobs, job = Jobs(home.root), request["job"]
    archive = Bytes(request["bytes"])
    found("sbatch" if request["allocation"] is None else "srun")
    if jobs.find(job["name"]) is not None:
        archive.skip()
        yield {"taken": str(jobs.path / job["name"])}
        return
    folder = _settled(jobs, job["name"], request, archive)
    if folder is None:
        yield {"taken": str(jobs.path / job["name"])}
        return
    yield {"made": True}
    if request["allocation"] is not None:
        yield from _run_step(home, folder, request)
        return
    try:
        number = _submitted(folder, request)
    except Unknown:
        raise
    except Refused:
        jobs.remove(folder)
        raise
    folder.add_id(number)
    yield {"record": view.record(folder, Queue(home.root)), "id": number, "others": []}
    if request["shown"] is not None:
        yield from follow(home, folder, request["shown"])


def _submit_array(home: Home, request: Request) -> Iterator[Answer]:
    """Submit a job for each index of an array, as one array of Slurm; see `slurm_submit`."""
    jobs, job = Jobs(home.root), request["job"]
    archive = Bytes(request["bytes"])
    found("sbatch")
    names = {task: f"{job['name']}-{task}" for task in request["tasks"]}
    batch = _script(jobs.path / job["name"], request)
    folders: list[JobFolder] = []
    try:
        for task, name in names.items():
            part = {
                **request, "job": {**job, "name": name}, "job_id": f"{request['job_id'][:-4]}{task:04x}"[-32:],
                "task": [request["job_id"], task], "script": batch, "first": folders[0] if folders else None,
            }  # fmt: skip
            folder = _settled(jobs, name, part, archive)
            if folder is None:
                break
            folders.append(folder)
        if len(folders) < len(names):
            for folder in folders:
                jobs.remove(folder)
            if not folders:
                archive.skip()
            yield {"taken": str(jobs.path / names[request["tasks"][len(folders)]])}
            return
        yield {"made": True}
        number = _submitted(folders[0], request)
    except Unknown:
        raise
    except BaseException:
        for folder in folders:
            jobs.remove(folder)
        raise
    for task, folder in zip(names, folders):
        folder.add_id(f"{number}_{task}")
    queue = Queue(home.root)
    first, *others = [view.record(folder, queue) for folder in folders]
    yield {"record": first, "id": number, "others": others}


def _settled(jobs: Jobs, name: str, request: Request, archive: Bytes) -> JobFolder | None:
    """The complete folder of a new job; None if its name is taken."""
    if jobs.find(name) is not None:
        return None
    building = jobs.new(name)
    try:
        _fill(jobs, building, request, archive)
        folder = jobs.settle(building)
    except BaseException:
        jobs.discard(building)
        raise
    if folder is None:
        jobs.discard(building)
    return folder


def _run_step(home: Home, folder: JobFolder, request: Request) -> Iterator[Answer]:
    """Start a job in the allocation of its user, and follow it."""
    try:
        env = allocated.environment(request["secrets"], request["token"], request["allocation"])
        minder = allocated.start(folder, env)
    except OSError as error:
        Jobs(home.root).remove(folder)
        raise Refused(f"cannot start the job here: {error.strerror}; nothing of it is left") from None
    yield {"record": view.record(folder, Queue(home.root)), "id": folder.ids[-1]}
    yield from follow(home, folder, request["shown"], minder.wait)


def _fill(jobs: Jobs, folder: JobFolder, request: Request, archive: Bytes) -> None:
    job, code = request["job"], request["code"]
    old = _old(jobs, job)
    node = {**job, "code": None, "resume_from": None, "queue": None, "log_dir": None}
    if request["allocation"] is None:  # else the agents see to it
        node["time_limit"] = None
    place = jobs.path / job["name"]  # where the folder will be
    if job["code"] is not None:
        if request.get("first") is not None:
            code = copy_of(request["first"].read()["code"])(folder.code)
        elif old is not None:
            code = copy_of(old.read()["code"])(folder.code)
        else:
            code = unpacked(archive, request["code"] or {})(folder.code)
        code = {**code, "path": str(place / "code" / job["name"])}
        node["working_dir"] = code["path"]
        _check_program(job, folder.code)
    else:
        node["working_dir"] = _working_dir(job)
    if job["checkpoint_dir"] is None:
        node["checkpoint_dir"] = str(place / "checkpoints")
    if old is not None and not job["fresh"]:
        lifecycle.take_checkpoints(old.path, folder.path)
    batch = request.get("script") or _script(place, request)
    folder.script.write_text(batch)
    write_json(
        folder.job,
        {
            "job_id": request["job_id"], "created": time.time(), "spec": job, "node": node, "code": code,
            "data": list(request["data"]), "options": dict(request["options"]), "terminal": dict(request["terminal"]),
            "allocation": request["allocation"], "task": request.get("task"),
        },
    )  # fmt: skip
    folder.job.chmod(0o600)
    (folder.path / "lives").mkdir()  # now, so that no client remembers that they are missing (NFS)
    folder.current.touch()
    if request["allocation"] is not None:
        folder.add_id(str(request["allocation"]["id"]))


def _old(jobs: Jobs, job: Mapping[str, Any]) -> JobFolder | None:
    """The job that this one goes on from.

    Raises:
        Refused: it is gone, or its code is.
    """
    if job["resume_from"] is None:
        return None
    old = jobs.find(job["resume_from"])
    if old is None:
        raise Refused(f"no job {job['resume_from']!r} to resume from on this cluster; see paceline list -A")
    if job["code"] is not None and not old.code.is_dir():
        raise Refused(f"the code of job {old.name} is gone; submit the job again")
    return old


def _working_dir(job: Mapping[str, Any]) -> str:
    folder: str = os.path.abspath(os.path.expanduser(job["working_dir"]))
    if not os.path.isdir(folder):
        raise Refused(f"no folder {folder} here; name one on the shared disk with --working-dir, or send the code")
    return folder


def _check_program(job: Mapping[str, Any], folder: str | Path) -> None:
    """Check that the script is there; the nodes check the rest, since other things may be installed on them.

    Raises:
        Refused: it is not.
    """
    if job["script"] is not None:
        program_kind(job["script"], Path(folder))


def _script(place: Path, request: Request) -> str:
    job_id: str = request["job_id"]
    if request["allocation"] is not None:
        job, options = request["job"], request["options"]
        task = script.agent([sys.executable, ENTRY], options)
        return shlex.join(allocated.argv(place, request["allocation"], script.flags(job, options), task)) + "\n"
    return script.text(request["job"], place, [sys.executable, ENTRY], request["options"], job_id)


# -- sbatch ------------------------------------------------------------------------------------------------------------


def _tested(batch: str, request: Request) -> list[str]:
    """Let Slurm check a script, and submit nothing; returns what it says of the start.

    Raises:
        Refused: Slurm would refuse it, or does not answer.
    """
    try:
        call("sbatch", "--test-only", env=batch_environment({}, None), text=batch)
    except Rejected as error:
        said = error.said.removeprefix("allocation failure: ")
        raise Refused(
            f"Slurm refuses the job: {said}; see what there is with paceline top node --on {request['target']}"
        ) from None
    return []


class Unknown(Refused):
    """Slurm may have taken the job: it did not say so, and does not answer."""


def _submitted(folder: JobFolder, request: Request) -> str:
    """The number of the new Slurm job.

    If sbatch is not heard of, Slurm may have taken the job all the same. So its list is searched before the next try.

    Raises:
        Refused: Slurm refuses it, or does not answer.
    """
    for left in range(_TRIES - 1, -1, -1):
        try:
            said = call(
                "sbatch",
                "--parsable",
                "--export=ALL",
                str(folder.script),
                env=batch_environment(request["secrets"], request["token"]),
                seconds=_FREE,
            )
            number = _NUMBER.search(said)
            if number is None:
                raise Refused(f"sbatch says {said.strip()!r}, and no job number")
            return str(number[1])
        except Rejected as error:
            raise Refused(f"Slurm refuses the job: {error.said}") from None
        except Away as error:
            try:
                taken = _taken(folder)
            except Away:
                if left:
                    time.sleep(_PAUSE)
                    continue
                raise Unknown(f"{error}; Slurm may have taken it: see paceline get {folder.name}") from None
            if taken is not None:
                return taken
            if not left:
                raise Refused(f"{error}; nothing was submitted") from None
            time.sleep(_PAUSE)  # nothing says when the controller is back
    raise AssertionError


def _taken(folder: JobFolder) -> str | None:
    """The number under which Slurm has a job although its sbatch failed; None if it has none.

    Raises:
        Away: that is not known.
    """
    stored = folder.read()
    job_id = stored["task"][0] if stored.get("task") else stored["job_id"]
    queue = Queue(folder.path.parent.parent, fresh=0.0)
    found = queue.of(job_id)
    if not found and queue.problem is not None:
        raise Away(str(queue.problem))
    return (found[0].task.partition("_")[0] or str(found[0].id)) if found else None
