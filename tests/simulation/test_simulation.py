"""Thousands of jobs in virtual time, each with faults of its own: what decides is real.

A failure prints the seed, the shortest schedule that fails too, and what happened in it. To see it again:
`Simulation(schedule(SEED), log=[]).run()`.
"""

from __future__ import annotations

import os

import pytest

from paceline.node.rendezvous import silence
from paceline.node.rendezvous.quorum import Membership

from . import resubmit
from .resubmit import Folders
from .scale import costs
from .schedules import Fault, Schedule, Simulation, schedule, shrink, violation

COUNT = int(os.environ.get("PACELINE_SIMULATED", "1000"))  # schedules
FIRST = int(os.environ.get("PACELINE_SIMULATED_FROM", "0"))
EACH = 250

# Schedules that have found a defect, as short as they can be.
FOUND = {
    "a node that joins a running job gave up while the others saved their state": Schedule(
        3, "elastic", nodes=2, restarts=2, join=2.5, grace=25.0, latency=0.1, spread=6.0,
        faults=(Fault(27.86, "interrupt"),),
    ),
    "nodes that were cut off went on once the job had succeeded elsewhere": Schedule(
        8621, "elastic", nodes=4, restarts=0, join=40.0, grace=8.0, latency=0.4, spread=2.0, obeys=False,
        faults=(Fault(6.06, "split", 2, 39.3), Fault(24.74, "suspend all", 1, 0.6)),
    ),
    "a node gave up when its coordinator was about to begin": Schedule(
        4125, "elastic", nodes=3, restarts=0, join=2.5, grace=25.0, latency=0.4, spread=6.0,
        faults=(Fault(28.24, "suspend", 1, 1.1),),
    ),
    "ranks that were being stopped kept their grace while the others went on": Schedule(
        12683, "elastic", nodes=3, join=2.5, grace=25.0, latency=0.1,
        faults=(Fault(4.94, "scale in", 3), Fault(20.45, "split", 3, 90.0), Fault(22.37, "interrupt", 3)),
    ),
    "a node that was suspended until the others had finished took them for dead": Schedule(
        20651, "elastic", nodes=4, restarts=2, join=40.0, grace=8.0, latency=0.1, spread=6.0,
        faults=(Fault(13.77, "suspend", 1, 78.5), Fault(14.75, "kill", 0)),
    ),
    "a node did not know that another one was dead when its coordinator died too": Schedule(
        2700, "elastic", nodes=4, grace=25.0, latency=0.1, spread=6.0, obeys=False,
        faults=(Fault(0.0, "scale out in vain", 2, 5.4, "stopped", 4), Fault(14.16, "kill", 1), Fault(18.77, "kill", 2),
                Fault(19.06, "kill", 0)),
    ),
    "newcomers gave up when the only node of the attempt before was dead": Schedule(
        24142, "elastic", nodes=3, join=40.0, grace=2.0, latency=0.4, spread=6.0, faults=(Fault(9.62, "kill", 3),),
    ),
    "list said STARTING of a job that trained while other nodes were about to join": Schedule(
        230, "elastic", join=2.5, grace=2.0, latency=0.1, spread=6.0, faults=(Fault(30.64, "scale out", 1),),
    ),
    "list said STARTING of a job that trained until its grace was over, since it was suspended at its start": Schedule(
        501042, "elastic", nodes=2, restarts=1, least=2, join=40.0, grace=8.0, latency=0.1, spread=6.0, stubborn=True,
        lingers=1, nproc=2,
        faults=(Fault(0.29, "suspend job", 0, 8.5, "meet", 3), Fault(2.55, "suspend job", 0, 11.1)),
    ),
    "a node that was told to leave, and did not hear it, went on with another one while the rest did too": Schedule(
        34496, "elastic", nodes=3, restarts=2, latency=0.002, spread=6.0, obeys=False,
        faults=(Fault(0.0, "split", 1, 60.0, "start", 4), Fault(16.76, "scale in", 1)),
    ),
    "ranks of a node that was cut off still ran when the others went on": Schedule(
        3981, "elastic", nodes=3, restarts=2, grace=2.0, latency=0.1,
        faults=(Fault(0.0, "split", 2, 60.0, "prepare"), Fault(12.2, "scale out", 3)),
    ),
    "a node did not know of a death shortly after its coordinator had left": Schedule(
        16207, "elastic", nodes=3, restarts=2, latency=0.1, spread=6.0, stubborn=True,
        faults=(Fault(15.29, "scale in"), Fault(16.28, "kill", 1)),
    ),
    "a job was resubmitted that a host did not answer for, while the others ran it": Schedule(
        7, "elastic", least=2, latency=0.1, spread=6.0, stubborn=True, resubmitted=12.7,
        faults=(Fault(0.54, "off", 2, 11.9, "checkpoint"),),
    ),
    "a node left while newcomers were about to begin, and with it what the job had computed": Schedule(
        1200177, "elastic", nodes=4, join=2.5, grace=25.0, latency=0.4, spread=6.0,
        faults=(Fault(0.06, "scale in", after="stopped", nth=2), Fault(10.25, "kill", 3)),
    ),
    "a node gave up although the others, which were dead, could not have gone on without it": Schedule(
        1123554, "elastic", nodes=3, grace=25.0, latency=0.4,
        faults=(Fault(1.67, "kill", 2, after="waiting"), Fault(20.84, "kill", 3)),
    ),
    "list said FAILED of a job whose end only a node knew that was about to join": Schedule(
        2070134, "elastic", restarts=1, grace=2.0, spread=6.0,
        faults=(Fault(0.0, "kill", 2, after="finish"), Fault(34.0, "scale out", 2), Fault(35.07, "kill", 1)),
    ),
    "a node that was suspended while it met its new coordinator took it for one that had just been there": Schedule(
        4017769, "elastic", nodes=4, restarts=1, latency=0.4, nproc=2,
        faults=(Fault(10.65, "kill"), Fault(13.05, "suspend", 2, 60.0)),
    ),
    "list said RESTARTING of a job that trained without a node that was cut off just before that attempt": Schedule(
        21243812, "elastic", nodes=4, restarts=2, least=3, grace=8.0, latency=0.4, spread=6.0,
        faults=(Fault(0.0, "split", seconds=20.1, after="restarting"),),
    ),
    "a rank that started late failed as the others had saved and ended, and that ended the job": Schedule(
        33117280, "elastic", grace=2.0, latency=0.1, spread=6.0, lingers=0,
        faults=(Fault(0.0, "suspend", 1, 18.6, after="go"), Fault(12.27, "scale in", 2)),
    ),
    "a failure counted twice when a node was lost while the next attempt was agreed": Schedule(
        34113374, "elastic", restarts=1, grace=2.0, latency=0.4, lingers=0,
        faults=(Fault(16.24, "fork server ends"), Fault(18.69, "kill", 1)),
    ),
    "a machine whose network came back just when it had been given up went on for seconds beside the others": Schedule(
        36088451, "elastic", restarts=2, join=2.5, grace=2.0, latency=0.1, spread=6.0,
        faults=(Fault(0.0, "one way", 1, 11.5, "go", 4), Fault(11.55, "scale out", 1), Fault(33.71, "preempt", 1, 7.8)),
    ),
    "a coordinator that was suspended went on at once without a node that had just given it up": Schedule(
        40098714, "elastic", nodes=3, grace=25.0, latency=0.1, spread=6.0, obeys=False, lingers=1,
        faults=(Fault(9.52, "suspend", 0, 14.9), Fault(13.1, "split", 2, 7.2)),
    ),
    "what a node had sent before its coordinator was suspended came when it had connected again": Schedule(
        42028361, "replaced", restarts=1, grace=25.0, latency=0.4, nproc=2,
        faults=(Fault(2.41, "off", 0, 12.9, "meet"),),
    ),
    "the coordinator, which was lost later, was named instead of the node that was lost first": Schedule(
        0, nodes=3, grace=2.0, latency=0.1, stubborn=True,
        faults=(Fault(19.91, "kill", 1), Fault(20.45, "reboot", 2, 68.3)),
    ),
    "a machine that was suspended believed that its coordinator had died just now, and went on alone": Schedule(
        1, "elastic", nodes=4, faults=(Fault(12.0, "off", 1, 70.0), Fault(17.0, "kill")),
    ),
    "a node went on alone when one was lost that searched as well, though the job had succeeded elsewhere": Schedule(
        925812, "elastic", nodes=4, grace=2.0, latency=0.4, spread=6.0,
        faults=(Fault(13.46, "one way", 1, 52.6), Fault(30.09, "off", 2, 34.4)),
    ),
    "a coordinator that was off went on with a node that had agreed to the next attempt of the others": Schedule(
        456460, "elastic", nodes=4, restarts=0, grace=8.0, latency=0.1, spread=2.0,
        faults=(Fault(15.49, "off", 0, 69.8), Fault(36.8, "off", 2, 27.9)),
    ),
    "ranks of a node that was cut off still ran when those went on that had lost their coordinator": Schedule(
        880026, "elastic", nodes=4, restarts=2, grace=25.0, latency=0.1, spread=6.0, obeys=False,
        faults=(Fault(10.05, "split", 1, 59.4), Fault(11.95, "kill")),
    ),
    "a resumed job failed as a fork server ended before the next attempt, though it had restarts left": Schedule(
        83511, nodes=3, restarts=1, latency=0.1,
        faults=(Fault(3.76, "suspend job", 2, 0.4), Fault(36.22, "fork server ends", 1, 10.3)),
    ),
    "nodes did not know of a Ctrl-C that came while the job was being suspended, and called the job failed": Schedule(
        83742, nodes=2, restarts=0, grace=2.0, latency=0.002, obeys=False, stubborn=True, lingers=0,
        faults=(
            Fault(0.0, "reboot", 3, 10.4, "sweep"), Fault(0.17, "interrupt", 3, after="terminate", nth=2),
            Fault(17.16, "suspend job", 0, 2.9),
        ),
    ),
}  # fmt: skip


