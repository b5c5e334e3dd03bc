"""Python programs that ranks start: `horovod` is there, and nothing else has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import paceline as package

if TYPE_CHECKING:
    from tests.conftest import Paceline

FOLDER = Path(package.__file__).parent / "horovod" / "startup"
STATE = "import sys; print(sys.path, sorted(sys.modules), sys.modules.get('sitecustomize'))"


def python(code: str, *folders: Path, **variables: str) -> tuple[str, str]:
    """What a program prints, on stdout and stderr, whose PYTHONPATH has these folders."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize("theirs", [None, "print('theirs', __file__)", "import nothing_of_this_name", "1 / 0", "1 +"])
def test_a_program_that_does_not_import_horovod_is_as_it_was(tmp_path: Path, theirs: str | None) -> None:
    """It has the same modules and the same path; another sitecustomize has run, or its error is shown by Python."""
    if theirs is not None:
        (tmp_path / "sitecustomize.py").write_text(theirs)
    assert python(STATE, FOLDER, tmp_path) == python(STATE, tmp_path)


def test_an_installed_horovod_is_hidden_only_if_asked(tmp_path: Path) -> None:
    code = "import horovod, sys; print(horovod.__version__, 'paceline' in sys.modules and horovod.run.__module__)"
    ours = "0.28.1 paceline.horovod.runner\n"
    mere_folder, installed = tmp_path / "mere_folder", tmp_path / "installed"
    (mere_folder / "horovod").mkdir(parents=True)
    (installed / "horovod").mkdir(parents=True)
    (installed / "horovod" / "__init__.py").write_text("__version__ = 'installed'; run = int")
    assert python(code, FOLDER, mere_folder, PACELINE_HOROVOD="fallback") == (ours, "")
    assert python(code, FOLDER, installed, PACELINE_HOROVOD="fallback")[0].startswith("installed")
    assert python(code, FOLDER, installed, PACELINE_HOROVOD="paceline") == (ours, "")


WORKERS = """
    import os
    import sys
    import torch
    import horovod
    import horovod.torch as hvd

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index * index

    def total(factor):
        hvd.init()
        assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == (str(hvd.rank()), str(hvd.size()))
        return hvd.allreduce(torch.tensor([factor * (hvd.rank() + 1.0)]), op=hvd.Sum).item()

    if __name__ == "__main__":
        if "--num-proc" in sys.argv:
            print("totals", horovod.run(total, args=(2.0,), np=2, hosts="localhost:2", use_mpi=False, verbose=2))
        else:
            for method in ("spawn", "forkserver") if os.environ["HOROVOD_RANK"] == "0" else ():
                loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context=method)
                print(method, [int(batch) for batch in loader], flush=True)
            print("total", total(2.0), flush=True)
"""


@pytest.mark.torch
def test_wrappers_start_a_script_whose_loaders_start_programs(paceline: Paceline) -> None:
    script = paceline.script(WORKERS, "train.py")
    (paceline.folder / paceline.script(f'#!/bin/sh\nexec {sys.executable} "$@"\n', "run.sh")).chmod(0o700)
    done = paceline.succeeds("horovodrun", "-np", "2", "env", "X=1", "./run.sh", script)
    for line in ("spawn [0, 1, 4, 9]", "forkserver [0, 1, 4, 9]", "total 6.0"):
        assert line in done.stdout


@pytest.mark.torch
def test_a_function_runs_on_ranks_that_a_script_starts(paceline: Paceline) -> None:
    script = paceline.script(WORKERS, "train.py")
    done = paceline.succeeds("run", script, "--num-proc", "2")
    assert "totals [6.0, 6.0]" in done.stdout
