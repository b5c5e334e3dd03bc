"""What a client asks of this machine over a connection, such as ssh's: a request on stdin, answers on stdout.

A request is an object on a line; `do` names what to do, and for some more bytes follow. An answer is an object on a
line: `{"error": …}` where something cannot be done. What lasts is answered by several lines, and ends with stdin.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import socket
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.contract import CONTRACTS

from . import ENTRY, fitting, launching, logs, placing, preflight, processes, queue, records, tensorboard
from .errors import Refused
from .following import STREAM_BITS, Event, Output, is_disk_full, updates
from .gauge import Gauge
from .network import gloo_interface
from .ports import Reservation
from .run_directory import SPARE, Reopened, RunDirectory, Staging, read_json
from .signals import LEAVE
from .spec import NodeSpec
from .usage import gpus_of_nvidia_smi

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence

    Request = Mapping[str, Any]
    Answer = dict[str, Any]

_DOUBT = 20.0  # seconds in which a job begins of which nobody said that all its nodes were told
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Host:
    """This machine, with its jobs in a folder; machines may share that, and each has its own part of a job there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs = root / "hosts" / socket.gethostname() / "jobs"

    def here(self, slots: int) -> fitting.Here:
        """This machine with so many slots, if it has no accelerators."""
        declare = 'declare N slots with hosts = ["HOST:N"] in the target\'s settings'
        return fitting.Here(self.root, (sys.executable,), lambda: slots, declare)

    def runs(self, names: Sequence[str]) -> list[RunDirectory]:
        """Those of these jobs that are here."""
        found = [RunDirectory(self.jobs / name) for name in names if _NAME.fullmatch(name)]
        return [run for run in found if records.is_job(run.path)]

    def run(self, name: str) -> RunDirectory:
        """A job that is here.

        Raises:
            Refused: it is not.
        """
        for run in self.runs([name]):
            return run
        raise Refused(f"no job {name}")

    # -- look ----------------------------------------------------------------------------------------------------------

    def look(self, request: Request) -> Answer:
        """What decides where a job goes: names that are taken, devices that are free, and where nodes could meet."""
        devices, _ = self.here(request["slots"]).devices
        try:
            held = {device for entry in queue.overview(queue.folder_of(self.root)) for device in entry.devices}
        except OSError:
            held = set()
        ports = Reservation()
        port = ports.take()
        ports.release()
        return {
            "names": list(records.names(self.jobs)),
            "free": len([device for device in devices if device not in held]),
            "address": _address(),
            "port": port,
        }

    def describe(self, request: Request) -> Answer:
        """The records of jobs, those left out that ended before a time; jobs whose time to live is over go."""
        line, since, now = records.line_of(self.root), request["since"] or 0.0, time.time()
        runs = self.runs(list(records.names(self.jobs)) if request["names"] is None else request["names"])
        found = []
        for run in runs:
            record = records.record(run.path, line)
            if record is None:
                continue
            is_over = record["state"] in records.FINAL
            if is_over and record["ttl"] is not None and now - (record["kept_since"] or now) >= record["ttl"]:
                self._remove(run)
            elif not is_over or record["finished"] >= since:
                found.append(_with_ids(run, record))
        return {"jobs": found, "names": [run.path.name for run in runs]}

    def spec(self, request: Request) -> Answer:
        """What a job's user asked for."""
        return {"spec": (read_json(self.run(request["name"]).job) or {})["spec"]}

    def events(self, request: Request) -> Answer:
        """What happened to a job here."""
        return {"events": records.events(self.run(request["name"]))}

    def nodes(self, request: Request) -> Answer:
        """This machine, and what is in use."""
        return {"node": self._gauge(request).machine()}

    def usage(self, request: Request) -> Answer:
        """What jobs use here."""
        return {"usage": self._gauge(request).of_jobs([run.path.name for run in self.runs(request["names"])])}

    def _gauge(self, request: Request) -> Gauge:
        devices, slots = self.here(request["slots"]).devices
        return Gauge(self.root, self.jobs, devices, gpus_of_nvidia_smi, slots=slots)

    def volumes(self, request: Request) -> Answer:
        """Whether paths can be read here, and how large their file systems are."""
        return {"volumes": {name: _volume(path) for name, path in request["paths"].items()}}

    def plan(self, request: Request) -> Answer:
        """What `start` would do: the complete job, this machine's place among the others, and its ranks' variables."""
        job, here = dict(request["job"]), self.here(request["slots"])
        job["working_dir"] = os.path.expanduser(job["working_dir"])
        job = fitting.complete(job, here, None)
        node = replace(fitting.place(job, here), nodes=1, least=1)
        ports = [0] * (node.nproc if "endpoints" in CONTRACTS[node.framework].carries else 0)
        ranks = [placing.foreseen(node, rank, {"start": request["start"]}) for rank in range(node.nproc)]
        return {"job": job, "node": {"address": _address(), "slots": node.nproc, "ports": ports}, "ranks": ranks}

    # -- act -----------------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> Iterator[Answer]:
        """Make a job, and start its agent; then do as stdin says.

        An archive (tar) of the job's code, so many `bytes`, follows on stdin, unless it is another job's. Then words
        come, a line each. "keep": the job goes on by itself; "done" follows once all nodes have been told so. "hold":
        the job ends with this connection, over which its news come; "signal N" passes on a signal. "drop", or the end
        of stdin: there has never been a job.

        Raises:
            Refused: it cannot run here.
        """
        made = self._make(request)
        if isinstance(made, dict):
            yield made
            yield {"end": True}
            return
        run, node, agent, lifeline, begin = made
        is_decided = False
        try:
            yield {"started": node.job, "ranks": node.nproc, "host": socket.gethostname()}
            word = _word()
            if word == "keep":
                with contextlib.suppress(OSError):  # it has ended already
                    lifeline.send(b"k")
                record = records.record(run.path, records.line_of(self.root))
                yield {"kept": record and _with_ids(run, record)}
                word = _word()
                is_decided = word == "done" or (not word and (node.node_rank == 0 or _has_begun(run, lifeline, begin)))
            elif word == "hold":
                is_decided = True
                yield from _news(run, agent, lifeline, request["shown"], begin)
        finally:
            if not is_decided:
                self._drop(run, keep=begin > 0)
        yield {"end": True}

    def _drop(self, run: RunDirectory, keep: bool) -> None:
        """End a job at once, and remove it, unless it has been here before."""
        launching.stop(run, True)
        run.wait_until_free()
        if not keep:
            self._remove(run)

    def _make(self, request: Request) -> Answer | _Made:
        """The job with its agent, which ends with the socket; or an answer that its name is taken."""
        job = dict(request["job"])
        path = self.jobs / job["name"]
        if request["joins"] and (read_json(path / "spec.json") or {}).get("job_id") == request["job_id"]:
            return self._come_back(path, request)
        if os.path.lexists(path):
            return {"taken": str(path)}
        here = self.here(request["slots"])
        own_code = job["code"] is not None
        if not own_code or job["working_dir"] != ".":
            job["working_dir"] = os.path.expanduser(job["working_dir"])
        data = [{**source, **_find(source)} for source in request["data"]]
        with contextlib.ExitStack() as stack:
            staging = stack.enter_context(Staging(path))
            made = folder = None
            record: Answer = {"data": data}
            if own_code:
                made, folder = _places(job, staging.directory.path, path)
                stack.callback(_unless_started, made, staging)
                record["code"] = {**self._bring(job, made, request), "path": str(folder)}
            asked, job = job, fitting.complete(job, here, made)
            variables = [(source["variable"], source["path"]) for source in data]
            node = fitting.place(
                job, here, split_streams=_split(request["shown"], job), folder=folder, variables=variables,
                job_id=request["job_id"],
            )  # fmt: skip
            hosts = tuple(request["hosts"])
            node = replace(
                node, env={**node.env, **_variables(node)}, hosts=hosts, expected=len(hosts) or None,
                joins=request["joins"],
            )  # fmt: skip
            if job["resume_from"] is not None:
                launching.take_checkpoints(self.jobs / job["resume_from"], staging.directory.path)
            created = time.time()
            spec = {**asked, "devices": job["devices"]}
            launching.write_down(staging.directory, {**record, "spec": spec, "created": created}, node)
            try:
                staging.settle()
            except FileExistsError:
                return {"taken": str(path)}
            return self._start(staging, node, request)

    def _come_back(self, path: Path, request: Request) -> _Made:
        """The job whose part was here before, with what it has left."""
        job, code = request["job"], _Bytes(request["bytes"])
        while code.read(1 << 16):
            pass
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
            return self._start(again, node, request)

    def _start(self, folder: Staging | Reopened, node: NodeSpec, request: Request) -> _Made:
        env = {**request["terminal"], **os.environ, **request["secrets"], "PACELINE_HOME": str(self.root)}
        if request["token"] is not None:
            env["PACELINE_TOKEN"] = request["token"]
        lifeline, theirs = socket.socketpair()
        with theirs:
            begin = folder.directory.events.stat().st_size
            agent = launching.start_agent(folder, node.python, env, theirs)
        return _Made(folder.directory, node, agent, lifeline, begin)

    def _bring(self, job: Request, made: Path, request: Request) -> Answer:
        """The code of a job: what comes on stdin, or what another job has left."""
        made.parent.mkdir(parents=True, exist_ok=True)
        if job["resume_from"] is None:
            code = _Bytes(request["bytes"])
            with tarfile.open(fileobj=code, mode="r|") as tar:  # type: ignore[call-overload]  # it has all that is used
                tar.extraction_filter = lambda member, _: member  # it is the user's own, with all its links
                tar.extractall(made)
            while code.read(1 << 16):
                pass
            return dict(request["code"])
        old = (read_json(RunDirectory(self.jobs / job["resume_from"]).job) or {}).get("code")
        if old is None or not os.path.isdir(old["path"]):
            raise Refused(f"the code of job {job['resume_from']} is gone; submit the job anew")
        shutil.copytree(old["path"], made, symlinks=True)
        return dict(old)

    def stop(self, request: Request) -> Answer:
        """Stop those of the jobs that are here."""
        runs = self.runs(request["names"])
        for run in runs:
            launching.stop(run, request["now"])
        return {"names": [run.path.name for run in runs]}

    def invite(self, request: Request) -> Answer:
        """What another machine needs to take part in a job that runs here, with its code (tar).

        Raises:
            Refused: its nodes cannot change, or it does not run here.
        """
        run = self.run(request["name"])
        node, job, status = NodeSpec.load(run.spec), read_json(run.job) or {}, run.read_status() or {}
        _check_elastic(node)
        if not run.is_held or status.get("state") in records.FINAL or not status.get("coordinator"):
            raise Refused(f"job {node.job} does not run here, or has not started yet")
        env = processes.environment(status["agent"]["pid"])
        code, archive = job.get("code"), io.BytesIO()
        if code is not None:
            with tarfile.open(fileobj=archive, mode="w") as tar:
                tar.add(code["path"], arcname=".")
        return {
            "job": job["spec"], "job_id": node.job_id, "most": node.nodes, "door": status["door"],
            "token": env.get("PACELINE_TOKEN"),
            "secrets": {name: env[name] for name in job["spec"]["secrets"] if name in env},
            "sources": job["data"], "code": code, "data": archive.getvalue(),
        }  # fmt: skip

    def leave(self, request: Request) -> Answer:
        """Have this machine leave a job, which goes on without it.

        Raises:
            Refused: it cannot go on with those that are left, or does not run here.
        """
        run = self.run(request["name"])
        node = NodeSpec.load(run.spec)
        _check_elastic(node)
        if request["left"] < node.least:
            raise Refused(
                f"job {node.job} needs {node.least} node{'s' if node.least > 1 else ''}, and {request['left']} would be"
                f" left; bring in others first, or end it with paceline stop {node.job}"
            )
        if not records.signal_agent(run.path, (LEAVE,)):
            raise Refused(f"job {run.path.name} does not run here")
        return {"leaves": run.path.name}

    def delete(self, request: Request) -> Answer:
        """Remove those of the jobs that are here."""
        runs = self.runs(request["names"])
        for run in runs:
            if run.is_held:
                raise Refused(f"job {run.path.name} has not ended; stop it first: paceline stop {run.path.name}")
        for run in runs:
            self._remove(run)
        return {"names": [run.path.name for run in runs]}

    def _remove(self, run: RunDirectory) -> None:
        code = (read_json(run.job) or {}).get("code")
        launching.remove(run.path, lambda: None if code is None else shutil.rmtree(code["path"], ignore_errors=True))

    def open_tensorboard(self, request: Request) -> Answer:
        """The address of a job's TensorBoard, on this machine."""
        run = self.run(request["name"])
        return {"url": tensorboard.open_for_job((sys.executable,), run.path, request["logdir"])}

    def close_tensorboard(self, request: Request) -> Answer:
        """End it."""
        return {"ran": tensorboard.stop(self.run(request["name"]).path)}

    # -- before a job -------------------------------------------------------------------------------------------------

    def preflight(self, request: Request) -> Iterator[Answer]:
        """What `look` says, and `refused` where a job cannot run here; then see `preflight.converse`.

        Without a job: all that this machine has.
        """
        facts: Answer = {"address": _address()}
        if request["job"] is None:
            facts.update(preflight.all_facts(self.root, self.jobs))
        else:
            facts.update(self.look(request))
            try:
                facts.update(preflight.job_facts(self.root, self.jobs, self._framework(request)))
            except Refused as error:
                facts["refused"] = str(error)
        return preflight.converse(request["token"].encode(), request["name"], facts)

    def _framework(self, request: Request) -> str | None:
        """What a job's ranks import, None where they are no Python; where the nodes meet is seen to when it starts.

        Raises:
            Refused: the job cannot run here.
        """
        job = {**request["job"], "nodes": 1, "node_rank": None, "main_port": None}
        if job["code"] is None or job["working_dir"] != ".":
            job["working_dir"] = os.path.expanduser(job["working_dir"])
        for source in request["data"]:
            _find(source)
        job = fitting.complete(job, self.here(request["slots"]), None)
        return None if job["command"] is not None else fitting.PACKAGES.get(job["framework"])

    # -- what lasts ----------------------------------------------------------------------------------------------------

    def wait(self, request: Request) -> Iterator[Answer]:
        """A line for each of the jobs here when it has ended, and a last one."""
        for run in self.runs(request["names"]):
            run.wait_until_free()
            yield {"ended": run.path.name}
        yield {"end": True}

    def logs(self, request: Request) -> Iterator[Answer]:
        """A line for what a rank wrote; the bytes follow it."""
        run = self.run(request["name"])
        ranks = request["choice"].pop("ranks")
        choice = logs.Choice(None if ranks is None else frozenset(ranks), **request["choice"])
        if request["checked"]:
            logs.check(run.path, choice)
        yield {"begin": True}
        for text in logs.read(run.path, choice):
            yield {"text": text[:4], "data": text.data}
        yield {"end": True}


