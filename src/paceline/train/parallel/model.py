"""What `Run.setup` makes of models and optimizers."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from paceline.train.group.group import Group

    from .strategy import Strategy


log = logging.getLogger("paceline")


class ModelMismatch(RuntimeError):
    """This rank's model differs from rank 0's, or another rank's does."""

    __module__ = "paceline"  # where users find it


class UnusedParameters(RuntimeError):
    """Parameters that got no gradient, so that ranks would train with different weights."""

    __module__ = "paceline"  # where users find it


class WrongDevice(ValueError):
    """A batch is not where the model is."""

    __module__ = "paceline"  # where users find it


class NotExchanged(RuntimeError):
    """Gradients were computed that no rank exchanges."""

    __module__ = "paceline"  # where users find it


class Calls:
    """The forward passes of a model: what they are given, and whether gradients follow.

    Attributes:
        exchanging: since the last look, there was one whose gradients will be exchanged.
        called: since the last look, there was one with gradients.
        evaluating: they are those of an evaluation, of which ranks may have different numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self.exchanging = self.called = self.evaluating = False
        self._device = device

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a forward pass, and see that tensors are where the model is.

        Raises:
            WrongDevice: one is not; numbers, that is tensors without dimensions, may be.
        """
        self.called = self.called or torch.is_grad_enabled()
        for value in args:
            if isinstance(value, torch.Tensor) and value.device != self._device and value.dim():
                self._refuse(value)
        for value in kwargs.values():
            if isinstance(value, torch.Tensor) and value.device != self._device and value.dim():
                self._refuse(value)

    def check_hook(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`check` as a hook of a module."""
        self.check(args, kwargs)

    def _refuse(self, value: torch.Tensor) -> None:
        raise WrongDevice(
            f"the model is on {self._device}, but its argument of shape {list(value.shape)} on {value.device}; "
            "take batches from run.dataloader, or move them with .to(run.device)"
        )


class DataParallel(DistributedDataParallel):
    """Torch's own, with the manners of the module that it wraps.

    Its state_dict has the module's names and its other attributes are the module's, so that a script written for the
    module works. Errors name parameters. Without gradients, and in evaluations, ranks are independent: their numbers of
    batches may differ. Only SyncBatchNorm in training mode waits for the other ranks there too.
    """

    def __init__(
        self, module: torch.nn.Module, device: torch.device, guard: AbstractContextManager[None], **options: Any
    ) -> None:
        super().__init__(module, **options)
        self.__dict__["module"] = module  # found at once, where torch asks `__getattr__` each time
        self.calls = Calls(device)
        self._guard = guard
        self._has_sync_norm = any(isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and get ready to exchange gradients if there will be some.

        Raises:
            UnusedParameters: in the step before, some parameters got no gradient.
            WrongDevice: an argument is on another device.
        """
        self.calls.check(args, kwargs)
        if self._has_sync_norm and self.training:
            with self._guard:
                return self._run_forward(args, kwargs)
        return self._run_forward(args, kwargs)

    def _run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self.calls.exchanging = True
        shares_buffers = self.training and not self.calls.evaluating
        if self.require_forward_param_sync != shares_buffers:
            self.require_forward_param_sync = shares_buffers
        try:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            unused = [names[int(index)] for index in found[1].split()] if found else []
            raise UnusedParameters(_unused(unused)) from None

    def _sync_buffers(self) -> None:
        """Give every rank rank 0's buffers, which each forward pass in training begins with."""
        with self._guard:
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__:
                raise
            return getattr(self.module, name)


class HalfPrecision:
    """Hooks that run a module's forward pass under autocast to bfloat16, and make its results float32 for the loss.

    Hooks stay with a copy of the module, such as an average of its weights over time.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._entered: list[torch.autocast] = []

    def enter(self, *_: object) -> None:
        """Before the forward pass."""
        context = torch.autocast(self._device_type, dtype=torch.bfloat16)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(context)

    def leave(self, _: torch.nn.Module, args: object, result: Any) -> Any:
        """After it, or after the error that ended it."""
        self._entered.pop().__exit__(None, None, None)
        return _to_float(result)


class Model:
    """A user's model, and the module that takes its place in the training loop.

    Attributes:
        module: the user's.
        wrapped: what takes its place.
        strategy: the choices that it was set up with.
    """

    def __init__(self, module: torch.nn.Module, group: Group, strategy: Strategy) -> None:
        self.strategy = strategy
        module.to(group.device)
        if strategy.sync_batchnorm and group.device.type == "cpu" and group.is_main:
            log.warning("sync_batchnorm does nothing on the CPU: torch has it for GPUs alone")
        elif strategy.sync_batchnorm and group.world_size > 1:
            module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        if strategy.precision == "bf16":
            half = HalfPrecision(group.device.type)
            module.register_forward_pre_hook(half.enter)
            module.register_forward_hook(half.leave, always_call=True)
        self.module = module
        self._calls = Calls(group.device)
        self.wrapped: torch.nn.Module = module
        self._ddp: DataParallel | None = None
        self._trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._may_be_unused = strategy.find_unused_parameters
        self._has_gradients = False  # new ones, since the last look
        if group.world_size > 1 and self._trained:
            self._ddp = self.wrapped = DataParallel(
                module,
                group.device,
                group.guard,
                device_ids=[group.device] if group.device.type == "cuda" else None,
                bucket_cap_mb=strategy.bucket_cap_mb,
                find_unused_parameters=strategy.find_unused_parameters,
                gradient_as_bucket_view=True,
            )
            self._calls = self._ddp.calls
            for _, parameter in (self._trained[0], self._trained[-1]):
                parameter.register_post_accumulate_grad_hook(self._gradients_came)  # type: ignore[no-untyped-call]
        else:
            module.register_forward_pre_hook(self._calls.check_hook, with_kwargs=True)
        if strategy.compile:
            self.wrapped.compile(**({} if strategy.compile is True else {"backend": strategy.compile}))
        self.exchange(strategy.accumulate == 1)

    def exchange(self, last: bool) -> None:
        """Say whether the coming step is the last of its accumulation, and so exchanges gradients."""
        if self._ddp is not None:
            self._ddp.calls.evaluating = False
            self._ddp.require_backward_grad_sync = last  # what DDP's `no_sync` sets

    def evaluate(self, evaluating: bool) -> None:
        """Say whether the coming forward passes are an evaluation's; ranks may have different numbers of them."""
        if self._ddp is not None:
            self._ddp.calls.evaluating = evaluating

    @property
    def accumulate(self) -> int:
        """The batches that make one step of its optimizer."""
        return self.strategy.accumulate

    @property
    def was_called(self) -> bool:
        """Whether there was a forward pass with gradients since the last `check_gradients` or `forget_calls`."""
        return self._calls.called

    def forget_calls(self) -> None:
        """Let there have been no forward pass."""
        self._calls.called = False

    @property
    def exchanges(self) -> bool:
        """Whether the coming `backward` waits for the other ranks."""
        return self._ddp is not None and self._ddp.require_backward_grad_sync

    def _gradients_came(self, _: torch.Tensor) -> None:
        self._has_gradients = True

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients so far."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers."""
        if self._ddp is not None:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)

    def check_gradients(self, complete: bool) -> None:
        """See that the gradients of a backward are exchanged, if there are any.

        Args:
            complete: this was the last backward of its accumulation, in which all parameters take part.

        Raises:
            NotExchanged: they were computed past the model that `Run.setup` returned.
            UnusedParameters: some have no gradient, and so the exchange of others is not complete either.
        """
        self.forget_calls()
        if self._ddp is None:
            return
        if self._has_gradients and not self._ddp.calls.exchanging:
            raise NotExchanged(
                "these gradients stay on this rank: the loss was computed with the model as it was before run.setup, "
                "or by one of its methods; call the model that run.setup returned, model(...)"
            )
        if self._has_gradients:  # of adversaries, one may have been called whose gradients come later
            self._has_gradients = self._ddp.calls.exchanging = False
        if any(p.requires_grad for p in self._frozen):
            raise NotExchanged("parameters were unfrozen after run.setup, which does not exchange them; do it before")
        if complete and not self._may_be_unused and any(p.grad is None for _, p in self._trained):
            unused = [name for name, p in self._trained if p.grad is None]
            if len(unused) < len(self._trained):
                raise UnusedParameters(_unused(unused))


