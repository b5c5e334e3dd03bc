"""`-o table|wide|json|yaml`: aligned, harmless on a terminal, and the same keys for programs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.cli.terminal.tables import Column, display_width, show, show_data, table

COLUMNS: list[Column[dict[str, str]]] = [
    Column("NAME", lambda row: row["name"]),
    Column("STATE", lambda row: row["state"], colours={"FAILED": "red"}),
    Column("NODE", lambda row: row.get("node"), wide=True),
    Column("ERROR", lambda row: row.get("error")),
]
ROWS = [
    {"name": "a", "state": "RUNNING"},
    {"name": "train-1", "state": "FAILED", "error": "out of memory", "node": "n0"},
]


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes, by another rule than the code's."""
    return sum(
        (2 if unicodedata.east_asian_width(c) in ("F", "W") else 1) - (unicodedata.category(c) in ("Mn", "Me"))
        for c in text
    )


def test_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show(ROWS, COLUMNS, "table", dict)
    assert capsys.readouterr().out == "NAME     STATE    ERROR\na        RUNNING  -\ntrain-1  FAILED   out of memory\n"


def test_wide_table(capsys: pytest.CaptureFixture[str]) -> None:
    show(ROWS, COLUMNS, "wide", dict)
    assert capsys.readouterr().out.splitlines()[::2] == [
        "NAME     STATE    NODE  ERROR",
        "train-1  FAILED   n0    out of memory",
    ]


def test_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    for output, text in (("table", "NAME  STATE  ERROR\n"), ("json", "[]\n"), ("yaml", "[]\n")):
        show([], COLUMNS, output, dict)
        assert capsys.readouterr().out == text


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    show(ROWS, COLUMNS, "json", dict)
    out = capsys.readouterr().out
    assert json.loads(out) == ROWS
    assert out.startswith('[\n  {\n    "name": "a",\n')
    show(ROWS, COLUMNS, "yaml", dict)
    out = capsys.readouterr().out
    assert yaml.safe_load(out) == ROWS
    assert out.startswith("- name: a\n")


def test_yaml_repeats_what_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    same = {"a": (1, 2)}
    show_data([same, same], "yaml")
    assert "&" not in capsys.readouterr().out


DATA: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(DATA, st.sampled_from(["json", "yaml"]))
def test_data_is_read_back_and_harmless(data: Any, output: str) -> None:
    printed = capture(lambda: show_data(data, output))
    assert printed.isascii()
    assert printed.replace("\n", "").isprintable()
    if "\\ud" not in printed.lower():  # YAML knows no pairs of surrogates; JSON does
        assert (json.loads if output == "json" else yaml.safe_load)(printed) == data


@given(st.lists(st.tuples(st.text(), st.text(), st.text()), max_size=5))
def test_a_table_is_aligned_and_harmless(rows: list[tuple[str, str, str]]) -> None:
    columns: list[Column[tuple[str, str, str]]] = [
        Column(title, lambda row, i=i: row[i]) for i, title in enumerate(("ONE", "TWO", "THREE"))
    ]
    lines = capture(lambda: show(rows, columns, "table", dict)).split("\n")
    assert len(lines) == len(rows) + 2
    assert all(line.isprintable() for line in lines)
    start = lines[0].index("THREE")
    for line in lines[1:-1]:
        assert start in {columns_of(line[:i]) for i in range(len(line) + 1)}


