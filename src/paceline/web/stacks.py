"""The lines of `why` for a page: of tracebacks and stacks, frames of libraries are folded, the user's line stands out.

Joined, the texts of the blocks are the lines as they were.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NUMBER = r"(?:\[rank\d+\]: ?)?"  # that torch puts before the lines of a traceback
_OF_TRACEBACK = re.compile(rf'^\s*{_NUMBER}\s*File "(?P<file>[^"]*)", line \d+(?:, in .*)?$')
_REPEATED = re.compile(rf"^\s*{_NUMBER}\s*\[Previous line repeated \d+ more times?\]$")
_OF_STACK = re.compile(r"^ {4}(?P<file>\S(?:.*\S)?):\d+ in \S+$|^ {4}(?P<native>\S+) in \S+$")  # without a line: C code
_END_OF_STACK = re.compile(r"^ {4}… and (\d+) more$")
_PACKAGE = re.compile(r"[\\/](?:site|dist)-packages[\\/]([^\\/.]+)")
_OWN = re.compile(r"[\\/](?:[^\\/]*\.pyz|src)[\\/]paceline[\\/]")
_STANDARD = re.compile(r"[\\/]lib(?:64)?[\\/]python3[^\\/]*[\\/]|^<")
_INDUCTOR = re.compile(r"[\\/]torchinductor_[^\\/]*[\\/]")


class Block(TypedDict, total=False):
    """Some lines."""

    text: str
    # `text`; `frame`: of the user's code; `at`: that of these at which it is, the innermost one; `folded`: of libraries
    kind: str
    count: int  # of the frames that are folded
    of: list[str]  # their libraries; "Python" is its standard library


class _Frame(NamedTuple):
    lines: list[str]
    of: str  # the library; "" for the user's code


def library(file: str) -> str:
    """The library that a file belongs to; "" for the user's own code."""
    if found := _PACKAGE.search(file):
        return found[1]
    if _OWN.search(file):
        return "paceline"
    if _INDUCTOR.search(file):
        return "torch"
    if _STANDARD.search(file):
        return "Python"
    return ""


def blocks(lines: Sequence[str]) -> list[Block]:
    """The lines of `why` in blocks."""
    found: list[Block] = []
    frames: list[_Frame] = []
    is_stack = False

    def flush() -> None:
        found.extend(_folded(frames, innermost_first=is_stack))
        frames.clear()

    for line in lines:
        in_traceback, in_stack = _OF_TRACEBACK.match(line), _OF_STACK.match(line)
        if in_traceback or in_stack:
            if frames and is_stack is bool(in_traceback):
                flush()
            is_stack = not in_traceback
            frames.append(_Frame([line], _of(in_traceback, in_stack)))
        elif frames and not is_stack and (_indent(line) > _indent(frames[-1].lines[0]) or _REPEATED.match(line)):
            frames[-1].lines.append(line)  # the line of the source, and marks below it
        elif frames and is_stack and _END_OF_STACK.match(line):
            frames[-1].lines.append(line)
        else:
            flush()
            found.append({"kind": "text", "text": line})
    flush()
    return _joined(found)


def _of(in_traceback: re.Match[str] | None, in_stack: re.Match[str] | None) -> str:
    if in_traceback:
        return library(in_traceback["file"])
    assert in_stack
    if in_stack["native"]:
        return "C"
    file = in_stack["file"]
    if file.startswith(("/", "<", ".")) or file[1:3] in (":\\", ":/"):
        return library(file)
    return re.split(r"[\\/]", file)[0] if re.search(r"[\\/]", file) else ""  # `why` leaves the folder of packages out


def _indent(line: str) -> int:
    bare = re.sub(rf"^(\s*){_NUMBER}", r"\1", line)
    return len(bare) - len(bare.lstrip())


def _folded(frames: Sequence[_Frame], *, innermost_first: bool) -> Iterator[Block]:
    own = [number for number, frame in enumerate(frames) if not frame.of]
    at = (own[0] if innermost_first else own[-1]) if own else None
    folded: list[_Frame] = []
    for number, frame in enumerate(frames):
        if frame.of:
            folded.append(frame)
        if folded and (not frame.of or number == len(frames) - 1):
            libraries = list(dict.fromkeys(it.of for it in folded))
            yield {"kind": "folded", "count": len(folded), "of": libraries, "text": _text(folded)}
            folded = []
        if not frame.of:
            yield {"kind": "at" if number == at else "frame", "text": _text([frame])}


def _text(frames: Sequence[_Frame]) -> str:
    return "\n".join(line for frame in frames for line in frame.lines)


def _joined(found: Sequence[Block]) -> list[Block]:
    """Neighbours of text as one."""
    joined: list[Block] = []
    for block in found:
        if joined and block["kind"] == joined[-1]["kind"] == "text":
            joined[-1] = {"kind": "text", "text": f"{joined[-1]['text']}\n{block['text']}"}
        else:
            joined.append(block)
    return joined
