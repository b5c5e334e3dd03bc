"""LocalSGD: ranks train alone for some steps, and then average their parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.parallel.sync.options import MOST_LOCAL

from .apart import ApartExchange, floating, means, states

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from paceline.train.parallel.sync.options import LocalSGD
    from paceline.train.torch_types import StateDict

    from .every_step import EveryStepExchange


# -- how many steps ranks train alone ----------------------------------------------------------------------------------
# How many steps ranks train alone in LocalSGD.


class Pace:
    """How many steps lie between two averages; see `LocalSGD.every`.

    Attributes:
        adapts: whether the number of steps depends on the loss.
        every: their number now.
    """

    def __init__(self, options: LocalSGD) -> None:
        self.adapts = options.every == "auto"
        self._initial = options.initial
        self.every = options.initial if isinstance(options.every, str) else options.every
        self._first: tuple[float, float] | None = None  # loss and learning rate until the first average
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a batch of this rank."""
        if self.adapts:
            own = loss.detach().float().reshape(1)
            self._sum = own.clone() if self._sum is None else self._sum.to(own.device) + own
            self._count += 1

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss of this rank since the last average, of shape [1]."""
        return torch.zeros(1) if self._sum is None else self._sum / self._count

    def adapt(self, loss: float, rate: float) -> None:
        """Set the steps until the next average, after losses with this mean over all ranks, and this learning rate."""
        self._sum, self._count = None, 0
        if not (loss > 0 and rate > 0 and math.isfinite(loss)):
            return
        if self._first is None:
            self._first = loss, rate
        first_loss, first_rate = self._first
        ratio = first_rate * loss / (rate * first_loss)
        self.every = max(1, min(MOST_LOCAL, math.ceil(math.sqrt(ratio * self._initial))))

    def state_dict(self) -> StateDict:
        """What a checkpoint holds."""
        total = None if self._sum is None else self._sum.clone()
        return {"every": self.every, "first": self._first, "sum": total, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on."""
        self.every, self._first = state["every"], state["first"]
        self._sum, self._count = state["sum"], state["count"]


# -- the exchange ------------------------------------------------------------------------------------------------------


class LocalExchange(ApartExchange):
    """Averages the parameters of a model after every so many steps of its optimizer, and gradients before that.

    Sources: Stich 2018, arXiv:1805.09767; with steps at the start that exchange gradients, Lin et al. 2018,
    arXiv:1808.07217.
    """

    _averaging: EveryStepExchange

    def __init__(self, options: LocalSGD, module: torch.nn.Module, exchange: EveryStepExchange) -> None:
        super().__init__(module, exchange)
        self._options = options
        self._steps = 0  # of the optimizer, ever
        self._apart = 0  # since parameters were the same on all ranks
        self._pace = Pace(options)
        self._have_momenta = False  # whether the optimizers of all ranks have a state

    def attach(self, exchange: DistributedDataParallel) -> None:
        exchange.register_comm_hook(None, lambda state, bucket: self._begin(bucket))  # no types: torch compares them

    def _begin(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._averaging.begin_within(bucket) if self._is_local else self._averaging.begin(bucket)

    @property
    def exchanges_gradients(self) -> bool:
        return not self._is_local or bool(self._options.hierarchical)

    @property
    def steps_alike(self) -> bool:
        return not self._is_local

    @property
    def is_common(self) -> bool:
        return not self._apart

    @property
    def _is_local(self) -> bool:
        """Whether the next step is one between two averages."""
        return self._steps >= self._options.warmup

    def saw_loss(self, loss: torch.Tensor) -> None:
        if self._is_local:
            self._pace.add(loss)

    def after_step(self) -> None:
        was_local = self._is_local
        self._steps += 1
        if was_local:
            self._apart += 1
            if self._apart >= self._pace.every:
                self.settle()

    def settle(self) -> None:
        if not self._apart:
            return
        self._apart = 0
        tensors = [*floating([*self._module.parameters(), *self._module.buffers()]), *self._momenta()]
        with torch.no_grad():
            for tensor, mean in zip(tensors, means(tensors, self._averaging.average), strict=True):
                tensor.copy_(mean)
        if self._optimizer is not None and self._pace.adapts:
            loss = self._pace.loss.to(tensors[0].device)
            self._averaging.average(loss)
            self._pace.adapt(float(loss), float(self._optimizer.param_groups[0]["lr"]))

    def _momenta(self) -> list[torch.Tensor]:
        """What the optimizer keeps, if it is averaged; nothing while a GradScaler has skipped all steps of a rank."""
        if self._options.momentum != "average" or self._optimizer is None:
            return []
        own = states(self._optimizer)
        if not self._have_momenta:
            lacking = torch.full((1,), float(not own), device=next(self._module.parameters()).device)
            self._averaging.average(lacking)
            self._have_momenta = not lacking.item()
        return own if self._have_momenta else []

    def common_state(self) -> StateDict:
        state: StateDict = self._module.state_dict()
        if not self._apart:
            return state
        names = [name for name, each in state.items() if floating([each])]
        return {
            **state,
            **dict(zip(names, means([state[name] for name in names], self._averaging.average), strict=True)),
        }

    def state_dict(self) -> StateDict:
        return {
            "steps": self._steps,
            "apart": self._apart,
            "pace": self._pace.state_dict(),
            "model": self._module.state_dict() if self._apart else None,
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None and self._steps else None,
            "gradients": self._averaging.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._apart = state["steps"], state["apart"]
        self._pace.load_state_dict(state["pace"])
        self._load_own(state)
        self._averaging.load_state_dict(state["gradients"])
