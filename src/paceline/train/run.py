"""`paceline.init()` and what it returns: the ranks of a job, seen from one of them."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch

from paceline.train.control.exit_report import ask_for_interrupt
from paceline.train.control.watch import Collective, Watch
from paceline.train.data.agreement import SameData
from paceline.train.data.keep_working import KeepWorking
from paceline.train.data.make_loader import make_loader
from paceline.train.data.random_state import SharedDraws
from paceline.train.group import file_meeting, join
from paceline.train.group.collectives import Collectives
from paceline.train.group.group import Group
from paceline.train.loop.checkpointing import Checkpointing, Interval, open_store
from paceline.train.loop.feed import Feed
from paceline.train.loop.state import SavedState, State, make_reshard
from paceline.train.loop.steps import Steps, run_folder
from paceline.train.metrics.metrics import Metrics
from paceline.train.parallel.prepared import Prepared
from paceline.train.parallel.wrapper import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module

    from paceline.contract import Placement
    from paceline.train.checkpoint.store import CheckpointStore
    from paceline.train.parallel.strategy import Strategy

Item = TypeVar("Item")
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
    stop_signals: bool = True,
) -> Run:
    """Join the other ranks, whoever started them; without a launcher this is a job of one process.

    Args:
        seed: seeds Python, numpy (if it is imported) and torch. All ranks draw the same numbers until the first
            `Run.setup` or `Run.dataloader`, so that they split data alike, and each its own from then on. None leaves
            the generators alone.
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
        stop_signals: whether SIGTERM and SIGUSR2 let all ranks finish the step and save. If not, the signals do what
            they do without the library, and Ctrl-C raises KeyboardInterrupt in each rank, under `paceline run` too.

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
    draws = SharedDraws(seed, membership.placement.rank)
    job = run_folder()
    folder = Path(checkpoint_dir) if checkpoint_dir is not None else _own_folder(job)
    store = open_store(folder, membership.placement, keep) if folder is not None else None
    if not stop_signals:
        ask_for_interrupt()
    watch = _watch(membership.placement, stops=stop_signals and store is not None)
    return Run(
        Group(membership, Collective(watch) if watch is not None else None),
        watch,
        seed=seed or 0,
        draws=draws,
        store=store,
        every=every,
        log_dir=Path(log_dir) if log_dir is not None else job,
        log_every=log_every,
        progress=progress,
        progress_file=job / "progress.json" if job else None,
    )


