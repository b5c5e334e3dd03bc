"""Files that a script leaves open when it ends are as whole under paceline as under python."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

HELPERS = """
    import gzip, zipfile

    def fill(name):
        packed = gzip.GzipFile(f"{name}.gz", "wb", mtime=0)
        packed.write(b"packed" * 1000)
        archive = zipfile.ZipFile(f"{name}.zip", "w")
        archive.writestr(zipfile.ZipInfo("member"), "member" * 1000)
        lines = open(f"{name}.txt", "w")
        lines.write("lines")
        return packed, archive, lines

    held = fill("imported")

    class Holder:
        pass

    cycle = Holder()
    cycle.itself = cycle
    cycle.held = fill("cycle")
"""

SCRIPT = """
    import os, threading, torch
    import helpers
    {before}

    class Footer:
        def __del__(self):
            os.write(os.open("footer.txt", os.O_WRONLY | os.O_CREAT), b"footer")  # by then there is no builtin open

    footer = Footer()
    footer.itself = footer
    held = helpers.fill("main")
    {after}
"""

NAMES, ENDINGS = ("main", "imported", "cycle"), ("gz", "zip", "txt")
CASES = {
    "daemon thread": ("", "threading.Thread(target=threading.Event().wait, daemon=True).start()"),
    "writer": (
        "from torch.utils.tensorboard import SummaryWriter",
        "writer = SummaryWriter('events')\n    writer.add_scalar('loss', 1.0, 1)",
    ),
    "exception": ("", "raise ValueError('mine')"),
    "process group": ("import torch.distributed as dist", "dist.init_process_group('gloo'); dist.barrier()"),
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".gz", ".zip", ".txt", ".h5")}


@pytest.mark.parametrize("case", CASES)
def test_open_files_are_written_whole(paceline: Paceline, case: str) -> None:
    before, after = CASES[case]
    if case == "writer":
        pytest.importorskip("tensorboard")
    expected, found, err = both(paceline, SCRIPT.format(before=before, after=after), SCRIPT.format(before="", after=""))
    assert set(expected) == {"footer.txt", *(f"{a}.{b}" for a in NAMES for b in ENDINGS)}
    assert found == expected, err
    assert "Exception ignored" not in err


def test_open_hdf5_files_are_written_whole(paceline: Paceline) -> None:
    script = """
        import h5py, torch
        file = h5py.File("data.h5", "w")
        values = file.create_dataset("values", data=list(range(1000)))
    """
    expected, found, err = both(paceline, script, script)
    assert found == expected, err
    assert found["data.h5"]


def test_files_of_a_script_whose_daemon_thread_runs_are_whole(paceline: Paceline) -> None:
    """Python leaves the globals of a running thread, and so loses what is in an open file there; paceline does not."""
    paceline.script(HELPERS, "helpers.py")
    paceline.script(
        SCRIPT.format(
            before="",
            after="def loop():\n        while True: len(held)\n    threading.Thread(target=loop, daemon=True).start()",
        )
    )
    done = paceline.succeeds("run", "script.py")
    assert "Traceback" not in done.stderr
    found = files(paceline.folder)
    assert {gzip.decompress(found[f"{name}.gz"]) for name in NAMES} == {b"packed" * 1000}
    assert found["main.zip"] == found["cycle.zip"] == found["imported.zip"]
    assert found["main.txt"] == b"lines"


def test_a_daemon_thread_leaves_its_globals_before_they_are_dropped(paceline: Paceline) -> None:
    paceline.script("""
        import os, sys, threading, torch

        class Footer:
            def __del__(self):
                os.write(2, b"footer")

        footer = Footer()
        footer.itself = footer

        def loop():
            while True: len("held")

        threading.Thread(target=loop, daemon=True).start()
        sys.setswitchinterval(0.5)  # so that it does not interrupt the end
    """)
    done = paceline.succeeds("run", "script.py")
    assert "footer" in done.stderr
    assert "Traceback" not in done.stderr


def both(paceline: Paceline, script: str, alone: str) -> tuple[dict[str, bytes], dict[str, bytes], str]:
    """The files that `alone` leaves under python, without torch, and `script` under paceline, and its stderr there."""
    paceline.script(HELPERS, "helpers.py")
    paceline.script(alone.replace(", torch", ""))
    subprocess.run(
        [sys.executable, "script.py"], cwd=paceline.folder, env=paceline.env, check=True, capture_output=True
    )
    expected = files(paceline.folder)
    for name in expected:
        os.unlink(paceline.folder / name)
    paceline.script(script)
    done = paceline.run("script.py")
    return expected, files(paceline.folder), done.stderr


def test_files_that_a_model_of_several_ranks_holds_are_written_whole(paceline: Paceline) -> None:
    paceline.script("""
        import atexit, sys, zipfile, torch, paceline
        run = paceline.init(checkpoint_every=1)
        atexit.register(lambda: print("imported before the fork:", "tabulate" in sys.modules))
        archive = zipfile.ZipFile(f"{run.rank}.zip", "w")
        archive.writestr("member", "member")
        model = torch.nn.Linear(1, 1)
        model.archive = archive
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        for epoch in run.epochs(1):
            for x in run.steps(torch.ones(2, 1)):
                run.backward(model(x).sum())
                optimizer.step()
    """)
    done = paceline.succeeds("run", "-n", "2", "script.py")
    assert "imported before the fork: True" in done.stdout  # torch's compiler imports it at the end
    assert [zipfile.ZipFile(paceline.folder / f"{rank}.zip").namelist() for rank in range(2)] == [["member"]] * 2
