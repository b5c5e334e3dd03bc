"""A real job: its agent records what it uses, and a report shows it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import eventually

from paceline.node.rundir.directory import RunDirectory
from paceline.node.telemetry.history import history
from paceline.web.report import is_report

from .test_report import Page

if TYPE_CHECKING:
    from tests.conftest import Paceline

SCRIPT = """
import os, sys, time
print("hello from", os.environ["RANK"], flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.05)
raise SystemExit(int(os.environ["RANK"]) * 3)
"""


def test_a_job_and_its_report(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-qb", "topic"], ["add", "train.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "train.py").write_text(SCRIPT + "# changed\n")
    paceline.succeeds("submit", "-n", "2", "--name", "it", "--env", "API_TOKEN=hush", "train.py", "done")
    paceline.succeeds("submit", "--name", "copy", "--sync-mode", "snapshot", "train.py", str(tmp_path / "done"))
    run, copied = (RunDirectory(paceline.home / "jobs" / name) for name in ("it", "copy"))
    eventually(lambda: run.origin.exists() and copied.origin.exists(), "they say what they run with")
    (tmp_path / "done").touch()
    assert paceline("wait", "it").returncode == 3
    found = history(run)
    assert found["telemetry"][0]["ranks"]["rank"] == [0, 1]
    assert "Python" in found["software"]
    assert found["origin"]["branch"] == "topic"
    assert "+# changed" in found["origin"]["diff"]
    assert history(copied)["origin"] == found["origin"], "a copy is of the same commit"

    out = paceline.succeeds("report", "it", "-t", "5")
    assert out.stdout.strip() == "it.html"
    shown = Page((tmp_path / "it.html").read_text()).data["jobs"][0]
    assert shown["job"]["state"] == "FAILED"
    assert shown["why"][0].startswith("job it: FAILED (exit code 3)")
    assert {"rank": 1, "lines": ["hello from 1"]} in shown["logs"]
    assert shown["use"]["total"]["values"]["cpu"]
    assert "hush" not in shown["file"]
    assert shown["missing"] == []

    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    assert "is no report" in paceline("report", "it", "-o", str(mine)).stderr
    assert mine.read_text() == "mine"
    os.mkfifo(tmp_path / "pipe.html")
    assert "is no report" in paceline("report", "it", "-o", "pipe.html").stderr
    assert "no job 'that'" in paceline("report", "it", "that", "-o", "both.html").stderr
    assert not (tmp_path / "both.html").exists()
    run.telemetry.unlink()
    run.journal.unlink()
    assert paceline.succeeds("report", "it", "it", "-o", "-").stdout.startswith("<!doctype html>")
    assert is_report(tmp_path / "it.html")
