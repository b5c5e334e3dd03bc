"""Plans a job on the machine that this process runs on: completes it, and refuses what cannot work. Writes nothing."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import RANK_KEY, TOKEN, ContractError
from paceline.contract.code_folder import source_name
from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.machine import containers
from paceline.node.planning import fitting, node_part
from paceline.node.ranks import placement
from paceline.node.rundir.directory import RunDirectory
from paceline.node.spec import NodeSpec

from . import code_folder
from .code_folder import code_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.contract.nodejob import NodeJob, Order
    from paceline.contract.records import CodeRecord
    from paceline.node.journal.status import Attempt

    from .home import Home

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
class Plan:
    """A machine's part of a job before anything of it is made."""

    home: Home  # where it will be kept
    here: fitting.Here  # the machine
    order: Order  # that of the client; its job has an absolute path as its working dir, unless it has code of its own
    job: NodeJob  # that job, completed as far as possible without its code
    node: NodeSpec  # this node's part of it, likewise
    path: Path  # its run directory
    is_open: bool  # whether its script's imports, and so maybe its framework, are known only when its code is here

    def named(self, name: str) -> Plan:
        """A copy for a job with another name and identifier, and with what else the order says now."""
        order, job = self.order.with_job(name=name), replace(self.job, name=name)
        _check_name(self.home, order)
        path, job_id = self.home.folder_of(order.job), order.job_id or os.urandom(16).hex()
        node = replace(
            self.node, job=name, job_id=job_id, stdin=order.stdin, split_streams=node_part.split_of(order, job),
            working_dir=str(code_path(order.job, path) or self.node.working_dir),
            env={**self.node.env, "PACELINE_JOB_ID": job_id},
        )  # fmt: skip
        return replace(self, order=order, job=job, node=node, path=path)

    def foreseen_job(self) -> NodeJob:
        """The job, completed as far as possible."""
        return replace(self.job, framework=placement.CHOSEN) if self.is_open else self.job

    def ranks(self, start: Attempt | None = None) -> list[dict[str, str]]:
        """All variables that each rank will have in addition to those of this process."""
        unknown = {} if self.order.job_id else {"PACELINE_JOB_ID": placement.CHOSEN}
        env = {**agent_variables(self.home, self.order), **dict.fromkeys(self.job.secrets, SECRET)}
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


def make_plan(home: Home, here: fitting.Here, order: Order) -> Plan:
    """Plan a job on this machine; writes nothing."""
    has_code = order.job.code is not None
    if not has_code or order.job.working_dir != ".":
        order = order.with_job(working_dir=_whole(order.job.working_dir))
    asked = order.job
    _check_name(home, order)  # first, since the rest takes longer
    source = Path(order.source) if has_code and order.source is not None else None
    if has_code and order.resumes is not None:
        source = Path(code_of(RunDirectory(home.jobs / order.resumes))["path"])
    is_open = has_code and source is None and asked.framework is None and asked.command is None
    fitted, path = fitting.complete(asked, here, source), home.folder_of(asked)
    job = fitted.job
    _check_checkpoint_dir(home, order, job)
    has_checkpoint(order, Path(job.working_dir))
    if order.resumes is not None and asked.fresh and asked.checkpoint_dir is None:
        from .moving import check_fresh

        check_fresh(RunDirectory(home.jobs / order.resumes))
    return Plan(home, here, order, job, node_of(home, here, order, fitted, code_path(asked, path)), path, is_open)


def _check_checkpoint_dir(home: Home, order: Order, job: NodeJob) -> None:
    """Check that no other job saves into this one's folder for checkpoints.

    A folder in the job's own copy of its code is new. The job itself may already save there for a node that joins it,
    that may come in place of a lost one, or that is one of several that are started by hand.
    """
    is_new = job.code is not None and not os.path.isabs(job.checkpoint_dir or "")
    if not is_new and not order.joins and not order.peers and (home.is_remote or job.node_range[1] == 1):
        fitting.check_checkpoint_dir(job)


def has_checkpoint(order: Order, work: Path) -> bool:
    """Whether the checkpoints that a client would bring are here already, for example on a disk that both see."""
    brought = order.brought
    if brought is None or brought.into != "folder":
        return False
    folder = brought.folder(work, work, order.data)
    is_new = order.job.code is not None and folder.is_relative_to(work)  # it will be in the job's copy of its code
    if is_new:
        return False
    from .moving import holds

    return holds(folder, brought.ids)


def _check_name(home: Home, order: Order) -> None:
    """Check that a job can have its name: no other job has it, and its files can be made."""
    job, path = order.job, home.folder_of(order.job)
    for taken in (home.jobs / job.name, path):
        if os.path.lexists(taken):
            raise Taken(job.name, taken)
    check_writable(path.parent)
    if job.code is not None and job.working_dir != ".":
        code_folder.check_free(places(job, path, path)[1], order.job_id or "")


