"""Which lines the page's reader of logs passes on."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backends.base import LogLines
from paceline.web.lines import COMMAND, _compiled, _cut, _matching

if TYPE_CHECKING:
    from tests.conftest import Paceline

TEXT = "".join(f"{number}\n" for number in range(10)).encode()


@pytest.mark.parametrize(("skip", "limit"), [(0, None), (0, 4), (3, None), (3, 4), (9, 1), (10, 5), (99, None), (0, 0)])
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_lines_are_left_out_however_they_come(skip: int, limit: int | None, size: int) -> None:
    lines = TEXT.splitlines(keepends=True)
    chunks = [LogLines(0.0, 0, 0, "o", b"".join(lines[at : at + size])) for at in range(0, 10, size)]
    found = b"".join(it.text for it in _cut(chunks, skip, limit))
    assert found == b"".join(lines[skip : None if limit is None else skip + limit])


def test_lines_are_searched() -> None:
    chunks = [LogLines(0.0, 0, 1, "o", b"an\xffa\nb\nac"), LogLines(0.0, 0, 1, "o", b"x\n")]
    assert [it.text for it in _matching(chunks, _compiled("^a"))] == [b"an\xffa\nac\n"]
    assert _compiled("a+")("\u00e9\U0001f600aab".encode()) == (3, 5)


@pytest.mark.parametrize(("pattern", "why"), [("(a*)*b", "takes too long"), ("(" * 3000, "regular expression")])
def test_an_expression_that_would_take_for_ever(paceline: Paceline, pattern: str, why: str) -> None:
    paceline.run("-n", "1", "--name", "it", paceline.script("print('a' * 40)"), stdout=subprocess.DEVNULL)
    (end,) = asked(paceline, grep=pattern)
    assert why in end["end"] and "\n" not in end["end"]


def started(paceline: Paceline, **pipes: int) -> subprocess.Popen[str]:
    return subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=paceline.env, cwd=paceline.folder, text=True, **pipes)


REQUEST = {"name": "it", "on": None, "query": {}, "grep": None, "skip": 0, "limit": None}


def asked(paceline: Paceline, **request: Any) -> list[Any]:
    line = json.dumps({**REQUEST, **request}) + "\n"
    with started(paceline, stdout=subprocess.PIPE) as reader:
        assert reader.stdin and reader.stdout
        reader.stdin.write(line)
        reader.stdin.flush()
        return [json.loads(answer) for answer in reader.stdout]


def test_a_process_reads_them(paceline: Paceline) -> None:
    script = paceline.script("import sys\nsys.stdout.buffer.write(b'one \\xff\\ntwo')\n")
    paceline.run("-n", "1", "--name", "it", script, stdout=subprocess.DEVNULL)
    paceline.script("raise SystemExit('imported from the folder')", "json.py")
    *lines, end = asked(paceline)
    assert {tuple(it[1:4]) for it in lines} == {(0, 0, "o")} and end == {"end": None}
    assert "".join(it[4] for it in lines) == "one \ufffd\ntwo"
    assert [it[4:] for it in asked(paceline, grep="w")[:-1]] == [["two\n", [[1, 2]]]]
    assert "no job" in asked(paceline, name="other")[0]["end"]
    assert "regular expression" in asked(paceline, grep="(")[0]["end"]


def test_it_ends_with_the_server_which_ctrl_c_is_for(paceline: Paceline) -> None:
    script = paceline.script("import time\nprint('ready', flush=True)\ntime.sleep(600)")
    paceline.succeeds("submit", "-n", "1", "--name", "it", script)
    with started(paceline, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdin and reader.stdout and reader.stderr
        reader.stdin.write(json.dumps({**REQUEST, "query": {"follow": True}}) + "\n")
        reader.stdin.flush()
        assert "ready" in reader.stdout.readline()
        reader.send_signal(signal.SIGINT)
        reader.stdin.close()
        assert (reader.wait(60), reader.stderr.read()) == (0, "")
    paceline.succeeds("stop", "--now", "it")