class Run(Collectives):
    """The job as one rank sees it: who it is, what it shares with the others, and the steps of training."""

    def __init__(
        self,
        group: Group,
        watch: Watch | None,
        *,
        seed: int,
        draws: SharedDraws,
        store: CheckpointStore | None,
        every: Interval | None,
        log_dir: Path | None,
        log_every: int | None,
        progress: bool,
        progress_file: Path | None,
    ) -> None:
        self.seed = seed
        self._group = group
        self._draws = draws
        self._same_data = SameData(group)
        self._is_closed = False
        self._states = 0  # how many `state` has made
        self._metrics = Metrics(group, log_dir, progress=progress, progress_file=progress_file, every=log_every)
        self._prepared = Prepared(group)
        checkpoints = Checkpointing(group, self._prepared, store, every)
        self._steps = Steps(group, self._prepared, checkpoints, self._metrics, watch=watch, close=self.close)
        self._keeps_workers = watch is not None and watch.stops  # a signal to stop lets the step finish
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        _open.add(self)

    # -- who am I ------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Position among all ranks, 0 … world_size - 1."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._group.world_size

    @property
    def local_rank(self) -> int:
        """Position among the ranks of this machine."""
        return self._group.local_rank

    @property
    def attempt(self) -> int:
        """How many times the job was restarted before this start."""
        return self._group.attempt

    @property
    def device(self) -> torch.device:
        """The device that is this rank's own."""
        return self._group.device

    # -- training ------------------------------------------------------------------------------------------------------

    def setup(self, *things: Any, strategy: Strategy | None = None) -> Any:
        """Prepare models and optimizers for training together; returns them in the order given, one alone unpacked.

        Models move to this rank's device, start as rank 0's, and exchange gradients (DistributedDataParallel).
        Optimizers start with rank 0's state. What comes back for a model has its attributes and names, at any number of
        ranks; the model itself is `.module` of it.

        Args:
            things: models and optimizers; a model before the optimizer that updates it.
            strategy: the choices for these things; those of other calls are not changed. The default for an optimizer
                is the strategy of its model.

        Raises:
            paceline.ModelMismatch: this rank's model is not like rank 0's; names the first difference.
            TypeError: something is neither a module nor an optimizer, or is a model that another library has made
                parallel (DistributedDataParallel, FSDP).
            ValueError: something was set up before; or learning rates are to be scaled, and a scheduler has noted what
                they were before; or an optimizer and its model are to accumulate different numbers of batches.
        """
        self._draws.end()
        for thing in things:
            if isinstance(thing, torch.optim.Optimizer):
                self._metrics.watch(thing)
        prepared = [self._prepared.add(thing, strategy, self._steps) for thing in things]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        retain_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute the gradients of a step, and exchange them in the last step of an accumulation.

        Args:
            loss: of this rank's batch, a tensor of one number. It is weighed so that the gradients are those of the
                mean over all ranks' samples, also in the last, uneven batch of an epoch, where a rank may have none
                that counts.
            weight: how much this loss counts where that is not the number of samples, such as the number of tokens that
                it is a mean over: a number or a tensor of one, 0 or more. The gradients are those of the weighted mean,
                sum(weight * loss) / sum(weight), over all ranks, and over all batches of an accumulation. A rank whose
                batch is a stand-in counts nothing, whatever it passes. It is one more reduction per step.
            reduction: "sum" where the loss is a sum over this rank's samples: the gradients are those of the sum over
                all ranks, and over all batches of an accumulation.
            retain_graph: keep the graph for another backward through the same forward pass, as in torch.
            inputs: compute the gradients of these tensors alone, as in torch; of each model that was set up, all
                parameters that are trained or none.

        Raises:
            RuntimeError: no model was set up; or models were set up with different `Strategy.accumulate`, and the loss
                was not computed with one kind of them; or an accumulation has losses weighed in different ways.
            ValueError: the weight is negative, infinite or not a number; `reduction` is neither of the two, or given
                together with a weight; or `inputs` has some parameters of a model only.
            paceline.AccumulationChanged: gradients were changed in the middle of an accumulation.
            paceline.NotExchanged: the loss was computed past the model that `setup` returned.
            paceline.OptimizerMismatch: optimizers have stepped on some ranks only.
            paceline.UnusedParameters: some parameters have no gradient, or the loss does not depend on a model.
        """
        if self.world_size > 1 and not self._prepared.has_models:
            raise RuntimeError("no model was set up, so the ranks would train apart; pass it to run.setup")
        if reduction not in ("mean", "sum") or (reduction == "sum" and weight is not None):
            raise ValueError(f"reduction={reduction!r} is neither 'mean' nor 'sum', of which only 'mean' takes weight=")
        if weight is not None and not isinstance(weight, torch.Tensor) and not 0 <= weight < float("inf"):
            raise ValueError(f"weight={weight} is not a number of 0 or more")
        options: dict[str, Any] = {"retain_graph": retain_graph}
        if inputs is not None:
            inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            options["inputs"] = inputs
        is_sum = reduction == "sum"
        with self._steps.backward(weight, is_sum=is_sum, inputs=inputs, again=retain_graph) as factor:
            self._metrics.backward(loss, factor, **options)

    def unwrap(self, model: Module) -> Module:
        """The module that was given to `setup` for what it returned; another module comes back as it is.

        `model.module` is the same for a model that was set up.

        Raises:
            TypeError: it is no module.
        """
        return unwrap(model)

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return self._group.guard

    @property
    def accumulating(self) -> bool:
        """Whether the last `backward` only added to the gradients, so that the optimizer does not step yet.

        `Strategy.accumulate` batches of a loader of this run make a step of the optimizer, or fewer where the epoch
        ends; of batches from elsewhere, so many calls of `backward`.
        """
        return self._steps.is_accumulating()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a total norm of `max_norm` if they exceed it; returns the norm before.

        In the middle of an accumulation they are left as they are.
        """
        parameters = self._prepared.parameters_with_gradients()
        if self.accumulating:
            return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def dataloader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        *,
        evaluation: bool = False,
        **options: Any,
    ) -> Any:
        """A loader of this rank's share of a data set, batches already on the device; see `make_loader.make_loader`.

        Every sample of an epoch is used once, over all ranks together, also after a resume with another number of
        ranks. With `evaluation=True` every iteration is a whole pass, and nothing is counted as training.

        Args:
            batch_size: samples per rank and step; or pass `global_batch_size`, of all ranks together.
            shuffle: a new order every epoch.

        Raises:
            paceline.DataMismatch: not now, but at the first batch: the ranks' data or options differ.
            TypeError: the data set has neither items with a length nor elements, or can be iterated only once.
            ValueError: an option is out of range, or options exclude each other.
        """
        self._draws.end()
        if self._keeps_workers:
            options["worker_init_fn"] = KeepWorking(options.get("worker_init_fn"))
        if "generator" not in options:
            options.setdefault("seed", self.seed)
        loader = make_loader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            evaluation=evaluation,
            ranks=self._group,
            **options,
        )
        caller = sys._getframe(1)
        where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        self._same_data.add(loader, where, evaluation=evaluation)
        if evaluation:
            loader.on_evaluation = self._prepared.evaluate
            return loader
        feed = Feed(loader, self._steps)
        self._steps.feeds.append(feed)
        return feed

    def register(
        self,
        *,
        per_rank: bool = False,
        reshard: Callable[[Sequence[Any], int, int], Any] | None = None,
        **objects: Any,
    ) -> None:
        """Put further objects into the checkpoints, under these names.

        Args:
            per_rank: each rank has a state of its own, such as a replay buffer, and gets it back; else all get rank
                0's. These states go through rank 0's memory.
            reshard: called as `reshard(states, rank, world_size)` where another number of ranks goes on: makes the
                states of all ranks that saved, in their order, the one to load here. None makes that an error.
            objects: with `state_dict` and `load_state_dict`, such as a scheduler. See `state` for numbers and tensors.

        Their states must be such as `torch.load(..., weights_only=True)` reads: tensors, numbers, strings, containers
        of them, and classes marked with `torch.serialization.add_safe_globals`; NumPy scalars become numbers. Others
        are refused by the save.

        Raises:
            TypeError: one lacks `state_dict` or `load_state_dict`.
            ValueError: a name is taken, or `reshard` is given without `per_rank`.
        """
        for name, thing in objects.items():
            self._prepared.register(name, thing, per_rank=per_rank, reshard=reshard)

    def state(
        self,
        *,
        reshard: Callable[[Sequence[dict[str, Any]], int, int], dict[str, Any]] | Literal["sum"] | None = None,
        **values: Any,
    ) -> State:
        """Values of the script's own, as attributes: every checkpoint holds them, and a resume sets them.

            state = run.state(best=0.0)
            state.best = max(state.best, accuracy)

        Each rank has its own. Call it before `epochs`, `steps` or `resume`.

        Args:
            reshard: what another number of ranks goes on with. None: the values that all had alike, and it is an error
                where they differ. "sum": rank 0 gets the sum of each value over the ranks, and the others 0, as for
                sums over the batches of a rank. A function: it is called as `reshard(values, rank, world_size)` with a
                dict for each rank that saved, and returns the dict of this rank.
            values: what each is at the first start: a number, a string, a tensor, None, or lists, tuples and dicts of
                these. Only attributes that are named here can be set.

        Raises:
            ValueError: a name begins with an underscore, or `reshard` is none of these.
        """
        state, function = State(**values), make_reshard(reshard)
        name = f"run.state-{self._states}" if self._states else "run.state"
        self._states += 1
        self._prepared.register_on_rank(name, SavedState(state, self.device), function)
        return state

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs 0 … count - 1, from where the newest checkpoint was taken; the last state is saved at the end.

        It may be called again when it has ended, as for cross-validation: each call is a loop of its own, and a resumed
        run goes on in that which was under way. What the script does between two loops is done again.

        Raises:
            RuntimeError: another loop over epochs is under way; or the checkpoint is another script's.
            paceline.CheckpointError: the newest checkpoint is whole, but cannot be read.
        """
        self._draws.end()  # before a checkpoint's random states are loaded
        return self._steps.over_epochs(count)

    def steps(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate what is not from `dataloader`, so that each item is a step: pieces of a text, episodes, a loader.

        A step is counted when the next item is asked for, and checkpoints are taken and the run is stopped there. All
        ranks must take the same number. A resumed run leaves out the items that were trained on: by their index where
        `items` is a sequence or a tensor; else they are iterated once more, with the random states that the pass began
        with. `run.backward` weighs each rank's loss the same. Outside of `epochs`, the first call resumes the run.

        Args:
            items: begins with the same item whenever it is iterated.

        Raises:
            RuntimeError: it is iterated within another loop whose steps are counted.
        """
        self._draws.end()
        return self._steps.over(items)

    def resume(self) -> bool:
        """Load the newest checkpoint into everything that was set up and registered; returns whether there is one.

        `epochs` does it by itself.

        Raises:
            RuntimeError: the checkpoint is another script's.
            paceline.CheckpointError: it is whole, but cannot be read.
        """
        self._draws.end()
        return self._steps.resume()

    def save(self, block: bool = False) -> None:
        """Take a checkpoint: all ranks in the same step. It is written in the background unless `block`.

        In an epoch's last step, and behind a loop that may not be the epoch's last training, it is
        taken when the epoch's body is through, so that the rest of the body is not done twice; with `block` it is taken
        here, and once more there.

        Raises:
            RuntimeError: the run has no folder for checkpoints.
            paceline.CheckpointError: this one, or the one before, could not be written.
        """
        self._steps.save(block)

    @property
    def step(self) -> int:
        """Steps done, over all attempts; within the loop, the one at hand once its batch was trained on.

        A step is a batch of `dataloader` or an item of `steps`. In loops of another form it is a step of the optimizer,
        of several that which steps first.
        """
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
        self._prepared.clear()
        if self._group.owns_process_group:
            join.leave()

    def _at_exit(self, error: BaseException | None = None) -> None:
        """The script has not closed the run: finish what can be finished without the other ranks."""
        if os.getpid() == self._pid and not self._is_closed:  # and not a child that the script has forked
            self._is_closed = True
            self._steps.ending.leave(error)
            if self._group.owns_process_group:
                file_meeting.leave()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._is_closed:
            self._is_closed = True
            atexit.unregister(self._at_exit)
            with contextlib.suppress(RuntimeError):  # what ended the block is what matters
                self._steps.ending.abandon(error)


def _watch(placement: Placement, *, stops: bool) -> Watch | None:
    """What agrees with the other ranks on steps, stops and failures; a job of one process needs it to stop cleanly."""
    if placement.world_size == 1 and not stops:
        return None
    local = placement.world_size == 1 or join.on_one_machine()
    return Watch(placement.rank, placement.world_size, join.share_object, local=local, stops=stops)


def leave_all(error: BaseException | None) -> None:
    """At the end of a process that does not call `atexit` functions: end what the script has not closed.

    Args:
        error: what ends the process; None at a normal end.
    """
    for run in list(_open):
        run._at_exit(error)


def _own_folder(job: Path | None) -> Path | None:
    """Where checkpoints go unless the script says: each run of a script has a folder of its own."""
    global _runs  # noqa: PLW0603 - counts the runs of this process that ask for a folder
    given = os.environ.get("PACELINE_CHECKPOINT_DIR")
    if given is None and job is None:
        return None
    _runs += 1
    first = Path(given) if given is not None else cast("Path", job) / "checkpoints"
    return first if _runs == 1 else first.with_name(f"{first.name}-{_runs}")
