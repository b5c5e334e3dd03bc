"""Ranks and whole jobs are killed or told to stop at random moments; each epoch's samples count once each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS, eventually, free_port

torch = pytest.importorskip("torch")

from tests.train.scripts import Script  # noqa: E402

if TYPE_CHECKING:
    import subprocess

    from tests.conftest import Paceline

pytestmark = [pytest.mark.torch, pytest.mark.soak, pytest.mark.timeout(7200)]
SAMPLES = 199
KILLS = int(os.environ.get("PACELINE_SOAK_KILLS", "3"))


class Training:
    """The same training, started and killed again and again."""

    def __init__(self, paceline: Paceline, workers: int, data: str = "map", epochs: int = 3 + KILLS) -> None:
        self.paceline = paceline
        self.epochs = epochs
        self.workers = workers
        self.records = paceline.folder / "records"
        self.records.mkdir()
        self.hold = paceline.folder / "hold"  # as long as there is this file, the last epoch waits to be killed
        paceline.env["DATA"] = data
        shutil.copy(Path(__file__).with_name("exactly_once_script.py"), paceline.folder / "train.py")

    def start(self, ranks: int) -> subprocess.Popen[str]:
        args = ("train.py", str(self.paceline.folder), str(self.epochs), str(self.workers))
        return self.paceline.start("run", "-n", str(ranks), "--max-restarts", "100000", *args)

    def start_nodes(self, nodes: list[int]) -> list[Script]:
        """A rank on each of these nodes, whose checkpoints are their own."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place.update(WORLD_SIZE=str(len(nodes)), GROUP_WORLD_SIZE=str(len(nodes)), LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
        args = ["train.py", str(self.paceline.folder), str(self.epochs), str(self.workers)]
        return [
            Script(
                self.paceline, *args, f"node{node}/checkpoints",
                env={**place, "RANK": str(rank), "GROUP_RANK": str(rank)},
            )
            for rank, node in enumerate(nodes)
        ]  # fmt: skip

    def steps(self) -> int:
        """Lines that any rank of any attempt has recorded."""
        return sum(path.read_bytes().count(b"\n") for path in self.records.iterdir())

    def used(self) -> dict[int, Counter[int]]:
        """Samples of committed steps by epoch: of each attempt, the steps before the next one's start."""
        attempts: dict[int, list[list[str]]] = {}
        for path in sorted(self.records.iterdir()):
            lines = [line.split() for line in path.read_text().split("\n")[:-1]]
            attempts.setdefault(int(path.name.partition("-")[0]), []).extend(lines)
        starts = {key: {int(line[1]) for line in lines if line[0] == "start"} for key, lines in attempts.items()}
        began = [key for key in sorted(attempts) if starts[key]]
        counts: dict[int, Counter[int]] = {}
        for key, following in zip(began, [*began[1:], None], strict=True):
            (first,) = starts[key]
            end = min(starts[following]) if following is not None else float("inf")
            for _, step, epoch, *indices in (line for line in attempts[key] if line[0] == "step"):
                if first < int(step) <= end:
                    counts.setdefault(int(epoch), Counter()).update(map(int, indices))
        return counts

    def check(self) -> None:
        used = self.used()
        assert sorted(used) == list(range(self.epochs))
        for epoch, counts in used.items():
            assert counts == Counter(range(SAMPLES)), f"epoch {epoch}"

    def check_steps(self) -> None:
        """Every step of the end's count was a step of the job, and no other."""
        lines = [line.split() for path in self.records.iterdir() for line in path.read_text().splitlines()]
        (end,) = {int(line[1]) for line in lines if line[0] == "end"}
        assert end == max(int(line[1]) for line in lines if line[0] == "step")
        if self.paceline.env["DATA"] in ("map", "stateful"):  # streams that are split end with smaller batches
            assert end == self.epochs * -(-SAMPLES // 16)


def status(paceline: Paceline) -> dict[str, object]:
    found: dict[str, object] = json.loads((paceline.newest_job() / "status.json").read_text())
    return found


def loss(weights: list[torch.Tensor]) -> float:
    """The loss of all samples, as `exactly_once_script.py` computes it."""
    features = torch.tensor([[index % 7, index % 11, 10] for index in range(SAMPLES)]) / 10
    first, second = weights[:2], weights[2:]
    hidden = torch.nn.functional.linear(features, *first)
    return float((torch.nn.functional.linear(hidden, *second) - 1).pow(2).mean())


@pytest.mark.parametrize(
    ("workers", "shard"),
    [
        pytest.param(0, None, marks=pytest.mark.nightly),
        (2, None),
        (0, "all"),
        pytest.param(0, "optimizer", marks=pytest.mark.nightly),
    ],
)
def test_samples_and_weights_survive_kills_of_ranks(paceline: Paceline, workers: int, shard: str | None) -> None:
    if shard is not None:
        paceline.env["SHARD"] = shard
    training = Training(paceline, workers)
    quiet = training.start(2)
    quiet.communicate(timeout=GENEROUS + 30 * KILLS)
    training.check()
    expected = torch.load(paceline.folder / "weights.pt")
    for path in ("records", "checkpoints"):
        shutil.rmtree(paceline.folder / path)
    training.records.mkdir()
    training.hold.touch()
    dice = random.Random(workers)
    process = training.start(2)
    kills = 0
    while kills < KILLS or status(paceline)["attempt"] < KILLS // 3:  # type: ignore[operator]
        assert process.poll() is None, process.communicate()
        goal = training.steps() + dice.randint(1, 25)
        eventually(lambda goal=goal: training.steps() >= goal or process.poll() is not None, "steps are made")
        ranks = status(paceline)["ranks"]
        assert isinstance(ranks, list)
        victim = dice.choice(ranks)["pid"]
        if victim:
            with contextlib.suppress(ProcessLookupError):  # it was just being restarted
                os.kill(victim, dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGUSR2]))
        kills += 1
    training.hold.unlink()
    _, err = process.communicate(timeout=GENEROUS + 30 * KILLS)
    assert process.returncode == 0, err
    assert err.count("starting again") >= KILLS // 3
    training.check()
    weights = torch.load(paceline.folder / "weights.pt")
    assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True)), "not the same to the bit"


