"""What happens to a job, by a seed; and what must be true of it whatever happens."""

from __future__ import annotations

import functools
import random
import re
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.node.journal.state import FINAL
from paceline.node.lifeline import IN_DOUBT, KEPT
from paceline.node.rendezvous.silence import PATIENCE
from paceline.node.signals import EXIT_REPLACED, LEAVE, RESUME, SUSPEND
from paceline.node.spec import NodeSpec, Program

from .cluster import PORT, Cluster, Machine
from .job import CLEANUP, Job, Lifeline, Violation
from .requeue import DOWN, Disk, Requeuer
from .resubmit import Folders, Resubmission

if TYPE_CHECKING:
    from collections.abc import Callable

    from .job import SimulatedAgent, Worker

SILENCE = 10.0  # seconds
SAMPLES = 60
_REPLACED_WITHIN = 8.0  # seconds in which the scheduler starts another node for one that is lost
_RECRUITED_WITHIN = 15.0  # seconds in which the client starts an agent on a machine where one is missing
_KNOWN = 2.0  # seconds after which the end of an agent is known everywhere
_STOPS_WITHIN = 5.0  # seconds, and the grace
_BEGUN = 9.0  # seconds after which the first agents of a job have started, unless something has happened
_SLACK = 7.0  # seconds that a fault lasts longer than its cause: beats, the network's and the process's own delays
_LOOK, _TRUE_WITHIN = 3.0, 5.0  # seconds between two looks; after which list says what is true
_ASKED_AGAIN = 30.0  # seconds after which a user resumes a job again that is still suspended
_NAME = re.compile(r"\((h\d+)\)")  # of a machine, in a message
_MOMENT_WITHIN = 200.0  # seconds
_END = 900.0  # seconds after the last fault, in which every job ends


class Fault(NamedTuple):
    """Something that happens."""

    at: float  # seconds after the job was submitted, or after a moment
    do: str
    node: int = 0  # to which node, counted among those that live, or how many
    seconds: float = 0.0  # how long it lasts
    after: str = ""  # the message, record or action that it follows; "" if none
    nth: int = 1  # which one of these


class Schedule(NamedTuple):
    """A job, and all that happens to it. The seed decides everything that is not named here, such as delays."""

    seed: int
    # Or "elastic", or "replaced": the scheduler starts another node for one that is lost; or "requeued": it starts the
    # whole job again.
    kind: str = "fixed"
    nodes: int = 2
    restarts: int = 0
    least: int = 1  # nodes, of an elastic job
    join: float = 40.0  # seconds for other nodes to come
    grace: float = 8.0
    latency: float = 0.002  # seconds, the longest
    spread: float = 2.0  # seconds in which all nodes start, the first one before the others
    obeys: bool = True
    stubborn: bool = False
    lingers: int | None = None  # a rank that ends only when it is killed, once it was asked to
    nproc: int = 1  # ranks per node
    faults: tuple[Fault, ...] = ()
    resubmitted: float = 0.0  # seconds after which a client tries that first; 0 if never
    shared: bool = False  # whether the two jobs keep their checkpoints in one folder
    recruits: bool = False  # whether the client starts an agent again where one was killed


_ENDS = ("kill", "reboot", "fork server ends", "rank fails", "rank exits", "disk full")
_WAITS = ("off", "split", "one way", "suspend", "suspend all", "slow")
_CLIENTS = ("stop", "terminate", "preempt", "interrupt")
_HARMLESS = ("clock jumps", "suspend job")
_SCALES = ("scale out", "scale out in vain", "scale in")
_MOMENTS = (
    "join", "prepare", "prepared", "start", "ready", "go", "halt", "stopped", "restart", "search", "finish", "part",
    "leave", "done", "failed", "symptom", "preempted", "launch", "terminate", "save", "sweep", "waiting", "restarting",
    "started", "stopping", "finished", "meet",
)  # fmt: skip


def schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    it = resubmitted(seed) if seed % 50 == 49 else suspended(seed) if seed % 5 == 2 else _schedule(seed)
    return it._replace(recruits=it.kind == "elastic" and not it.resubmitted and seed % 3 == 0)


