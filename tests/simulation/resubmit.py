"""A client that resubmits a job over ssh, as soon as it may, while agents and ranks of the job may still be there."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.backends.again import refuse_running
from paceline.backends.ssh.backend import Ssh
from paceline.backends.ssh.jobs import RemoteJobs
from paceline.backends.ssh.start import RemoteStart
from paceline.contract import folder_lock
from paceline.job.errors import UserError
from paceline.node.journal.fold import fold

from .cluster import PORT, Machine
from .job import Job, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.job.job import Job as ListedJob
    from paceline.node.spec import NodeSpec

    from .job import Training, Worker
    from .schedules import Simulation

_RENAME = 1.0  # seconds at most in which a machine gives a checkpoint its name, once all have it
_AGAIN, _WATCHES = 6.0, 1.5  # seconds at most between two tries; after an agent has ended
_FACTS: Any = {  # what is known of it before it runs
    **dict.fromkeys(("framework", "devices_asked", "resume_from", "queue", "ttl", "code", "tensorboard")),
    **dict.fromkeys(("backend", "command", "working_dir", "folder"), ""), "name": "it", "created": 0.0, "ranks": 0,
    "max_restarts": 0, "priority": 0, "labels": {}, "options": {}, "grace": 0.0, "data": [],
}  # fmt: skip


class Saved(NamedTuple):
    """A checkpoint: its place in the order of all, and how often each sample was trained on in it."""

    serial: int
    position: int
    trained: tuple[int, ...]


_NONE = Saved(0, 0, ())


class Folders:
    """Where a job keeps its checkpoints: on each of its machines, or in one folder that two jobs share.

    Attributes:
        holder: the rank that has locked the folder that is shared.
    """

    def __init__(self, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.holder: Worker | None = None
        self._saved: dict[Machine | None, set[Saved]] = {}
        self._hidden: dict[Machine | None, Saved] = {}  # that have all files, and not their names yet

    def of(self, machine: Machine) -> set[Saved]:
        return self._saved.setdefault(None if self.is_shared else machine, set())

    def is_held(self) -> bool:
        """Whether a rank holds the folder that is shared."""
        return self.holder is not None and self.holder.is_alive

    def is_held_by(self, worker: Worker) -> bool:
        """Whether a rank may save, as far as it sees."""
        return not self.is_shared or self.holder is worker

    def load(self, training: Training) -> bool:
        """Begin with the newest checkpoint; False as long as another job's rank holds the folder."""
        job, machines, writer = training.job, {it.machine for it in training.workers.values()}, training.workers[0]
        if self.holder is not None and self.is_held():
            training.waited += 1  # seconds
            is_late = training.waited > folder_lock._PATIENCE
            if not is_late or not folder_lock._is_lost(_who(self.holder), _who(writer)):
                if is_late:
                    writer.fail(f"cannot save checkpoints: held by job {self.holder.job.name}")
                return False
        self.holder = writer if self.is_shared else None
        newest = max(
            (it for machine in machines for it in self.of(machine)), default=_NONE._replace(trained=(0,) * job.samples)
        )
        for machine in machines:
            self.of(machine).add(newest)
        job.position, job.trained = newest.position, list(newest.trained)
        job.began = newest.position if job.steps_last is None else job.began
        return True

    def save(self, training: Training, is_last: bool) -> None:
        """All machines have the files; each renames them when it comes to that."""
        job, writers = training.job, {it.machine: it for it in training.workers.values()}
        job.cluster.moment("checkpoint")
        serial = max((it.serial for machine in writers for it in self.of(machine)), default=0)
        saved = Saved(1 + serial, job.position, tuple(job.trained))
        for worker in (training.workers[0],) if self.is_shared else writers.values():
            self._hidden[None if self.is_shared else worker.machine] = saved  # what was left behind is removed
            rename = functools.partial(self._rename, worker, saved)
            if is_last:
                rename()
            else:
                job.cluster.after(job.cluster.jitter(_RENAME), rename)

    def _rename(self, worker: Worker, saved: Saved) -> None:
        if worker.is_alive and worker.is_suspended:
            worker.job.cluster.after(1.0, lambda: self._rename(worker, saved))
        elif worker.is_alive:
            if self._hidden.get(None if self.is_shared else worker.machine) is not saved:
                return
            if self.is_held_by(worker):
                self.of(worker.machine).add(saved)
            elif self.holder is not None and self.holder.job is not worker.job:
                raise Violation(f"job {worker.job.name} saves into the folder of job {self.holder.job.name}")


def _who(worker: Worker) -> dict[str, Any]:
    machine, attempt = worker.machine.name, worker.training.attempt
    return {"jobs": [worker.job.name], "attempt": attempt, "host": machine, "boot": machine}


