"""The journal of a part of a job, and the state that follows from it."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.node.files import write_json
from paceline.node.journal import records as journal
from paceline.node.journal.state import FINAL, reduce
from paceline.node.rundir import directory
from paceline.node.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.node.journal.records import Record

BEFORE = {"job": "it", "state": "STARTING", "agent": {"pid": 7}, "created": 5.0, "ranks": [], "failure": None}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.spare.write_bytes(bytes(1024))
    return run


def state(**status: Any) -> Any:
    return {"event": "state", "status": status}


def rank(local: int, **more: Any) -> Any:
    return {"name": f"it-{local}", "rank": local, "local_rank": local, "state": "STARTING", "pid": 0, **more}


def finished(at: str = "SUCCEEDED", **more: Any) -> Any:
    return {"event": "finished", "state": at, "exit_code": 0, "failure": None, "others": [], **more}


def events(run: RunDirectory) -> list[str]:
    return [record["event"] for record in journal.read(run.journal)[0]]


def test_a_state_follows_from_the_records(run: RunDirectory) -> None:
    assert run.read_status() is None, "nothing has happened"
    run.append(state(**BEFORE))
    (first,), _ = run.append({"event": "started", "attempt": 0, "world_size": 2, "logs": []})
    run.append({"event": "ranks", "ranks": [rank(0), rank(1)]}, state(state="RUNNING"))
    run.append({"event": "started", "attempt": 1, "world_size": 2, "logs": []})
    run.append({"event": "ranks", "ranks": [rank(1, state="RUNNING", pid=9)]})
    ranks = [rank(0), rank(1, state="RUNNING", pid=9)]
    assert run.read_status() == {**BEFORE, "state": "RUNNING", "started": first["time"], "ranks": ranks}
    (last,), _ = run.append(finished())
    assert run.read_status() == {
        **BEFORE, "state": "SUCCEEDED", "started": first["time"], "ranks": ranks, "exit_code": 0, "others": [],
        "finished": last["time"], "waiting": None,
    }  # fmt: skip


def test_status_json_is_a_cache(run: RunDirectory) -> None:
    """It is read in place of the records that it holds; what came later counts, and without it all of them."""
    (_, end) = run.append(state(**BEFORE))
    run.write_status({"state": "STARTING", "job": "cached"}, end)
    assert run.read_status() == {"state": "STARTING", "job": "cached"}
    run.append(state(state="RUNNING"))
    assert run.read_status() == {"state": "RUNNING", "job": "cached"}
    for damage in (b"", b'{"state": "STAR', b'{"state": "FAILED", "journal": 3, "v": 99}', b'{"v": 1, "journal": "x"}'):
        run.status.write_bytes(damage)
        assert run.read_status() == {**BEFORE, "state": "RUNNING"}
    run.status.unlink()
    assert run.read_status() == {**BEFORE, "state": "RUNNING"}


def test_a_damaged_status_without_records_is_damaged(run: RunDirectory) -> None:
    run.status.write_bytes(b"{")
    assert run.read_status() is None
    with pytest.raises(ValueError, match=r"status\.json"):
        run.load_status()


def test_another_agent_begins_anew(run: RunDirectory) -> None:
    run.append(state(**BEFORE), finished("FAILED"))
    run.append({"event": "reopened"})
    assert run.read_status() is None
    run.append(state(job="it", state="STARTING"))
    assert run.read_status() == {"job": "it", "state": "STARTING"}


def test_a_torn_line_loses_nothing_else(run: RunDirectory) -> None:
    run.append(state(**BEFORE))
    before, end = journal.read(run.journal)
    with run.journal.open("ab") as file:
        file.write(b'{"v": 1, "time": 3.0, "event": "wa')
    assert journal.read(run.journal) == (before, end), "it may not be complete yet"
    run.append({"event": "warm"})
    assert events(run) == ["state", "warm"]
    assert [record["event"] for record in journal.read(run.journal, end)[0]] == ["warm"]


def test_readers_skip_what_they_do_not_know(run: RunDirectory) -> None:
    lines: list[Any] = [
        {"v": 1, "time": 1.0, **state(**BEFORE), "mood": "good"}, {"v": 2, "time": 1.0, **state(state="FAILED")},
        {"v": 1, "time": 1.0, "event": "landed", "where": 3}, 5, {"event": "warm"}, {"time": 1.0}, None,
        {"v": 1, "time": 1.0, "event": "state"}, {"v": 1, "time": 1.0, "event": "ranks", "ranks": [{}]},
        {"v": "1", "time": 1.0, **finished()}, {"v": 1, "time": 2.0, "event": "finished"},
        {"v": 1, "time": 1.0, "event": "started", "attempt": 0},
        {"v": 1, "time": 1.0, "event": "started", "attempt": 0, "logs": [{"rank": 0}]},
    ]  # fmt: skip
    run.journal.write_text("\n".join(map(json.dumps, lines)) + "\n\n[" + "[" * 100_000 + "\n")
    assert events(run) == ["state", "landed", "state", "ranks", "finished"]
    assert run.read_status() == BEFORE


@pytest.mark.parametrize("room", [0, 10])
def test_on_a_full_disk_the_spare_makes_space(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    real, space = os.write, room

    def write(fd: int, data: bytes) -> int:
        nonlocal space
        space += 1024 if not run.spare.exists() else 0
        if not space:
            raise OSError(errno.ENOSPC, "full")
        count = real(fd, data[:space])
        space -= count
        return count

    monkeypatch.setattr(os, "write", write)
    run.append({"event": "warm"})
    assert not run.spare.exists()
    run.append(finished())
    monkeypatch.undo()
    assert events(run) == ["warm", "finished"]


def test_on_a_full_disk_the_spare_makes_space_for_the_status(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: object) -> None:
        if run.spare.exists():
            raise OSError(errno.ENOSPC, "full")
        write_json(path, content)

    monkeypatch.setattr(directory, "write_json", write)
    run.write_status(BEFORE, 0)  # type: ignore[arg-type]
    assert run.read_status() == BEFORE and not run.spare.exists()


def test_a_full_disk_without_a_spare_is_no_error(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append({"event": "warm"})
    run.spare.unlink()
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    run.append(finished())
    monkeypatch.undo()
    run.append({"event": "warm"})
    assert events(run) == ["warm", "warm"]


# -- any records -------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
STATES = st.sampled_from(["PENDING", "STARTING", "RUNNING", "RESTARTING", *FINAL])
RECORDS = st.one_of(
    st.fixed_dictionaries({
        "event": st.just("state"),
        "status": st.fixed_dictionaries({}, optional={"state": STATES, "waiting": VALUES, "ranks": st.just([])}),
    }),
    st.fixed_dictionaries({
        "event": st.just("ranks"),
        "ranks": st.lists(st.builds(rank, st.integers(0, 3), pid=st.integers(1, 9)), max_size=3),
    }),
    st.builds(finished, st.sampled_from(FINAL)),
    st.just({"event": "reopened"}),
    st.fixed_dictionaries({"event": st.sampled_from(["waiting", "cold", "landed"]), "why": st.text(max_size=5)}),
)  # fmt: skip


def written(records: list[Any]) -> list[Record]:
    lines = [json.dumps({"v": 1, "time": float(number), **it}).encode() for number, it in enumerate(records)]
    return journal.parsed(lines)


@given(st.lists(RECORDS, max_size=12), st.integers(0, 12))
def test_a_state_is_the_same_from_any_cache(records: list[Any], at: int) -> None:
    """Whatever was folded before, the rest gives the same; and what is written down is what is read."""
    folded = written(records)
    whole = reduce({}, folded)
    assert reduce(json.loads(json.dumps(reduce({}, folded[:at]))), folded[at:]) == whole
    last = [it for it in folded if it["event"] in ("finished", "reopened") or "state" in it.get("status", {})]
    if last and last[-1]["event"] == "finished":
        assert whole["state"] == last[-1]["state"]
        assert whole["finished"] == last[-1]["time"]
    ranks = [it["local_rank"] for it in whole.get("ranks", ())]
    assert len(ranks) == len(set(ranks))


@given(
    st.lists(VALUES | st.dictionaries(st.sampled_from(["event", "status", "ranks", "v", "time"]), VALUES), max_size=6)
)
def test_no_record_breaks_a_reader(lines: list[Any]) -> None:
    parsed = journal.parsed(json.dumps(line).encode() for line in lines)
    reduce({}, parsed)
    names = ["state", "ranks", "finished", "reopened"]
    reduce({}, written([{**line, "event": name} for line in lines if isinstance(line, dict) for name in names]))


@given(st.lists(RECORDS, max_size=6), st.integers(0, 2000))
def test_any_prefix_of_a_journal_is_one(tmp_path_factory: pytest.TempPathFactory, records: list[Any], cut: int) -> None:
    """Cut anywhere, as when the writer is killed: what is complete is read, and reading goes on where it stopped."""
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    whole, _ = run.append(*records)
    data = run.journal.read_bytes()
    run.journal.write_bytes(data[:cut])
    first, offset = journal.read(run.journal)
    assert first == json.loads(json.dumps(whole[: len(first)]))
    with run.journal.open("ab") as file:
        file.write(data[cut:])
    rest, end = journal.read(run.journal, offset)
    assert (first + rest, end) == (json.loads(json.dumps(whole)), len(data))
