"""What a rank keeps for its exchange, in checkpoints."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from .options import describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from paceline.train.group.group import Group
    from paceline.train.torch_types import StateDict

    from .methods.synchroniser import Synchroniser
    from .options import Sync

log = logging.getLogger("paceline")


class CommonState:
    """A model in checkpoints, where ranks may differ."""

    def __init__(self, module: torch.nn.Module, synchroniser: Synchroniser) -> None:
        self._module, self._synchroniser = module, synchroniser

    def state_dict(self) -> Any:
        """The state that all ranks have in common; they call this together."""
        common = self._synchroniser.common_state()
        return self._module.state_dict() if common is None else common

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the common state."""
        self._module.load_state_dict(state)
        self._synchroniser.model_loaded()


class Synchronised(Protocol):
    """A model whose exchange may be made again."""

    synchroniser: Any


class SavedSync:
    """The part of a checkpoint with what this rank keeps for its exchange."""

    def __init__(self, model: Synchronised, options: Sync, group: Group) -> None:
        self._model, self._method, self._group = model, describe(options), group
        self._has_warned = False

    def state_dict(self) -> StateDict:
        """What the exchange keeps, and its method."""
        return {"method": self._method, "kept": self._model.synchroniser.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it, if it is of the same method."""
        if state["method"] == self._method:
            self._model.synchroniser.load_state_dict(state["kept"])
        elif state["kept"] and self._group.is_main and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the checkpoint was taken with sync=%s; what that had not sent yet is left out, and the run goes on "
                "with sync=%s", state["method"], self._method,
            )  # fmt: skip
