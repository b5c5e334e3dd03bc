"""What is compared before a checkpoint is committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .contents import Contents, of_states

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from .contents import Label


@dataclass(frozen=True)
class Saved:
    """What is compared of a checkpoint.

    Attributes:
        parameters: the parts that are models, and the names of their parameters.
        optimizers: the parts that are optimizers.
        at_once: whether all ranks sum before their states are copied, since a GPU does it; otherwise, those that write
            sum the copies, in the background.
        name: the name of something, as users know it.
        equal: on rank 0, the step after which parameters were equal last; None if they never were.
        differ: is called with a line that says in what ranks differ; raises an error if that ends the run.
    """

    parameters: Mapping[str, AbstractSet[str]]
    optimizers: Sequence[str]
    at_once: bool
    name: Callable[[Label], str]
    equal: Callable[[], int | None]
    differ: Callable[[str], None]

    def of(self, state: Callable[[str], Any]) -> Contents:
        """What is compared."""
        return of_states({part: state(part) for part in (*self.parameters, *self.optimizers)}, self.parameters)
