"""What a container runs: the lines of its ranks go to its output, and how it ended into its termination message."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually
from tests.late import job_spec

from paceline.backends.kubernetes.manifests.bootstrap import START
from paceline.backends.packing import archive
from paceline.contract.nodejob import BatchOrder, Order
from paceline.node.host import pod
from paceline.node.host.pod_format import MARK
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store import records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Container:
    """Starts the program of a container, with the files that a cluster would mount."""

    def __init__(self, folder: Path) -> None:
        self.here, self.work, self.message = folder / "job", folder / "work", folder / "termination-log"
        self.here.mkdir()
        self.work.mkdir()
        (self.here / "archive-000").write_bytes(archive().solid[:1000])
        (self.here / "archive-001").write_bytes(archive().solid[1000:])
        (self.here / "start.py").write_text(START.lstrip())
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, code: str, **fields: Any) -> subprocess.Popen[bytes]:
        spec = job_spec.JobSpec.validated({
            "name": "it", "script": "train.py", "start_method": "exec", "ranks": 1, "code": {"mode": "snapshot"},
            **fields,
        })  # fmt: skip
        order = Order(job=spec.for_node(), job_id="1234", code={"mode": "snapshot", "source": "/there"})
        request = BatchOrder(order, str(self.work / "jobs"), "code.tar")
        (self.here / "part.json").write_text(json.dumps(request.to_json()))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            member = tarfile.TarInfo("train.py")
            member.size = len(code)
            tar.addfile(member, io.BytesIO(code.encode()))
        half = len(packed.getvalue()) // 2
        (self.here / "code-000").write_bytes(packed.getvalue()[:half])
        (self.here / "code-001").write_bytes(packed.getvalue()[half:])
        command = [sys.executable, str(self.here / "start.py"), str(self.here), str(self.work), str(self.message)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
        )
        self.started.append(process)
        return process

    def report(self) -> dict[str, Any]:
        text = self.message.read_text()
        assert len(text) <= 4096
        found: dict[str, Any] = json.loads(text)
        return found


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    it = Container(tmp_path)
    yield it
    for process in it.started:
        process.kill()
        process.communicate()


def test_lines_events_and_the_report(container: Container) -> None:
    process = container.start(
        "import os, sys; os.environ['RANK']; print('one'); print('x' * 70000); sys.stdout.write('open')", ranks=2
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"")
    lines = out.splitlines()
    events = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
    assert [it["event"] for it in events if it["event"] != "history"] == ["started", "finished"]  # if it takes 3 s
    assert events[0]["ranks"] == [[0, 0], [1, 1]]
    for rank in (b"0", b"1"):
        own = [line for line in lines if line.startswith(b"[rank " + rank)]
        assert own[0] == b"[rank " + rank + b"] one"
        assert [len(line) for line in own[1:3]] == [(64 << 10) + 11, 70000 - (64 << 10) + 9]
        assert own[3] == b"[rank " + rank + b" +] open"
    report = container.report()
    assert (report["state"], report["exit_code"], report["ranks"]) == ("SUCCEEDED", 0, [[0, 0], [1, 0]])


def test_the_culprit_and_its_traceback(container: Container) -> None:
    process = container.start("def f(n):\n    raise ValueError('too ' * 3000) if n == 0 else f(n - 1)\nf(3)\n")
    process.communicate(timeout=120)
    assert process.returncode == 1
    report = container.report()
    assert (report["state"], report["failure"]["rank"], report["exit_code"]) == ("FAILED", 0, 1)
    assert report["failure"]["traceback"].endswith("too \n")
    container.message.unlink()
    again = container.start("print('again')")  # as a node does with `restartPolicy: OnFailure`
    out, err = again.communicate(timeout=120)
    assert (again.returncode, out, err, container.report()) == (1, b"", b"", report)


def test_signals_reach_the_job(container: Container) -> None:
    process = container.start(
        "import signal, sys; print('waits', flush=True); signal.sigwait({signal.SIGTERM}); sys.exit(3)"
    )
    assert process.stdout is not None
    seen = b""
    while b"waits" not in seen:
        seen += process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert container.report()["state"] == "STOPPED"


def test_a_signal_ends_it_before_the_job_is_unpacked(container: Container) -> None:
    """The first process of a container ignores what it does not handle."""
    piece = container.here / "archive-000"
    piece.unlink()
    os.mkfifo(piece)
    process = container.start("print('runs')")
    with piece.open("wb"):  # it waits for what comes
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (128 + signal.SIGTERM, b"", b"")


def test_a_job_that_cannot_run_says_why_in_its_message(container: Container) -> None:
    process = container.start("print()", framework="paddle", script="train.py")
    _, err = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("paddle is installed")
    assert process.returncode == 2
    assert err.decode().startswith("paceline: paddle is not installed")
    assert "image" in container.report()["refused"]


def test_its_agent_ends_with_it(container: Container) -> None:
    process = container.start("import os, threading; print(os.getpid(), flush=True); threading.Event().wait()")
    assert process.stdout is not None
    line = b""
    while not line.startswith(b"[rank 0]"):
        line = process.stdout.readline()
    rank = int(line.split()[2])
    run = RunDirectory(next(container.work.glob("jobs/hosts/*/jobs/it")))
    process.kill()
    process.communicate()
    eventually(lambda: not os.path.exists(f"/proc/{rank}"), "the rank is gone")
    eventually(lambda: not run.is_held, "the agent is gone")
    # It must not have asked the other nodes to stop: another pod may come in its place.
    assert [event["event"] for event in records.events(run)] == ["started"]


@pytest.mark.parametrize("over", [0, 10, 4000, 100_000])
def test_a_termination_message_has_its_size(tmp_path: Path, over: int) -> None:
    failure = {"rank": 1, "message": "ValueError", "traceback": "ü\n" * over + "the end"}
    pod.write_message(
        str(tmp_path / "it"), {"exit_code": 1, "failure": failure, "ranks": [[n, 1] for n in range(over)]}
    )
    text = (tmp_path / "it").read_text()
    assert len(text) <= 4096
    found = json.loads(text)
    assert found["failure"]["traceback"].endswith("the end")


def test_a_kept_line_has_one_time_whatever_it_holds(tmp_path: Path) -> None:
    kept = pod.KeptLog(str(tmp_path), 0)
    kept.write(b"[rank 0]: 10%\r 20%\r 30%\n[rank 1]: \x0b\n")
    kept.close()
    (file,) = tmp_path.iterdir()
    lines = file.read_bytes().split(b"\n")
    assert [line.partition(b"Z ")[2] for line in lines] == [b"[rank 0]: 10%\r 20%\r 30%", b"[rank 1]: \x0b", b""]
