"""Each way of starting, from new interpreters alone, as users have it: other tests fork the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Paceline

SCRIPT = """
    import os, pathlib, sys
    pathlib.Path("rank" + os.environ["RANK"]).write_text(" ".join(sys.argv[1:]))
    print("here")
"""


@pytest.fixture
def cold(paceline: Paceline) -> Paceline:
    paceline.cold = True
    paceline.env["PACELINE_WARM_DIR"] = str(paceline.folder / "no warm servers")
    return paceline


@pytest.mark.parametrize(
    "method", [(), ("exec",), ("spawn",), ("forkserver",)], ids=lambda it: it[0] if it else "unsaid"
)
def test_run(cold: Paceline, method: tuple[str, ...]) -> None:
    flags = ("--start-method", *method) if method else ()
    done = cold.run("-n", "2", *flags, cold.script(SCRIPT), "-x", "two words")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "here\n"
    assert [(cold.folder / f"rank{rank}").read_text() for rank in range(2)] == ["-x two words"] * 2


def test_submit(cold: Paceline) -> None:
    done = cold("submit", "--name", "it", "-n", "2", cold.script(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "it\n"
    assert cold("wait", "it").returncode == 0
    assert cold("logs", "it").stdout == "here\n"


def test_exit_codes(cold: Paceline) -> None:
    assert cold.run(cold.script("raise SystemExit(3)")).returncode == 3
    assert cold("bogus").returncode == 2
