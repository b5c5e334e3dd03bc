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

from paceline.contract.memory import PLAN
from paceline.train.control.exit_report import ask_for_interrupt, fail_at_exit
from paceline.train.control.watch import Collective, Watch
from paceline.train.data.agreement import SameData
from paceline.train.data.keep_working import KeepWorking
from paceline.train.data.make_loader import check_options, make_loader, tuned
from paceline.train.data.random_state import SharedDraws, derive_seed, seed_generators
from paceline.train.group import file_meeting, join
from paceline.train.group.group import Collectives, Group
from paceline.train.loop.checkpointing import Checkpointing, Interval, open_store
from paceline.train.loop.feed import Feed
from paceline.train.loop.script_state import SavedState, State, make_reshard
from paceline.train.loop.steps import Steps, run_folder
from paceline.train.loop.tune_trial import Trial, trial_steps
from paceline.train.metrics.metrics import Metrics
from paceline.train.parallel.batch_norm import update_bn
from paceline.train.parallel.norm import clip
from paceline.train.parallel.optimizer import unscaled
from paceline.train.parallel.pipeline.batch import own_loss, shares_of, split
from paceline.train.parallel.prepared import Prepared
from paceline.train.parallel.weights import Weights
from paceline.train.parallel.wrapper import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module

    from paceline.contract import Placement
    from paceline.train.checkpoint.store import CheckpointStore
    from paceline.train.parallel.pipeline.model import PipelineModel
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
    checkpoint_required: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    log_every: int | None = None,
    progress: bool = True,
    stop_signals: bool = True,
) -> Run:
    """Join the other ranks, whichever launcher started them. Without a launcher, this is a job of one process.

    Args:
        seed: seeds Python, numpy (if it is imported) and torch. Until the first `Run.setup` or `Run.dataloader`, all
            ranks draw the same numbers, so that they split data alike; from then on, each rank draws its own. If None,
            nothing is seeded.
        init_method: `env://` (the launcher's environment variables), `tcp://host:port` or `file:///shared/path`; the
            latter two need `rank` and `world_size`.
        rank: this process among all ranks, 0 … world_size - 1; not used with `env://`.
        world_size: number of ranks; not used with `env://`.
        device: the default is this rank's GPU, or the CPU if there is none.
        backend: the default is nccl for tensors on GPUs and gloo for those on the CPU; on GPUs, "nccl" means this too.
        timeout: seconds after which a collective fails if other ranks have not entered it.
        checkpoint_dir: folder for checkpoints, shared by all ranks or one on each node. The default is the job's
            `--checkpoint-dir`, else `checkpoints` in the job's folder; without a job, there are no checkpoints.
        checkpoint_every: steps (`500`) or time (`"90s"`, `"10m"`) between two checkpoints. If None, they are taken
            only when `Run.save` is called.
        keep: number of checkpoints to keep.
        checkpoint_required: whether a checkpoint that the disk does not take, because it is full or fails, ends the
            training. Otherwise rank 0 warns, the last checkpoint is kept, and the next one, after a minute at the
            latest if `checkpoint_every` is a time, tries again; if the last one of the run fails, the script goes on to
            its end, and the exit code is 1.
        log_dir: folder for metrics, step times and TensorBoard's event files. The default is the job's folder; without
            a job, none are written.
        log_every: steps between two lines of metrics.jsonl. The default is 10; if steps are short, it is the number of
            steps that take about a second, up to 100.
        progress: whether rank 0 shows the progress of the epoch: a bar on a terminal, else a line from time to time.
        stop_signals: whether all ranks finish the step and save on SIGTERM and SIGUSR2. If not, the signals have the
            same effect as without the library, and Ctrl-C raises KeyboardInterrupt in each rank, also under
            `paceline run`.

    Raises:
        paceline.Disagreement: this rank and rank 0 were started differently.
        paceline.CheckpointFolderTaken: another job saves checkpoints into the folder.
        paceline.CheckpointError: the folder for checkpoints cannot be written.
        ValueError: the init method is unknown or lacks rank or world size, or `checkpoint_every` is not an interval.
        paceline.ContractError: the launcher's variables contradict each other.
    """
    every = None if checkpoint_every is None else Interval(checkpoint_every)
    membership = join.join(
        init_method=init_method, rank=rank, world_size=world_size, device=device, backend=backend, timeout=timeout
    )
    draws = SharedDraws(seed)
    job = run_folder()
    in_trial = job is not None and trial_steps(os.environ) is not None
    if in_trial or PLAN in os.environ:  # it leaves nothing outside of its own folder
        checkpoint_dir = log_dir = every = None
    folder = Path(checkpoint_dir) if checkpoint_dir is not None else _own_folder(job)
    store = None
    if folder is not None:
        store = open_store(folder, membership.placement, keep, required=checkpoint_required)
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
        progress=progress and not in_trial,
        progress_file=job / "progress.json" if job else None,
        trial_steps=trial_steps(os.environ) if in_trial else None,
    )


