"""Lines that paceline proposes in the place of one that it refuses: they keep what the user has typed."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.typed import refusal, typed

from paceline.cli.flags.job import Given
from paceline.cli.flags.spec import spec_of
from paceline.cli.main import cli
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline

LAUNCHERS = (
    "torchrun --nproc_per_node 2 --max_restarts 3 train.py --lr 1",
    "python -m torch.distributed.run --nnodes 2 --node_rank 1 train.py",
    "python -m debugpy --listen 1 -m torch.distributed.run train.py",
    "mpirun -np 2 -x A=1 python train.py",
    "horovodrun -np 2 -H a:1,b:1 python train.py",
    "srun -N 2 --ntasks-per-node 4 -p gpu python train.py",
    "python -m paddle.distributed.launch --nproc_per_node 2 train.py",
    "swift sft --model m",
    "'module load x && source e && python train.py'",
    "'cd /x; export A=1; torchrun --nproc_per_node 2 train.py'",
)
# Flags that say the same, or exclude each other: where the launcher has one, it counts.
SAME = (
    {"ranks", "total"}, {"gpus", "devices"}, {"on", "hosts", "hostfile"}, {"nnodes"}, {"max_restarts"}, {"queue"},
    {"framework"}, {"node_rank"}, {"working_dir"},
)  # fmt: skip
# What says where the program is, and what ends the line at once.
NOT_TYPED = {"module", "no_python", "plain", "help", "help_all", "script", "args"}
TEXTS = st.text("ab1 $'\"*", min_size=1, max_size=4)


def values(option: click.Option) -> st.SearchStrategy[tuple[str, ...]]:
    if option.is_flag:
        return st.just(())
    if isinstance(option.type, click.Choice):
        return st.sampled_from(option.type.choices).map(lambda it: (str(it),))
    if isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType)):
        return st.just((str(max(1, getattr(option.type, "min", None) or 1)),))
    texts = TEXTS.map(lambda it: f"N={it}") if option.multiple else TEXTS
    return st.lists(texts, min_size=option.nargs, max_size=option.nargs).map(tuple)


def options() -> list[click.Option]:
    with click.Context(cli) as root:
        command = cli.get_command(root, "run")
        assert command is not None
        found = [it for it in command.get_params(root) if isinstance(it, click.Option) and it.name not in NOT_TYPED]
    return [it for it in found if it.is_flag is not None and not it.is_eager]


def test_every_flag_that_is_typed_before_a_script_is_drawn() -> None:
    newest = {"setup", "queue", "start_timeout", "keep_warm", "run_as", "placement", "topology", "work_size", "secret"}
    assert newest <= {it.name for it in options()}


def group_of(option: click.Option) -> object:
    """Of flags that exclude each other only one is typed; any other flag may be typed once, too."""
    return next((number for number, group in enumerate(SAME) if option.name in group), option.name)


@st.composite
def flags(draw: st.DrawFn) -> list[str]:
    chosen = draw(st.lists(st.sampled_from(options()), max_size=5, unique_by=group_of))
    return [word for it in chosen for word in (draw(st.sampled_from(it.opts)), *draw(values(it)))]


def read(words: list[str]) -> tuple[dict[str, Any], str]:
    """The parameters of `run`, and the line that is proposed for them."""
    with click.Context(cli) as root:
        command = cli.get_command(root, "run")
        assert command is not None
        context = command.make_context("run", words, parent=root)
        try:
            spec_of(Given(context.params), command)
        except UserError as error:
            return context.params, str(error).partition("; write: ")[2].partition("; debugpy")[0]
        return context.params, ""


@given(flags(), st.sampled_from(LAUNCHERS))
def test_a_proposal_keeps_all_flags(typed_flags: list[str], launcher: str) -> None:
    before, proposed = read([*typed_flags, *shlex.split(launcher)])
    program, verb, *words = shlex.split(proposed)
    assert (program, verb) == ("paceline", "run")
    after, _ = read(words)
    own, _ = read(shlex.split(read(shlex.split(launcher))[1])[2:])
    nothing, _ = read(["train.py"])
    said = {name for name, value in own.items() if value != nothing[name]}
    for name, value in before.items():
        replaced = any(name in group and group & said for group in SAME)
        if name in NOT_TYPED or value == nothing[name] or replaced:
            continue
        kept = set(value) <= set(after[name]) if isinstance(value, tuple) else after[name] == value
        assert kept, (name, value, after[name], proposed)


@pytest.fixture
def bare(paceline: Paceline, tmp_path: Path) -> Paceline:
    """A machine that knows no cluster."""
    paceline.env["HOME"] = str(tmp_path)
    paceline.script("open('ran', 'w')")
    return paceline


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (
            ("submit", "--kind", "mpijob", "--env", "A=1", "-n", "4", "mpirun", "-np", "2", "python", "t.py"),
            "mpirun is no script; write: paceline submit --kind mpijob --env A=1 -np 2 python t.py",
        ),
        (
            ("run", "-n4", "--hang", "restart", "-m", "torch.distributed.run", "--nproc_per_node", "2", "t.py"),
            "python -m torch.distributed.run is no script; write: paceline run --hang restart -n 2 t.py",
        ),
        (
            ("submit", "-n", "2", "module load x && source e && python t.py --lr 1"),
            "'module load x && source e && python t.py --lr 1': what stands before the program is its setup; write: "
            "paceline submit -n 2 --setup 'module load x' --setup 'source e' python t.py --lr 1",
        ),
        (
            ("run", "cd /x; export A=1; torchrun --nproc_per_node 2 t.py"),
            "'cd /x; export A=1; torchrun --nproc_per_node 2 t.py': what stands before the program is its setup; "
            "write: paceline run --env A=1 -n 2 --working-dir /x t.py",
        ),
    ],
)
def test_a_launcher_in_the_place_of_the_script(bare: Paceline, words: tuple[str, ...], proposed: str) -> None:
    assert refusal(bare, *words) == proposed


def test_with_plain_a_launcher_is_the_command_of_the_pods(bare: Paceline) -> None:
    words = ("submit", "--on", "kubernetes", "--kind", "mpijob", "--plain", "--image", "i", "mpirun", "-np", "2", "t")
    assert refusal(bare, *words).startswith("no kubeconfig "), "it goes to the cluster"


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("watch -n 1 nvidia-smi", "paceline top node -w"),
        ("gpustat -cpu", "paceline top node"),
        ("kubectl port-forward svc/a-b-tensorboard 9090:6006", "paceline tensorboard a-b --port 9090"),
        ("kubectl -n team apply -f mpijob.yaml", "paceline submit mpijob.yaml"),
        ("kubectl get pods", "paceline list, or paceline get JOB"),
        ("kubectl port-forward pod/x 1:2", "paceline tensorboard JOB"),
    ],
)
def test_commands_that_start_no_ranks_are_answered(bare: Paceline, line: str, answer: str) -> None:
    name = line.split(maxsplit=1)[0]
    assert refusal(bare, "explain", line) == f"{name} is no launcher; write {answer}"
    assert refusal(bare, *line.split()) == f"paceline has no verb {name!r}; write {answer}"


def test_debugpy_before_a_launcher(bare: Paceline) -> None:
    line = "python -m debugpy --listen 5678 --wait-for-client -m torch.distributed.run --nproc_per_node 2 t.py"
    done = typed(bare, "explain", line)
    assert (done.stdout, done.returncode) == ("paceline run -n 2 t.py\n", 0)
    assert "debugpy is left out, since an agent starts the ranks: write in the script debugpy.listen(" in done.stderr
    assert "write: paceline run -n 2 t.py; debugpy is left out" in refusal(bare, "run", *line.split())
