"""Scripts that the tests of training start end as `python script.py` does, and are found as what a test has started."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS, eventually
from tests.train.scripts import Script, run

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, []),
        ("sys.exit(3)", 3, []),
        ("sys.exit('no')", 1, ["no"]),
        ("os._exit(4)", 4, []),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, []),
        ("int('x')", 1, None),
    ],
)
def test_a_script_ends_as_python_does(paceline: Paceline, end: str, code: int, said: list[str] | None) -> None:
    paceline.script(f"import os, signal, sys\nprint(sys.argv[1:], os.environ['NAME'], flush=True)\n{end}")
    done = run(paceline, "script.py", "--flag", env={"NAME": "value"}, timeout=GENEROUS)
    assert (done.returncode, done.stdout) == (code, "['--flag'] value\n"), done.stderr
    if said is not None:
        assert done.stderr.splitlines() == said
    elif code == 1:
        file = f'  File "{paceline.folder}/script.py", line 3, in <module>'
        assert done.stderr.splitlines()[:2] == ["Traceback (most recent call last):", file]


def test_a_script_and_its_children_are_found(paceline: Paceline) -> None:
    paceline.script("import os, signal\nif child := os.fork():\n    print(child, flush=True)\nsignal.pause()")
    process = Script(paceline, "script.py", session=True)
    assert process.stdout is not None
    pids = {process.pid, int(process.stdout.readline())}
    eventually(lambda: set(paceline.processes()) == pids, lambda: str((paceline.processes(), pids)))
    process.terminate()
    assert process.wait(GENEROUS) == -signal.SIGTERM
    (child,) = paceline.processes()
    os.kill(child, signal.SIGKILL)
    process.communicate()
