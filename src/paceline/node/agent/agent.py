"""The agent: one process per node, which starts the ranks there, watches them, and reports how they end.

It has a single thread. Whatever happens becomes an event; `decider` decides what follows, and the agent carries it out.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import CONTRACTS, TOKEN
from paceline.node.eventloop.loop import Loop
from paceline.node.lifeline import ALL_STARTED, IN_DOUBT, TOGETHER
from paceline.node.logs.time_index import TimeIndex
from paceline.node.machine import environments, processes
from paceline.node.machine.devices import granted
from paceline.node.machine.ports import Reservation
from paceline.node.ranks import paddle
from paceline.node.ranks.launcher import Ranks
from paceline.node.rendezvous.handshake import Network
from paceline.node.rendezvous.participant import Participant
from paceline.node.rundir.directory import RunDirectory
from paceline.node.signals import HANDLED
from paceline.node.spec import CURRENT_SECONDS, HOLD, SIGNALS, SUSPENDED, NodeSpec
from paceline.node.telemetry.recorder import Recorder
from paceline.node.tensorboard import JobBoard
from paceline.node.watching.slowness import causes, pace_of

from .decider import decide
from .decision import ANSWER_SECONDS, View
from .state import begin
from .status import JobStatus
from .watch import Watch

if TYPE_CHECKING:
    from paceline.contract.records import Cause, LogFiles
    from paceline.node.ranks.seed import Seed
    from paceline.node.rendezvous.messages import Offer, Start, ToNode
    from paceline.node.telemetry.sampler import RankNow

    from .messages import Action, Event, SearchOthers
    from .waiting import DeviceClaim


class Agent:
    """Runs one node's part of a job, from the first process to the last."""

    def __init__(
        self, run: RunDirectory, spec: NodeSpec, lifeline: socket.socket | None, seed: Seed | None = None
    ) -> None:
        self.dir = run
        self.spec = spec
        self.loop = Loop()
        self.ports = Reservation()
        self.ranks = self._ranks(seed)
        self.times = TimeIndex(self.loop)
        self.participant = Participant(
            self.loop, spec, self._network(), offer=self._offer, deliver=self._deliver, fail=self._fail,
            is_over=self._is_over, is_suspended=lambda: self.state.is_suspended,
        )  # fmt: skip
        self.participant.former = run.agreement
        self.lifeline = lifeline
        self.claim: DeviceClaim | None = None
        self.place: int | None = None  # in the queue for devices, once it has had one
        self.tensorboard = JobBoard(self.loop, run)
        self.status = JobStatus(run, spec, socket.gethostname())
        self.state = begin(spec, has_lifeline=lifeline is not None)
        self.telemetry = Recorder(self.loop, run, spec, self._ranks_now)
        self.watch = self._watch()
        self.events: collections.deque[Event] = collections.deque()
        self.urgent: collections.deque[Event] = collections.deque()  # do not wait until the other nodes are found
        signals = self._signals()
        self.signals = None if signals is None else len(signals)  # that were passed on, or came before this agent

    def _ranks(self, seed: Seed | None) -> Ranks:
        """This node's ranks, however they are started."""
        if self.spec.framework == "mpi":
            from paceline.node.ranks.mpi import MpiRanks  # no other job needs it

            return MpiRanks(self.loop, self.spec, self.dir, self._on_ranks, self._start_daemon)
        return Ranks(self.loop, self.spec, self.dir, self._on_ranks, seed)

    def _network(self) -> Network:
        """What reaches the other nodes."""
        return Network(self.loop, (os.environ.get(TOKEN) or self.spec.run_id or "none").encode())

    def _watch(self) -> Watch | None:
        """What looks whether they hang; None if nothing is to look."""
        after = self.spec.hang_after
        if after is None:
            return None
        return Watch(
            self.loop, self.spec.job_id, after, lambda stands: self.events.append({"on": "stalled", "stands": stands}),
            self._record_slow, unjoined=self.ranks.note_unjoined, telemetry=self.telemetry,
            others=self.participant.others,
        )  # fmt: skip

    def _ranks_now(self) -> list[RankNow]:
        """The ranks that run now, with what the watch has seen of them."""
        from paceline.node.telemetry.sampler import RankNow  # jobs that are over at once do not need it

        seen = self.watch.of_ranks() if self.watch is not None else {}
        return [
            RankNow(it.placement.rank, it.pid, it.device, *seen.get(it.placement.rank, ({}, {})))
            for it in self.ranks.current.values() if it.pid and it.status is None
        ]  # fmt: skip

    # -- the life of a job ---------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Take part in the job until it ends; returns its exit code."""
        self.loop.catch(HANDLED, lambda number: self.urgent.append({"on": "signal", "signal": number}))
        if self.lifeline is not None:
            self.loop.watch(self.lifeline, self._on_lifeline)
        try:
            try:
                self._write()
                self._look_at_disk()
                self._decide({"on": "begin"})
                while not self.state.may_close:
                    self._next()
            except Exception as error:  # a full disk, a folder that is gone: the job still gets a last status
                traceback.print_exc()
                why = f"the job's agent has failed: {_describe(error)}; see {self.dir.agent_log}"
                self._decide({"on": "broken", "why": why, "cause": "agent", "exit_code": 1})
            self._decide({"on": "close"})
            while self.state.phase != "closed":
                self._next()
            self.dir.spare.unlink(missing_ok=True)
        finally:
            self.ranks.close()
            self.ports.release()
            self._release_devices()
        assert self.state.finish is not None
        return self.state.finish["exit_code"]

    def _next(self) -> None:
        """Wait for the next event, or the next deadline, and act on it."""
        deadlines = self.state.counting.values()
        timeout = max(0.0, min(deadlines) - self.loop.now()) if deadlines else None
        if self.loop.run_until(lambda: bool(self.urgent or self.events), timeout):
            self._decide((self.urgent or self.events).popleft())
        else:
            self._decide({"on": "time"})

    def _decide(self, event: Event) -> None:
        """Decide what follows from an event, and carry it out."""
        if event["on"] == "ranks changed":
            self.status.record(self.ranks.current.values())
        is_settled = False
        while not is_settled:
            view = View(self.ranks, self.participant, self.status.current)
            self.state, actions = decide(self.state, event, view, self.loop.now())
            for action in actions:
                self._carry_out(action)
            is_settled = not actions and not self.state.may_go_on
            event = {"on": "go on"}

    def _is_over(self) -> bool:
        """Whether the job has ended here, or was suspended before it has found the other nodes.

        What does not wait until they are found is acted on before.
        """
        while self.urgent:
            self._decide(self.urgent.popleft())
        return bool(self.state.finish) or (self.state.phase in ("open", "claiming") and not self.participant.has_met)

    # -- events --------------------------------------------------------------------------------------------------------

    def _on_ranks(self) -> None:
        self.events.append({"on": "ranks changed"})

    def _deliver(self, message: ToNode) -> None:
        self.events.append({"on": "message", "message": message})

    def _fail(self, why: str, cause: Cause, exit_code: int) -> None:
        self.urgent.append({"on": "failed", "why": why, "cause": cause, "exit_code": exit_code})

    def _on_lifeline(self) -> None:
        """The process that waits for the job has ended, or has sent a byte."""
        assert self.lifeline is not None
        word = self.lifeline.recv(1)
        if word not in (IN_DOUBT, ALL_STARTED, TOGETHER):  # its last
            self.loop.forget(self.lifeline)
        self.urgent.append({"on": "word", "word": word})

    def _look_at_disk(self) -> None:
        """Read what other machines have written for this node, and look again some seconds later."""
        if self.state.finish is not None or (self.spec.current is None and self.spec.stop_file is None):
            return
        with contextlib.suppress(OSError):  # of a disk that does not answer now
            if self.spec.current is not None and Path(self.spec.current[0]).read_text() != self.spec.current[1]:
                self.urgent.append({"on": "elsewhere"})
        with contextlib.suppress(OSError, ValueError):  # nobody has asked, or it is not written yet
            if self.spec.stop_file is not None:
                self.urgent.append({"on": "asked to stop", "signal": int(Path(self.spec.stop_file).read_text())})
        with contextlib.suppress(OSError):
            if self.spec.stop_file and Path(self.spec.stop_file).with_name(SUSPENDED).read_text() == HOLD:
                self.urgent.append({"on": "asked to stop", "signal": signal.SIGTERM})
        signals = self._signals()
        if signals is not None:  # a disk that does not answer is asked again
            since = len(signals) if self.signals is None else self.signals
            self.urgent.extend({"on": "signal", "signal": number} for number in signals[since:])
            self.signals = len(signals)
        self.loop.after(CURRENT_SECONDS, self._look_at_disk)

    def _signals(self) -> list[int] | None:
        """The signals for the ranks that a file has; None if it cannot be read now."""
        if self.spec.stop_file is None:
            return []
        try:
            return [int(line) for line in Path(self.spec.stop_file).with_name(SIGNALS).read_text().split()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError):
            return None

    # -- actions -------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:  # noqa: PLR0912 - one branch an action
        ranks = self.ranks
        if action["do"] == "write":
            self.status.record(ranks.current.values(), *action["records"], **action["changes"])
            if action["save"]:
                self.status.save()
        elif action["do"] == "send":
            if action["message"]["do"] == "ready":
                self._note_agreement()
            self.participant.send(action["message"])
        elif action["do"] == "send stopped":
            self.participant.send({"do": "stopped", "failures": action["failures"], **self._offer()})
        elif action["do"] == "launch":
            self._launch(action["start"])
        elif action["do"] == "daemon":
            ranks.start_daemon(action["order"]["attempt"], action["order"]["command"], action["order"]["folders"])
        elif action["do"] == "signal":
            ranks.pass_on(action["signal"])
        elif action["do"] == "terminate":
            self._record_places()
            ranks.terminate(action["signal"])
        elif action["do"] == "sweep":
            ranks.sweep(action["grace"])
        elif action["do"] == "search":
            self._search(action)
        elif action["do"] == "meet":
            self._meet()
        elif action["do"] == "claim":
            self._claim_devices()
        elif action["do"] == "release":
            self._release_devices()
        elif action["do"] == "close":
            self._record_spent()
            self.dir.forget_agreement()
            self.participant.close(ANSWER_SECONDS)
            ranks.close()
            self.times.end()
        elif action["do"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)  # the ranks end with it
        else:
            {"warm up": ranks.warm_up, "save": ranks.save, "kill": ranks.kill, "end server": ranks.end_server,
             "stopped": ranks.clean_up}[action["do"]]()  # fmt: skip

    def _write(self) -> None:
        self.status.record(self.ranks.current.values())
        self.status.save()

    def _note_agreement(self) -> None:
        """Note the attempt that this node is about to agree to, if the others could go on without it."""
        standing = self.participant.standing
        if standing is not None and self.spec.least < self.spec.nodes and not self.spec.peers:
            self.dir.note_agreement(self.participant.id, standing.attempt)

    def _record_places(self) -> None:
        """Record where the ranks are that are about to be stopped."""
        if self.watch is not None and (places := self.watch.places()):
            self.status.record((), {"event": "stacks", "places": places})

    def _record_spent(self) -> None:
        """Record what the ranks spent their time on, if that is known."""
        if self.watch is not None and (spent := self.watch.spent()) is not None:
            slow = causes(spent)
            self.status.record((), {"event": "spent", "spent": spent, "causes": slow}, slow=slow, pace=pace_of(spent))

    def _record_slow(self) -> None:
        """Record what makes the job slow, as far as that is known now."""
        if self.watch is not None and (spent := self.watch.spent()) is not None:
            self.status.record((), slow=causes(spent), pace=pace_of(spent))
            self.status.save()

    def _claim_devices(self) -> None:
        """Queue for the devices that the job asks for."""
        from .waiting import DeviceClaim  # no other job needs it

        assert self.spec.request is not None
        self.claim = DeviceClaim(
            self.loop, self.spec.request, self.spec.job, self.place, granted=self._take_devices,
            waits=lambda waiting: self.events.append({"on": "queued", "waiting": waiting}),
            refused=lambda why: self._fail(why, "refused", 2),
        )  # fmt: skip
        self.claim.begin()

    def _release_devices(self) -> None:
        """Give the devices back, or leave the queue; the job's place there is kept."""
        if self.claim is not None:
            self.place = self.claim.place
            self.claim.release()
            self.claim = None
            self.events = collections.deque(event for event in self.events if event["on"] != "granted")

    def _take_devices(self, devices: tuple[str, ...]) -> None:
        assert self.claim is not None
        self.spec = granted(self.spec, devices)
        self.ranks.use(self.spec, (self.claim.fd,))
        self.events.append({"on": "granted", "devices": list(devices)})

    def _meet(self) -> None:
        """Find the coordinator, or be it."""
        self.participant.meet(lambda: self.state.deadlines.get("join", 0.0), lambda: self.state.join_within)
        self._decide_met()
        self.status.record((), coordinator=self.participant.coordinator_address, address=self.participant.address)
        self.status.save()

    def _search(self, order: SearchOthers) -> None:
        """Find the agent that coordinates the job now, or be it."""
        self.participant.search(order["dead"], order["until"])
        self._decide_met()
        self.status.record((), coordinator=self.participant.coordinator_address)
        self.status.save()

    def _decide_met(self) -> None:
        self._is_over()  # what has come meanwhile
        self.urgent.append({"on": "met"})

    def _launch(self, start: Start) -> None:
        """Start the ranks of an attempt."""
        attempt, world_size = start["attempt"], sum(node["slots"] for node in start["nodes"])
        standing = start["standing"]
        began = self.spec.began or (standing["began"] if attempt > self.spec.first_attempt else None)
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
            restarts=standing["restarts"],
            started=self.status.current["started"] or began,
        )  # fmt: skip
        if self.spec.framework == "paddle":
            paddle.link_logs({**os.environ, **self.spec.env}, self.spec.working_dir, [rank.out for rank in ranks])
        self.times.start(self.dir.times(attempt), {path: key for rank in ranks for path, key in rank.logs().items()})
        self.ranks.launch(ranks, start)
        if self.watch is not None:
            self.watch.start(self.ranks.current)
        self.telemetry.start(is_first=start["node_rank"] == 0)
        if self.spec.tensorboard is not None and start["node_rank"] == 0:
            self.tensorboard.start(self.spec.python, self.spec.tensorboard or str(self.dir.path))

    def _start_daemon(self, node_rank: int, attempt: int, command: list[str], folders: dict[str, str]) -> None:
        """Start mpirun's daemon on another node, through the coordinator."""
        self.participant.send(
            {"do": "daemon", "node_rank": node_rank, "attempt": attempt, "command": command, "folders": folders}
        )

    def _offer(self) -> Offer:
        """Fresh ports of this node for the next attempt; those that the user named serve the first one."""
        is_first = self.status.current["start"] is None
        main_port = self.spec.main_port if is_first and self.spec.nodes == 1 else None
        endpoints = self.spec.nproc if "endpoints" in CONTRACTS[self.spec.framework].carries else 0
        first = paddle.first_port({**os.environ, **self.spec.env}) if is_first and endpoints else None
        before, self.ports = self.ports, Reservation()
        if main_port is not None:
            before.release()
        try:
            return {
                "main_port": self.ports.take(main_port or 0),
                "ports": [self.ports.take(first + number if first else 0) for number in range(endpoints)],
            }
        finally:
            before.release()  # only now, or the kernel might give the same ports again


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def main(run_directory: str, lock_fd: int, lifeline_fd: int, seed: Seed | None = None) -> int:
    """Run the job of a run directory to its end."""
    os.set_inheritable(lock_fd, False)
    processes.adopt_orphans()
    run = RunDirectory(Path(run_directory))
    lifeline = socket.socket(fileno=lifeline_fd) if lifeline_fd >= 0 else None
    spec = NodeSpec.load(run.spec)
    environments.hold(spec.python[0])
    return Agent(run, spec, lifeline, seed).run()
