"""What nodes write, merged: whatever their clocks say, and whichever of them is late."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.base import Incomplete, LogLines
from paceline.backends.follow import Nodes, arriving, lines, wait
from paceline.job.errors import UserError
from paceline.node.logs.following import Event, Output
from paceline.node.readers import Readers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.node.logs.following import Update


class Lost(UserError):
    """A node does not answer."""


class Source:
    """The lines of a node, and the error after them."""

    def __init__(self, found: list[LogLines], first: UserError | None = None, last: UserError | None = None) -> None:
        self._found, self._first, self._last = found, first, last

    def open(self) -> None:
        if self._first is not None:
            raise self._first

    def __iter__(self) -> Iterator[LogLines]:
        self.open()
        yield from self._found
        if self._last is not None:
            raise self._last


def line(time: float, rank: int, text: str, attempt: int = 0) -> LogLines:
    return LogLines(time, attempt, rank, "o", text.encode())


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(0, 5)), min_size=1, max_size=5))
def test_clocks_lose_no_line_and_keep_the_order_of_each_node(clocks: list[tuple[float, int]]) -> None:
    nodes = {
        rank: [line(skew + number, rank, f"{rank}.{number}") for number in range(count)]
        for rank, (skew, count) in enumerate(clocks)
    }
    found = list(lines({rank: Source(those) for rank, those in nodes.items()}, Lost))
    for rank, those in nodes.items():
        assert [it for it in found if it.rank == rank] == those
    assert len(found) == sum(map(len, nodes.values()))


def shown(nodes: dict[int, Source], *, follow: bool) -> Iterator[LogLines]:
    if not follow:
        return lines(nodes, Lost)
    readers: Readers[int, LogLines] = Readers()
    for rank, source in nodes.items():
        readers.add(rank, source)
    return arriving(readers, Lost)


def test_lines_of_several_nodes_are_in_the_order_of_attempts_and_time() -> None:
    one, other = [line(1, 0, "a"), line(3, 0, "c"), line(0, 0, "e", 1)], [line(2, 1, "b"), line(9, 1, "d")]
    found = lines({0: Source(one), 1: Source(other)}, Lost)
    assert [it.text for it in found] == [b"a", b"b", b"c", b"d", b"e"]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("when", ["first", "last"])
def test_a_node_that_does_not_answer(follow: bool, when: str) -> None:
    nodes = {0: Source([line(1, 0, "a")]), 1: Source([], **{when: Lost("n1 is lost")})}
    found = []
    with pytest.raises(Incomplete, match="n1 is lost; lines of its ranks may be missing"):
        found.extend(shown(nodes, follow=follow))
    assert [it.text for it in found] == [b"a"]


def test_when_no_lines_can_be_read() -> None:
    with pytest.raises(Lost, match="one"):
        lines({0: Source([], Lost("one"))}, Lost)
    with pytest.raises(Lost):
        lines({0: Source([], Lost("one")), 1: Source([], Lost("other"))}, Lost)
    with pytest.raises(UserError, match="no attempt 7"):
        lines({0: Source([]), 1: Source([], UserError("no attempt 7"))}, Lost)


def test_waiting() -> None:
    never = threading.Event()

    def ended() -> Iterator[str]:
        yield "one"
        never.wait()

    readers: Readers[int, str] = Readers()
    readers.add(0, ended())
    seen: list[int] = []
    assert wait(readers, 1, None, seen.append)
    assert (seen[0], seen[-1]) == (0, 1)
    readers = Readers()
    readers.add(0, ended())
    assert not wait(readers, 2, 0.0, seen.append)
    never.set()


# -- the foreground ----------------------------------------------------------------------------------------------------


def failure(rank: int | None, host: str) -> dict[str, Any]:
    return {"rank": rank, "host": host, "message": "it failed"}


def restarting(attempt: int, of: dict[str, Any] | None = None) -> Event:
    return Event("restarting", {"attempt": attempt, "why": None, "failure": of})


def finished(state: str = "SUCCEEDED", of: dict[str, Any] | None = None, took: float = 1.0) -> Event:
    return Event("finished", {"state": state, "failure": of, "took": took, "exit_code": 0})


def all_of(rank: int, restarts: int) -> list[Update]:
    """What a node says of a job that starts again so often."""
    found: list[Update] = []
    for attempt in range(restarts + 1):
        found += [Event("started", {"attempt": attempt, "logs": []})]
        found += [Output(attempt, rank, 0, "both", b"x"), Output(attempt, rank, 0, "both", b"y")]
        found += [Event("stopping", {"why": None}), restarting(attempt) if attempt < restarts else finished()]
    return found


@given(st.integers(1, 4), st.integers(0, 3), st.data())
def test_attempts_are_in_order_however_late_a_node_is(count: int, restarts: int, data: st.DataObject) -> None:
    nodes: Nodes[int] = Nodes()
    rest = {rank: all_of(rank, restarts) for rank in range(count)}
    for rank in rest:
        nodes.enter(rank, f"n{rank}")
    found: list[Update] = []
    while rest:
        rank = data.draw(st.sampled_from(sorted(rest)))
        if rest[rank]:
            found += nodes.take(rank, rest[rank].pop(0))
        else:
            del rest[rank]
            found += nodes.leave(rank)
    found += nodes.finish()
    attempt = 0
    for update in found:
        if isinstance(update, Output):
            assert update.attempt == attempt
        attempt += isinstance(update, Event) and update.name == "restarting"
    outputs = [(it.rank, it.attempt, it.data) for it in found if isinstance(it, Output)]
    assert sorted(outputs) == sorted(
        (rank, attempt, data) for rank in range(count) for attempt in range(restarts + 1) for data in (b"x", b"y")
    )
    names = [it.name for it in found if isinstance(it, Event)]
    assert [names.count(name) for name in ("restarting", "stopping", "finished")] == [restarts, restarts + 1, 1]
    assert names[-1] == "finished"


def entered(*hosts: str, patience: float | None = None) -> Nodes[str]:
    nodes: Nodes[str] = Nodes(patience)
    for host in hosts:
        nodes.enter(host, host, host)
    return nodes


def test_a_node_that_leaves_is_not_waited_for() -> None:
    nodes = entered("a", "b")
    assert list(nodes.take("a", restarting(0))) == []
    assert list(nodes.take("a", Output(1, 0, 0, "both", b"later"))) == []
    restart, later = nodes.leave("b")
    assert isinstance(restart, Event) and isinstance(later, Output)


def test_patience_with_a_node_that_was_lost() -> None:
    nodes, taken = entered("a", "b", patience=7.0), [("a", restarting(0)), None, ("b", restarting(0)), ("", None)]

    def take(seconds: float | None) -> Any:
        found = taken.pop(0)
        if found is None:
            assert seconds is not None and 0 < seconds <= 7
            raise TimeoutError
        return found if found[0] else None

    found = [it for it in nodes.follow(take, nodes.take) if isinstance(it, Event)]
    assert [it.name for it in found] == ["restarting"], "what comes late has been reported"


def test_the_node_that_knows_most_says_how_the_job_ended() -> None:
    nodes = entered("a", "b", "c")
    for host, end in {
        "a": finished("FAILED", failure(None, "b"), took=3.0),
        "b": finished("FAILED", failure(1, "b")),
        "c": finished("STOPPED"),
    }.items():
        assert list(nodes.take(host, end)) == []
    (end,) = nodes.finish()
    assert (end.details["failure"]["rank"], end.details["took"]) == (1, 3.0)


def test_a_node_that_left_before_the_last_attempt_does_not_say_how_the_job_ended() -> None:
    nodes = entered("a", "b")
    for host in ("a", "b"):
        list(nodes.take(host, Event("started", {"attempt": 0, "logs": []})))
    list(nodes.take("a", finished("STOPPED")))
    list(nodes.leave("a"))
    (restart,) = nodes.take("b", restarting(0))
    assert isinstance(restart, Event)
    list(nodes.take("b", Event("started", {"attempt": 1, "logs": []})))
    list(nodes.leave("b"))
    assert list(nodes.finish()) == [], "b was killed"


def test_a_job_that_its_scheduler_starts_again() -> None:
    nodes: Nodes[str] = Nodes()
    nodes.enter("first", start=0)
    list(nodes.take("first", restarting(5)))
    list(nodes.take("first", finished("FAILED", failure(0, "x"))))
    list(nodes.leave("first"))
    nodes.enter("again", start=1)
    assert [it.name for it in nodes.take("again", restarting(0)) if isinstance(it, Event)] == ["restarting"]
    list(nodes.take("again", finished()))
    list(nodes.leave("again"))
    assert [it.details["state"] for it in nodes.finish()] == ["SUCCEEDED"]


def test_what_one_machine_does_names_it_if_there_are_several() -> None:
    nodes = entered("a", "b")
    (event,) = nodes.take("b", Event("queued", {"need": 1, "ahead": 2}))
    assert isinstance(event, Event) and event.details["on"] == "b"
    (event,) = entered("a").take("a", Event("queued", {"need": 1, "ahead": 2}))
    assert isinstance(event, Event) and "on" not in event.details
