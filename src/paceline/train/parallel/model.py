"""A user's model that the ranks train together: its forward passes, and the exchange of its gradients."""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.train.collective_trace import line_of, script_call, script_line
from paceline.train.group.sharded import is_dtensor, name_of

from .alike import check_alike
from .build import Unfilled
from .errors import AccumulationChanged, NotExchanged, UnusedParameters, WrongDevice
from .late_exchange import LateExchange
from .precision import HalfPrecision
from .sync.build import best_bucket_mb, make_synchroniser
from .sync.saved import CommonState
from .sync.wires.wire import ring_bytes
from .units import compute_again, find_units
from .wrapper import OwnNames, ParallelModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from paceline.train.group.group import Group
    from paceline.train.torch_types import Arguments

    from .build import Built
    from .pipeline.stages import Stages
    from .strategy import Strategy
    from .sync.methods.synchroniser import Synchroniser

    Look = Callable[[Arguments], bool]

log = logging.getLogger("paceline")
_dtype, _requires_grad = operator.attrgetter("dtype"), operator.attrgetter("requires_grad")


class Former(torch.nn.Parameter):
    """A parameter that a model had before it was set up, and that has become another one: it cannot be used."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        """See torch."""
        raise RuntimeError(
            "this parameter is from before run.setup, which has made another one of it: pass the optimizer to "
            "run.setup, and take parameters from the model that it returned"
        )


class Exchange(DistributedDataParallel):
    """DistributedDataParallel whose broadcast of buffers counts as a collective of the run."""

    def __init__(self, module: torch.nn.Module, guard: AbstractContextManager[None], **options: Any) -> None:
        super().__init__(module, **options)
        self.__dict__["module"] = module  # found directly; torch would call `__getattr__` each time
        self._guard = guard

    def _sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, at the start of each forward pass in training."""
        with self._guard:
            super()._sync_buffers()  # type: ignore[no-untyped-call]