def _unused(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"no gradient for {shown or 'some parameters'}: the loss does not depend on them in this step; "
        "use them, set requires_grad=False before run.setup, or take Strategy(find_unused_parameters=True)"
    )


def check_alike(group: Group, module: torch.nn.Module) -> None:
    """See that every rank has rank 0's model, before DDP would hang or garble it.

    Raises:
        ModelMismatch: on every rank; the one that differs names its first difference.
    """
    mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    theirs = group.broadcast_object(mine)
    differ = [rank for rank, alike in enumerate(group.gather_objects(mine == theirs)) if not alike]
    if group.rank in differ:
        for ours, others in zip([*mine, None], [*theirs, None], strict=False):
            if ours != others:
                raise ModelMismatch(
                    f"rank {group.rank} has the parameter {_describe(ours)}, rank 0 has {_describe(others)}"
                )
    if differ:
        raise ModelMismatch(f"the model of rank {differ[0]} is not like rank 0's; its own error says where")


def _describe(parameter: tuple[Any, ...] | None) -> str:
    if parameter is None:
        return "none more"
    name, shape, dtype, trained = parameter
    return f"{name} {list(shape)} {dtype}{'' if trained else ', not trained'}"


def _to_float(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.float() if result.dtype == torch.bfloat16 else result
    if isinstance(result, dict):
        return {key: _to_float(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        return type(result)(_to_float(value) for value in result)
    return result
