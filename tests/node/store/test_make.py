"""A job is made on the machine that runs it: all of it or nothing, wherever its client and its code are."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually, free_port
from tests.late import job_spec

from paceline.contract.nodejob import Order
from paceline.job.code.snapshot import is_for_code
from paceline.node.errors import Refused
from paceline.node.lifeline import IN_DOUBT, KEPT
from paceline.node.rundir.directory import read_json
from paceline.node.signals import LEAVE
from paceline.node.store import make
from paceline.node.store.code_folder import unpack
from paceline.node.store.home import Home
from paceline.node.store.plan import Plan, Taken, link_notes, make_plan, this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    spec = job_spec.JobSpec.validated({"name": "it", "script": "train.py", "start_method": "exec", **fields})
    return Order(job=spec.for_node(), job_id="1234")


def start(plan: Plan, code: io.BytesIO | None = None, lifeline: socket.socket | None = None) -> make.Made:
    with make.making(plan) as new:
        if code is not None:
            assert new.code is not None
            unpack(code, new.code)
        return new.start({"mode": "snapshot", "source": "/there"} if code else None, lifeline)


def copied_from_git(home: Home, name: str, job_id: str, working_dir: Path) -> tuple[make.Made, list[str]]:
    """A job with a copy of the repository `net`, that ends when something opens the FIFO `NAME.end`; what is said."""
    end = working_dir / f"{name}.end"
    os.mkfifo(end)
    asked = order(
        name=name, code={"mode": "git", "source": "https://example.org/net.git"}, working_dir=str(working_dir)
    )
    plan = make_plan(home, this_machine(home, 0), replace(asked, job_id=job_id))
    said = link_notes(home, plan.order.job)
    with make.making(plan) as new:
        assert new.code is not None
        unpack(archive(f"open({str(end)!r}).close()"), new.code)
        return new.start({"mode": "git", "source": "https://example.org/net.git"}), said


def test_the_name_of_a_repository_is_never_taken_from_a_job_that_runs(tmp_path: Path) -> None:
    home, link = Home(tmp_path / "home"), tmp_path / "code" / "net"
    first, said = copied_from_git(home, "first", "1", tmp_path)
    assert (os.readlink(link), said) == ("first", [])
    second, (line,) = copied_from_git(home, "second", "2", tmp_path)
    assert line.startswith(f"{link} stays the code of job first, which has not ended; ")
    assert os.readlink(link) == "first"
    for name, made in ("first", first), ("second", second):
        (tmp_path / f"{name}.end").open("w").close()
        wait(made)
    third, said = copied_from_git(home, "third", "3", tmp_path)
    assert (os.readlink(link), said) == ("third", [])
    (tmp_path / "third.end").open("w").close()
    wait(third)
    home.remove(third.run)
    assert not os.path.lexists(link)


def wait(made: make.Made) -> None:
    assert made.agent.wait(60) == 0, made.run.agent_log.read_text()


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_machine_with_and_without_a_connection(tmp_path: Path, is_remote: bool) -> None:
    home = Home(tmp_path / "home", None if is_remote else tmp_path / "home" / "jobs")
    (tmp_path / "train.py").write_text("import os; print(os.environ['PACELINE_JOB_ID'], os.environ['PACELINE_RANK'])")
    plan = make_plan(home, this_machine(home, 0), order(ranks=2, working_dir=str(tmp_path)))
    assert everything(tmp_path) == ["train.py"], "a plan writes nothing"
    wait(made := start(plan))
    assert made.run.path == home.jobs / "it"
    assert made.run.log(0, 1).read_text() == "1234 1\n"
    with pytest.raises(Taken, match="a job named it has its files in"):
        make_plan(home, this_machine(home, 0), order(working_dir=str(tmp_path)))
    with pytest.raises(Taken):  # it was planned before there was the other one
        start(plan)
    home.remove(made.run)
    assert everything(tmp_path / "home" / "jobs" if not is_remote else home.jobs) == []


def test_code_from_a_stream_and_from_another_job(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    here, place = this_machine(home, 0), tmp_path / "new" / "place"
    asked = {"code": {"mode": "snapshot"}, "working_dir": str(place)}
    wait(start(make_plan(home, here, order(**asked)), archive("open('left', 'w').close()")))
    assert (place / "code" / "it" / "left").exists()
    assert is_for_code(str(place / "code")), "snapshots leave it out, and git does not look into it"
    again = make_plan(home, here, order(**{**asked, "name": "again", "resume_from": "it"}))
    wait(made := start(again))
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
        start(plan, code)
    assert not text or str(caught.value).startswith("no script train.py in the copy of /there")
    assert everything(tmp_path) == before


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


LINK = member("link", type=tarfile.SYMTYPE, linkname="..")
OUTSIDE = {
    "absolute": [member("/tmp/paceline-stolen")],
    "above": [member("a/../../stolen")],
    "through a link": [LINK, member("link/stolen")],
    "in place of a link": [member("link", type=tarfile.SYMTYPE, linkname="../stolen"), member("link")],
    "hard link": [member("hard", type=tarfile.LNKTYPE, linkname="../../../outside")],
    "hard link through a link": [LINK, member("hard", type=tarfile.LNKTYPE, linkname="link/outside")],
    "device": [member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_an_archive_writes_nothing_outside(tmp_path: Path, case: str) -> None:
    code = io.BytesIO()
    with tarfile.open(fileobj=code, mode="w") as tar:
        for info in OUTSIDE[case]:
            tar.addfile(info)
    code.seek(0)
    with pytest.raises(Refused, match="cannot be in the code of a job; try again"):
        unpack(code, tmp_path / "jobs" / "code")
    assert not [path for path in everything(tmp_path) if "stolen" in path or "hard" in path or "null" in path]


def test_links_of_the_code_lead_where_they_did(tmp_path: Path) -> None:
    code = io.BytesIO()
    with tarfile.open(fileobj=code, mode="w") as tar:
        tar.addfile(member("data", type=tarfile.SYMTYPE, linkname="/mnt/data"))
        for name in ("train.py", "sub/train.py"):
            tar.addfile(member(name))
        tar.addfile(member("same.py", type=tarfile.LNKTYPE, linkname="./train.py"))
        tar.addfile(member("sub", type=tarfile.DIRTYPE, mode=0o755))
    code.seek(0)
    unpack(code, tmp_path / "code")
    assert everything(tmp_path / "code") == ["data", "same.py", "sub", "sub/train.py", "train.py"]
    assert os.readlink(tmp_path / "code" / "data") == "/mnt/data"


def test_what_only_the_code_can_tell_is_open(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    asked = order(code={"mode": "git", "source": "https://example.org/it"}, ranks=2)
    plan = make_plan(home, this_machine(home, 0), asked)
    assert plan.foreseen_job().framework == "<chosen at start>"
    ranks = plan.ranks()
    assert [rank["PACELINE_RANK"] for rank in ranks] == ["0", "1"]
    assert "TF_CONFIG" not in ranks[0]
    assert "ROLE_NAME" not in ranks[0]
    assert plan.here.python == (sys.executable,)


class Growing:
    """A job that runs on one node, and may take in another one: each has a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.end = folder, folder / "end"
        wait_for_end = "import os, time\nwhile not os.path.exists('end'):\n    time.sleep(0.02)\n"
        (folder / "train.py").write_text(wait_for_end)
        address: dict[str, Any] = {"main_address": "127.0.0.1", "main_port": free_port()}
        self.name = f"grows-{os.getpid()}"
        asked = order(name=self.name, nodes="1:2", working_dir=str(folder))
        self.order = replace(asked, token="secret", hosts=("first",))
        self.order = replace(self.order, job=replace(asked.job, node_rank=0, detached=True, **address))
        self.home, self.other_home = Home(folder / "first"), Home(folder / "other")
        self.first = start(make_plan(self.home, this_machine(self.home, 0), self.order))
        self.started = [self.first]
        eventually(lambda: self.state(self.first) == ("RUNNING", 0, 1), "it runs")

    def join(self, *words: bytes) -> tuple[make.Made, socket.socket]:
        """Start the other node, and say this to its agent."""
        asked = replace(self.order, job=replace(self.order.job, node_rank=None), joins=True, hosts=())
        lifeline, theirs = socket.socketpair()
        with theirs:
            if make.is_back(self.other_home, asked):
                made = make.restart_part(self.other_home, asked, theirs)
            else:
                made = start(make_plan(self.other_home, this_machine(self.other_home, 0), asked), None, theirs)
        self.started.append(made)
        for word in words:
            lifeline.send(word)
        return made, lifeline

    def prepared(self) -> int:
        """How many nodes have the process that starts their ranks."""
        count = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                count += f"fork server of job {self.name}".encode() in path.read_bytes()
        return count

    @staticmethod
    def state(made: make.Made) -> tuple[str, int, int]:
        """Of the part of a node: its state, the attempt, and how many nodes it has."""
        found = read_json(made.run.status) or {"state": "", "attempt": -1, "nodes": 0}
        return found["state"], found["attempt"], found["nodes"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Growing]:
    it = Growing(tmp_path)
    yield it
    for made in it.started:
        made.agent.kill()
        made.agent.wait()