def resubmitted(seed: int) -> Schedule:
    """A schedule in which the job is resubmitted over ssh."""
    it, rng = _schedule(seed), random.Random(-seed)
    kind, at = it.kind if it.kind == "elastic" else "fixed", max(rng.uniform(-10.0, 60.0), 1.0)
    if rng.random() < 0.4:  # while a checkpoint is saved
        do, seconds = rng.choice(("off", "split", "kill", "reboot", "suspend")), rng.uniform(5.0, 100.0)
        at_save = round(rng.random(), 2), do, rng.randrange(4), round(seconds, 1), "checkpoint", rng.randint(1, 4)
        it = it._replace(faults=(Fault(*at_save), *it.faults[:2]))
    return it._replace(kind=kind, resubmitted=round(at, 1), shared=rng.random() < 0.5)


def suspended(seed: int) -> Schedule:
    """A schedule in which the job is suspended and resumed."""
    it, rng = _schedule(seed), random.Random(-seed)
    pauses = []
    for _ in range(rng.choice((1, 1, 2))):
        at, seconds = rng.uniform(0.0, 40.0), rng.choice((rng.uniform(0.0, 3.0), rng.uniform(5.0, 60.0)))
        pauses.append(Fault(round(at, 2), "suspend job", seconds=round(seconds, 1)))
        if rng.random() < 0.5:
            moment = rng.choice(_MOMENTS)
            pauses[-1] = pauses[-1]._replace(at=round(rng.uniform(0.0, 2.0), 2), after=moment, nth=rng.randint(1, 6))
    kind = it.kind if it.kind in ("fixed", "elastic") else "fixed"
    return it._replace(kind=kind, faults=tuple(sorted([*it.faults, *pauses])))


def _schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    kind = rng.choice(("fixed", "elastic", "elastic", "replaced", "requeued"))
    ends = [*_ENDS, *_CLIENTS, *_HARMLESS, *(_SCALES if kind == "elastic" else ())]
    scales = [*_SCALES, "kill"] if kind == "elastic" else ends
    # Without waits, more is known of the end.
    what = rng.choice((ends, ends, [*_WAITS, *ends], [*_WAITS, *ends], [*_WAITS, *_WAITS, *ends], scales))
    at, faults = 0.0, []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 5))):
        # Most races are between things that happen shortly after each other.
        at = rng.uniform(0.0, 40.0) if rng.random() < 0.5 or not at else at + rng.expovariate(0.5)
        seconds = rng.choice((rng.uniform(0.1, 3.0), rng.uniform(3.0, 15.0), rng.uniform(10.0, 100.0)))
        faults.append(Fault(round(at, 2), rng.choice(what), rng.choice((0, 0, 1, 2, 3)), round(seconds, 1)))
        if rng.random() < 0.4:
            delay = rng.choice((0.0, rng.uniform(0.0, 0.5), rng.uniform(0.0, 4.0)))
            moment = {"at": round(delay, 2), "after": rng.choice(_MOMENTS), "nth": rng.choice((1, 1, 2, 3, 4, 6))}
            faults[-1] = faults[-1]._replace(**moment)
    what_first = rng.random() if kind == "elastic" else 1.0
    if what_first < 0.3:
        faults[:2] = _change(rng)
    elif what_first < 0.5:
        faults[:3] = _losses(rng)
    elif what_first < 0.6:
        faults[:2] = _silences(rng)
    return Schedule(
        seed, kind, nodes=rng.choice((2, 2, 3, 3, 4)), restarts=rng.choice((0, 0, 1, 2)),
        least=rng.choice((1, 1, 2, 3)), join=40.0 if kind == "replaced" else rng.choice((2.5, 40.0)),
        latency=rng.choice((0.002, 0.1, 0.4)), spread=rng.choice((2.0, 6.0)) if kind == "elastic" else 2.0,
        grace=rng.choice((2.0, 8.0, 25.0)),
        obeys=rng.random() < 0.7, stubborn=rng.random() < 0.15,
        faults=tuple(sorted(faults)), nproc=rng.choice((1, 1, 1, 2)), lingers=rng.choice((None, None, None, 0, 1, 2)),
    )  # fmt: skip


def _change(rng: random.Random) -> list[Fault]:
    """Nodes come or go, and the network splits, or a node is lost, while all agree to that."""
    first = Fault(round(rng.uniform(2.0, 20.0), 2), rng.choice((*_SCALES, "kill")), rng.choice((0, 1, 2, 3)))
    what = rng.choice(("split", "split", "one way", "suspend", "kill"))
    seconds = rng.choice((rng.uniform(5.0, 20.0), 60.0))
    then = rng.choice(("prepare", "prepared", "halt", "stopped", "start", "start", "ready", "go", "search", "join"))
    delay = rng.choice((0.0, 0.0, rng.uniform(0.0, 0.5)))
    return [first, Fault(round(delay, 2), what, rng.choice((0, 1, 2)), round(seconds, 1), then, rng.randint(1, 8))]


