"""Scripts whose ranks do not work together, and ranks that are asked something on an empty standard input."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests import journals
from tests.conftest import eventually

if TYPE_CHECKING:
    from tests.conftest import Paceline

WARNING = "the script never asked which rank it is, so each of the 2 ranks did all of the work"


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ("import random", True),
        ("import multiprocessing as mp\nwith mp.Pool(1) as pool: pool.map(abs, [1])", True),
        ("import os\nos.getenv('RANK')", False),
        ("import paceline.contract, os\npaceline.contract.recognise(os.environ, [])", False),
        ("import subprocess\nsubprocess.run(['true'])", False),
        ("raise SystemExit(1)", False),
    ],
)
def test_ranks_that_never_join(paceline: Paceline, text: str, warns: bool) -> None:
    paceline.script(text)
    done = paceline.run("-n", "2", "script.py")
    assert done.stderr.count(WARNING) == warns, done.stderr


@pytest.mark.torch
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_importing_torch_is_no_question(paceline: Paceline, method: str) -> None:
    paceline.script("import torch, torch.distributed")
    assert paceline.run("-n", "2", "--start-method", method, "script.py").stderr.count(WARNING) == 1


HOLDS = 'file = open("out.txt", "w", buffering=1)\nprint("written", file=file)\n'


@pytest.mark.parametrize(
    ("text", "flags", "sign"),
    [
        (HOLDS, (), "ranks 0, 1 write over each other in {}/out.txt, and the script has not asked which rank it is"),
        (HOLDS, ("--start-method", "exec"), "ranks 0, 1 write over each other in {}/out.txt"),
        pytest.param(
            "from mpi4py import MPI", ("--framework", "torch"), "ranks 0, 1 use mpi4py, each in a world of its own",
            marks=pytest.mark.needs("mpirun"),
        ),
    ],
)  # fmt: skip
def test_the_first_sign_is_said_while_they_run(
    paceline: Paceline, text: str, flags: tuple[str, ...], sign: str
) -> None:
    paceline.script(f"{text}\nimport pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)")
    process = paceline.start("run", "--name", "it", "-n", "2", "--hang-after", "1s", *flags, "script.py")
    journal = paceline.home / "jobs" / "it"
    eventually(
        lambda: journal.exists() and [it for it in journals.events(journal) if it["event"] == "unjoined"], "said"
    )
    (paceline.folder / "go").touch()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert sign.format(paceline.folder) in err
    assert err.count("which rank it is") == 1, "not at the end too"


@pytest.mark.parametrize("flags", [("-n", "1"), ("-n", "2", "--framework", "indexed")])
def test_ranks_that_need_not_join(paceline: Paceline, flags: tuple[str, ...]) -> None:
    paceline.script("")
    assert "never asked" not in paceline.run(*flags, "script.py").stderr


@pytest.mark.parametrize("ask", ["breakpoint()", "import pdb; pdb.set_trace()", "input()"])
def test_empty_stdin_is_explained(paceline: Paceline, ask: str) -> None:
    paceline.script(f"{ask}\nprint('after')\n")
    done = paceline.run("script.py")
    assert done.returncode == 1
    assert "after" not in done.stdout.splitlines()
    attach = f"or open a shell in the environment of the rank with `paceline attach {paceline.job().name}`"
    assert f"paceline run --stdin 0`, {attach}" in " ".join(done.stderr.split())


def test_breakpoints_can_be_skipped(paceline: Paceline) -> None:
    paceline.script("breakpoint()\nprint('after')\n")
    assert paceline.run("--env", "PYTHONBREAKPOINT=0", "script.py").stdout == "after\n"


def test_a_rank_reads_the_standard_input_of_run(paceline: Paceline) -> None:
    paceline.script("""
        import os, sys
        x = 42
        if os.environ["RANK"] == "1":
            breakpoint()
        print("left", sys.stdin.read())
    """)
    process = paceline.start("run", "-n", "2", "--stdin", "1", "--tee", "all", "script.py", stdin=subprocess.PIPE)
    out, err = process.communicate("print('x is', x)\ncontinue\nrest", timeout=100)
    assert process.returncode == 0, err
    assert "x is 42" in out
    assert "left rest" in out
    assert "[rank" in out


def test_a_terminal_stays_that_of_run(paceline: Paceline) -> None:
    paceline.script("import os\nprint(os.isatty(0), input(), os.open('/dev/tty', os.O_RDONLY))")
    ours, theirs = os.openpty()
    os.write(ours, b"typed\n")
    process = paceline.start("run", "--stdin", "0", "script.py", stdin=theirs, start_new_session=True)
    out, err = process.communicate(timeout=100)
    os.close(ours)
    os.close(theirs)
    assert "No such device or address: '/dev/tty'" in err, out
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("-n", "2", "--stdin", "2"), "--stdin 2: there are 2 here, numbered from 0"),
        (("--detach", "--stdin", "0"), "only ranks on this machine, in the foreground"),
        (("-H", "nowhere", "--stdin", "0"), "only ranks on this machine, in the foreground"),
    ],
)
def test_stdin_that_no_rank_can_have(paceline: Paceline, flags: tuple[str, ...], why: str) -> None:
    paceline.script("")
    done = paceline.run(*flags, "script.py")
    assert done.returncode == 2
    assert why in done.stderr
