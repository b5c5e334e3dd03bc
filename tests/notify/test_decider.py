"""Each event is told once per job and receiver, in any order of events; times are those of no clock."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli.screens.cases import NOW, job
from tests.tiers import examples

from paceline.job.job import Job
from paceline.job.settings import Receiver
from paceline.notify.decider import Decider, Mark
from paceline.notify.service import Silence

ALL = {"all": Receiver.validated({"webhook": "https://x"})}


def at(state: str, time: float = NOW, name: str = "it", **changes: Any) -> Job:
    """A job in a state, one of HUNG and SLOW too; one that has ended did so at this time."""
    if state == "HUNG":
        found = job(name, waiting={"problem": "it hangs: rank 1 is late"}, **changes)
        vars(found).update(waiting="it hangs: rank 1 is late")
    else:
        found = job(name, "RUNNING" if state == "SLOW" else state, **changes)
    vars(found).update(slow=["data"] if state == "SLOW" else [], finished=time if found.is_over else None)
    return found


def told(decider: Decider, job: Job, now: float) -> list[str]:
    return [due.event for due in decider.decide([job], now)]


def restarted(decider: Decider, now: float, receivers: dict[str, Receiver] = ALL) -> Decider:
    """The decider of the next process, which knows what was kept."""
    kept = msgspec.json.decode(msgspec.json.encode(decider.marks()), type=list[Mark])
    return Decider(receivers, now, kept)


def test_a_job_that_had_ended_before_is_not_told_and_one_that_ends_at_once_is() -> None:
    decider = Decider(ALL, NOW)
    assert not told(decider, at("FAILED", NOW - 1, "old"), NOW + 1)
    assert told(decider, at("FAILED", NOW + 1, "short"), NOW + 2) == ["failed"]
    assert told(decider, at("STOPPED", NOW + 3, "other"), NOW + 3) == ["ended"]


def test_what_ends_while_nobody_watches_is_told_if_it_was_seen_before() -> None:
    decider = Decider(ALL, NOW)
    told(decider, at("RUNNING"), NOW)
    later = restarted(decider, NOW + 1000)
    assert told(later, at("FAILED", NOW + 500), NOW + 1001) == ["failed"]
    assert not told(restarted(later, NOW + 2000), at("FAILED", NOW + 500), NOW + 2001)


def test_a_receiver_that_is_new_is_not_told_what_was_before_it() -> None:
    decider = Decider(ALL, NOW)
    told(decider, at("FAILED", NOW + 1), NOW + 2)
    both = {**ALL, "new": ALL["all"]}
    assert not told(restarted(decider, NOW + 3, both), at("FAILED", NOW + 1), NOW + 4)


def test_only_what_a_receiver_wants() -> None:
    wants = {
        "failed": {"on": "failed"}, "lab": {"targets": "lab"}, "vision": {"labels": {"team": "vision"}},
    }  # fmt: skip
    decider = Decider({name: Receiver.validated({"mail": "a@b", **it}) for name, it in wants.items()}, NOW)
    due = decider.decide(
        [
            at("SUCCEEDED", NOW, "a", target="lab"),
            at("FAILED", NOW, "b"),
            at("SUCCEEDED", NOW, "c", labels={"team": "vision", "x": "y"}),
        ],
        NOW,
    )
    assert [(it.receiver, it.job.name) for it in due] == [("lab", "a"), ("failed", "b"), ("vision", "c")]


def test_slow_is_told_once_after_its_time() -> None:
    decider = Decider({"all": Receiver.validated({"mail": "a@b", "slow_for": "5m"})}, NOW)
    assert not told(decider, at("SLOW"), NOW)
    assert not told(decider, at("SLOW"), NOW + 299)
    assert not told(decider, at("RUNNING"), NOW + 300)  # it has recovered
    assert not told(decider, at("SLOW"), NOW + 301)
    assert told(decider, at("SLOW"), NOW + 601) == ["slow"]
    assert not told(decider, at("SLOW"), NOW + 9999)


def test_a_hang_that_comes_back_is_told_again_after_ten_minutes() -> None:
    decider = Decider(ALL, NOW)
    assert told(decider, at("HUNG"), NOW) == ["hung"]
    assert not told(decider, at("LOST"), NOW + 700)  # no answer is none
    assert not told(decider, at("HUNG"), NOW + 701)
    assert not told(decider, at("RUNNING"), NOW + 702)
    assert told(decider, at("HUNG"), NOW + 703) == ["hung"]
    assert not told(decider, at("RUNNING"), NOW + 704)
    assert not told(decider, at("HUNG"), NOW + 705)
    assert told(decider, at("HUNG"), NOW + 1303) == ["hung"]


STATES = ["PENDING", "RUNNING", "RUNNING", "HUNG", "SLOW", "RESTARTING", "LOST", "FAILED", "SUCCEEDED", "STOPPED"]
LOOKS = st.lists(st.tuples(st.sampled_from(STATES), st.sampled_from([1, 300, 601]), st.booleans()), max_size=40)


@settings(max_examples=examples(150, 20_000))
@given(LOOKS)
def test_any_order_of_states_and_restarts(looks: list[tuple[str, int, bool]]) -> None:
    """An oracle that knows the whole past of one job says the same."""
    decider, now = Decider(ALL, NOW), NOW
    last, ended, slow_since, is_slow_told, last_hang, is_hang_told = "", NOW, 0.0, False, 0.0, False
    for state, seconds, restart in looks:
        now += seconds
        if restart:
            decider = restarted(decider, now)
            now += 1
        is_over = state in ("FAILED", "SUCCEEDED", "STOPPED")
        was_over = last in ("FAILED", "SUCCEEDED", "STOPPED")
        if is_over and not was_over:
            ended = now
        expected = []
        if state == "LOST":
            assert not told(decider, at(state), now)
            continue
        if is_over and not was_over:
            expected = ["failed" if state == "FAILED" else "ended"]
        if was_over and not is_over:  # it was started again, and all begins anew
            is_slow_told, last_hang, is_hang_told = False, 0.0, False
        if state != "HUNG":
            is_hang_told = False
        elif not is_hang_told and now - last_hang >= 600:
            is_hang_told, last_hang, expected = True, now, ["hung"]
        if state != "SLOW":
            slow_since = 0.0
        elif not slow_since:
            slow_since = now
        elif not is_slow_told and now - slow_since >= 600:
            is_slow_told, expected = True, ["slow"]
        assert told(decider, at(state, ended), now) == expected
        last = state


def test_a_target_that_does_not_answer_is_said_once_and_a_short_silence_is_not() -> None:
    silence = Silence()
    assert silence.lines({"lab": "down"}, 0.0) == []
    assert silence.lines({}, 10.0) == []
    assert silence.lines({"lab": "down", "oak": "away"}, 20.0) == []
    assert silence.lines({"lab": "down", "oak": "away"}, 40.0) == ["lab: down", "oak: away"]
    assert silence.lines({"lab": "down", "oak": "away for 30 s"}, 60.0) == []
    assert silence.lines({"lab": "down"}, 61.0) == ["oak answers again"]
