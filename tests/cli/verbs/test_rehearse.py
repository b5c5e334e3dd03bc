"""`paceline run --rehearse N`: faults that only many ranks show are found, right scripts have no findings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks.scripts.rehearsed import FAULTY, RIGHT
from tests.typed import refusal

if TYPE_CHECKING:
    from tests.conftest import Paceline

DOCS = Path(__file__).parents[3] / "docs"
_AT = re.compile(r"^script\.py:(\d+): ", re.MULTILINE)


def marked(scripts: dict[str, str], *in_gate: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in in_gate else pytest.mark.nightly) for name in scripts]


@pytest.mark.parametrize("name", marked(FAULTY, "parts of four"))
def test_a_fault_is_found(paceline: Paceline, name: str) -> None:
    (paceline.folder / "script.py").write_text(FAULTY[name])
    done = paceline("run", "--rehearse", "8", "--rehearse-seed", "1", "script.py")
    assert done.returncode == 1, done.stderr
    faults = {number for number, it in enumerate(FAULTY[name].splitlines(), 1) if "# fault" in it}
    assert faults & set(map(int, _AT.findall(done.stdout))), done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_has_no_findings(paceline: Paceline, name: str) -> None:
    (paceline.folder / "script.py").write_text(RIGHT[name])
    done = paceline("run", "--rehearse", "8", "--rehearse-seed", "1", "script.py")
    is_training = name not in ("a ring", "each rank works alone")
    assert done.returncode == (0 if is_training else 1), done.stdout + done.stderr
    assert ("8 ranks agree" if is_training else "nothing was compared but files") in done.stderr


def test_the_line_of_the_page_kills_a_rank_and_leaves_nothing(paceline: Paceline) -> None:
    line = re.search(r"^\$ paceline (run --rehearse .*)$", (DOCS / "rehearse.md").read_text(), re.MULTILINE)
    assert line is not None
    # Temporary files have names of their own. After the imports: before them, each rank would import torch by itself.
    temporary = "import tempfile\nwith tempfile.NamedTemporaryFile(), tempfile.TemporaryFile():\n    pass\n"
    begins = "dist.init_process_group"
    script = RIGHT["ddp with states"].replace(begins, temporary + begins, 1)
    assert temporary in script
    (paceline.folder / "train.py").write_text(script)
    done = paceline.succeeds(*line[1].split())
    assert re.search(r"8 ranks agree: .*rank \d was killed after step \d+, and all went on", done.stderr), done.stderr
    assert not (paceline.folder / "state.pt").exists()  # the folder is as it was
    assert paceline.json("list", "-A") == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rehearse", "1", "script.py"], "has 2 ranks or more"),
        (["--rehearse", "0", "script.py"], "has 2 ranks or more"),
        (["--rehearse", "many", "script.py"], "has 2 ranks or more"),
        (["--rehearse", "5000", "script.py"], "more ranks than one machine"),
        (["--rehearse", "4000", "script.py"], "of memory are free here"),
        (["--rehearse", "8", "-n", "4", "script.py"], "leave it out"),
        (["--rehearse", "8", "--nnodes", "1:2", "script.py"], "--nnodes says nothing"),
        (["--rehearse", "8", "--detach", "script.py"], "--detach says nothing"),
        (["--rehearse", "8", "-H", "there:2", "script.py"], "on the cores of this machine"),
        (["--rehearse", "8", "--no-python", "ls"], "is a command"),
        (["--rehearse", "8", "--framework", "jax", "script.py"], "not --framework jax"),
        (["--rehearse-steps", "3", "script.py"], "add --rehearse 8"),
    ],
)
def test_what_makes_no_sense_is_refused(paceline: Paceline, args: list[str], words: str) -> None:
    paceline.script("import torch")
    assert words in refusal(paceline, "run", *args)


@pytest.mark.nightly
def test_a_rehearsal_that_takes_too_long_says_how_far_it_came(paceline: Paceline) -> None:
    paceline.script("""
        import time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for _ in range(1000):
            time.sleep(1)
            dist.barrier()
    """)
    done = paceline("run", "--rehearse", "2", "--time-limit", "8s", "script.py")
    assert done.returncode == 0 and "2 ranks agree as far as they came" in done.stderr, done.stderr
