"""The records of a rehearsal's ranks, read back, and how its job went."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from paceline.contract.records import Failure, OtherFailure
    from paceline.contract.stands import Hang

Event = dict[str, Any]
_SCALARS = 64  # elements: a collective of fewer, of no parameter, exchanges no gradients


class Finding(NamedTuple):
    """What is wrong with a script on several ranks."""

    at: str  # FILE:LINE; "" if no line is known
    what: str  # is the case, on which ranks
    todo: str  # to do about it


@dataclass(frozen=True)
class Course:
    """How the job of a rehearsal went.

    Attributes:
        failures: of each attempt that a failure ended, the rank's failure, and those of other ranks.
        hang: that has ended the job.
        stopped: why the job was stopped before it ended; "" if it was not.
    """

    failures: Mapping[int, Sequence[Failure | OtherFailure]] = field(default_factory=dict)
    hang: Hang | None = None
    stopped: str = ""


class Attempt:
    """What the ranks did in one attempt."""

    def __init__(self, number: int, events: Mapping[int, Sequence[Event]], saved: Collection[str] = ()) -> None:
        """Take the events of each rank, in their order, and the files that earlier attempts have written."""
        self.number, self.events, self.saved = number, events, saved
        self.has_failed = False  # whether a failure has ended it
        self.ranks = sorted(events)

    def of(self, *kinds: str) -> Iterator[tuple[int, Event]]:
        """The events of these kinds, with their ranks."""
        return ((rank, it) for rank in self.ranks for it in self.events[rank] if it["e"] in kinds)

    @cached_property
    def was_cut(self) -> bool:
        """Whether some rank has ended as the rehearsal had seen its steps."""
        return any(self.of("limit"))

    @cached_property
    def killed(self) -> tuple[int, int] | None:
        """The rank that was killed, and after which step; None if none was."""
        return next(((rank, it["step"]) for rank, it in self.of("killed")), None)

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have come to the end of the script."""
        return not self.was_cut and not self.has_failed and {rank for rank, _ in self.of("end")} == set(self.ranks)

    @property
    def stands(self) -> bool:
        """Whether ranks wait for each other, or have failed, and none was killed."""
        return not self.has_ended and not self.was_cut and self.killed is None

    @cached_property
    def collectives(self) -> dict[str, dict[int, list[Event]]]:
        """Of each group, the collectives of each of its ranks."""
        found: dict[str, dict[int, list[Event]]] = {}
        for rank, it in self.of("collective"):
            found.setdefault(it["group"], {}).setdefault(rank, []).append(it)
        return found

    @cached_property
    def steps(self) -> dict[int, int]:
        """How many steps each rank has made, of the optimizer that has made most."""
        return {
            rank: max((it["number"] for it in self.events[rank] if it["e"] == "step"), default=0) for rank in self.ranks
        }

    @cached_property
    def exchanging(self) -> set[tuple[int, ...]]:
        """The groups of ranks that exchange gradients in each step, as far as that is certain."""
        found = {tuple(it["ranks"]) for _, it in self.of("parallel")}
        if any(self.of("horovod")):
            found.add(tuple(self.ranks))
        counts = Counter(
            (rank, tuple(it["ranks"])) for rank, it in self.of("collective")
            if it.get("which", "").startswith(("gradient", "all")) and it["kind"] == "all_reduce"
        )  # fmt: skip
        return found | {group for (rank, group), count in counts.items() if count >= max(1, self.steps[rank])}

    @cached_property
    def exchanges_nothing(self) -> bool:
        """Whether no rank sends another one anything that may be gradients or parameters."""
        return not (
            self.exchanging or any(self.of("library", "message"))
            or any(it.get("which") or it.get("size", 0) >= _SCALARS for _, it in self.of("collective"))
            or any(it["kind"].startswith("all_to_all") for _, it in self.of("collective"))
        )  # fmt: skip

    def are_together(self, ranks: Iterable[int]) -> bool:
        """Whether ranks train one model together."""
        return any(set(ranks) <= set(group) for group in self.exchanging)


def read(folder: Path) -> list[Attempt]:
    """The attempts that left records in a folder."""
    found: dict[int, dict[int, list[Event]]] = {}
    for file in folder.glob("*-*.jsonl"):
        attempt, rank = map(int, file.stem.split("-"))
        lines = file.read_text(errors="replace").splitlines()
        found.setdefault(attempt, {})[rank] = [json.loads(it) for it in lines if it.endswith("}")]
    attempts: list[Attempt] = []
    saved: set[str] = set()
    for number in sorted(found):
        attempts.append(Attempt(number, found[number], frozenset(saved)))
        saved |= {it["path"] for _, it in attempts[-1].of("file") if it["kind"] == "write"}
    return attempts


def named(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank {texts[0]}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {', '.join(texts)}"


def alike(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The ranks of each value, the value of the lowest rank first."""
    found: dict[Any, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return found
