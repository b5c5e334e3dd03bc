"""The agent: one process per node, which starts the ranks there, watches them, and reports how they end.

It has a single thread. Everything that happens (signals, changes of ranks, messages of the coordinator) is put into the
inbox, and `Agent.run` acts on it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import CONTRACTS
from paceline.node.errors import Refused
from paceline.node.eventloop.loop import Loop
from paceline.node.failure import TIMED_OUT, node_failure
from paceline.node.lifeline import ALL_STARTED, CLIENT_LOST, DOUBT_SECONDS, IN_DOUBT, KEPT, TOGETHER
from paceline.node.logs.time_index import TimeIndex
from paceline.node.machine import processes
from paceline.node.machine.devices import visibility
from paceline.node.machine.ports import Reservation
from paceline.node.ranks.launcher import Ranks
from paceline.node.rendezvous.coordinator import GONE_GRACE
from paceline.node.rendezvous.participant import LEFT, Participant
from paceline.node.rendezvous.silence import PATIENCE
from paceline.node.rundir.directory import RunDirectory
from paceline.node.signals import HANDLED, LEAVE
from paceline.node.spec import CURRENT_SECONDS, NodeSpec

from .status import JobStatus
from .tensorboard import JobBoard

if TYPE_CHECKING:
    from typing import Literal, TypedDict, Union

    from typing_extensions import Unpack

    from paceline.contract.records import Cause
    from paceline.node.journal.records import LogFiles, Record
    from paceline.node.journal.status import Status, Waiting
    from paceline.node.ranks.seed import Seed
    from paceline.node.rendezvous.messages import (
        Alone,
        Finish,
        Halt,
        Offer,
        Search,
        Start,
        ToCoordinator,
        ToNode,
    )

    from .waiting import DeviceClaim

    class RanksChanged(TypedDict):
        """Not from the coordinator: a rank or the fork server has changed."""

        do: Literal["ranks changed"]

    Inbox = Union[ToNode, RanksChanged]

FAILURE_GRACE = 5.0  # seconds between SIGTERM and SIGKILL for the peers of a failed rank
SYMPTOM_WAIT = 10.0  # seconds to wait for the cause if all failures look like the consequence of another one
ORDER_WAIT = 1.0  # seconds to wait for this node's own order to stop if a rank was ended by SIGTERM: see `_report`
_AFTER_LAST_CALL = 1.0  # seconds from the end of a last call until the start is there
ANSWER_SECONDS = 10.0  # how long the coordinator may take to answer a node that asked to stop


class Agent:
    """Runs one node's part of a job, from the first process to the last."""

    def __init__(
        self, run: RunDirectory, spec: NodeSpec, lifeline: socket.socket | None, seed: Seed | None = None
    ) -> None:
        self.dir = run
        self.spec = spec
        self.host = socket.gethostname()
        self.loop = Loop()
        self.ports = Reservation()
        self.inbox: collections.deque[Inbox] = collections.deque()
        self.ranks = self._ranks(seed)
        self.times = TimeIndex(self.loop)
        self.participant = Participant(
            self.loop, spec, offer=self._offer, deliver=self.inbox.append, fail=self._fail, is_over=self._is_over
        )
        self.lifeline = lifeline
        self.claim: DeviceClaim | None = None
        self.tensorboard = JobBoard(self.loop, run)
        self.status = JobStatus(run, spec, self.host)
        self.at_once = False  # whether the ranks get no grace
        self.stop_signal = 0  # the first signal that asked this node to stop
        self.halted_by = 0  # the signal with which the coordinator stopped all ranks
        self.leave_by: float | None = None  # until when to wait, if another node is to take this one's place
        self.preempted = False  # whether the ranks were asked to save their state and end for good
        self.start: Start | None = None  # the attempt that this node has agreed to, until it begins
        self.is_newcomer = False  # whether the coordinator waits for a report that the ranks could start
        self.reported = False  # whether the coordinator knows how this attempt went here
        self.halted = True  # whether no rank of this attempt is left, or there was none
        self.in_doubt = False  # whether the client may end before all nodes know that they are a job
        self.may_join = lifeline is None or not spec.joins  # whether the other nodes may know of this one
        self.has_no_client = False  # whether a client elsewhere that followed the job is gone from this node
        self.ends_with_starter = False  # whether the other end of the lifeline is the first process of a container
        self.has_met_all = False  # whether an attempt was proposed
        self.join_within = spec.join_timeout  # seconds for the other nodes to come, at first
        self.join_by: float | None = None  # until when to wait for other nodes, while some are missing
        self.end_by: float | None = None  # when the time limit is reached, once the ranks run
        self.timed_out = False
        self.finish: Finish | None = None

    def _ranks(self, seed: Seed | None) -> Ranks:
        """This node's ranks, however they are started."""
        changed = partial(self.inbox.append, {"do": "ranks changed"})
        if self.spec.framework == "mpi":
            from paceline.node.ranks.mpi import MpiRanks  # no other job needs it

            return MpiRanks(self.loop, self.spec, self.dir, changed, self._start_daemon)
        return Ranks(self.loop, self.spec, self.dir, changed, seed)

    def _start_daemon(self, node_rank: int, attempt: int, command: list[str], folders: dict[str, str]) -> None:
        """Start mpirun's daemon on another node, through the coordinator."""
        self._send({"do": "daemon", "node_rank": node_rank, "attempt": attempt, "command": command, "folders": folders})

    def _is_over(self) -> bool:
        return self.finish is not None

    def _send(self, message: ToCoordinator) -> None:
        self.participant.send(message)

    # -- the life of a job ---------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Take part in the job until it ends; returns its exit code."""
        self.loop.catch(HANDLED, self._on_signal)
        if self.lifeline is not None:
            self.loop.watch(self.lifeline, self._on_lifeline)
        processes.adopt_orphans()
        self._write_status()
        self._look_at_disk()
        try:
            try:
                self._work()
            except Exception as error:  # a full disk, a folder that is gone: the job still gets a last status
                traceback.print_exc()
                self._fail(f"the job's agent has failed: {_describe(error)}; see {self.dir.agent_log}", "agent")
            assert self.finish is not None
            self._end(self.finish)
        finally:
            self.ranks.close()
            self.ports.release()
            if self.claim is not None:
                self.claim.release()
        return int(self.finish["exit_code"])

    def _work(self) -> None:
        self._claim_devices()
        if self.finish is None:
            self.ranks.warm_up()
            # A node that joins a running job is no part of it until its client keeps it: then it can still end alone.
            self.loop.run_until(lambda: self.may_join or self._is_over(), None)
        if self.finish is None:
            self.join_by = time.monotonic() + self.join_within
            self.participant.meet(lambda: self.join_by or 0.0, lambda: self.join_within)
            if not self.participant.leads:  # the coordinator knows best which nodes are missing
                self.join_by = time.monotonic() + self.spec.join_timeout
            self._write_status(coordinator=self.participant.coordinator_address, address=self.participant.address)
        while self.finish is None:
            if not self.loop.run_until(lambda: bool(self.inbox) or self._is_over(), self._timeout()):
                self._on_timeout()
            elif self.finish is None:
                self._act(self.inbox.popleft())

    def _look_at_disk(self) -> None:
        """Read what other machines have written for this node, and look again some seconds later."""
        if self.finish is not None or (self.spec.current is None and self.spec.stop_file is None):
            return
        with contextlib.suppress(OSError):  # of a disk that does not answer now
            self._check_current()
        with contextlib.suppress(OSError, ValueError):  # nobody has asked, or it is not written yet
            if self.spec.stop_file is not None and not self.stop_signal and self.finish is None:
                self._ask_to_stop(int(Path(self.spec.stop_file).read_text()))
        self.loop.after(CURRENT_SECONDS, self._look_at_disk)

    def _check_current(self) -> None:
        """End at once if the job runs elsewhere now."""
        if self.spec.current is not None:
            file, mine = self.spec.current
            if Path(file).read_text() != mine:
                self.at_once = True
                self._fail("its scheduler has started the job elsewhere, and this node ends", "elsewhere")

    def _claim_devices(self) -> None:
        """If the job asks for devices, wait until it has them or has ended."""
        request = self.spec.request
        if request is None:
            return
        from .waiting import DeviceClaim  # no other job needs it

        claim = self.claim = DeviceClaim(self.loop, request, self.spec.job)
        try:
            devices = claim.wait(self._report_waiting, self._is_over)
        except Refused as error:
            self._fail(str(error), "refused", 2)
            return
        if devices is None:
            return
        if not request.slots:
            self.spec = replace(self.spec, devices=devices, env={**self.spec.env, **visibility(devices)})
        self.ranks.use(self.spec, (claim.fd,))
        granted: Record = {"event": "granted", "devices": devices}
        self._write_status(granted, state="STARTING", waiting=None, devices=list(devices))

    def _report_waiting(self, waiting: Waiting) -> None:
        queued: Record = {
            "event": "queued", "need": waiting["need"], "ahead": waiting["ahead"], "problem": waiting["problem"]
        }  # fmt: skip
        self._write_status(*([] if self.status.current["waiting"] else [queued]), waiting=waiting)

    def _act(self, message: Inbox) -> None:
        if message["do"] == "start":
            self.start, self.join_by, self.has_met_all = message, None, True
            self._send({"do": "ready"})
        elif message["do"] == "go" and self.start is not None:
            self._start_attempt(self.start)
            self.start = None
            if self.has_no_client:  # another node may coordinate now
                self._lose_client()
        elif message["do"] == "prepare":
            self.is_newcomer = True
            self.ranks.warm_up()
            self._check_ranks()
        elif message["do"] == "ranks changed":
            self._check_ranks()
        elif message["do"] == "halt":
            self._halt(message)
        elif message["do"] == "daemon":
            self.ranks.start_daemon(message["attempt"], message["command"], message["folders"])
        elif message["do"] == "restart":
            attempt, restarts, nodes = message["attempt"], message["restarts"], message["nodes"]
            restarting: Record = {
                "event": "restarting", "attempt": attempt, "restarts": restarts, "nodes": nodes, "why": message["why"],
                "failure": message["failure"], "others": message["others"],
            }  # fmt: skip
            self._write_status(restarting, state="RESTARTING", attempt=attempt, restarts=restarts, nodes=nodes)
        elif message["do"] == "wait":
            self._wait_for_others(f"{message['why']}, and the job needs {self.spec.least} nodes")
        elif message["do"] == "search" or message["do"] == "alone":
            self._lose_coordinator(message)
        elif message["do"] == "refuse":
            why = f"node 0 refused this node: {message['why']}"
            self._fail(why, "refused", LEFT if self.spec.peers else 2)
        elif message["do"] == "finish":
            has_left = self.spec.peers and message["state"] == "STOPPED" and not message["exit_code"]
            self.finish = {**message, "exit_code": LEFT} if has_left else message

    def _end(self, finish: Finish) -> None:
        """Leave nothing running, and record how the job ended."""
        if self.timed_out and finish["state"] == "STOPPED":
            why = f"stopped at its time limit of {self.spec.time_limit:g} s"
            failure = node_failure(self.status.node_rank, self.host, "time limit", why, TIMED_OUT)
            finish = {**finish, "state": "FAILED", "exit_code": TIMED_OUT, "failure": failure}
            self.finish = finish
        if not self.halted:
            self.ranks.stop(0.0, lambda: self.at_once)
        self.participant.close(ANSWER_SECONDS)
        self.ranks.close()
        self.times.end()
        self._write_status({
            "event": "finished", "state": finish["state"], "exit_code": finish["exit_code"],
            "failure": finish["failure"], "others": finish["others"],
        })  # fmt: skip
        self.dir.spare.unlink(missing_ok=True)

    # -- deadlines -----------------------------------------------------------------------------------------------------

    def _timeout(self) -> float | None:
        """How many seconds to wait for the next message; None: any time."""
        if self.leave_by is not None:
            return max(0.0, self.leave_by - time.monotonic())
        if self.halted and self.stop_signal:  # the ranks of the other nodes have their grace too
            return ANSWER_SECONDS + (0.0 if self.at_once else self.spec.grace)
        if self.join_by is not None:
            return max(0.0, self.join_by - time.monotonic())
        if self.end_by is not None and not self.stop_signal:
            return max(0.0, self.end_by - time.monotonic())
        return None

    def _on_timeout(self) -> None:
        if self.stop_signal or self.leave_by is not None:  # the coordinator has not answered
            self._stop_alone()
        elif self.join_by is not None and (until := self.participant.last_call_until) is not None:
            self.join_by = max(until, time.monotonic()) + _AFTER_LAST_CALL  # there are enough
        elif self.join_by is not None:  # other nodes are missing
            why = self._missing_nodes()
            self._send({"do": "give up", "why": why})
            self._fail(why, "nodes missing")
        else:
            self.timed_out = True
            self._ask_to_stop(signal.SIGTERM)

    def _missing_nodes(self) -> str:
        """Which nodes did not join, and what to do."""
        spec = self.spec
        within = spec.join_timeout if self.has_met_all else self.join_within
        needed = f"{spec.nodes}" if spec.least == spec.nodes else f"at least {spec.least}"
        do = (
            ""
            if spec.hosts
            else "; start `paceline run` on each with the same --nnodes, --master-addr and --master-port"
        )
        return f"{self.participant.missing} of {needed} nodes did not come within {within:g} s{do}"

    # -- an attempt ----------------------------------------------------------------------------------------------------

    def _offer(self) -> Offer:
        """Fresh ports of this node for the next attempt; the user's --master-port serves the first one."""
        is_first = self.status.current["start"] is None
        main_port = self.spec.main_port if is_first and self.spec.nodes == 1 else None
        endpoints = self.spec.nproc if "endpoints" in CONTRACTS[self.spec.framework].carries else 0
        before, self.ports = self.ports, Reservation()
        if main_port is not None:
            before.release()
        try:
            return {
                "main_port": self.ports.take(main_port or 0),
                "ports": [self.ports.take() for _ in range(endpoints)],
            }
        finally:
            before.release()  # only now, or the kernel might give the same ports again

    def _start_attempt(self, start: Start) -> None:
        self.reported = self.halted = False
        self.is_newcomer = False
        attempt, world_size = start["attempt"], sum(node["slots"] for node in start["nodes"])
        self.dir.prepare_attempt(attempt)
        ranks = self.ranks.place(start, self.participant.rank_key(start))
        logs: list[LogFiles] = [
            {"rank": r.placement.rank, "local_rank": r.placement.local_rank, "out": str(r.out), "err": str(r.err),
             "error": str(r.error)} for r in ranks
        ]  # fmt: skip
        self.status.record(
            ranks, {"event": "started", "attempt": attempt, "world_size": world_size, "logs": logs},
            attempt=attempt, node_rank=start["node_rank"], world_size=world_size, start=start, waiting=None,
            nodes=len(start["nodes"]), coordinator=self.participant.coordinator_address,
            restarts=start["standing"]["restarts"],
        )  # fmt: skip
        self.times.start(self.dir.times(attempt), {path: key for rank in ranks for path, key in rank.logs().items()})
        self.ranks.launch(ranks, start)
        if self.spec.tensorboard is not None and start["node_rank"] == 0:
            self.tensorboard.start(self.spec.python, self.spec.tensorboard or str(self.dir.path))

    def _check_ranks(self) -> None:
        """After a change of the ranks: record it, and send the coordinator what it waits for."""
        ranks = self.ranks
        self.status.record(ranks.current.values())
        if self.is_newcomer and ranks.is_ready:
            self.is_newcomer = False
            self._send({"do": "prepared"})
        if self.status.current["state"] != "RUNNING" and not self.halted and ranks.have_started and ranks.left:
            started = self.status.current["started"]
            if started is None and self.spec.time_limit is not None:
                self.end_by = time.monotonic() + self.spec.time_limit
            self._write_status(state="RUNNING", started=started or time.time())
        if self.reported or self.halted:
            if ranks.server_failure and (self.is_newcomer or not ranks.current):
                self._fail(ranks.server_failure, ranks.server_cause)
            return
        report = self._report()
        if report is not None:
            self.reported = True
            self._send(report)

    def _report(self) -> ToCoordinator | None:
        """The result of the attempt here; None while it is open."""
        ranks = self.ranks
        if any(failure["signal"] == "SIGTERM" for failure in ranks.failures()):
            # A scheduler may send SIGTERM to all processes of a job at once; then the ranks have not failed.
            self.loop.run_until(self._is_to_halt, ORDER_WAIT)
            if self._is_to_halt():
                return None
        if ranks.resumes and ranks.left and not ranks.failures():  # the other ranks will save their state too
            self.loop.run_until(lambda: not ranks.left or self._is_to_halt(), self.spec.grace)
        if ranks.resumes and not ranks.failures():
            return {"do": "preempted", "final": self.preempted}
        if not ranks.left:
            return {"do": "failed" if ranks.failures() or ranks.server_failure else "done"}
        if ranks.failures() and self.spec.framework != "indexed":
            self.loop.run_until(
                lambda: not ranks.left or not all(f["symptom"] for f in ranks.failures()) or self._is_to_halt(),
                SYMPTOM_WAIT,
            )
            return {"do": "failed"}
        return None

    def _is_to_halt(self) -> bool:
        """Whether the inbox has a message that ends the attempt."""
        return any(message["do"] in ("halt", "search", "alone") for message in self.inbox)

    def _halt(self, order: Halt) -> None:
        """Stop the ranks of this attempt, and report when none is left."""
        if self.start is None and self.halted:
            return
        number = order["signal"]
        if number:
            self.halted_by = number
            self._record_stop(number)
        if not self.halted:
            self.halted = True
            if order["save"]:
                self.ranks.save(self.spec.grace, lambda: self.at_once or self._is_to_halt())
            longest = FAILURE_GRACE if order["grace"] is None else order["grace"]
            grace = self.spec.grace if number else min(longest, self.spec.grace)
            self.ranks.stop(grace, lambda: self.at_once, number)
        self.start = None
        failures = self.ranks.failures()
        if self.ranks.server_failure:
            why = self.ranks.server_failure
            failures = [node_failure(self.status.node_rank, self.host, self.ranks.server_cause, why)]
        self._write_status()
        self._send({"do": "stopped", "failures": failures, **self._offer()})

    # -- other nodes that are missing, or the coordinator --------------------------------------------------------------

    def _wait_for_others(self, why: str) -> None:
        """Do nothing until other nodes join."""
        self.join_by = time.monotonic() + self.spec.join_timeout
        self._write_status({"event": "waiting", "why": why}, state="RESTARTING", waiting={"problem": why})

    def _lose_coordinator(self, message: Search | Alone) -> None:
        """Continue with the nodes that are left, whichever of them coordinates, if they may."""
        if not self.halted:
            self.halted = True
            self.ranks.stop(GONE_GRACE, lambda: self.at_once)
        if self.stop_signal or self.halted_by or self.leave_by is not None:  # the other nodes stop as well
            self._stop_alone()
        elif message["do"] == "alone":
            self._fail(message["why"], "node lost")
        else:
            self._wait_for_others(message["why"])
            self.start, self.is_newcomer = None, False
            self.participant.search(
                message["dead"], message.get("last_seen"), time.monotonic() + self.spec.join_timeout
            )
            self._write_status(coordinator=self.participant.coordinator_address)

    # -- ends that this node decides -----------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if number == LEAVE:
            self._send({"do": "leave"})
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self.preempted = self.preempted or number == signal.SIGUSR2
            self.ranks.signal(number)
        elif number == signal.SIGTERM and self.spec.peers and self.participant.has_met:
            self._leave()
        elif number != signal.SIGHUP or not self.spec.detached:
            self._ask_to_stop(number)

    def _leave(self) -> None:
        """Leave the job, in which another node takes this one's place; all nodes save their state before."""
        if self.leave_by is None:
            self.leave_by = time.monotonic() + self.spec.grace + ANSWER_SECONDS
            self._record_stop(signal.SIGTERM)
            self._send({"do": "leave"})

    def _on_lifeline(self) -> None:
        """The process that waits for the job has ended, or has sent a byte."""
        assert self.lifeline is not None
        word = self.lifeline.recv(1)
        if word == IN_DOUBT:
            self.in_doubt = True
        elif word == ALL_STARTED:
            self.may_join = True
            self._expect_all()
        elif word == TOGETHER:
            self.ends_with_starter = True
        elif not word and self.ends_with_starter:
            os.kill(os.getpid(), signal.SIGKILL)  # the ranks end with it
        else:
            self.loop.forget(self.lifeline)
            if word == KEPT:
                self.may_join = True
                self._expect_all()
            elif word == CLIENT_LOST:
                self._lose_client()
            elif not self.in_doubt or not self.may_join:
                self._ask_to_stop(signal.SIGHUP)
            else:
                self.loop.after(DOUBT_SECONDS, self._end_doubt)

    def _lose_client(self) -> None:
        """Let the job go on without this node, on which its client has no connection any more, or stop it."""
        self.has_no_client = True
        if self.spec.least < self.spec.nodes and self.participant.has_met:
            self._send({"do": "leave or stop", "signal": signal.SIGHUP})
        else:
            self._ask_to_stop(signal.SIGHUP)

    def _end_doubt(self) -> None:
        """End a job whose client was killed before it confirmed the job on all nodes, unless the job has begun."""
        if self.finish is None and self.status.current["start"] is None:
            self._fail(
                "the command that submitted it ended before it had confirmed the job on all hosts, and the job did not"
                f" start within {DOUBT_SECONDS:g} s; submit it again",
                "client gone",
            )

    def _expect_all(self) -> None:
        """All agents of the job run: those of other nodes join soon unless they wait for devices, or are lost."""
        spec = self.spec
        if self.participant.has_met and not self.participant.leads:
            return
        if spec.hosts and spec.nodes > 1 and not spec.joins and spec.request is None and not self.has_met_all:
            self.join_within = min(self.join_within, PATIENCE * spec.silence)
            if self.join_by is not None:
                self.join_by = min(self.join_by, time.monotonic() + self.join_within)

    def _ask_to_stop(self, number: int) -> None:
        # Schedulers and users repeat their signals; only a second Ctrl-C, or SIGQUIT, stops at once. Slurm may signal
        # guard and agent, so that one Ctrl-C arrives twice; a second one ends the Slurm job.
        is_second = number == signal.SIGINT and bool(self.stop_signal) and self.spec.stop_file is None
        self.at_once = self.at_once or number == signal.SIGQUIT or is_second
        if self.stop_signal:
            return
        self.stop_signal = number
        if not self.participant.has_met:  # no other node knows of this one yet
            self._stop_alone()
        else:
            self._send({"do": "stop", "signal": number})
            self.inbox.append({"do": "halt", "signal": number, "save": False, "grace": None})

    def _stop_alone(self) -> None:
        """End the job here without asking the coordinator."""
        number = self.stop_signal or self.halted_by or signal.SIGTERM
        self.finish = {"do": "finish", "state": "STOPPED", "exit_code": 128 + number, "failure": None, "others": []}

    def _fail(self, message: str, cause: Cause, exit_code: int = 1) -> None:
        """End the job here for a reason that is not the failure of a rank; with `LEFT` it goes on elsewhere."""
        failure = node_failure(self.spec.node_rank or 0, self.host, cause, message, exit_code)
        state: Literal["STOPPED", "FAILED"] = "STOPPED" if exit_code == LEFT else "FAILED"
        self.finish = {"do": "finish", "state": state, "exit_code": exit_code, "failure": failure, "others": []}

    # -- what is recorded ----------------------------------------------------------------------------------------------

    def _write_status(self, *happened: Record, **changes: Unpack[Status]) -> None:
        self.status.record(self.ranks.current.values(), *happened, **changes)
        self.status.save()

    def _record_stop(self, number: int) -> None:
        self.status.record((), {"event": "stopping", "signal": int(number), "grace": self.spec.grace})


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def main(run_directory: str, lock_fd: int, lifeline_fd: int, seed: Seed | None = None) -> int:
    """Run the job of a run directory to its end.

    Args:
        run_directory: its path.
        lock_fd: holds its lock, until this process has ended.
        lifeline_fd: closes when the process that waits for the job is gone; -1 if none waits.
        seed: a process that becomes the fork server; None starts one.
    """
    os.set_inheritable(lock_fd, False)
    run = RunDirectory(Path(run_directory))
    lifeline = socket.socket(fileno=lifeline_fd) if lifeline_fd >= 0 else None
    return Agent(run, NodeSpec.load(run.spec), lifeline, seed).run()
