"""What a container runs as its only program: makes this node's part of a job, starts its agent, and reports.

A container has one output and one short message at its end, and no client that reads files. So everything goes there:

- stdout gets what the ranks write, each line behind `[rank N] `, and each event in a line of JSON behind `[paceline] `;
  the last one is what the node has used and logged over time, in few points.
  The traceback that ended a rank is behind `[rank N traceback] `: a client that shows the report leaves it out;
- the termination message gets how the job ended here, in JSON: the culprit rank, its traceback, the ranks' exit codes.

The first process of a container gets the signals of the scheduler and forwards them to the agent. The job ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.contract import TOKEN
from paceline.node.errors import Refused
from paceline.node.eventloop.loop import Loop
from paceline.node.files import list_names, load_json, write_json
from paceline.node.lifeline import TOGETHER
from paceline.node.logs.following import Event, Output, updates
from paceline.node.rendezvous.handshake import Listener
from paceline.node.rendezvous.quorum import rank_in
from paceline.node.signals import EXIT_REPLACED, HANDLED, call_on
from paceline.node.spec import NodeSpec
from paceline.node.store import make, records
from paceline.node.telemetry.history import history

from .batch import code_at, home_of, plan_of, read
from .pod_format import ATTEMPT, HISTORY, KILLED, LONGEST, MARK, PIECE, RANK, REPLACED, STDERR, TRACEBACK, WHOLE
from .start import order_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO, NoReturn

    from paceline.contract.records import Failure, JobRecord
    from paceline.node.eventloop.channel import Channel
    from paceline.node.journal.status import Status
    from paceline.node.rendezvous.messages import AgentStatus
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.store.lifecycle import AgentProcess

    from .pod_format import PodReport

ENDED = "ended.json"  # beside the request: how the job ended here
MOST = 4096  # bytes of a termination message
_MOST_TEXT = 400  # letters of a line in it
_POINTS = 48  # of what was used and logged
_WIDEST = 6  # bytes of a letter in JSON: \\u00fc
# Seconds for which a pod stays when a rank of another one has failed: clusters delete the pods that run when the first
# one has failed, and their logs. Nodes report an end within a second, so those that end soon after it stay too.
_LATER = 0.3
_REFUSED = 2  # the exit code if the job cannot run
_OF_RECORD = (  # what the message has of the job's record
    "state", "error", "attempt", "restarts", "framework", "started", "finished", "progress", "checkpoint", "slow",
)  # fmt: skip


def main(file: str, message: str) -> int:
    """Run this node's part of the job that a file describes, to its end; returns its exit code."""
    path = Path(file)
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process of a container ignores what it does not handle
        signal.signal(number, _end)
    ended = path.with_name(ENDED)
    if earlier := load_json(ended):  # the container was started again, and its files are those of before
        write_message(message, earlier)
        return int(earlier["exit_code"])
    try:
        batch = read(path)
        home, node_rank = home_of(batch), batch.order.job.node_rank or 0
        restarts, began = before(batch.kept_logs)
        kept = KeptLog(batch.kept_logs, node_rank)  # its name has the time
        order = replace(order_of(home, batch.order), restarts=restarts, began=began)
        lifeline, theirs = socket.socketpair()
        with theirs, make.making(plan_of(home, order)) as new:
            made = new.start(code_at(new.code, batch, path.parent), theirs)
            with contextlib.suppress(OSError):  # it has ended already
                lifeline.send(TOGETHER)
    except Refused as error:
        return refuse(message, str(error))
    except OSError as error:
        return refuse(message, f"{error.filename or path}: {error.strerror or error}")
    is_told = _forward_signals(made.agent)
    relay = _Relay(sys.stdout.buffer, kept, leaves=bool(order.peers))
    for update in updates(made.run, lifeline.fileno(), tracebacks=True):
        if isinstance(update, Output):
            relay.output(update)
        else:
            relay.event(update)
    with contextlib.suppress(OSError):
        relay.say(HISTORY, {"node": history(made.run, points=_POINTS)})
    relay.close()
    code_at_end = made.agent.wait()
    exit_code = 128 - code_at_end if code_at_end < 0 else code_at_end
    record = records.record(made.run.path, list)
    state = None if record is None else record["state"]
    failure = (made.run.read_status() or {}).get("failure")
    report = summary(record, failure, exit_code)
    with contextlib.suppress(OSError):
        write_json(ended, report)
    write_message(message, report)
    if batch.late_nodes and state == "SUCCEEDED":
        stay(made.run, is_told, ends_with_first=batch.ends_with_first)
    if failure is not None and failure["node"] != node_rank:
        is_told.wait(_LATER)
    if record is not None and record["cause"] == "nodes missing" and exit_code == EXIT_REPLACED:
        return KILLED  # it counts, so that pods that miss the others again and again come to an end
    return 1 if state == "FAILED" and exit_code in REPLACED else exit_code


