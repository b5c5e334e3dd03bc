"""Starts a part of a job on this machine for a client elsewhere, and tells it what happens to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.logs.live import STREAM_BITS, Event, Output, is_disk_full, updates
from paceline.node.machine import volumes
from paceline.node.machine.network import gloo_interface, own_address
from paceline.node.planning import fitting, node_part
from paceline.node.rundir.directory import RunDirectory, read_json
from paceline.node.rundir.staging import SPARE, Reopened, Staging
from paceline.node.spec import NodeSpec
from paceline.node.store import code_folder, lifecycle, records
from paceline.node.store.home import with_ids

from .plan import this_machine
from .protocol import Bytes, next_word

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping

    from paceline.node.store.home import Answer, Home, Request

_DOUBT = 20.0  # seconds in which a job begins of which nobody said that all its nodes were told


def start(home: Home, request: Request) -> Iterator[Answer]:
    """Make a job, and start its agent; then do as stdin says.

    An archive (tar) of the job's code, so many `bytes`, follows on stdin, unless it is another job's. Then words
    come, a line each. "keep": the job goes on by itself; "done" follows once all nodes have been told so. "hold":
    the job ends with this connection, over which its news come; "signal N" passes on a signal. "drop", or the end
    of stdin: there has never been a job.

    Raises:
        Refused: it cannot run here.
    """
    made = _make(home, request)
    if isinstance(made, dict):
        yield made
        yield {"end": True}
        return
    run, node, agent, lifeline, begin = made
    is_decided = False
    try:
        yield {"started": node.job, "ranks": node.nproc, "host": socket.gethostname()}
        word = next_word()
        if word == "keep":
            with contextlib.suppress(OSError):  # it has ended already
                lifeline.send(b"k")
            record = records.record(run.path, records.line_of(home.root))
            yield {"kept": record and with_ids(run, record)}
            word = next_word()
            is_decided = word == "done" or (not word and (node.node_rank == 0 or _has_begun(run, lifeline, begin)))
        elif word == "hold":
            is_decided = True
            yield from _news(run, agent, lifeline, request["shown"], begin)
    finally:
        if not is_decided:
            _drop(home, run, keep=begin > 0)
    yield {"end": True}


class _Made(NamedTuple):
    """A job that has been started: its folder, its part here, its agent, what ends it, where its new events begin."""

    run: RunDirectory
    node: NodeSpec
    agent: subprocess.Popen[bytes]
    lifeline: socket.socket
    begin: int


def _make(home: Home, request: Request) -> Answer | _Made:
    """The job with its agent, which ends with the socket; or an answer that its name is taken."""
    job = dict(request["job"])
    path = home.jobs / job["name"]
    if request["joins"] and (read_json(path / "spec.json") or {}).get("job_id") == request["job_id"]:
        return _come_back(home, path, request)
    if os.path.lexists(path):
        return {"taken": str(path)}
    here = this_machine(home, request["slots"])
    own_code = job["code"] is not None
    if not own_code or job["working_dir"] != ".":
        job["working_dir"] = os.path.expanduser(job["working_dir"])
    data = [volumes.find(source) for source in request["data"]]
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(Staging(path))
        made = folder = None
        record: Answer = {"data": data}
        if own_code:
            made, folder = _places(job, staging.directory.path, path, request["job_id"])
            stack.callback(_unless_started, made, request["job_id"], staging)
            with code_folder.building(made) as building:
                record["code"] = {**_bring(home, job, building, request), "path": str(folder)}
        asked, job = job, _complete(job, here, made, record)
        if not request["joins"]:  # else it may be this job that has the folder
            fitting.check_checkpoint_dir(job, made)
        variables = [(source["variable"], source["path"]) for source in data]
        node = node_part.place(
            job, here, split_streams=_split(request["shown"], job), folder=folder, variables=variables,
            job_id=request["job_id"],
        )  # fmt: skip
        hosts = tuple(request["hosts"])
        node = replace(
            node, env={**node.env, **_variables(node)}, hosts=hosts, expected=len(hosts) or None,
            joins=request["joins"],
        )  # fmt: skip
        if job["resume_from"] is not None:
            lifecycle.take_checkpoints(home.jobs / job["resume_from"], staging.directory.path)
        created = time.time()
        spec = {**asked, "devices": job["devices"]}
        lifecycle.write_down(staging.directory, {**record, "spec": spec, "created": created}, node)
        try:
            staging.settle()
        except FileExistsError:
            return {"taken": str(path)}
        return _start(home, staging, node, request)


def _come_back(home: Home, path: Path, request: Request) -> _Made:
    """The job whose part was here before, with what it has left."""
    job = request["job"]
    Bytes(request["bytes"]).skip()
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
        again.directory.status.unlink(missing_ok=True)  # it tells how this part ended then
        again.directory.spare.write_bytes(bytes(SPARE))
        return _start(home, again, node, request)


def _start(home: Home, folder: Staging | Reopened, node: NodeSpec, request: Request) -> _Made:
    env = {**request["terminal"], **os.environ, **request["secrets"], "PACELINE_HOME": str(home.root)}
    if request["token"] is not None:
        env["PACELINE_TOKEN"] = request["token"]
    lifeline, theirs = socket.socketpair()
    with theirs:
        begin = folder.directory.events.stat().st_size
        agent = lifecycle.start_agent(folder, node.python, env, theirs)
    return _Made(folder.directory, node, agent, lifeline, begin)


def _bring(home: Home, job: Request, made: Path, request: Request) -> Answer:
    """The code of a job: what comes on stdin, or what another job has left."""
    if job["resume_from"] is None:
        code = Bytes(request["bytes"])
        with tarfile.open(fileobj=code, mode="r|") as tar:  # type: ignore[call-overload]  # it has all that is used
            tar.extraction_filter = lambda member, _: member  # it is the user's own, with all its links
            tar.extractall(made)
        code.skip()
        return dict(request["code"])
    old = (read_json(RunDirectory(home.jobs / job["resume_from"]).job) or {}).get("code")
    if old is None or not os.path.isdir(old["path"]):
        raise Refused(f"the code of job {job['resume_from']} is gone; submit the job anew")
    shutil.copytree(old["path"], made, symlinks=True, dirs_exist_ok=True)
    return dict(old)


def _drop(home: Home, run: RunDirectory, keep: bool) -> None:
    """End a job at once, and remove it, unless it has been here before."""
    lifecycle.stop(run, True)
    run.wait_until_free()
    if not keep:
        home.remove(run)


def _places(job: Request, hidden: Path, path: Path, job_id: str) -> tuple[Path, Path]:
    """Where to put the code while the job is being made in a hidden folder, and where it is afterwards."""
    below = Path("code") / job["name"]
    if job["working_dir"] == ".":
        return hidden / below, path / below
    place = Path(job["working_dir"]) / below
    code_folder.claim(place, job_id)
    return place, place


def _complete(job: Answer, here: fitting.Here, made: Path | None, record: Answer) -> Answer:
    """See `fitting.complete`; a folder that is hidden, and will be gone, is told as the copy of what it is."""
    try:
        return fitting.complete(job, here, made)
    except Refused as error:
        if made is None:
            raise
        raise Refused(str(error).replace(str(made), f"the copy of {record['code']['source']}")) from None


def _unless_started(made: Path, job_id: str, staging: Staging) -> None:
    if not staging.is_settled:
        code_folder.discard(made, job_id)


def _split(shown: Mapping[str, Any] | None, job: Request) -> tuple[int, ...]:
    """The local ranks whose stderr is kept apart."""
    return () if shown is None else tuple(rank for rank in shown["split"] if rank < job["ranks"])


def _variables(node: NodeSpec) -> dict[str, str]:
    """What ranks need that are no child of a paceline which is installed.

    PYTHONPATH lets every Python of the job find paceline, after all that the user names. On many machines the host name
    resolves to a loopback address, and gloo on several nodes would listen there.
    """
    given = node.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    variables = {"PYTHONPATH": os.pathsep.join([given, ENTRY] if given else [ENTRY])}
    if node.nodes > 1:
        interface = gloo_interface({**os.environ, **node.env}, own_address())
        if interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def _has_begun(run: RunDirectory, lifeline: socket.socket, begin: int) -> bool:
    """Whether the ranks of a job start, waited for a while: only then node 0 has been told that it is one."""
    patience = threading.Timer(_DOUBT, lifeline.shutdown, (socket.SHUT_RDWR,))
    patience.daemon = True
    patience.start()
    try:
        news = updates(run, lifeline.fileno(), lambda _: False, begin)
        return any(isinstance(it, Event) and it.name == "started" for it in news)
    finally:
        patience.cancel()


def _news(
    run: RunDirectory, agent: subprocess.Popen[bytes], lifeline: socket.socket, shown: Mapping[str, Any], begin: int
) -> Iterator[Answer]:
    """What a job writes that is to be shown, and what happens to it, until its agent is gone.

    Args:
        run: of the job.
        agent: which is sent the signals that stdin names.
        lifeline: ends with the agent, which ends with this process.
        shown: which streams of which local ranks, for rank 0 ("first") and for the "others".
        begin: where its new events begin.
    """
    threading.Thread(target=_pass_on_signals, args=(agent,), daemon=True).start()

    def wanted(it: Output) -> bool:
        return bool(shown["others" if it.rank else "first"].get(str(it.local_rank), 0) & STREAM_BITS[it.stream])

    for update in updates(run, lifeline.fileno(), wanted, begin):
        if isinstance(update, Output):
            yield {"output": [update.attempt, update.rank, update.local_rank, update.stream], "data": update.data}
        else:
            yield {"event": update.name, "details": update.details}
    yield {"gone": agent.wait(), "pid": agent.pid, "log": None if is_disk_full(run) else str(run.agent_log)}


def _pass_on_signals(agent: subprocess.Popen[bytes]) -> None:
    while word := next_word():
        agent.send_signal(int(word.rpartition(" ")[2]))
    os._exit(0)  # the client is gone, and with this process the agent's lifeline