def _with_ids(run: RunDirectory, record: Answer) -> Answer:
    """A record with what tells which parts on several machines are one job, and in which order."""
    status, spec = run.read_status() or {}, read_json(run.spec) or {}
    ids = {"job_id": spec.get("job_id"), "hosts": spec.get("hosts", ()), "node_rank": status.get("node_rank")}
    is_elastic = spec.get("least") != spec.get("nodes")
    return {**record, **ids, "is_elastic": is_elastic, "has_begun": status.get("start") is not None}


class _Made(NamedTuple):
    """A job that has been started: its folder, its part here, its agent, what ends it, where its new events begin."""

    run: RunDirectory
    node: NodeSpec
    agent: subprocess.Popen[bytes]
    lifeline: socket.socket
    begin: int


def _check_elastic(node: NodeSpec) -> None:
    if node.least == node.nodes:
        raise Refused(f"job {node.job} has {node.nodes} nodes as long as it runs; submit it with --nnodes MIN:MAX")


class _Bytes:
    """So many bytes of stdin, and never fewer."""

    def __init__(self, count: int) -> None:
        self._left = count

    def read(self, size: int) -> bytes:
        """The next bytes, b"" after the last one.

        Raises:
            Refused: there are fewer: the client is gone.
        """
        data = sys.stdin.buffer.read(min(size, self._left))
        self._left -= len(data)
        if not data and self._left:
            raise Refused("the code did not arrive; submit the job anew")
        return data