def explain(it: Schedule, why: str) -> str:
    """A report of a schedule that fails."""
    short = shrink(it, lambda other: bool(violation(other)))
    log: list[str] = []
    found = violation(short, log)
    return "\n".join([f"seed {it.seed}: {why}", f"shorter: {short}", *log[-200:], found])


@pytest.mark.soak
@pytest.mark.parametrize("part", range(-(-COUNT // EACH)))
def test_whatever_happens(part: int) -> None:
    for seed in range(FIRST + part * EACH, FIRST + min(COUNT, (part + 1) * EACH)):
        why = violation(it := schedule(seed))
        assert not why, explain(it, why)


def test_what_was_found_once() -> None:
    for name, it in FOUND.items():
        why = violation(it)
        assert not why, f"{name}: {explain(it, why)}"


def test_messages_are_linear_in_the_nodes() -> None:
    for few, many in zip(costs(20), costs(200), strict=True):
        assert few.messages <= 6 * 20
        assert many.messages <= 6 * 200


def test_a_seed_decides_everything() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        violation(schedule(7), log)
    assert logs[0] == logs[1] != []


def test_a_job_without_faults() -> None:
    for kind in ("fixed", "elastic", "replaced"):
        it = Simulation(Schedule(1, kind, nodes=4)).run()
        assert [agent.end for agent in it.job.agents] == [("SUCCEEDED", 0)] * 4


def test_of_two_machines_the_one_that_led_reboots() -> None:
    for seed in range(20):
        it = Schedule(seed, "elastic", join=120.0, recruits=True, faults=(Fault(15.0, "reboot", 0, 15.0),))
        assert Simulation(it).run().job.listed["state"] == "SUCCEEDED"


def test_two_parts_that_go_on_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "has_majority", lambda *_: True)
    it = Schedule(0, "elastic", nodes=4, faults=(Fault(15.0, "split", 0, 60.0),))
    found = {violation(it._replace(seed=seed)).split(" of")[0] for seed in range(20)}
    assert any(why.startswith("attempt") for why in found), found


def test_a_living_node_that_is_taken_for_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "PATIENCE", 1)
    it = Schedule(0, "fixed", nodes=3, faults=(Fault(15.0, "suspend", 1, 30.0),))
    assert "lost" in violation(it)


def test_a_late_rank_that_saves_into_the_folder_of_a_later_job_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Schedule(0, resubmitted=1.0, shared=True, faults=(Fault(0.1, "off", 0, 18.0, "checkpoint"),))
    assert not any(violation(late._replace(seed=seed)) for seed in range(10))
    monkeypatch.setattr(Folders, "is_held", lambda *_: False)
    assert {violation(late._replace(seed=seed)) for seed in range(10)} >= {"job it saves into the folder of job again"}


def test_a_rank_that_comes_back_and_saves_where_a_later_attempt_does_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Schedule(
        26316, "requeued", restarts=2, grace=25.0, latency=0.4,
        faults=(Fault(20.1, "split", 2, 84.2), Fault(21.69, "suspend all", 0, 45.0)),
    )  # fmt: skip
    assert not violation(it)
    monkeypatch.setattr(Folders, "is_held_by", lambda *_: True)
    assert violation(it) == "a checkpoint was saved by another attempt meanwhile"


def test_a_job_that_runs_and_is_resubmitted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resubmit, "refuse_running", lambda *_: None)
    assert "although the job was resubmitted" in violation(Schedule(0, resubmitted=15.0))


def test_a_failing_schedule_is_made_shorter() -> None:
    it = Schedule(0, nodes=4, faults=tuple(Fault(float(at), do) for at, do in enumerate(("kill", "stop", "kill"))))
    shortest = shrink(it, lambda other: any(fault.do == "stop" for fault in other.faults))
    assert shortest == Schedule(0, nodes=2, faults=(Fault(1.0, "stop"),))
