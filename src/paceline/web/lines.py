"""Reads log lines for the page, as a process of its own: however much a rank writes, the server only passes bytes on.

Stdin has the request in one line of JSON; when it ends, so does this process. Stdout gets one JSON value a line:
`[time, attempt, rank, stream, text]` with lines of one rank, then `{"end": null}`, or why it ended: `{"end": "…"}`. In
a search there is a sixth element: `[begin, end]` of the first match in each line, in UTF-16 units as JavaScript counts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, TypedDict

from paceline.job import text
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline.backends.base import LogLines

    Spans = Callable[[bytes], tuple[int, int] | None]

COMMAND = (sys.executable, "-c", "import sys; del sys.path[0]; from paceline.web.lines import main; main()")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_SEARCH_SECONDS = 5.0  # of CPU time, in which a piece of a log is searched


class Query(TypedDict):
    """Which lines; see `paceline.jobs.LogQuery`."""

    ranks: tuple[int, ...] | None
    since: float | None
    tail: int | None
    attempt: int | None
    follow: bool


class Asked(TypedDict):
    """What the server sends: whose lines, which of them, and how many of these to leave out and to take."""

    name: str
    on: str | None  # its target, or the kind of the hosts that flags named; None for the one that has such a job
    query: Query
    grep: str | None
    skip: int
    limit: int | None


def main() -> None:
    """Answer the request on stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, and that ends this
    request: Asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_server, daemon=True).start()
    end = None
    out = sys.stdout.buffer
    try:
        spans = _compiled(request["grep"]) if request["grep"] else None
        lines = _asked(request) if spans is None else _matching(_asked(request), spans)
        for it in _cut(lines, request["skip"], request["limit"]):
            shown: list[object] = [it.time, it.attempt, it.rank, it.stream, it.text.decode(errors="replace")]
            if spans is not None:
                shown.append(list(map(spans, _LINE.findall(it.text))))
            out.write(json.dumps(shown, ensure_ascii=False).encode() + b"\n")
            out.flush()
    except UserError as error:
        end = str(error)
    except BrokenPipeError:
        os._exit(0)
    except OSError as error:
        end = f"cannot read the logs: {error.strerror}"
    out.write(json.dumps({"end": end}).encode() + b"\n")
    out.flush()
    os._exit(0)


def _end_with_server() -> None:
    while os.read(0, 1024):  # sys.stdin would be locked when the interpreter ends
        pass
    os._exit(0)


def _asked(request: Asked) -> Iterator[LogLines]:
    from paceline.backends.base import LogQuery
    from paceline.backends.everywhere import backend_with
    from paceline.backends.functions import without_results

    name = request["name"]
    there = backend_with(name, request["on"])
    found = there.describe([name]).jobs
    if not found:
        raise UserError(f"there is no job {name} any more")
    return without_results(there.logs(name, LogQuery(**request["query"])), found[0])


def _compiled(pattern: str) -> Spans:
    """Finds the first match in a line: where it begins and ends, in UTF-16 units."""
    search = text.pattern(pattern, repr(pattern)).search

    def too_long(*_: object) -> None:
        raise UserError(f"a search for {pattern!r} takes too long; give one with less to try, without + or * in groups")

    signal.signal(signal.SIGVTALRM, too_long)  # it interrupts a search too, in which no other thread could run

    def spans(line: bytes) -> tuple[int, int] | None:
        found = search(line)
        return found and (_units(line[: found.start()]), _units(line[: found.end()]))

    return spans


def _units(text: bytes) -> int:
    return len(text) if text.isascii() else len(text.decode(errors="replace").encode("utf-16-le")) // 2


def _matching(lines: Iterable[LogLines], spans: Spans) -> Iterator[LogLines]:
    """The lines with a match; each has a line end."""
    for it in lines:
        signal.setitimer(signal.ITIMER_VIRTUAL, _SEARCH_SECONDS)
        found = [line if line.endswith(b"\n") else line + b"\n" for line in _LINE.findall(it.text) if spans(line)]
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if found:
            yield it._replace(text=b"".join(found))


def _cut(lines: Iterable[LogLines], skip: int, limit: int | None) -> Iterator[LogLines]:
    """The lines without the first ones, and at most so many."""
    left = limit
    for it in lines:
        count = it.text.count(b"\n") + (not it.text.endswith(b"\n"))
        if skip >= count:
            skip -= count
            continue
        if left is None and not skip:
            yield it
            continue
        several = _LINE.findall(it.text)[skip:]
        skip = 0
        if left is not None:
            several = several[:left]
            left -= len(several)
        yield it._replace(text=b"".join(several))
        if left == 0:
            return
