"""`--framework mpi`: real MPI programs, connected by the machine's own mpirun, under everything else that jobs have."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually, free_port, takes_signals

if TYPE_CHECKING:
    from tests.conftest import Paceline

needs_mpirun = pytest.mark.needs("mpirun")
SUM = """
    import os
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    total = world.allreduce(world.rank)
    print(world.rank, world.size, total, os.environ["PACELINE_RANK"], os.environ["MASTER_ADDR"], flush=True)
"""
WAIT = """
    import pathlib, time
    pathlib.Path(f"ready-{world.rank}").touch()
    time.sleep(1000)
"""


def mpi(paceline: Paceline, *args: str, ranks: int = 2) -> tuple[int, str, str]:
    done = paceline.run("--framework", "mpi", "-n", str(ranks), "--tee", "all", *args)
    return done.returncode, done.stdout, done.stderr


def status(paceline: Paceline) -> dict:
    return json.loads((paceline.job() / "status.json").read_text())


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return [""]


def _is_called(name: str, pid: int) -> bool:
    """Whether an argument of a process's command line, or its title, has this name."""
    return any(os.path.basename(word).startswith(name) for word in command_line(pid))


def leftovers() -> set[str]:
    """What Open MPI keeps in files while it runs."""
    sessions = Path(os.environ.get("TMPDIR", "/tmp")).glob("ompi.*/pid.*")
    return {str(path) for path in (*sessions, *Path("/dev/shm").glob("vader_segment.*"))}


@needs_mpirun
def test_ranks_find_each_other(paceline: Paceline) -> None:
    script = paceline.script(SUM)
    before = leftovers()
    code, out, err = mpi(paceline, script, ranks=4)
    assert code == 0, err
    assert sorted(line.rpartition("] ")[2] for line in out.splitlines()) == [
        f"{rank} 4 6 {rank} 127.0.0.1" for rank in range(4)
    ]
    assert (paceline.job() / "logs/0/rank-3.log").read_text() == "3 4 6 3 127.0.0.1\n"
    assert (paceline.job() / "agent.log").read_text() == ""
    eventually(lambda: leftovers() <= before, "nothing is left, but of other tests")


@needs_mpirun
@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_the_library_and_torch_know_their_place(paceline: Paceline, method: str) -> None:
    script = paceline.script("""
        from mpi4py import MPI
        import torch, torch.distributed as dist
        import paceline
        run = paceline.init()
        total = torch.ones(1)
        dist.all_reduce(total)
        print(run.rank, run.world_size, int(total), MPI.COMM_WORLD.allreduce(1), flush=True)
    """)
    code, out, err = mpi(paceline, "--start-method", method, script)
    assert code == 0, err
    assert sorted(line.rpartition("] ")[2] for line in out.splitlines()) == ["0 2 2 2", "1 2 2 2"]


@needs_mpirun
def test_a_program_in_another_language(paceline: Paceline) -> None:
    code, out, err = mpi(paceline, "--no-python", "sh", "-c", 'echo "$OMPI_COMM_WORLD_RANK $PMIX_RANK"')
    assert code == 0, err
    assert sorted(line.rpartition("] ")[2] for line in out.splitlines()) == ["0 0", "1 1"]


@needs_mpirun
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise ValueError('no good')", 1, "rank 1 failed first: ValueError: no good"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 failed first: killed by SIGKILL"),
        ("world.Abort(7)", 7, "rank 1 failed first: exit code 7"),
    ],
)
def test_the_rank_that_failed_is_named(paceline: Paceline, end: str, code: int, said: str) -> None:
    script = paceline.script(f"{SUM}\n    if world.rank == 1:\n        {end}\n    world.Barrier()\n")
    before = leftovers()
    found, _, err = mpi(paceline, script)
    assert found == code, err
    assert said in err
    assert ("Traceback" in err) == ("ValueError" in end)
    eventually(lambda: leftovers() <= before, "nothing is left, but of other tests")


@needs_mpirun
def test_a_rank_that_leaves_without_finalize_is_an_error_of_mpirun(paceline: Paceline) -> None:
    script = paceline.script(SUM + "    if world.rank == 1:\n        os._exit(0)\n    world.Barrier()\n")
    code, _, err = mpi(paceline, script)
    assert code == 1
    assert "mpirun ended with exit status 1; its output is in " in err.splitlines()[-1]
    assert "finalize" in (paceline.job() / "agent.log").read_text()


