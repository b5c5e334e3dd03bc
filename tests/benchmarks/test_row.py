"""The arithmetic of ratios, interleaving and failures; nothing is timed."""

import pytest
from benchmarks.case import Case, Goal, Side
from benchmarks.report import as_json, table
from benchmarks.row import Row, Spread, measure, ratios
from benchmarks.sample import Failed, Sample, Skipped


def samples(*seconds):
    return [Sample(s) for s in seconds]


def a_case(ours, other, goal=None):
    return Case("row", "some work", Side("ours", ours), Side("other", other), goal)


def test_a_pair_gives_one_ratio():
    assert ratios(samples(1, 3), samples(4, 6)) == [0.25, 0.5]
    with pytest.raises(ValueError):
        ratios(samples(1), samples(1, 2))


def test_a_ratio_of_requests():
    case = Case("row", "calls", Side("ours"), Side("other"), is_count=True)
    assert Row(case, [Sample(60.0, requests=6)], [Sample(60.0, requests=24)]).ratios == [0.25]


def test_a_ratio_of_memory():
    case = Case("row", "memory", Side("ours"), Side("other"), is_memory=True)
    assert Row(case, [Sample(5.0, megabytes=300)], [Sample(4.0, megabytes=1200)]).ratios == [0.25]


def test_spread():
    assert Spread.of([0.5, 0.1, 0.4]) == Spread(0.4, 0.1, 0.5)
    assert Spread.of([0.2, 0.4]) == Spread(pytest.approx(0.3), 0.2, 0.4)
    assert Spread.of([]) is None


def test_the_ratio_is_of_pairs_not_of_medians():
    # The machine was half as fast from the second pair on: each ratio is still 0.5.
    row = Row(a_case(None, None), samples(1, 2, 2), samples(2, 4, 4))
    assert Spread.of(row.ratios) == Spread(0.5, 0.5, 0.5)
    assert row.pairs == 3


@pytest.mark.parametrize(
    ("goal", "ratio", "seconds", "met"),
    [
        (Goal(0.5), 0.5, 9.0, True),
        (Goal(0.5), 0.51, 0.0, False),
        (Goal(seconds=0.2), None, 0.2, True),
        (Goal(seconds=0.2), None, 0.3, False),
        (Goal(0.5, 0.2), 0.4, 0.3, False),
        (Goal(0.5), None, None, False),
    ],
)
def test_goal(goal, ratio, seconds, met):
    assert goal.is_met(ratio, seconds) is met


def test_a_goal_of_losses_is_one_of_the_pair_that_differs_most():
    case = a_case(None, None, Goal(apart=1e-6))
    row = Row(case, [Sample(1.0, loss=2.0), Sample(1.0, loss=1.0)], [Sample(1.0, loss=2.0), Sample(1.0, loss=1.0001)])
    assert row.is_goal_met is False
    assert "≤ 1e-06 apart, missed: 0.0001 " in table([row])
    assert Row(case, samples(1), samples(1)).is_goal_met is False, "nothing was measured"


@pytest.mark.parametrize(("megabytes", "met"), [(10.0, True), (10.1, False), (None, False)])
def test_goal_of_memory(megabytes, met):
    goal = Goal(seconds=0.01, megabytes=10)
    assert goal.is_met(None, 0.01, megabytes) is met
    assert str(goal) == "≤ 10 ms, ≤ 10 MB"


def test_goal_of_a_delay():
    row = Row(a_case(None, None, Goal(beyond=0.5)), samples(1.4, 2.2, 9), samples(1, 2, 2))
    assert row.is_goal_met is True and str(row.case.goal) == "≤ 500 ms more"
    assert Row(row.case, samples(1.6), samples(1)).is_goal_met is False


def test_both_sides_are_warmed_up_and_then_take_turns():
    calls = []

    def side(name, first):
        durations = iter((first, 1.0, 2.0, 3.0))
        return lambda _lab: calls.append(name) or Sample(next(durations))

    row = measure(a_case(side("A", 50.0), side("B", 70.0)), 3, None, lambda _: None)
    assert "".join(calls) == "ABABABAB"
    assert [s.seconds for s in row.paceline] == [1, 2, 3], "the warm-up is not counted"
    assert row.ratios == [1, 1, 1]


