"""Reads the logs of a job's ranks, merged by time: all lines, the last ones, those since a time, and new ones."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.files import Irregular, list_names, read_json
from paceline.node.rundir.directory import RunDirectory

from .following import Output, updates
from .growing_file import CHUNK, GrowingFile
from .query import LogLines
from .time_index import find, moments

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from .query import LogQuery
    from .time_index import Sizes

_LOG = re.compile(r"rank-(\d+)(\.err)?\.log")
_BLOCK = 64 * 1024
_LONGEST = 1024 * 1024  # bytes of a line; a longer line is returned in pieces
_ELSEWHERE = 0.5  # seconds between two looks at what another machine writes
_MOST_INDEX = 8 * 1024 * 1024  # bytes of the time index that are searched for the last lines


class NoLog(Refused):
    """A rank that the job has wrote no log in a run directory."""


def attempts(path: Path) -> list[int]:
    """The attempts of the job in a run directory; all logs of an attempt exist before its time index does."""
    return [attempt for attempt in _folders(path) if "times" in list_names(path / "logs" / str(attempt))]


def ranks(path: Path, attempt: int) -> frozenset[int]:
    """The ranks that have a log of this attempt here."""
    return frozenset(int(match[1]) for match in _logs(path, attempt))


def check(path: Path, query: LogQuery) -> None:
    """Check that the job in a run directory has what is chosen."""
    existing = attempts(path)
    if query.attempt is not None and query.attempt not in existing:
        its = f"its only attempt is {existing[0]}" if len(existing) == 1 else f"its attempts are {_listed(existing)}"
        has = its if existing else "none has started yet"
        raise Refused(f"job {path.name} has no attempt {query.attempt}; {has}; correct --attempt")
    spec = read_json(RunDirectory(path).spec) or {"nproc": 1, "nodes": 1}
    count = spec["nproc"] * spec["nodes"]
    here = sorted({rank for a in existing if query.attempt in (None, a) for rank in ranks(path, a)})
    for rank in sorted(query.ranks or ()):
        if rank >= count:
            has = "rank 0 alone" if count == 1 else f"ranks 0 … {count - 1}"
            raise Refused(f"job {path.name} has {has}, not rank {rank}; correct -i")
        if here and rank not in here:
            wrote = f"but these did: {_listed(here)}"
            raise NoLog(f"rank {rank} of job {path.name} wrote no log here, {wrote}; correct -i")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def read(path: Path, query: LogQuery, is_over: Callable[[], bool] | None = None) -> Iterator[LogLines]:
    """The chosen lines of the job in a run directory, with `follow` also those that it still writes, each line once."""
    if query.follow:
        yield from _follow(path, query, is_over)
        return
    for attempt, chosen in _chosen(path, query):
        with contextlib.closing(_Sources(path, attempt, chosen)) as sources:
            yield from last(_backlog(sources, query, is_over=True), query.tail)


def _folders(path: Path) -> list[int]:
    return sorted(int(name) for name in list_names(path / "logs") if name.isdigit())


def _logs(path: Path, attempt: int) -> list[re.Match[str]]:
    """The log files of an attempt, stdout before stderr: lines of the same time are shown in this order."""
    found = [match for match in map(_LOG.fullmatch, list_names(path / "logs" / str(attempt))) if match is not None]
    return sorted(found, key=lambda match: (int(match[1]), match[2] or ""))


def _chosen(path: Path, query: LogQuery) -> list[tuple[int, frozenset[int]]]:
    """The attempts to read, and the ranks to read there.

    Of independent processes those that were not started again have an earlier last attempt.
    """
    existing = [a for a in attempts(path) if query.attempt in (None, a)]
    if (read_json(RunDirectory(path).spec) or {}).get("framework") != "indexed":
        existing = existing[-1:]
    everywhere = (rank for attempt in existing for rank in ranks(path, attempt))
    remaining = frozenset(everywhere if query.ranks is None else query.ranks)
    found = []
    for attempt in reversed(existing):
        here = remaining & ranks(path, attempt)
        if here:
            found.append((attempt, here))
            remaining -= here
    return found[::-1]


class Rest:
    """Completes lines."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of an incomplete line
        self.size = 0  # bytes of it

    def add(self, data: bytes) -> bytes:
        """The lines that are complete now; of a line that has become too long, what there is of it, without an end."""
        end = data.rfind(b"\n") + 1
        if not end:
            self.size += len(data)
            if self.size < _LONGEST:
                if data:
                    self._parts.append(data)
                return b""
            end = len(data)
        lines = b"".join([*self._parts, data[:end]])
        self._parts = [data[end:]] if end < len(data) else []
        self.size = len(data) - end
        return lines

    def take(self) -> bytes:
        """The beginning of an incomplete line."""
        data = b"".join(self._parts)
        self._parts, self.size = [], 0
        return data


