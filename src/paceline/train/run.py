"""`paceline.init()` and what it returns: the ranks of a job, seen from one of them."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import random
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from paceline.train.control.signals import KeepWorking
from paceline.train.data.loader import make_loader
from paceline.train.group.collectives import Collectives
from paceline.train.loop.checkpointing import Interval
from paceline.train.loop.steps import Feed, Steps, run_folder
from paceline.train.metrics.metrics import Metrics
from paceline.train.parallel.optimizer import prepare_optimizer
from paceline.train.parallel.strategy import Strategy

from .group import join
from .parallel import model as wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


_runs = 0
_open: weakref.WeakSet[Run] = weakref.WeakSet()


def init(
    *,
    seed: int | None = None,
    init_method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout: float = 1800.0,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | str | None = None,
    keep: int = 3,
    log_dir: str | os.PathLike[str] | None = None,
    log_every: int | None = None,
    progress: bool = True,
) -> Run:
    """Join the other ranks, whoever started them; without a launcher this is a job of one process.

    Args:
        seed: seeds Python, numpy (if it is imported) and torch, each rank differently; None leaves them alone.
        init_method: `env://` (whatever launcher there was), `tcp://host:port` or `file:///shared/path`, the latter two
            with `rank` and `world_size`.
        device: the default is this rank's GPU, or the CPU where there is none.
        backend: the default is nccl for tensors on GPUs and gloo for those on the CPU.
        timeout: seconds after which a collective that others do not enter is an error.
        checkpoint_dir: where checkpoints go, a folder that all ranks share or one on each node; the default is the
            job's `--checkpoint-dir`, else `checkpoints` in its folder, and none where there is no job.
        checkpoint_every: steps (`500`) or time (`"90s"`, `"10m"`) between two checkpoints; None takes them only when
            `Run.save` is called.
        keep: how many checkpoints are kept.
        log_dir: where metrics, step times and event files for TensorBoard go; the default is the job's folder, and
            nowhere where no job has one.
        log_every: steps between two lines of metrics.jsonl; the default is 10, or as many as take about a second where
            steps are shorter than that, up to 100.
        progress: rank 0 shows how far the epoch is: a bar on a terminal, else a line now and then.

    Raises:
        paceline.Disagreement: this rank and rank 0 were started differently.
        paceline.CheckpointFolderTaken: another job saves checkpoints into the folder.
        paceline.CheckpointError: the folder for checkpoints cannot be written.
        ValueError: the init method is unknown or lacks rank or world size, or `checkpoint_every` is no interval.
        paceline.ContractError: the launcher's variables contradict each other.
    """
    every = None if checkpoint_every is None else Interval(checkpoint_every)
    membership = join.join(
        init_method=init_method, rank=rank, world_size=world_size, device=device, backend=backend, timeout=timeout
    )
    if seed is not None:
        _seed(seed + membership.placement.rank)
    job = run_folder()
    folder = Path(checkpoint_dir) if checkpoint_dir is not None else _own_folder(job)
    logs = Path(log_dir) if log_dir is not None else job
    return Run(
        membership,
        seed or 0,
        folder=folder,
        every=every,
        keep=keep,
        log_dir=logs,
        log_every=log_every,
        progress=progress,
        progress_file=job / "progress.json" if job else None,
    )


class Run(Collectives):
    """The job as one rank sees it: who it is, what it shares with the others, and the steps of training."""

    def __init__(
        self,
        membership: join.Membership,
        seed: int,
        *,
        folder: Path | None = None,
        every: Interval | None = None,
        keep: int = 3,
        log_dir: Path | None = None,
        log_every: int | None = None,
        progress: bool = False,
        progress_file: Path | None = None,
    ) -> None:
        self._membership = membership
        self._models: list[wrap.Model] = []
        self._is_closed = False
        self.seed = seed
        self.strategy = Strategy()
        self._backwards = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._registered: dict[str, Any] = {}
        self._metrics = Metrics(self, log_dir, progress=progress, progress_file=progress_file, every=log_every)
        self._steps = Steps(self, folder, every, keep, self._metrics)
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        _open.add(self)

    # -- who am I ------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Position among all ranks, 0 … world_size - 1."""
        return self._membership.placement.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._membership.placement.world_size

    @property
    def local_rank(self) -> int:
        """Position among the ranks of this machine."""
        return self._membership.placement.local_rank

    @property
    def attempt(self) -> int:
        """How many times the job was restarted before this start."""
        return self._membership.placement.attempt

    @property
    def device(self) -> torch.device:
        """The device that is this rank's own."""
        return self._membership.device

    # -- training ------------------------------------------------------------------------------------------------------

    def setup(self, *things: Any, strategy: Strategy | None = None) -> Any:
        """Prepare models and optimizers for training together; returns them in the order given, one alone unpacked.

        Models move to this rank's device, start as rank 0's, and exchange gradients (DistributedDataParallel).
        Optimizers start with rank 0's state. In a job of one process models come back as they are, on the device.

        Raises:
            paceline.ModelMismatch: this rank's model is not like rank 0's; names the first difference.
            TypeError: something is neither a module nor an optimizer.
        """
        self.strategy = strategy or self.strategy
        prepared: list[Any] = []
        for thing in things:
            if isinstance(thing, torch.nn.Module):
                wrap.check_alike(self, thing)
                model = wrap.Model(thing, self)
                self._models.append(model)
                prepared.append(model.wrapped)
            elif isinstance(thing, torch.optim.Optimizer):
                self._metrics.watch(thing)
                self._optimizers.append(prepare_optimizer(thing, self))
                prepared.append(thing)
            else:
                raise TypeError(f"setup takes modules and optimizers, not {type(thing).__name__}")
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a step, and exchange them in the last step of an accumulation.

        Args:
            loss: the mean loss over this rank's batch. It is weighted so that the gradients are those of the mean over
                all ranks' samples, also in the last, uneven batch of an epoch, where a rank may have none that counts.
        """
        if self.world_size > 1 and not self._models:
            raise RuntimeError("no model was set up, so the ranks would train apart; pass it to run.setup")
        steps, every = self._steps, self.strategy.accumulate
        with steps.collective() if any(m.exchanges for m in self._models) else contextlib.nullcontext():
            self._metrics.backward(loss, steps.weight if steps.within else 1 / every)
        steps.gradients_came()
        if not steps.within:  # the batches are not of our loader: each `backward` is one
            self._backwards += 1
            self.exchange_gradients((self._backwards + 1) % every == 0)
        for model in self._models:
            model.check_gradients(complete=not self.accumulating)

    def optimizer_stepped(self) -> None:
        """Say that the batch of this step was trained on."""
        self._steps.optimizer_stepped()

    @property
    def has_optimizers(self) -> bool:
        """Whether some were set up."""
        return bool(self._optimizers)

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers, such as running means, which each has computed from its own batches."""
        with self._together():
            for model in self._models:
                model.share_buffers()

    def exchange_gradients(self, last: bool) -> None:
        """Say whether the coming `backward` is the last one of its accumulation, and so exchanges gradients."""
        for model in self._models:
            model.exchange(last)

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return self._steps.collective()

    @property
    def accumulating(self) -> bool:
        """Whether the last `backward` only added to the gradients, so that the optimizer does not step yet.

        `Strategy.accumulate` batches of a loader of this run make a step of the optimizer, or fewer where the epoch
        ends; of batches from elsewhere, so many calls of `backward`.
        """
        if self._steps.within:
            return not self._steps.completes_window
        return self._backwards % self.strategy.accumulate != 0

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a total norm of `max_norm` if they exceed it; returns the norm before.

        In the middle of an accumulation they are left as they are.
        """
        parameters = [p for model in self._models for p in model.module.parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, math.inf if self.accumulating else max_norm)

    def dataloader(self, dataset: Any, *, evaluation: bool = False, **options: Any) -> Any:
        """A loader of this rank's share of a data set, batches already on the device; see `loader.make_loader`.

        Every sample of an epoch is used once, over all ranks together, also after a resume with another number of
        ranks. With `evaluation=True` every iteration is a whole pass, and nothing is counted as training.
        """
        if self._steps.stops:
            options["worker_init_fn"] = KeepWorking(options.get("worker_init_fn"))
        loader = make_loader(
            dataset,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            evaluation=evaluation,
            **{"seed": self.seed, **options},
        )
        if evaluation:
            return loader
        feed = Feed(loader, self._steps)
        self._steps.feeds.append(feed)
        return feed

    def register(self, **objects: Any) -> None:
        """Put further objects into the checkpoints, under these names.

        Their states must be such as `torch.load(..., weights_only=True)` reads: tensors, numbers, strings, containers
        of them, and classes marked with `torch.serialization.add_safe_globals`. Others are refused by the save.

        Raises:
            TypeError: one lacks `state_dict` or `load_state_dict`.
            ValueError: a name is taken.
        """
        for name, thing in objects.items():
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                raise TypeError(f"{name} has no state_dict and load_state_dict, so it cannot be saved")
            if name in self.stateful() or name == "progress":
                raise ValueError(f"the name {name} is taken; register {type(thing).__name__} under another one")
            self._registered[name] = thing

    def stateful(self) -> dict[str, Any]:
        """What a checkpoint holds: `model`, `optimizer` (numbered from the second on), and what was registered."""
        named: dict[str, Any] = {}
        for kind, things in (("model", [m.module for m in self._models]), ("optimizer", self._optimizers)):
            for number, thing in enumerate(things):
                named[kind if number == 0 else f"{kind}-{number}"] = thing
        return {**named, **self._registered}

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs 0 … count - 1, from where the newest checkpoint was taken; the last state is saved at the end."""
        self._steps.epochs = count
        self._steps.resume(by_epochs=True)
        while self._steps.epoch < count:
            yield self._steps.epoch
            self._steps.epoch += 1
        self._metrics.settle()
        if self._steps.saves:
            self._steps.save(block=True)
        self._steps.rest()

    def resume(self) -> bool:
        """Load the newest checkpoint into everything that was set up and registered; returns whether there is one.

        `epochs` does it by itself.

        Raises:
            RuntimeError: the checkpoint is another script's.
            paceline.CheckpointError: it is whole, but cannot be read.
        """
        return self._steps.resume()

    def save(self, block: bool = False) -> None:
        """Take a checkpoint: all ranks in the same step. It is written in the background unless `block`.

        Raises:
            RuntimeError: the run has no folder for checkpoints.
            paceline.CheckpointError: this one, or the one before, could not be written.
        """
        self._steps.save(block)

    @property
    def step(self) -> int:
        """Batches trained on, over all attempts; within the loop, that at hand once it was trained on."""
        return self._steps.done + self._steps.counts

    def log(self, **values: Tensor | float) -> None:
        """Note values of this step, numbers or tensors of one; tensors are not waited for.

        Every ten steps, and at the end of an epoch, their mean over ranks and steps, weighted by the samples of each
        batch, becomes a line of metrics.jsonl and goes to TensorBoard. Outside of the loop every value weighs the same.

        Raises:
            paceline.LogMismatch: not now, but when the mean is taken: ranks have logged different names.
            ValueError: a name is one of those that every line has, or a tensor holds more than one number.
        """
        self._metrics.log(values)

    def close(self) -> None:
        """Leave the other ranks; another `init` may follow. Closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._steps.close()
        self._models.clear()
        if self._membership.owns_group and dist.is_initialized():
            join.leave()

    def _at_exit(self) -> None:
        """The script has not closed the run: finish what can be finished without the other ranks."""
        if os.getpid() == self._pid and not self._is_closed:  # and not a child that the script has forked
            self._is_closed = True
            self._steps.leave()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._is_closed:
            self._is_closed = True
            atexit.unregister(self._at_exit)
            with contextlib.suppress(RuntimeError):  # what ended the block is what matters
                self._steps.abandon(error)


def leave_all() -> None:
    """At the end of a process that does not call `atexit` functions: end what the script has not closed."""
    for run in list(_open):
        run._at_exit()


def _own_folder(job: Path | None) -> Path | None:
    """Where checkpoints go unless the script says: each run of a script has a folder of its own."""
    global _runs  # noqa: PLW0603 - counts the runs of this process that ask for a folder
    given = os.environ.get("PACELINE_CHECKPOINT_DIR")
    if given is None and job is None:
        return None
    _runs += 1
    first = Path(given) if given is not None else cast("Path", job) / "checkpoints"
    return first if _runs == 1 else first.with_name(f"{first.name}-{_runs}")


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)
