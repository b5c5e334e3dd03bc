"""A model of which each rank has some of the blocks, and its training in microbatches."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.train.collective_trace import script_line
from paceline.train.parallel.errors import NotExchanged, UnusedParameters
from paceline.train.parallel.late_exchange import average_gradients
from paceline.train.parallel.model import Model, broadcast, without_exchange
from paceline.train.parallel.nested import tensors_in
from paceline.train.parallel.optimizer import unscaled
from paceline.train.parallel.same_batch import COMPARED, other_batches
from paceline.train.parallel.shard.model import give_back_memory, no_copy
from paceline.train.parallel.sync.wires.wire import ring_bytes
from paceline.train.parallel.units import compute_again, find_units

from .batch import Microbatch
from .blocks import Between, Blocks
from .links import Links
from .schedule import order
from .stages import Elsewhere, Stages, divide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from paceline.train.group.group import Group
    from paceline.train.parallel.build import Built
    from paceline.train.parallel.model import Look
    from paceline.train.parallel.strategy import Strategy
    from paceline.train.torch_types import Arguments

    Loss = Callable[[Any, Any], torch.Tensor]

log = logging.getLogger("paceline")
_BUCKET = 25  # megabytes of gradients that are exchanged at once


class PipelineModel(Model):
    """A user's model whose blocks are on different ranks; what is beside them is on all.

    Its forward pass is the script's own on each rank, see `Blocks`. Without gradients, the ranks of a pipeline compute
    a pass together, and each gets the result.
    """

    stages: Stages

    def __init__(
        self, module: torch.nn.Module, group: Group, strategy: Strategy, look: Look | None, built: Built | None
    ) -> None:
        self._is_divided = False
        self._steps = 0  # that were compared
        self._is_last = self._has_exchanged = True  # the next step, and the last one
        self._settled: set[int] = set()
        self._hooked: set[int] = set()
        super().__init__(module, group, strategy, look, built)

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _to_device(self, module: torch.nn.Module) -> None:
        """Move nothing yet: each block moves alone, so no device ever has the whole model."""

    def _exchanges_again(self) -> None:
        if not self._is_divided:
            self._divide()
            self._is_divided = True
        here = [(name, p) for name, p in self.module.named_parameters() if not p.is_meta]
        self._trained = [(name, p) for name, p in here if p.requires_grad]
        self._frozen = [p for _, p in here if not p.requires_grad]
        self._dtypes = [p.dtype for _, p in self._trained]
        self.sum_over_stages([p for _, p in self._trained if not self.stages.has_one(p)])
        self._compute = self._compute_together = self.module

    def _divide(self) -> None:
        module, group, count = self.module, self._group, self.strategy.pipeline
        _check_kind(module, self.name)
        if group.device.type == "cpu":
            give_back_memory()
        units = find_units(module, self.strategy.units)
        if len(units) < count:
            raise ValueError(
                f"{self.name} has {len(units)} blocks ({', '.join(units)}), and pipeline={count} needs one for each "
                "rank of a pipeline; use a smaller number"
            )
        sizes = [sum(p.numel() for p in unit.parameters()) for unit in units.values()]
        parts = divide(sizes, count)
        self.stages = stages = Stages(group, count)
        own = parts[stages.index]
        self._in_blocks = tuple(f"{prefix}." for prefix in units)
        if group.is_main:
            rest = sum(p.numel() for p in module.parameters()) - sum(sizes)
            blocks = ", ".join(f"{len(part)}" for part in parts)
            said = f"{self.name}: {len(units)} blocks in {count} stages ({blocks}), and {rest:,} parameters beside them"
            print(f"paceline: {said}", file=sys.stderr, flush=True)
        with group.guard:
            for number, (prefix, unit) in enumerate(units.items()):
                stage = next(index for index, part in enumerate(parts) if number in part)
                self._settle(unit, module)
                if stage != stages.index:
                    self._give_up(unit)
                elif self.strategy.recompute:
                    compute_again(unit)
                if stage == stages.index and self.strategy.compile:
                    options = {} if self.strategy.compile is True else {"backend": self.strategy.compile}
                    unit.forward = torch.compile(unit.forward, **options)  # type: ignore[call-overload]
                every = unit.named_parameters(remove_duplicate=False), unit.named_buffers(remove_duplicate=False)
                for name, tensor in itertools.chain(*every):
                    stages.add(f"{prefix}.{name}", tensor, stage)
            self._settle(module, module)
        stages.attach(module)
        self._blocks = Blocks([*units.items()], own)
        self._links = Links(stages, group.device)
        self._of_script = module.forward
        module.forward = self._pass
        module.__deepcopy__ = module.__reduce_ex__ = functools.partial(no_copy, module)  # type: ignore[assignment,method-assign]

    def _settle(self, part: torch.nn.Module, module: torch.nn.Module) -> None:
        """Give a part of the model that is not divided yet rank 0's numbers, on the device of each rank."""
        self._fill(part, module)
        for owner in part.modules():
            for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
                if tensor is None or id(tensor) in self._settled or tensor.is_meta:
                    continue
                moved = tensor.data.to(self._group.device)
                dist.broadcast(moved, 0)
                if name in owner._buffers:
                    owner._buffers[name] = moved
                else:
                    tensor.data = moved
                self._settled.add(id(owner._buffers.get(name, tensor)))

    def _give_up(self, unit: torch.nn.Module) -> None:
        """Leave the parameters and buffers of a block to another rank; here they keep their shapes."""
        replaced: dict[int, torch.Tensor] = {}
        for owner in unit.modules():
            for name, former in owner._parameters.items():
                if former is None:
                    continue
                if id(former) not in replaced:
                    replaced[id(former)] = now = Elsewhere(former.detach().to("meta"), former.requires_grad)
                    self._replaced(former, now)
                owner._parameters[name] = replaced[id(former)]  # type: ignore[assignment]
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to("meta")
        unit._apply = lambda *_: unit  # type: ignore[method-assign]  # it has nothing to move or to convert

    def sum_over_stages(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let gradients that some stages compute of these be summed where the average of all ranks is taken."""
        for parameter in parameters:
            if id(parameter) not in self._hooked and parameter.requires_grad:
                self._hooked.add(id(parameter))
                parameter.register_hook(self._in_average)  # type: ignore[no-untyped-call]

    def got_later(self) -> set[int]:
        """The ids of parameters that the module has, and the exchange does not know."""
        return super().got_later() - {id(p) for _, p in self.named if p.is_meta}

    def refresh(self) -> None:
        """Train the parameters that are trained now; a collective of all ranks."""
        new = [name for name, p in self.named if id(p) in self.got_later()]
        if new:
            raise NotExchanged(
                f"{self.name} got the parameter {new[0]} after run.setup, which has divided it; add it before run.setup"
            )
        self._exchanges_again()

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _run(self, given: Arguments) -> Any:
        args, kwargs = given
        return self.module(*args, **kwargs)

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own `forward`: a pass without gradients, unless it is one of a step."""
        if self.is_stepping:
            return self._of_script(*args, **kwargs)
        if torch.is_grad_enabled() and self.module.training and not self._is_evaluating:
            raise RuntimeError(
                f"{self.name} is divided by pipeline=, so no rank can compute its gradients alone: call "
                "run.pipeline_step((x, y), loss) in place of the forward pass and run.backward; to evaluate, call the "
                "model within torch.no_grad()"
            )
        # Ranks with other data may have other numbers of passes, and then others must not count them.
        guard = self._group.guard if self._group.data_size == 1 else contextlib.nullcontext()
        with torch.no_grad(), guard:
            microbatch = Microbatch((args, kwargs), None, 0)
            with self._random() as seed:
                self.is_stepping = True  # for passes within this one
                try:
                    _, result = self._compute_forward(microbatch, seed, self._of_script)
                finally:
                    self.is_stepping = False
            self._links.finish()
            return self._from_last(result)

    def _from_last(self, result: Any) -> Any:
        """What the last stage has computed, on all ranks of the pipeline."""
        stages = self.stages
        file = io.BytesIO()
        if stages.is_last:
            torch.save(result, file)
        box = [file.getvalue()]
        dist.broadcast_object_list(box, stages.ranks[-1], group=stages.forward)
        if stages.is_last:
            return result
        # It may be of any class, and comes from this job.
        return torch.load(io.BytesIO(box[0]), map_location=self._group.device, weights_only=False)

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(
        self,
        microbatches: Sequence[Microbatch],
        loss_of: Loss,
        shares: Sequence[float | torch.Tensor],
        factor: float | torch.Tensor,
        computed: Callable[[], None],
    ) -> torch.Tensor:
        """Compute the gradients of a batch, and exchange them in the last one of an accumulation.

        Args:
            microbatches: the batch, the same on all ranks of a pipeline.
            loss_of: called with what the model returns and targets.
            shares: what the loss of each microbatch is multiplied by in that of the batch.
            factor: what the loss of the batch is multiplied by in its gradients.
            computed: is called between computing and exchanging gradients.

        Returns:
            The loss of the batch, on all ranks of the pipeline.
        """
        stages, module = self.stages, self.module
        self.was_called = self.has_own_buffers = True
        self._look_at(microbatches[0].given)
        if self._has_changed:
            self.refresh()
        if module.training and len(stages.replicas) > 1:
            here = [b for b in module.buffers() if not b.is_meta]
            broadcast(here, stages.replicas[0], stages.replica_group)
        kept: dict[int, tuple[Between | None, torch.Tensor]] = {}
        total = torch.zeros((), device=self._group.device)
        self._links.forget()
        self._compare(microbatches)
        self.is_stepping, self._group.steps = True, self
        try:
            with self._random() as seed:
                for kind, number in order(self.strategy.schedule, stages.index, stages.count, len(microbatches)):
                    if kind == "backward":
                        with self._blocks.again(kept[number][0], seed + number):
                            self._compute_backward(*kept.pop(number))
                        continue
                    received, result = self._compute_forward(microbatches[number], seed + number, module)
                    if stages.is_last:
                        loss = _checked(loss_of(result, microbatches[number].targets))
                        if not shares[number]:  # it may be the mean of nothing, which is NaN
                            floats = (each for each in tensors_in(result) if each.is_floating_point())
                            result = sum(each.sum() for each in floats) * 0.0
                        else:
                            result = loss.reshape(()) * shares[number] * factor
                            total += unscaled(loss).detach().reshape(()) * shares[number]
                    kept[number] = received, result.tensor if isinstance(result, Between) else result
                self._links.finish()
        finally:
            self.is_stepping, self._group.steps = False, None
        self.has_gradients = True
        if self._steps == 1:
            self._warn_of_kept()
        computed()
        self._has_exchanged = self._is_last
        if self._is_last:
            self._exchange_gradients()
        dist.broadcast(total, stages.ranks[-1], group=stages.forward)
        return total

    def _compare(self, microbatches: Sequence[Microbatch]) -> None:
        """In the first steps, check that the ranks of a pipeline were given the same batch."""
        if self._steps >= COMPARED:
            return
        self._steps += 1
        passed = ((each.given, each.targets) for each in microbatches)
        if line := other_batches(passed, self.stages.forward):
            raise RuntimeError(line)

    def _warn_of_kept(self) -> None:
        found = next(self._blocks.kept_by_blocks(), None) if not self.stages.is_last else None
        if found is not None:
            log.warning(
                "%s is a tensor with a gradient: a loss that uses it does not see it with pipeline=, as the loss is "
                "computed on the last rank of a pipeline; add it within the block, or use shard=True",
                found,
            )

    @contextlib.contextmanager
    def _random(self) -> Iterator[int]:
        """The seed of a pass. Behind it, all ranks of a pipeline go on with the same random numbers."""
        seed = int(torch.randint(1 << 62, ()))
        device = self._group.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield seed

    def _compute_forward(
        self, microbatch: Microbatch, seed: int, call: Callable[..., Any]
    ) -> tuple[Between | None, Any]:
        """What has come from the stage before, and what this one has computed, which goes to the next."""
        form = (microbatch.form(), self.module.training, torch.is_grad_enabled(), self._is_trained())
        received = self._links.receive_result(form) if self.stages.index else None
        args, kwargs = microbatch.given
        result = self._blocks.run(lambda: call(*args, **kwargs), received, seed)
        if not self.stages.is_last:
            self._links.send_result(result, form)
        return received, result

    def _is_trained(self) -> tuple[bool, ...]:
        """Which parameters are, on all ranks: the gradients depend on it."""
        return tuple(parameter.requires_grad for _, parameter in self.named)

    def _compute_backward(self, received: Between | None, result: torch.Tensor) -> None:
        if result.requires_grad:
            gradient = None if self.stages.is_last else self._links.receive_gradient(result)
            torch.autograd.backward(result, gradient)
        elif self.stages.is_last:
            raise UnusedParameters(f"the loss at {script_line()} depends on no parameter that is trained")
        if received is not None and received.tensor.requires_grad:
            self._links.send_gradient(received.tensor)

    def _exchange_gradients(self) -> None:
        """Average over the ranks that have the same parameters: of the stage, or all for what is beside the blocks."""
        stages = self.stages
        for is_own, ranks in ((True, len(stages.replicas)), (False, self._group.world_size)):
            group = stages.replica_group if is_own else None
            parameters = [p for _, p in self._trained if stages.has_one(p) is is_own]
            for dtype in dict.fromkeys(p.dtype for p in parameters) if ranks > 1 else ():
                alike = [p for p in parameters if p.dtype is dtype]
                for bucket in _buckets(alike, (self.strategy.bucket_mb or _BUCKET) << 20):
                    average_gradients(bucket, ranks, group)
                    self._sent += ring_bytes(bucket, ranks)

    def _in_average(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a parameter beside the blocks: stages sum theirs, and yet the average of all is taken.

        So what was averaged before may be averaged again, as in steps without `zero_grad` between them.
        """
        return gradient * self.stages.count if self.is_stepping else None

    # -- gradients -----------------------------------------------------------------------------------------------------

    def exchange(self, last: bool) -> None:
        """Set whether the next step is the last of its accumulation, and so exchanges gradients."""
        self._is_evaluating, self._is_last = False, last

    def _no_sync(self) -> AbstractContextManager[None]:
        return without_exchange(self, self._is_last)

    @property
    def exchanges(self) -> bool:
        """Whether the next step waits for the other ranks: each does."""
        return True

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks now."""
        return self._is_last

    def check_inputs(self, inputs: set[int]) -> bool:
        """Whether a backward for these tensors, given by their ids, gives gradients of this model: it cannot."""
        return False

    def check_gradients(self, complete: bool, again: bool = False) -> None:
        """Check that the exchange of the gradients of a step is complete, if there are any."""
        super().check_gradients(complete, again)
        self.has_gradients = False
        if complete and self._has_exchanged and not self._may_be_unused:
            self._check_unused()

    def share_buffers(self) -> None:
        """Copy the buffers of the first pipeline to all ranks."""
        stages, named = self.stages, [*self.module.named_buffers(remove_duplicate=False)]
        with self._group.guard:
            if len(stages.replicas) > 1:
                own = [b for name, b in named if name.startswith(self._in_blocks) and not b.is_meta]
                broadcast(own, stages.replicas[0], stages.replica_group)
            # Beside the blocks, only the last stage computes also what is behind them. A forward pass may assign new
            # tensors, so the names tell which these are.
            broadcast([b for name, b in named if not name.startswith(self._in_blocks)], stages.count - 1)

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent for results and gradients."""
        return self._sent + self._links.bytes

    @property
    def method(self) -> str | None:
        """The name of the method that exchanges gradients now."""
        return "pipeline"

    def cut(self) -> None:
        """Note that an error has ended a step."""
        self._links.forget()


def _check_kind(module: torch.nn.Module, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{name} is compiled by TorchScript, and pipeline= changes how blocks are called; pass run.setup the model "
            "as it was before torch.jit"
        )
    for part, each in module.named_modules():
        if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse:
            raise ValueError(f"{part} has sparse gradients, which pipeline= does not take; use sparse=False")


def _buckets(parameters: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Parameters in lists of so many bytes."""
    bucket: list[torch.Tensor] = []
    for number, parameter in enumerate(parameters, 1):
        bucket.append(parameter)
        if number == len(parameters) or sum(each.nbytes for each in bucket) >= most:
            yield bucket
            bucket = []


def _checked(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise ValueError(f"the loss of run.pipeline_step must return a tensor with one element, not {what}")
