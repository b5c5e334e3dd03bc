"""Reading logs: merged, from the end, since a time, and while they grow."""

from __future__ import annotations

import itertools
import json
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import eventually

from paceline.node.eventloop.loop import Loop
from paceline.node.logs import time_index
from paceline.node.logs.following import Event, updates
from paceline.node.logs.query import LogLines, LogQuery
from paceline.node.logs.reader import attempts, read
from paceline.node.rundir.directory import RunDirectory

# Who writes what: any bytes, with and without line ends, and an empty write for a moment in which nothing is noted.
WRITES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from("oe"),
        st.text("ab\n\r\xff", max_size=6).map(lambda text: text.encode("latin-1")),
    ),
    max_size=40,
)


class Attempt:
    """Log files with a time index in which each write has a time of its own: 1, 2, 3 …"""

    def __init__(self, path: Path, number: int = 0) -> None:
        self.run = RunDirectory(path)
        self.number = number
        self.run.prepare_attempt(number)
        self.clock = itertools.count(1)
        self.index = self.run.times(number)
        self.sizes: dict[str, int] = {}

    def log(self, rank: int, stream: str) -> Path:
        return self.run.log(self.number, rank, "out" if stream == "o" else "err")

    def begins(self, ranks: int) -> None:
        """Note in the journal that ranks with two streams write."""
        logs = [
            {
                "rank": rank, "local_rank": rank, "out": str(self.log(rank, "o")), "err": str(self.log(rank, "e")),
                "error": str(self.run.error(self.number, rank)),
            }
            for rank in range(ranks)
        ]  # fmt: skip
        self.run.append({"event": "started", "attempt": self.number, "world_size": ranks, "logs": logs})

    def write(self, rank: int, stream: str, data: bytes) -> int:
        """Write, note it, and return the time."""
        now = next(self.clock)
        with open(self.log(rank, stream), "ab") as file:
            file.write(data)
        self.sizes[f"{rank}{stream}"] = self.log(rank, stream).stat().st_size
        with open(self.index, "a") as index:
            if now % 5 == 1:
                index.write(f"={now}.000 {' '.join(f'{k}:{s}' for k, s in self.sizes.items())}\n")
            else:
                index.write(f"{now}.000 {rank}{stream}:{self.sizes[f'{rank}{stream}']}\n")
        return now


def expected(
    writes: list[tuple[int, str, bytes]],
) -> tuple[list[tuple[int, int, str, bytes]], set[tuple[int, str, bytes]]]:
    """Whole lines as (time of their end, rank, stream, line), and the unfinished ones."""
    rest: dict[tuple[int, str], bytes] = {}
    lines = []
    for now, (rank, stream, data) in enumerate(writes, start=1):
        *whole, rest[rank, stream] = (rest.get((rank, stream), b"") + data).split(b"\n")
        lines += [(now, rank, stream, line + b"\n") for line in whole]
    return lines, {(rank, stream, line) for (rank, stream), line in rest.items() if line}


def split(texts: list[LogLines]) -> list[tuple[int, str, bytes]]:
    lines = []
    for text in texts:
        parts = text.text.split(b"\n")
        lines += [(text.rank, text.stream, part + b"\n") for part in parts[:-1]]
        lines += [(text.rank, text.stream, parts[-1])] if parts[-1] else []
    return lines