def test_a_case_that_takes_long_is_measured_once():
    calls = []
    ours, other = (lambda _, name=name: calls.append(name) or Sample(1.0, megabytes=5) for name in "AB")
    case = Case("row", "long work", Side("ours", ours), Side("other", other), Goal(megabytes=5), once=True)
    row = measure(case, 3, None, lambda _: None)
    assert "".join(calls) == "AB"
    assert row.is_goal_met is True
    assert "1.000 s (5.0 MB)" in table([row])


def test_a_program_may_measure_both_sides_together():
    def together(_lab, pairs):
        for _ in range(pairs):
            yield Sample(1.0), Sample(4.0)

    row = measure(Case("row", "work", Side("ours"), Side("other"), together=together), 3, None, lambda _: None)
    assert row.ratios == [0.25] * 3
    assert row.pairs == 3


def test_a_failure_of_both_together_keeps_the_pairs_before():
    def together(_lab, _pairs):
        yield Sample(1.0), Sample(2.0)
        raise Failed("exit code 3: boom")

    row = measure(Case("row", "work", Side("ours"), Side("other"), together=together), 3, None, lambda _: None)
    assert (row.error, row.pairs) == ("exit code 3: boom", 1)


def test_a_failure_is_an_error_and_no_number():
    answers = iter((Sample(1.0), Sample(1.0), Failed("exit code 3: boom")))

    def flaky(_lab):
        answer = next(answers)
        if isinstance(answer, Failed):
            raise answer
        return answer

    row = measure(a_case(lambda _: Sample(1.0), flaky, Goal(2.0)), 3, None, lambda _: None)
    assert row.error == "other: exit code 3: boom"
    assert row.pairs == 1, "the pair whose one side failed is left out"
    text = table([row])
    assert "| error " in text
    assert "met" not in text
    assert text.endswith("row: other: exit code 3: boom")
    assert as_json({}, [row])["rows"][0]["goal_met"] is None


@pytest.mark.parametrize(("seconds", "text"), [(2.0, "2.000 s"), (0.1, "0.100 s"), (0.0312, "31.20 ms")])
def test_short_times_are_milliseconds(seconds, text):
    assert f"it: {text} " in table([Row(Case("row", "work", None, Side("it")), other=samples(seconds))])


def test_table_and_json():
    case = Case("row", "some work", Side("ours", None), Side("other", None), Goal(0.7))
    row = Row(case, [Sample(1.0, 2.0), Sample(1.5, 3.0)], [Sample(2.0), Sample(2.0)])
    cells = [cell.strip() for cell in table([row]).splitlines()[-1].strip("|").split("|")]
    assert cells == [
        "row", "some work", "1.250 s (CPU 2.50 s)", "other: 2.000 s", "0.625 (0.500-0.750)", "≤ 0.70, met", "2",
    ]  # fmt: skip
    [written] = as_json({}, [row])["rows"]
    assert written["ratio"] == {"median": 0.625, "low": 0.5, "high": 0.75}
    assert written["goal_met"] is True


def test_a_reference_time_has_no_ratio():
    row = measure(Case("ref", "a limit", None, Side("it", lambda _: Sample(1.0))), 2, None, lambda _: None)
    assert (row.ratios, row.pairs, row.is_goal_met) == ([], 2, None)
    assert "it: 1.000 s" in table([row])


def test_a_row_that_this_machine_cannot_measure_is_no_failure():
    def needs_more(lab):
        raise Skipped("needs 2 GPUs, and this machine has none")

    row = measure(a_case(needs_more, needs_more, Goal(0.5)), 3, None, lambda text: None)
    assert (row.error, row.is_goal_met) == ("", None)
    assert "| skipped " in table([row])
    assert table([row]).endswith("row: needs 2 GPUs, and this machine has none")
    [written] = as_json({}, [row])["rows"]
    assert (written["skipped"], written["error"]) == ("needs 2 GPUs, and this machine has none", None)