def check_writable(folder: Path) -> None:
    """Check that files can be made in a folder, or the folder itself if it does not exist; changes nothing."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def this_machine(home: Home, slots: int, *, is_scheduled: bool = False) -> fitting.Here:
    """This machine, for jobs of a client elsewhere."""
    declare = 'declare N slots with hosts = ["HOST:N"] in the target\'s settings'
    choose_python = "name another Python with --ssh-python, or the packages with --environment"
    if is_scheduled or containers.is_inside():
        choose_python = f"choose an image{' or a Python' * is_scheduled} that has it"
    return fitting.Here(home.root, (sys.executable,), lambda: slots, declare, choose_python, is_scheduled)


def _whole(folder: str) -> str:
    """The absolute path of a folder."""
    found = os.path.expanduser(folder)
    if found.startswith("~"):
        raise Refused(f"--working-dir {folder}: no such user; write the absolute path")
    try:
        return str(Path.cwd() / found)
    except FileNotFoundError:
        raise Refused("the current folder was deleted; change to one that exists") from None


def places(job: NodeJob, hidden: Path, path: Path) -> tuple[Path, Path]:
    """Where to put the code while the job is being made in a hidden folder, and where it is afterwards."""
    below = Path("code") / job.name
    if job.working_dir == ".":
        return hidden / below, path / below
    destination = Path(job.working_dir) / below
    return destination, destination


def code_link(home: Home, job: NodeJob, code: CodeRecord | None) -> tuple[Path | None, str | None]:
    """The second name of a job's code, that of its source, and the job that keeps this name as it has not ended.

    Only code of git and rsync in a folder that the user chose has one.
    """
    if code is None or job.working_dir == "." or code.get("mode") not in ("git", "rsync"):
        return None, None
    name = source_name(str(code["source"]))
    if name in ("", ".", "..", job.name):
        return None, None
    link = Path(_whole(job.working_dir), "code", name)
    user = code_folder.named(link)
    if user is None or user == job.name:
        return link, None
    is_used = RunDirectory(home.jobs / user).is_held or code_folder.is_being_made(link.with_name(user))
    return link, user if is_used else None


def link_notes(home: Home, job: NodeJob) -> list[str]:
    """A line about a second name that a job's code does not get."""
    link, user = code_link(home, job, job.code)
    if user is None:
        return []
    return [f"{link} stays the code of job {user}, which has not ended; this job has a copy of its own beside it"]


def code_path(job: NodeJob, path: Path) -> Path | None:
    """The folder in which the ranks start, for a job that has code of its own."""
    return None if job.code is None else places(job, path, path)[1]


def completed(job: NodeJob, here: fitting.Here, made: Path, code: CodeRecord) -> fitting.Fitted:
    """See `fitting.complete`; messages name a temporary hidden folder as a copy of its source."""
    try:
        return fitting.complete(job, here, made)
    except Refused as error:
        raise Refused(str(error).replace(str(made), f"the copy of {code['source']}")) from None


def node_of(home: Home, here: fitting.Here, order: Order, fitted: fitting.Fitted, folder: Path | None) -> NodeSpec:
    """See `node_part.node_spec`."""
    node = node_part.node_spec(order, fitted, here, folder=folder)
    return replace(node, env={**node.env, **_variables(home, node)})


def _variables(home: Home, node: NodeSpec) -> dict[str, str]:
    """Variables for ranks of a paceline that is not installed on this machine, and of several machines.

    PYTHONPATH lets every Python of the job find paceline, after all paths of the user. On many machines the host name
    is unknown, or resolves to a loopback address, at which gloo would listen even with several nodes.
    """
    env = {**os.environ, **node.env}
    variables = {"PYTHONPATH": python_path(env)} if home.is_remote else {}
    main = node.main_address or ""
    if node.nodes > 1:
        from paceline.node.machine import network  # a job on this machine does not need it

        if network.is_loopback(main):  # all nodes are on this machine
            return variables
        own = network.own_address() if home.is_remote else ""
        addresses = (node.local_address or "", own, network.address_towards(main), network.visible_address())
        interface = network.gloo_interface(env, addresses)
        if interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def python_path(env: Mapping[str, str]) -> str:
    """PYTHONPATH with which ranks find a paceline that is not installed on this machine; see `_variables`."""
    given = env.get("PYTHONPATH", "")
    return os.pathsep.join([given, ENTRY] if given else [ENTRY])


def agent_variables(home: Home, order: Order) -> dict[str, str]:
    """The variables of the agent, and so of each rank, in addition to those of this process."""
    env = {name: value for name, value in order.terminal.items() if name not in os.environ}
    env.update(order.secrets)
    if home.is_remote:
        env["PACELINE_HOME"] = str(home.root)
    if order.token is not None:
        env[TOKEN] = order.token
    return env