def capture(call: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        call()
    return out.getvalue()


@given(st.text())
def test_width_of_text(text: str) -> None:
    assert display_width(text) == columns_of(text) or any(
        unicodedata.category(c) in ("Mn", "Me") and unicodedata.east_asian_width(c) in ("F", "W") for c in text
    )


# On a terminal

CODE = """
from paceline.cli.terminal.tables import Column, show
rows = [
    ("train-1", "FAILED", "rank 3: ValueError: a long story\\x1b]0;owned\\x07"),
    ("\\u65e5\\u672c\\u8a9e", "RUNNING", "\\u65e5\\u672c" * 20),
]
titles = ("NAME", "STATE", "ERROR")
columns = [
    Column(title, lambda row, i=i: row[i], colours={"FAILED": "red"}, is_text=title == "ERROR")
    for i, title in enumerate(titles)
]
show(rows, columns, "table", dict)
"""


def on_terminal(width: int, **env: str) -> list[str]:
    """What the code above shows on a terminal of this width."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environment.update(COLUMNS=str(width), PYTHONPATH=str(Path(paceline.__file__).parents[1]), PYTHONUTF8="1", **env)
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=theirs, env=environment)
    os.close(theirs)
    data = b""
    try:
        while more := os.read(ours, 4096):
            data += more
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return data.decode().splitlines()


def test_colours_on_a_terminal() -> None:
    heading, failed, running = on_terminal(200)
    assert heading == "\x1b[1mNAME     STATE    ERROR\x1b[0m"
    assert failed == "train-1  \x1b[31mFAILED \x1b[0m  rank 3: ValueError: a long story\\x1b]0;owned\\x07"
    assert running == "日本語   RUNNING  " + "日本" * 20


@pytest.mark.parametrize("variable", ["1", "0"])
def test_no_color_is_respected(variable: str) -> None:
    assert "\x1b" not in "".join(on_terminal(200, NO_COLOR=variable))


@pytest.mark.parametrize(
    ("width", "heading"), [(20, "NAME     STATE    …"), (25, "NAME     STATE    …"), (12, "NAME     …"), (7, "NAME  …")]
)
def test_a_narrow_terminal_has_fewer_columns(width: int, heading: str) -> None:
    lines = on_terminal(width, NO_COLOR="1")
    assert lines[0] == heading
    assert all(columns_of(line) <= width for line in lines)
    assert ("FAILED" in lines[1]) is ("STATE" in heading)
    assert lines[1].startswith("train-1" if width > 7 else "tra…")


@pytest.mark.parametrize("width", [26, 28, 40, 41, 57, 58])
def test_cut_to_the_width_of_the_terminal(width: int) -> None:
    heading, *lines = on_terminal(width, NO_COLOR="1")
    assert heading.startswith("NAME     STATE    ERROR")
    assert all(line.endswith("…") and columns_of(line) <= width for line in lines if width < 58)
    assert columns_of(lines[1]) >= width - 1 or width == 58  # one long word is cut in its middle
    assert lines[0].startswith("train-1  FAILED   ran")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(
    st.lists(st.tuples(st.booleans(), st.text("abc9.", min_size=1, max_size=30)), min_size=1, max_size=9),
    st.integers(34, 200),
)
def test_a_terminal_never_shows_a_part_of_a_number(cells: list[tuple[bool, str]], width: int) -> None:
    columns = [Column(f"C{i}", lambda row, i=i: row[i][1], is_text=is_text) for i, (is_text, _) in enumerate(cells)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("NO_COLOR", "1")
        heading, line = table([cells], columns, "table", Terminal())
    assert max(len(heading), len(line)) <= width
    shown = line.split()
    assert heading.endswith("…") is (len(shown) < len(cells))
    for (is_text, whole), seen in zip(cells, shown, strict=False):
        assert seen == whole or (is_text and len(seen) >= 8 and whole.startswith(seen[:-1]))


def test_a_wide_table_has_at_least_the_columns_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for width in range(20, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        usual, wide = (set(table(ROWS, COLUMNS, output, Terminal())[0].split()) for output in ("table", "wide"))
        assert usual - {"…"} <= wide, width


def test_text_that_wraps_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    columns = [COLUMNS[0], Column("MORE", lambda row: row.get("error"), wraps=True), COLUMNS[1]]
    assert table(ROWS, columns[:2], "table", Terminal()) == [
        "NAME     MORE", "a        -", "train-1  out of", "         memory",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "26")
    assert table(ROWS, columns, "table", Terminal()) == [
        "NAME     MORE      STATE", "a        -         RUNNING", "train-1  out of    FAILED", "         memory"
    ]  # fmt: skip


def test_text_without_room_for_its_column_stands_below_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    columns = [*COLUMNS[:2], Column("MORE", lambda row: row.get("error"), wraps=True, keep=-1)]
    assert table(ROWS, columns, "table", Terminal()) == [
        "NAME     STATE", "    MORE", "a        RUNNING", "train-1  FAILED", "    out of memory"
    ]  # fmt: skip


@given(st.lists(st.text("ab9", min_size=1, max_size=60), max_size=9), st.integers(20, 160), st.integers(1, 70))
def test_text_that_wraps_loses_nothing(words: list[str], width: int, name: int) -> None:
    columns: list[Column[str]] = [
        Column("NAME", lambda _: "n" * name), Column("MORE", lambda text: text, wraps=True, least=12),
        Column("NUMBER", lambda _: "1234567"),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("NO_COLOR", "1")
        lines = table([" ".join(words)], columns, "table", Terminal())
    assert max(map(len, lines)) <= width
    shown = re.sub(r"\s+", "", "".join(lines[1:]))
    assert re.sub("n+…?|1234567|MORE", "", shown).replace("-", "") == "".join(words)


def test_a_table_needs_neither_models_nor_yaml() -> None:
    code = "import sys, paceline.cli.terminal.tables as o; o.show([], [], 'table', dict); o.show([], [], 'json', dict)"
    code += "; assert not {'msgspec', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_escapes_are_whole() -> None:
    out = capture(lambda: show([{"name": "a\nb\u202e\x9b", "state": ""}], COLUMNS, "table", dict))
    assert re.split(r"  +", out.splitlines()[1])[0] == r"a\nb\u202e\x9b"
