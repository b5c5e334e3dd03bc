"""A node's part of a job that a scheduler starts: it is one process from its start to its end, without a client."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually, free_port
from tests.late import job_spec

from paceline.backends.packing import archive
from paceline.contract.nodejob import BatchOrder, Order
from paceline.node.host import batch
from paceline.node.journal.fold import fold
from paceline.node.journal.state import cached
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store import lifecycle, make, records
from paceline.node.store.home import Home
from paceline.node.store.plan import make_plan, this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SAY = "import os; print(*(os.environ[name] for name in ('PACELINE_RANK', 'PACELINE_WORLD_SIZE', 'PACELINE_NODE_RANK')))"
WAIT = "import signal, sys; print('waits', flush=True); signal.sigwait({signal.SIGTERM}); sys.exit(3)"


class Scheduler:
    """Starts parts as a batch script does: the same file and command on each node; a variable has the node's number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self._program = folder / archive().name
        self._program.write_bytes(archive().data)

    def request(self, code: str | None = None, **fields: Any) -> BatchOrder:
        """A part, with code of its own where some is given."""
        spec = job_spec.JobSpec.validated({
            "name": "it", "script": "train.py", "start_method": "exec", "ranks": 1,
            **({} if code is None else {"code": {"mode": "snapshot"}, "working_dir": "."}), **fields,
        })  # fmt: skip
        if code is not None:
            with tarfile.open(self.folder / "code.tar", "w") as tar:
                member = tarfile.TarInfo("train.py")
                member.size = len(code)
                tar.addfile(member, io.BytesIO(code.encode()))
        order = Order(job=spec.for_node(), job_id="1234")
        if code is None:
            return BatchOrder(order, str(self.folder / "home"))
        order = replace(order, code={"mode": "snapshot", "source": "/there"})
        return BatchOrder(order, str(self.folder / "home"), "code.tar")

    def start(self, request: BatchOrder, **env: str) -> subprocess.Popen[str]:
        file = self.folder / "part.json"
        file.write_text(json.dumps(request.to_json()))
        command = [sys.executable, str(self._program), "batch", str(file)]
        part = subprocess.Popen(
            command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.started.append(part)
        return part

    def run(self, name: str = "it", home: str = "home") -> RunDirectory:
        return RunDirectory(self.folder / home / "hosts" / socket.gethostname() / "jobs" / name)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(tmp_path)
    yield scheduler
    for part in scheduler.started:
        part.kill()
        part.communicate()


@pytest.fixture
def refused(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[BatchOrder | None], str]:
    """What is said of a request that cannot run; without one, of what was written last."""
    monkeypatch.setattr(
        lifecycle, "become_agent", lambda *_: pytest.fail("it can run")
    )  # else this process would be its agent

    def said(request: BatchOrder | None) -> str:
        file = scheduler.folder / "part.json"
        if request is not None:
            file.write_text(json.dumps(request.to_json()))
        with pytest.raises(SystemExit) as end:
            batch.main(str(file))
        assert end.value.code == 2
        return capsys.readouterr().err

    return said


def ended(part: subprocess.Popen[str]) -> tuple[int, str]:
    said = part.communicate(timeout=120)[1]
    return part.returncode, said


def test_it_is_the_job_until_the_end(scheduler: Scheduler) -> None:
    part = scheduler.start(scheduler.request("import sys; print('here'); sys.exit(5)"))
    assert ended(part) == (5, "")
    run = scheduler.run()
    assert run.log(0, 0).read_text() == "here\n"
    assert (run.read_status() or {})["state"] == "FAILED"
    assert (run.path / "code" / "it" / "train.py").exists()


def test_signals_of_the_scheduler_are_the_jobs(scheduler: Scheduler) -> None:
    part = scheduler.start(scheduler.request(WAIT))
    run = scheduler.run()
    eventually(lambda: run.log(0, 0).exists() and "waits" in run.log(0, 0).read_text(), "it runs")
    assert run.is_held
    part.send_signal(signal.SIGTERM)
    assert ended(part) == (128 + signal.SIGTERM, "")
    assert (run.read_status() or {})["state"] == "STOPPED"


def test_nodes_get_their_ranks_from_a_variable(scheduler: Scheduler) -> None:
    port = free_port()
    meeting = {"main_address": "127.0.0.1", "main_port": port}
    request = scheduler.request(SAY, nodes="2", rendezvous=meeting)
    request = replace(request, order=replace(request.order, token="t"), node_rank_variable="INDEX")
    homes = [replace(request, root=str(scheduler.folder / name)) for name in ("a", "b")]
    parts = []
    for number, request in enumerate(homes):
        parts.append(scheduler.start(request, INDEX=str(number)))
        eventually(scheduler.run(home=("a", "b")[number]).spec.exists, "it has read its part")
    assert [ended(part) for part in parts] == [(0, ""), (0, "")]
    logs = [scheduler.run(home=name).log(0, rank).read_text() for rank, name in enumerate(("a", "b"))]
    assert logs == ["0 2 0\n", "1 2 1\n"]


@pytest.mark.parametrize(
    ("changes", "env", "why"),
    [
        ({"node_rank_variable": "INDEX"}, {}, "INDEX='' is not a node rank"),
        ({"node_rank_variable": "INDEX"}, {"INDEX": "-1"}, "INDEX='-1' is not a node rank"),
        ({"archive": "other.tar"}, {}, "other.tar: No such file or directory"),
        ({"root": "/proc/nothing"}, {}, "/proc"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_nothing(
    scheduler: Scheduler,
    refused: Callable[[BatchOrder], str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    env: dict[str, str],
    why: str,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    said = refused(replace(scheduler.request("print()"), **changes))
    assert why in said
    assert said.startswith("paceline: ")
    assert said.count("\n") == 1
    assert not os.path.lexists(scheduler.run().path)


def test_a_request_that_is_none_is_refused(scheduler: Scheduler, refused: Callable[[None], str]) -> None:
    (scheduler.folder / "part.json").write_text("{")
    assert refused(None).startswith("paceline: part.json is no JSON")
    (scheduler.folder / "part.json").unlink()
    assert "that describes the job" in refused(None)


def test_the_scheduler_grants_the_devices(scheduler: Scheduler, refused: Callable[[BatchOrder], str]) -> None:
    # Without accelerators, devices are mere slots, of which the request declares none.
    said = refused(scheduler.request("print()", devices=2))
    assert said == "paceline: the job needs 2 devices on each node, and its scheduler granted 0 here\n"
    request = scheduler.request("print()", devices=2)
    part = scheduler.start(replace(request, order=replace(request.order, slots=2)))
    assert ended(part) == (0, "")
    assert not (scheduler.folder / "home" / "queue").exists(), "nothing waits in a queue"


def test_a_scheduler_that_knows_better_says_whether_a_job_lives(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    (tmp_path / "train.py").write_text("print()")
    spec = job_spec.JobSpec.validated({"name": "it", "script": "train.py", "start_method": "exec", "ranks": 1})
    order = Order(job=replace(spec.for_node(), working_dir=str(tmp_path)))
    with make.making(make_plan(home, this_machine(home, 0), order)) as new:
        made = new.start()
    assert made.agent.wait(60) == 0
    status = json.loads(made.run.status.read_text())
    status["agent"]["host"] = "another"  # on a shared disk, whose locks do not reach this machine
    made.run.journal.write_text("")
    made.run.status.write_text(json.dumps(cached({**status, "state": "RUNNING"}, 0)))

    def state(liveness: bool | None) -> tuple[str, str | None]:
        report = records.look(made.run.path, list, lambda _: liveness)
        assert report is not None
        record = fold(report["job"], [report["part"]])
        return record["state"], record["error"]

    assert state(True) == ("RUNNING", None)
    assert state(None)[0] == "LOST"
    assert state(False)[0] == "FAILED"
    assert "its agent on another was ended" in str(state(False)[1])