@pytest.mark.parametrize("word", [b"", IN_DOUBT])
@pytest.mark.parametrize("how", ["dropped", "client gone"])
def test_a_node_that_joins_ends_alone_if_it_is_not_kept(job: Growing, how: str, word: bytes) -> None:
    other, lifeline = job.join(*filter(None, [word]))
    eventually(lambda: job.prepared() == 2, "it could start its ranks")
    if how == "client gone":
        lifeline.close()
        assert other.agent.wait(60) == 128 + signal.SIGHUP
    make.drop(job.other_home, other)
    assert other.agent.wait(60)
    lifeline.close()
    assert everything(job.other_home.jobs) == []
    assert job.state(job.first) == ("RUNNING", 0, 1)
    job.end.touch()
    wait(job.first)


def test_a_node_that_is_kept_joins_and_its_part_is_as_it_was_if_it_is_not_kept_again(job: Growing) -> None:
    other, lifeline = job.join(KEPT)
    lifeline.close()
    eventually(lambda: job.state(job.first) == ("RUNNING", 1, 2), "both take part")
    other.agent.send_signal(LEAVE)
    assert other.agent.wait(60) == 0
    eventually(lambda: job.state(job.first)[0] == "RUNNING" and job.state(job.first)[1] > 1, "the first goes on")
    before = {path: path.read_bytes() for path in (other.run.status, other.run.journal)}
    again, lifeline = job.join()
    eventually(lambda: job.prepared() == 2, "it could start its ranks again")
    make.drop(job.other_home, again)
    assert again.agent.wait(60)
    lifeline.close()
    assert {path: path.read_bytes() for path in before} == before
    job.end.touch()
    wait(job.first)
