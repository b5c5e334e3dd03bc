"""Makes a job on the machine that this process runs on, and starts its agent. Every job is made here.

A client on this machine calls it directly, a client elsewhere over a connection (`node/host/start.py`). `plan`
completes the job and refuses what cannot work; it writes nothing. `make` copies the code, writes the run directory and
starts the agent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tarfile
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.contract import RANK_KEY, TOKEN, ContractError
from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.files import read_json, write_json
from paceline.node.planning import fitting, node_part
from paceline.node.ranks import placement
from paceline.node.rundir.directory import SAVED, RunDirectory
from paceline.node.rundir.staging import SPARE, Reopened, Staging
from paceline.node.spec import NodeSpec

from . import code_folder, lifecycle, moving, records
from .home import with_ids

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import NoReturn, Protocol

    from .home import Home

    Job = dict[str, Any]
    # Puts a job's code at a path that does not exist yet, completely or not at all, and notes that it has made it
    # (`code_folder.record_made`); returns the record of the code.
    Code = Callable[[Path], dict[str, Any]]
    Split = Callable[[Job], "tuple[int, ...]"]

    class Readable(Protocol):
        """A stream of bytes."""

        def read(self, size: int, /) -> bytes:
            """The next bytes, at most `size`; b"" at the end."""


NOT_FOR_JOBS = ("GIT_SYNC_USERNAME", "GIT_SYNC_PASSWORD")  # they are used only to fetch the code
SECRET = "<secret>"  # what is shown instead of a secret


class Taken(Refused):
    """A job of this name exists, or something else where its files would be.

    Attributes:
        path: what is there.
    """

    def __init__(self, name: str, path: Path) -> None:
        if path.is_symlink() or RunDirectory(path).is_ours:
            super().__init__(f"a job named {name} has its files in {path}; choose another --name, or delete that job")
        else:
            super().__init__(
                f"{path} is there already, and does not belong to a job; choose another --name, or move it away"
            )
        self.path = path


@dataclass(frozen=True)
class Order:
    """What a client asks this machine to make: its part of a job.

    Attributes:
        job: the requested job, as a `JobSpec` in JSON.
        data: the job's volumes, as `machine.volumes.find` describes them.
        job_id: identifier that its nodes share; None makes a new one.
        hosts: the nodes' host names as the user gave them, by node rank; empty if unknown.
        joins: whether the job already runs elsewhere.
        split: returns the local ranks of the completed job whose stderr has a file of its own.
        stdin: the local rank that has a file as its standard input, and that file.
        source: the folder of which the code will be a copy, if it is known and on this machine: a plan reads it.
        terminal: variables that describe the terminal that shows the ranks.
        secrets: variables that are never shown.
        token: secret with which the nodes authenticate each other.
        brought: what the client brings of the job that this one resumes, if that ran elsewhere, see `Brought`.
    """

    job: Job
    data: Sequence[Mapping[str, Any]] = ()
    job_id: str | None = None
    hosts: tuple[str, ...] = ()
    joins: bool = False
    split: Split = lambda _: ()
    stdin: tuple[int, str] | None = None
    source: Path | None = None
    terminal: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    token: str | None = None
    brought: Brought | None = None

    @property
    def resumes(self) -> str | None:
        """The job on this machine whose code and checkpoints this one goes on with."""
        name: str | None = None if self.brought is not None else self.job["resume_from"]
        return name


@dataclass(frozen=True)
class Brought:
    """What comes with the request of a job that resumes one from elsewhere, but for the code; see `moving.py`.

    Attributes:
        into: where the checkpoint goes: into the "run" directory or another "folder"; "" if it comes with the code, or
            there is none.
        path: of that folder: relative to the run directory; or absolute, or relative to where the ranks start.
        volume: the volume in which it is instead, and its path there; None if it is in none.
        ids: of the checkpoints, by the number of the script's run.
        saved: the step that was saved last, and its folder; None if none was.
    """

    into: str = ""
    path: str = ""
    volume: tuple[str, str] | None = None
    ids: Mapping[str, str] = field(default_factory=dict)
    saved: Mapping[str, Any] | None = None

    def folder(self, run: Path, work: Path, data: Sequence[Mapping[str, Any]]) -> Path:
        """Where the checkpoint goes.

        Args:
            run: the run directory.
            work: where the ranks start.
            data: the job's volumes.
        """
        for source in data if self.volume is not None else ():
            if self.volume is not None and source["volume"] == self.volume[0]:
                return Path(source["path"], self.volume[1])
        return Path(run if self.into == "run" else work, os.path.expanduser(self.path))


@dataclass(frozen=True)
class Plan:
    """A machine's part of a job before anything of it is made.

    Attributes:
        home: where it will be kept.
        here: the machine.
        order: the order.
        asked: the requested job, with an absolute path as its working dir, unless it has code of its own.
        job: the job, completed as far as possible without its code.
        node: this node's part of it, likewise.
        path: its run directory.
        is_open: whether its script's imports, and so maybe its framework, are known only when its code is here.
        placed: the checkpoints that came with the job, once it is made.
    """

    home: Home
    here: fitting.Here
    order: Order
    asked: Job
    job: Job
    node: NodeSpec
    path: Path
    is_open: bool
    placed: list[moving.Placed] = field(default_factory=list)

    def named(self, name: str, split: Split) -> Plan:
        """A copy for a job with another name and identifier.

        Args:
            name: name of the job.
            split: see `Order`.

        Raises:
            Refused: see `plan`.
        """
        asked, job = {**self.asked, "name": name}, {**self.job, "name": name}
        _check_name(self.home, asked, self.order.job_id)
        path, job_id = self.home.folder_of(asked), self.order.job_id or uuid.uuid4().hex
        node = replace(
            self.node, job=name, job_id=job_id, split_streams=split(job),
            working_dir=str(_folder(asked, path) or self.node.working_dir),
            env={**self.node.env, "PACELINE_JOB_ID": job_id},
        )  # fmt: skip
        order = replace(self.order, job={**self.order.job, "name": name}, split=split)
        return replace(self, order=order, asked=asked, job=job, node=node, path=path)

    def shown(self) -> dict[str, Any]:
        """The job, completed as far as possible."""
        return {**self.job, "framework": placement.CHOSEN} if self.is_open else self.job

    def ranks(self, start: Mapping[str, Any] | None = None) -> list[dict[str, str]]:
        """All variables that each rank will have in addition to those of this process.

        Args:
            start: the first attempt, as the coordinator will send it; None to derive it from what this machine knows.

        Raises:
            Refused: the framework cannot run so.
        """
        unknown = {} if self.order.job_id else {"PACELINE_JOB_ID": placement.CHOSEN}
        env = {**_agent_variables(self.home, self.order), **dict.fromkeys(self.job["secrets"], SECRET)}
        env.pop(TOKEN, None)  # the agent keeps it, and gives ranks a key derived from it
        if self.node.nodes == 1 or self.home.is_remote or os.environ.get(TOKEN):
            env[RANK_KEY] = SECRET
        tables = []
        for framework in fitting.PACKAGES if self.is_open else (self.node.framework,):
            node = replace(self.node, framework=framework)
            try:
                tables.append(placement.foreseen(node, RunDirectory(self.path), start))
            except ContractError as error:
                if not self.is_open:  # else its script imports another one
                    raise Refused(str(error)) from None
        return [{**env, **placement.common(ranks), **unknown} for ranks in zip(*tables)]


class Made(NamedTuple):
    """A job that has just been started.

    Attributes:
        run: its folder.
        node: its part here.
        agent: the process that runs it.
        begin: position of its new events.
        record: its record while its lock was still held; for a client elsewhere see `home.with_ids`. A short job may
            be removed as soon as it has ended.
        placed: the checkpoints that came with it.
    """

    run: RunDirectory
    node: NodeSpec
    agent: subprocess.Popen[bytes]
    begin: int
    record: dict[str, Any]
    placed: Sequence[moving.Placed] = ()


def plan(home: Home, here: fitting.Here, order: Order) -> Plan:
    """Plan a job on this machine; writes nothing.

    Raises:
        Refused: it cannot run here.
        Taken: its name is taken.
        OSError: its run directory cannot be made.
    """
    asked = dict(order.job)
    has_code = asked["code"] is not None
    if not has_code or asked["working_dir"] != ".":
        asked["working_dir"] = _whole(asked["working_dir"])
    _check_name(home, asked, order.job_id)  # first, since the rest takes longer
    source = order.source if has_code else None
    if has_code and order.resumes is not None:
        source = Path(home.code_of(order.resumes)["path"])
    is_open = has_code and source is None and asked["framework"] is None and asked["command"] is None
    job, path = fitting.complete(asked, here, source), home.folder_of(asked)
    _check_checkpoint_dir(home, order, job)
    has_checkpoint(order, Path(job["working_dir"]))
    if order.resumes is not None and asked["fresh"] and asked["checkpoint_dir"] is None:
        moving.check_fresh(RunDirectory(home.jobs / order.resumes))
    return Plan(home, here, order, asked, job, _place(home, here, order, job, _folder(asked, path)), path, is_open)


def _check_checkpoint_dir(home: Home, order: Order, job: Job) -> None:
    """Check that no other job saves into this one's folder for checkpoints.

    A folder in the job's own copy of its code is new. For a node that joins a job, or one of several that are started
    by hand, the job itself may already save there.

    Raises:
        Refused: another job does.
    """
    is_new = job["code"] is not None and not os.path.isabs(job["checkpoint_dir"] or "")
    if not is_new and not order.joins and (home.is_remote or fitting.node_range(job)[1] == 1):
        fitting.check_checkpoint_dir(job)


def has_checkpoint(order: Order, work: Path) -> bool:
    """Whether the checkpoints that a client would bring are here already, for example on a disk that both see.

    Args:
        order: the order.
        work: the job's working dir.

    Raises:
        Refused: others are where they would go.
    """
    brought = order.brought
    if brought is None or brought.into != "folder":
        return False
    folder = brought.folder(work, work, order.data)
    is_new = order.job["code"] is not None and folder.is_relative_to(work)  # it will be in the job's copy of its code
    return not is_new and moving.holds(folder, brought.ids)


def _check_name(home: Home, job: Job, job_id: str | None) -> None:
    """Check that a job can have its name: no other job has it, and its files can be made.

    Raises:
        Refused: its code cannot be put at the path that follows from the name.
        Taken: another job has the name.
        OSError: the run directory cannot be made.
    """
    path = home.folder_of(job)
    for taken in (home.jobs / job["name"], path):
        if os.path.lexists(taken):
            raise Taken(job["name"], taken)
    check_writable(path.parent)
    if job["code"] is not None and job["working_dir"] != ".":
        code_folder.check_free(_places(job, path, path)[1], job_id or "")


def make(
    plan: Plan,
    code: Code | None = None,
    lifeline: socket.socket | None = None,
    checkpoint: Readable | None = None,
) -> Made:
    """Make a job, and start its agent. If this fails, nothing is left.

    Args:
        plan: see `plan`.
        code: copies the job's code; None for a job without code of its own, or with that of the job that it resumes.
        lifeline: the job ends when the other end of this closes; None for one that outlives its client.
        checkpoint: the archive that `moving.write_checkpoint` wrote elsewhere; None if none comes with the job.

    Raises:
        Refused: it cannot run here.
        Taken: its name was taken meanwhile.
        OSError: it cannot be written.
    """
    with _written(plan, code, checkpoint) as (staging, node):
        made = _start(plan.home, plan.order, staging, node, lifeline)
        return made._replace(placed=tuple(plan.placed))


def become(plan: Plan, code: Code | None = None) -> NoReturn:
    """Make a job, and become its agent. If this fails, nothing is left. See `make`."""
    with _written(plan, code) as (staging, node):
        lifecycle.become_agent(staging, node.python, _environment(plan.home, plan.order))


@contextlib.contextmanager
def _written(plan: Plan, code: Code | None, checkpoint: Readable | None = None) -> Iterator[tuple[Staging, NodeSpec]]:
    """The run directory of a new job, complete, with its lock held; and this node's part. See `make`."""
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
                made, folder = _places(asked, hidden, plan.path)
                if made == folder:
                    undo.enter_context(code_folder.claimed(folder, node.job_id))
                if resumes is not None:
                    own = moving.own_checkpoints(RunDirectory(home.jobs / resumes)) if asked["fresh"] else None
                    code = copy_of(home.code_of(resumes), own)
                assert code is not None
                record["code"] = {**code(made), "path": str(folder)}
                job = _complete(asked, plan.here, made, record["code"])
                node = _place(home, plan.here, replace(plan.order, job_id=node.job_id), job, folder, code=made)
                work = made
            if resumes is not None and not asked["fresh"]:
                lifecycle.take_checkpoints(home.jobs / resumes, hidden)
            undo.enter_context(_brought(plan, checkpoint, hidden, work))
            # The requested job, not the completed one: another time it may be completed differently.
            spec = {**asked, "devices": job["devices"]}
            lifecycle.write_down(staging.directory, {**record, "spec": spec, "created": time.time()}, node)
            undo.enter_context(_registered(home, plan.path))
            undo.enter_context(_marked_as_used(plan.path, node))
            try:
                staging.settle()
            except FileExistsError:
                raise Taken(asked["name"], plan.path) from None
        yield staging, node