def refuse(message: str, why: str) -> int:
    """Say why the job cannot run here, on stderr and in the termination message; returns the exit code."""
    print(f"paceline: {why}", file=sys.stderr, flush=True)
    write_message(message, {"state": "FAILED", "exit_code": _REFUSED, "refused": why})
    return _REFUSED


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _forward_signals(agent: AgentProcess) -> threading.Event:
    """Forward signals to the agent; returns an event that is set by the first one."""
    is_told = threading.Event()

    def forward(number: int) -> None:
        is_told.set()
        with contextlib.suppress(OSError):
            agent.send_signal(number)

    call_on(HANDLED, forward)
    return is_told


# -- the output --------------------------------------------------------------------------------------------------------


class _Relay:
    """Writes what the ranks write line by line, so that the lines of several ranks can be told apart."""

    def __init__(self, out: BinaryIO, kept: KeptLog, *, leaves: bool = False) -> None:
        self._out, self._kept = out, kept
        self._leaves = leaves  # whether the job goes on elsewhere when this node is stopped
        self._rest: dict[bytes, bytes] = {}  # the prefix of a rank → the line it has not finished

    def output(self, update: Output) -> None:
        """Write the lines of a rank that are complete."""
        prefix = RANK % update.rank + (ATTEMPT % update.attempt if update.attempt else b"")
        prefix += STDERR if update.stream == "err" else b""
        if update.is_traceback:
            self._end_lines()
            prefix += TRACEBACK
        *lines, rest = (self._rest.get(prefix, b"") + update.data).split(b"\n")
        text = b"".join(_whole(prefix, line) for line in lines)
        while len(rest) > LONGEST:
            text += _piece(prefix, rest[:LONGEST])
            rest = rest[LONGEST:]
        self._rest[prefix] = rest
        self._write(text)

    def event(self, event: Event) -> None:
        """Write an event of the job."""
        if event.name == "restarting":
            self._kept.note_restarts(event.details["restarts"])
        details = {key: value for key, value in event.details.items() if key != "logs"}
        if "logs" in event.details:
            details["ranks"] = [[log["rank"], log["local_rank"]] for log in event.details["logs"]]
        name = event.name
        if self._leaves and name == "stopping":
            name = "leaving"
        elif (
            self._leaves
            and name == "finished"
            and (event.details["state"], event.details["exit_code"]) == ("STOPPED", EXIT_REPLACED)
        ):
            name = "left"
        self.say(name, details)

    def say(self, name: str, details: Mapping[str, object]) -> None:
        """Write an event, after the lines that were left open before it."""
        self._end_lines()
        self._write(MARK + json.dumps({"event": name, **details}).encode() + b"\n")

    def close(self) -> None:
        """Write the lines that were left open."""
        self._end_lines()
        self._kept.close()

    def _end_lines(self) -> None:
        for prefix, rest in self._rest.items():
            if rest:
                self._write(_piece(prefix, rest))
        self._rest.clear()

    def _write(self, text: bytes) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._kept.write(text)


def _piece(prefix: bytes, text: bytes) -> bytes:
    return prefix + PIECE + text + b"\n"


def _whole(prefix: bytes, line: bytes) -> bytes:
    """A line; a long one in pieces, of which the last one has the line end."""
    parts = [line[at : at + LONGEST] for at in range(0, len(line), LONGEST)] or [b""]
    return b"".join(_piece(prefix, part) for part in parts[:-1]) + prefix + WHOLE + parts[-1] + b"\n"


# -- the termination message -------------------------------------------------------------------------------------------


def summary(record: JobRecord | None, failure: Failure | None, exit_code: int) -> PodReport:
    """How the job ended on this node, for the termination message."""
    found: dict[str, object] = {"exit_code": exit_code, "failure": failure}
    if record is not None:
        found.update((key, value) for key, value in record.items() if key in _OF_RECORD)
        found["ranks"] = [[rank["rank"], rank["exit_code"]] for rank in record["instances"]]
        found["commit"] = (record["code"] or {}).get("commit")
    return cast("PodReport", {key: value for key, value in found.items() if value not in (None, [], {})})


def write_message(path: str, message: Mapping[str, object]) -> None:
    """Write the termination message; if it is too long, the beginning of the traceback is left out first."""
    text = json.dumps(_shortened(message))
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(text)


