"""Workers of a loader stay while their rank finishes its last step, and end when the rank ends, however it does."""

from __future__ import annotations

import os
import signal
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually
from tests.train.scripts import Script

if TYPE_CHECKING:
    import subprocess

    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

SCRIPT = """
    import multiprocessing, os, signal, sys, threading, time, torch, paceline
    from torch.utils.data import Dataset, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            return ((torch.tensor([float(index)]), os.getpid()) for index in range(40))

    class Slow(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            {read}
            return torch.tensor([float(index)]), os.getpid()

    def main():
        run = paceline.init(seed=0, checkpoint_dir="checkpoints")
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        model, optimizer = run.setup(model, optimizer)
        train = run.dataloader(
            {data}(), global_batch_size=4, num_workers=2, persistent_workers={persistent},
            multiprocessing_context="{start}",
        )
        workers = set()
        for epoch in run.epochs(2):
            batches = iter(train)
            for x, pids in batches:
                workers.update(pids.tolist())
                run.backward(model(x).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                if run.step == 8:
                    {at_step}
                if run.step == 12:
                    {later}
        {at_end}
        return train, batches

    if __name__ == "__main__":
        alive = main()
        print("end", flush=True)
        open("over", "w").close()
"""

EVALUATES = """
        global held
        test = run.dataloader(Slow(), batch_size=4, evaluation=True, num_workers=2, persistent_workers=True)
        held = iter(test)
        next(held)"""
KILLS = """if run.rank == run.world_size - 1:
                        open("killed", "w").write(str(min(workers)))
                        os.kill(min(workers), signal.SIGKILL)
                        time.sleep(600)"""  # torch's handler of SIGCHLD ends it
WAYS = {  # how a rank ends, what it does then, and the exit codes of that
    "end": ({}, {0}),
    "close": ({"at_end": "run.close()"}, {0}),
    "exception": ({"at_step": "raise ValueError('mine')"}, {1}),
    "sys.exit": ({"at_step": "sys.exit(3)"}, {3}),
    "break": ({"at_step": "break"}, {0}),
    "iterable": ({"data": "Stream"}, {0}),
    "evaluation": ({"at_end": EVALUATES}, {0}),
    "forkserver": ({"start": "forkserver"}, {0}),
    "killed worker": ({"at_step": KILLS}, {1}),
}