def test_samples_survive_kills_of_the_job_and_other_numbers_of_ranks(paceline: Paceline) -> None:
    """Each start is sharded in another way, or not; the weights are those of one process, but for the order of sums."""
    paceline.env["SHARD"] = ""
    training = Training(paceline, 0)
    training.start(1).communicate(timeout=GENEROUS + 30 * KILLS)
    alone = torch.load(paceline.folder / "weights.pt")
    for path in ("records", "checkpoints"):
        shutil.rmtree(paceline.folder / path)
    training.records.mkdir()
    training.hold.touch()
    dice = random.Random(1)
    kills = 0
    while True:
        if kills == KILLS:
            training.hold.unlink()
        paceline.env["SHARD"] = dice.choice(["", "all", "all", "optimizer"])
        process = training.start(dice.randint(1, 3))
        goal = training.steps() + dice.randint(1, 25)
        eventually(lambda p=process, g=goal: training.steps() >= g or p.poll() is not None, "steps are made")
        number = dice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2])
        if kills < KILLS and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and its client not yet
                os.kill(status(paceline)["agent"]["pid"], number)  # type: ignore[index]
            kills += 1
        _, err = process.communicate(timeout=GENEROUS + 30 * KILLS)
        if process.returncode == 0:
            break
        expected = {signal.SIGKILL: (137,), signal.SIGTERM: (143,), signal.SIGUSR2: (75, 140)}  # 140: before a step
        assert process.returncode in expected[number], err
        eventually(lambda: not paceline.processes(), "the killed job is gone")
    assert kills == KILLS
    training.check()
    weights = torch.load(paceline.folder / "weights.pt")
    torch.testing.assert_close(weights, alone, rtol=0, atol=1e-5)
    assert loss(weights) == pytest.approx(loss(alone), abs=1e-6)


@pytest.mark.parametrize("trial", range(int(os.environ.get("PACELINE_SOAK_STREAMS", "1"))))
@pytest.mark.parametrize(
    "data",
    [
        pytest.param("stateful", marks=pytest.mark.nightly),
        "stateful-split",
        pytest.param("split", marks=pytest.mark.nightly),
    ],
)
def test_a_stream_with_workers_survives_kills_on_two_and_one_ranks(paceline: Paceline, data: str, trial: int) -> None:
    dice = random.Random(trial)
    kills = 11 if trial else 2
    training = Training(paceline, dice.choice([1, 2, 3]), data, epochs=3 + kills)
    training.hold.touch()
    for number in range(kills + 1):
        if number == kills:
            training.hold.unlink()
        training.workers = dice.choice([1, 2, 3])
        process = training.start(2 - number % 2)
        if number < kills:
            goal = training.steps() + dice.randint(1, 25)
            eventually(lambda p=process, g=goal: training.steps() >= g or p.poll() is not None, "steps are made")
            how = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and its client not yet
                os.kill(status(paceline)["agent"]["pid"], how)  # type: ignore[index]
        _, err = process.communicate(timeout=GENEROUS + 30 * kills)
        if process.returncode == 0:
            break
        assert process.returncode in (137, 143), err
        eventually(lambda: not paceline.processes(), "the killed job is gone")
    assert process.returncode == 0, err
    training.check()
    training.check_steps()


def test_samples_survive_as_nodes_that_share_nothing_come_and_go(paceline: Paceline) -> None:
    training = Training(paceline, 0)
    training.hold.touch()
    dice = random.Random(2)
    for nodes in ([0], [1, 0, 2], [2, 1], [0, 3], None):
        if nodes is None:
            training.hold.unlink()
        ranks = training.start_nodes(nodes or [0, 2])
        goal = training.steps() + dice.randint(10, 40)
        eventually(
            lambda p=ranks, g=goal: training.steps() >= g or all(rank.poll() is not None for rank in p),
            "steps are made",
        )
        if nodes:
            dice.choice(ranks).kill()
        errors = [rank.communicate(timeout=GENEROUS + 30 * KILLS)[1] for rank in ranks]
        assert [rank.returncode == 0 for rank in ranks] == [not nodes] * len(ranks), errors
    training.check()
