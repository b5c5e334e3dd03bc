"""Makes a job on the machine that this process runs on, and starts its agent. Every job is made here.

A client on this machine calls it directly, a client elsewhere over a connection (`node/host/start.py`). `make_plan`
(`plan`) completes the job and refuses what cannot work; it writes nothing. `making` makes the job's folder; the caller
puts the code there; `New.start` completes the folder and starts the agent.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.contract import GIT_CREDENTIALS
from paceline.contract.nodejob import StoredJob
from paceline.node.errors import Refused
from paceline.node.files import read_json, write_json
from paceline.node.machine import environments
from paceline.node.rundir.directory import SAVED, RunDirectory, job_around
from paceline.node.rundir.staging import SPARE, Reopened, Staging
from paceline.node.spec import NodeSpec

from . import code_folder, lifecycle, records
from .code_folder import code_of, copy_of
from .plan import Taken, agent_variables, code_link, completed, node_of, places

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import NoReturn

    from paceline.contract.nodejob import Order
    from paceline.contract.records import CodeRecord, Report

    from . import moving
    from .code_folder import Readable
    from .home import Home
    from .plan import Plan


_FREE = 10.0  # seconds for those that only look whether a process works on a job


class Made(NamedTuple):
    """A job that has just been started."""

    run: RunDirectory
    node: NodeSpec  # its part here
    agent: lifecycle.AgentProcess  # the process that runs it
    begin: int  # position of its new events
    # what was known of it while its lock was still held. A short job may be removed as soon as it has ended.
    report: Report
    placed: moving.Placed | None = None  # the checkpoints that came with it, if some did
    before: bytes | None = None  # the status of the part that was here before; None for a new part


@contextlib.contextmanager
def making(plan: Plan) -> Iterator[New]:
    """A job that is being made: its folder is there, under a hidden name, with its lock held.

    If the block fails before the job has its name, nothing is left.
    """
    home, asked, resumes = plan.home, plan.order.job, plan.order.resumes
    with contextlib.ExitStack() as stack:
        if resumes is not None:
            try:
                stack.enter_context(RunDirectory(home.jobs / resumes).kept())
            except FileNotFoundError:  # only other hosts may have its checkpoints
                if not home.is_remote or asked.code is not None:
                    raise Refused(f"job {resumes} was just deleted; submit the job again") from None
        staging = stack.enter_context(Staging(plan.path, home.jobs if plan.path.parent != home.jobs else None))
        undo = stack.enter_context(contextlib.ExitStack())
        code = None
        if asked.code is not None:
            code, settled = places(asked, staging.directory.path, plan.path)
            if code == settled:
                undo.enter_context(code_folder.claimed(code, plan.node.job_id))
        yield New(plan, staging, undo, code if resumes is None else None)


class New:
    """A job that is being made, see `making`.

    Attributes:
        code: where its code has to be put before it starts; None if it has none, or goes on with that of another job
            here.
    """

    def __init__(self, plan: Plan, staging: Staging, undo: contextlib.ExitStack, code: Path | None) -> None:
        self.code = code
        self._plan, self._staging, self._undo = plan, staging, undo

    def start(
        self,
        code: CodeRecord | None = None,
        lifeline: socket.socket | None = None,
        checkpoint: Readable | None = None,
    ) -> Made:
        """Give the job its name, and start its agent."""
        node, placed = self._settle(code, checkpoint)
        return _start(self._plan.home, self._plan.order, self._staging, node, lifeline)._replace(placed=placed)

    def become(self, code: CodeRecord | None = None) -> NoReturn:
        """Give the job its name, and become its agent. See `start`."""
        node, _ = self._settle(code, None)
        lifecycle.become_agent(self._staging, node.python, _environment(self._plan.home, self._plan.order, node))

    def _settle(self, code: CodeRecord | None, checkpoint: Readable | None) -> tuple[NodeSpec, moving.Placed | None]:
        """Complete the run directory, and give it its name; returns this node's part, and the checkpoints."""
        plan, hidden, undo = self._plan, self._staging.directory.path, self._undo
        home, order, job, node = plan.home, plan.order, plan.job, plan.node
        asked, resumes = order.job, order.resumes
        work = Path(job.working_dir)
        record: CodeRecord | None = None
        if asked.code is not None:
            work, folder = places(asked, hidden, plan.path)
            if resumes is not None:
                code = _copied(home, resumes, work, fresh=asked.fresh)
            record = {**(code or {}), "path": str(folder)}
            link, user = code_link(home, asked, record)
            if link is not None and user is None:
                code_folder.name_too(link, folder)
            fitted = completed(asked, plan.here, work, record)
            job = fitted.job
            node = node_of(home, plan.here, replace(order, job_id=node.job_id), fitted, folder)
        if resumes is not None and not asked.fresh:
            lifecycle.take_checkpoints(home.jobs / resumes, hidden)
        placed = undo.enter_context(_brought(plan, checkpoint, hidden, work))
        # The requested job, not the completed one: another time it may be completed differently.
        spec = replace(asked, devices=job.devices)
        stored = StoredJob(spec, job.framework, time.time(), order.data, record)
        lifecycle.write_down(self._staging.directory, stored, node)
        undo.enter_context(_registered(home, plan.path))
        undo.enter_context(_marked_as_used(plan.path, node))
        try:
            self._staging.settle()
        except FileExistsError:
            raise Taken(asked.name, plan.path) from None
        undo.close()  # it is a job now
        return node, placed