@contextlib.contextmanager
def _brought(plan: Plan, checkpoint: Readable | None, hidden: Path, work: Path) -> Iterator[None]:
    """The checkpoints that come with a job are in place, with the note that the job has some."""
    order, brought = plan.order, plan.order.brought
    if brought is None:
        yield
        return
    if brought.saved is not None:
        write_json(hidden / SAVED, dict(brought.saved))
    if checkpoint is None:
        yield
        return
    try:
        plan.placed.append(moving.place(checkpoint, brought.folder(hidden, work, order.data)))
    except tarfile.TarError:
        raise Refused("the checkpoint arrived damaged; try again") from None
    try:
        yield
    except BaseException:
        _take_back(plan)
        raise


def _take_back(plan: Plan) -> None:
    """Remove the checkpoints that came with a job."""
    while plan.placed:
        moving.take_back(plan.placed.pop())


def is_back(home: Home, order: Order) -> bool:
    """Whether this machine had a part of this job before, which now runs elsewhere."""
    found = read_json(home.folder_of(order.job) / "spec.json") or {}
    return order.joins and found.get("job_id") == order.job_id


def restart_part(home: Home, order: Order, lifeline: socket.socket | None = None) -> Made:
    """Start the agent of a part that was here before, in its old run directory; see `is_back`.

    Raises:
        Refused: it already runs.
    """
    with _reopened(home, order) as (again, node):
        return _start(home, order, again, node, lifeline)


