"""The agent: one process a node that starts the ranks, watches them, and says what became of them.

It works in one thread. What happens (signals, news of ranks, messages of the coordinator) goes to the inbox, and
`Agent.run` acts on it.
"""

from __future__ import annotations

import collections
import os
import signal
import socket
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.contract import CONTRACTS
from paceline.node.devicequeue.policy import impossible
from paceline.node.devicequeue.ticket import Ticket
from paceline.node.eventloop.channel import Message
from paceline.node.eventloop.loop import Loop
from paceline.node.failure import node_failure
from paceline.node.logs.time_index import TimeIndex
from paceline.node.machine import processes
from paceline.node.machine.devices import visibility
from paceline.node.machine.ports import Reservation
from paceline.node.ranks.launcher import Ranks
from paceline.node.ranks.mpi import MpiRanks
from paceline.node.rendezvous.coordinator import GONE_GRACE
from paceline.node.rendezvous.participant import Team
from paceline.node.rundir.directory import RunDirectory
from paceline.node.signals import HEARD, LEAVE
from paceline.node.spec import NodeSpec

from .tensorboard import JobBoard

FAILURE_GRACE = 5.0  # seconds between SIGTERM and SIGKILL for the peers of a failed rank
SYMPTOM_WAIT = 1.0  # seconds to wait for the cause when all that is known is that a peer went away
ANSWER_SECONDS = 10.0  # how long the coordinator may take to answer a node that was told to stop
TIMED_OUT = 124  # the exit code of a job that came to its time limit, as timeout(1) has it


