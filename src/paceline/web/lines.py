"""Reads log lines for the page, as a process of its own: however much a rank writes, the server only passes bytes on.

Stdin has the request in one line of JSON; when it ends, so does this process. Stdout gets one JSON value a line:
`[time, attempt, rank, stream, text]` with lines of one rank, then `{"end": null}`, or why it ended: `{"end": "…"}`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.backends.base import LogLines

COMMAND = (sys.executable, "-c", "import sys; del sys.path[0]; from paceline.web.lines import main; main()")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def main() -> None:
    """Answer the request on stdin."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_server, daemon=True).start()
    end = None
    out = sys.stdout.buffer
    try:
        for it in _cut(_matching(_asked(request), request.get("grep")), request.get("skip", 0), request.get("limit")):
            text = it.text.decode(errors="replace")
            out.write(json.dumps([it.time, it.attempt, it.rank, it.stream, text], ensure_ascii=False).encode() + b"\n")
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
    sys.stdin.read()
    os._exit(0)


def _asked(request: dict[str, Any]) -> Iterator[LogLines]:
    from paceline import jobs

    return jobs.logs(request["name"], jobs.LogQuery(**request["query"]), request["on"])


def _matching(lines: Iterable[LogLines], pattern: str | None) -> Iterator[LogLines]:
    if not pattern:
        yield from lines
        return
    try:
        search = re.compile(pattern.encode()).search
    except re.error as error:
        raise UserError(f"{pattern!r} is not a regular expression: {error}; put \\ before special letters") from None
    for it in lines:
        if text := b"".join(filter(search, _LINE.findall(it.text))):
            yield it._replace(text=text)


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
