"""`paceline tune`: tries methods of exchange with a script, shows what they take, and writes the choice."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.verbs.test_prune import Held
from tests.conftest import GENEROUS, eventually
from tests.typed import refusal

from paceline.contract.exchange import TRIED, problem_with

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch
METHODS = "allreduce,int8,local_sgd(2)"
TRAIN = """
    import torch
    import paceline
    with paceline.init(seed=3, checkpoint_dir="saved", checkpoint_every=2, log_dir="logged") as run:
        model = torch.nn.Linear(40, 40)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer{strategy})
        for x in run.steps([torch.ones(4, 40)] * {steps}):
            optimizer.zero_grad()
            run.backward(model(x).square().mean())
            optimizer.step()
    open("ended", "a").write("x")
"""


def train(paceline: Paceline, steps: int = 10_000, strategy: str = "") -> None:
    paceline.script(TRAIN.format(steps=steps, strategy=strategy and f", strategy=paceline.Strategy(sync={strategy!r})"))


def tuned(paceline: Paceline, *flags: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(paceline("tune", "-n", "2", "--steps", "10", "-o", "json", *flags).stdout)
    return found


def left(paceline: Paceline) -> list[str]:
    """The jobs that are left, and the folder's files."""
    jobs = paceline.json("list")
    assert jobs == []
    return sorted(path.name for path in paceline.folder.iterdir() if path.suffix in (".py", ".yaml", "") and path.name)


def test_it_tries_each_method_and_writes_a_job_file(paceline: Paceline) -> None:
    train(paceline)
    found = tuned(paceline, "--methods", METHODS, "script.py")
    assert [trial["method"] for trial in found] == METHODS.split(",")
    for trial in found:
        assert 0 < trial["fastest"] <= trial["step_seconds"] <= trial["slowest"]
        assert trial["last_loss"] < trial["first_loss"]
        assert trial["error"] is None
    files = left(paceline)
    assert not {"saved", "logged", "ended"} & set(files), "a trial leaves nothing, and ends after its steps"
    assert (paceline.folder / "script.yaml").read_text() == (
        "script: script.py\nranks: 2\nenv:\n  PACELINE_SYNC: allreduce\n"
    )
    done = paceline("submit", "--dry-run", "script.yaml")
    assert json.loads(done.stdout)["job"]["env"] == {"PACELINE_SYNC": "allreduce"}


def test_a_job_file_keeps_its_other_lines(paceline: Paceline) -> None:
    train(paceline, steps=30)  # it ends by itself, before the trial would
    job = paceline.folder / "job.yaml"
    job.write_text("# ours\nscript: script.py  # the model\nranks: 2\nenv: {LR: 1e-3}\nmax_restarts: 3\n")
    done = paceline.succeeds("tune", "--steps", "40", "job.yaml", "--methods", "int8")
    assert "nothing is sent between machines" in done.stderr
    head, row = done.stdout.splitlines()
    assert head.split()[:3] == ["METHOD", "STEP", "SPREAD"]
    assert row.startswith("int8")
    assert job.read_text() == (
        '# ours\nscript: script.py  # the model\nranks: 2\nenv: {"PACELINE_SYNC": "int8", LR: 1e-3}\nmax_restarts: 3\n'
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "allreduce,gossip"], "--methods 'gossip' is none of allreduce, fp16"),
        (["--methods", "powersgd(0)"], "--methods 'powersgd(0)': '0' is no number for powersgd"),
        (["--methods", "fp16,fp16"], "must name at least one method, and each once"),
        (["--write", "nowhere/job.yaml"], "nowhere; name another file"),
        (["--write", "other.yaml"], "other.yaml is the job file of other.py, not of script.py"),
        (["--steps", "3"], "--steps"),
        (["--try", "worker"], "--try worker: there is no such setting; did you mean workers?"),
        (["--try", "workers=two"], "--try workers=two: 'two' is no value for it"),
        (["--try", "batch_size"], "--try batch_size needs values; write for example --try batch_size=32,64"),
    ],
)
def test_bad_input_is_one_line(paceline: Paceline, flags: list[str], message: str) -> None:
    train(paceline)
    (paceline.folder / "other.yaml").write_text("script: other.py\n")
    assert message in refusal(paceline, "tune", "-n", "2", *flags, "script.py")