class Resubmission:
    """The client, and the job that it starts. It is its backend, and the target's `Hosts` and `SubmittedJobs`, too."""

    name = label = where = ""
    where_of = staticmethod(lambda _: "")
    is_gone = has_ended = staticmethod(lambda *_: None)
    unended_on: Any = Ssh.unended_on

    def __init__(self, simulation: Simulation, at: float, is_shared: bool) -> None:
        """`simulation` has machines, and its job is about to start."""
        self.simulation, self.cluster, self.first = simulation, simulation.cluster, simulation.job
        self.first.folders = self._folders = Folders(is_shared)
        self.second: Job | None = None
        self.desk = Machine(self.cluster, "desk")
        Machine(self.cluster, f"h{len(self.cluster.machines)}")  # another host of the target
        self.pending = 0
        self._copied_from: list[Machine] = []
        self.refusal = ""
        self._jobs: Any = RemoteJobs(self)  # type: ignore[arg-type]
        self._jobs._submitted = self
        self.cluster.after(at, self._tries)

    @property
    def all(self) -> list[Machine]:
        return [machine for machine in self.cluster.machines if machine is not self.desk]

    def ask(self, machines: Sequence[Machine], _: object) -> tuple[dict[Machine, Any], dict[Machine, UserError]]:
        """What machines report of the job."""
        parts = {agent.process.machine: agent.part for agent in self.first.agents}
        answers, failed = {}, {}
        for machine in machines:
            if self.cluster.passes(self.desk, machine) and self.cluster.passes(machine, self.desk):
                there = [parts[machine]] if machine in parts else []
                jobs = [{"job": {**_FACTS, "nodes": self.simulation.it.nodes}, "part": part} for part in there]
                answers[machine] = {"jobs": jobs, "names": ["it"][: len(jobs)]}
            else:
                failed[machine] = UserError(f"cannot reach {machine.name}")
        return answers, failed

    def on(self, names: dict[str, str]) -> dict[str, Any]:
        """What was noted when the job was submitted; it had not ended then."""
        hosts = [machine.name for machine in self.simulation.machines]
        return {"it": (hosts, fold({**_FACTS, "nodes": len(hosts)}, []))} if {*hosts} & names.keys() else {}

    # -- the client ----------------------------------------------------------------------------------------------------

    def soon(self) -> None:
        self.cluster.after(self.cluster.jitter(_WATCHES), self._try)

    def _tries(self) -> None:
        self._try()
        if self.second is None:
            self.cluster.after(1.0 + self.cluster.jitter(_AGAIN), self._tries)

    def _try(self) -> None:
        if self.second is not None or len(self.first.agents) < self.simulation.it.nodes:  # it is being submitted
            return
        try:
            (job,) = self._jobs.describe(["it"]).jobs
            chosen, least = self._choose(job)
        except UserError as error:
            self.refusal = str(error)
            return
        self.cluster.write(f"*** resubmitted: {job.state}, on {', '.join(it.name for it in chosen)}")
        self._start(chosen, least)

    def _choose(self, job: ListedJob) -> tuple[list[Machine], int]:
        """The hosts for the job, and how many there must be."""
        refuse_running(job, self)  # type: ignore[arg-type]
        if self._folders.is_held():  # as `check_checkpoint_dir` on the hosts
            raise UserError("--checkpoint-dir: another job saves checkpoints there")
        spec = self.simulation.spec(0)
        looks, _ = self.ask(self.all, None)
        asked = SimpleNamespace(code=None, node_range=(spec.least, spec.nodes))
        start: Any = SimpleNamespace(spec=asked, _jobs=self._jobs, notes=[])
        hosts: Any = RemoteStart._resuming(start, "it", looks)  # type: ignore[arg-type]
        if len(hosts) < spec.least:
            raise UserError("too few hosts")
        return hosts[: spec.nodes], spec.least

    def _start(self, chosen: list[Machine], least: int) -> None:
        first, simulation = self.first, self.simulation
        answers, _ = self.ask(self.all, None)  # another client may add machines later
        first.answered = {agent for agent in first.agents if agent.process.machine in answers}
        self.second = second = Job(self.cluster, first.samples, obeys=first.obeys, number=1)
        second.folders = folders = self._folders if self._folders.is_shared else Folders(False)
        names = tuple(it.name for it in chosen)
        for rank, machine in enumerate(chosen):
            spec = dataclasses.replace(
                simulation.spec(rank), job="again", job_id="again", hosts=names, expected=len(chosen), least=least,
                nodes=max(len(chosen), least), main_address=chosen[0].address, main_port=PORT + 1,
            )  # fmt: skip
            self.pending += 1
            start = functools.partial(self._start_one, second, folders, machine, spec)
            self.cluster.after(self.cluster.jitter(2.0), start)

    def _start_one(self, second: Job, folders: Folders, machine: Machine, spec: NodeSpec) -> None:
        self.pending -= 1
        if machine in self.ask([machine], None)[0]:
            if folders is not self._folders:
                folders.of(machine).update(self._folders.of(machine))
                self._copied_from.append(machine)
            second.add(machine, spec)

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.second is not None and not self.pending and not self.second.running

    def check(self) -> None:
        """Raise a Violation if something is not as it must be, in the end."""
        if self.second is None:
            raise Violation(f"a job that has ended cannot be resubmitted: {self.refusal}")
        for agent in self.second.living:
            raise Violation(f"{agent.participant.id} of the second job never ends: {agent.state.phase}")
        left = [saved for machine in self._copied_from for saved in self._folders.of(machine)]
        if self.second.steps_last is not None and self.second.began < max(left, default=_NONE).position:
            raise Violation(f"the second job went on from {self.second.began}, and {max(left).position} was saved")
        has_succeeded = any(agent.end == ("SUCCEEDED", 0) for agent in self.second.agents)
        if has_succeeded and self.second.trained != [1] * self.second.samples:
            raise Violation(f"with the second job, samples were trained on {set(self.second.trained)} times")
        if self.second.agents and has_succeeded != (self.second.listed["state"] == "SUCCEEDED"):
            raise Violation(f"list says that the second job has {self.second.listed['state']}")
        if not self.ask(self.all, None)[1] and self._jobs.describe(["it"]).jobs[0].state != self.first.listed["state"]:
            raise Violation("list of the client does not say how the first job has ended")