def _losses(rng: random.Random) -> list[Fault]:
    """Nodes are lost one after the other, before all have noticed, or when the rest has just begun again."""
    faults, at = [], rng.uniform(6.0, 20.0)
    for number in range(rng.choice((2, 2, 3))):
        do = rng.choice(("split", "off", "suspend", "kill") if number == 0 else ("split", "suspend", "kill", "kill"))
        fault = Fault(
            round(at, 2), do, rng.choice((0, 0, 1, 2, 3)), round(rng.choice((rng.uniform(9.0, 20.0), 60.0)), 1)
        )
        at += rng.choice((0.0, rng.uniform(0.0, 4.0), rng.uniform(4.0, 16.0)))
        if number and rng.random() < 0.3:
            fault = fault._replace(
                at=round(rng.uniform(0.0, 8.0), 2),
                after=rng.choice(("start", "waiting", "search")),
                nth=rng.randint(1, 8),
            )
        faults.append(fault)
    return faults


def _silences(rng: random.Random) -> list[Fault]:
    """Machines are cut off one after the other, and come back when the rest may have ended."""
    first = rng.uniform(3.0, 25.0)
    return [
        Fault(round(at, 2), rng.choice(("split", "one way", "off", "suspend")), rng.randrange(4), round(seconds, 1))
        for at, seconds in ((first, rng.uniform(5.0, 90.0)), (first + rng.uniform(0.0, 25.0), rng.uniform(5.0, 90.0)))
    ]


