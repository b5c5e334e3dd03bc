"""Makes a job on the machine that this process runs on, and starts its agent. Every job is made here.

A client on this machine calls it directly, a client elsewhere over a connection (`node/host/start.py`). `make_plan`
(`plan`) completes the job and refuses what cannot work; it writes nothing. `make` copies the code, writes the run
directory and starts the agent.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.contract import GIT_CREDENTIALS
from paceline.node.errors import Refused
from paceline.node.files import read_json, write_json
from paceline.node.rundir.directory import SAVED, RunDirectory
from paceline.node.rundir.staging import SPARE, Reopened, Staging
from paceline.node.spec import NodeSpec

from . import code_folder, lifecycle, records
from .code_copy import copy_of
from .plan import Taken, agent_variables, completed, node_of, places

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import NoReturn

    from paceline.node.journal.fold import Report

    from . import moving
    from .code_copy import Code, Readable
    from .home import Home
    from .plan import Order, Plan


_FREE = 10.0  # seconds for those that only look whether a process works on a job


class Made(NamedTuple):
    """A job that has just been started.

    Attributes:
        run: its folder.
        node: its part here.
        agent: the process that runs it.
        begin: position of its new events.
        report: what was known of it while its lock was still held. A short job may be removed as soon as it has ended.
        placed: the checkpoints that came with it, if some did.
        before: the status of the part that was here before; None for a new part.
    """

    run: RunDirectory
    node: NodeSpec
    agent: lifecycle.AgentProcess
    begin: int
    report: Report
    placed: moving.Placed | None = None
    before: bytes | None = None


def make(
    plan: Plan,
    code: Code | None = None,
    lifeline: socket.socket | None = None,
    checkpoint: Readable | None = None,
) -> Made:
    """Make a job, and start its agent. If this fails, nothing is left.

    Args:
        plan: see `make_plan`.
        code: copies the job's code; None for a job without code of its own, or with that of the job that it resumes.
        lifeline: the job ends when the other end of this closes; None for one that outlives its client.
        checkpoint: the archive that `moving.write_checkpoint` wrote elsewhere; None if none comes with the job.

    Raises:
        Refused: it cannot run here.
        Taken: its name was taken meanwhile.
        OSError: it cannot be written.
    """
    with _written(plan, code, checkpoint) as (staging, node, placed):
        return _start(plan.home, plan.order, staging, node, lifeline)._replace(placed=placed)


def become(plan: Plan, code: Code | None = None) -> NoReturn:
    """Make a job, and become its agent. If this fails, nothing is left. See `make`."""
    with _written(plan, code) as (staging, node, _):
        lifecycle.become_agent(staging, node.python, _environment(plan.home, plan.order))


@contextlib.contextmanager
def _written(
    plan: Plan, code: Code | None, checkpoint: Readable | None = None
) -> Iterator[tuple[Staging, NodeSpec, moving.Placed | None]]:
    """The run directory of a new job, complete, with its lock held; this node's part; the checkpoints. See `make`."""
    home, asked, node, resumes = plan.home, plan.asked, plan.node, plan.order.resumes
    with contextlib.ExitStack() as stack:
        if resumes is not None:
            try:
                stack.enter_context(RunDirectory(home.jobs / resumes).kept())
            except FileNotFoundError:  # only other hosts may have its checkpoints
                if not home.is_remote or asked["code"] is not None:
                    raise Refused(f"job {resumes} was just deleted; submit the job again") from None
        staging = stack.enter_context(Staging(plan.path, home.jobs if plan.path.parent != home.jobs else None))
        hidden, job = staging.directory.path, plan.job
        record: dict[str, Any] = {"data": [dict(source) for source in plan.order.data]}
        with contextlib.ExitStack() as undo:
            work = Path(job["working_dir"])
            if asked["code"] is not None:
                made, folder = places(asked, hidden, plan.path)
                if made == folder:
                    undo.enter_context(code_folder.claimed(folder, node.job_id))
                if resumes is not None:
                    code = _code_of(home, resumes, fresh=asked["fresh"])
                assert code is not None
                record["code"] = {**code(made), "path": str(folder)}
                job = completed(asked, plan.here, made, record["code"])
                node = node_of(home, plan.here, replace(plan.order, job_id=node.job_id), job, folder, code=made)
                work = made
            if resumes is not None and not asked["fresh"]:
                lifecycle.take_checkpoints(home.jobs / resumes, hidden)
            placed = undo.enter_context(_brought(plan, checkpoint, hidden, work))
            # The requested job, not the completed one: another time it may be completed differently.
            spec = {**asked, "devices": job["devices"]}
            lifecycle.write_down(staging.directory, {**record, "spec": spec, "created": time.time()}, node)
            undo.enter_context(_registered(home, plan.path))
            undo.enter_context(_marked_as_used(plan.path, node))
            try:
                staging.settle()
            except FileExistsError:
                raise Taken(asked["name"], plan.path) from None
        yield staging, node, placed


def _code_of(home: Home, resumes: str, *, fresh: bool) -> Code:
    """Copies the code of a job here, with its checkpoints or without them."""
    from . import moving

    return copy_of(home.code_of(resumes), moving.own_checkpoints(RunDirectory(home.jobs / resumes)) if fresh else None)