def _places(job: Request, hidden: Path, path: Path) -> tuple[Path, Path]:
    """Where to put the code while the job is being made in a hidden folder, and where it is afterwards."""
    below = Path("code") / job["name"]
    if job["working_dir"] == ".":
        return hidden / below, path / below
    place = Path(job["working_dir"]) / below
    if place.exists():
        raise Refused(f"{place} is there already; remove it, or choose another --name or --working-dir")
    return place, place


def _word() -> str:
    """The next line of stdin, "" at its end."""
    return sys.stdin.buffer.readline().decode().strip()


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


def _split(shown: Mapping[str, Any] | None, job: Request) -> tuple[int, ...]:
    """The local ranks whose stderr is kept apart."""
    return () if shown is None else tuple(rank for rank in shown["split"] if rank < job["ranks"])


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
    while word := _word():
        agent.send_signal(int(word.rpartition(" ")[2]))
    os._exit(0)  # the client is gone, and with this process the agent's lifeline


def _unless_started(made: Path, staging: Staging) -> None:
    if not staging.is_settled:
        shutil.rmtree(made, ignore_errors=True)


def _variables(node: NodeSpec) -> dict[str, str]:
    """What ranks need that are no child of a paceline which is installed.

    PYTHONPATH lets every Python of the job find paceline, after all that the user names. On many machines the host name
    resolves to a loopback address, and gloo on several nodes would listen there.
    """
    given = node.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    variables = {"PYTHONPATH": os.pathsep.join([given, ENTRY] if given else [ENTRY])}
    if node.nodes > 1:
        interface = gloo_interface({**os.environ, **node.env}, _address())
        if interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def _address() -> str:
    """Where others reach this machine: where whoever asks has reached it."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return connection[2] if len(connection) == 4 else socket.gethostname()


def _find(source: Mapping[str, Any]) -> Answer:
    """Whether a volume is where the job wants it.

    Raises:
        Refused: it cannot be read.
    """
    problem = _volume(source["path"])["problem"]
    if problem is not None:
        raise Refused(f"volume {source['volume']}, {source['path']}: {problem}; correct it in the settings")
    try:
        return {"visible": os.path.samefile(source["path"], source["wanted"])}
    except OSError:
        return {"visible": False}


def _volume(path: str) -> Answer:
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
        space = os.statvfs(path)
        size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        return {"problem": None, "size": size, "free": free}
    except OSError as error:
        return {"problem": (error.strerror or str(error)).lower(), "size": None, "free": None}


def _send(answer: Answer) -> None:
    data = answer.pop("data", b"")
    line = json.dumps({**answer, "bytes": len(data)} if data else answer)
    sys.stdout.buffer.write(line.encode() + b"\n" + data)
    sys.stdout.buffer.flush()


def _end_with_stdin() -> None:
    """End this process when whoever asked is gone: it may wait for what never comes."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(0)


