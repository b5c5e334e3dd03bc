"""A run that is told to stop finishes its step, saves its state, and goes on from there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from tests import journals
from tests.conftest import GENEROUS, eventually
from tests.train.scripts import Script

from paceline.contract.folder_lock import LOCK

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

SAMPLES = "torch.arange(200.0).reshape(50, 4) / 200"
TRAIN = """
    import os, sys, time, torch, paceline
    from torch.utils.data import TensorDataset

    run = paceline.init(seed=0, checkpoint_dir="checkpoints")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(accumulate={accumulate}))
    train = run.dataloader(
        TensorDataset(torch.arange(200.0).reshape(50, 4) / 200),
        global_batch_size=8, shuffle=True, num_workers={workers},
    )
    waits = {wait_at} and not os.path.exists("go")  # a second start goes through
    for epoch in run.epochs({epochs}):
        for (x,) in train:
            run.backward((model(x) - 1).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {{epoch}} step {{run.step}} attempt {{run.attempt}}", flush=True)
            while waits and run.step == {wait_at} and not os.path.exists("go"):
                time.sleep(0.01)
            while waits and run.step == {wait_at} + 4 and not run._steps._watch.stop_signal:  # heard by then
                time.sleep(0.01)
    if run.is_main:
        torch.save([p.detach() for p in model.parameters()], "weights.pt")
    run.close()
"""


def training(paceline: Paceline, wait_at: int = 0, accumulate: int = 1, workers: int = 0, epochs: int = 3) -> None:
    paceline.script(TRAIN.format(wait_at=wait_at, accumulate=accumulate, workers=workers, epochs=epochs))


def status(paceline: Paceline) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((paceline.newest_job() / "status.json").read_text())
    return found


def weights(paceline: Paceline) -> bytes:
    import torch

    path = paceline.folder / "weights.pt"
    values = torch.cat([p.flatten() for p in torch.load(path)])
    path.unlink()
    return bytes(values.numpy().tobytes())


def lines_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never printed: {process.stderr.read() if process.stderr else ''}")


def stopped_after(err: str, name: str = "SIGTERM") -> int:
    """The last step. Ranks notice a signal at different times, so it may be later than the step when it was sent."""
    found = re.search(rf"^paceline: {name}: stopped after step (\d+), which is saved$", err, re.MULTILINE)
    assert found is not None, err
    return int(found[1])


def said(err: str) -> list[str]:
    """The lines of stderr without those of progress, which come where an epoch takes long."""
    return [line for line in err.splitlines() if not line.startswith("epoch ")]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=GENEROUS)
    return process.returncode, out, err


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_by_the_user_and_started_again(paceline: Paceline, workers: int) -> None:
    training(paceline, workers=workers)
    assert paceline.run("-n", "2", "script.py").returncode == 0
    undisturbed = weights(paceline)
    subprocess.run(["rm", "-r", "checkpoints"], cwd=paceline.folder, check=True)

    training(paceline, wait_at=9, workers=workers)
    process = paceline.start("run", "-n", "2", "script.py")
    lines_until(process, "step 9 ")
    process.send_signal(signal.SIGINT)
    eventually(lambda: "stopping" in [e["event"] for e in events(paceline)], "the job is being stopped")
    (paceline.folder / "go").touch()
    code, out, err = finish(process)
    assert code == 130
    last = stopped_after(err)
    assert last >= 9
    assert f"step {last + 1} " not in out
    assert status(paceline)["state"] == "STOPPED"

    done = paceline.succeeds("run", "-n", "2", "script.py")
    assert done.stdout.splitlines()[0] == f"epoch {last // 7} step {last + 1} attempt 0"
    assert len(done.stdout.splitlines()) == 21 - last
    assert weights(paceline) == undisturbed


def events(paceline: Paceline) -> list[dict[str, Any]]:
    return journals.events(paceline.newest_job())


def test_a_rank_that_is_preempted_takes_the_others_along_and_all_resume(paceline: Paceline) -> None:
    training(paceline, wait_at=4)
    process = paceline.start("run", "-n", "3", "script.py")
    lines_until(process, "step 4 ")
    os.kill(status(paceline)["ranks"][2]["pid"], signal.SIGUSR2)
    (paceline.folder / "go").touch()
    code, out, err = finish(process)
    assert code == 0, err
    steps = [int(line.split()[3]) for line in out.splitlines()]
    assert sorted([*steps, 1, 2, 3, 4]) == list(range(1, 22)), "each step once"
    assert "the ranks got a signal to stop, and saved their state; starting again from there" in err
    assert status(paceline)["attempt"] == 1
    assert [e["restarts"] for e in events(paceline) if e["event"] == "restarting"] == [0]


def test_a_job_that_is_preempted_asks_to_be_resumed(paceline: Paceline) -> None:
    """As Slurm's --signal=USR2@60 does before the time is up."""
    training(paceline, wait_at=4)
    process = paceline.start("run", "-n", "2", "script.py")
    lines_until(process, "step 4 ")
    process.send_signal(signal.SIGUSR2)
    (paceline.folder / "go").touch()
    code, _, err = finish(process)
    assert code == 75, err
    assert "paceline: SIGUSR2: stopped after step" in err
    done = paceline.succeeds("run", "-n", "1", "script.py")  # and with another number of ranks
    assert done.stdout.splitlines()[-1] == "epoch 2 step 21 attempt 0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_without_a_launcher(paceline: Paceline, number: int) -> None:
    training(paceline, wait_at=4)
    process = Script(paceline, "script.py")
    lines_until(process, "step 4 ")
    process.send_signal(number)
    process.send_signal(number)  # schedulers may send it to the process and to its group
    (paceline.folder / "go").touch()
    code, _, err = finish(process)
    last = stopped_after(err, signal.Signals(number).name)
    assert (code, len(said(err))) == (75, 1), err
    code, out, err = finish(Script(paceline, "script.py"))
    assert code == 0, err
    assert len(out.splitlines()) == 21 - last


def test_signals_to_all_processes_of_a_job(paceline: Paceline) -> None:
    """As schedulers send them: loader workers get them too."""
    training(paceline, wait_at=4, workers=2)
    process = Script(paceline, "script.py", session=True)
    lines_until(process, "step 4 ")
    os.killpg(process.pid, signal.SIGTERM)
    (paceline.folder / "go").touch()
    code, _, err = finish(process)
    assert stopped_after(err) >= 4
    assert (code, len(said(err))) == (75, 1), f"no word from the workers: {err}"


@pytest.mark.parametrize("stream", [False, True])
def test_gradients_that_are_being_accumulated_are_used_first(paceline: Paceline, stream: bool) -> None:
    training(paceline, wait_at=4, accumulate=3)  # an epoch is batches 1 to 3, 4 to 6, and 7
    if stream:  # whose length is not known, so neither is the last batch
        script = paceline.folder / "script.py"
        text = script.read_text().replace("shuffle=True, ", "")
        made = "class Stream(torch.utils.data.IterableDataset):\n    __iter__ = lambda self: iter(all_samples)\n"
        text = text.replace("train = run", f"all_samples = TensorDataset({SAMPLES})\n{made}\ntrain = run")
        script.write_text(text.replace(f"    TensorDataset({SAMPLES}),", "    Stream(),"))
    process = paceline.start("run", "-n", "2", "script.py")
    lines_until(process, "step 4 ")
    process.send_signal(signal.SIGTERM)
    eventually(lambda: "stopping" in [e["event"] for e in events(paceline)], "the job is being stopped")
    (paceline.folder / "go").touch()
    _, _, err = finish(process)
    last = stopped_after(err)
    assert last % 7 in (3, 6, 0)
    done = paceline.succeeds("run", "-n", "1", "script.py")
    assert len(done.stdout.splitlines()) == 21 - last


def test_before_the_first_step_there_is_nothing_to_save(paceline: Paceline) -> None:
    paceline.script("""
        import threading, torch, paceline
        run = paceline.init(checkpoint_dir="checkpoints")
        print("ready", flush=True)
        threading.Event().wait()
    """)
    process = paceline.start("run", "-n", "2", "script.py")
    lines_until(process, "ready")
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143
    assert "stopped after step" not in err
    assert {path.name for path in (paceline.folder / "checkpoints").iterdir()} <= {LOCK}


def test_handlers_are_given_back_and_those_of_the_script_stay(paceline: Paceline) -> None:
    paceline.script("""
        import os, signal, paceline
        with paceline.init(checkpoint_dir="checkpoints"):
            print("default within:", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        print("default behind:", is_default, signal.set_wakeup_fd(-1))
        signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
        run = paceline.init(checkpoint_dir="checkpoints")
        os.kill(os.getpid(), signal.SIGTERM)
        run.close()
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        print("stays:", signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, flush=True)
    """)
    done = paceline.succeeds("run", "script.py")
    assert done.stdout.splitlines() == ["default within: False", "default behind: True -1", "mine", "stays: True"]


def test_a_disk_that_is_full_when_the_run_is_stopped_is_an_error(paceline: Paceline) -> None:
    training(paceline, wait_at=4)
    process = paceline.start("run", "-n", "2", "script.py")
    lines_until(process, "step 4 ")
    subprocess.run(["rm", "-r", "checkpoints"], cwd=paceline.folder, check=True)
    (paceline.folder / "checkpoints").touch()
    os.kill(status(paceline)["ranks"][1]["pid"], signal.SIGUSR2)
    (paceline.folder / "go").touch()
    code, _, err = finish(process)
    assert code == 1
    assert "CheckpointError: rank 0 on" in err
    assert "cannot save step" in err


@pytest.mark.parametrize("wait_at", [7, 21])  # the last steps of the first epoch, and of all
def test_ranks_that_are_before_and_behind_the_end_of_an_epoch(paceline: Paceline, wait_at: int) -> None:
    """One rank is still in its last step, the other one waits for it in a collective behind the loop."""
    script = TRAIN.format(wait_at=wait_at, accumulate=1, workers=0, epochs=3)
    there = f"run.step == {wait_at} and"
    heard = f"{there} run.is_main and not run._steps._watch.stop_signal:"  # no step follows the last one of all
    script = script.replace(f'{there} not os.path.exists("go"):', heard)
    assert heard in script
    paceline.script(
        script.replace(
            "    if run.is_main:\n        torch.save", "        run.mean(1, 2)\n    if run.is_main:\n        torch.save"
        )
    )
    process = paceline.start("run", "-n", "2", "--grace", "600s", "script.py")
    lines_until(process, f"step {wait_at} ")
    (paceline.folder / "go").touch()
    os.kill(status(paceline)["ranks"][1]["pid"], signal.SIGUSR2)
    code, _, err = finish(process)
    assert code == 0, err
    assert err.count("starting again from there") == (1 if wait_at == 7 else 0)


def test_after_the_training_signals_end_the_process_as_ever(paceline: Paceline) -> None:
    training(paceline)
    script = paceline.folder / "script.py"
    script.write_text(script.read_text().replace("run.close()", "print('exporting', flush=True)\ntime.sleep(600)"))
    process = Script(paceline, "script.py")
    lines_until(process, "exporting")
    process.terminate()
    assert finish(process)[0] == -signal.SIGTERM