@pytest.mark.parametrize(
    ("ranks", "steps", "strategy", "message"),
    [
        (2, 10_000, "fp16", "the script itself says Strategy(sync='fp16')"),
        (2, 8, "", "has ended after 8 steps; 11 are needed"),
        (1, 10_000, "", "one rank exchanges nothing"),
        (2, 0, "", "no optimizer that run.setup returns has made a step"),
    ],
)
def test_what_cannot_be_tuned(paceline: Paceline, ranks: int, steps: int, strategy: str, message: str) -> None:
    train(paceline, steps, strategy)
    done = paceline("tune", "-n", str(ranks), "--methods", "allreduce,fp16", "script.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
    assert "script.yaml" not in left(paceline)


def test_settings_of_data_are_tried_and_the_best_is_written(paceline: Paceline) -> None:
    paceline.script("""
        import time, torch, paceline
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 100_000
            def __getitem__(self, i):
                time.sleep(0.01)
                return torch.ones(4)
        with paceline.init() as run:
            model = torch.nn.Linear(4, 4)
            model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
            for x in run.dataloader(Data(), 8):
                optimizer.zero_grad()
                run.backward(model(x).square().mean())
                optimizer.step()
    """)
    flags = ("--steps", "10", "--try", "workers=4", "--try", "batch-size=16", "-o", "json")
    done = paceline.succeeds("tune", *flags, "script.py")
    tried = [(trial["setting"], trial["value"]) for trial in json.loads(done.stdout)]
    assert tried == [("workers", "as it is"), ("workers", "4"), ("batch_size", "16")]
    assert "paceline: workers=4, which saves " in done.stderr
    assert (paceline.folder / "script.yaml").read_text() == "script: script.py\nenv:\n  PACELINE_NUM_WORKERS: '4'\n"


def test_a_setting_that_the_script_does_not_have_is_left(paceline: Paceline) -> None:
    train(paceline)
    done = paceline.succeeds("tune", "--steps", "10", "--try", "prefetch=2,4", "script.py")
    assert "paceline: prefetch is not tried: script.py has nothing of run.dataloader that takes it\n" in done.stderr
    assert "paceline: script.yaml stays as it is\n" in done.stderr
    assert "script.yaml" not in left(paceline)


def test_ctrl_c_leaves_nothing(paceline: Paceline) -> None:
    paceline.script("import time\nopen('began', 'w').close()\ntime.sleep(1000)\n")
    process = paceline.start("tune", "-n", "2", "script.py")
    eventually((paceline.folder / "began").exists, "a trial runs")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=GENEROUS)
    assert process.returncode == 130
    assert "script.yaml" not in left(paceline)


def test_ctrl_c_while_a_trial_is_being_started_leaves_nothing(paceline: Paceline) -> None:
    paceline.script("import time\nopen('began', 'w').close()\ntime.sleep(1000)\n")
    tune = Held(paceline, "paceline.backends.local.start:start", "after", "tune", "-n", "2", "script.py")
    eventually((paceline.folder / "began").exists, "a trial runs, of which its client does not know yet")
    tune.process.send_signal(signal.SIGINT)
    tune.process.communicate(timeout=GENEROUS)
    assert tune.process.returncode == 130
    assert "script.yaml" not in left(paceline)


def test_the_variable_chooses_the_method_unless_the_script_does(paceline: Paceline) -> None:
    text = """
        import torch
        import paceline
        with paceline.init() as run:
            for sync in (None, "allreduce"):
                run.setup(torch.nn.Linear(4, 4), strategy=paceline.Strategy(sync=sync))
            print(*(model.method for model in run._prepared._models))
    """
    paceline.script(text)
    done = paceline.succeeds("run", "-n", "2", "--env", "PACELINE_SYNC=int8", "script.py")
    assert done.stdout == "int8 allreduce\n"
    assert done.stderr.count("PACELINE_SYNC=int8 has no effect: the script says Strategy(sync='allreduce')") == 1
    done = paceline.run("-n", "2", "--env", "PACELINE_SYNC=gossip", "script.py")
    assert done.returncode == 1
    assert "PACELINE_SYNC: sync='gossip' is none of 'allreduce'" in done.stderr


def test_what_can_be_tried_is_what_there_is() -> None:
    from paceline.train.parallel.sync.options import name_of, parse

    for name, number in TRIED.items():
        full = f"{name}({'0.5' if name == 'topk' else 3})" if number else name
        assert problem_with(full) == ""
        assert name_of(parse(full)) == full
