"""LocalSGD: ranks train alone for some steps, and then average their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .base import Synchroniser
from .pace import Pace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from .every_step import EveryStepExchange
    from .options import LocalSGD


class LocalExchange(Synchroniser):
    """Averages the parameters of a model after every so many steps of its optimizer, and gradients before that.

    Sources: Stich 2018, arXiv:1805.09767; with steps at the start that exchange gradients, Lin et al. 2018,
    arXiv:1808.07217.

    Args:
        options: how often.
        module: the model.
        exchange: averages tensors over all ranks.
    """

    def __init__(self, options: LocalSGD, module: torch.nn.Module, exchange: EveryStepExchange) -> None:
        self._options, self._module, self._exchange = options, module, exchange
        self._steps = 0  # of the optimizer, ever
        self._apart = 0  # since parameters were the same on all ranks
        self._optimizer: torch.optim.Optimizer | None = None
        self._pace = Pace(options)

    def attach(self, exchange: DistributedDataParallel) -> None:
        """See `Synchroniser.attach`."""
        exchange.register_comm_hook(None, lambda state, bucket: self._begin(bucket))  # no types: torch compares them

    def _begin(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._exchange.begin_within(bucket) if self._is_local else self._exchange.begin(bucket)

    @property
    def sent(self) -> int:  # type: ignore[override]
        """See `Synchroniser.sent`."""
        return self._exchange.sent

    @property
    def error(self) -> Exception | None:
        """See `Synchroniser.error`."""
        return self._exchange.error

    @property
    def exchanges_gradients(self) -> bool:
        """See `Synchroniser.exchanges_gradients`."""
        return not self._is_local or bool(self._options.hierarchical)

    @property
    def steps_alike(self) -> bool:
        """See `Synchroniser.steps_alike`."""
        return not self._is_local

    @property
    def _is_local(self) -> bool:
        """Whether the next step is one between two averages."""
        return self._steps >= self._options.warmup

    @property
    def needs_optimizer(self) -> bool:
        """See `Synchroniser.needs_optimizer`."""
        return self._optimizer is None

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Synchroniser.follow`."""
        self._optimizer = optimizer

    def saw_loss(self, loss: torch.Tensor) -> None:
        """See `Synchroniser.saw_loss`."""
        if self._is_local:
            self._pace.add(loss)

    def after_step(self) -> None:
        """See `Synchroniser.after_step`."""
        was_local = self._is_local
        self._steps += 1
        if was_local:
            self._apart += 1
            if self._apart >= self._pace.every:
                self.settle()

    def settle(self) -> None:
        """See `Synchroniser.settle`."""
        if not self._apart:
            return
        self._apart = 0
        tensors = [*self._module.parameters(), *_floating(self._module.buffers())]
        if self._options.momentum == "average" and self._optimizer is not None:
            tensors += _states(self._optimizer)
        with torch.no_grad():
            for tensor, mean in zip(tensors, self._means(tensors), strict=True):
                tensor.copy_(mean)
        if self._optimizer is not None and self._options.every == "auto":
            loss = self._pace.loss
            self._exchange.average(loss)
            self._pace.adapt(float(loss), float(self._optimizer.param_groups[0]["lr"]))

    def _means(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The means of tensors over all ranks."""
        means: list[torch.Tensor] = []
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            flat = torch.cat([each.detach().reshape(-1) for each in tensors if each.dtype is dtype])
            self._exchange.average(flat)
            means += torch.split(flat, [each.numel() for each in tensors if each.dtype is dtype])
        found = {dtype: iter([m for m in means if m.dtype is dtype]) for dtype in {each.dtype for each in means}}
        return [next(found[each.dtype]).view(each.shape) for each in tensors]

    def common_state(self) -> dict[str, Any]:
        """See `Synchroniser.common_state`."""
        state: dict[str, Any] = self._module.state_dict()
        if not self._apart:
            return state
        names = [name for name, each in state.items() if torch.is_tensor(each) and each.is_floating_point()]
        return {**state, **dict(zip(names, self._means([state[name] for name in names]), strict=True))}

    def state_dict(self) -> dict[str, Any]:
        """See `Synchroniser.state_dict`."""
        return {
            "steps": self._steps,
            "apart": self._apart,
            "pace": self._pace.state_dict(),
            "model": self._module.state_dict() if self._apart else None,
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None and self._steps else None,
            "gradients": self._exchange.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Synchroniser.load_state_dict`."""
        self._steps, self._apart = state["steps"], state["apart"]
        self._pace.load_state_dict(state["pace"])
        if state["model"] is not None:
            self._module.load_state_dict(state["model"])
        if state["optimizer"] is not None and self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self._exchange.load_state_dict(state["gradients"])

    def close(self) -> None:
        """See `Synchroniser.close`."""
        self._exchange.close()


def _floating(tensors: Any) -> list[torch.Tensor]:
    return [each for each in tensors if each.is_floating_point()]


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer keeps for its parameters, in their order."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [
        each
        for parameter in parameters
        for each in optimizer.state.get(parameter, {}).values()
        if torch.is_tensor(each) and each.is_floating_point() and each.shape == parameter.shape
    ]
