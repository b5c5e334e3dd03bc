"""Scripts that once ended otherwise under paceline than under python or torchrun."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Paceline


@pytest.mark.torch
@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_what_is_still_buffered_is_written(paceline: Paceline, method: str) -> None:
    paceline.script("import sys, torch; print('line'); sys.stdout.buffer.write(b'more'); print('no end', end='')")
    assert paceline.run("--start-method", method, "script.py").stdout in ("line\nmoreno end", "line\nno endmore")


def test_classes_of_the_script_come_back_from_a_spawned_child(paceline: Paceline) -> None:
    paceline.script("""
        import dataclasses, multiprocessing as mp
        @dataclasses.dataclass
        class Config:
            n: int = 8
        def work(q):
            q.put(Config(3))
        if __name__ == "__main__":
            context = mp.get_context("spawn")
            q = context.Queue()
            p = context.Process(target=work, args=(q,))
            p.start()
            print(q.get())
            p.join()
    """)
    assert paceline.run("--preload", "multiprocessing", "script.py").stdout == "Config(n=3)\n"


def test_a_lazy_import_beside_the_script_does_not_decide_the_framework(paceline: Paceline) -> None:
    paceline.script("import torch\nimport helpers")
    paceline.script("def f():\n    import tensorflow", "helpers.py")
    assert json.loads(paceline.run("--dry-run", "script.py").stdout)["job"]["framework"] == "torch"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("before", "by_fork"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'", True),
        ("import settings", True),
        ("from settings import apply\napply()", False),
        ("import os\nos.environ.update(OMP_NUM_THREADS=str(1))", False),
        pytest.param("from unknown import apply\napply()", False, marks=pytest.mark.nightly),
    ],
)
def test_variables_that_the_script_sets_before_the_import(paceline: Paceline, before: str, by_fork: bool) -> None:
    paceline.script(
        "from os import environ\nenviron['OMP_NUM_THREADS'] = '1'\n\ndef apply():\n    pass\n", "settings.py"
    )
    paceline.script((paceline.folder / "settings.py").read_text(), "elsewhere/unknown.py")
    paceline.env["PYTHONPATH"] = str(paceline.folder / "elsewhere")
    paceline.script(f"{before}\nimport torch\nprint(torch.get_num_threads())")
    done = paceline.run("script.py")
    assert done.stdout == "1\n"
    said = [line for line in done.stderr.splitlines() if "start by exec" in line]
    assert len(said) == (0 if by_fork else 1), done.stderr
    assert by_fork or "since script.py:" in said[0]


def test_exception_in_a_child_of_the_rank_is_the_childs(paceline: Paceline) -> None:
    paceline.script("""
        import os
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the child")
        os.waitpid(pid, 0)
        print("parent fine")
    """)
    done = paceline.run("script.py")
    assert (done.returncode, done.stdout) == (0, "parent fine\n")
    assert "ValueError: in the child" in done.stderr
    assert "failed first" not in done.stderr


@pytest.mark.parametrize(
    "lost", ["Connection closed by peer", "another rank of this machine is gone", "rank 1 is gone: Connection"]
)
def test_an_error_that_wraps_a_lost_connection_is_a_symptom(paceline: Paceline, lost: str) -> None:
    paceline.script(
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ConnectionRefusedError("Connection refused")
        while not os.path.exists(os.environ["PACELINE_RUN_DIR"] + "/errors/0/rank-1.json"):
            time.sleep(0.01)
        try:
            raise ConnectionResetError("LOST")
        except OSError as error:
            raise RuntimeError("step 0 failed") from error
    """.replace("LOST", lost)
    )
    done = paceline.run("-n", "2", "script.py")
    assert "rank 1 failed first: ConnectionRefusedError" in done.stderr


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("hook", ["sys.excepthook = lambda *_: linger()", "atexit.register(linger)"])
def test_who_failed_first_does_not_depend_on_who_left_first(paceline: Paceline, slow: int, hook: str) -> None:
    paceline.script(f"""
        import atexit, os, sys, time
        rank = os.environ["RANK"]
        errors = os.environ["PACELINE_RUN_DIR"] + "/errors/0/"

        def wait_for(path):
            while not os.path.exists(path):
                time.sleep(0.01)

        def linger():
            if rank == "{slow}":
                wait_for(errors + f"rank-{{1 - int(rank)}}.json")
                time.sleep(0.2)

        {hook}
        if rank == "0":
            wait_for(errors + "rank-1.json")
        raise ConnectionResetError(f"Connection closed by peer of {{rank}}")
    """)
    done = paceline.run("-n", "2", "script.py")
    assert "rank 1 failed first: ConnectionResetError: Connection closed by peer of 1" in done.stderr


def test_messages_that_cannot_be_encoded(paceline: Paceline) -> None:
    paceline.script("raise ValueError('bad \\udcff name')")
    done = paceline.run("script.py")
    assert done.returncode == 1
    assert "rank 0 failed first: ValueError: bad \\udcff name" in done.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_streams_that_the_script_has_closed(paceline: Paceline, stream: str) -> None:
    paceline.script(f"import sys; sys.{stream}.close(); raise ValueError('x')")
    done = paceline.run("script.py")
    assert "rank 0 failed first: ValueError: x" in done.stderr
    assert "forkserver" not in done.stderr


def test_zip_applications_run(paceline: Paceline) -> None:
    paceline.script("print('zipped')", "app/__main__.py")
    subprocess.run(["python3", "-m", "zipapp", "app"], cwd=paceline.folder, check=True)
    assert paceline.run("app.pyz").stdout == "zipped\n"


def test_output_that_cannot_be_written(paceline: Paceline) -> None:
    paceline.script("while True: print('line')")
    with open("/dev/full", "w") as full:
        done = paceline.run("script.py", stdout=full)
    assert done.returncode == 2
    assert "cannot write what the ranks print: No space left on device; the job was stopped" in done.stderr


def test_pipe_that_does_not_block(paceline: Paceline) -> None:
    paceline.script("for i in range(100000): print(i)")
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    process = paceline.start("run", "script.py", stdout=theirs)
    os.close(theirs)
    with open(ours) as lines:
        assert [int(line) for line in lines] == list(range(100000))
    assert process.wait() == 0
    process.communicate()


def test_the_thread_that_answers_has_begun_before_the_script_does() -> None:
    """One that begins while Python ends makes a rank with a short script end with SIGSEGV."""
    program = "import _thread; from paceline.node.ranks.answering import listen; listen(); print(_thread._count())"
    rank = {"PACELINE_JOB_ID": secrets.token_hex(8), "PACELINE_ATTEMPT": "0", "PACELINE_RANK": "0"}
    env = {**os.environ, **rank, "PACELINE_HANG_AFTER": "10"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
