"""A job in a simulated cluster: the real agents, and simulated ranks that train together."""

from __future__ import annotations

import json
import signal
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paceline.contract import RESUME_CODE
from paceline.node.agent.agent import Agent
from paceline.node.agent.state import begin
from paceline.node.agent.status import JobStatus
from paceline.node.eventloop.channel import ChannelClosed
from paceline.node.failure import node_failure
from paceline.node.journal.fold import fold, part_of
from paceline.node.journal.records import stamped
from paceline.node.ranks.launcher import Rank, Ranks
from paceline.node.ranks.placement import place
from paceline.node.rendezvous.links import STOP_SECONDS
from paceline.node.rendezvous.participant import Participant
from paceline.node.spec import CURRENT_SECONDS

from .cluster import Killed, Network, Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.contract.records import JobRecord, Part
    from paceline.node.rendezvous.messages import Offer
    from paceline.node.spec import NodeSpec

    from .cluster import Cluster, Machine, SimulatedLoop
    from .requeue import Requeuer
    from .resubmit import Folders

_NOWHERE = Path("/nonexistent/rank.json")
_STEPS = 4  # between two checkpoints
_IMPORT, _FORK, _SYMPTOM, _LAST_WORDS = 2.0, 0.1, 2.0, 4.0  # seconds at most
CLEANUP = 5.5  # seconds at most, from the exit of a rank to its end


class Violation(AssertionError):
    """Something happened that must never happen."""


class Job:
    """What is true of a job, whatever its agents believe.

    Attributes:
        samples: how many an epoch has.
        obeys: whether ranks save their state and end at SIGTERM; else it just kills them.
        stubborn: whether SIGTERM does nothing.
        lingers: a rank that does not end before it is killed, once it was asked to; None if there is none.
        only_stopped_at: when the job was stopped, if nothing else happened; infinity if not.
        steps: whether ranks train; else they wait.
        trained: how often each sample was trained on, in what checkpoints have.
        folders: where its checkpoints are; None if all its machines always have the newest one.
        answered: the agents on machines that answered when it was resubmitted.
        failed: the failures of ranks that were no consequence of another, in the order in which they happened.
    """

    def __init__(
        self, cluster: Cluster, samples: int, *, obeys: bool = True, stubborn: bool = False, steps: bool = True,
        number: int = 0, lingers: int | None = None,
    ) -> None:  # fmt: skip
        self.cluster, self.samples, self.obeys, self.stubborn, self.steps = cluster, samples, obeys, stubborn, steps
        self.lingers, self.only_stopped_at = lingers, float("inf")
        self.agents: list[SimulatedAgent] = []
        self.trainings: dict[tuple[int, tuple[str, ...]], Training] = {}
        self.steps_last: Training | None = None
        self.stepped_at = 0.0
        self.position = 0
        self.trained = [0] * samples
        self.workers: list[Worker] = []
        self.running = 0  # agents
        self.requeuer: Requeuer | None = None
        self.number, self.name = number, "again" if number else "it"
        self.folders: Folders | None = None
        self.answered: set[SimulatedAgent] = set()
        self.began = 0  # where its first attempt did

    def add(self, machine: Machine, spec: NodeSpec, lifeline: Lifeline | None = None) -> SimulatedAgent:
        """Start an agent."""
        agent = SimulatedAgent(self, Process(machine), spec, lifeline)
        self.agents.append(agent)
        agent.process.port += self.number
        self.running += 1
        agent.process.at_end.append(self._forget)
        agent.process.start(agent.run)
        return agent

    def _forget(self) -> None:
        self.running -= 1

    @property
    def living(self) -> list[SimulatedAgent]:
        return [agent for agent in self.agents if agent.process.exit_code is None]

    @property
    def listed(self) -> JobRecord:
        """What `paceline list` says of it when all its machines answer, in the order of their names."""
        agents = self.agents if self.requeuer is None else self.requeuer.agents
        latest = {agent.process.machine.name: agent for agent in agents}
        facts: Any = {"nodes": 0, "ranks": 0}  # of the rest nothing follows
        return fold(facts, [agent.part for _, agent in sorted(latest.items())])

    def training(self, attempt: int, ids: tuple[str, ...], world_size: int) -> Training:
        if (attempt, ids) not in self.trainings:
            self.trainings[attempt, ids] = Training(self, attempt, ids, world_size)
        return self.trainings[attempt, ids]


