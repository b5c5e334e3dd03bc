"""What is compared before a checkpoint is committed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.train.replicas.judging import compare, sentence

from .contents import Contents, of_states

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from paceline.train.replicas.contents import Contents

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


# -- the comparison ----------------------------------------------------------------------------------------------------
# Comparing what all ranks have of a checkpoint, before it is committed.


class Comparing:
    """The comparison of one checkpoint."""

    def __init__(self, compared: Saved, contents: Contents | None) -> None:
        self._compared, self._contents = compared, contents

    def digest(self, state: Callable[[str], Any]) -> str:
        """What this rank has, as a short text."""
        if self._contents is None:
            self._contents = self._compared.of(state)
        return self._contents.digest

    def explain(
        self, decide: Callable[[bytes, Callable[[list[bytes]], bytes]], bytes], when: str, saved: int | None
    ) -> None:
        """Find out in what the ranks differ. All ranks must call this."""
        assert self._contents is not None

        def rule(messages: list[bytes]) -> bytes:
            difference = compare({rank: json.loads(message) for rank, message in enumerate(messages)}, {})
            equal = saved if difference.kind == "state" else self._compared.equal()
            return sentence(difference, when, equal, begins=False).encode()

        parts = json.dumps(self._contents.parts(self._compared.name)).encode()
        self._compared.differ(decide(parts, rule).decode())
