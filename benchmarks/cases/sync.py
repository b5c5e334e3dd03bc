"""Ways to exchange gradients: a training step on one machine, and on hosts whose network is limited."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..case import Case, Goal, Pair, Side
from ..lab import SCRIPTS, Lab, installed
from ..sample import Failed, Sample

SCRIPT, ALONE, LOSS = (str(SCRIPTS / name) for name in ("sync_step.py", "sync_alone.py", "sync_loss.py"))
TARGET = 2.2  # validation loss of chargpt
ONE_THREAD = ("--env", "OMP_NUM_THREADS=1")  # the hosts share the cores of this machine; more threads only wait there
BUDGET = 120  # seconds of training in which it is reached
PACELINE = installed("paceline")


def _here(lab: Lab, count: int, methods: Sequence[str]) -> Iterator[Pair]:
    """One pair per start of the ranks, in which both sides take turns."""
    for _ in range(count):
        ours, other = lab.answer([PACELINE, "run", "-n", "2", SCRIPT, *methods])
        yield Sample(ours), Sample(other)


def _on_hosts(
    lab: Lab, count: int, methods: Sequence[str], mbit: float, ranks: int, *, flags: Sequence[str]
) -> Iterator[Pair]:
    """The same on two hosts."""
    hosts = lab.hosts().hosts[:2]
    start = [PACELINE, "run", "--on", "lab2", "--nnodes", "2", "-n", str(ranks), *flags]
    for host in hosts:
        host.limit(mbit)
    try:
        for _ in range(count):
            ours, other = lab.answer([*lab.hosts().enter(), *start, SCRIPT, *methods])
            yield Sample(ours), Sample(other)
    finally:
        for host in hosts:
            host.unlimit()


def _alone(lab: Lab, count: int, methods: Sequence[str], mbit: float, script: Sequence[str]) -> Iterator[Pair]:
    """One pair per start of each side: ours with a limited network, the other without."""
    ours, other = methods
    hosts = lab.hosts().hosts[:2]
    start = [*lab.hosts().enter(), PACELINE, "run", "--on", "lab2", "--nnodes", "2", "-n", "1", *ONE_THREAD]
    for _ in range(count):
        for host in hosts:
            host.limit(mbit)
        try:
            mine = lab.answer([*start, script[0], ours, *script[1:]])
        finally:
            for host in hosts:
                host.unlimit()
        yield Sample(_seconds(mine)), Sample(_seconds(lab.answer([*start, script[0], other, *script[1:]])))


def _seconds(answer: float | dict[str, list[tuple[float, float]]]) -> float:
    """What a script has measured: seconds, or a curve of seconds and loss, of which those until the target count."""
    if isinstance(answer, float):
        return answer
    (curve,) = answer.values()
    for (before, above), (after, below) in itertools.pairwise(curve):
        if below <= TARGET:
            return before + (after - before) * (above - TARGET) / (above - below)
    raise Failed(f"the loss is {curve[-1][1]:.3f} after {curve[-1][0]:.0f} s, and not below {TARGET}")


def _hosts_case(
    name: str, ours: str, other: tuple[str, str], *, mbit: int, ranks: int = 1, goal: float, flags: Sequence[str] = ()
) -> Case:
    label, method = other
    return Case(
        name,
        f"a step with 21 MB of gradients, 2 hosts with {ranks} rank{'s' if ranks > 1 else ''}, {mbit} Mbit/s",
        Side(ours),
        Side(label),
        Goal(goal),
        together=lambda lab, count: _on_hosts(lab, count, (ours, method), mbit, ranks, flags=flags),
    )


def _loss_case(name: str, ours: str, *, goal: float) -> Case:
    return Case(
        name,
        f"training until a validation loss of {TARGET}, 2 hosts, 100 Mbit/s or no limit",
        Side(f"{ours}, 100 Mbit/s"),
        Side("DDP, no limit"),
        Goal(goal),
        together=lambda lab, count: _alone(lab, count, (ours, "ddp"), 100, [LOSS, str(BUDGET), str(TARGET)]),
    )


_DDP = ("DDP by hand", "ddp")
_HOOK = ("torch's PowerSGD hook", "powersgd-hook")
CASES = [
    Case(
        "sync-here",
        "a step with 21 MB of gradients, 2 ranks on one machine",
        Side("shared memory"),
        Side("DDP by hand"),
        Goal(0.7),
        together=lambda lab, count: _here(lab, count, ("allreduce", "ddp")),
    ),
    _hosts_case("sync-1g", "powersgd(2)", _DDP, mbit=1000, goal=0.4, flags=ONE_THREAD),
    _hosts_case("sync-100m", "powersgd(2)", _DDP, mbit=100, goal=0.06, flags=ONE_THREAD),
    _hosts_case("sync-hook", "powersgd(2)", _HOOK, mbit=1000, goal=1.0, flags=ONE_THREAD),
    _hosts_case("sync-local", "local_sgd(8)", _DDP, mbit=1000, goal=1 / 1.08, flags=ONE_THREAD),
    Case(
        "sync-diloco",
        "a step with 21 MB of gradients, 2 hosts, 100 Mbit/s or no limit",
        Side("diloco(64), 100 Mbit/s"),
        Side("DDP by hand, no limit"),
        Goal(1.15),
        together=lambda lab, count: _alone(lab, count, ("diloco(64)", "ddp"), 100, [ALONE]),
    ),
    _loss_case("sync-diloco-loss", "diloco(64)", goal=1.15),
    _loss_case("sync-auto-loss", "auto", goal=1.3),
    _hosts_case("sync-hierarchical", "allreduce", _DDP, mbit=1000, ranks=2, goal=0.6, flags=ONE_THREAD),
]
