"""`--dry-run` prints what a job's ranks get, variable by variable, and refuses what starting it would refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests import recorded
from tests.conftest import free_port
from tests.typed import refusal
from tests.variables import CHOSEN, TELL, compare, told

if TYPE_CHECKING:
    from tests.conftest import Paceline


def planned(paceline: Paceline, *args: str) -> dict[str, Any]:
    done = paceline.succeeds(*args)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def job_tells_what_was_planned(paceline: Paceline, verb: str, *args: str) -> list[dict[str, str]]:
    shown = planned(paceline, verb, "--dry-run", *args)
    assert shown["job"]["detached"] == (verb == "submit")
    assert not paceline.home.exists(), "a dry run leaves nothing"
    done = paceline.succeeds(verb, *args)
    if verb == "submit":
        assert paceline("wait", done.stdout.strip()).returncode == 0
    real = told(paceline.folder)
    assert len(real) == len(shown["ranks"]) > 0
    for rank, env in zip(shown["ranks"], real, strict=True):
        compare(rank, env, paceline.env)
    ranks: list[dict[str, str]] = shown["ranks"]
    return ranks


MPI = pytest.param("mpi", marks=pytest.mark.needs("mpirun"))


@pytest.mark.parametrize("framework", ["torch", "paddle", "tensorflow", "jax", MPI, "indexed", "slurm"])
def test_every_variable_of_every_rank(paceline: Paceline, framework: str) -> None:
    paceline.script(TELL)
    for package in ("paddle", "tensorflow", "jax"):  # their variables are paceline's, whether they are there or not
        paceline.script("", f"packages/{package}.py")
    paceline.env["PYTHONPATH"] = str(paceline.folder / "packages")
    args = ("-n", "2", "--framework", framework, "--name", "mine", "--env", "A=1", "script.py")
    ranks = job_tells_what_was_planned(paceline, "run", *args)
    assert [rank["PACELINE_RANK"] for rank in ranks] == ["0", "1"]
    assert all(rank["A"] == "1" and rank["OMP_NUM_THREADS"].isdigit() for rank in ranks)
    assert all(rank["PACELINE_MAIN_PORT"] == rank["PACELINE_JOB_ID"] == CHOSEN for rank in ranks)
    assert ranks[1]["PACELINE_ERROR_FILE"] == f"{paceline.home}/jobs/mine/errors/0/rank-1.json"
    if framework == "tensorflow":
        config = json.loads(ranks[1]["TF_CONFIG"])
        assert config["cluster"]["worker"] == [f"127.0.0.1:{CHOSEN}"] * 2


def test_of_a_submitted_job_with_all_that_has_variables(paceline: Paceline) -> None:
    paceline.script(TELL)
    (paceline.folder / "data").mkdir()
    (paceline.folder / "paceline.toml").write_text('[volumes]\nset = "data"\n')
    paceline.env["TOKEN"] = "hunter2"
    more = ("--secret", "TOKEN", "--data", "set:/mnt/set", "--checkpoint-dir", "saved", "--rdzv-id", "mine")
    ranks = job_tells_what_was_planned(paceline, "submit", "-n", "2", "--name", "it-", *more, "script.py")
    assert ranks[0]["TOKEN"] == "<secret>"
    assert ranks[0]["PACELINE_DATA_SET"] == f"{paceline.folder}/data"
    assert ranks[0]["TORCHELASTIC_ERROR_FILE"].startswith(f"{paceline.home}/jobs/it-{CHOSEN}/")


@pytest.mark.parametrize(
    ("asked", "seen"), [((), "2,5"), (("--devices", "5,2"), "5,2"), (("--gpus", "1"), CHOSEN), (("--gpus", "0"), "")]
)
def test_of_a_job_with_devices(paceline: Paceline, asked: tuple[str, ...], seen: str) -> None:
    paceline.script(TELL)
    paceline.env["CUDA_VISIBLE_DEVICES"] = "2,5"
    ranks = job_tells_what_was_planned(paceline, "submit", "-n", "2", *asked, "script.py")
    assert ranks[0].get("CUDA_VISIBLE_DEVICES", "2,5") == seen


def test_of_a_snapshot_whose_script_decides_the_framework(paceline: Paceline) -> None:
    paceline.script("import jax\n", "source/script.py")
    paceline.script("", "packages/jax.py")
    paceline.env["PYTHONPATH"] = str(paceline.folder / "packages")
    code = ("--sync-mode", "snapshot", "--sync-source", "source")
    job = planned(paceline, "submit", "--dry-run", *code, "script.py")["job"]
    assert job["framework"] == "jax"


def test_of_one_machine_among_several(paceline: Paceline) -> None:
    paceline.script(TELL)
    port = free_port()
    nodes = ("--nnodes", "2", "-n", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    commands = [("run", *nodes, "--node-rank", str(rank), "--name", f"n{rank}", "script.py") for rank in (0, 1)]
    shown = [planned(paceline, command[0], "--dry-run", *command[1:])["ranks"][0] for command in commands]
    running = [paceline.start(*command) for command in commands]
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    for number, (rank, env) in enumerate(zip(shown, told(paceline.folder), strict=True)):
        compare(rank, env, paceline.env)
        assert (rank["GROUP_RANK"], rank["MASTER_PORT"], rank["WORLD_SIZE"]) == (str(number), CHOSEN, CHOSEN)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused_alike(paceline: Paceline, *args: str) -> str:
    """The one line with which a job is refused, the same by a dry run and by its start."""
    before = sorted(paceline.folder.rglob("*"))
    lines = {refusal(paceline, verb, *more, *args) for verb in ("submit", "run") for more in ((), ("--dry-run",))}
    assert sorted(paceline.folder.rglob("*")) == before, "nothing is left"
    assert len(lines) == 1, lines
    return lines.pop()


def test_a_dry_run_refuses_what_submit_refuses(paceline: Paceline) -> None:
    paceline.script("", "train.py")
    (paceline.folder / "paceline.toml").write_text('[volumes]\ngone = "/no/such/place"\n')
    (paceline.folder / "file").write_text("")
    (paceline.folder / "code" / "it").mkdir(parents=True)
    recorded.ended(paceline, "taken")
    snapshot = ("--sync-mode", "snapshot", "--sync-source")
    for args, why in (
        (("--secret", "TOKEN"), "secret TOKEN is not set in your environment"),
        (("--data", "set:/set"), "no volume 'set'"),
        (("--data", "gone:/set"), "no such file or directory"),
        (("--name", "taken"), "a job named taken has its files in"),
        (("--log-dir", "file"), "it is not a folder"),
        ((*snapshot, "nowhere"), "does not exist; name a folder"),
        ((*snapshot, ".", "--name", "it", "--working-dir", "."), "is there already; remove it"),
        (("--preload", "nowhere"), "no such module"),
    ):
        assert why in refused_alike(paceline, *args, "train.py")
    (paceline.folder / "job.yaml").write_text("script: train.py\nresume_from: nosuch\n")
    assert "no job 'nosuch' to resume from" in refused_alike(paceline, "job.yaml")


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        pytest.param("git", "no git repository at", marks=pytest.mark.needs("git")),
        pytest.param("rsync", "does not exist; name a folder", marks=pytest.mark.needs("rsync")),
    ],
)
def test_a_dry_run_refuses_sources_that_are_not_there(paceline: Paceline, mode: str, why: str) -> None:
    paceline.script("", "train.py")
    assert why in refused_alike(paceline, "--sync-mode", mode, "--sync-source", "nowhere", "train.py")
