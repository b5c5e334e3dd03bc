"""The verbs that take lines of other tools, and what is said of such lines behind other verbs."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests import needs
from tests.conftest import free_port
from tests.typed import refusal, typed

from paceline.cli.dialects import mpirun, torchrun
from paceline.cli.dialects.engine import names_of

if TYPE_CHECKING:
    from tests.conftest import Paceline

SCRIPT = """
    import os, sys
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
"""


@pytest.fixture(autouse=True)
def no_cluster(paceline: Paceline) -> None:
    paceline.env["HOME"] = str(paceline.folder)
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        paceline.env.pop(name, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("torchrun", "--nproc_per_node=2", "--monitor-interval", "1"), "run -n 2"),
        (("torch-launch", "--nproc_per_node=2", "--use_env"), "run -n 2 --use-env"),
        (("mpirun", "-np", "2", "-bind-to", "none"), "run -np 2"),
    ],
)
def test_a_line_runs(paceline: Paceline, old: tuple[str, ...], new: str) -> None:
    done = paceline(*old, paceline.script(SCRIPT), "--lr", "0.1")
    assert (done.returncode, done.stdout) == (0, "0 2 --lr 0.1\n"), done.stderr
    assert f"paceline: this is: paceline {new} script.py --lr 0.1" in done.stderr.splitlines()


def test_a_line_of_arena_runs_here_where_there_is_no_cluster(paceline: Paceline) -> None:
    script = paceline.script(SCRIPT)
    done = paceline("arena", "submit", "pytorch", "--name=it", "--image=I", "--workers=2", f"python {script} -x")
    assert (done.returncode, done.stdout) == (0, "it\n"), done.stderr
    assert "paceline: this is: paceline submit -n 2 --name it python script.py -x\n" in done.stderr
    assert paceline("wait", "it").returncode == 0
    done = paceline("arena", "--loglevel", "debug", "logs", "it", "-i", "it-worker-0", "--type", "pytorch")
    assert done.stdout == "1 2 -x\n"
    done = paceline("arena", "get", "it", "-e")
    assert "state        SUCCEEDED" in done.stdout
    assert "started" in done.stdout.partition("INSTANCE")[2]
    done = paceline("arena", "delete", "it")
    assert (done.returncode, paceline("arena", "list").stdout.count("\n")) == (0, 1), done.stderr


def test_a_launcher_of_arena_counts_the_ranks(paceline: Paceline) -> None:
    line = ("arena", "submit", "horovod", "--explain", "--name=h", "--workers=2", "--gpus=1")
    done = typed(paceline, *line, "horovodrun -np 2 python t.py")
    assert done.stdout == "paceline submit --name h --framework horovod -np 2 --gpus 2 python t.py\n", done.stderr


@pytest.mark.parametrize("mode", ["git", "rsync"])
def test_arenas_main_line_runs_code_where_its_users_expect_it(paceline: Paceline, mode: str) -> None:
    needs.need(needs.missing(mode))
    paceline.script(
        "import os, sys\nprint(os.getcwd(), open(sys.argv[1]).read(), *sys.argv[2:], flush=True)",
        "mnist-pytorch.git/mnist.py",
    )
    source = paceline.folder / "mnist-pytorch.git"
    (source / "lr").write_text("0.1")
    git = ("git", "-c", "user.name=T", "-c", "user.email=t@example.org")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")) if mode == "git" else ():
        subprocess.run([*git, *words], cwd=source, check=True)
    (paceline.folder / "paceline.toml").write_text(f'[volumes]\ntraining-data = "{paceline.folder}"\n')
    work = paceline.folder / "root"
    code = work / "code/mnist-pytorch"
    done = paceline(
        "arena", "submit", "pytorch", "--name=it", "--workers=2", f"--working-dir={work}", "--image=IMG",
        f"--sync-mode={mode}", f"--sync-source={source}", f"--data=training-data:{paceline.folder}/mnist_data",
        f"python {code}/mnist.py {code}/lr --epochs 10 --backend gloo",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "it\n"), done.stderr
    assert paceline("wait", "it").returncode == 0
    lines = sorted(paceline("logs", "it", "--all").stdout.splitlines())
    assert lines == [f"[rank {rank}] {work}/code/it 0.1 --epochs 10 --backend gloo" for rank in range(2)]
    assert code.readlink().name == "it"
    # Another job may have the name of the repository, and nothing is left when both are deleted.
    again = ("submit", "--name", "mnist-pytorch", "--sync-mode", mode, "--sync-source", str(source))
    assert paceline(*again, "--working-dir", str(work), "mnist.py", "lr").returncode == 0
    assert not code.is_symlink()
    assert paceline("wait", "mnist-pytorch").returncode == 0
    assert paceline("delete", "it", "mnist-pytorch").returncode == 0
    assert [path.name for path in (work / "code").iterdir()] == [".gitignore"]


def test_paddles_launcher_reads_its_variables(paceline: Paceline) -> None:
    paceline.env.update(PADDLE_NNODES="2", PADDLE_RANK="1", PADDLE_MASTER="h:80", CUDA_VISIBLE_DEVICES="")
    done = typed(paceline, "paddle-launch", "--explain", "--nnodes", "1", "t.py")
    assert done.stdout == "paceline run --rdzv-endpoint h:80 --nnodes 2 --node-rank 1 --framework paddle t.py\n"


def test_paddles_launcher_names_the_logs_and_the_ports(paceline: Paceline) -> None:
    paceline.cold = True  # PYTHONPATH
    paceline.script("", "modules/paddle.py")
    paceline.env.update(PYTHONPATH=str(paceline.folder / "modules"), CUDA_VISIBLE_DEVICES="")
    script = paceline.script(
        """
        import os
        print(os.environ["PADDLE_TRAINER_ID"], os.environ["PADDLE_TRAINER_ENDPOINTS"], flush=True)
        """
    )
    port = free_port()
    flags = ("--nproc_per_node", "2", "--log_dir", "log", f"--started_port={port}")
    (paceline.folder / "log").mkdir()
    (paceline.folder / "log/workerlog.0").write_text("of another launcher\n")
    done = paceline("paddle-launch", *flags, script)
    assert done.returncode == 0, done.stderr
    endpoints = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    logs = [(paceline.folder / f"log/workerlog.{rank}").read_text() for rank in range(2)]
    assert logs == [f"{rank} {endpoints}\n" for rank in range(2)]
    assert (paceline.folder / "log/workerlog.0.old").read_text() == "of another launcher\n"


def test_explain_prints_the_line_alone_and_runs_nothing(paceline: Paceline) -> None:
    paceline.script("open('ran', 'w')")
    done = typed(paceline, "torchrun", "--explain", "--monitor_interval=1", "--nproc_per_node", "2", "script.py")
    assert (done.returncode, done.stdout) == (0, "paceline run -n 2 script.py\n")
    assert done.stderr == "paceline: --monitor-interval has no effect: paceline waits for events\n"
    done = typed(paceline, "explain", "LR=1 torchrun --nproc_per_node 2 script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "LR=1 paceline run -n 2 script.py\n", "")
    assert not (paceline.folder / "ran").exists()


def test_help_has_the_flags_that_do_something_and_then_all(paceline: Paceline) -> None:
    few, every = (typed(paceline, "mpirun", flag).stdout for flag in ("--help", "--help-all"))
    assert "--wdir" in few
    assert "-bynode" not in few
    assert "-bynode" in every
    assert "more flags are known, and have no effect or are refused; --help-all lists" in few


def test_passwords_are_not_shown(paceline: Paceline) -> None:
    words = ("--env=GIT_SYNC_PASSWORD=p4ss", "--sync-mode=git", "--sync-source=https://me:p4ss@h/r.git", "python t.py")
    done = typed(paceline, "arena", "submit", "pytorch", "--explain", "--name", "x", *words)
    assert '--env GIT_SYNC_PASSWORD="$GIT_SYNC_PASSWORD"' in done.stdout
    assert "p4ss" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "submit pytorch --name=x --workers=2 script.py",
            "pytorch is no script; write: paceline submit -n 2 --name x script.py",
        ),
        (
            "run torchrun --nproc_per_node 2 script.py",
            "torchrun is no script; write: paceline run -n 2 script.py",
        ),
        ("submit mpirun -np 4 python script.py", "mpirun is no script; write: paceline submit -np 4 python script.py"),
        ("run accelerate launch script.py", "accelerate is no script; write: paceline run script.py"),
        ("run deepspeed script.py", "deepspeed is no script; write: paceline run script.py"),
        ("run sbatch job.sh", "sbatch is no script; write paceline submit --on slurm SCRIPT"),
        (
            "submit python -u -m torch.distributed.launch --use_env script.py",
            "python -u -m torch.distributed.launch is no script; write: paceline submit --use-env script.py",
        ),
        ("run -m torch.distributed.run script.py", "python -m torch.distributed.run is no script; write: paceline run"),
        ("run -t 1:00:00 script.py", "--tee '1:00:00' is not all, none, 0 … 3 or RANK:STREAMS,…; write for example"),
        (
            "run --selected_gpus 0,1 script.py",
            "--selected-gpus is a flag of paddle-launch; see paceline paddle-launch ",
        ),
        ("run -c 4 script.py", "-c is a flag of mpirun and srun; see paceline mpirun --help, paceline srun --help"),
        ("get x --gpu", "--gpu is a flag of arena get; see paceline arena get --help"),
        ("top job --refresh", "--refresh is a flag of arena top job; see paceline arena top job --help"),
        ("run -m( script.py", "No such option '-('; flags of the script stand behind SCRIPT; see "),
        ("run -[ script.py", "No such option '-['; flags of the script stand behind SCRIPT; see "),
        ("run --world_size 2 script.py", "--world-size: write -np N"),
        ("run -p gpu script.py", "Invalid value for '-p' / '--ssh-port': 'gpu' is no port; a partition of Slurm"),
        ("run --bogus script.py", "No such option '--bogus'; flags of the script stand behind SCRIPT; see "),
        ("run --gpu 2 script.py", "--gpu: write --gpus"),
        ("run --framewrok x script.py", "No such option '--framewrok'. Did you mean '--framework'? See "),
        ("submit --config c.yaml script.py", "--config: a job file stands in the place of SCRIPT; "),
        ("run --resume script.py", "--resume: paceline resubmit JOB goes on from its last checkpoint; "),
        ("stop --all", "--all: name the jobs, which paceline list shows"),
        ("list --status RUNNING", "--status: write --state STATE"),
        ("torchrun --explain --max_restarts many script.py", "Invalid value for '--max-restarts': 'many' is not a"),
        ("torchrun --explain", "no script; write it behind the flags of torchrun"),
        ("explain horovodrun -np 2", "no script; write it behind the flags of horovodrun"),
        ("explain python -m torch.distributed.launch", "no script; write it behind the flags of torch-launch"),
        ("run srun", "srun is no script of paceline run: no script; write it behind"),
        ("run --framework tensorflow --ps 1 -n 2 script.py", "--ps: --workers counts the other ranks; write it in "),
        ("run --framework torch --chief 1 script.py", "--chief: only --framework tensorflow has such ranks; "),
        ("run --evaluator 1 --workers 1:2 script.py", "--workers 1:2 is no number of workers; "),
        ("train.py --lr 1", "train.py is no verb; write paceline run train.py"),
        ("status x", "paceline has no verb 'status'; write paceline get JOB"),
        ("mpiexec -n 2 x", "paceline has no verb 'mpiexec'; write paceline mpirun"),
        ("torchrun --nope", "torchrun has no flag --nope; "),
    ],
)
def test_old_flags_and_verbs_are_answered(paceline: Paceline, line: str, said: str) -> None:
    paceline.script("open('ran', 'w')")
    assert refusal(paceline, *line.split()).startswith(said)
    assert not (paceline.folder / "ran").exists()


def test_srun_on_a_machine_without_slurm_says_what_to_write(paceline: Paceline) -> None:
    paceline.script("open('ran', 'w')")
    paceline.env["PATH"] = str(paceline.folder)
    done = typed(paceline, "srun", "-N2", "-n", "8", "-p", "gpu", "script.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [
        'paceline: this machine has no Slurm; name a login node with ssh = "HOST" in [targets.slurm] of paceline.toml, '
        "or write: paceline run -H HOST1,HOST2 -np 8 script.py"
    ]
    (paceline.folder / "paceline.toml").write_text('[targets.slurm]\nbackend = "slurm"\nssh = "login.invalid"\n')
    assert "no ssh on PATH" in typed(paceline, "srun", "script.py").stderr, "it goes to that node"
    assert not (paceline.folder / "ran").exists()


def test_no_table_is_imported_by_run(paceline: Paceline) -> None:
    program = "import sys; from paceline.cli.main import run; run(); print([m for m in sys.modules if 'dialect' in m])"
    script = paceline.script("")
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "--dry-run", script],
        capture_output=True, text=True, check=True, cwd=paceline.folder, env=paceline.env,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.needs("mpirun")
def test_mpiruns_table_has_every_flag_of_open_mpi() -> None:
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--help", "all"], capture_output=True, text=True, check=True
    )
    theirs = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout)) - {"-h", "--help"}
    ours = {name for flag in mpirun.MPIRUN.flags for name in names_of(flag)[0]}
    assert len(theirs) > 100
    assert theirs <= ours


def test_torchruns_table_has_every_flag_of_torchrun() -> None:
    program = """
from torch.distributed.run import get_args_parser
for action in get_args_parser()._actions:
    print(action.nargs != 0, *(name for name in action.option_strings if "_" not in name))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    theirs = {tuple(names): takes == "True" for takes, *names in map(str.split, done.stdout.splitlines()) if names}
    del theirs["-h", "--help"]
    ours = {names: bool(takes) for names, takes in map(names_of, torchrun.TORCHRUN.flags)}
    assert ours == theirs
