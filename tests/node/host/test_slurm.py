"""What a Slurm job asks for, and what Slurm's answers mean."""

from __future__ import annotations

import json
import shlex
import string
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.job.spec import JobSpec
from paceline.node.errors import Refused
from paceline.node.host.slurm import accounts, reasons, script
from paceline.node.host.slurm.folder import JobFolder, Jobs, Life
from paceline.node.host.slurm.partitions import gpus
from paceline.node.host.slurm.queue import Queue

OPTIONS: dict[str, Any] = {"slurm": {}, "no_kill": False, "container": [], "python": "python3"}


def job(**fields: Any) -> dict[str, Any]:
    return {**JobSpec(script="train.py", **fields).for_node(), "name": "it"}


def text(folder: Path = Path("/shared/slurm/it"), slurm: dict[str, Any] | None = None, **fields: Any) -> str:
    options = {**OPTIONS, "slurm": slurm or {}}
    return script.text(job(**fields), folder, ["/usr/bin/python3", "/shared/p.pyz"], options, "id")


@given(st.text(alphabet=string.printable.replace("\n", "").replace("\r", ""), min_size=1).filter(lambda it: it.strip()))
def test_a_script_is_a_shell_script_whatever_its_folder_is_called(name: str) -> None:
    folder = Path("/shared") / name.replace("/", "_").replace("\x0b", "").replace("\x0c", "")
    shown = text(folder)
    assert subprocess.run(["sh", "-n"], input=shown.encode(), capture_output=True, check=False).returncode == 0
    line = next(line for line in shown.splitlines() if line.startswith("job="))
    assert shlex.split(line.removeprefix("job=")) == [str(folder)]


def test_the_users_words_take_precedence() -> None:
    shown = text(
        slurm={"gpus-per-node": "a100:2", "partition": "big", "mem-per-cpu": "2G"}, devices=2, memory="1Gi", queue="q"
    )
    assert "--gres" not in shown and "--mem=" not in shown
    assert "#SBATCH --gpus-per-node=a100:2\n" in shown and "#SBATCH --partition=big\n" in shown
    assert "#SBATCH --exclusive\n" in text(slurm={"exclusive": True})
    assert "--requeue" not in text(slurm={"requeue": False})
    assert "--cpus-per-task=4\n" in text(ranks=4)
    assert "--cpus-per-task" not in text(ranks=4, slurm={"exclusive": True}).partition("\n\n")[0]
    with pytest.raises(Refused, match="line end"):
        text(slurm={"mail-user": "a\nb"})


@pytest.mark.parametrize(("seconds", "shown"), [(1, "0-00:00:01"), (59.2, "0-00:01:00"), (90061, "1-01:01:01")])
def test_durations(seconds: float, shown: str) -> None:
    assert script.duration(seconds) == shown


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:2", ("", 2)), ("gpu:a100:4(S:0-1)", ("a100", 4)), ("(null)", ("", 0)), ("gpu:0", ("", 0)),
        ("gpu:a100:2,gpu:h100:1,nic:1", ("a100", 3)), ("gpu:2(IDX:0-1)", ("", 2)), ("craynetwork:4", ("", 0)),
    ],
)  # fmt: skip
def test_gpus_of_a_node(gres: str, found: tuple[str, int]) -> None:
    assert gpus(gres) == found


def test_why_a_job_waits() -> None:
    assert reasons.waiting("(Resources)", "7", None) == "the resources that it asks for are in use (Slurm: Resources)"
    assert "a limit of its QOS is reached" in reasons.waiting("QOSMaxJobsPerUserLimit", "7", None)
    assert "scontrol release 7" in reasons.waiting("JobHeldUser", "7", None)
    assert "estimated start: " in reasons.waiting("Priority", "7", time.time() + 3600)
    assert "Slurm has not started it (Slurm: SomethingNew)" in reasons.waiting("SomethingNew", "7", None)


@given(st.text())
def test_any_reason_is_one_line(word: str) -> None:
    assert isinstance(reasons.waiting(word, "7", None), str)


def squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / "squeue"
    path.write_text(f"#!/bin/sh\necho called >> {folder}/calls\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")