class _Source:
    """A log file, read line by line.

    Attributes:
        key: its name in the time index.
        lines: have its attempt, rank and stream.
    """

    def __init__(self, path: Path, lines: LogLines) -> None:
        self.lines = lines
        self.key = b"%d%s" % (lines.rank, lines.stream.encode())
        self._file = GrowingFile(path)
        self._rest = Rest()
        self.close = self._file.close

    @property
    def position(self) -> int:
        """The end of the last line that was returned."""
        return self._file.offset - self._rest.size

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._file.status().st_size

    @property
    def changed(self) -> float:
        """When the file was last written to."""
        return self._file.status().st_mtime

    def begin(self, position: int) -> None:
        """Skip to this position."""
        self._file.offset = max(self._file.offset, position)

    def line_at(self, position: int, lines: int = 0) -> int:
        """The position of the line with the byte before `position`, or of the line that many `lines` before it."""
        after = position  # of the end of the last line that was found, or of the last piece of a long one
        for begin in range(_BLOCK * (max(0, position - 1) // _BLOCK), -1, -_BLOCK):
            block = self._file.peek(begin, position - begin)
            end = len(block)
            while end > 0 and ((end := block.rfind(b"\n", 0, end)) >= 0 or after - begin > _LONGEST):
                after = begin + end + 1
                if lines == 0:
                    return after
                lines -= 1
            position = begin
        return 0

    def take(self, when: float, until: int | None = None) -> Iterator[LogLines]:
        """The lines that end before `until`, or before the current end of the file."""
        while until is None or self._file.offset < until:
            data = self._file.read(CHUNK if until is None else min(CHUNK, until - self._file.offset))
            if not data:
                break
            text = self._rest.add(data)
            if text:
                yield self.lines._replace(time=when, text=text)

    def rest(self, when: float) -> Iterator[LogLines]:
        """The beginning of an incomplete line."""
        if data := self._rest.take():
            yield self.lines._replace(time=when, text=data)


class _Sources:
    """The open logs of some ranks of one attempt."""

    def __init__(self, path: Path, attempt: int, chosen: Collection[int] | None) -> None:
        self.times = RunDirectory(path).times(attempt)
        self.opened: dict[Path, _Source] = {}
        for match in _logs(path, attempt):
            rank = int(match[1])
            if chosen is None or rank in chosen:
                log = path / "logs" / str(attempt) / match[0]
                with contextlib.suppress(FileNotFoundError, Irregular):  # deleted just now
                    self.opened[log] = _Source(log, LogLines(0.0, attempt, rank, "e" if match[2] else "o", b""))

    def close(self) -> None:
        """Close them."""
        for source in self.opened.values():
            source.close()


def _backlog(sources: _Sources, query: LogQuery, is_over: bool) -> Iterator[LogLines]:
    """The lines so far, in the order of the time index; incomplete last lines too if the attempt `is_over`."""
    opened = {source.key: source for source in sources.opened.values()}
    begins: dict[bytes, int] = {}
    if query.tail is not None:
        begins = {key: source.line_at(source.size, query.tail) for key, source in opened.items()}
        for key, source in opened.items():
            source.begin(begins[key])
    if len(opened) > 1 or query.since is not None or query.timed:
        yield from _by_index(sources.times, opened, begins, query.since)
    for source in opened.values():
        when = source.changed if is_over else time.time()
        if query.since is None or when >= query.since:
            yield from source.take(when)
            if is_over:
                yield from source.rest(when)


def _by_index(
    times: Path, opened: dict[bytes, _Source], begins: dict[bytes, int], since: float | None
) -> Iterator[LogLines]:
    """The lines that the time index covers."""
    if since is not None:
        start = find(times, lambda when, _: when < since)
    elif begins:
        early = lambda _, sizes: all(sizes.get(key, 0) <= begin for key, begin in begins.items())  # noqa: E731
        start = find(times, early, _MOST_INDEX)
    else:
        start = 0
    before: Sizes | None = {}  # the sizes at `since`
    for when, sizes in moments(times, start):
        if since is not None and before is not None:
            if when < since:
                before.update(sizes)
                continue
            _skip(opened, before)
            before = None
        for key, size in sizes.items():
            if key in opened:
                yield from opened[key].take(when, size)
    if since is not None and before is not None:
        _skip(opened, before)


def _skip(opened: dict[bytes, _Source], sizes: Sizes) -> None:
    """Skip to the first lines that end after these sizes."""
    for key, size in sizes.items():
        if key in opened:
            source = opened[key]
            source.begin(source.line_at(min(size, source.size)))


def last(several: Iterable[LogLines], count: int | None) -> Iterator[LogLines]:
    """The last `count` lines; all for None."""
    if count is None:
        yield from several
        return
    kept: collections.deque[tuple[int, LogLines]] = collections.deque()
    total = 0
    for lines in several:
        number = lines.text.count(b"\n") + (not lines.text.endswith(b"\n"))
        kept.append((number, lines))
        total += number
        while total - kept[0][0] >= count:
            total -= kept.popleft()[0]
            if not kept:
                break
    for _, lines in kept:
        surplus, position = total - count, 0
        while surplus > 0:
            position = lines.text.index(b"\n", position) + 1
            surplus, total = surplus - 1, total - 1
        yield lines._replace(text=lines.text[position:])


def _follow(path: Path, query: LogQuery, is_over: Callable[[], bool] | None) -> Iterator[LogLines]:
    """The lines so far, and then what `updates` reads from there on, until the job is over."""
    chosen, positions = _chosen(path, query), dict[tuple[int, str], int]()
    for attempt, others in chosen[:-1]:  # ranks that were not started again
        yield from read(path, replace(query, follow=False, attempt=attempt, ranks=tuple(others)))
    first = chosen[-1][0] if chosen else 0
    if chosen:
        ended = is_over() if is_over is not None else not RunDirectory(path).is_held
        with contextlib.closing(_Sources(path, first, query.ranks)) as sources:
            yield from last(_backlog(sources, query, ended), query.tail)
            positions = {(first, log.name): source.position for log, source in sources.opened.items()}

    def is_wanted(it: Output) -> bool:
        is_chosen = it.attempt >= first if query.attempt is None else it.attempt == query.attempt
        return is_chosen and (query.ranks is None or it.rank in query.ranks)

    if not RunDirectory(path).journal.is_file():  # the folder is damaged; a job has a journal before it has a name
        return
    lifeline, end = os.pipe()
    threading.Thread(target=_wait, args=(path, is_over, end), daemon=True).start()
    poll = None if is_over is None else _ELSEWHERE
    rests: dict[tuple[int, str], Rest] = {}
    attempt = first
    try:
        for it in updates(RunDirectory(path), lifeline, is_wanted, poll=poll, tracebacks=True, positions=positions):
            if isinstance(it, Output):
                stream = "e" if it.stream == "err" else "o"
                data = it.data if query.raw else rests.setdefault((it.rank, stream), Rest()).add(it.data)
                if data:
                    yield LogLines(time.time(), it.attempt, it.rank, stream, data)
            elif it.name == "started":
                if query.attempt is not None and it.details["attempt"] > query.attempt:
                    break
                attempt = it.details["attempt"]
            elif it.name in ("restarting", "finished"):
                yield from _left_open(rests, attempt)
        yield from _left_open(rests, attempt)
    finally:
        os.close(lifeline)


def _left_open(rests: dict[tuple[int, str], Rest], attempt: int) -> Iterator[LogLines]:
    """The beginnings of lines that an attempt has not finished."""
    for (rank, stream), rest in rests.items():
        if data := rest.take():
            yield LogLines(time.time(), attempt, rank, stream, data)


def _wait(path: Path, is_over: Callable[[], bool] | None, end: int) -> None:
    """Close a descriptor when no agent works on a job any more."""
    if is_over is None:
        RunDirectory(path).wait_until_free()
    while is_over is not None and not is_over():
        time.sleep(_ELSEWHERE)
    os.close(end)