@needs_mpirun
def test_all_start_again_after_a_failure(paceline: Paceline) -> None:
    script = paceline.script(
        SUM
        + "    world.Barrier()  # both have printed\n"
        + '    if world.rank == 1 and os.environ["PACELINE_ATTEMPT"] == "0":\n        raise OSError\n'
    )
    code, out, err = mpi(paceline, "--max-restarts", "1", script)
    assert code == 0, err
    assert out.count("0 2 1 0") == 2
    assert status(paceline)["restarts"] == 1
    assert (paceline.job() / "logs/1/rank-1.log").read_text() == "1 2 1 1 127.0.0.1\n"


@needs_mpirun
@pytest.mark.parametrize(
    ("victim", "code", "said"),
    [
        ("mpirun", 1, "mpirun was killed by SIGKILL"),
        ("mpirank", 1, "mpirun ended with exit status"),
        ("agent", 137, ""),
        ("paceline: fork server of job", 1, "the process that the ranks are forked from ended"),
    ],
)
def test_whatever_is_killed_nothing_is_left(paceline: Paceline, victim: str, code: int, said: str) -> None:
    script = paceline.script(SUM + WAIT)
    process = paceline.start("run", "--framework", "mpi", "-n", "2", script)
    eventually(lambda: all((paceline.folder / f"ready-{rank}").exists() for rank in range(2)), "ranks run")
    eventually(lambda: status(paceline)["state"] == "RUNNING", "all pids are known")
    agent = status(paceline)["agent"]["pid"]
    ranks = {rank["pid"] for rank in status(paceline)["ranks"]}
    (pid, *_) = [
        pid
        for pid in paceline.processes()
        if (pid == agent if victim == "agent" else _is_called(victim, pid)) and pid not in ranks
    ]
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == code, err
    assert said in err
    eventually(lambda: not paceline.processes(), "nothing is left")


SAVES = """
    import signal

    def save(*_):
        print("saved", flush=True)
        open(f"saved-{world.rank}", "w").close()
        while not all(os.path.exists(f"saved-{rank}") for rank in range(2)):  # a rank that is gone ends the others
            time.sleep(0.01)
        os._exit(0)

    signal.signal(15, save)
"""