def main(root: str, line: bytes) -> None:
    """Answer a request."""
    host, request = Host(Path(root)), json.loads(line)
    verb = getattr(host, request["do"])
    try:
        if request["do"] in ("wait", "logs", "start", "preflight"):
            if request["do"] not in ("start", "preflight"):  # they heed it themselves
                threading.Thread(target=_end_with_stdin, daemon=True).start()
            with contextlib.closing(verb(request)) as answers:
                for answer in answers:
                    _send(answer)
        else:
            _send(verb(request))
    except Refused as error:
        _send({"error": str(error)})
    except BrokenPipeError:
        os._exit(0)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _send(
            {"error": f"{where}{error.strerror or error}; choose another root in the target's settings, or make room"}
        )


def shell(argument: str) -> None:
    """Become a command that a user wants where a rank of a job runs, and as it does."""
    request = json.loads(base64.urlsafe_b64decode(argument))
    try:
        env, folder = placing.shell_of(
            Host(Path(os.path.expanduser(request["root"]))).run(request["name"]), request["rank"]
        )
        os.chdir(folder)
        command = request["command"] or [os.environ.get("SHELL", "/bin/sh")]
        os.execvpe(command[0], command, env)
    except Refused as error:
        sys.exit(f"paceline: {error}")
    except OSError as error:
        sys.exit(f"paceline: cannot run that there: {error}")