init.__module__ = "paceline"  # where users find it


class Run(Collectives):
    """The job as one rank sees it: its place among the ranks, their collectives, and training.

    Attributes:
        rank: position among all ranks, 0 … world_size - 1.
        world_size: number of ranks.
        local_rank: position among the ranks of this machine.
        attempt: number of restarts of the job before this start.
        device: this rank's device.
    """

    __module__ = "paceline"  # where users find it

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
        trial_steps: int | None = None,
    ) -> None:
        self._seed = seed
        self._group = group
        self.rank, self.world_size, self._guard = group.rank, group.world_size, group.guard
        self.local_rank, self.attempt, self.device = group.local_rank, group.attempt, group.device
        self._draws = draws
        self._same_data = SameData(group)
        self._is_closed = False
        self._states = 0  # number of objects that `state` has returned
        self._prepared = Prepared(group)
        self._metrics = Metrics(
            group,
            log_dir,
            progress=progress,
            progress_file=None if trial_steps else progress_file,
            every=log_every,
            sent=self._prepared.sent,
            method=self._prepared.method,
            replicas=lambda: None if watch is None else watch.compared,
        )
        checkpoints = Checkpointing(group, self._prepared, store, every)
        self._trial: Trial | None = None
        if trial_steps is not None:
            self._trial = Trial(trial_steps, progress_file, group, self._prepared.method, self._prepared.sent)
        self._steps = Steps(
            group, self._prepared, checkpoints, self._metrics, watch=watch, close=self.close, trial=self._trial
        )
        self._keeps_workers = watch is not None and watch.stops  # a signal to stop lets the step finish
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        _open.add(self)

    # -- training ------------------------------------------------------------------------------------------------------

    def build(
        self, weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Make models within this block without memory for their parameters and large buffers.

            with run.build():
                model = Net()
            model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters()), strategy=Strategy(shard=True))

        `setup` gives them their numbers: those that they would have without this block, with any number of ranks. With
        `Strategy(shard=…)` it does so a unit at a time, so no rank ever has the whole model.

        Args:
            weights: files of safetensors, or of `torch.save` with a state_dict, whose numbers parameters and buffers of
                the same names get instead. Only what a unit needs is read at a time.

        Raises:
            ValueError: a file is neither of the two; or has a tensor of another shape, which `setup` finds.
            OSError: a file cannot be read.
        """
        given = [] if weights is None else [weights] if isinstance(weights, (str, os.PathLike)) else list(weights)
        return self._prepared.builds.build(Weights.of_files(given) if given else None)

    def setup(self, *things: Any, strategy: Strategy | None = None) -> Any:
        """Prepare models and optimizers for training on all ranks, and return them in the order given.

        Models are moved to this rank's device, get rank 0's parameters and buffers, and exchange gradients
        (DistributedDataParallel). Optimizers get rank 0's state. What is returned for a model has the model's
        attributes and parameter names, with any number of ranks; its attribute `module` is the model itself.

        Args:
            things: models and optimizers; a model before the optimizer that updates it.
            strategy: how these are trained; other calls are not affected. The default for an optimizer is the strategy
                of its model.

        Returns:
            A tuple, or for a single argument what it has become.

        Raises:
            RuntimeError: the run begins with weights that were imported, and they do not fit the first model.
            paceline.ModelMismatch: this rank's model differs from rank 0's; the message names the first difference.
            TypeError: an argument is neither a module nor an optimizer, or is a model that another library has already
                made parallel (DistributedDataParallel, FullyShardedDataParallel), or the optimizer of one.
            ValueError: an argument was set up before; or learning rates are to be scaled, but a scheduler has already
                stored them; or an optimizer and its model are to accumulate different numbers of batches.
        """
        models = (thing for thing in things if isinstance(thing, torch.nn.Module))
        chosen = {id(model): self._prepared.chosen(model, strategy) for model in models}
        most = max(chosen.values(), key=lambda each: each.together, default=None)
        is_said = strategy is not None or (most is not None and most.together > 1)
        together = self.world_size // self._group.data_size
        if most is not None and is_said and most.together != together and self.world_size > 1:
            self._share_data(most.together, most.together_option)
        self._draws.end(self._group.data_rank)
        for thing in things:
            if isinstance(thing, torch.optim.Optimizer):
                self._metrics.times.watch(thing)
        prepared = []
        for thing in things:
            prepared.append(self._prepared.add(thing, chosen.get(id(thing), strategy), self._steps))
            if isinstance(thing, torch.nn.Module):
                self._steps.model_is_set_up()
        self._prepared.adopt()
        for thing in things:
            if isinstance(thing, torch.optim.Optimizer) and self._prepared.exchanges_after(thing):
                self._metrics.times.watch_exchange(thing)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _share_data(self, ranks: int, option: str) -> None:
        """Let each so many ranks have the same data and the same random numbers. A collective of all ranks."""
        name = option.partition("=")[0]
        if self._draws.have_ended:
            raise ValueError(
                f"{option}: ranks that compute a model together need the same data and random numbers; make this "
                f"the first run.setup, before run.dataloader, and give all models the same {name}="
            )
        self._group.share_data(ranks, option)
        seeds = self.gather_objects(torch.initial_seed())
        if len({*seeds}) > 1:  # nothing was seeded
            seed_generators(seeds[self.rank // ranks * ranks])

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        retain_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute the gradients of a batch. In the last batch of an accumulation, the ranks exchange them.

        Args:
            loss: loss of this rank's batch, a tensor with one element. It is weighted so that the gradients are those
                of the mean over all ranks' samples, also in the last, uneven batch of an epoch, where a rank may have
                no sample of its own.
            weight: weight of this loss if that is not the number of samples, such as the number of tokens that it is
                the mean over: a number or a tensor with one element, 0 or more. The gradients are those of the weighted
                mean, sum(weight * loss) / sum(weight), over all ranks and all batches of an accumulation. If a rank's
                batch is a stand-in, its weight is always 0; with batches of several loaders, if all of them are. It
                costs one more reduction per step.
            reduction: "sum" if the loss is a sum over this rank's samples: the gradients are those of the sum over all
                ranks and all batches of an accumulation.
            retain_graph: keep the graph for another backward through the same forward pass, as in torch.
            inputs: compute only the gradients of these tensors, as in torch. Of each model that was set up, they must
                contain all trainable parameters or none.

        Raises:
            RuntimeError: no model was set up; or models were set up with different values of `Strategy.accumulate`, and
                the loss was not computed with models of a single one; or the losses of an accumulation are weighted in
                different ways; or the batches of several loaders in this step are not divided alike among the ranks.
            ValueError: the weight is negative, infinite or not a number; `reduction` is neither of the two, or is "sum"
                together with a weight; or `inputs` has only some of a model's parameters.
            paceline.AccumulationChanged: gradients were changed in the middle of an accumulation.
            paceline.NotExchanged: what is trained has changed, and the method of exchange does not follow; or gradients
                are sparse, and the loss was not computed with the model that `setup` returned.
            paceline.OptimizerMismatch: optimizers have stepped on some ranks only.
            paceline.UnusedParameters: some parameters have no gradient, or the loss does not depend on a model.
        """
        if self.world_size > 1 and not self._prepared.has_models:
            raise RuntimeError("no model was set up, so each rank would train alone; pass the model to run.setup")
        _check_reduction(reduction, weight)
        if weight is not None and not isinstance(weight, torch.Tensor) and not 0 <= weight < float("inf"):
            raise ValueError(f"weight={weight} is not a number of 0 or more")
        if inputs is not None:
            inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        is_sum = reduction == "sum"

        def compute(factor: float | Tensor) -> None:
            self._metrics.times.backward(loss, factor, retain_graph=retain_graph, inputs=inputs)
            self._prepared.saw_loss(loss)
            if self._trial is not None:
                self._trial.saw_loss(unscaled(loss))

        self._steps.backward(compute, weight, is_sum=is_sum, inputs=inputs, again=retain_graph)

    def pipeline_step(
        self,
        batch: Any,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        weight: Callable[[Any], float | Tensor] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Compute the loss of a batch and its gradients: in place of the forward pass and of `backward`.

            for batch in loader:  # pairs of x and y
                loss = run.pipeline_step(batch, torch.nn.functional.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()

        With `Strategy(pipeline=N)` the batch goes through the ranks of a pipeline in microbatches. Without it, and with
        one rank, the whole batch is one.

        Args:
            batch: a pair `(x, y)`: x is what the model is called with, an argument, a tuple of them, or a dict of them
                by their names; y is what `loss` compares the result with. Or a dict that is both. Tensors whose first
                dimension is that of the first tensor of x are split along it; anything else is in all microbatches.
            loss: called as `loss(result, y)` for each microbatch; returns the mean over its samples, a tensor with one
                element. None takes what the model has returned as its `loss`, as those of transformers do.
            weight: called as `weight(y)` for each microbatch; returns what its loss is the mean over if that is not the
                number of samples, such as the number of tokens. See `backward`.
            reduction: "sum" if `loss` returns the sum over the samples.

        Returns:
            The loss of this rank's batch, a tensor without a gradient; the same on all ranks of a pipeline.

        Raises:
            RuntimeError: several models were set up, or none; or the blocks of the model do not follow each other.
            TypeError: the batch is neither a pair nor a dict, or a block returns more than one tensor.
            ValueError: `loss` does not return a tensor with one element.
            paceline.UnusedParameters: some parameters have no gradient.
        """
        _check_reduction(reduction, weight)
        model = self._prepared.to_step()
        loss_of = loss or own_loss
        parts = split(batch, (model.strategy.microbatches or 4 * model.strategy.pipeline) if model.stages else 1)
        weights = [weight(part.targets) for part in parts] if weight is not None else None
        if model.stages is None:
            args, kwargs = parts[0].given
            value = loss_of(model.wrapped(*args, **kwargs), parts[0].targets)
            self.backward(value, None if weights is None else weights[0], reduction=reduction)
            return unscaled(value).detach()
        box: list[Tensor] = []
        shares = shares_of(parts, weights, is_sum=reduction == "sum")

        def compute(factor: float | Tensor) -> None:
            box.append(cast("PipelineModel", model).step(parts, loss_of, shares, factor, self._metrics.times.computed))
            self._metrics.times.exchanged()
            if self._trial is not None:
                self._trial.saw_loss(box[0])

        self._steps.backward(compute, None if weights is None else sum(weights), is_sum=reduction == "sum")
        return box[0]

    def step_done(self) -> None:
        """Say that the current batch was trained on, in a loop that steps by hand.

        `backward` and the steps of torch's optimizers say so by themselves. If the loop uses neither, call this on all
        ranks: in a loop over `dataloader` or `steps` before `save` or a `break`, and in a loop of another form after
        each step, which counts it.
        """
        self._steps.step_done()

    def leave_out(self, *optimizers: torch.optim.Optimizer) -> None:
        """Leave optimizers out of the checkpoints on purpose, such as one that an evaluation makes anew each time.

        Otherwise it is an error if an optimizer steps that was neither set up nor registered, and that has a state.
        Steps of those that are left out do not count as training.
        """
        self._steps.optimizers.leave_out(optimizers)

    def unwrap(self, model: Module) -> Module:
        """Return the module that was passed to `setup`, given what `setup` returned; another module is returned itself.

        For a model that was set up, `model.module` is the same.

        Raises:
            TypeError: `model` is not a module.
        """
        return unwrap(model)

    def update_bn(self, loader: Iterable[Any], model: Module, device: torch.device | str | None = None) -> None:
        """Compute the running statistics of batch norm layers anew, as for an average of weights (`AveragedModel`).

        It takes the place of `torch.optim.swa_utils.update_bn`. All ranks call it, outside of a loop over `loader`, and
        get the same statistics: the mean over the steps of `loader`, in which the samples of all ranks are one batch.
        Of a training loader this is a whole epoch; its batches are no steps, and the training goes on where it was.

        Args:
            loader: of `dataloader`, or any other iterable over batches.
            model: called with each batch, or with the first element of one that is a list or a tuple.
            device: where batches go; None means this rank's device.

        Raises:
            RuntimeError: a loop over a training loader is under way.
        """
        batches = loader
        if isinstance(loader, Feed):
            if self._steps.in_loop:
                raise RuntimeError("run.update_bn was called within a loop over batches; call it after the loop")
            batches = loader.loader.whole_epoch()
        target = torch.device(device) if device is not None else self.device
        update_bn(self._group, batches, lambda: getattr(loader, "samples", 1), model, target)

    @property
    def accumulating(self) -> bool:
        """Whether the last `backward` only added to the gradients, so that the optimizer does not step yet.

        A step of the optimizer takes `Strategy.accumulate` batches of a loader of this run, or fewer at the end of an
        epoch. With batches from elsewhere, it takes `Strategy.accumulate` calls of `backward`.
        """
        return self._steps.is_accumulating()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a total norm of `max_norm` if they exceed it.

        In the middle of an accumulation they are not scaled.

        Returns:
            The total norm before scaling, a tensor with one element.
        """
        self._prepared.average_rest()
        parameters = self._prepared.parameters_with_gradients()
        stages = self._prepared.stages
        return clip(parameters, max_norm, self._group, scales=not self.accumulating, stages=stages)

    def dataloader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        *,
        evaluation: bool = False,
        **options: Any,
    ) -> Any:
        """Return a loader of this rank's share of a data set; its batches are on this rank's device.

        All ranks together use every sample of an epoch exactly once, also after a resume with another number of ranks.
        With `evaluation=True`, every iteration is a whole pass, and its batches do not count as training.

        Args:
            dataset: with `__getitem__` and `__len__`, or with `__iter__`.
            batch_size: samples per rank and step; or pass `global_batch_size`, of all ranks together.
            shuffle: whether every epoch has a new random order.
            evaluation: whether the batches are for evaluation.
            options: see `paceline.train.data.make_loader.make_loader`. With neither `seed` nor `generator`, the first
                loader has the seed of `init`, and each later one another that follows from it.

        Raises:
            paceline.DataMismatch: the ranks' data or options differ; raised at the first batch, not by this call.
            TypeError: the data set has neither items with a length nor elements, or can be iterated only once; or an
                option is unknown.
            ValueError: an option is out of range, or options exclude each other.
        """
        check_options(options)
        batch_size, options = tuned(batch_size, options, os.environ, evaluation=evaluation)
        self._draws.end(self._group.data_rank)
        if self._keeps_workers:
            options["worker_init_fn"] = KeepWorking(options.get("worker_init_fn"))
        if "global_batch_size" in options and not evaluation:
            self._prepared.divides_batches()
        if "generator" not in options:
            # Of its own, so that loaders that are iterated together have nothing in common; 0 is for evaluation.
            number = 0 if evaluation else self._steps.loaders_before
            options.setdefault("seed", derive_seed(self._seed, number) if evaluation or number else self._seed)
        loader = make_loader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            rank=self._group.data_rank,
            world_size=self._group.data_size,
            device=self.device,
            evaluation=evaluation,
            ranks=self._group,
            **options,
        )
        caller = sys._getframe(1)
        where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        self._same_data.add(loader, where, evaluation=evaluation)
        if evaluation:
            loader.on_evaluation_begins = self._prepared.evaluation_begins
            loader.on_evaluation, loader.on_evaluated = self._prepared.evaluate, self._prepared.evaluated
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
        """Add objects to the checkpoints, under these names.

        Their states must be such as `torch.load(..., weights_only=True)` reads: tensors, numbers, strings, containers
        of them, and classes marked with `torch.serialization.add_safe_globals`; NumPy scalars become numbers. A save
        refuses others.

        Args:
            per_rank: whether each rank saves and loads a state of its own, such as a replay buffer; these states pass
                through rank 0's memory. If False, all ranks load rank 0's state.
            reshard: called as `reshard(states, rank, world_size)` if the job is resumed with another number of ranks:
                gets the states of all ranks that saved, in rank order, and returns the one that this rank loads. If
                None, such a resume is an error.
            objects: with `state_dict` and `load_state_dict`, such as a scheduler. See `state` for numbers and tensors.

        Raises:
            TypeError: an object lacks `state_dict` or `load_state_dict`; or it is a sharded model (DTensor, FSDP) or
                the optimizer of one, and not `per_rank`.
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
        """Return an object for values of the script, as attributes: checkpoints hold them, and a resume sets them.

            state = run.state(best=0.0)
            state.best = max(state.best, accuracy)

        Each rank has values of its own. Call this before `epochs`, `steps` or `resume`.

        Args:
            reshard: which values a resume with another number of ranks sets. None: the saved ones, which must be equal
                on all ranks; otherwise it is an error. "sum": on rank 0 the sum of each value over the ranks, on the
                other ranks 0, for values that are sums over the batches of a rank. A function: it is called as
                `reshard(values, rank, world_size)` with a dict of each rank that saved, and returns the dict of this
                rank.
            values: the values at the first start: a number, a string, a tensor, None, or lists, tuples and dicts of
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
        """Iterate over the epochs 0 … count - 1, from where the newest checkpoint was taken.

        The last state is saved at the end. It may be called again when it has ended, as for cross-validation. Each call
        is a loop of its own, and a resumed run continues in the loop that was under way. The code between two loops
        runs again.

        Raises:
            RuntimeError: another loop over epochs is under way; or the checkpoint does not fit the script.
            paceline.CheckpointError: the newest checkpoint is complete, but cannot be read.
        """
        self._draws.end(self._group.data_rank)  # before a checkpoint's random states are loaded
        return self._steps.over_epochs(count)

    def steps(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over items that are not from `dataloader`, each a step: pieces of a text, episodes, another loader.

        A step is counted when the next item is requested; that is also where checkpoints are taken and the run is
        stopped. All ranks must take the same number of items. A resumed run skips the items that were trained on: by
        their index if `items` is a sequence or a tensor; else by iterating over them again, with the random states from
        the beginning of the pass. With another number of ranks the latter may be other items, so none is skipped, and
        rank 0 warns. `run.backward` gives each rank's loss the same weight. Outside of `epochs`, the first call resumes
        the run.

        Args:
            items: begins with the same item each time it is iterated.

        Raises:
            RuntimeError: it is iterated within another loop whose steps are counted.
        """
        self._draws.end(self._group.data_rank)
        return self._steps.over(items)

    def resume(self) -> bool:
        """Load the newest checkpoint into everything that was set up and registered. Returns whether there is one.

        `epochs` does this by itself. Weights that were imported are in the model since `setup`; that is no resume.

        Raises:
            RuntimeError: the checkpoint does not fit the script.
            paceline.CheckpointError: the checkpoint is complete, but cannot be read.
        """
        self._draws.end(self._group.data_rank)
        return self._steps.resume()

    def save(self, block: bool = False) -> None:
        """Take a checkpoint. All ranks must call this in the same step.

        A resumed run goes on behind the last batch that was trained on. Batches after it, on which no step followed,
        come again; so do passes of the epoch that did not train. In the last step of a pass, and between two passes,
        the checkpoint is taken at the end of the epoch's body, so that a resumed run does not repeat the rest of it.

        Args:
            block: whether to wait until the checkpoint is written; otherwise it is written in the background. Where the
                checkpoint is taken at the end of the body, it is taken here too.

        Raises:
            RuntimeError: the run has no folder for checkpoints.
            paceline.CheckpointError: this checkpoint or the previous one could not be written; see also
                `checkpoint_required` of `init`.
        """
        self._steps.save(block)

    @property
    def step(self) -> int:
        """Number of steps done, over all attempts. Within the loop, the current step counts once it was trained on.

        A step is a batch of `dataloader` or an item of `steps`. In loops of another form, it is a step of the
        optimizer; of several optimizers, the one that steps first counts.
        """
        return self._steps.step

    def log(self, **values: Tensor | float) -> None:
        """Log values of this step: numbers, or tensors with one element, which are not waited for.

        Every `log_every` steps (see `init`), and at the end of an epoch, their mean over ranks and steps, weighted by
        the samples of each batch, is written as a line of metrics.jsonl and to TensorBoard. Outside of the loop, all
        values have the same weight.

        Raises:
            paceline.LogMismatch: ranks have logged different names; raised when the mean is taken, not by this call.
            ValueError: a name is one of those that every line has, or a tensor has more than one element or is a
                DTensor.
        """
        self._metrics.log(values)

    def close(self) -> None:
        """Leave the other ranks. Another `init` may follow. If the run is already closed, this does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._steps.close()
        self._prepared.clear()
        if self._group.owns_process_group:
            join.leave()
        if self._steps.lost is not None:  # code of the script that follows may save what is lost here
            atexit.register(self._fail_at_exit, self._steps.lost)

    def _at_exit(self) -> None:
        """The script has not closed the run: complete what does not need the other ranks."""
        try:
            self._leave(None)
        except (RuntimeError, OSError) as failure:
            if self._steps.ending.is_failing:
                raise
            fail_at_exit(failure)

    def _fail_at_exit(self, lost: RuntimeError) -> None:
        if not self._steps.ending.is_failing:
            fail_at_exit(lost)

    def _leave(self, error: BaseException | None) -> None:
        if os.getpid() == self._pid and not self._is_closed:  # and not a child that the script has forked
            self._is_closed = True
            self._prepared.clear()  # other ranks of this machine that wait for its gradients fail now
            self._steps.leave(error)
            if self._group.owns_process_group:
                file_meeting.leave()
            join.settle()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._is_closed:
            self._is_closed = True
            atexit.unregister(self._at_exit)
            self._steps.optimizers.stop()
            with contextlib.suppress(RuntimeError):  # the error that ended the block matters more
                self._steps.ending.abandon(error)


def _watch(placement: Placement, *, stops: bool) -> Watch | None:
    """The agreement with the other ranks on steps, stops and failures. A single process needs it only for stops."""
    if placement.world_size == 1 and not stops:
        return None
    local = placement.world_size == 1 or join.on_one_machine()
    return Watch(placement.rank, placement.world_size, join.share_object, local=local, stops=stops)


def leave_all(error: BaseException | None) -> None:
    """End the runs that the script has not closed, in a process that does not call `atexit` functions.

    Args:
        error: the exception that ends the process; None at a normal end.
    """
    for run in list(_open):
        run._leave(error)


def _own_folder(job: Path | None) -> Path | None:
    """The folder for checkpoints if the script names none: each run of a script has a folder of its own."""
    global _runs  # noqa: PLW0603 - counts the runs of this process that ask for a folder
    given = os.environ.get("PACELINE_CHECKPOINT_DIR")
    if given is None and job is None:
        return None
    _runs += 1
    first = Path(given) if given is not None else cast("Path", job) / "checkpoints"
    return first if _runs == 1 else first.with_name(f"{first.name}-{_runs}")


def _check_reduction(reduction: str, weight: object) -> None:
    if reduction not in ("mean", "sum") or (reduction == "sum" and weight is not None):
        raise ValueError(f"reduction={reduction!r}: it must be 'mean' or 'sum', and only 'mean' takes weight=")
