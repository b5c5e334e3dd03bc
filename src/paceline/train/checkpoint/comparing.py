"""Comparing what all ranks have of a checkpoint, before it is committed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.train.replicas.judging import compare, sentence

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.replicas.contents import Contents
    from paceline.train.replicas.saved import Saved


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