@needs_mpirun
def test_stop_gives_ranks_their_grace(paceline: Paceline) -> None:
    script = paceline.script(SUM + SAVES + WAIT)
    process = paceline.start("run", "--framework", "mpi", "-n", "2", "--tee", "all", script)
    eventually(lambda: all((paceline.folder / f"ready-{rank}").exists() for rank in range(2)), "ranks run")
    takes_signals(process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert out.count("saved") == 2
    assert status(paceline)["state"] == "STOPPED"


def test_no_mpirun_is_told_in_a_line(paceline: Paceline) -> None:
    script = paceline.script("print(1)")
    done = paceline.run("--framework", "mpi", "--env", f"PATH={paceline.folder}", script)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--framework mpi: there is no mpirun on PATH: install Open MPI" in done.stderr
    other = paceline.folder / "mpirun"
    other.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    other.chmod(0o755)
    done = paceline.run("--framework", "mpi", "--env", f"PATH={paceline.folder}:/usr/bin:/bin", script)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "calls itself 'HYDRA build details', and Open MPI 3 or 4 is needed" in done.stderr
    assert not paceline.home.exists()


IMPORT = "from mpi4py import MPI"
TRY = f"try:\n    {IMPORT}\nexcept ImportError:\n    MPI = None"
LATER = f"def main():\n    {IMPORT}"


def framework(paceline: Paceline, *args: str) -> str:
    done = paceline.succeeds("run", "--dry-run", "-n", "2", *args)
    found: str = json.loads(done.stdout)["job"]["framework"]
    return found


@needs_mpirun
@pytest.mark.parametrize(
    "text",
    ["import torch, mpi4py.MPI", f"import torch\n{TRY}", f"import torch\n{LATER}", LATER, "import torch, beside",
     f"{IMPORT}\nimport tensorflow, torch"],
)  # fmt: skip
def test_a_script_that_imports_mpi4py_is_one_of_mpi(paceline: Paceline, text: str) -> None:
    paceline.script(IMPORT, "beside.py")
    script = paceline.script(text)
    assert framework(paceline, script) == "mpi"
    assert framework(paceline, "--no-python", "env", "A=1", sys.executable, "-O", "-X", "dev", script) == "mpi"
    assert framework(paceline, "--framework", "torch", script) == "torch"


@pytest.mark.parametrize("text", [f"import torch\n{TRY}", f"import torch\n{LATER}", f"import tensorflow\n{TRY}"])
def test_what_may_be_imported_is_not_needed(paceline: Paceline, text: str) -> None:
    paceline.script("", "packages/tensorflow.py")
    paceline.env["PYTHONPATH"] = str(paceline.folder / "packages")
    found = framework(paceline, "--env", f"PATH={paceline.folder}", paceline.script(text))
    assert found == ("tensorflow" if "tensorflow" in text else "torch")


@needs_mpirun
@pytest.mark.parametrize(
    "line",
    ["run -n 2 script.py", "run -n 2 -m mpi4py script.py", "mpirun -np 2 PYTHON script.py",
     "mpirun -np 2 PYTHON -B -m mpi4py script.py"],
)  # fmt: skip
def test_ranks_of_mpi4py_are_one_world(paceline: Paceline, line: str) -> None:
    paceline.script(SUM)
    done = paceline.succeeds(*line.replace("PYTHON", sys.executable).replace("-n", "--tee all -n", 1).split())
    assert sorted(found[:5] for found in done.stdout.replace("[rank 1] ", "").splitlines()) == ["0 2 1", "1 2 1"]


@needs_mpirun
def test_its_ranks_have_torchs_variables_and_horovod(paceline: Paceline) -> None:
    script = paceline.script("""
        from mpi4py import MPI
        import torch, torch.distributed as dist
        import horovod.torch as hvd
        hvd.init(MPI.COMM_WORLD)
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(int(total), int(hvd.allreduce(torch.ones(1), op=hvd.Sum)), MPI.COMM_WORLD.size)
    """)
    assert paceline.succeeds("run", "-n", "2", script).stdout == "2 2 2\n"
    done = paceline.run("-n", "2", "--framework", "horovod", script)
    assert "ValueError: MPI connects 1 of the 2 ranks; start them with --framework mpi" in done.stderr


def test_without_open_mpi_they_are_refused(paceline: Paceline) -> None:
    nowhere = ("--env", f"PATH={paceline.folder}")
    name = paceline.script(LATER)
    for verb, *args in (
        ("run", "-n", "2", *nowhere, name),
        ("submit", "-n", "2", *nowhere, "-m", "mpi4py", name),
        ("mpirun", "-np", "2", "-x", nowhere[1], sys.executable, name),
        ("run", "--nnodes", "1:2", "--master-addr", "127.0.0.1", "-n", "1", name),
    ):
        done = paceline(verb, *args)
        assert (done.returncode, done.stdout) == (2, "")
        line = done.stderr.splitlines()[-1]
        assert "imports mpi4py: " in line and line.endswith(", or add --framework torch if its ranks use no MPI")
    assert not paceline.home.exists()
    done = paceline.succeeds("run", "--dry-run", "-n", "1", *nowhere, name)  # a rank alone is a whole world
    assert json.loads(done.stdout)["job"]["framework"] is None
    paceline.script("", "packages/horovod/__init__.py")  # as if it were installed
    paceline.env["PYTHONPATH"] = str(paceline.folder / "packages")
    done = paceline.run("-n", "2", paceline.script(f"{IMPORT}\nimport horovod.torch"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_mpirun_cannot_grow(paceline: Paceline) -> None:
    done = paceline.run("--framework", "mpi", "--nnodes", "1:2", "--master-addr", "h1", paceline.script("print(1)"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "with --framework mpi the number of nodes cannot change" in done.stderr


@needs_mpirun
def test_two_nodes_at_one_address_are_refused(paceline: Paceline) -> None:
    port = str(free_port())
    flags = ("run", "--framework", "mpi", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    script = paceline.script(SUM)
    first, second = [paceline.start(*flags, "--node-rank", str(rank), script) for rank in range(2)]
    for process in (first, second):
        _, err = process.communicate()
        assert process.returncode == 1
        assert "the nodes of an MPI job must have addresses of their own" in err
