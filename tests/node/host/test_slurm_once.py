"""Slurm gets a job once, whatever it answers and when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.node.errors import Refused
from paceline.node.host.slurm import call
from paceline.node.host.slurm.end import finish
from paceline.node.host.slurm.look.partitions import _GPU

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIES = 4
# What sbatch does at each call: Slurm takes the job or not, and says so or not.
CALLS = st.lists(st.sampled_from(["says", "silent", "lost"]), min_size=20, max_size=20)
LOOKS = st.lists(st.booleans(), min_size=20, max_size=20)  # whether squeue answers


class Slurm:
    """A controller that answers as is written; what it takes without a word is in its list after the next pause."""

    def __init__(self, calls: list[str], looks: list[bool]) -> None:
        self._calls, self._looks = iter(calls), iter(looks)
        self.jobs: list[str] = []
        self._coming: list[str] = []

    def sbatch(self, *args: Any, **kwargs: Any) -> str:
        does = next(self._calls)
        number = str(100 + len(self.jobs) + len(self._coming))
        if does == "says":
            self.jobs.append(number)
            return f"{number}\n"
        if does == "silent":
            self._coming.append(number)
        raise call.Away("sbatch: Socket timed out")

    def sleep(self, seconds: float) -> None:
        self.jobs, self._coming = [*self.jobs, *self._coming], []

    def taken(self) -> str | None:
        if not next(self._looks):
            raise call.Away("squeue: Socket timed out")
        return next(iter(self.jobs), None)


@given(CALLS, LOOKS)
def test_no_job_is_there_twice_and_none_is_forgotten(calls: list[str], looks: list[bool]) -> None:
    slurm = Slurm(calls, looks)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(call, "call", slurm.sbatch)
        patched.setattr(call.time, "sleep", slurm.sleep)
        try:
            number = call.batch_job(Path("batch.sh"), {}, slurm.taken, tries=TRIES, pause=1.0, seconds=1.0)
        except call.Unknown:
            assert len(slurm.jobs) <= 1
        except Refused as error:
            assert "nothing was submitted" in str(error) and slurm.jobs == []
        else:
            assert slurm.jobs == [number]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on PATH with an sbatch that notes its variables."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    yield tmp_path


def test_the_locale_of_a_job_is_that_of_its_user(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    call.call("sbatch", "batch.sh")
    there = (commands / "env").read_text().split("\n")
    assert "LC_ALL=de_DE.UTF-8" in there and not any(line.startswith("SLURM_TIME_FORMAT") for line in there)


def test_what_was_asked_for_the_first_job_of_a_chain_is_not_asked_for_the_next() -> None:
    once = "#SBATCH --hold\n#SBATCH --begin=now+1hour\n"
    later = "#!/bin/sh\n#SBATCH --job-name=it\n{}#SBATCH --time=10\necho --hold\n"
    assert finish._ONCE.sub("", later.format(once)) == later.format("")


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:4", 4), ("gpu:a100:4", 4), ("gpu:1080ti:8(S:0-1)", 8), ("gpu:3090:2,nic:1", 2), ("gpu:1g.10gb:7", 7),
        ("nic:1,gpu:h100:1(IDX:0)", 1),
    ],
)  # fmt: skip
def test_kinds_of_gpus_may_begin_with_a_digit(gres: str, count: int) -> None:
    assert [int(it["count"]) for it in _GPU.finditer(gres)] == [count]