def write(paceline: Paceline, **parts: Any) -> None:
    default = {"persistent": True, "start": "fork", "data": "Slow", "read": "", "at_step": "pass", "at_end": ""}
    paceline.script(SCRIPT.format(**{"later": "pass", **default, **parts}))


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr of a process that is to end; ends its session in any case."""
    try:
        _, err = process.communicate(timeout=GENEROUS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, err


@pytest.mark.parametrize(
    ("way", "launcher", "persistent"),
    [
        *((way, "python", True) for way in WAYS),
        ("end", "paceline run", True),
        ("end", "paceline run -n 2", True),
        ("exception", "paceline run", True),
        ("killed worker", "paceline run -n 2", True),
        ("exception", "python", False),
        ("break", "paceline run", False),
    ],
)
def test_workers_end_when_their_rank_ends(paceline: Paceline, way: str, launcher: str, persistent: bool) -> None:
    parts, codes = WAYS[way]
    write(paceline, persistent=persistent, **parts)
    if launcher == "python":
        code, err = outcome(Script(paceline, "script.py", session=True))
    else:
        code, err = outcome(paceline.start(*launcher.split()[1:], "script.py", start_new_session=True))
    assert code in codes, err
    if way == "killed worker":
        worker = (paceline.folder / "killed").read_text()
        assert f"RuntimeError: DataLoader worker (pid {worker}) is killed by signal: Killed" in err
        assert launcher == "python" or "rank 1" in err


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_in_a_call_that_no_signal_interrupts_ends_too(paceline: Paceline, start: str) -> None:
    """Its sample is of a later step than that in which the rank ends."""
    read = "ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)"
    read = f"if index == 39:\n                import ctypes; open('long', 'w').close(); {read}"
    wait = "while not os.path.exists('long'): time.sleep(0.01)"
    write(paceline, start=start, read=read, at_step=f"{wait}\n                    sys.exit(3)")
    code, err = outcome(Script(paceline, "script.py", session=True))
    assert code == 3, err


@pytest.mark.parametrize(
    ("number", "start"), [(signal.SIGTERM, "fork"), (signal.SIGUSR2, "fork"), (signal.SIGTERM, "spawn")]
)
def test_a_signal_to_all_processes_lets_workers_feed_the_last_step(
    paceline: Paceline, number: signal.Signals, start: str
) -> None:
    wait = "print('step 8', flush=True)\n                    while not os.path.exists('go'): time.sleep(0.01)"
    heard = "while not run._steps._watch.stop_signal: time.sleep(0.01)"  # at the latest here
    write(paceline, start=start, at_step=wait, later=heard, at_end="run.close()")
    process = Script(paceline, "script.py", session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "step 8\n"
    os.killpg(process.pid, number)
    (paceline.folder / "go").touch()
    code, err = outcome(process)
    assert code == 75, err
    assert f"paceline: {number.name}: stopped after step" in err
    lines = [line for line in err.splitlines() if not line.startswith("epoch ")]  # progress, where that takes long
    assert len(lines) == 1, "no word from the workers"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_that_are_being_started_ignore_signals_already(paceline: Paceline, start: str) -> None:
    write(paceline, start=start, persistent=start == "spawn", at_end="run.close()")  # of spawned ones, few suffice
    script = paceline.folder / "script.py"
    now = "os.kill(os.getpid(), signal.SIGTERM)"
    first = {"fork": f"os.register_at_fork(after_in_child=lambda: {now})", "spawn": f"__name__ == '__main__' or {now}"}
    script.write_text(script.read_text().replace("class Slow", f"{first[start]}\n\nclass Slow", 1))
    code, err = outcome(Script(paceline, "script.py", session=True))
    assert code == 0, err


def test_two_signals_end_a_rank_and_its_workers(paceline: Paceline) -> None:
    """The second one comes after the training, where a signal ends the process at once."""
    write(paceline, at_end="print('over', flush=True); threading.Event().wait()")
    process = Script(paceline, "script.py", session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "over\n"
    os.kill(process.pid, signal.SIGTERM)
    code, err = outcome(process)
    assert code == -signal.SIGTERM, err
    eventually(lambda: not paceline.processes(), "the workers have ended")


def test_children_of_the_script_are_left_alone(paceline: Paceline) -> None:
    """As without the library: one is waited for at the end, a daemon is ended, and SIGTERM ends either."""
    child = """
        def child(name):
            if name == "quick":
                while not os.path.exists("over"):
                    time.sleep(0.01)
                print("quick is done", flush=True)
            else:
                threading.Event().wait()

    """
    write(
        paceline,
        at_end="children = [multiprocessing.Process(target=child, args=(n,), daemon=n == 'daemon')"
        " for n in ('quick', 'daemon', 'ended')]\n"
        "        [c.start() for c in children]\n"
        "        children[2].terminate()\n"
        "        children[2].join()\n"
        "        print(children[2].exitcode, flush=True)",
    )
    script = paceline.folder / "script.py"
    script.write_text(script.read_text().replace("def main", textwrap.dedent(child) + "def main", 1))
    process = Script(paceline, "script.py", session=True)
    out, err = process.communicate(timeout=GENEROUS)
    assert process.returncode == 0, err
    assert out.splitlines() == ["-15", "end", "quick is done"]


def test_programs_that_a_worker_starts_can_be_terminated(paceline: Paceline) -> None:
    read = (
        "import subprocess; p = subprocess.Popen(['sleep', '600']); p.terminate(); assert p.wait(60) == -signal.SIGTERM"
    )
    write(paceline, read=read)
    code, err = outcome(Script(paceline, "script.py", session=True))
    assert code == 0, err