def _shortened(message: Mapping[str, object]) -> Mapping[str, object]:
    """The message, of at most `MOST` bytes in JSON."""
    found: dict[str, Any] = {
        key: value[:_MOST_TEXT] if isinstance(value, str) else value for key, value in message.items()
    }
    for key in ("ranks", "progress", "slow"):
        if len(json.dumps(found.get(key))) > MOST // 4:
            del found[key]
    failure = found.get("failure")
    if failure:
        text = failure["traceback"]
        failure = found["failure"] = {**failure, "message": failure["message"][:_MOST_TEXT]}
        while len(json.dumps(found)) > MOST and failure["traceback"]:
            over = len(json.dumps(found)) - MOST
            text = text[-(MOST):] if len(text) > MOST else text[max(1, over // _WIDEST) :]
            failure["traceback"] = text
    return found


# -- a second copy of the output, on a volume, where it is when the container is gone ----------------------------------


_RESTARTS = "restarts-"  # begins the name of a file, followed by their number


def before(folder: str | None) -> tuple[int, float | None]:
    """How many restarts other containers of the job have noted, and when the first of them began, if there was one."""
    names = [] if folder is None else list_names(Path(folder))
    restarts = [int(name[len(_RESTARTS) :]) for name in names if re.fullmatch(_RESTARTS + r"\d+", name)]
    begun = [int(found[1]) for name in names if (found := re.fullmatch(r"node-\d+-(\d+)\.log", name))]
    return max(restarts, default=0), min(begun) / 1e9 if begun else None


class KeptLog:
    """Writes lines to a file of its own in a folder. If that cannot be written, it says so once, and stops.

    Each line begins with its time, as in the log of the container that a cluster keeps. The names of the files say when
    each container began, and those of empty ones how often the job was restarted.
    """

    def __init__(self, folder: str | None, node_rank: int) -> None:
        """Make the file."""
        self._file = -1
        self._folder = folder
        if folder is None:
            return
        path = Path(folder, f"node-{node_rank}-{time.time_ns()}.log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            _warn(path, error)

    def write(self, text: bytes) -> None:
        """Write whole lines, with the time of now."""
        if self._file < 0:
            return
        stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()
        data = b"".join(stamp + line + b"\n" for line in text.removesuffix(b"\n").split(b"\n"))
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _warn(Path(os.readlink(f"/proc/self/fd/{self._file}")), error)
            self.close()

    def note_restarts(self, count: int) -> None:
        """Note how many restarts the job had, for a container that comes when all agents are gone."""
        if self._file >= 0 and self._folder is not None:
            with contextlib.suppress(OSError):
                Path(self._folder, f"{_RESTARTS}{count}").touch()

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _warn(path: Path, error: OSError) -> None:
    print(f"paceline: no copy of the logs is kept in {path}: {error.strerror}", file=sys.stderr, flush=True)


# -- nodes that come when their job has succeeded without them ---------------------------------------------------------


_LAST_SECONDS = 1.0  # for the last answer to arrive
_NOTICED = 5.0  # seconds until the cluster knows that a pod has ended


def stay(run: RunDirectory, is_told: threading.Event, *, ends_with_first: bool) -> None:
    """Stay in a job that has succeeded for as long as other nodes need this one, until a signal comes.

    A Job of MIN:MAX pods ends when MAX pods have succeeded. Those that did not fit into the cluster begin when the
    others have ended. So the pod that coordinated the job stays until it has answered all of them.

    With a successPolicy a Job ends when pod 0 has succeeded: its controller makes no more pods, and deletes those that
    have not ended, with their logs. So pod 0 ends last, and nobody has to be answered unless the job has ended without
    pod 0.
    """
    spec, status = NodeSpec.load(run.spec), run.read_status() or {}
    start = status.get("start")
    there = set() if start is None else {rank_in(node.get("id", "")) for node in start["nodes"]}
    if ends_with_first and spec.node_rank == 0:
        is_told.wait(0.0 if there == {0} else _NOTICED)
    elif not (ends_with_first and 0 in there):
        _answer(spec, status)


def _answer(spec: NodeSpec, status: Status) -> None:
    """If the coordinator was here, answer the nodes that come late."""
    missing = spec.nodes - int(status.get("nodes") or spec.nodes)
    if not missing or status.get("coordinator") != status.get("address"):
        return
    loop, answered, is_over = Loop(), 0, False

    def answer() -> AgentStatus:
        nonlocal answered
        answered += 1
        return {
            "id": "", "leads": False, "has_started": False, "has_begun": True, "has_ended": True, "leader": None,
        }  # fmt: skip

    def end(_: int) -> None:
        nonlocal is_over
        is_over = True

    loop.catch(HANDLED, end)
    listener = Listener(loop, os.environ.get(TOKEN, "").encode(), answer, _refuse)
    with contextlib.suppress(OSError):
        listener.open(spec.main_port or 0)
        until = time.monotonic() + spec.join_timeout
        loop.run_until(lambda: is_over or answered >= missing, max(0.0, until - time.monotonic()))
        loop.run_until(lambda: is_over, _LAST_SECONDS)
    listener.close()


def _refuse(channel: Channel) -> None:
    channel.socket.shutdown(socket.SHUT_RDWR)