def _copied(home: Home, resumes: str, destination: Path, *, fresh: bool) -> CodeRecord:
    """Copy the code of a job here, with its checkpoints or without them; returns the record of it."""
    from . import moving

    before = RunDirectory(home.jobs / resumes)
    code = code_of(before)
    copy_of(code, destination, moving.own_checkpoints(before) if fresh else None)
    return code


@contextlib.contextmanager
def _brought(plan: Plan, checkpoint: Readable | None, hidden: Path, work: Path) -> Iterator[moving.Placed | None]:
    """The checkpoints that come with a job are in place, with the note that the job has some."""
    order, brought = plan.order, plan.order.brought
    if brought is None:
        yield None
        return
    if brought.saved is not None:
        write_json(hidden / SAVED, brought.saved)
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
    """Start the agent of a part that was here before, in its old run directory; see `is_back`."""
    with _reopened(home, order) as (again, node, before, begin):
        return _start(home, order, again, node, lifeline)._replace(before=before, begin=begin)


def become_again(home: Home, order: Order) -> NoReturn:
    """Become the agent of a part that was here before. See `restart_part`."""
    with _reopened(home, order) as (again, node, *_):
        lifecycle.become_agent(again, node.python, _environment(home, order, node))


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
            NodeSpec.load(again.directory.spec), node_rank=None, main_address=job.main_address,
            main_port=job.main_port, joins=True, hosts=(), expected=None, detached=job.detached,
        )  # fmt: skip
        node.save(again.directory.spec)
        status = again.directory.status  # it says how this part ended before
        before = status.read_bytes() if status.exists() else b""
        begin = again.directory.journal.stat().st_size
        again.directory.append({"event": "reopened"})
        again.directory.noticed.unlink(missing_ok=True)
        status.unlink(missing_ok=True)
        again.directory.spare.write_bytes(bytes(SPARE))
        yield again, node, before, begin


def drop(home: Home, made: Made) -> None:
    """End a job that its client does not keep, at once, and remove it; a part that was here before is as it was.

    A part that joins a running job ends alone: the other nodes do not know of it yet (`node/lifeline.py`).
    """
    lifecycle.stop([made.run], True)
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
    owner = None if folder is None else job_around(folder)
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
    """For a run directory in another folder, make a link among the other jobs, where names are unique."""
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


def _environment(home: Home, order: Order, node: NodeSpec) -> dict[str, str]:
    """The variables of the agent."""
    kept = {name: value for name, value in os.environ.items() if name not in GIT_CREDENTIALS}
    if environments.is_built(home.root, node.python[0]):
        kept.update(environments.variables(node.python[0], kept.get("PATH", os.defpath)))
    return {**kept, **agent_variables(home, order)}


def _start(
    home: Home, order: Order, folder: Staging | Reopened, node: NodeSpec, lifeline: socket.socket | None
) -> Made:
    """Start the agent of a job that has its folder."""
    run = folder.directory
    begin = run.journal.stat().st_size
    agent = lifecycle.start_agent(folder, node.python, _environment(home, order, node), lifeline)
    report = records.look(run.path, records.queue_of(home.root))
    if report is None:
        raise Refused(f"the folder of job {node.job} is gone")
    return Made(run, node, agent, begin, report)
