"""What every method of exchange has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from paceline.train.torch_types import StateDict


class Synchroniser(ABC):
    """Exchanges what the ranks learn about one model.

    Attributes:
        sent: bytes that this rank has sent to other machines, or to ranks with which it shares no memory.
        method: the name of what it does now, such as "powersgd(4)".
        follows_optimizer: whether it goes by the steps of the optimizer that updates the model.
    """

    sent: int = 0
    method: str = ""
    follows_optimizer: bool = False
    _optimizer: torch.optim.Optimizer | None = None

    @abstractmethod
    def attach(self, exchange: DistributedDataParallel) -> None:
        """Take over the exchange of gradients."""

    @property
    def error(self) -> Exception | None:
        """Why an exchange has failed on this rank."""
        return None

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients of the next step are exchanged with any other rank."""
        return True

    @property
    def steps_alike(self) -> bool:
        """Whether the next step is the same on all ranks."""
        return self.exchanges_gradients

    @property
    def is_common(self) -> bool:
        """Whether the parameters are the same on all ranks now."""
        return True

    @property
    def needs_optimizer(self) -> bool:
        """Whether it must still be told which optimizer updates the model."""
        return self.follows_optimizer and self._optimizer is None

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer that updates the model."""
        self._optimizer = optimizer

    def saw_loss(self, loss: torch.Tensor) -> None:  # noqa: B027 - most need not know
        """Note the loss of this rank's batch."""

    def after_step(self) -> None:  # noqa: B027 - most do nothing
        """The optimizer has stepped; all ranks call this."""

    def settle(self) -> None:  # noqa: B027 - for most, they always have
        """Make the model the same on all ranks, which call this together."""

    def common_state(self) -> StateDict | None:
        """The state of the model that is the same on all ranks, which call this together; None if it is the model's."""
        return None

    def model_loaded(self) -> None:  # noqa: B027 - most keep nothing that depends on it
        """The model has been given another state, the same on all ranks."""

    @abstractmethod
    def state_dict(self) -> StateDict:
        """What this rank alone keeps between steps."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what this rank has kept."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections and memory; what is under way fails."""