class Training:
    """The ranks of one attempt, which step together."""

    def __init__(self, job: Job, attempt: int, ids: tuple[str, ...], world_size: int) -> None:
        self.job, self.attempt, self.ids, self.world_size = job, attempt, ids, world_size
        self.workers: dict[int, Worker] = {}
        self.position = self.saved = -1
        self.began_at = float("inf")
        self.is_over = self.is_to_save = False
        self.waited = 0
        if job.steps:
            job.cluster.after(1.0, self.step)

    def join(self, worker: Worker) -> None:
        if self.workers.get(worker.rank.placement.rank) is not None:
            raise Violation(f"two ranks {worker.rank.placement.rank} in attempt {self.attempt}")
        self.workers[worker.rank.placement.rank] = worker

    @property
    def can_step(self) -> bool:
        passes = self.job.cluster.passes
        machines = {worker.machine for worker in self.workers.values()}
        requeuer = self.job.requeuer
        return (
            len(self.workers) == self.world_size
            and all(
                worker.is_alive and not worker.is_failing and not worker.is_suspended
                for worker in self.workers.values()
            )
            and all(passes(one, other) for one in machines for other in machines)
            and (requeuer is None or all(map(requeuer.reaches, machines)))  # for data and checkpoints
        )

    def begins_anew(self, before: Training) -> bool:
        """Whether agents that know of no attempt before replace agents that were all killed."""
        killed = {it.participant.id for it in self.job.agents if it.process.exit_code == -signal.SIGKILL}
        return killed.issuperset(before.ids) and killed.isdisjoint(self.ids) and self.attempt == 0

    def step(self) -> None:
        if self.is_over:
            return
        self.job.cluster.after(1.0, self.step)
        workers = self.workers.values()
        if not self.can_step:
            if len(workers) == self.world_size:
                self._notice_loss()
            return
        before = self.job.steps_last
        if (
            before is not None
            and before is not self
            and before.attempt >= self.attempt
            and not self.begins_anew(before)
            and not any(worker.knows_nothing for worker in workers)
        ):
            raise Violation(f"attempt {self.attempt} of {self.ids} steps after {before.attempt} of {before.ids}")
        if self.job.answered and any(worker.server.agent in self.job.answered for worker in workers):
            raise Violation(f"attempt {self.attempt} of {self.ids} steps although the job was resubmitted")
        if self.position < 0 and self.job.folders is not None and not self.job.folders.load(self):
            return
        if not any(worker.knows_nothing for worker in workers):
            self.job.steps_last, self.job.stepped_at = self, self.job.cluster.now
        if self.position < 0:
            self.position = self.saved = self.job.position
            self.began_at = self.job.cluster.now
        self.position = min(self.position + self.world_size, self.job.samples)
        is_complete = self.position == self.job.samples
        if is_complete or self.is_to_save or self.position // self.world_size % _STEPS == 0:
            self._save()
        if self.is_over:
            return
        if is_complete or self.is_to_save:
            self.is_over = True
            for worker in list(workers):
                worker.end_soon(0 if is_complete else RESUME_CODE << 8, 0.5)

    def _save(self) -> None:
        first = self.workers[0]
        if first.machine.is_full:
            first.fail("no space left on device")
            return
        if self.job.folders is not None and not self.job.folders.is_held_by(first):
            first.fail("held by a later attempt now")
            return
        if self.job.position != self.saved:
            raise Violation("a checkpoint was saved by another attempt meanwhile")
        for sample in range(self.saved, self.position):
            self.job.trained[sample] += 1
        self.job.position = self.saved = self.position
        if self.job.folders is not None:
            self.job.folders.save(self, self.is_to_save or self.position == self.job.samples)

    def _notice_loss(self) -> None:
        """The collective of ranks fails if another one has ended."""
        gone = [it for it in self.workers.values() if it.is_failing or not it.is_alive]
        for worker in self.workers.values():
            if any(self.job.cluster.passes(other.machine, worker.machine) for other in gone):
                self.job.cluster.after(self.job.cluster.jitter(_SYMPTOM), worker.lose_peer)