def become_again(home: Home, order: Order) -> NoReturn:
    """Become the agent of a part that was here before. See `restart_part`."""
    with _reopened(home, order) as (again, node):
        lifecycle.become_agent(again, node.python, _environment(home, order))


@contextlib.contextmanager
def _reopened(home: Home, order: Order) -> Iterator[tuple[Reopened, NodeSpec]]:
    """The run directory of a part that was here before, with its lock held; and that part. See `restart_part`."""
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
        again.directory.status.unlink(missing_ok=True)  # it says how this part ended before
        again.directory.spare.write_bytes(bytes(SPARE))
        yield again, node


def drop(home: Home, made: Made) -> None:
    """End a job at once, and remove it, unless it was here before."""
    lifecycle.stop(made.run, True)
    made.run.wait_until_free()
    if not made.begin:
        home.remove(made.run)
        for placed in made.placed:
            moving.take_back(placed)


def check_writable(folder: Path) -> None:
    """Check that files can be made in a folder, or the folder itself if it does not exist; changes nothing.

    Raises:
        OSError: they cannot.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def this_machine(home: Home, slots: int, *, is_scheduled: bool = False) -> fitting.Here:
    """This machine, for jobs of a client elsewhere.

    Args:
        home: the jobs of this machine.
        slots: number of slots if it has no accelerators.
        is_scheduled: see `fitting.Here`.
    """
    declare = 'declare N slots with hosts = ["HOST:N"] in the target\'s settings'
    choose_python = "name another Python with --ssh-python, or python = in the target's settings"
    if is_scheduled:
        choose_python = "choose an image or a Python that has it"
    return fitting.Here(home.root, (sys.executable,), lambda: slots, declare, choose_python, is_scheduled)


# -- code --------------------------------------------------------------------------------------------------------------


def unpacked(archive: Readable, record: Mapping[str, Any]) -> Code:
    """Code from an archive (tar).

    Args:
        archive: the archive; it is read as a stream, to its end.
        record: the record of the code.
    """

    def unpack(destination: Path) -> dict[str, Any]:
        with code_folder.building(destination) as building:
            with tarfile.open(fileobj=archive, mode="r|") as tar:  # type: ignore[call-overload]  # it has all that is used
                tar.extraction_filter = lambda member, _: member  # the user's own code, with all its links
                tar.extractall(building)
            while archive.read(1 << 16):
                pass
        return dict(record)

    return unpack


def copy_of(code: Mapping[str, Any], without: Callable[[str, list[str]], list[str]] | None = None) -> Code:
    """The code of another job in its current state, with the files that the job wrote there.

    Args:
        code: the record of that code, with its `path`.
        without: which names of a folder to leave out.
    """

    def copy(destination: Path) -> dict[str, Any]:
        with code_folder.building(destination) as building:
            try:
                shutil.copytree(code["path"], building, symlinks=True, dirs_exist_ok=True, ignore=without)
            except shutil.Error as error:
                source, _, why = error.args[0][0]
                raise Refused(f"cannot copy {source}: {why}; submit the job again") from None
        return dict(code)

    return copy


# -- steps -------------------------------------------------------------------------------------------------------------


def _whole(folder: str) -> str:
    """The absolute path of a folder.

    Raises:
        Refused: the current folder is gone, or there is no such user.
    """
    found = os.path.expanduser(folder)
    if found.startswith("~"):
        raise Refused(f"--working-dir {folder}: no such user; write the absolute path")
    try:
        return str(Path.cwd() / found)
    except FileNotFoundError:
        raise Refused("the current folder was deleted; change to one that exists") from None


def _places(job: Mapping[str, Any], hidden: Path, path: Path) -> tuple[Path, Path]:
    """Where to put the code while the job is being made in a hidden folder, and where it is afterwards."""
    below = Path("code") / job["name"]
    if job["working_dir"] == ".":
        return hidden / below, path / below
    destination = Path(job["working_dir"]) / below
    return destination, destination


def _folder(job: Mapping[str, Any], path: Path) -> Path | None:
    """The folder in which the ranks start, for a job that has code of its own."""
    return None if job["code"] is None else _places(job, path, path)[1]


def _complete(job: Job, here: fitting.Here, made: Path, code: Mapping[str, Any]) -> Job:
    """See `fitting.complete`; messages name a temporary hidden folder as a copy of its source."""
    try:
        return fitting.complete(job, here, made)
    except Refused as error:
        raise Refused(str(error).replace(str(made), f"the copy of {code['source']}")) from None


def _place(
    home: Home, here: fitting.Here, order: Order, job: Job, folder: Path | None, *, code: Path | None = None
) -> NodeSpec:
    """This node's part of a completed job; its code is in `folder`, or, until the job is made, in `code`."""
    node = node_part.node_spec(
        job, here, split_streams=order.split(job), folder=folder,
        variables=[(source["variable"], source["path"]) for source in order.data], job_id=order.job_id,
    )  # fmt: skip
    env = {**node.env, **_variables(node)} if home.is_remote else node.env
    why = fitting.exec_reason(order.job, job, code or folder or Path(job["working_dir"]))
    return replace(
        node,
        env=env,
        why_exec=why,
        local_rank_flag=fitting.local_rank_flag(job, code or folder or Path(job["working_dir"])),
        mounts=tuple((it["path"], it["wanted"]) for it in order.data if it["mount"]),
        stdin=order.stdin,
        hosts=order.hosts,
        expected=len(order.hosts) or None,
        joins=order.joins,
    )


