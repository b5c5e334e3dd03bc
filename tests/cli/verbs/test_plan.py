"""What `paceline plan` refuses and leaves behind, and what a dry run says of the memory of a job."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.backends.test_contract import install
from tests.conftest import eventually
from tests.typed import refusal, typed

from paceline.cli.verbs import plan
from paceline.job.spec import JobSpec

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
SCRIPT = """
    import torch, paceline
    def main(run):
        with run.build():
            model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy({}))
        data = torch.utils.data.TensorDataset(torch.ones(100, 500))
        {}
        print("trained")
    if __name__ == "__main__":
        with paceline.init() as run:
            main(run)
"""
PASS = 'run.backward(model(torch.ones(1, 500)).sum()); open("trained", "w")'
WORKERS = """for (x,) in run.dataloader(data, batch_size=2, num_workers=2, multiprocessing_context="{}"):
            run.backward(model(x).sum())
"""


# -- paceline plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("", "--ranks is empty; give a value, or leave the flag out"),
        ("0", "--ranks 0: a job has from 1 to 65536 ranks; write for example --ranks 2,4"),
        ("1-4", "--ranks '1-4' is not a list of numbers; write for example --ranks 2,4"),
        ("2,99999", "--ranks 2,99999: a job has from 1 to 65536 ranks; write for example --ranks 2,4"),
    ],
)
def test_numbers_of_ranks_that_are_none(paceline: Paceline, ranks: str, said: str) -> None:
    assert refusal(paceline, "plan", "--ranks", ranks, paceline.script("pass")) == said


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_plan_leaves_no_workers_and_no_files(paceline: Paceline, tmp_path: Path, context: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # sockets are in it, and their names must be short
        check_leaves_nothing(paceline, tmp_path, Path(folder), context)


def check_leaves_nothing(paceline: Paceline, tmp_path: Path, folder: Path, context: str) -> None:
    paceline.env["TMPDIR"] = str(folder)
    with open(tmp_path / "said", "w") as said:  # a pipe would be open as long as a worker is there
        paceline.script(SCRIPT.format("", WORKERS.format(context)))
        process = paceline.start("plan", "-n", "1", "script.py", stdout=said, stderr=said)
    assert process.wait(200) == 0, (tmp_path / "said").read_text()
    assert not [path for path in folder.iterdir() if path.name.startswith(("pymp", "paceline"))]
    # They are killed, or end when they read that the plan has.
    eventually(
        lambda: not [pid for pid in filter(str.isdecimal, os.listdir("/proc")) if _has(pid, str(folder))],
        "all workers have ended",
    )


def _has(pid: str, folder: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ") as file:
            return f"TMPDIR={folder}\0" in file.read() and _state(pid) != "Z"
    except OSError:
        return False


def _state(pid: str) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


# -- a dry run ---------------------------------------------------------------------------------------------------------


def memory_said(paceline: Paceline, *flags: str, script: str = SCRIPT.format("", PASS)) -> str:
    """What a dry run says of memory; it trains nothing."""
    done = typed(paceline, "run", "--dry-run", *flags, paceline.script(script))
    assert done.returncode == 0, done.stderr
    assert not (paceline.folder / "trained").exists()
    assert not paceline.home.exists()
    (line,) = done.stderr.splitlines()
    return line.removeprefix("paceline: ")


@pytest.mark.parametrize(
    ("strategy", "flags", "said"),
    [
        ('shard="auto"', ("--env", "PACELINE_MEMORY=1G"), 'Sequential fits: shard="auto" takes a copy on each rank: '),
        (
            "shard=2",
            ("-n", "4", "--memory", "256Mi"),
            "Sequential fits: shard=2: .* of the 64.0 MiB that each of 4",
        ),
        ('shard="node"', ("-n", "2", "--memory", "64Mi"), 'Sequential does not fit: shard="node": .* of the 32.0 MiB '),
    ],
)
def test_a_dry_run_says_whether_the_model_fits(
    paceline: Paceline, strategy: str, flags: tuple[str, ...], said: str
) -> None:
    line = memory_said(paceline, *flags, script=SCRIPT.format(strategy, PASS))
    assert re.match(said, line)
    assert line.endswith("see paceline plan script.py")


def test_what_the_script_says_does_not_fit_and_another_way_does(paceline: Paceline) -> None:
    line = memory_said(paceline, "-n", "4", "--env", "PACELINE_MEMORY=40M")
    assert "does not fit: a copy on each rank: " in line
    assert '90% may be used; shard="auto" would take ' in line


def test_a_script_that_makes_its_model_elsewhere_is_not_run(paceline: Paceline) -> None:
    for script in ("open('trained', 'w')", "import paceline\nrun.build()", "with run.build(): open('trained', 'w')"):
        done = typed(paceline, "run", "--dry-run", paceline.script(script))
        assert (done.returncode, done.stderr, (paceline.folder / "trained").exists()) == (0, "", False)


def test_a_plan_that_fails_is_a_line(paceline: Paceline) -> None:
    unknown = "script.py: what it takes in memory is not known"
    assert memory_said(paceline, script=SCRIPT.format("", "raise SystemExit('no data here')")) == (
        f"{unknown}: no data here; see paceline plan script.py"
    )


def test_memory_of_other_places(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> None:
    install(paceline)
    done = paceline.succeeds("run", "--dry-run", "--on", "oak", "-n", "2", paceline.script(SCRIPT.format("", PASS)))
    assert done.stderr.startswith("paceline: Sequential on each of 2 ranks: a copy on each rank takes ")
    assert "; what a rank has there is not known: say it with --env PACELINE_MEMORY=24G; see" in done.stderr

    class Node:
        def __init__(self, memory: int, *gpus: int) -> None:
            self.memory, self.gpus = memory, [{"memory": each} for each in gpus]

    class Machines:
        name = "lab"

        def nodes(self, warn: Any) -> list[Node]:
            return [Node(1 << 30, 8 << 20, 6 << 20), Node(4 << 30), Node(2 << 30, 80 << 30)]

        def usage(self, names: Any, warn: Any) -> dict[str, Any]:
            return {}

    monkeypatch.chdir(paceline.folder)
    for more, said in (
        ({"ranks": 2, "nodes": 2}, "fits: a copy on each rank: 4.* MiB of the 1.0 GiB that each of 4"),
        ({"ranks": 2, "devices": 2, "nodes": 2}, "does not fit: .* of the 6.0 MiB that each of 4"),
    ):
        spec = JobSpec.validated({"script": "script.py", **more})
        found = plan.fits(spec, spec, Machines())  # type: ignore[arg-type]
        assert re.search(said, str(found))
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    for ranks, why in ((1, f": torch is not installed for {sys.executable}"), ("auto", ", as the number of ranks is")):
        spec = JobSpec.validated({"script": "script.py", "ranks": ranks})
        found = plan.fits(spec, spec, Machines())  # type: ignore[arg-type]
        assert str(found).startswith(f"script.py: what it takes in memory is not known{why}")
