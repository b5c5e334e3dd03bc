"""A scheduler that starts a whole job again, as Slurm does, on machines that share a disk."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from paceline.node.spec import CURRENT_SECONDS

from .cluster import Machine

if TYPE_CHECKING:
    from .job import SimulatedAgent
    from .schedules import Simulation

DOWN = 15.0  # seconds after which a node that does not answer is down
_KILL = 30.0  # seconds between SIGTERM and SIGKILL
_MOST_LOSSES = 5
_AGAIN = 5.0  # seconds at most until it has nodes again


class Disk(Machine):
    """What all machines share; who does not reach it reads and writes nothing.

    Attributes:
        start: the number of the start that may work.
        stop: a signal, once somebody has asked to stop the job.
    """

    start, stop = 0, 0


class Requeuer:
    """Starts a job again whose node is lost, or that has given way to another one.

    Attributes:
        start: the number of the last start.
        started_at: when that was.
        first_attempt: the number of its first attempt.
        is_ending: whether all agents of this start are being ended.
    """

    def __init__(self, simulation: Simulation, disk: Disk) -> None:
        """The job has been started once."""
        self.simulation, self.cluster, self.disk = simulation, simulation.cluster, disk
        self.machines = list(simulation.machines)
        self.start = self.first_attempt = self._losses = 0
        self.started_at = 0.0
        self._is_preempted = self.is_ending = self._is_decided = False

    @property
    def agents(self) -> list[SimulatedAgent]:
        """Those of the last start."""
        return [agent for agent in self.simulation.job.agents if agent.spec.current == ("start", str(self.start))]

    def reaches(self, machine: Machine) -> bool:
        return self.cluster.passes(machine, self.disk) and self.cluster.passes(self.disk, machine)

    def preempt(self) -> None:
        """Let it give way to another job."""
        self._is_preempted = True
        self._end_all()

    def looks_at(self, machine: Machine) -> None:
        """A machine that may not answer has not for a while."""
        if machine in self.machines and not self.reaches(machine) and not self.is_ending:
            self._end_all()
            self.ended()  # nothing more may run that it reaches

    def _end_all(self) -> None:
        self.is_ending = True
        for agent in self.agents:
            if self.reaches(agent.process.machine):
                self.cluster.after(self.cluster.jitter(1.0), functools.partial(self.simulation.terminate, agent, True))
                self.cluster.after(_KILL, agent.process.kill)

    def ended(self) -> None:
        """An agent has ended, or cannot be reached any more: once all have, the job is over, or starts again."""
        agents, ends = self.agents, [agent.end for agent in self.agents]
        are_there = len(agents) == len(self.machines) or self.is_ending
        living = [agent for agent in agents if agent.process.exit_code is None]
        if self._is_decided or not are_there or any(self.reaches(agent.process.machine) for agent in living):
            return
        self._is_decided = True
        causes = {(agent.status.current["failure"] or {}).get("cause") for agent in agents}
        is_lost = self.is_ending or "node lost" in causes or None in ends
        if ("SUCCEEDED", 0) in ends or self.disk.stop or not (self._is_preempted or is_lost):
            return
        self._losses += not self._is_preempted
        if self._losses <= _MOST_LOSSES:
            self.simulation.pending += 1
            self.cluster.after(1.0 + self.cluster.jitter(_AGAIN), self._start_again)

    def _start_again(self) -> None:
        self.simulation.pending -= 1
        if self.disk.stop:
            return
        self._is_preempted = self.is_ending = self._is_decided = False
        before, cluster = self.simulation.job.agents[:], self.cluster
        for number, machine in enumerate(self.machines):
            if not self.reaches(machine) or machine.processes:
                self.machines[number] = Machine(cluster, f"h{len(cluster.machines)}")
        begun = [agent.status.current["attempt"] for agent in before if agent.status.current["start"] is not None]
        self.start, self.started_at = self.start + 1, cluster.now
        self.disk.start, self.first_attempt = self.start, max(begun, default=-1) + 1
        for rank, machine in enumerate(self.machines):
            if rank:
                self.simulation.start(rank, machine, 2.0)
        self.simulation.pending += 1
        self._start_first(self.start, before, cluster.now + 2 * CURRENT_SECONDS + 1.0)

    def _start_first(self, start: int, before: list[SimulatedAgent], until: float) -> None:
        """The first node waits until agents of the starts before have seen that they are not to go on."""
        if self.cluster.now < until and any(agent.end is None for agent in before):
            self.cluster.after(0.5, lambda: self._start_first(start, before, until))
            return
        self.simulation.pending -= 1
        if start == self.start:
            self.simulation.start(0, self.machines[0], 0.1)
