"""`paceline run` as its users type it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any

import click
import pytest
from tests import journals
from tests.conftest import free_port
from tests.typed import refusal, typed

from paceline.cli.flags.spec import HANDLED_SIGNALS
from paceline.cli.verbs.run import run
from paceline.node.machine import numa
from paceline.node.signals import HANDLED, LEAVE, RESUME, SUSPEND

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline

SHOW = """
    import json, os, sys
    names = sys.argv[1:]
    print(json.dumps({n: os.environ.get(n) for n in names}))
"""


def variables(paceline: Paceline, flags: list[str], *names: str) -> dict[str, str | None]:
    paceline.script(SHOW)
    done = paceline.succeeds("run", *flags, "script.py", *names)
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def planned(paceline: Paceline, *args: str) -> dict[str, Any]:
    """What a dry run shows."""
    done = typed(paceline, "run", "--dry-run", *args)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_ranks_get_torchruns_variables(paceline: Paceline) -> None:
    names = (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
        "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    )  # fmt: skip
    found = variables(paceline, ["-n", "2", "--role", "trainer", "--max-restarts", "3", "--rdzv-id", "j7"], *names)
    assert list(found.values()) == ["0", "0", "2", "2", "0", "1", "0", "2", "trainer", "0", "3", "j7", "False"]


@pytest.mark.parametrize(
    "flags",
    [
        ["-n", "2"], ["-n2"], ["--nproc-per-node", "2"], ["--nproc_per_node", "2"], ["--nproc-per-node=2"],
        ["-np", "2"],
        ["--standalone", "--nnodes=1", "--nproc_per_node=2"], ["--nnodes", "1:1", "-n", "2"],
        ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--nproc-per-node", "2"],
        ["--monitor-interval", "5", "--start_method", "spawn", "-n", "2", "--run-path"],
        ["--rdzv-conf", "join_timeout=60,read_timeout=5", "-n", "2", "--node_rank", "0"],
    ],
)  # fmt: skip
def test_both_spellings_and_all_forms_of_a_flag(paceline: Paceline, flags: list[str]) -> None:
    assert variables(paceline, flags, "WORLD_SIZE") == {"WORLD_SIZE": "2"}


def test_flags_from_pet_variables(paceline: Paceline) -> None:
    paceline.env.update(PET_NPROC_PER_NODE="2", PET_MAX_RESTARTS="4")
    found = variables(paceline, [], "WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")
    assert found == {"WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "4"}


def test_cpu_counts_cores_and_threads_share_them(paceline: Paceline) -> None:
    cores = len(os.sched_getaffinity(0))
    assert variables(paceline, ["-n", "cpu"], "WORLD_SIZE", "OMP_NUM_THREADS") == {
        "WORLD_SIZE": str(cores),
        "OMP_NUM_THREADS": "1",
    }
    assert variables(paceline, ["-n", "1"], "OMP_NUM_THREADS") == {"OMP_NUM_THREADS": str(cores)}
    assert variables(paceline, ["--env", "OMP_NUM_THREADS=7"], "OMP_NUM_THREADS") == {"OMP_NUM_THREADS": "7"}


def test_master_port_is_the_users(paceline: Paceline) -> None:
    port = str(free_port())
    assert variables(paceline, ["--master-port", port], "MASTER_PORT") == {"MASTER_PORT": port}


def test_env_with_equals_signs_and_spaces(paceline: Paceline) -> None:
    value = "a=b c; $HOME 'quoted' ü"
    assert variables(paceline, ["--env", f"X={value}"], "X") == {"X": value}


def test_arguments_after_the_script_are_the_scripts(paceline: Paceline) -> None:
    paceline.script("import sys; print(sys.argv[1:])")
    args = ["-n", "3", "--name", "x", "--", "--help", "a b", ""]
    assert paceline.run("script.py", *args).stdout == f"{args}\n"


def test_indexed_processes_share_devices_and_do_not_stop_each_other(paceline: Paceline) -> None:
    paceline.script("""
        import os, sys
        if os.environ["PACELINE_PROCESS_INDEX"] == "1" and os.environ["PACELINE_ATTEMPT"] == "0":
            sys.exit(5)
        print(sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"])
    """)
    paceline.env["CUDA_VISIBLE_DEVICES"] = "0,1"
    flags = ["--framework", "indexed", "--pass-index", "-n", "3", "--devices", "0,1", "--tee", "all"]
    done = paceline.run(*flags, "script.py", "--x")
    assert done.returncode == 5
    assert sorted(done.stdout.splitlines()) == [
        "['--x', '--process_index', '0', '--process_num', '3'] 0",
        "[rank 2] ['--x', '--process_index', '2', '--process_num', '3'] 0",
    ]
    done = paceline.succeeds("run", *flags, "--max-restarts", "1", "script.py")
    assert sum("'1', '--process_num'" in line for line in done.stdout.splitlines()) == 1
    assert len(done.stdout.splitlines()) == 3  # those that were through did not run again


def test_programs_that_are_not_python(paceline: Paceline) -> None:
    paceline.script("#!/bin/sh\necho shell $RANK of $WORLD_SIZE: $1\n", "script.sh")
    (paceline.folder / "script.sh").chmod(0o755)
    expected = "shell 0 of 2: a b\n[rank 1] shell 1 of 2: a b\n"
    paceline.script("echo shell $RANK of $WORLD_SIZE: $1\n", "plain.sh")
    for command in (["script.sh"], ["plain.sh"], ["--no-python", "./script.sh"], ["--no-python", "sh", "script.sh"]):
        done = paceline.run("-n", "2", "--tee", "all", *command, "a b")
        assert sorted(done.stdout.splitlines()) == sorted(expected.splitlines()), done.stderr


def test_program_that_cannot_be_started(paceline: Paceline) -> None:
    paceline.script("#!/no/such/interpreter\n", "script.sh")
    (paceline.folder / "script.sh").chmod(0o755)
    done = paceline.run("script.sh")
    assert done.returncode == 127
    assert "cannot start" in done.stderr
    paceline.script("#!/usr/bin/env bash\r\n", "script.sh")
    done = paceline.run("script.sh")
    assert done.returncode == 127
    assert "cannot start ./script.sh: its lines end with CRLF, as Windows writes them; sed -i 's/\\r$//'" in done.stderr


def test_only_rank_0_is_shown_unless_others_are_asked_for(paceline: Paceline) -> None:
    paceline.script(
        "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    )

    def shown(*flags: str) -> tuple[list[str], list[str]]:
        done = paceline.run("-n", "3", *flags, "script.py")
        err = [line for line in done.stderr.splitlines() if not line.startswith("paceline: ")]
        return sorted(done.stdout.splitlines()), sorted(err)

    assert shown() == (["out 0"], ["err 0"])
    assert shown("--tee", "all") == (
        ["[rank 1] out 1", "[rank 2] out 2", "out 0"],
        ["[rank 1] err 1", "[rank 2] err 2", "err 0"],
    )
    assert shown("-t", "1:1,2:2") == (["[rank 1] out 1", "out 0"], ["[rank 2] err 2", "err 0"])
    assert shown("--redirects", "3") == ([], [])
    assert shown("-r", "0:1") == ([], ["err 0"])
    assert shown("--local-ranks-filter", "2") == (["[rank 2] out 2"], ["[rank 2] err 2"])
    assert shown("--tee", "3", "--local_ranks_filter", "0,1") == (
        ["[rank 1] out 1", "out 0"],
        ["[rank 1] err 1", "err 0"],
    )


def test_no_line_is_lost_or_torn(paceline: Paceline) -> None:
    paceline.script("""
        import os, sys
        rank = os.environ["RANK"]
        for i in range(20000):
            sys.stdout.write(f"{rank} {i} {'x' * (i % 90)}\\n")
        sys.stdout.write(f"{rank} last without an end")
    """)
    done = paceline.run("-n", "4", "--tee", "all", "script.py")
    lines = done.stdout.splitlines()
    for rank in range(4):
        prefix = f"[rank {rank}] " if rank else ""
        mine = [
            line.removeprefix(f"[rank {rank}] ").split(" ") for line in lines if line.startswith(f"{prefix}{rank} ")
        ]
        assert [int(line[1]) for line in mine[:-1]] == list(range(20000))
        assert all(line[2] == "x" * (i % 90) for i, line in enumerate(mine[:-1]))
        assert mine[-1][1] == "last"
    assert len(lines) == 4 * 20001


def test_progress_bar_lives_on_a_terminal(paceline: Paceline) -> None:
    paceline.script("""
        import os, sys, time
        rank = os.environ["RANK"]
        if rank == "0":
            print(os.environ["COLUMNS"])
            sys.stderr.write("\\r 10%|#    |"); sys.stderr.flush()
            while not os.path.exists("told"):
                time.sleep(0.01)
            sys.stderr.write("\\r100%|#####|\\n")
        else:
            while not os.path.exists("bar"):
                time.sleep(0.01)
            print("a line")
    """)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 77, 0, 0))
    process = paceline.start("run", "-n", "2", "--tee", "all", "script.py", stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:
            break
        if not data:
            break
        seen += data
        for said, name in ((b"10%", "bar"), (b"a line", "told")):
            if said in seen:
                (paceline.folder / name).touch()
    os.close(ours)
    process.wait()
    assert b"77\r\n" in seen
    # The bar comes without a line end, gives way to the other rank's line, and is there again below it.
    assert b"\r 10%|#    |\r\x1b[K[rank 1] a line\r\n 10%|#    |" in seen
    assert b"\r100%|#####|\r\n" in seen


def test_run_directory(paceline: Paceline) -> None:
    paceline.script("print('hello')")
    done = paceline.run("-n", "2", "--name", "mine", "--log-dir", "logs here", "script.py", stderr=subprocess.STDOUT)
    assert done.stdout.splitlines()[0] == f"paceline: job mine: 2 ranks here, logs in {paceline.folder}/logs here/mine"
    job = paceline.folder / "logs here" / "mine"
    assert job.stat().st_mode & 0o777 == 0o700
    assert (job / "logs/0/rank-1.log").read_text() == "hello\n"
    status = json.loads((job / "status.json").read_text())
    assert status["state"] == "SUCCEEDED"
    assert [r["name"] for r in status["ranks"]] == ["mine-master-0", "mine-worker-0"]
    happened = [event["event"] for event in journals.events(job)]
    assert [event for event in happened if event != "warm"] == ["started", "unjoined", "finished"]


def test_roles_of_tensorflow_are_ranks_besides_the_workers(paceline: Paceline) -> None:
    script = """
        import json, os, pathlib, time
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        print(task, flush=True)
        pathlib.Path(f"said-{task['type']}-{task['index']}").touch()
        while task["type"] == "chief" and len(list(pathlib.Path().glob("said-*"))) < 5:  # its end is that of the job
            time.sleep(0.01)
    """
    paceline.script(script)
    flags = ("--framework", "tensorflow", "--workers", "2", "--ps", "1", "--chief", "--evaluator", "1")
    done = paceline.succeeds("run", *flags, "--name", "it", "--no-python", sys.executable, "script.py")
    shown = [(paceline.home / f"jobs/it/logs/0/rank-{rank}.log").read_text().strip() for rank in range(5)]
    roles = (("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0))
    assert shown == [str({"type": role, "index": index}) for role, index in roles], done.stderr


def test_framework_is_found_in_what_the_script_imports(paceline: Paceline) -> None:
    paceline.script("import helper", "script.py")
    paceline.script("def late():\n    import jax\n", "helper.py")
    shown = planned(paceline, "script.py")
    assert (shown["job"]["framework"], shown["job"]["preload"]) == ("jax", ["jax"])
    paceline.script("from torch import nn", "helper.py")
    shown = planned(paceline, "script.py")
    assert (shown["job"]["framework"], shown["job"]["preload"]) == ("torch", ["torch", "torch.distributed"])


def test_a_script_of_horovod_and_keras_gets_tensorflow_imported_once(paceline: Paceline) -> None:
    paceline.script("import keras, horovod.keras as hvd", "script.py")
    job = planned(paceline, "script.py")["job"]
    assert (job["framework"], job["start_method"]) == ("horovod", "fork")
    assert job["preload"] == ["tensorflow", "torch", "torch.distributed"]


@pytest.mark.parametrize(
    ("helper", "found"),
    [
        ("import torch\ndef make(model):\n    return torch.optim.SGD(model.parameters(), 0.1)", True),
        ("from torch.optim import SGD", True),
        ("from torch import nn, optim as o", True),
        ("import torch.optim.lr_scheduler", True),
        ("import torch, transformers", True),
        ("import torch, optimum", False),
        ("import os, torch\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\ntorch.optim.SGD", False),
        ("import torch, dotenv\ndotenv.load_dotenv()\ntorch.optim.SGD", False),
    ],
)
def test_what_the_first_optimizer_imports_is_imported_once(paceline: Paceline, helper: str, found: bool) -> None:
    paceline.script("import helper", "script.py")
    paceline.script(helper, "helper.py")
    shown = planned(paceline, "script.py")
    assert shown["job"]["preload"] == ["torch", "torch.distributed", *(["torch._dynamo"] if found else [])]


@pytest.mark.torch
def test_a_rank_makes_its_first_optimizer_without_an_import(paceline: Paceline) -> None:
    paceline.script("""
        import sys
        import torch

        before = set(sys.modules)
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
        print(len(set(sys.modules) - before))
    """)
    done = paceline.run("script.py")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.torch
def test_a_script_chooses_its_folder_for_temporary_files_after_the_import(paceline: Paceline) -> None:
    (paceline.folder / "scratch").mkdir()
    paceline.script("""
        import os, tempfile
        import torch.optim

        os.environ["TMPDIR"] = os.path.abspath("scratch")
        print(os.path.relpath(tempfile.gettempdir()))
    """)
    done = paceline.run("script.py")
    assert (done.returncode, done.stdout) == (0, "scratch\n"), done.stderr


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "paceline", "--help"], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "asyncio", "msgspec", "numpy", "rich"}
    assert "paceline.cli.main" in imported
    assert done.stdout.startswith("Usage: ")


def test_a_whole_command_is_its_script(paceline: Paceline, tmp_path: Path) -> None:
    paceline.script("""
        import os, sys
        print(sys.argv[1:], __name__, os.environ["RANK"], os.path.basename(sys.argv[0]))
    """)
    other = tmp_path / "bin" / "python3"  # another Python than that which runs paceline
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho other $RANK $*\n")
    other.chmod(0o755)
    python = sys.executable
    for words, said in (
        (["python", "script.py", "--lr", "1"], "['--lr', '1'] __main__ 0 script.py"),
        (["python -u script.py '--name=a b'", "c"], "['--name=a b', 'c'] __main__ 0 script.py"),
        ([f"{python} -m script", "x"], "['x'] __main__ 0 script.py"),
        (["script.py x"], "['x'] __main__ 0 script.py"),
        ([python, "-c", "import os; print('in', os.environ['RANK'])"], "in 0"),
        ([str(other), "script.py", "x"], "other 0 script.py x"),
    ):
        done = paceline.run(*words)
        assert (done.returncode, done.stdout) == (0, f"{said}\n"), (words, done.stderr)
    for words, said in (
        (["python"], "python names no script; write for example paceline run train.py"),
        (["python 'a"], """"python 'a": no closing quotation; write the command without quotes around it"""),
    ):
        assert refusal(paceline, "run", *words) == said
    paceline.script("print('mine')", "python")  # a file of that name is the script
    assert paceline.run("python").stdout == "mine\n"


@pytest.mark.torch
def test_every_flag_and_variable_of_torchrun_is_understood() -> None:
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    ours = {name: option for option in run.params for name in option.opts}
    for action in parser._actions:
        if action.dest in ("help", "training_script", "training_script_args"):
            continue
        (name,) = {name.replace("_", "-") for name in action.option_strings if name.startswith("--")}
        option = ours[name]
        assert isinstance(option, click.Option)
        assert option.is_flag == (action.nargs == 0), name
        assert action.choices is None or set(action.choices) <= set(getattr(option.type, "choices", ())), name
        assert {opt for opt in action.option_strings if len(opt) == 2} <= set(option.opts), name
        assert option.envvar == f"PET_{action.dest.upper()}", name


def test_parts_of_torchrun_that_mean_nothing_are_named(paceline: Paceline) -> None:
    script = paceline.script("print('ran')")
    defaults = ["--event-log-handler", "null", "--logs-specs", "default", "--signals_to_handle", "SIGTERM,SIGUSR1"]
    done = paceline.run(*defaults, script)
    assert done.stdout == "ran\n"
    assert "has no effect" not in done.stderr
    done = paceline.run("--duplicate-stdout-filters", "apple", "--logs-specs", "mine", script)
    assert done.stdout == "ran\n"
    said = [line for line in done.stderr.splitlines() if "has no effect" in line]
    assert [line.split()[1] for line in said] == ["--duplicate-stdout-filters", "--logs-specs"]
    assert said[0].endswith("show such lines with paceline logs JOB --all --grep TEXT")
    said = refusal(paceline, "run", "--signals-to-handle", "SIGTERM,SIGWINCH", script)
    assert said.startswith("--signals-to-handle SIGWINCH: paceline handles SIGTERM, ")
    said = refusal(paceline, "run", "--grace", "3s", "--shutdown-timeout", "4", script)
    assert said == "--grace and --shutdown-timeout say the same; give one of them"
    assert planned(paceline, "--shutdown-timeout", "4", script)["job"]["grace"] == "4s"


def test_the_signals_of_an_agent_are_those_that_the_flags_name() -> None:
    named = {signal.Signals[name] for name in HANDLED_SIGNALS}
    assert named == {number for number in HANDLED if number not in (LEAVE, SUSPEND, RESUME)}


def test_ranks_see_their_device_alone(paceline: Paceline) -> None:
    paceline.env["CUDA_VISIBLE_DEVICES"] = "5,7"
    names = ("LOCAL_RANK", "PACELINE_LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "PACELINE_DEVICES")
    script = paceline.script(f"""
        import json, os
        print(json.dumps([os.environ.get(name) for name in {names}]))
    """)
    done = paceline.succeeds("run", "-n", "2", "--virtual-local-rank", "--tee", "all", script)
    found = sorted(json.loads(line[line.index('["') :]) for line in done.stdout.splitlines())
    assert found == [["0", "0", "5", "0"], ["0", "1", "7", "0"]]


def test_ranks_are_bound_to_cores(paceline: Paceline) -> None:
    script = paceline.script("import os; print(sorted(os.sched_getaffinity(0)))")
    done = paceline.succeeds("run", "-n", "2", "--numa-binding", "exclusive", "--tee", "all", script)
    try:
        expected = numa.cores_of("exclusive", 2, None, os.sched_getaffinity(0))
    except numa.CannotBind as error:
        assert f"--numa-binding exclusive: {error}; it is not bound" in done.stdout + done.stderr
        return
    assert sorted(done.stdout.splitlines()) == sorted([f"{sorted(expected[0])}", f"[rank 1] {sorted(expected[1])}"])


def test_bars_that_ask_for_a_terminal_are_drawn_on_one(paceline: Paceline) -> None:
    pytest.importorskip("rich")
    paceline.script("""
        import time
        from rich.progress import track
        for _ in track(range(20)):
            time.sleep(0.03)
    """)
    code, seen = paceline.on_terminal("run", "script.py")
    assert code == 0 and seen.count(b"%") > 2


DECLARES = """
    import argparse
    import arguments
    parser = argparse.ArgumentParser()
    arguments.add_to(parser)
    parser.add_argument("--lr", type=float)
    given = parser.parse_args()
    print(given.local_rank, given.lr)
"""


@pytest.mark.parametrize(("spelling", "method"), [("--local_rank", "fork"), ("--local-rank", "exec")])
def test_scripts_that_declare_local_rank_get_it(paceline: Paceline, spelling: str, method: str) -> None:
    paceline.script(
        f"def add_to(parser):\n    parser.add_argument('{spelling}', type=int, default=-1)\n", "arguments.py"
    )
    script = paceline.script(DECLARES)
    line = ("-n", "2", "--framework", "torch", "--start-method", method, "--tee", "all")
    done = paceline.succeeds("run", *line, script, "--lr", "0.5")
    assert sorted(done.stdout.splitlines()) == ["0 0.5", "[rank 1] 1 0.5"]
    if method == "fork":
        assert sorted(paceline.run(*line, "-m", "script").stdout.splitlines()) == ["0 None", "[rank 1] 1 None"]
        done = paceline.run(*line, "--use-env", script)
        assert sorted(done.stdout.splitlines()) == ["-1 None", "[rank 1] -1 None"]
        done = paceline.run(*line, script, f"{spelling}=7")
        assert sorted(done.stdout.splitlines()) == ["7 None", "[rank 1] 7 None"]


def test_a_fifo_in_place_of_a_marker_stops_nothing(paceline: Paceline) -> None:
    paceline.script("print('ran')")
    folder = paceline.folder / "results"
    folder.mkdir()
    for fifo in (folder / ".paceline-run", paceline.folder / ".origin.paceline"):
        os.mkfifo(fifo)
    done = paceline.succeeds("run", "--checkpoint-dir", "results/checkpoints", "script.py")
    assert "ran" in done.stdout
    assert f"{folder}/.paceline-run is not read: it is no regular file" in done.stderr


def test_a_framework_may_be_where_the_jobs_own_pythonpath_leads(paceline: Paceline) -> None:
    package = paceline.folder / "elsewhere" / "jax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("here = 'elsewhere'\n")
    script = paceline.script("import jax; print(jax.here)")
    for path in ("elsewhere", str(package.parent)):
        done = paceline("run", "--env", f"PYTHONPATH=/nowhere:{path}", script, cwd=paceline.folder)
        assert (done.returncode, done.stdout) == (0, "elsewhere\n"), done.stderr
    assert "jax is not installed for" in paceline("run", script, cwd=paceline.folder).stderr
