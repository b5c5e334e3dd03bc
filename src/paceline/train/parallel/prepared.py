"""What a run has set up: models and optimizers, each with its own strategy, and all that a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from .model import Model, check_alike
from .optimizer import prepare_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.group.group import Group

    from .strategy import Strategy


class Stateful(Protocol):
    """Something with a state that a checkpoint can hold."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go to a state."""


class Prepared:
    """The models and optimizers of a run, and what else its checkpoints hold.

    Args:
        group: the ranks.
        is_accumulating: whether gradients of models that were set up with this `Strategy.accumulate` wait for those of
            further batches, so that their optimizers do not step yet.
        stepped: called after each step of an optimizer.
        watch: called with each optimizer before it is set up.
    """

    def __init__(
        self,
        group: Group,
        *,
        is_accumulating: Callable[[int], bool],
        stepped: Callable[[], None],
        watch: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._group = group
        self._is_accumulating = is_accumulating
        self._stepped = stepped
        self._watch = watch
        self._models: list[Model] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._registered: dict[str, Stateful] = {}
        self._rank_local: dict[str, Stateful] = {}

    # -- set up --------------------------------------------------------------------------------------------------------

    def add(self, thing: Any, strategy: Strategy) -> Any:
        """Set up a model or an optimizer; returns what takes its place in the training loop.

        Raises:
            paceline.ModelMismatch: this rank's model is not like rank 0's.
            TypeError: it is neither a module nor an optimizer.
            ValueError: learning rates are to be scaled, and a scheduler has noted what they were before.
        """
        if isinstance(thing, torch.nn.Module):
            check_alike(self._group, thing)
            model = Model(thing, self._group, strategy)
            self._models.append(model)
            return model.wrapped
        if isinstance(thing, torch.optim.Optimizer):
            self._watch(thing)
            every = strategy.accumulate
            prepare_optimizer(thing, self._group, strategy, lambda: self._is_accumulating(every), self._stepped)
            self._optimizers.append(thing)
            return thing
        raise TypeError(f"setup takes modules and optimizers, not {type(thing).__name__}")

    def register(self, name: str, thing: Any) -> None:
        """Put something further into the checkpoints.

        Raises:
            TypeError: it lacks `state_dict` or `load_state_dict`.
            ValueError: the name is taken.
        """
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise TypeError(f"{name} has no state_dict and load_state_dict, so it cannot be saved")
        if name in self.stateful() or name == "progress":
            raise ValueError(f"the name {name} is taken; register {type(thing).__name__} under another one")
        self._registered[name] = thing

    def register_on_rank(self, name: str, thing: Stateful) -> None:
        """Put something into the checkpoints that each rank has a state of its own of, such as a compression's error.

        It is loaded only where the job goes on with as many ranks as it was saved with, and else stays as it is.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._rank_local or name == "random":
            raise ValueError(f"the name {name} is taken")
        self._rank_local[name] = thing

    def stateful(self) -> dict[str, Stateful]:
        """What is the same on all ranks: `model`, `optimizer` (numbered from the second on), what was registered."""
        named: dict[str, Stateful] = {}
        for kind, things in (("model", [m.module for m in self._models]), ("optimizer", self._optimizers)):
            for number, thing in enumerate(things):
                named[kind if number == 0 else f"{kind}-{number}"] = thing
        return {**named, **self._registered}

    def rank_stateful(self) -> dict[str, Stateful]:
        """What each rank has a state of its own of, random states apart."""
        return dict(self._rank_local)

    def clear(self) -> None:
        """Let the models go, whose process group is about to end."""
        self._models.clear()

    # -- training ------------------------------------------------------------------------------------------------------

    @property
    def has_models(self) -> bool:
        """Whether a model was set up."""
        return bool(self._models)

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer was set up."""
        return bool(self._optimizers)

    @property
    def accumulates(self) -> set[int]:
        """The numbers of batches that make a step of an optimizer; more than one where strategies differ."""
        return {model.accumulate for model in self._models} or {1}

    def accumulate_of_loss(self) -> int:
        """The batches per step of the models that the loss at hand was computed with.

        Raises:
            RuntimeError: strategies differ, and it was computed with models of more than one, or of none.
        """
        found = self.accumulates
        if len(found) > 1:
            found = {model.accumulate for model in self._models if model.was_called}
            if len(found) != 1:
                what = "models set up with different Strategy.accumulate" if found else "no model that was set up"
                raise RuntimeError(
                    f"this loss was computed with {what}, so it is not known how many batches make a step; "
                    "call the models that run.setup returned, and run.backward for each loss apart"
                )
        return found.pop()

    def exchanges(self) -> bool:
        """Whether the coming backward waits for the other ranks."""
        return any(model.exchanges for model in self._models)

    def exchange(self, is_last: Callable[[int], bool]) -> None:
        """Say for each `Strategy.accumulate` whether the coming backward is the last one of its accumulation."""
        for model in self._models:
            model.exchange(is_last(model.accumulate))

    def scale_gradients(self, every: int, factor: float) -> None:
        """Multiply the gradients of models set up with this `Strategy.accumulate`."""
        for model in self._models:
            if model.accumulate == every:
                model.scale_gradients(factor)

    def check_gradients(self) -> None:
        """See that the gradients of a backward are exchanged, and complete where the optimizer steps next.

        Raises:
            paceline.NotExchanged: they were computed past the model that `Run.setup` returned.
            paceline.UnusedParameters: some parameters have no gradient.
        """
        for model in self._models:
            model.check_gradients(complete=not self._is_accumulating(model.accumulate))

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers, such as running means, which each has computed from its own batches."""
        with self._group.guard:
            for model in self._models:
                model.share_buffers()

    def evaluate(self, evaluating: bool) -> None:
        """Say whether the coming forward passes are an evaluation's; ranks may have different numbers of them."""
        for model in self._models:
            model.evaluate(evaluating)

    def parameters_with_gradients(self) -> list[torch.nn.Parameter]:
        """The parameters of all models that have a gradient."""
        return [p for model in self._models for p in model.module.parameters() if p.grad is not None]
