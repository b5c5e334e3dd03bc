"""What docs/stable.md promises: nothing of the recorded lists goes or changes, and what was written before is read.

`PACELINE_RECORD=1 pytest tests/stable` draws the lists again: a line that goes is a change that breaks something.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.stable import drawn, written
from tests.typed import typed

if TYPE_CHECKING:
    from tests.conftest import Paceline

LISTS = Path(__file__).with_name("lists")
pytestmark = pytest.mark.torch


@pytest.fixture(params=written.VERSIONS)
def version(request: pytest.FixtureRequest, paceline: Paceline) -> str:
    """A version whose jobs are in the home of paceline."""
    written.unpack(request.param, paceline.folder)
    return str(request.param)


def compare(name: str, found: set[str]) -> None:
    """Nothing that is recorded may be missing."""
    path = LISTS / f"{name}.txt"
    if os.environ.get("PACELINE_RECORD"):
        path.write_text("".join(f"{line}\n" for line in sorted(found)))
    gone = set(path.read_text().splitlines()) - found
    assert not gone, f"{path.name} says that these are stable: {sorted(gone)}"


@pytest.mark.parametrize("kind", [drawn.names, drawn.flags, drawn.keys, drawn.codes], ids=lambda it: it.__name__)
def test_what_is_stable_stays(kind) -> None:  # type: ignore[no-untyped-def]
    compare(kind.__name__, kind())


def test_what_programs_read_stays(version: str, paceline: Paceline) -> None:
    compare("output", drawn.output(paceline))


def test_what_is_written_stays(tmp_path: Path) -> None:
    compare("files", drawn.files(written.unpack(written.VERSIONS[-1], tmp_path) / "jobs"))


def test_jobs_of_earlier_versions_are_read(version: str, paceline: Paceline) -> None:
    done, failed = (paceline.json("get", name) for name in ("done", "failed"))
    assert (done["state"], done["exit_code"], done["ranks"]) == ("SUCCEEDED", 0, 2)
    assert (failed["state"], failed["exit_code"], failed["attempt"]) == ("FAILED", 1, 1)
    assert failed["error"].endswith("RuntimeError: attempt 1")
    logged = paceline("logs", "done").stdout
    assert re.findall(r"epoch \d step \d+", logged) == ["epoch 0 step 4", "epoch 1 step 8"]
    events = [it["event"] for it in paceline.json("events", "failed")]
    assert events[0] == "submitted" and events[-1] == "finished" and events.count("started") == 2
    assert "RuntimeError: attempt 1" in typed(paceline, "why", "failed").stdout
    verified = typed(paceline, "checkpoint", "verify", "done")
    assert verified.returncode == 0, verified.stderr
    report = typed(paceline, "report", "done", "-o", "report.html")
    assert report.returncode == 0, report.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_from_checkpoints_of_earlier_versions(version: str, ranks: int, paceline: Paceline) -> None:
    home = str(paceline.home / "jobs" / "done" / "checkpoints")
    done = paceline.run("-n", str(ranks), "--checkpoint-dir", home, "train.py", "3")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"epoch \d step \d+", done.stdout) == ["epoch 2 step 12"]