def _variables(node: NodeSpec) -> dict[str, str]:
    """Variables for ranks of a paceline that is not installed on this machine.

    PYTHONPATH lets every Python of the job find paceline, after all paths of the user. On many machines the host name
    resolves to a loopback address, at which gloo would listen even with several nodes.
    """
    from paceline.node.machine.network import gloo_interface, own_address  # not needed by a client on this machine

    given = node.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    variables = {"PYTHONPATH": os.pathsep.join([given, ENTRY] if given else [ENTRY])}
    if node.nodes > 1:
        interface = gloo_interface({**os.environ, **node.env}, own_address())
        if interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


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


def _agent_variables(home: Home, order: Order) -> dict[str, str]:
    """The variables of the agent, and so of each rank, in addition to those of this process."""
    env = {name: value for name, value in order.terminal.items() if name not in os.environ}
    env.update(order.secrets)
    if home.is_remote:
        env["PACELINE_HOME"] = str(home.root)
    if order.token is not None:
        env[TOKEN] = order.token
    return env


def _environment(home: Home, order: Order) -> dict[str, str]:
    """The environment of the agent."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_FOR_JOBS}
    return {**kept, **_agent_variables(home, order)}


def _start(
    home: Home, order: Order, folder: Staging | Reopened, node: NodeSpec, lifeline: socket.socket | None
) -> Made:
    """Start the agent of a job that has its folder."""
    run = folder.directory
    begin = run.events.stat().st_size
    agent = lifecycle.start_agent(folder, node.python, _environment(home, order), lifeline)
    record = records.record(run.path, records.queue_of(home.root)) or {}
    return Made(run, node, agent, begin, with_ids(run, record) if home.is_remote else record)
