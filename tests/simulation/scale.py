"""What it costs to coordinate many nodes: `python -m tests.simulation.scale 10 100 1000 --plot FILE`.

It prints a table, and draws it. The agents are real; their network is simulated, so that ten thousand fit into one
process. CPU seconds are those of the agent that coordinates, and of one that does not.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.spec import NodeSpec, Program

from .cluster import PORT, Cluster, Machine, Process
from .job import Job

if TYPE_CHECKING:
    from collections.abc import Callable


class Cost(NamedTuple):
    """What a phase costs: messages and bytes of all, CPU seconds of the coordinator and of another node."""

    messages: int
    bytes: int
    seconds: float
    of_another: float


class Scale:
    """An elastic job on so many nodes, whose ranks wait."""

    def __init__(self, nodes: int) -> None:
        """No agent has started."""
        self.cluster = Cluster(random.Random(1), 0.002)
        self.job = Job(self.cluster, samples=1, steps=False)
        self.nodes = nodes
        self.names = tuple(f"h{number}" for number in range(nodes))
        self._seconds = [0.0, 0.0]
        machines = [Machine(self.cluster, name) for name in self.names]
        for rank, machine in enumerate(machines):
            self.cluster.after(self.cluster.jitter(2.0), lambda rank=rank, machine=machine: self._start(rank, machine))

    def _start(self, rank: int, machine: Machine) -> None:
        spec = NodeSpec(
            job="it", job_id="id", program=Program("script", "train.py"), framework="torch", nproc=1,
            python=("python",), working_dir="/", node_rank=rank, nodes=self.nodes + 2, least=1, expected=self.nodes,
            hosts=self.names, main_address=self.cluster.machines[0].address,
            main_port=PORT, detached=True, join_timeout=600.0,
        )  # fmt: skip
        agent = self.job.add(machine, spec)
        if rank < len(self._seconds):
            agent.process.go_on = lambda: self._timed(agent.process, rank)  # type: ignore[method-assign]

    def _timed(self, process: Process, rank: int) -> None:
        before = time.process_time()
        Process.go_on(process)
        self._seconds[rank] += time.process_time() - before

    def runs(self, until: float) -> Cost:
        """The cost of what happens until then."""
        before = self._cost()
        self.cluster.run(until, lambda: False)
        return Cost(*(now - then for now, then in zip(self._cost(), before, strict=True)))  # type: ignore[arg-type]

    def _cost(self) -> Cost:
        """The cost so far."""
        return Cost(self.cluster.messages, self.cluster.bytes, *self._seconds)


def costs(nodes: int) -> tuple[Cost, Cost]:
    """Of the start of a job on so many nodes; and of the loss of one of them, after which the others go on."""
    scale = Scale(nodes)
    start = scale.runs(12.0)
    states = {agent.status.current["state"] for agent in scale.job.agents}
    assert states == {"RUNNING"}, states
    scale.cluster.machines[nodes // 2].processes[0].kill()
    loss = scale.runs(30.0)
    attempts = {(agent.status.current["state"], agent.status.current["attempt"]) for agent in scale.job.living}
    assert attempts == {("RUNNING", 1)}, attempts
    return start, loss


def row(nodes: int, start: Cost, loss: Cost) -> str:
    """A row of the table."""
    each = [
        f"{cost.messages:,} | {cost.bytes // nodes:,} | {cost.seconds:.2f} s | {1000 * cost.of_another:.1f} ms"
        for cost in (start, loss)
    ]
    return f"| {nodes:,} | {each[0]} | {1000 * start.seconds / nodes:.2f} ms | {each[1]} |"


def draw(found: dict[int, tuple[Cost, Cost]], file: Path) -> None:
    """Draw the costs over the number of nodes, both on logarithmic scales."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline"})
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    shown: list[tuple[str, Callable[[int, Cost], float]]] = [
        ("CPU of the coordinator [s]", lambda _, cost: cost.seconds),
        ("messages", lambda _, cost: cost.messages),
        ("bytes per node", lambda nodes, cost: cost.bytes / nodes),
    ]
    for axes, (label, value) in zip(panels, shown, strict=True):
        for which, name in enumerate(("start", "loss of a node")):
            points = {nodes: value(nodes, costs[which]) or math.nan for nodes, costs in found.items()}
            axes.plot(list(points), list(points.values()), marker=".", label=name)
        axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel=label)
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to coordinate many nodes.")
    parser.add_argument("nodes", type=int, nargs="*", default=[2, 10, 100, 1000])
    parser.add_argument("--plot", type=Path, help="a picture, .svg or .png")
    options = parser.parse_args()
    print("| nodes | start: messages | bytes per node | CPU | of another node | per join | loss: messages", end="")
    print(" | bytes per node | CPU | of another node |\n" + "|---" * 10 + "|")
    found = {}
    for nodes in options.nodes:
        found[nodes] = costs(nodes)
        print(row(nodes, *found[nodes]), flush=True)
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