class Agent:
    """Runs one node's part of a job, from the first process to the last."""

    def __init__(self, run: RunDirectory, spec: NodeSpec, lifeline: socket.socket | None) -> None:
        self.dir = run
        self.spec = spec
        self.host = socket.gethostname()
        self.contract = CONTRACTS[spec.framework]
        self.loop = Loop()
        self.ports = Reservation()
        self.inbox: collections.deque[Message] = collections.deque()
        self.ranks = self._ranks()
        self.times = TimeIndex(self.loop)
        self.team = Team(
            self.loop, spec, offer=self._offer, deliver=self.inbox.append, fail=self._fail,
            is_over=lambda: self.finish is not None,
        )  # fmt: skip
        self.lifeline = lifeline
        self.ticket: Ticket | None = None
        self.tensorboard = JobBoard(self.loop, run)
        self.status: dict[str, Any] = {
            "job": spec.job, "job_id": spec.job_id, "state": "PENDING" if spec.request else "STARTING",
            "framework": spec.framework,
            "agent": {
                "pid": os.getpid(), "start_time": processes.start_time(os.getpid()), "host": self.host,
                "boot": processes.boot_id(),
                "guard": {"pid": os.getppid(), "start_time": processes.start_time(os.getppid())},
            },
            "nodes": spec.expected or spec.nodes, "node_rank": spec.node_rank, "world_size": None,
            "attempt": 0, "restarts": 0, "max_restarts": spec.max_restarts, "exit_code": None,
            "created": time.time(), "started": None, "finished": None, "ranks": [], "failure": None, "others": [],
            "devices": list(spec.devices or ()), "waiting": None, "start": None, "coordinator": None, "door": None,
        }  # fmt: skip
        self.at_once = False  # whether the ranks get no grace
        self.stop_signal = 0  # the first signal that asked
        self.halted_by = 0  # the signal with which the coordinator ended all ranks
        self.preempted = False  # whether somebody wants the ranks to save their state and end
        self.start: Message | None = None  # the attempt that this node has agreed to, until it begins
        self.is_newcomer = False  # the coordinator is to hear when the ranks could start
        self.reported = False  # whether the coordinator knows how this attempt went here
        self.halted = True  # whether no rank of this attempt is left, or there was none
        self.join_by: float | None = None  # when the others must have come, while they are waited for
        self.end_by: float | None = None  # when the time limit is over, once the ranks run
        self.timed_out = False
        self.finish: Message | None = None

    def _ranks(self) -> Ranks:
        """This node's ranks, however they are started."""
        news = partial(self.inbox.append, {"do": "look"})
        if self.spec.framework == "mpi":
            return MpiRanks(self.loop, self.spec, self.dir, news, self._send)
        return Ranks(self.loop, self.spec, self.dir, news)

    # -- the way of a job ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Take part in the job until it ends; returns its exit code."""
        self.loop.catch(HEARD, self._on_signal)
        if self.lifeline is not None:
            self.loop.watch(self.lifeline, self._on_lifeline)
        processes.adopt_orphans()
        self._tell_status()
        try:
            try:
                self._work()
            except Exception as error:  # a full disk, a folder that is gone: no job ends without a last word
                traceback.print_exc()
                self._fail(f"the job's agent could not go on: {_in_words(error)}; see {self.dir.agent_log}")
            assert self.finish is not None
            self._end(self.finish)
        finally:
            self.ranks.close()
            self.ports.release()
            if self.ticket is not None:
                self.ticket.release()
        return int(self.finish["exit_code"])

    def _work(self) -> None:
        self._wait_for_devices()
        if self.finish is None:
            self.ranks.start_server()
            self.join_by = time.monotonic() + self.spec.join_timeout
            self.team.meet(self.join_by)
            self._tell_status(coordinator=self.team.place, door=self.team.door)
        while self.finish is None:
            if not self.loop.run_until(lambda: bool(self.inbox) or self.finish is not None, self._patience()):
                self._lose_patience()
            elif self.finish is None:
                self._act(self.inbox.popleft())

    def _act(self, message: Message) -> None:
        what = message["do"]
        if what == "start":
            self.start, self.join_by = message, None
            self._send({"do": "ready"})
        elif what == "go" and self.start is not None:
            self._start_attempt(self.start)
            self.start = None
        elif what == "prepare":
            self.is_newcomer = True
            self.ranks.warm_up()
            self._look_after_ranks()
        elif what == "look":
            self._look_after_ranks()
        elif what == "halt":
            self._halt(message)
        elif what == "daemon" and isinstance(self.ranks, MpiRanks):
            self.ranks.start_daemon(message)
        elif what == "restart":
            told = {key: message[key] for key in ("attempt", "restarts", "nodes")}
            self._tell_status(state="RESTARTING", **told)
            self._tell_event("restarting", message)
        elif what == "wait":
            self._wait_for_others(f"{message['why']}, and the job needs {self.spec.least} nodes")
        elif what in ("search", "alone"):
            self._lose_coordinator(message)
        elif what == "refuse":
            self._fail(f"node 0 refused this node: {message['why']}", exit_code=2)
        elif what == "finish":
            self.finish = message

    def _end(self, finish: Message) -> None:
        """Leave nothing running, and say how the job ended."""
        if self.timed_out and finish["state"] == "STOPPED":
            why = f"stopped at its time limit of {self.spec.time_limit:g} s"
            failure = node_failure(self.status["node_rank"] or 0, self.host, why, TIMED_OUT)
            finish = {**finish, "state": "FAILED", "exit_code": TIMED_OUT, "failure": failure.to_dict()}
            self.finish = finish
        if not self.halted:
            self.ranks.stop(0.0, lambda: self.at_once)
        self.team.close(ANSWER_SECONDS)
        self.ranks.close()
        self.times.end()
        self._tell_status(
            finished=time.time(), waiting=None, state=finish["state"], exit_code=finish["exit_code"],
            failure=finish["failure"], others=finish["others"],
        )  # fmt: skip
        self._tell_event("finished", finish)
        self.dir.spare.unlink(missing_ok=True)

    def _patience(self) -> float | None:
        """How long the next message may take: up to the time limit, for nodes to come, and for an answer to a stop."""
        if self.halted and self.stop_signal:  # the others have their grace too
            return ANSWER_SECONDS + (0.0 if self.at_once else self.spec.grace)
        if self.join_by is not None:
            return max(0.0, self.join_by - time.monotonic())
        if self.end_by is not None and not self.stop_signal:
            return max(0.0, self.end_by - time.monotonic())
        return None

    def _lose_patience(self) -> None:
        if self.stop_signal:
            self._stop_alone()
            return
        if self.join_by is None:
            self.timed_out = True
            self._ask_to_stop(signal.SIGTERM)
            return
        spec = self.spec
        needed = f"{spec.nodes}" if spec.least == spec.nodes else f"at least {spec.least}"
        do = (
            ""
            if spec.hosts
            else "; start `paceline run` on each with the same --nnodes, --master-addr and --master-port"
        )
        why = f"{self.team.missing} of {needed} nodes did not come within {spec.join_timeout:g} s{do}"
        self._send({"do": "give up", "why": why})
        self._fail(why)

    def _wait_for_others(self, why: str) -> None:
        """Do nothing until others come."""
        self.join_by = time.monotonic() + self.spec.join_timeout
        self._tell_status(state="RESTARTING", waiting={"problem": why})
        self.dir.append_event("waiting", why=why)

    def _lose_coordinator(self, message: Message) -> None:
        """Go on with those that are left, whoever coordinates them, if that may be."""
        if not self.halted:
            self.halted = True
            self.ranks.stop(GONE_GRACE, lambda: self.at_once)
        if self.stop_signal or self.halted_by:  # the others stop as well
            self._stop_alone()
            return
        if message["do"] == "alone":
            self._fail(message["why"])
            return
        self._wait_for_others(message["why"])
        self.start, self.is_newcomer = None, False
        self.team.search(message["dead"], message.get("heard"), time.monotonic() + self.spec.join_timeout)
        self._tell_status(coordinator=self.team.place)

    def _stop_alone(self) -> None:
        """End the job here without asking the coordinator."""
        number = self.stop_signal or self.halted_by
        self.finish = {"state": "STOPPED", "exit_code": 128 + number, "failure": None, "others": []}

    def _fail(self, message: str, exit_code: int = 1) -> None:
        """End the job here for a reason that no rank is to blame for."""
        failure = node_failure(self.spec.node_rank or 0, self.host, message, exit_code)
        self.finish = {"state": "FAILED", "exit_code": exit_code, "failure": failure.to_dict(), "others": []}

    # -- waiting for devices -------------------------------------------------------------------------------------------

    def _wait_for_devices(self) -> None:
        """Take a place in the machine's queue, if the job asks for devices, and wait for its turn or the end."""
        request = self.spec.request
        if request is None:
            return
        if why := impossible(request):
            self._fail(f"the job can never start: {why}; correct --devices", 2)
            return
        ticket = self.ticket = Ticket(request, self.spec.job)
        try:
            devices = self._wait_for_turn(ticket)
        except OSError as error:
            where = error.filename or request.folder
            self._fail(f"cannot queue for devices: {where}: {error.strerror}; set PACELINE_HOME to another folder", 2)
            return
        if devices is None:
            return
        if not request.slots:
            self.spec = replace(self.spec, devices=devices, env={**self.spec.env, **visibility(devices)})
        self.ranks.use(self.spec, (ticket.fd,))
        self.dir.append_event("granted", devices=devices)
        self._tell_status(state="STARTING", waiting=None, devices=devices)

    def _wait_for_turn(self, ticket: Ticket) -> tuple[str, ...] | None:
        """The devices, or None if the job ends before it gets any."""
        news: list[bool] = []
        while self.finish is None:
            devices = ticket.look()
            if devices is not None:
                break
            waiting = {"need": ticket.request.need, "ahead": ticket.ahead, "problem": ticket.problem}
            if self.status["waiting"] is None:
                self.dir.append_event("queued", **waiting)
            if self.status["waiting"] != waiting:
                self._tell_status(waiting=waiting)
            news.clear()
            if ticket.watch.fd >= 0:
                self.loop.watch(ticket.watch.fd, lambda: news.append(True))
            self.loop.run_until(lambda: bool(news) or self.finish is not None, ticket.patience)
            self.loop.forget(ticket.watch.fd)
        else:
            devices = None
        ticket.watch.close()
        return devices

    def _offer(self) -> Message:
        """Fresh ports of this node for the next attempt; the user's --master-port serves the first one."""
        self.ports.release()
        main_port = self.spec.main_port if self.status["start"] is None and self.spec.nodes == 1 else None
        endpoints = self.spec.nproc if "endpoints" in self.contract.carries else 0
        return {
            "main_port": self.ports.take(main_port or 0),
            "ports": [self.ports.take() for _ in range(endpoints)],
        }

    def _send(self, message: Message) -> None:
        self.team.send(message)

    # -- an attempt ----------------------------------------------------------------------------------------------------

    def _start_attempt(self, start: Message) -> None:
        self.reported = self.halted = False
        self.is_newcomer = False
        attempt, world_size = start["attempt"], sum(node["slots"] for node in start["nodes"])
        self.dir.prepare_attempt(attempt)
        ranks = self.ranks.place(start, self.team.rank_key(start))
        logs = [
            {"rank": r.placement.rank, "local_rank": r.placement.local_rank, "out": str(r.out), "err": str(r.err),
             "error": str(r.error)} for r in ranks
        ]  # fmt: skip
        self.dir.append_event("started", attempt=attempt, world_size=world_size, logs=logs)
        self.status.update(
            attempt=attempt, node_rank=start["node_rank"], world_size=world_size, start=start, waiting=None,
            nodes=len(start["nodes"]), coordinator=self.team.place,
        )  # fmt: skip
        self.times.start(self.dir.times(attempt), {path: key for rank in ranks for path, key in rank.logs().items()})
        self.ranks.launch(ranks, start)
        if self.spec.tensorboard is not None and start["node_rank"] == 0:
            self.tensorboard.start(self.spec.python, self.spec.tensorboard or str(self.dir.path))

    def _look_after_ranks(self) -> None:
        """After news of a rank: tell the coordinator what decides something."""
        ranks = self.ranks
        if self.is_newcomer and ranks.imported is not None:
            self.is_newcomer = False
            self._send({"do": "prepared"})
        if (
            self.status["state"] != "RUNNING"
            and not self.halted
            and ranks.left
            and all(r.pid for r in ranks.current.values())
        ):
            if self.status["started"] is None and self.spec.time_limit is not None:
                self.end_by = time.monotonic() + self.spec.time_limit
            self._tell_status(state="RUNNING", started=self.status["started"] or time.time())
        if self.reported or self.halted:
            if ranks.server_failure and (self.is_newcomer or not ranks.current):
                self._fail(ranks.server_failure)
            return
        if ranks.resumes and ranks.left and not ranks.failures():  # the others do the same just now
            self.loop.run_until(lambda: not ranks.left or self._is_told_to_halt(), self.spec.grace)
        if ranks.resumes and not ranks.failures():
            self.reported = True
            self._send({"do": "preempted", "final": self.preempted})
        elif not ranks.left:
            self.reported = True
            self._send({"do": "failed" if ranks.failures() or ranks.server_failure else "done"})
        elif ranks.failures() and self.spec.framework != "indexed":
            self.reported = True
            self.loop.run_until(
                lambda: not ranks.left or not all(f.symptom for f in ranks.failures()) or self._is_told_to_halt(),
                SYMPTOM_WAIT,
            )
            self._send({"do": "failed"})

    def _is_told_to_halt(self) -> bool:
        return any(message["do"] in ("halt", "search", "alone") for message in self.inbox)

    def _halt(self, order: Message) -> None:
        """Stop the ranks of this attempt, and tell the coordinator once none is left."""
        if self.start is None and self.halted:
            return
        number = order["signal"]
        if number:
            self.halted_by = number
            self.dir.append_event("stopping", signal=number, grace=self.spec.grace)
        if not self.halted:
            self.halted = True
            if order.get("save"):
                self.ranks.save(self.spec.grace, lambda: self.at_once or self._is_told_to_halt())
            longest = FAILURE_GRACE if order.get("grace") is None else order["grace"]
            self.ranks.stop(self.spec.grace if number else min(longest, self.spec.grace), lambda: self.at_once)
        self.start = None
        failures = [f.to_dict() for f in self.ranks.failures()]
        if self.ranks.server_failure:
            failure = node_failure(self.status["node_rank"] or 0, self.host, self.ranks.server_failure)
            failures = [failure.to_dict()]
        self._tell_status()
        self._send({"do": "stopped", "failures": failures, **self._offer()})

    # -- what comes from outside ---------------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if number == LEAVE:
            self._send({"do": "leave"})
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self.preempted = self.preempted or number == signal.SIGUSR2
            self.ranks.signal(number)
        elif number != signal.SIGHUP or not self.spec.detached:
            self._ask_to_stop(number)

    def _on_lifeline(self) -> None:
        """Whoever waits for the job is gone, or says with a byte that it goes on alone."""
        assert self.lifeline is not None
        self.loop.forget(self.lifeline)
        if not self.lifeline.recv(1):
            self._ask_to_stop(signal.SIGHUP)

    def _ask_to_stop(self, number: int) -> None:
        # Schedulers and people repeat themselves; only a second Ctrl-C, or SIGQUIT, means at once.
        self.at_once = self.at_once or number == signal.SIGQUIT or (number == signal.SIGINT and bool(self.stop_signal))
        if self.stop_signal:
            return
        self.stop_signal = number
        if not self.team.has_met:  # nobody else knows of this node yet
            self._stop_alone()
        else:
            self._send({"do": "stop", "signal": number})
            self.inbox.append({"do": "halt", "signal": number})

    # -- what is told --------------------------------------------------------------------------------------------------

    def _tell_status(self, **changes: Any) -> None:
        self.status.update(changes, ranks=[rank.describe(self.spec.job) for rank in self.ranks.current.values()])
        self.dir.write_status(self.status)

    def _tell_event(self, event: str, message: Message) -> None:
        self.dir.append_event(event, **{key: value for key, value in message.items() if key != "do"})


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def main(run_directory: str, lock_fd: int, lifeline_fd: int) -> int:
    """Run the job of a run directory to its end.

    Args:
        run_directory: its path.
        lock_fd: holds its lock, until this process is gone.
        lifeline_fd: closes when whoever waits for the job is gone; -1 means that nobody does.
    """
    os.set_inheritable(lock_fd, False)
    run = RunDirectory(Path(run_directory))
    lifeline = socket.socket(fileno=lifeline_fd) if lifeline_fd >= 0 else None
    return Agent(run, NodeSpec.load(run.spec), lifeline).run()
