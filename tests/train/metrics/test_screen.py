"""What the screen shows of the values of `run.log`, held against `metrics.jsonl`."""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Paceline

Shown = dict[int, dict[str, list[str]]]  # by the epoch, from 1, and by the name: the values, in their order
pytestmark = pytest.mark.torch
NAMES = ("loss", "accuracy")

HEAD = """
    import os, signal, sys, time
    import torch, paceline
    from paceline.train.metrics import progress

    def numbers():
        return run.dataloader(torch.utils.data.TensorDataset(torch.arange(14.0)), global_batch_size=2)

    def stop():  # all ranks, after this step or the next one
        os.kill(os.getpid(), signal.SIGTERM)
        while not run._steps._watch.stop_signal:
            time.sleep(0.01)

"""
USUAL = """
    run = paceline.init({options})
    train = numbers()
    for epoch in run.epochs(3):
        for (batch,) in train:
            run.log(loss=run.step + 1)
            {in_loop}
        run.log(accuracy=epoch + 0.25)
        {in_body}
    run.close()
"""


def usual(options: str = "log_every=3", in_loop: str = "pass", in_body: str = "pass") -> str:
    return USUAL.format(options=options, in_loop=in_loop, in_body=in_body)


SCRIPTS = {
    "an evaluation": usual(),
    "all steps shown": "    progress._Lines.every = 0.0\n" + usual(),
    "epochs shorter than log_every": "    progress._Lines.every = 0.0\n" + usual("log_every=100"),
    "the loop is left": usual(in_loop="if run.step % 7 == 4: break"),
    "the loop is left at a reduction": usual(in_loop="if run.step % 7 == 3: break"),
    "the loop is left after its step": usual("log_every=100", "if run.step_done() or run.step % 5 == 0: break"),
    "the epochs are left": usual(in_body="if epoch == 1: break"),
    "no close": usual(in_body="if epoch == 1: break").replace("run.close()", ""),
    "an exception in the loop": usual(in_loop="if run.step == 12: sys.exit(3)"),
    "an exception in the body": usual(in_body="if epoch == 1: sys.exit(3)"),
    "an exception in a with": """
    with paceline.init(log_every=3) as run:
        for epoch in run.epochs(2):
            for (batch,) in numbers():
                run.log(loss=run.step + 1)
                if run.step == 12:
                    raise SystemExit(3)
    """,
    "an exception in the first step": """
    with paceline.init() as run:
        for (batch,) in numbers():
            run.log(loss=1)
            raise SystemExit(3)
    """,
    "a stop and a resume": usual(
        "log_every=3, checkpoint_dir='checkpoints'", "if run.step == 11 and not run.attempt: stop()"
    ),
    "loops of the script": """
    run = paceline.init(log_every=100)
    model = torch.nn.Linear(1, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for epoch in run.epochs(3):
        for step in range(4):
            run.backward(model(torch.ones(1, 1)).mean())
            optimizer.step()
            run.log(loss=10 * epoch + step)
    run.close()
    """,
}

FIRST: dict[str, list[str]] = {"loss": ["2", "5", "7"], "accuracy": ["0.25"]}
EXCEPTIONS: dict[str, Shown] = {
    "an exception in the loop": {1: FIRST, 2: {"loss": ["9", "12"]}},
    "an exception in the body": {1: FIRST, 2: {"loss": ["9", "12", "14"], "accuracy": ["1.25"]}},
    "an exception in a with": {1: {"loss": ["2", "5", "7"]}, 2: {"loss": ["9", "12"]}},
    "an exception in the first step": {1: {"loss": ["1"]}},
}


def screen(text: str) -> Shown:
    found: Shown = {}
    for line in re.split(r"[\r\n]+", text):
        if epoch := re.match(r"epoch (\d+)", line):
            names = found.setdefault(int(epoch[1]), {})
            for name, value in re.findall(rf"\b({'|'.join(NAMES)}) (\S+)", line):
                names.setdefault(name, []).append(value)
    return found


def file(paceline: Paceline) -> Shown:
    found: Shown = {}
    path = paceline.job() / "metrics.jsonl"
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        for name in NAMES:
            if name in line:
                found.setdefault(line["epoch"] + 1, {}).setdefault(name, []).append(f"{line[name]:.4g}")
    return found