class Worker:
    """The process of a rank."""

    def __init__(self, server: ForkServer, rank: Rank) -> None:
        self.server, self.rank, self.machine = server, rank, server.process.machine
        self.job = server.job
        self.is_alive, self.is_ending = True, False
        self.is_cleaning_up = False  # it has left its peers, and will end with an error that is not recorded yet
        self.failure: dict[str, Any] | None = None
        self.terminated_at: float | None = None
        self.had_grace = False  # to save, because others join
        agent = server.agent
        start = agent.status.current["start"]
        assert start is not None
        ids = tuple(node["id"] for node in start["nodes"])
        self.training = self.job.training(rank.placement.attempt, ids, rank.placement.world_size)
        for other in self.job.workers:
            if other.is_alive and other.training is not self.training:
                (self.must_end if self._is_late(other) else other.must_have_ended)()
        self.job.workers = [*(it for it in self.job.workers if it.is_alive), self]
        self.training.join(self)

    def _is_late(self, other: Worker) -> bool:
        """Whether a rank that runs already belongs to a later start of the job, or a later attempt."""
        start, its = self.server.agent.spec.current, other.server.agent.spec.current
        if start is not None and its is not None and start != its:
            return int(start[1]) < int(its[1])
        return other.training.attempt > self.training.attempt and not self.training.begins_anew(other.training)

    @property
    def is_suspended(self) -> bool:
        return self.machine.is_off

    def must_end(self) -> None:
        """A later attempt has begun before."""
        self.job.cluster.after(STOP_SECONDS, self.must_have_ended)

    def must_have_ended(self) -> None:
        """A later attempt has begun.

        A machine that is off stops nothing before it is on again, nor an agent that is suspended before it has run for
        as long as others may be silent.
        """
        process, agent, requeuer = self.server.process, self.server.agent, self.job.requeuer
        runs_since = max(self.machine.on_since, process.suspended_until + agent.spec.silence)
        if requeuer is not None:
            runs_since = max(runs_since, agent.looked_at)
        is_to_come = self.is_suspended or self.knows_nothing or self.job.cluster.now < runs_since + STOP_SECONDS
        if self.is_alive and is_to_come:
            self.job.cluster.after(STOP_SECONDS, self.must_have_ended)
        elif self.is_alive and not self.is_slow:
            raise Violation(f"a rank of attempt {self.training.attempt} still runs on {self.machine.name}")

    @property
    def knows_nothing(self) -> bool:
        """Whether its agent was cut off from the disk on which it sees that the job was started again."""
        requeuer = self.job.requeuer
        return requeuer is not None and self.server.agent.looked_at < requeuer.started_at

    @property
    def is_slow(self) -> bool:
        """Whether nothing can be expected of its agent now."""
        machine = self.machine
        return machine.is_off or bool(machine.slowness) or self.server.process.is_suspended

    def end_soon(self, status: int, seconds: float) -> None:
        if not self.is_ending and not self.lingers:
            self.is_ending = True
            self.job.cluster.after(self.job.cluster.jitter(seconds), lambda: self.end(status))

    def end(self, status: int) -> None:
        if self.is_alive:
            self.is_alive = False
            self.server.ended(self.rank.placement.local_rank, status)

    @property
    def is_failing(self) -> bool:
        return self.failure is not None or self.is_cleaning_up

    def exit(self) -> None:
        """It leaves its peers, cleans up, and ends with an error; only then it is known that it failed first."""
        if self.is_alive and not self.is_ending:
            self.is_cleaning_up = True
            self.job.cluster.after(self.job.cluster.jitter(CLEANUP), lambda: self.fail("it has exited"))

    def fail(self, message: str, symptom: bool = False) -> None:
        """An exception ends it; its peers notice that before its process has ended."""
        if self.is_alive and not self.is_ending:
            self.failure = {"message": message, "symptom": symptom, "cause": "exception"}
            self.failed_at = self.server.process.loop.now()
            self.end_soon(1 << 8, _LAST_WORDS)

    def lose_peer(self) -> None:
        if self.is_suspended:
            self.job.cluster.after(1.0, self.lose_peer)
        elif not self.is_cleaning_up and not self.lingers:
            self.fail("Connection closed by peer", symptom=True)

    @property
    def lingers(self) -> bool:
        """Whether it was asked to end, and takes its time."""
        return self.terminated_at is not None and self.rank.placement.rank == self.job.lingers

    def signal(self, number: int) -> None:
        now = self.job.cluster.now
        if number == signal.SIGTERM and self.terminated_at is None:
            self.terminated_at = now
        if number == signal.SIGUSR2:
            self.had_grace = True
        if number == signal.SIGKILL:
            asked_at = self.terminated_at or 0.0
            since = now - asked_at
            is_stop = asked_at >= self.job.only_stopped_at and not self.had_grace
            if self.is_alive and is_stop and since < self.server.agent.spec.grace - 3 * _FORK:
                raise Violation(f"a rank on {self.machine.name} was killed {since:.1f} s after it was asked to end")
            self.end(number)
        elif self.lingers:
            pass
        elif number == signal.SIGUSR2 or (number == signal.SIGTERM and self.job.obeys and not self.job.stubborn):
            self.training.is_to_save = True
        elif number in (signal.SIGTERM, signal.SIGINT) and not self.job.stubborn:
            self.end(number)