@settings(max_examples=60, deadline=None)
@given(WRITES, st.integers(0, 12), st.integers(0, 45))
def test_every_line_comes_once_in_the_order_of_time(
    writes: list[tuple[int, str, bytes]], tail: int, since: int
) -> None:
    with TemporaryDirectory() as folder:
        attempt = Attempt(Path(folder))
        for write in writes:
            attempt.write(*write)
        attempt.index.touch()
        lines, rest = expected(writes)
        whole = split(list(read(Path(folder), LogQuery(None, timed=True))))
        assert whole[: len(lines)] == [line[1:] for line in lines]
        assert set(whole[len(lines) :]) == rest and len(whole) == len(lines) + len(rest)
        assert split(list(read(Path(folder), LogQuery(None, tail=tail)))) == whole[len(whole) - min(tail, len(whole)) :]
        late = [line[1:] for line in lines if line[0] >= since] + whole[len(lines) :]
        assert split(list(read(Path(folder), LogQuery(None, since=since)))) == late
        for rank in range(4):
            mine = [line for line in whole if line[0] == rank]
            assert split(list(read(Path(folder), LogQuery((rank,))))) == mine
            assert split(list(read(Path(folder), LogQuery((rank,), tail=2)))) == mine[-2:]


@settings(max_examples=20, deadline=None)
@given(WRITES, st.booleans())
def test_a_follower_reads_what_is_written_meanwhile(writes: list[tuple[int, str, bytes]], raw: bool) -> None:
    with TemporaryDirectory() as folder:
        attempt = Attempt(Path(folder))
        for rank, stream in itertools.product(range(4), "oe"):
            attempt.log(rank, stream).touch()
        attempt.index.touch()
        attempt.begins(4)
        half = len(writes) // 2
        for write in writes[:half]:
            attempt.write(*write)
        with _held(Path(folder)) as lock:
            texts: list[LogLines] = []
            follower = threading.Thread(
                target=lambda: texts.extend(read(Path(folder), LogQuery(None, follow=True, raw=raw)))
            )
            follower.start()
            for write in writes[half:]:
                attempt.write(*write)
            lock.release()
            follower.join()
        for rank, stream in itertools.product(range(4), "oe"):
            data = b"".join(text.text for text in texts if (text.rank, text.stream) == (rank, stream))
            assert data == attempt.log(rank, stream).read_bytes()
        assert raw or all(b"\n" in text.text[-1:] or text in _lasts(texts) for text in texts)


def _lasts(texts: list[LogLines]) -> list[LogLines]:
    """The last text of each log, the only one that may have no line end."""
    return list({(text.rank, text.stream): text for text in texts}.values())


