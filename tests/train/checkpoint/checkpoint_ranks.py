"""Real processes that save and load checkpoints: what the checkpoint tests start, kill and look into."""

from __future__ import annotations

import logging
import multiprocessing
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.conftest import GENEROUS

from paceline.train.checkpoint.store import CheckpointStore, SingleExchange, SocketExchange

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

# Processes fork from a server that has imported torch once.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "torch.distributed", "paceline.train.checkpoint.store", __name__])


def shared_state(step: int) -> dict[str, Any]:
    """A state that says everywhere which step it is of: half a megabyte, in three parts."""
    model = {f"layer{i}.weight": torch.full((100, 100), float(step)) for i in range(10)}
    optimizer = {"state": {i: {"step": torch.tensor(step), "exp_avg": torch.full((1000,), step)} for i in range(10)}}
    return {"model": model, "optimizer": {**optimizer, "param_groups": [{"lr": step / 2}]}, "scheduler": {"n": step}}


def rank_state(step: int, rank: int) -> dict[str, Any]:
    return {"rng": torch.full((5056,), step % 251, dtype=torch.uint8), "rank": rank, "position": step * 7}


def same(a: Any, b: Any) -> bool:
    """Whether two states are the same, tensors to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def single(folder: Path, **options: Any) -> CheckpointStore:
    return CheckpointStore(folder, rank=0, world_size=1, exchange=SingleExchange(), **options)


def save(store: CheckpointStore, step: int, rank: int = 0) -> None:
    store.save(step, shared_state(step), rank_state(step, rank), block=True)


@dataclass
class Outcome:
    """How a rank ended: what its function returned, or the exception; and the warnings it gave."""

    value: Any = None
    error: str = ""  # "ExchangeError: rank 1 ended …"
    warnings: list[str] = field(default_factory=list)


class Warnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Ranks:
    """Ranks in a process group over gloo; each calls `function(rank, exchange, *args)`."""

    def __init__(
        self, meeting: Path, world_size: int, function: Callable[..., Any], *args: Any, **options: Any
    ) -> None:
        self.processes: list[ForkServerProcess] = []
        self._ends: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = processes.Pipe(duplex=False)
            process = processes.Process(target=_rank, args=(theirs, meeting, rank, world_size, function, args, options))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(ours)

    def outcomes(self) -> list[Outcome | None]:
        """What became of each rank; None for one that was killed."""
        found: list[Outcome | None] = []
        try:
            for end in self._ends:
                assert end.poll(GENEROUS), "a rank hangs"
                try:
                    found.append(end.recv())
                except EOFError:
                    found.append(None)
            for process in self.processes:
                process.join(GENEROUS)
                assert process.exitcode is not None, "a rank does not end"
        finally:
            for process in self.processes:
                process.kill()
        return found

    def values(self) -> list[Any]:
        """What each rank returned; none may have failed."""
        outcomes = self.outcomes()
        assert all(outcome and not outcome.error for outcome in outcomes), outcomes
        return [outcome.value for outcome in outcomes if outcome]


def _rank(
    end: Connection,
    meeting: Path,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    warnings = Warnings()
    logging.getLogger("paceline").addHandler(warnings)
    outcome = Outcome(warnings=warnings.lines)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
        outcome.value = function(rank, SocketExchange(**options), *args)
    except Exception as error:
        traceback.print_exc()
        outcome.error = f"{type(error).__name__}: {error}"
    end.send(outcome)
