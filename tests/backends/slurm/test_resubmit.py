"""What a job asks of Slurm is kept with it: shown, asked for again when it is run again, and changed by flags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.typed import refusal, typed

from .fake import Login

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = (
    "--slurm",
    "partition=gpu",
    "--slurm",
    "exclude=broken1",
    "--slurm",
    "gres=gpu:a100:2",
    "--slurm",
    "requeue=no",
)
ASKED = {"--partition=gpu", "--exclude=broken1", "--gres=gpu:a100:2", "--no-requeue"}


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def ended(login: Login, name: str, *args: str) -> None:
    """A job that was submitted with these arguments, and has ended."""
    done = login("submit", "--on", "lab", "--name", name, *args)
    assert done.returncode == 0, done.stderr
    for folder in (login.folder / "root/slurm").iterdir():
        life = folder / "lives" / f"{(folder / 'ids').read_text().split()[-1].partition('_')[0]}.0"
        life.mkdir(parents=True, exist_ok=True)
        (life / "outcome.json").write_text('{"next": null, "state": "STOPPED", "time": 1.0}')


def asked(login: Login, *args: str) -> set[str]:
    """What a resubmitted job would ask of Slurm."""
    done = typed(login, "resubmit", "--on", "lab", "--dry-run", *args)
    assert done.returncode == 0, done.stderr
    return {line.removeprefix("#SBATCH ") for line in done.stdout.splitlines() if line.startswith("#SBATCH")}


def shown(login: Login, name: str) -> dict[str, Any]:
    job: dict[str, Any] = login.json("get", "--on", "lab", name)
    return job


def test_options_are_kept_shown_and_changed(login: Login) -> None:
    login.settings('partition = "small", exclude = "old", account = "vision"')
    ended(login, "it", *FLAGS, "--chain", login.script("pass"))
    assert shown(login, "it")["options"] == {
        "slurm": {"partition": "gpu", "exclude": "broken1", "gres": "gpu:a100:2", "requeue": "no"}, "chain": True,
    }  # fmt: skip
    told = login("get", "--on", "lab", "it").stdout
    assert "slurm.partition=gpu, slurm.exclude=broken1, slurm.gres=gpu:a100:2, slurm.requeue=no, chain=true" in told
    assert asked(login, "it") >= ASKED | {"--account=vision"}
    changed = asked(login, "--slurm", "partition=big", "--slurm", "exclude=", "--slurm", "requeue=yes", "it")
    assert changed >= {"--partition=big", "--exclude=old", "--gres=gpu:a100:2", "--requeue"}
    done = login("resubmit", "--on", "lab", "--slurm", "partition=big", "--option", "chain=", "it")
    assert done.stdout == "it-2\n", done.stderr
    stored = json.loads((login.folder / "root/slurm/it-2/job.json").read_text())
    assert stored["options"]["slurm"] == {
        "partition": "big", "exclude": "broken1", "account": "vision", "gres": "gpu:a100:2", "no-requeue": True,
    }  # fmt: skip
    assert (stored["options"]["chain"], "chain" in shown(login, "it-2")["options"]) == (False, False)


def test_a_flag_replaces_what_the_job_said_of_the_same_in_another_way(login: Login) -> None:
    login.settings('account = "vision"')
    ended(login, "it", "--slurm", "p=gpu", "--slurm", "gres=gpu:a100:2,nic:1", "--slurm", "t=60", login.script("pass"))
    now = asked(login, "--queue", "big", "--gpus", "4", "--time-limit", "8h", "it")
    assert now >= {"--partition=big", "--gres=gpu:a100:4,nic:1", "--time=0-08:00:00", "--account=vision"}
    ended(login, "other", "--queue", "a", "--gpus", "2", "--time-limit", "1h", login.script("pass"))
    now = asked(login, "--slurm", "partition=b", "--slurm", "gpus=h100:8", "--slurm", "time=30", "other")
    assert now >= {"--partition=b", "--gpus=h100:8", "--time=30"}
    assert not any(line.startswith("--gres") for line in now)
    assert asked(login, "--slurm", "gres=nic:1", "other") >= {"--partition=a", "--gres=gpu:2,nic:1"}
    said = "--slurm 'x': should be a mapping of names to values"
    assert refusal(login, "resubmit", "--on", "lab", "--option", "slurm=x", "it") == said
    said = "--queue and --slurm partition say the same; give one"
    assert refusal(login, "resubmit", "--on", "lab", "--queue", "a", "--slurm", "partition=b", "it") == said


def test_an_option_that_a_job_does_not_have_is_taken_back_without_a_word(login: Login) -> None:
    login.settings('exclude = "old"')
    ended(login, "it", login.script("pass"))
    assert asked(login, "--slurm", "exclude=", "it") >= {"--exclude=old"}


def test_a_job_file_has_options(login: Login) -> None:
    login.script("pass")
    job = login.script(
        """
        script: script.py
        backend: lab
        options:
          chain: true
          slurm: {partition: gpu, qos: high}
        """,
        "job.yaml",
    )
    done = login("submit", "--dry-run", "--slurm", "partition=big", job)
    assert "#SBATCH --partition=big\n" in done.stdout and "#SBATCH --qos=high\n" in done.stdout, done.stderr


def test_a_job_of_an_array_keeps_its_index(login: Login) -> None:
    ended(login, "it", "--array", "1,5-7%2", "--slurm", "partition=gpu", login.script("pass"))
    assert shown(login, "it-5")["options"]["array"] == "1,5-7%2"
    assert "--partition=gpu" in (again := asked(login, "it-5")) and not any(
        line.startswith("--array") for line in again
    )
    several = "--array: one job is run again, not several; leave it out"
    assert refusal(login, "resubmit", "--on", "lab", "--array", "0-3", "it-5") == several
    for name, old in (("it-5-2", "it-5"), ("it-5-3", "it-5-2")):
        done = login("resubmit", "--on", "lab", old)
        assert done.stdout == f"{name}\n", done.stderr
        stored = json.loads((login.folder / f"root/slurm/{name}/job.json").read_text())
        assert stored["task"] is None
        assert stored["node"]["env"] == {
            "SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1",
            "SLURM_ARRAY_TASK_MAX": "7",
        }  # fmt: skip
        (folder := login.folder / f"root/slurm/{name}/lives/7.0").mkdir()
        (folder / "outcome.json").write_text('{"next": null, "state": "STOPPED", "time": 1.0}')


@pytest.mark.parametrize("verb", ["submit", "resubmit"])
def test_unknown_options_are_refused(login: Login, verb: str) -> None:
    what = login.script("pass")
    if verb == "resubmit":
        ended(login, "it", what)
        what = "it"
    for flags, said in {
        ("--option", "cain=true"): "--option cain: lab has no such option; did you mean chain?",
        ("--option", "root=/tmp"): "--option root: lab has no such option; choose one of array, chain,",
        ("--option", "chain=perhaps"): "--chain 'perhaps': should be true or false",
        ("--slurm", "partitoin=x"): "--slurm: sbatch has no option 'partitoin'; did you mean partition?",
        ("--kind", "job"): "--kind means nothing to lab, whose backend is slurm; leave it out",
    }.items():
        assert refusal(login, verb, "--on", "lab", *flags, what).startswith(said)