@contextlib.contextmanager
def _brought(plan: Plan, checkpoint: Readable | None, hidden: Path, work: Path) -> Iterator[moving.Placed | None]:
    """The checkpoints that come with a job are in place, with the note that the job has some."""
    order, brought = plan.order, plan.order.brought
    if brought is None:
        yield None
        return
    if brought.saved is not None:
        write_json(hidden / SAVED, dict(brought.saved))
    if checkpoint is None:
        yield None
        return
    import tarfile

    from . import moving  # only jobs that come from elsewhere need it

    try:
        placed = moving.place(checkpoint, brought.folder(hidden, work, order.data))
    except tarfile.TarError:
        raise Refused("the checkpoint arrived damaged; try again") from None
    try:
        yield placed
    except BaseException:
        moving.take_back(placed)
        raise


def is_back(home: Home, order: Order) -> bool:
    """Whether this machine had a part of this job before, which now runs elsewhere."""
    found = read_json(home.folder_of(order.job) / "spec.json") or {}
    return order.joins and found.get("job_id") == order.job_id


def restart_part(home: Home, order: Order, lifeline: socket.socket | None = None) -> Made:
    """Start the agent of a part that was here before, in its old run directory; see `is_back`.

    Raises:
        Refused: it already runs.
    """
    with _reopened(home, order) as (again, node, before, begin):
        return _start(home, order, again, node, lifeline)._replace(before=before, begin=begin)


def become_again(home: Home, order: Order) -> NoReturn:
    """Become the agent of a part that was here before. See `restart_part`."""
    with _reopened(home, order) as (again, node, *_):
        lifecycle.become_agent(again, node.python, _environment(home, order))


@contextlib.contextmanager
def _reopened(home: Home, order: Order) -> Iterator[tuple[Reopened, NodeSpec, bytes, int]]:
    """The run directory of a part that was here before, with its lock held; that part; its last status.json; and the
    end of its journal. See `restart_part`.
    """
    job, path = order.job, home.folder_of(order.job)
    try:
        again = Reopened(path)
    except BlockingIOError:
        raise Refused(f"job {path.name} runs here already") from None
    with again:
        node = replace(
            NodeSpec.load(again.directory.spec), node_rank=None, main_address=job["main_address"],
            main_port=job["main_port"], joins=True, hosts=(), expected=None, detached=job["detached"],
        )  # fmt: skip
        again.directory.spec.write_text(node.to_json())
        status = again.directory.status  # it says how this part ended before
        before = status.read_bytes() if status.exists() else b""
        begin = again.directory.journal.stat().st_size
        again.directory.append({"event": "reopened"})
        status.unlink(missing_ok=True)
        again.directory.spare.write_bytes(bytes(SPARE))
        yield again, node, before, begin


def drop(home: Home, made: Made) -> None:
    """End a job that its client does not keep, at once, and remove it; a part that was here before is as it was.

    A part that joins a running job ends alone: the other nodes do not know of it yet (`node/lifeline.py`).
    """
    lifecycle.stop(made.run, True)
    made.run.wait_until_free()
    if made.before is None:
        home.remove(made.run)
        if made.placed is not None:
            from . import moving

            moving.take_back(made.placed)
        return
    with contextlib.suppress(OSError), made.run.owned(_FREE):  # unless another client has started it again
        os.truncate(made.run.journal, made.begin)
        if made.before:
            made.run.status.write_bytes(made.before)


@contextlib.contextmanager
def _marked_as_used(path: Path, node: NodeSpec) -> Iterator[None]:
    """Note in the run directory of another job that this job keeps its checkpoints there."""
    given = node.env.get("PACELINE_CHECKPOINT_DIR")
    folder = None if given is None else Path(node.working_dir, given)
    owner = (
        None
        if folder is None
        else next((run for it in (folder, *folder.parents) if (run := RunDirectory(it)).is_ours), None)
    )
    if owner is None:
        yield
        return
    mark = owner.mark_used(path, node.job_id)
    try:
        yield
    except BaseException:
        mark.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _registered(home: Home, path: Path) -> Iterator[None]:
    """For a run directory in another folder, make a link among the other jobs, where names are unique.

    Raises:
        Taken: another job has the name.
    """
    link = home.jobs / path.name if path.parent != home.jobs else None
    if link is not None:
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
        except FileExistsError:
            raise Taken(path.name, link) from None
        except OSError:  # no writable home: the job runs, but `list` does not show it
            link = None
    try:
        yield
    except BaseException:
        if link is not None:
            link.unlink(missing_ok=True)
        raise


def _environment(home: Home, order: Order) -> dict[str, str]:
    """The environment of the agent."""
    kept = {name: value for name, value in os.environ.items() if name not in GIT_CREDENTIALS}
    return {**kept, **agent_variables(home, order)}


def _start(
    home: Home, order: Order, folder: Staging | Reopened, node: NodeSpec, lifeline: socket.socket | None
) -> Made:
    """Start the agent of a job that has its folder."""
    run = folder.directory
    begin = run.journal.stat().st_size
    agent = lifecycle.start_agent(folder, node.python, _environment(home, order), lifeline)
    report = records.look(run.path, records.queue_of(home.root))
    if report is None:
        raise Refused(f"the folder of job {node.job} is gone")
    return Made(run, node, agent, begin, report)