class Model:
    """A user's model, and the module that takes its place in the training loop.

    Without gradients, and in evaluations, ranks are independent, so their numbers of batches may differ. Only
    SyncBatchNorm in training mode waits for the other ranks there too.

    Attributes:
        module: the user's module.
        wrapped: the module that takes its place.
        name: the name of its class.
        strategy: the strategy that it was set up with.
        synchroniser: exchanges the gradients; None if DistributedDataParallel does.
        stages: which rank has which blocks; None if all have the same.
        was_called: whether there was a forward pass with gradients since the last `check_gradients`.
        has_gradients: whether a backward since then has computed gradients that ranks must exchange.
        has_own_buffers: whether a forward pass of training may have changed this rank's buffers.
    """

    stages: Stages | None = None
    is_stepping = False  # whether each rank computes its part of a step

    def __init__(
        self,
        module: torch.nn.Module,
        group: Group,
        strategy: Strategy,
        look: Look | None = None,
        built: Built | None = None,
    ) -> None:
        """Set a model up, on all ranks."""
        self.strategy, self.name = strategy, name_of(module)
        self._group, self._built = group, built
        # Whoever has a parameter of the model from before, such as an optimizer, finds the new one here.
        self._former: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._to_device(module)
        if strategy.sync_batchnorm and group.device.type == "cpu" and group.is_main:
            log.warning("sync_batchnorm has no effect on the CPU: torch has it for GPUs only")
        elif strategy.sync_batchnorm and group.world_size > 1:
            module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        if strategy.recompute and not strategy.shard:
            for unit in find_units(module, strategy.units).values():
                compute_again(unit)
        self._half = HalfPrecision(group.device.type) if strategy.precision == "bf16" else None
        if self._half is not None:
            module.register_forward_pre_hook(self._half.enter)
            module.register_forward_hook(self._half.leave, always_call=True)
        self.module = module
        self._exchange: Exchange | None = None
        self.synchroniser: Synchroniser | None = None
        self._sent = 0  # bytes, if DistributedDataParallel exchanges the gradients
        self._has_sync_norm = any(isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules())
        self._may_be_unused = strategy.find_unused_parameters
        self.was_called = False
        self._is_exchanging = False  # whether it was called with gradients that will be exchanged
        self._is_evaluating = False  # ranks may have different numbers of evaluations
        self.has_gradients = self.has_own_buffers = False
        self._partial: list[tuple[torch.nn.Parameter, torch.Tensor | None, int]] = []
        self._partial_call = script_call()
        self.late = LateExchange(group, self._is_late)
        self._exchanges_again()
        self._look = look
        looks = look is not None and group.world_size > 1
        self.wrapped = ParallelModel(module, self._first_forward if looks else self._forward, self._no_sync)
        self.exchange(strategy.accumulate == 1)

    def _to_device(self, module: torch.nn.Module) -> None:
        self._fill(module, module)
        module.to(self._group.device)

    def _fill(self, part: torch.nn.Module, module: torch.nn.Module) -> None:
        """Give a part of the model its numbers, if it was made without memory."""
        for former, now in self._built.fill(part, module) if self._built is not None else ():
            self._replaced(former, now)

    def _replaced(self, former: torch.Tensor, now: torch.Tensor) -> None:
        """Note what a parameter or a buffer has become, which keeps its attributes."""
        for name, value in former.__dict__.items():
            now.__dict__.setdefault(name, value)
        self._former[id(former)] = weakref.ref(former), now
        if is_dtensor(former):  # its memory is another tensor's, and its class has a layout of its own
            former._local_tensor = former._local_tensor.new_empty(0)
            unusable = {"__slots__": (), "__torch_function__": Former.__dict__["__torch_function__"]}
            former.__class__ = type("FormerPart", (type(former),), unusable)
            return
        if not isinstance(former, Unfilled):
            former.data = former.data.new_empty(0)  # whoever has it keeps no memory
        former.__class__ = Former

    def _exchanges_again(self) -> None:
        """Make the exchange of the parameters that are trained now; a collective of all ranks."""
        group, strategy = self._group, self.strategy
        self._trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        parameters = [p for _, p in self._trained]
        self._dtypes = [p.dtype for p in parameters]
        self._sent_each = ring_bytes(parameters, group.world_size)
        if group.world_size > 1 and self._trained:
            self._exchange = Exchange(
                self.module,
                group.guard,
                device_ids=[group.device] if group.device.type == "cuda" else None,
                bucket_cap_mb=strategy.bucket_mb or best_bucket_mb(strategy.method, group),
                find_unused_parameters=strategy.find_unused_parameters,
                gradient_as_bucket_view=True,
            )
            self.synchroniser = make_synchroniser(strategy.method, group, self.module)
            if self.synchroniser is not None:
                self.synchroniser.attach(self._exchange)
        self.late.watch(parameters)
        self._compute, self._compute_together = self._compile()

    def refresh(self) -> None:
        """Exchange the gradients of the parameters that are trained now; a collective of all ranks."""
        if self.synchroniser is not None and self.synchroniser.follows_optimizer:
            raise NotExchanged(
                f"the parameters of {type(self.module).__name__} that are trained, or their types, have changed after "
                f"run.setup, and sync={self.synchroniser.method!r} does not follow; change them before run.setup"
            )
        check_alike(self._group, self.module, self.strategy)
        last = True
        if self._exchange is not None:
            last = self._exchange.require_backward_grad_sync
            self._exchange.reducer._remove_autograd_hooks()
            self._exchange = None
        self.close()
        self._exchanges_again()
        self.exchange(last)

    @property
    def _has_changed(self) -> bool:
        """Whether other parameters are trained than those whose gradients are exchanged, or they have another type."""
        trained = [parameter for _, parameter in self._trained]
        return (
            list(map(_dtype, trained)) != self._dtypes
            or not all(map(_requires_grad, trained))
            or any(map(_requires_grad, self._frozen))
        )

    def sum_over_stages(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let gradients be summed that some stages compute alone; here, there are none."""

    def got_later(self) -> set[int]:
        """The ids of parameters that the module has, and the exchange does not know."""
        return {id(p) for _, p in self.named} - {id(p) for p in (*(p for _, p in self._trained), *self._frozen)}

    def _compile(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The forward pass without the other ranks, and the one whose gradients are exchanged."""
        together: Callable[..., Any] = self._exchange.forward if self._exchange is not None else self.module
        if not self.strategy.compile:
            return self.module, together
        options = {} if self.strategy.compile is True else {"backend": self.strategy.compile}
        alone = together = torch.compile(self.module, **options)  # type: ignore[call-overload]
        if self._exchange is not None:
            self._exchange.compile(**options)
            together = self._exchange
        return (alone, together) if self._half is None else (self._half.around(alone), self._half.around(together))

    @property
    def stateful(self) -> Any:
        """What checkpoints hold of the model: a state that is the same on all ranks."""
        common = self.module if self.synchroniser is None else CommonState(self.module, self.synchroniser)
        return OwnNames(self.module, common) if OwnNames.are_needed(self.module) else common

    @property
    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """All parameters of the module, by their names in it."""
        return list(self.module.named_parameters())

    def settle(self) -> None:
        """Make the model the same on all ranks, which call this together."""
        if self.synchroniser is not None:
            self.synchroniser.settle()

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent for gradients."""
        return self._sent if self.synchroniser is None else self.synchroniser.sent

    @property
    def method(self) -> str | None:
        """The name of the method that exchanges gradients now; None if nothing is exchanged."""
        if self._exchange is None:
            return None
        return "allreduce" if self.synchroniser is None else self.synchroniser.method

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """What a parameter has become that the model had before it was set up; any other is returned itself."""
        former, now = self._former.get(id(parameter), (None, None))
        return self.current(now) if former is not None and now is not None and former() is parameter else parameter

    def take_former(self, other: Model) -> None:
        """Know also what parameters were before another model had them."""
        self._former |= {key: each for key, each in other._former.items() if key not in self._former}

    def cut(self) -> None:
        """Note that an error has ended a pass."""

    def close(self) -> None:
        """Give back what the exchange of gradients holds."""
        if self.synchroniser is not None:
            self.synchroniser.close()

    # -- the forward pass ----------------------------------------------------------------------------------------------

    def _forward(self, given: Arguments) -> Any:
        """The forward pass of `wrapped`."""
        if self._group.steps is not None and self.exchanges and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.name} is called within run.pipeline_step, where not all ranks compute the loss, and so cannot "
                "exchange its gradients; make it a part of the model whose blocks are on different ranks"
            )
        self._see(given)
        if self._has_sync_norm and self.module.training and self._exchange is not None:
            with self._group.guard:
                return self._run(given)
        return self._run(given)

    def _first_forward(self, given: Arguments) -> Any:
        """`_forward`, until there is nothing left to look at; compiled code does not look."""
        trains = torch.is_grad_enabled() and self.module.training and not self._is_evaluating
        if trains and not torch.compiler.is_compiling():
            self._look_at(given)
        return self._forward(given)

    def _look_at(self, given: Arguments) -> None:
        if self._look is not None and not self._look(given):
            self._look = None
            self.wrapped.__dict__["_forward_together"] = self._forward

    def _see(self, given: Arguments) -> None:
        """Note a forward pass, and check that tensors are on the model's device."""
        self.was_called = self.was_called or torch.is_grad_enabled()
        if torch.is_grad_enabled() and self.module.training and not self._is_evaluating:
            self.has_own_buffers = True
        args, kwargs = given
        device = self._group.device
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.device != device and value.dim():
                raise WrongDevice(
                    f"the model is on {device}, but its argument of shape {list(value.shape)} on {value.device}; "
                    "take batches from run.dataloader, or move them with .to(run.device)"
                )

    def _run(self, given: Arguments) -> Any:
        args, kwargs = given
        if self._group.world_size == 1 or not torch.is_grad_enabled():
            return self._compute(*args, **kwargs)
        if self._has_changed:
            self.refresh()
        # A pass of an evaluation with gradients must not prepare an exchange: the next backward would begin it.
        if self._exchange is None or self._is_evaluating:
            return self._compute(*args, **kwargs)
        self.late.forget()
        self._is_exchanging = self._exchange.require_backward_grad_sync
        sync = self.synchroniser
        if sync is not None and not sync.exchanges_gradients:
            self._exchange.require_backward_grad_sync = False
        are_alike = sync is None or sync.steps_alike
        shares_buffers = self.module.training and not self._is_evaluating and are_alike
        if self._exchange.require_forward_param_sync != shares_buffers:
            self._exchange.require_forward_param_sync = shares_buffers
        try:
            return self._compute_together(*args, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            unused = [names[int(index)] for index in found[1].split()] if found else []
            raise UnusedParameters(self._unused(unused, "the loss of the previous step")) from None

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._exchange.no_sync() if self._exchange is not None else contextlib.nullcontext()

    def exchange(self, last: bool) -> None:
        """Set whether the next backward is the last of its accumulation, and so exchanges gradients."""
        self._is_evaluating = False
        if self._exchange is not None:
            self._exchange.require_backward_grad_sync = last  # what DDP's `no_sync` sets

    def evaluate(self, evaluating: bool) -> None:
        """Set whether the next forward passes are for evaluation; ranks may have different numbers of them."""
        self._is_evaluating = evaluating

    def share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks."""
        if self._exchange is not None:
            broadcast(list(self.module.buffers()))

    # -- gradients -----------------------------------------------------------------------------------------------------

    @property
    def exchanges(self) -> bool:
        """Whether the next `backward` waits for the other ranks."""
        return self._exchange is not None and self._exchange.require_backward_grad_sync

    def _is_late(self) -> bool:
        """Whether the backward pass that has just begun gives gradients that nobody else exchanges."""
        self.has_gradients = True
        if self._is_exchanging:
            self._is_exchanging = False
            return False
        # In evaluation, one rank alone may ask for gradients of the original model, as to explain a prediction.
        return self.averages and self.module.training

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks now."""
        return self.exchanges and (self.synchroniser is None or self.synchroniser.exchanges_gradients)

    def gradients(self) -> list[torch.Tensor]:
        """All gradients so far."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def not_exchanged(self) -> list[torch.Tensor]:
        """Gradients of an accumulation that are not in `grad` of its parameters yet."""
        return []

    def check_inputs(self, inputs: set[int]) -> bool:
        """Whether a backward for these tensors, given by their ids, gives gradients of this model."""
        given = [id(parameter) in inputs for _, parameter in self._trained]
        if self._exchange is not None and any(given) and not all(given):
            missing = self._trained[given.index(False)][0]
            raise ValueError(
                f"inputs= has some parameters of a model, but not {missing}: the ranks exchange the gradients of all "
                "of them; pass all that are trained, or set requires_grad=False on the others before run.setup"
            )
        return any(given)

    def check_partial(self) -> None:
        """Check that the gradients of an accumulation were not changed since the last backward."""
        for parameter, gradient, version in self._partial:
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                self._partial = []
                raise AccumulationChanged(
                    f"rank {self._group.rank} has changed gradients between run.backward at "
                    f"{line_of(self._partial_call)} and run.backward at {script_line()}, where they are the sum of "
                    "some batches of an accumulation: torch.nn.utils.clip_grad_norm_ and model.zero_grad() must wait "
                    "for the last one; use run.clip_grad_norm and optimizer.zero_grad(), which do, or ask "
                    "run.accumulating"
                )

    def check_gradients(self, complete: bool, again: bool = False) -> None:
        """Check that the exchange of the gradients of a backward is complete, if there are any."""
        if not again:
            self.was_called = False
        self._partial = []
        if not complete and self._trained:
            ends = {id(p): p for _, p in (self._trained[0], self._trained[-1])}.values()
            self._partial = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in ends]
            self._partial_call = script_call()
        if self._exchange is None:
            return
        if self.has_gradients:  # with adversarial models, one was called whose gradients may come later
            self.has_gradients = False
            if self._exchange.require_backward_grad_sync:
                self._sent += self._sent_each
        if complete and not (self._may_be_unused or self.late.was_late):
            self._check_unused()

    def _check_unused(self) -> None:
        """Check that all parameters have gradients, if some have."""
        if all(p.grad is not None for _, p in self._trained):
            return
        unused = [name for name, p in self._trained if p.grad is None]
        if len(unused) < len(self._trained):
            raise UnusedParameters(self._unused(unused, f"the loss at {script_line()}"))

    def _unused(self, names: list[str], loss: str) -> str:
        return (
            f"no gradient for {some_of(names) or 'some parameters'} on rank {self._group.rank}: {loss} does not "
            "depend on them; use them, set requires_grad=False, or use Strategy(find_unused_parameters=True)"
        )


@contextlib.contextmanager
def without_exchange(model: Model, last: bool) -> Iterator[None]:
    """Accumulate gradients of a model within this block; behind it, they are exchanged if `last`."""
    model.exchange(last=False)
    try:
        yield
    finally:
        model.exchange(last)


def broadcast(tensors: Sequence[torch.Tensor], source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy the tensors of a rank to all of a group, in place, all of one type at once; a collective of that."""
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [each for each in tensors if each.dtype is dtype]
        flat = torch.cat([each.reshape(-1) for each in alike])
        dist.broadcast(flat, source, group=group)
        for each, value in zip(alike, torch.split(flat, [each.numel() for each in alike]), strict=True):
            each.data.copy_(value.view_as(each))  # a backward of an earlier pass may still need it as it is


def some_of(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