def agrees(shown: Shown, written: Shown, *, last: bool = True) -> None:
    """What is shown was written with the same epoch; with `last`, the last value of each name is shown."""
    shown = {epoch: names for epoch, names in shown.items() if names}
    if last:
        assert {epoch: {name: values[-1] for name, values in names.items()} for epoch, names in shown.items()} == {
            epoch: {name: values[-1] for name, values in names.items()} for epoch, names in written.items()
        }
    for epoch, names in shown.items():
        for name, values in names.items():
            assert set(values) <= set(written[epoch][name])


def script(paceline: Paceline, what: str) -> None:
    paceline.script(textwrap.dedent(HEAD) + textwrap.dedent(SCRIPTS[what]))


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        *((what, 2) for what in SCRIPTS),
        *(pytest.param(what, 1, marks=() if what in EXCEPTIONS else pytest.mark.nightly) for what in SCRIPTS),
    ],
)
def test_a_pipe_shows_what_the_file_has(paceline: Paceline, what: str, ranks: int) -> None:
    script(paceline, what)
    done = paceline.run("-n", str(ranks), "script.py")
    assert done.returncode == (3 if "exception" in what else 0), done.stderr
    written = file(paceline)
    if "exception" not in what:
        assert written[2 if what in ("the epochs are left", "no close") else 3], "the last epoch's are there"
    elif ranks == 1:  # of several, the others may be gone
        assert written == EXCEPTIONS[what]
    # Where all ranks fail, the first that does ends the others, and so before they show what they have written.
    agrees(screen(done.stderr), written, last="exception" not in what or ranks == 1)
    if what == "a stop and a resume":
        before, _, after = done.stderr.partition("stopped after step")
        assert after
        assert screen(before)[2]["loss"], "what was logged before the stop is shown before it is said"


@pytest.mark.parametrize(
    "what", ["an evaluation", "the loop is left", "an exception in the loop", "loops of the script"]
)
def test_a_terminal_shows_what_the_file_has(paceline: Paceline, what: str) -> None:
    script(paceline, what)
    code, seen = paceline.on_terminal("run", "-n", "2", "script.py")
    assert code == (3 if "exception" in what else 0), seen
    agrees(screen(seen.decode()), file(paceline), last="exception" not in what)


def test_other_processes_see_what_comes_after_the_last_loop(paceline: Paceline) -> None:
    script(paceline, "an evaluation")
    assert paceline.run("-n", "2", "script.py").returncode == 0
    last = json.loads((paceline.job() / "progress.json").read_text())
    assert (last["epoch"], last["step"], last["epoch_seconds_left"]) == (2, 7, 0)
    assert last["metrics"] == {"loss": 21.0, "accuracy": 2.25}


def test_a_result_is_shown_before_the_next_reduction_begins(paceline: Paceline) -> None:
    """With slow steps, that is minutes earlier."""
    paceline.script("""
        import os, time, torch, paceline
        from paceline.train.metrics import progress
        progress._Lines.every = 0.0
        with paceline.init(log_every=3) as run:
            for (batch,) in run.dataloader(torch.utils.data.TensorDataset(torch.arange(16.0)), global_batch_size=2):
                run.log(loss=run.step + 1)
                while run.is_main and run.step == 6 and not run._metrics._pending.is_there():
                    time.sleep(0.01)
                if run.step == 7 and run.is_main:
                    lines = open(os.environ["PACELINE_RUN_DIR"] + "/metrics.jsonl").read()
                    print(lines.count('"step": 6,'), flush=True)
                run.step_done()
    """)
    done = paceline.succeeds("run", "-n", "2", "script.py")
    assert [line for line in done.stderr.splitlines() if line.startswith("epoch 1 step 7/8 loss 5 ")], done.stderr
    assert done.stdout == "1\n"


def test_the_step_in_which_a_loop_is_left_counts_if_its_batch_was_used(paceline: Paceline) -> None:
    script(paceline, "the loop is left after its step")
    done = paceline.succeeds("run", "-n", "2", "script.py")
    shown = [line.split(" step ")[1].split()[0] for line in done.stderr.splitlines() if " step " in line]
    assert shown == ["5/7", "7/7", "3/7"], "the second loop has the two batches that the first one left"
    assert {line["step"] for line in map(json.loads, (paceline.job() / "metrics.jsonl").open())} == {5, 7, 10}
