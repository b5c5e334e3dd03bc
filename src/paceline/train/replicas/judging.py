"""Whether what the ranks have is equal, and if not, which of them differ, in what, and why; pure state, without torch.

rank → judge   {"do": "sum", "key", "step", "sum", "waits", "warns"}   the digest of what it has after this step
               {"do": "parts", "key", "parts"}         answer to "differ": what exactly
judge → ranks  {"do": "equal", "key"}                  if a rank waits for that
               {"do": "differ", "key"}                 what do you have, exactly?
               {"do": "judged", "key", "why", "warns"}   this is in what they differ, and why
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

COLUMNS = 1021  # words of a tensor after which weights begin anew; a prime
_WORD = (1 << 64) - 1
FAULT = (
    "one value of it alone differs, as by a fault of the memory of that machine; start again from the last checkpoint, "
    "and test that memory if it happens again"
)
Kind = Literal["number", "parameter", "state"]
# What a rank has under a name: a number as text; or of a tensor the two sums of its words, and how many words it has.
Part = tuple[Kind, str, "str | Sequence[int]"]
Key = tuple[int, int, int]  # the optimizer's number; how often all were compared with waiting; and what it has counted


class Message(TypedDict, total=False):
    """A message in either direction; `do` says which of the other keys it has."""

    do: str
    key: Sequence[int]
    step: int
    sum: str
    waits: bool
    warns: bool
    parts: Sequence[Part]
    why: str


@functools.cache
def weights() -> list[int]:
    """Odd numbers of 64 bits, without a pattern, by which the words of a tensor are multiplied."""
    found, state = [], 0
    for _ in range(COLUMNS):  # SplitMix64
        state = (state + 0x9E3779B97F4A7C15) & _WORD
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        found.append((mixed ^ (mixed >> 31)) | 1)
    return found


class Comparisons:
    """Compares what ranks send; its methods return messages to all of them.

    What they have at a moment is judged once all have sent it, and moments before that are forgotten: so ranks need not
    agree on how often to compare, if all count alike.

    Attributes:
        equal: number of moments at which all were equal.
        step: the last step of the run after which they were.
    """

    def __init__(self, ranks: int, cause: Callable[[Difference, int | None, bool], str] | None = None) -> None:
        self.equal = self.step = 0
        self._cause = cause
        self._coming = set(range(ranks))  # who may send more
        self._there = set(range(ranks))  # who may answer
        self._sums: dict[Key, dict[int, Message]] = {}
        self._asked: dict[Key, dict[int, Sequence[Part]]] = {}  # what the ranks have answered
        self._last: dict[int, int] = {}  # the last step in which all were equal, by optimizer
        self._judged: set[int] = set()  # optimizers of which a difference was found

    def receive(self, rank: int, message: Message) -> list[Message]:
        """Handle a message of a rank."""
        of, waited, count = message["key"]
        key = of, waited, count
        if message["do"] == "sum":
            self._sums.setdefault(key, {})[rank] = message
        elif key in self._asked:
            self._asked[key][rank] = message["parts"]
        return self._look()

    def gone(self, rank: int, *, answers: bool = False) -> list[Message]:
        """A rank sends no more; `answers` says whether it still answers."""
        self._coming.discard(rank)
        if not answers:
            self._there.discard(rank)
        return self._look()

    def _look(self) -> list[Message]:
        """Judge what can be judged now."""
        outbox: list[Message] = []
        for key in sorted(key for key, sums in self._sums.items() if self._coming <= sums.keys()):
            sums = self._sums.get(key, {})
            if len({message["sum"] for message in sums.values()}) == 1:
                self._note_equal(key[0], min(message["step"] for message in sums.values()), len(sums))
                outbox += self._forget(key)
            elif key[0] in self._judged or self._is_other_step(sums):
                outbox += self._forget(key)
            elif sums and key not in self._asked:
                self._asked[key] = {}
                outbox.append({"do": "differ", "key": key})
        for key, answers in list(self._asked.items()):
            if self._there & self._sums[key].keys() <= answers.keys():
                outbox += [self._explain(key, answers), *self._forget(key)]
        return outbox

    def _is_other_step(self, sums: Mapping[int, Message]) -> bool:
        """Whether ranks have counted alike in different steps of the run: `StepCounts` knows which has left one out."""
        steps = {message["step"] for message in sums.values()}
        return len(steps) > 1 and not any(message["waits"] for message in sums.values())

    def _note_equal(self, of: int, step: int, ranks: int) -> None:
        self._last[of] = step
        if ranks > 1:
            self.equal, self.step = self.equal + 1, max(self.step, step)

    def _forget(self, key: Key) -> list[Message]:
        """Forget a moment and those before it; answer those that wait."""
        waits = any(message["waits"] for message in self._sums[key].values()) if key in self._sums else False
        for each in [each for each in self._sums if each[0] == key[0] and each <= key and each not in self._asked]:
            del self._sums[each]
        return [{"do": "equal", "key": key}] if waits else []

    def _explain(self, key: Key, answers: Mapping[int, Sequence[Part]]) -> Message:
        del self._asked[key]
        self._judged.add(key[0])
        sums = self._sums[key]
        one = sums[min(sums)]
        step, begins = one["step"], key[1:] == (0, 0)
        why = sentence(
            compare(answers, {rank: message["sum"] for rank, message in sums.items()}),
            f"before step {step + 1}" if begins else f"after step {step}",
            self._last.get(key[0]),
            begins=begins,
            cause=self._cause,
        )
        return {"do": "judged", "key": key, "why": why, "warns": one["warns"]}


class Difference(NamedTuple):
    """The part in which ranks differ.

    Attributes:
        kind: of the first part in which they do; None if that is not known.
        name: its name.
        more: number of other parts in which they do.
        apart: the ranks that have it in another way than most; all if no way is that of most.
        alone: whether these are fewer than half.
        values: what each of them and one other has, if it is a number.
        in_a_word: whether it is one word of one tensor, and no more.
    """

    kind: Kind | None
    name: str
    more: int
    apart: list[int]
    alone: bool
    values: dict[int, str]
    in_a_word: bool


def compare(answers: Mapping[int, Sequence[Part]], sums: Mapping[int, str]) -> Difference:
    """Find out in what ranks differ."""
    names: dict[str, Kind] = {}
    found: dict[str, dict[int, str | tuple[int, ...]]] = {}
    ranks = sorted(rank for rank, parts in answers.items() if parts)
    for rank in ranks:
        for kind, name, value in answers[rank]:
            names.setdefault(name, kind)
            found.setdefault(name, {})[rank] = value if isinstance(value, str) else tuple(value)
    differing = [name for name in names if len({found[name].get(rank) for rank in ranks}) > 1]
    if not differing:
        apart, alone = _apart(dict(sums))
        return Difference(None, "", 0, apart, alone, {}, in_a_word=False)
    order: list[Kind] = ["number", "parameter", "state"]
    name = min(differing, key=lambda name: order.index(names[name]))
    values = {rank: found[name].get(rank, "none") for rank in ranks}
    apart, alone = _apart(values)
    texts = {rank: value for rank, value in values.items() if isinstance(value, str)}
    return Difference(
        names[name], name, len(differing) - 1, apart, alone, texts, len(differing) == 1 and _in_a_word(values)
    )


def _apart(values: Mapping[int, object]) -> tuple[list[int], bool]:
    """The ranks that have another value than most, or all if no value is that of most; whether it is the former."""
    ways = list(values.values())
    for way in ways:
        if 2 * ways.count(way) > len(ways):
            return [rank for rank, value in values.items() if value != way], True
    return sorted(values), False


def _in_a_word(values: Mapping[int, str | tuple[int, ...]]) -> bool:
    """Whether two tensors differ in one word: then their sums differ by that difference, and it times a weight."""
    one, *others = set(values.values())
    if len(others) != 1 or isinstance(one, str) or isinstance(others[0], str) or one[2] != others[0][2]:
        return False
    plain, weighted = ((mine - theirs) & _WORD for mine, theirs in zip(one[:2], others[0][:2], strict=True))
    return one[2] > 1 and plain != 0 and any(weight * plain & _WORD == weighted for weight in weights())


def sentence(
    difference: Difference,
    when: str,
    equal: int | None,
    *,
    begins: bool,
    cause: Callable[[Difference, int | None, bool], str] | None = None,
) -> str:
    """A line that says in what ranks differ, and why that may be."""
    names = [f"{rank}" for rank in difference.apart]
    who = f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
    verb = "differs" if len(names) == 1 else "differ"
    others = " from the other ranks" if difference.alone else ""
    what = {"number": "", "parameter": "the parameter ", "state": "the optimizer state "}.get(difference.kind or "", "")
    more = f" and {difference.more} more" if difference.more else ""
    last = "and never equal before" if equal is None else f"equal after step {equal}" if equal else "equal at the start"
    return (
        f"{who} {verb}{others} in {what}{difference.name or 'parameters or numbers of an optimizer'}{more}"
        f"{_values(difference)}, seen {when}, {last}: {(cause or _cause)(difference, equal, begins)}"
    )


def _values(difference: Difference) -> str:
    if len(difference.values) < 2:
        return ""
    shown = {difference.values[rank]: rank for rank in sorted(difference.values, reverse=True)}
    return f" ({', '.join(f'{value} on rank {rank}' for value, rank in sorted(shown.items(), key=lambda it: it[1]))})"


def _cause(difference: Difference, equal: int | None, begins: bool) -> str:
    if difference.name.startswith("lr "):
        return (
            "a scheduler was stepped with a value of this rank alone, as ReduceLROnPlateau with its loss; give it "
            'run.all_reduce(loss, "mean")'
        )
    if difference.kind == "number":
        return "it was set, or a step was taken, on some ranks only; do on all ranks what one does"
    if begins:
        return (
            "weights were changed on some ranks only after run.setup, as by reset_parameters() or by "
            "load_state_dict() under `if run.is_main`; do that on all ranks, or before run.setup"
        )
    if difference.in_a_word:
        return FAULT
    if difference.kind == "state":
        return (
            "it was loaded on some ranks only, or made of gradients that ranks do not exchange; load it on all ranks, "
            "and use the model that run.setup returned (docs/library.md#replicas-are-compared)"
        )
    start = "changed on some ranks only after run.setup, or " if equal is None else ""
    return (
        f"weights were {start}trained with gradients that ranks do not exchange, or changed on some ranks only; use "
        "the model that run.setup returned, and change weights on all ranks (docs/library.md#replicas-are-compared)"
    )
