"""`except KeyboardInterrupt` of a script that leaves signals to itself: `paceline.init(stop_signals=False)`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

SCRIPT = """
    import os, threading, paceline
    run = paceline.init(checkpoint_dir="checkpoints", stop_signals=False)
    try:
        run.barrier()
        if run.is_main:
            print("ready", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        open(f"interrupted-{run.rank}", "w").close()
"""


def test_ctrl_c_raises_keyboard_interrupt(paceline: Paceline) -> None:
    paceline.script(SCRIPT)
    process = paceline.start("run", "-n", "2", "script.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=GENEROUS)
    assert process.returncode == 130, err
    assert sorted(path.name for path in paceline.folder.glob("interrupted-*")) == ["interrupted-0", "interrupted-1"]


def test_other_signals_end_the_ranks(paceline: Paceline) -> None:
    paceline.script(SCRIPT)
    process = paceline.start("run", "script.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=GENEROUS)
    assert process.returncode == 143, err
    assert not list(paceline.folder.glob("interrupted-*"))
