"""A job is made on the machine that runs it: all of it or nothing, wherever its client and its code are."""

from __future__ import annotations

import io
import socket
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from paceline.job.code.markers import is_for_code
from paceline.job.spec import JobSpec
from paceline.node.errors import Refused
from paceline.node.rundir.directory import read_json
from paceline.node.store import make
from paceline.node.store.code_copy import unpacked
from paceline.node.store.home import Home
from paceline.node.store.plan import Order, Taken, make_plan, this_machine

if TYPE_CHECKING:
    from pathlib import Path


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def archive(text: str, name: str = "train.py") -> io.BytesIO:
    """Code as it comes over a connection."""
    code = io.BytesIO()
    with tarfile.open(fileobj=code, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text.encode()))
    code.seek(0)
    return code


def order(**fields: Any) -> Order:
    spec = JobSpec.model_validate({"name": "it", "script": "train.py", "start_method": "exec", **fields})
    return Order(spec.for_node(), job_id="1234")


def wait(made: make.Made) -> None:
    assert made.agent.wait(60) == 0, made.run.agent_log.read_text()


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_machine_with_and_without_a_connection(tmp_path: Path, is_remote: bool) -> None:
    home = Home(tmp_path / "home", None if is_remote else tmp_path / "home" / "jobs")
    (tmp_path / "train.py").write_text("import os; print(os.environ['PACELINE_JOB_ID'], os.environ['PACELINE_RANK'])")
    plan = make_plan(home, this_machine(home, 0), order(ranks=2, working_dir=str(tmp_path)))
    assert everything(tmp_path) == ["train.py"], "a plan writes nothing"
    wait(made := make.make(plan))
    assert made.run.path == home.jobs / "it"
    assert made.run.log(0, 1).read_text() == "1234 1\n"
    with pytest.raises(Taken, match="a job named it has its files in"):
        make_plan(home, this_machine(home, 0), order(working_dir=str(tmp_path)))
    with pytest.raises(Taken):  # it was planned before there was the other one
        make.make(plan)
    home.remove(made.run)
    assert everything(tmp_path / "home" / "jobs" if not is_remote else home.jobs) == []


def test_code_from_a_stream_and_from_another_job(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    here, place = this_machine(home, 0), tmp_path / "new" / "place"
    asked = {"code": {"mode": "snapshot"}, "working_dir": str(place)}
    code = unpacked(archive("open('left', 'w').close()"), {"mode": "snapshot", "source": "/there"})
    wait(make.make(make_plan(home, here, order(**asked)), code))
    assert (place / "code" / "it" / "left").exists()
    assert is_for_code(str(place / "code")), "snapshots leave it out, and git does not look into it"
    again = make_plan(home, here, order(**{**asked, "name": "again", "resume_from": "it"}))
    wait(made := make.make(again))
    assert (place / "code" / "again" / "left").exists()
    assert (read_json(made.run.job) or {})["code"]["source"] == "/there"
    for name in ("it", "again"):
        home.remove(home.run(name))
    assert everything(place / "code") == [".gitignore"]


@pytest.mark.parametrize("working_dir", [".", "new/place"])
@pytest.mark.parametrize("text", ["import sys", ""])
def test_a_failure_leaves_nothing(tmp_path: Path, working_dir: str, text: str) -> None:
    home = Home(tmp_path / "home")
    folder = "." if working_dir == "." else str(tmp_path / working_dir)
    asked = order(code={"mode": "snapshot"}, working_dir=folder)
    plan = make_plan(home, this_machine(home, 0), asked)
    (tmp_path / "home" / "hosts" / socket.gethostname() / "jobs").mkdir(parents=True)
    before = everything(tmp_path)
    code = archive(text, "other.py") if text else io.BytesIO(b"\1" * 600)  # without the script, or no archive
    with pytest.raises((Refused, tarfile.TarError)) as caught:
        make.make(plan, unpacked(code, {"mode": "snapshot", "source": "/there"}))
    assert not text or str(caught.value).startswith("no script train.py in the copy of /there")
    assert everything(tmp_path) == before


def test_what_only_the_code_can_tell_is_open(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    asked = order(code={"mode": "git", "source": "https://example.org/it"}, ranks=2)
    plan = make_plan(home, this_machine(home, 0), asked)
    assert plan.shown()["framework"] == "<chosen at start>"
    ranks = plan.ranks()
    assert [rank["PACELINE_RANK"] for rank in ranks] == ["0", "1"]
    assert "TF_CONFIG" not in ranks[0]
    assert "ROLE_NAME" not in ranks[0]
    assert plan.here.python == (sys.executable,)