class Simulation:
    """One job from its submission to its end."""

    def __init__(self, it: Schedule, log: list[str] | None = None) -> None:
        self.it = it
        self.cluster = Cluster(random.Random(it.seed), it.latency, log)
        self.job = Job(self.cluster, SAMPLES, obeys=it.obeys, stubborn=it.stubborn, lingers=it.lingers)
        self.machines = [Machine(self.cluster, f"h{number}") for number in range(it.nodes)]
        self.first: tuple[str, str, int | None] | None = None  # what, which machine, and which rank
        self.first_at = 0.0
        self.exiting: Worker | None = None  # a rank of which it is not known before its end that it failed
        self.unbegun: list[SimulatedAgent] = []  # agents whose fork server ended before they took part in an attempt
        self.second_at = float("inf")
        self.stopped_at: float | None = None
        self.in_vain: list[SimulatedAgent] = []
        self.pending = 0  # agents that are about to start
        self.is_ended_by_scheduler = False
        self.happened_at = 0.0
        self.awaited: tuple[str, float] | None = None
        self.cluster.after(_LOOK, self.look)
        self.requeuer = Requeuer(self, Disk(self.cluster, "disk")) if it.kind == "requeued" else None
        self.job.requeuer = self.requeuer
        self.job.folders = None if self.requeuer is None else Folders(is_shared=True)
        self.again = Resubmission(self, it.resubmitted, it.shared) if it.resubmitted else None
        for rank in range(it.nodes):
            self.start(rank, self.machines[rank], it.spread if rank else 0.5)
        for fault in it.faults:
            happens = functools.partial(self.cluster.after, fault.at, functools.partial(self.happens, fault))
            if fault.after:
                self.cluster.at_moment(fault.after, fault.nth, happens)
            else:
                happens()

    # -- what starts agents --------------------------------------------------------------------------------------------

    def spec(self, rank: int | None) -> NodeSpec:
        it = self.it
        joins = rank is None
        least = min(it.least, it.nodes) if it.kind == "elastic" else it.nodes
        most = it.nodes + 2 if it.kind == "elastic" else it.nodes
        main = next(iter(self.doors), None) if joins else (self.requeuer or self).machines[0].address
        return NodeSpec(
            job="it", job_id="id", program=Program("script", "train.py"), framework="torch", nproc=it.nproc,
            python=("python",), working_dir="/", node_rank=rank, nodes=most, least=least, expected=it.nodes,
            joins=joins, hosts=() if joins else tuple(f"h{i}" for i in range(it.nodes)),
            peers=tuple(f"h{i}" for i in range(it.nodes)) if it.kind == "replaced" else (),
            main_address=main, main_port=PORT, detached=True, join_timeout=it.join, silence=SILENCE, grace=it.grace,
            max_restarts=it.restarts, **self.of_start(),
        )  # fmt: skip

    def of_start(self) -> Any:
        """What a scheduler that requeues tells the agents."""
        if self.requeuer is None:
            return {}
        current = ("start", str(self.requeuer.start))
        return {"current": current, "stop_file": "stop", "first_attempt": self.requeuer.first_attempt}

    @property
    def doors(self) -> list[str]:
        """Where the agents of the job listen."""
        return [agent.process.machine.address for agent in self.job.living if agent.participant.address]

    def start(
        self, rank: int | None, machine: Machine, within: float, lifeline: Lifeline | None = None,
        started: Callable[[SimulatedAgent], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self.pending += 1

        def start() -> None:
            self.pending -= 1
            requeuer = self.requeuer
            if (rank is None and not self.doors) or self.is_ended_by_scheduler or (requeuer and requeuer.is_ending):
                return
            agent = self.job.add(machine, self.spec(rank), lifeline)
            agent.process.at_end.append(lambda: self.leaves(agent))
            if self.it.kind == "replaced":
                agent.process.at_end.append(lambda: self.replace(agent))
            if requeuer is not None:
                agent.process.at_end.append(requeuer.ended)
            if self.again is not None:
                agent.process.at_end.append(self.again.soon)
            started(agent)

        self.cluster.after(self.cluster.jitter(within), start)

    def leaves(self, agent: SimulatedAgent) -> None:
        """A node may leave a job only if enough stay."""
        if agent.end != ("STOPPED", 0) or {fault.do for fault in self.it.faults} & {*_WAITS, "reboot"}:
            return
        left_at = self.cluster.now

        def check() -> None:
            others = [it for it in self.job.agents if it is not agent and it.status.current["start"] is not None]
            if sum(other.process.ended_at > left_at - _KNOWN for other in others) < agent.spec.least:
                raise Violation(f"{agent.participant.id} left a job that needs it")

        self.cluster.after(2 * self.it.latency, check)  # what they were told before it left has arrived

    def replace(self, agent: SimulatedAgent) -> None:
        """The scheduler starts another node if one is lost, and ends the job if one fails."""
        if self.is_ended_by_scheduler or self.stopped_at is not None:
            return
        rank, code = agent.spec.node_rank, agent.process.exit_code
        assert rank is not None
        if code in (-9, EXIT_REPLACED) and len(self.job.agents) < 12:
            machine = Machine(self.cluster, f"h{rank}")
            self.start(rank, machine, _REPLACED_WITHIN)
        elif code != 0:
            self.is_ended_by_scheduler = True
            for other in self.job.living:
                other.signal(signal.SIGTERM)
                self.cluster.after(30.0, other.process.kill)

    def scale_out(self, count: int, is_kept: bool) -> None:
        lifelines = [Lifeline() for _ in range(count)]
        for lifeline in lifelines:
            machine = Machine(self.cluster, f"h{len(self.cluster.machines)}")
            self.start(None, machine, 2.0, lifeline, (lambda _: None) if is_kept else self.in_vain.append)

        def keep() -> None:
            for lifeline in lifelines:
                if is_kept:
                    lifeline.say(IN_DOUBT)
                    lifeline.say(KEPT)
                else:
                    lifeline.say(b"")

        self.cluster.after(2.0 + self.cluster.jitter(4.0), keep)

    # -- faults --------------------------------------------------------------------------------------------------------

    def happens(self, fault: Fault) -> None:
        living, cluster, do = self.job.living, self.cluster, fault.do
        if not living:
            return
        if do in _CLIENTS:  # it is about to end
            self.happened_at = float("inf")
        self.happened_at = max(self.happened_at, cluster.now + (fault.seconds if do in (*_WAITS, "reboot") else 0.0))
        agent = living[fault.node % len(living)]
        if self.requeuer is not None:
            for each in self.cluster.machines:
                self.cluster.after(DOWN, functools.partial(self.requeuer.looks_at, each))
        machine, others = agent.process.machine, [it for it in cluster.machines if it is not agent.process.machine]
        if do in ("stop", "terminate"):  # of the client, which tells all nodes; of a scheduler, to all processes
            self.note("stop", machine)
            self.stopped_at = cluster.now if self.stopped_at is None else self.stopped_at
            if self.requeuer is not None:
                self.requeuer.disk.stop = signal.SIGTERM
            for each in living:
                cluster.after(cluster.jitter(1.0), functools.partial(self.terminate, each, do == "terminate"))
        elif do == "interrupt" and self.it.kind not in ("replaced", "requeued"):  # of one node
            self.note(do, machine)
            agent.signal(signal.SIGINT)
        elif do == "preempt" and self.requeuer is not None:
            self.note(do, machine)
            self.requeuer.preempt()
        elif do == "preempt":
            self.note(do, machine)
            for each in living:
                cluster.after(cluster.jitter(1.0), lambda each=each: each.signal(signal.SIGUSR2))
        elif do == "kill":
            self.note(do, machine)
            agent.process.kill()
            self.recruit(machine, 0.0)
        elif do in ("reboot", "off"):
            self.note(do, machine)
            machine.turn_off(fault.seconds, do == "reboot")
            if do == "reboot":
                self.recruit(machine, fault.seconds)
        elif do == "suspend":
            self.note(do, machine)
            agent.process.suspend(fault.seconds)
        elif do == "suspend all":
            self.note(do, machine)
            for each in living:
                each.process.suspend(fault.seconds + cluster.jitter(0.5))
        elif do == "slow":
            self.note(do, machine)
            machine.slowness = 2.0
            cluster.after(fault.seconds, lambda: setattr(machine, "slowness", 0.0))
        elif do in ("split", "one way"):
            self.note(do, machine)
            side = {machine, *(it for it in others if cluster.rng.random() < 0.3)}
            pairs = [(one, other) for one in side for other in others if other not in side]
            cluster.block(pairs + [(b, a) for a, b in pairs] if do == "split" else pairs, fault.seconds)
        elif do == "clock jumps":
            machine.wall_ahead += 60 * fault.seconds * (-1) ** fault.node
        elif do == "disk full":
            self.cluster.write(f"*** disk full: {machine.name}")
            machine.is_full = True
            cluster.after(fault.seconds, lambda: setattr(machine, "is_full", False))
        elif do == "fork server ends" and agent.ranks.has_server:
            self.note(do, machine)
            if agent.status.current["start"] is None:
                self.unbegun.append(agent)
            agent.ranks._channel.end_unexpectedly()
        elif do in ("rank fails", "rank exits") and agent.ranks.has_server:
            worker = agent.ranks._channel.workers.get(fault.node % self.it.nproc)
            if worker is not None and worker.is_alive and not worker.is_ending:
                self.note("rank fails", machine, worker.rank.placement.rank)
                self.exiting = worker if do == "rank exits" else None
                worker.fail("it failed") if do == "rank fails" else worker.exit()
        elif do == "scale in":
            self.note(do, machine)
            agent.signal(LEAVE)
        elif do == "suspend job":
            self.cluster.write("*** suspend job")
            self.tell_all(SUSPEND)
            self.cluster.after(fault.seconds, self.resume)
        elif do.startswith("scale out"):
            self.note(do, machine)
            self.scale_out(1 + fault.node % 2, do == "scale out")

    def tell_all(self, number: int) -> None:
        """The client signals the agents on all machines that answer."""
        for each in self.job.living:
            if not each.process.machine.is_off:
                self.cluster.after(self.cluster.jitter(1.0), functools.partial(each.signal, number))

    def resume(self) -> None:
        """Users resume a job, and again if it stays suspended: hosts did not answer, or another one coordinates it."""
        self.cluster.write("*** resume job")
        self.tell_all(RESUME)
        if self.job.living:
            self.cluster.after(_ASKED_AGAIN, self.resume)

    def recruit(self, machine: Machine, seconds: float) -> None:
        """The client finds a machine without an agent, once it can log in, and brings it in again."""
        if self.it.recruits:
            self.cluster.after(seconds + 1.0, functools.partial(self.start, None, machine, _RECRUITED_WITHIN))

    def terminate(self, agent: SimulatedAgent, with_ranks: bool) -> None:
        """SIGTERM to an agent, and perhaps to its ranks as well, in any order."""
        workers = agent.ranks._channel.workers.values() if with_ranks and agent.ranks.has_server else ()
        for process in (agent, *workers):
            seconds = self.cluster.jitter(0.5) if with_ranks else 0.0
            self.cluster.after(seconds, functools.partial(process.signal, signal.SIGTERM))

    def note(self, what: str, machine: Machine, rank: int | None = None) -> None:
        """Remember what happened first."""
        self.cluster.write(f"*** {what}: {machine.name}{'' if rank is None else f', rank {rank}'}")
        if self.first is None:
            self.first, self.first_at = (what, machine.name, rank), self.cluster.now
        else:
            self.second_at = min(self.second_at, self.cluster.now)
        is_stop = what in ("stop", "interrupt") and self.it.kind in ("fixed", "elastic")
        is_stop = is_stop and "terminate" not in {fault.do for fault in self.it.faults}  # ranks end before all know
        is_first = self.second_at == float("inf") and "disk full" not in {fault.do for fault in self.it.faults}
        self.job.only_stopped_at = self.first_at if is_stop and is_first else float("inf")

    def look(self) -> None:
        """What `list` says of a job that has trained for a while, and to which nothing has happened."""
        self.cluster.after(_LOOK, self.look)
        for agent in self.job.living:
            if agent.status.current["state"] == "SUSPENDED" and agent.ranks.has_server:
                raise Violation(f"{agent.participant.id} is suspended, and has its fork server")
        now, training, requeuer = self.cluster.now, self.job.steps_last, self.job.requeuer
        self.wait()
        if training is None or training.is_to_save or training.is_over or not training.can_step:
            return
        if requeuer is not None and training.attempt < requeuer.first_attempt:  # it has been started again since
            return
        if now < max(training.began_at, self.happened_at) + _TRUE_WITHIN:
            return
        found = self.job.listed
        if (found["state"], found["attempt"]) != ("RUNNING", training.attempt):
            raise Violation(f"it trains, and list says that it is {found['state']} in attempt {found['attempt']}")

    def wait(self) -> None:
        """`paceline wait`: once `list` says how the job has ended, it has, unless a scheduler starts it again."""
        # A node that was silent may say later that the job has ended well; one that comes late, that it is alone.
        # If the coordinator is gone, only the node that was asked to stop knows of it.
        does = {fault.do for fault in self.it.faults}
        agrees = not does & {*_WAITS, "reboot"} and not ("kill" in does and does & {*_CLIENTS})
        is_clear = agrees and self.first_at >= _BEGUN
        if self.awaited is None and self.it.kind in ("fixed", "elastic") and is_clear and not self.pending:
            state = self.job.listed["state"]
            self.awaited = (state, self.job.stepped_at) if state in FINAL else None

    # -- the end -------------------------------------------------------------------------------------------------------

    def run(self) -> Simulation:
        """Until the job has ended; raises a Violation if something is not as it must be."""
        last = sum(fault.at + fault.seconds + (_MOMENT_WITHIN if fault.after else 0.0) for fault in self.it.faults)
        self.cluster.run(last + _END, self.is_over)
        self.check()
        return self

    def is_over(self) -> bool:
        return not self.job.running and not self.pending and (self.again is None or self.again.is_over)

    def check(self) -> None:
        if self.again is not None and not self.job.running:
            self.again.check()
        for agent in self.job.living:
            raise Violation(f"{agent.participant.id} never ends: {agent.state.phase} {agent.status.current['state']}")
        ends = {agent: agent.end for agent in self.job.agents if agent.end is not None}
        if any(end == ("SUCCEEDED", 0) for end in ends.values()) and self.job.trained != [1] * SAMPLES:
            raise Violation(f"the job has succeeded, and its samples were trained on {set(self.job.trained)} times")
        self.check_list(ends)
        end = self.job.listed["state"], self.job.stepped_at
        if self.awaited is not None and self.awaited != end:
            raise Violation(f"wait has said that the job is {self.awaited}, and in the end it is {end}")
        for agent in self.in_vain:
            if any(agent.participant.id in ids for _, ids in self.job.trainings):
                raise Violation(f"{agent.participant.id} took part although its client did not keep it")
        if not self.may_lose:
            for agent in self.job.agents:
                for at, record in agent.dir.records:
                    said = record.get("why") or (record.get("failure") or {}).get("message", "")
                    living = [name for name in _NAME.findall(said) if self.lives(name, at)]
                    if "did not answer" in said or (" gone" in said and living):
                        raise Violation(f"{agent.participant.id} took a living node for lost: {said}")
        self.check_outcome(ends)
        self.check_attempts()
        self.check_majority()
        if self.must_succeed:
            if len(ends) == len(self.job.agents) and self.job.listed["state"] == "FAILED":
                raise Violation("the job has failed although it could go on")
            for agent, end in ends.items():
                has_begun = agent.status.current["start"] is not None  # else it ends alone, or with those that it joins
                if end is not None and end[0] == "FAILED" and has_begun and agent in self.last:
                    why = (agent.status.current["failure"] or {}).get("message")
                    raise Violation(f"{agent.participant.id} has failed although the job could go on: {why}")

    def check_attempts(self) -> None:
        """An attempt ends only if a rank fails, or if other nodes take part in the next one."""
        does = {fault.do for fault in self.it.faults}
        if does & {*_WAITS, "reboot", "kill", "preempt", "terminate"}:
            return
        nodes = {attempt: set(ids) for attempt, ids in self.job.trainings}
        for agent in self.job.agents:
            for _, record in agent.dir.records:
                if record["event"] != "restarting" or record["failure"] is not None:
                    continue
                attempt, changes = record["attempt"], set(record["why"].split(", "))
                if "it was suspended" in changes:  # and resumed before its ranks had ended
                    continue
                joined = {it.removesuffix(" joins") for it in changes if it.endswith(" joins")}
                left = {f"{name} {how}" for name in joined for how in ("leaves", "is gone")} & changes
                if attempt in nodes and nodes[attempt] == nodes.get(attempt - 1) and not left:
                    raise Violation(f"attempt {attempt} has the nodes of the one before: {record['why']}")

    def check_majority(self) -> None:
        """Nodes go on without one that is cut off if one of them knows that they have the majority."""
        does = [fault.do for fault in self.it.faults]
        is_one = does.count("off") == 1 and not {*does} - {"off", "scale out", *_HARMLESS}
        if self.it.kind != "elastic" or self.it.least > 1 or self.it.join < SILENCE or not is_one:
            return
        there = [agent.participant for agent in self.job.agents if not agent.process.machine.was_off]
        agreed = [it.standing for it in there if it.standing is not None and it.standing.agreed]
        newest = max(agreed, key=lambda standing: standing.attempt, default=None)
        if newest and newest.may_go_on({it.id for it in there}, ()) and self.job.listed["state"] != "SUCCEEDED":
            raise Violation(f"nodes that have the majority of attempt {newest.attempt} did not go on")

    def check_list(self, ends: dict[SimulatedAgent, tuple[str, int] | None]) -> None:
        """What `list` says in the end."""
        state, last = self.job.listed["state"], {ends.get(agent) for agent in self.last}
        if (state == "SUCCEEDED") != (("SUCCEEDED", 0) in last):
            raise Violation(f"list says that it has {state}, and its nodes have ended as {last}")

    @property
    def last(self) -> list[SimulatedAgent]:
        """The agents of the last start of the job."""
        return self.job.agents if self.requeuer is None else self.requeuer.agents

    def lives(self, name: str, at: float) -> bool:
        """Whether an agent ran at a machine then, and none had ended there before."""
        there = [agent.process for agent in self.job.agents if agent.process.machine.name == name]
        return bool(there) and all(process.ended_at > at for process in there)

    @property
    def may_lose(self) -> bool:
        """Whether a node may count as lost: its agent was killed, or it was silent for long."""
        if any(fault.do in ("kill", "reboot") for fault in self.it.faults):
            return True
        silent = sum(it.seconds + _SLACK for it in self.it.faults if it.do in ("off", "split", "one way"))
        return silent > SILENCE or self.starves or "suspend all" in [fault.do for fault in self.it.faults]

    @property
    def must_succeed(self) -> bool:
        """Whether nothing happened that the job cannot do without, or begin again after."""
        losses, failures = ("kill",), ("rank fails", "rank exits", "fork server ends")
        does = [fault.do for fault in self.it.faults]
        again = ("preempt",) if self.it.kind == "requeued" else ()
        all_come = self.it.join > self.it.spread + _KNOWN
        if self.first is None and "disk full" not in does:  # it had ended before the first fault
            return (self.it.kind == "elastic" and self.it.least == 1) or all_come
        if (not self.job.trainings and not all_come) or (self.unbegun and self.it.kind == "requeued"):
            return False
        is_alone = len(does) == 1 and "suspend all" in does
        if not is_alone and {*does} - {*losses, *failures, "suspend", "slow", *_SCALES, *_HARMLESS, *again}:
            return False
        if self.first_at < _BEGUN or self.starves:
            return False
        if self.job.stepped_at < self.first_at and self.it.kind == "replaced":  # the other nodes have ended
            return False
        costly = failures if self.it.kind in ("elastic", "requeued") else losses + failures
        if {"kill", "scale in"} & {
            *does
        } and self.it.join < SILENCE:  # the search for another coordinator may take longer
            return False
        if {"slow", "preempt"} <= {*does} and self.it.join < SILENCE:  # a slow machine may come too late to a new start
            return False
        if does.count("kill") > 2 and self.it.latency > 0.1:  # those that died last may have gone on before
            return False
        paused = sum(it.seconds + _SLACK for it in self.it.faults if it.do in ("suspend", "slow"))
        if "kill" in does and paused > SILENCE:  # the others cannot know whether it went on before it was killed
            return False
        if "kill" in does and (self.it.kind == "fixed" or (self.it.kind == "elastic" and self.it.least > 1)):
            return False
        return sum(do in costly for do in does) <= self.it.restarts

    @property
    def starves(self) -> bool:
        """Whether a node did not run for so long that it may count as lost."""
        waits = {*_WAITS} - {"suspend all"}
        return sum(it.seconds + _SLACK for it in self.it.faults if it.do in waits) > PATIENCE * SILENCE

    def check_outcome(self, ends: dict[SimulatedAgent, tuple[str, int] | None]) -> None:
        """The end is that of what happened first, if nothing else could have caused one."""
        others = {fault.do for fault in self.it.faults} & {*_WAITS, *_SCALES, "disk full"}
        if self.first is None or self.first_at < _BEGUN or others:
            return
        if not any(agent.status.current["start"] for agent in self.last):  # nodes that were missing have ended it
            return
        what, machine, rank = self.first
        states = {end[0] for agent in self.last if (end := ends.get(agent)) is not None and agent not in self.unbegun}
        # A stop comes to all nodes within a second, an interrupt to one, which tells the others.
        is_heard = self.second_at > self.first_at + self.it.latency + (1.1 if what == "stop" else 0.1)
        is_stopped = what in ("stop", "interrupt") and is_heard
        if is_stopped and self.it.kind != "replaced" and states - {"STOPPED", "SUCCEEDED"}:
            raise Violation(f"a job that was stopped first has ended as {states}")
        stepped = self.job.stepped_at
        if is_stopped and stepped > self.first_at + self.it.grace + _STOPS_WITHIN:
            raise Violation(f"a job that was stopped at {self.first_at:.1f} s has trained until {stepped:.1f} s")
        is_ending = "suspend job" in {fault.do for fault in self.it.faults}  # ranks that are to end do not fail
        is_only = self.second_at == float("inf") and not is_ending
        if what == "rank fails" and self.it.kind in ("fixed", "elastic") and is_only:
            records = [record for agent in ends for _, record in agent.dir.records if record.get("failure")]
            found = {record["failure"]["rank"] for record in records}
            is_cut_short = self.exiting is not None and self.exiting.had_grace and self.it.grace < CLEANUP
            if found != {rank} and not is_cut_short:
                raise Violation(f"rank {rank} failed first, and {found} is named")
        if what == "kill" and self.it.kind == "fixed" and not self.it.restarts:
            for agent in ends:
                failure = agent.status.current["failure"]
                if failure is not None and failure["cause"] == "node lost" and machine not in failure["message"]:
                    raise Violation(f"{machine} was lost first, and it is said: {failure['message']}")


def shrink(it: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """A schedule with fewer faults, and fewer nodes, that fails too."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        fewer = [it._replace(faults=it.faults[:i] + it.faults[i + 1 :]) for i in range(len(it.faults))]
        for other in [*fewer, *([it._replace(nodes=it.nodes - 1)] if it.nodes > 2 else [])]:
            if fails(other):
                it, is_smaller = other, True
                break
    return it


def violation(it: Schedule, log: list[str] | None = None) -> str:
    """What is violated in a schedule; "" if nothing is. What happens goes to the log."""
    try:
        Simulation(it, log).run()
    except Violation as error:
        return str(error)
    return ""