class _held:
    """The lock of a job, held as an agent does."""

    def __init__(self, path: Path) -> None:
        import fcntl

        self._file = open(RunDirectory(path).lock, "w")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        self._file.close()

    def __enter__(self) -> _held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def test_the_index_tells_when_lines_were_written(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.write(0, "o", b"a\nb")
    attempt.write(1, "o", b"c\n")
    attempt.write(0, "o", b"\n")
    found = [(text.time, text.text) for text in read(tmp_path, LogQuery(None, timed=True))]
    assert found == [(1.0, b"a\n"), (2.0, b"c\n"), (3.0, b"b\n")]


def test_processes_that_were_not_started_again_are_read_where_they_ended(tmp_path: Path) -> None:
    RunDirectory(tmp_path).spec.write_text('{"framework": "indexed"}')
    first, second = Attempt(tmp_path, 0), Attempt(tmp_path, 1)
    first.write(0, "o", b"early 0\n")
    first.write(1, "o", b"early 1\n")
    second.write(1, "o", b"late 1\n")
    assert [text.text for text in read(tmp_path, LogQuery(None))] == [b"early 0\n", b"late 1\n"]
    assert [text.text for text in read(tmp_path, LogQuery(None, attempt=1))] == [b"late 1\n"]
    assert attempts(tmp_path) == [0, 1]
    RunDirectory(tmp_path).spec.write_text('{"framework": "torch"}')  # its ranks are all started again, others perhaps
    assert [text.text for text in read(tmp_path, LogQuery(None))] == [b"late 1\n"]


@pytest.mark.parametrize("damage", [b"", b"17", b"=", b"x 0o:5\n", b"5.0 0o:\n", b"\n\n"])
def test_a_damaged_index_loses_no_line(tmp_path: Path, damage: bytes) -> None:
    attempt = Attempt(tmp_path)
    attempt.write(0, "o", b"a\n")
    attempt.index.write_bytes(damage)
    attempt.log(1, "o").write_bytes(b"b\n")
    assert sorted(text.text for text in read(tmp_path, LogQuery(None))) == [b"a\n", b"b\n"]


def test_long_logs_are_read_from_the_end(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    long = b"x" * 200_000
    attempt.write(0, "o", b"first\n" + long + b"\nlast\n")
    query = LogQuery(None, tail=2)
    assert b"".join(text.text for text in read(tmp_path, query)) == long + b"\nlast\n"
    assert [text.text for text in read(tmp_path, LogQuery(None, tail=0))] == []


def test_logs_that_were_emptied_or_deleted(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.write(0, "o", b"a much longer line\n")
    attempt.write(1, "o", b"b\n")
    attempt.log(0, "o").write_bytes(b"c\n")  # as whoever opens /dev/stdout anew does
    assert sorted(text.text for text in read(tmp_path, LogQuery(None))) == [b"b\n", b"c\n"]
    attempt.log(1, "o").unlink()
    assert [text.text for text in read(tmp_path, LogQuery(None))] == [b"c\n"]


def test_the_agent_notes_sizes_as_files_grow(tmp_path: Path) -> None:
    loop, path, index = Loop(), tmp_path / "log", tmp_path / "times"
    path.touch()
    noting = time_index.TimeIndex(loop)
    noting.start(index, {path: b"0o"})

    def noted(size: int) -> None:
        loop.run_until(lambda: {b"0o": size} in [sizes for _, sizes in time_index.moments(index)], 60)
        assert {b"0o": size} in [sizes for _, sizes in time_index.moments(index)]

    for size in (1, 2, 3):
        with open(path, "ab") as file:
            file.write(b"x")
        noted(size)
    os.truncate(path, 0)
    path.write_bytes(b"xxxxx")
    noting.end()
    *_, (_, last) = time_index.moments(index)
    assert last == {b"0o": 5}


def test_an_index_is_entered_near_a_time(tmp_path: Path) -> None:
    index = tmp_path / "times"
    with open(index, "w") as file:
        for now in range(200_000):
            file.write(f"{'=' if now % 1000 == 0 else ''}{now}.000 0o:{now * 10}\n")
    for time in (-1, 0, 1, 999, 1000, 1001, 123_456, 10**9):
        begin = time_index.find(index, lambda when, _, time=time: when <= time)
        when, sizes = next(time_index.moments(index, begin))
        assert when == max(0, min(time // 1000, 199) * 1000) and sizes == {b"0o": when * 10}


@pytest.mark.parametrize("poll", [None, 0.05])
def test_a_follower_reads_a_long_journal_to_its_end(tmp_path: Path, poll: float | None) -> None:
    """Nothing wakes it: all has been written before, and the agent is gone."""
    run = RunDirectory(tmp_path)
    records = [{"event": "note", "number": number, "text": "x" * 10_000} for number in range(100)]
    lines = [json.dumps({"v": 1, "time": 0.0, **record}) + "\n" for record in [*records, {"event": "finished"}]]
    run.journal.write_text("".join(lines))
    lifeline, ours = os.pipe()
    os.close(ours)
    found = [it for it in updates(run, lifeline, poll=poll) if isinstance(it, Event)]
    os.close(lifeline)
    assert [it.details.get("number") for it in found] == [*range(100), None]
    assert found[-1].name == "finished"


def test_loop_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, called, now = Loop(), [], monotonic()
    with monkeypatch.context() as frozen:  # as if both were set at one moment
        frozen.setattr("time.monotonic", lambda: now)
        loop.after(0.02, lambda: called.append("late"))
        loop.after(0.0, lambda: called.append("soon"))
    assert loop.run_until(lambda: len(called) == 2, 60)
    assert called == ["soon", "late"]
    loop.after(0.0, lambda: called.append("again"))
    eventually(lambda: loop.run_until(lambda: "again" in called, 1), "the timer has come")