class ForkServer:
    """Starts and ends ranks, as far as the agent sees; it is the channel to it as well."""

    def __init__(self, job: Job, agent: SimulatedAgent) -> None:
        self.job, self.agent, self.process = job, agent, agent.process
        self.loop: SimulatedLoop | None = None
        self.workers: dict[int, Worker] = {}
        self._starting: set[int] = set()
        self._messages: list[Any] = []
        self.is_closed = False
        self._is_ended = self._is_ready = False
        self._waiting: list[Callable[[], None]] = []  # until the framework is imported
        self._soon(self._imported, _IMPORT)

    def _imported(self) -> None:
        self._is_ready = True
        self._emit({"event": "ready", "why": ""})
        for call in self._waiting:
            call()

    def _soon(self, call: Callable[[], None], seconds: float) -> None:
        cluster = self.job.cluster
        cluster.after(cluster.jitter(seconds), lambda: None if self.is_closed else call())

    @property
    def is_readable(self) -> bool:
        return bool(self._messages) or self._is_ended

    def receive(self) -> list[Any]:
        if self._is_ended:
            raise ChannelClosed("it has ended")
        messages, self._messages = self._messages, []
        return messages

    def _emit(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        if self.loop is not None:
            self.loop.is_readable(self)

    def end_unexpectedly(self) -> None:
        """It crashes, and its ranks with it."""
        self.close()
        self._is_ended = True
        if self.loop is not None:
            self.loop.is_readable(self)

    def send(self, message: Any) -> None:
        if not self._is_ready:
            self._waiting.append(lambda: self.send(message))
        elif message["do"] == "start":
            for order in message["ranks"]:
                local = order["local_rank"]
                self._starting.add(local)
                self._soon(lambda local=local: self._start(local), _FORK)
        elif message["do"] == "sweep":
            self._soon(lambda: self._emit({"event": "swept"}), _FORK)
        else:  # all ranks handle what is passed on
            for local in message.get("ranks", self.workers):
                self._soon(lambda local=local: self._signal(local, message["signal"]), 0.01)

    def _start(self, local: int) -> None:
        self._starting.discard(local)
        rank = self.agent.ranks.current[local]
        if rank.status is None:
            self.workers[local] = Worker(self, rank)
            self._emit({"event": "started", "local_rank": local, "pid": 100 + local})

    def _signal(self, local: int, number: int) -> None:
        if local in self._starting:  # it does one after the other
            self._soon(lambda: self._signal(local, number), _FORK)
        elif local in self.workers:
            self.workers[local].signal(number)

    def ended(self, local: int, status: int) -> None:
        if not self.is_closed:
            now = self.process.loop.now()
            self._emit({"event": "exited", "local_rank": local, "status": status, "time": now})

    def close(self) -> None:
        self.is_closed = True
        for worker in self.workers.values():
            worker.is_alive = False


class SimulatedRanks(Ranks):
    """The agent's side of them, which is real but for what reads files."""

    def __init__(self, job: Job, agent: SimulatedAgent) -> None:
        super().__init__(agent.loop, agent.spec, agent.dir, agent._on_ranks)
        self._job, self._agent = job, agent

    def _place(self, start: Any, local_rank: int, key: str | None) -> Rank:
        return Rank(place(self._spec, start, local_rank), {}, _NOWHERE, _NOWHERE, _NOWHERE)

    def _start_server(self) -> None:
        self._channel = ForkServer(self._job, self._agent)
        self._loop.watch(self._channel, self._receive)

    def _wake_server(self) -> None:
        """It is never suspended alone."""

    def _end_server(self, at_once: bool = False) -> None:
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()
            self._channel = None
        self._is_ready = False
        for rank in self.current.values():
            if rank.status is None:
                rank.status = int(signal.SIGKILL)

    def _server_lost(self) -> None:
        self._end_server()
        self.server_failure = "the process that the ranks are forked from ended"
        self._changed()

    def _rank_ended(self, rank: Rank, status: int, ended: float) -> None:
        rank.status = status
        worker = self._channel.workers[rank.placement.local_rank]
        found = worker.failure
        if status == RESUME_CODE << 8:
            rank.resumes = True
        elif found is not None or (status != 0 and not self._stopping):
            place = rank.placement
            ended = ended if found is None else worker.failed_at
            code = 1 if found is not None else 128 + status
            message = "killed" if found is None else found["message"]
            name = "" if found is not None else signal.Signals(status).name
            rank.failure = {
                **node_failure(place.node_rank, self._agent.process.machine.name, "signal", message, code),
                "rank": place.rank, "symptom": False, "ended": ended, "signal": name, **(found or {}),
            }  # fmt: skip


class Lifeline:
    """What the client that starts an agent says to it."""

    def __init__(self) -> None:
        self.loop: SimulatedLoop | None = None
        self._words: list[bytes] = []

    @property
    def is_readable(self) -> bool:
        return bool(self._words)

    def say(self, word: bytes) -> None:
        """A byte; b"" if the client ends."""
        self._words.append(word)
        if self.loop is not None:
            self.loop.is_readable(self)

    def recv(self, _: int) -> bytes:
        return self._words.pop(0)


class Directory:
    """The run directory of an agent."""

    agent_log = "agent.log"
    telemetry = spare = SimpleNamespace(unlink=lambda **_: None)

    def __init__(self, machine: Machine) -> None:
        self.records: list[tuple[float, Any]] = []  # with the time of each
        self._machine = machine

    def append(self, *records: Any) -> tuple[list[Any], int]:
        written = [{**record, "time": self._machine.wall} for record in stamped(records)]
        for record in records:
            self._machine.cluster.moment(record["event"])
            if self._machine.cluster.has_log and (record["event"] != "state" or "state" in record["status"]):
                text = json.dumps({key: value for key, value in record.items() if key not in ("logs", "others")})
                self._machine.cluster.write(f"{self._machine.name}  {text[:100]}")
        self.records += [(self._machine.cluster.now, record) for record in written]
        return written, len(self.records)

    def write_status(self, status: Any, offset: int) -> None:
        """It is a cache."""

    def note_agreement(self, agent: str, attempt: int) -> None:
        self._machine.agreement = {"id": agent, "attempt": attempt}

    def forget_agreement(self) -> None:
        self._machine.agreement = None

    def prepare_attempt(self, attempt: int) -> None:
        """Folders."""

    def times(self, attempt: int) -> str:
        return ""


class _Nothing:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class SimulatedAgent(Agent):
    """The agent; what it does beside deciding is left out."""

    def __init__(self, job: Job, process: Process, spec: NodeSpec, lifeline: Lifeline | None) -> None:
        machine = process.machine
        self.job, self.process, self.spec, self.loop = job, process, spec, process.loop
        self.dir = Directory(machine)
        self.ranks = SimulatedRanks(job, self)
        self.times = self.telemetry = self.tensorboard = _Nothing()
        self.participant = Participant(
            self.loop, spec, Network(process),
            offer=self._offer, deliver=self._deliver, fail=self._fail, is_over=self._is_over,
            is_suspended=lambda: self.state.is_suspended,
        )  # fmt: skip
        self.looked_at = job.cluster.now  # at the disk that all nodes share
        name = f"{machine.name}.{len(job.agents)}"
        self.participant.former = machine.agreement
        self.participant.id = f"{name}-{spec.node_rank}" if spec.peers else name
        self.lifeline = lifeline
        self.claim = self.watch = self.place = None
        self.ports = _Nothing()
        self.status = JobStatus(self.dir, spec, machine.name)
        self.state = begin(spec, has_lifeline=lifeline is not None)
        self.events, self.urgent = deque(), deque()
        process.at_end.append(self._kill_ranks)

    def _kill_ranks(self) -> None:
        """The kernel does, when the agent has ended."""
        if self.ranks._channel is not None:
            self.ranks._channel.close()

    def _offer(self) -> Offer:
        return {"main_port": 1, "ports": []}

    def _carry_out(self, action: Any) -> None:
        if action["do"] == "die":
            self.process.end(-9)
            raise Killed
        self.process.cluster.moment(action["do"])
        super()._carry_out(action)

    def _decide(self, event: Any) -> None:
        if event["on"] == "broken":
            raise Violation(event["why"])
        super()._decide(event)
        failure = (self.state.finish or {}).get("failure")
        if event["on"] == "time" and failure and failure["cause"] == "nodes missing" and self.participant.leads:
            missing = self.participant._link.coordinator.missing
            if 0 < missing <= self.process.unread.count("join"):
                raise Violation(f"{self.participant.id} gave up although enough nodes have come")

    def _deliver(self, message: Any) -> None:
        if message["do"] == "start":
            ids = [node["id"] for node in message["nodes"]]
            if len(ids) != len(set(ids)):
                raise Violation(f"an attempt has a node twice: {ids}")
        super()._deliver(message)

    def _look_at_disk(self) -> None:
        requeuer = self.job.requeuer
        if requeuer is None or self.state.finish is not None:
            return
        if requeuer.reaches(self.process.machine):
            self.looked_at = self.job.cluster.now
            if self.spec.current != ("start", str(requeuer.disk.start)):
                self.urgent.append({"on": "elsewhere"})
            if requeuer.disk.stop:
                self.urgent.append({"on": "asked to stop", "signal": requeuer.disk.stop})
        self.loop.after(CURRENT_SECONDS, self._look_at_disk)

    def signal(self, number: int) -> None:
        if self.process.exit_code is None:
            self.loop.signal(number)

    @property
    def part(self) -> Part:
        """What its machine tells a client that lists jobs."""
        spec, alive = self.spec, self.process.exit_code is None
        return part_of(
            self.status.current, alive=alive, why="" if alive else "its agent was killed",
            host=self.process.machine.name, written=self.process.machine.wall, job_id=spec.job_id, hosts=spec.hosts,
            is_elastic=spec.least != spec.nodes,
        )  # fmt: skip

    @property
    def end(self) -> tuple[str, int] | None:
        """How the job ended here, as it recorded; None if it recorded nothing."""
        status = self.status.current
        return None if status["finished"] is None else (status["state"], status["exit_code"] or 0)
