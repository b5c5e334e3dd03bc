"""What is compared of a distributed optimizer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from paceline.horovod.engine.replicas import Compared
from paceline.train.replicas.contents import Contents, Label, of_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable


class ComparedOptimizer(Compared):
    """The parameters and numbers of an optimizer.

    Args:
        optimizer: made by `DistributedOptimizer`, for all ranks.
        alike: whether its numbers, such as learning rates, are the same on all ranks too.
    """

    def __init__(self, optimizer: Any, *, alike: bool) -> None:
        super().__init__()
        self._optimizer, self._alike = weakref.ref(optimizer), alike

    def contents(self, steps: int) -> Contents:
        return of_optimizer(self._optimizer(), steps, alike=self._alike)  # type: ignore[arg-type]

    def names(self) -> Callable[[Label], str]:
        optimizer: Any = self._optimizer()
        names = [[optimizer._parameter_names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
        kind = type(optimizer).__name__

        def name(label: Label) -> str:
            group = f"group {label.group} of {kind}" if len(names) > 1 and label.group >= 0 else kind
            if label.place < 0:
                return f"{label.key} of {group}"
            found = names[label.group][label.place] or f"parameter {label.place} of {group}"
            return f"{label.key} of {found}" if label.key else found

        return name

    def shapes(self) -> str:
        optimizer: Any = self._optimizer()
        return repr([[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups])

    def version(self) -> object:
        optimizer: Any = self._optimizer()
        last = [] if optimizer is None else optimizer.param_groups[-1]["params"]
        return last[-1]._version if last else None