def line(**columns: str) -> str:
    from paceline.node.host.slurm.queue import _FIELDS

    return "".join(columns.get(name, "").ljust(width) for name, width in _FIELDS.items())


def test_squeue_is_asked_once_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [line(JobID="7", State="PENDING", Reason="Priority", StartTime="1700000000", Comment="paceline:abc")]
    rows.append(line(JobID="8", State="RUNNING", RestartCnt="2", Comment="mine"))
    (tmp_path / "rows").write_text("\n".join(rows) + "\n")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    for _ in range(20):
        queue = Queue(tmp_path / "root")
        entry = queue.entry("7")
        assert entry is not None and entry.is_pending and entry.start == 1700000000 and entry.job_id == "abc"
        other = queue.entry("8")
        assert other is not None and other.is_running and (other.restarts, other.job_id) == (2, "")
        assert queue.entry("9") is None
    assert (tmp_path / "calls").read_text() == "called\n"


@pytest.mark.parametrize(
    ("failures", "age", "is_asked"),
    [(0, 9, False), (0, 11, True), (1, 15, False), (1, 25, True), (2, 35, False), (9, 55, False), (9, 61, True)],
)
def test_squeue_is_asked_less_often_while_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, age: float, is_asked: bool
) -> None:
    squeue(tmp_path, monkeypatch, "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    problem = "it was down" if failures else None
    kept = {"time": 0.0, "entries": [], "asked": time.time() - age, "failures": failures, "problem": problem}
    (tmp_path / "squeue.json").write_text(json.dumps(kept))
    queue = Queue(tmp_path)
    assert queue.entry("7") is None and not queue.knows_since(0.0)
    assert (tmp_path / "calls").exists() == is_asked
    if is_asked:
        assert "slurmctld" in str(queue.problem)
        assert json.loads((tmp_path / "squeue.json").read_text())["failures"] == failures + 1


@given(st.binary(max_size=40))
def test_a_damaged_answer_is_asked_for_again(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        squeue(Path(folder), patch, "exit 0")
        (Path(folder) / "squeue.json").write_bytes(data)
        assert Queue(Path(folder)).entry("7") is None


def test_a_folder_becomes_a_job_in_one_step(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    one, other = jobs.new("it"), jobs.new("that")
    assert jobs.find("it") is None and list(jobs) == []
    made = jobs.settle(one)
    assert made is not None and jobs.find("it") is not None
    again = jobs.new("it")
    assert jobs.settle(again) is None
    jobs.discard(again)
    jobs.discard(other)
    for number in ("7", "7", "9"):
        made.add_id(number)
    assert made.ids == ["7", "9"]
    for life in (Life("9", 0), Life("7", 1), Life("7", 0)):
        made.part(life, 0).mkdir(parents=True)
    assert made.lives == [Life("7", 0), Life("7", 1), Life("9", 0)]
    jobs.remove(made)
    assert jobs.find("it") is None
    assert [path.name for path in jobs.path.iterdir()] == []
    for name in ("../x", ".hidden", "no/where"):
        assert jobs.find(name) is None


def test_a_job_folder_names_its_files(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "it")
    with pytest.raises(Refused, match="damaged or gone"):
        folder.read()
    assert (folder.ids, folder.lives) == ([], [])


def test_sacct_is_asked_once_where_there_are_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, monkeypatch, "exit 0")
    program = tmp_path / "bin" / "sacct"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {tmp_path}/calls\necho 'CANCELLED by 1000'\n")
    program.chmod(0o755)
    for _ in range(3):
        assert accounts.state_of("12", tmp_path / "kept") == "CANCELLED"
    assert (tmp_path / "calls").read_text() == "-n -X -P -o State -j 12\n"
    program.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    assert accounts.state_of("13", tmp_path / "none") == ""
    program.write_text("#!/bin/sh\necho 'sacct: error: Unable to contact slurm controller' >&2; exit 1\n")
    assert accounts.state_of("14", tmp_path / "away") == ""
    assert not (tmp_path / "none").exists() and not (tmp_path / "away").exists(), "it is asked again"
