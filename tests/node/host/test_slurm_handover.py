"""What the end of a job says in the comment of its Slurm job, and what is read there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS

from paceline.node.host.slurm import cluster, handover, mirror
from paceline.node.host.slurm.folder import JobFolder, Life
from paceline.node.host.slurm.queue import Queue

from .test_slurm_queue import command, job, line, squeue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIFE = Life("7", 0)


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    """A job whose nodes share no disk, and which has run on one."""
    made = job(tmp_path, options={"broadcast": True}, spec={"checkpoint_dir": None})
    made.add_id("7")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows 2>/dev/null")
    assert cluster.asked(made.root, GENEROUS) == "here"
    command(tmp_path, "scontrol", f'printf %s "$3" > {tmp_path}/comment')
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    return made


@pytest.fixture
def told(it: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What a life's end says: it is put into the comment, shown by squeue with some words of the site, and read."""

    def tells(outcome: dict[str, Any], error: str | None = None, nodes: str = "n[0-1]") -> dict[str, Any]:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
        found = {"state": "FAILED", "exit_code": 3, "error": error, "attempt": 2}
        handover.report(it, LIFE, {"next": None, **outcome}, found, 1)
        comment = (tmp_path / "comment").read_text().removeprefix("comment=")
        assert len(comment.encode()) < 1000
        monkeypatch.delenv("SLURM_JOB_ID")
        comment += " queue=x"
        (tmp_path / "rows").write_text(line(JobID="7", State="FAILED", Comment=comment[:1024], Name="it") + "\n")
        mirror.absorb(it, Queue(it.root, 0.0))
        read = it.outcome(LIFE)
        assert read is not None
        return {**read, "comment": comment}

    return tells


def failed_rank(it: JobFolder, **failure: Any) -> None:
    run = it.part(LIFE, 0) / "it"
    run.mkdir(parents=True)
    (run / "spec.json").write_text("{}")
    known = {"rank": 1, "host": "n1", "exit_code": 3, "signal": "", "oom": False, "message": "KeyError: 's3cret'"}
    (run / "status.json").write_text(json.dumps({"state": "FAILED", "failure": {**known, **failure}}))


@pytest.mark.parametrize(
    ("failure", "how"),
    [({}, "exit code 3"), ({"signal": "SIGSEGV"}, "killed by SIGSEGV"), ({"oom": True}, "killed: out of memory")],
)
def test_what_a_rank_raised_is_not_shown_to_other_users(
    it: JobFolder, told: Callable[..., dict[str, Any]], failure: dict[str, Any], how: str
) -> None:
    failed_rank(it, **failure)
    read = told({}, error="rank 1: KeyError: 's3cret'")
    assert "s3cret" not in read["comment"]
    assert read["why"] == f"rank 1 on n1: {how}; paceline logs it has more"
    assert (read["state"], read["exit_code"], read["host"], read["nodes"]) == ("FAILED", 3, "n0", "n[0-1]")


def test_what_srun_or_a_start_up_file_printed_is_not_shown_either(told: Callable[..., dict[str, Any]]) -> None:
    read = told({"why": "export TOKEN=s3cret; see slurm.out", "is_printed": True})
    assert "s3cret" not in read["comment"] and "paceline logs it has more" in read["why"]


@pytest.mark.parametrize("why", ["is gone " * 200, "é" * 900, "😀" * 900, '"\\' * 600])
@pytest.mark.parametrize("nodes", ["n[0-1]", ",".join(f"node{number}" for number in range(300))])
def test_a_comment_has_no_more_than_squeue_shows(told: Callable[..., dict[str, Any]], why: str, nodes: str) -> None:
    read = told({"why": why}, nodes=nodes)
    assert (read["exit_code"], read["host"]) == (3, "n0")
    assert len(read["why"]) > 40 and why.startswith(read["why"])


def test_words_of_the_site_are_no_outcome(it: JobFolder, tmp_path: Path) -> None:
    for said, why in (("queue=x", None), ("{}", None), ("refused: n0: cannot write", "n0: cannot write")):
        (tmp_path / "rows").write_text(line(JobID="7", State="FAILED", Comment=f"paceline:abc {said}") + "\n")
        mirror.absorb(it, Queue(it.root, 0.0))
        assert (it.outcome(LIFE) or {}).get("why") == why
