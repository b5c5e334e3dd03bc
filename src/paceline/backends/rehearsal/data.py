"""Findings about data and files: who trains on which samples, and who reads and writes which file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.job.text import a_few

from .records import Attempt, Event, Finding, alike, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ORDERED = ("RandomSampler", "SequentialSampler", "DistributedSampler", "BatchSampler")
_ONE_WAY = ("reduce", "gather", "gather_object", "scatter")  # in which not all ranks wait
_FIRST = 3  # forward passes whose inputs are compared


def of_data(attempt: Attempt) -> list[Finding]:
    """Findings about the batches that ranks train on."""
    lines = _trained(attempt)
    found = [finding for at, passes in lines.items() for finding in _of_passes(attempt, at, passes)]
    found += _of_rests(attempt, lines)
    if not any("same samples" in it.what for it in found):
        found += _of_inputs(attempt)
    return found


def _trained(attempt: Attempt) -> dict[str, dict[int, list[Event]]]:
    """Of each line that iterates over a loader and trains, the passes of each rank, with their batches."""
    trains = {(rank, it["loader"]) for rank, it in attempt.of("step") if it["loader"] is not None}
    batches: dict[tuple[int, int], list[list[int]]] = {}
    rows: dict[tuple[int, int], list[list[int]]] = {}
    for rank, it in attempt.of("batch"):
        batches.setdefault((rank, it["loader"]), []).append(it["indices"])
        rows.setdefault((rank, it["loader"]), []).append(it["rows"])
    over = {(rank, it["loader"]) for rank, it in attempt.of("passed")}
    found: dict[str, dict[int, list[Event]]] = {}
    for rank, it in attempt.of("pass"):
        key = rank, it["loader"]
        found.setdefault(it["at"], {}).setdefault(rank, []).append(
            {
                **it,
                "trains": key in trains,
                "batches": batches.get(key, []),
                "rows": rows.get(key, []),
                "over": key in over,
            }
        )
    nobody = not trains
    return {
        at: of_ranks for at, of_ranks in found.items()
        if any(each["trains"] or (nobody and each["length"] == 0) for passes in of_ranks.values() for each in passes)
    }  # fmt: skip


def _of_passes(attempt: Attempt, at: str, passes: Mapping[int, list[Event]]) -> Iterator[Finding]:
    """What is wrong with the first pass over a loader, and with the order of the second."""
    first = {rank: of_rank[0] for rank, of_rank in passes.items()}
    lengths = {rank: it["length"] for rank, it in first.items() if it["length"] is not None}
    groups = alike(lengths)
    if empty := [rank for rank, length in lengths.items() if length == 0]:
        yield Finding(
            at,
            f"{named(empty)} {'have' if len(empty) > 1 else 'has'} no batch at all",
            "take smaller batches, or fewer ranks",
        )
    elif len(groups) > 1 and attempt.stands and not any(attempt.of("uneven")) and attempt.are_together(lengths):
        each = ", ".join(f"{named(ranks)} {length}" for length, ranks in list(groups.items())[:4])
        yield Finding(
            at, f"ranks have different numbers of batches: {each}",
            "divide the data evenly: DistributedSampler repeats some samples, or drops them with drop_last=True",
        )  # fmt: skip
    divided = alike({rank: (it["samples"], it["subset"]) for rank, it in first.items() if it["replicas"] is not None})
    if len(divided) > 1 and attempt.are_together(first):
        each = f"all {len(divided)} ranks" if len(divided) == len(first) else " and ".join(map(named, divided.values()))
        yield Finding(
            at, f"ranks divide different data: what DistributedSampler divides differs between {each}",
            "split with the same seed on all ranks: random_split(…, generator=torch.Generator().manual_seed(0))",
        )  # fmt: skip
    mapped = {rank: it for rank, it in first.items() if it["maps"] and it["batches"]}
    count = min((len(it["batches"]) for it in mapped.values()), default=0)
    seen = alike({rank: _seen(it, count) for rank, it in mapped.items()}) if count else {}
    same = [
        ranks for key, ranks in seen.items() if key is not None and len(ranks) > 1 and attempt.are_together(ranks)
    ]  # fmt: skip
    if same:
        each = "; ".join(named(ranks) for ranks in same[:4])
        yield Finding(
            at, f"ranks train on the same samples: {each}",
            "divide them: DistributedSampler(dataset), with the number of ranks and the rank that it finds itself",
        )  # fmt: skip
    elif len(mapped) > 1 and attempt.are_together(mapped):
        yield from _of_all(at, mapped)
    second = {rank: of_rank[1] for rank, of_rank in passes.items() if len(of_rank) > 1}
    again = [
        rank for rank, it in second.items()
        if it["shuffles"] and it["sampler"] == "DistributedSampler" and it["batches"] and count
        and it["epoch"] == first[rank]["epoch"] and it["batches"][0] == first[rank]["batches"][0]
    ]  # fmt: skip
    if again:
        yield Finding(at, "each epoch has the same order of samples", "call sampler.set_epoch(epoch) before each epoch")


def _seen(it: Event, count: int) -> str | None:
    """What is the same if a pass has the same samples as that of another rank; None if that is not known.

    Ranks may have data sets of their own, where the same indices are other samples; and each may change its samples at
    random. A sampler that knows of ranks divides one data set.
    """
    if it["replicas"] is not None:
        return repr(it["batches"][:count])
    return repr((it["batches"][:count], it["rows"][:count])) if all(it["rows"][:count]) else None


def _is_one(first: Mapping[int, Event]) -> bool:
    """Whether the data sets of ranks are the same: some sample of each is one of the first rank."""
    by_index = [
        dict(
            pair
            for batch, rows in zip(it["batches"], it["rows"], strict=True)
            for pair in zip(batch, rows, strict=False)  # of large batches the first rows
        )
        for it in first.values()
    ]
    common = [by_index[0].keys() & other.keys() for other in by_index[1:]]
    return all(
        indices and all(other[index] == by_index[0][index] for index in indices)
        for indices, other in zip(common, by_index[1:], strict=True)
    )


def _of_all(at: str, first: Mapping[int, Event]) -> Iterator[Finding]:
    """Samples that all ranks together use several times in a pass, or not at all."""
    some = next(iter(first.values()))
    totals = {it["base"] for it in first.values()}
    if len(totals) != 1 or not some["base"] or any(it["sampler"] not in _ORDERED for it in first.values()):
        return
    total, ranks = some["base"], len(first)
    whole = [rank for rank, it in first.items() if it["replicas"] is None and it["samples"] == total and it["length"]]
    if (
        len(whole) == ranks
        and _is_one(first)
        and all(it["batch"] and it["length"] * it["batch"] >= total for it in first.values())
    ):
        yield Finding(
            at, f"each of {ranks} ranks goes through all {total} samples, so each is used {ranks} times in an epoch",
            "divide them: DataLoader(…, sampler=DistributedSampler(dataset))",
        )  # fmt: skip
        return
    if any(not it["over"] or it["cut"] or it["drops"] for it in first.values()):
        return
    used = {index for it in first.values() for batch in it["batches"] for index in batch}
    missing = total - len(used)
    if 0 < missing < ranks and max(used) == len(used) - 1:
        yield Finding(
            at, f"the last {missing} of {total} samples are never used: {ranks} ranks have {total // ranks} each",
            "give some ranks one more and pad the others, as DistributedSampler does",
        )  # fmt: skip


def _of_rests(attempt: Attempt, lines: Mapping[str, Mapping[int, list[Event]]]) -> Iterator[Finding]:
    """Whole numbers that the ranks divide among them, with a rest that nobody has."""
    passes = [each for of_ranks in lines.values() for of_rank in of_ranks.values() for each in of_rank]
    batches = {each["batch"] for each in passes} | {it["rows"] for _, it in attempt.of("forward")}
    samples = {each["samples"] for each in passes}
    ranks = len(attempt.ranks)
    for of, at in sorted({(it["of"], it["at"]) for _, it in attempt.of("rest")}):
        each = of // ranks
        if each and each in batches:
            yield Finding(
                at, f"a batch of {of} is divided by {ranks} ranks: {each} each, {each * ranks} together",
                f"take a multiple of the number of ranks, such as {(each + 1) * ranks}, or give some ranks one more",
            )  # fmt: skip
        elif each and each in samples:
            yield Finding(
                at, f"{of} samples are divided by {ranks} ranks: {each} each, so {of % ranks} are never used",
                "give some ranks one more and pad the others, as DistributedSampler does",
            )  # fmt: skip


def _of_inputs(attempt: Attempt) -> Iterator[Finding]:
    """Ranks whose models get the same inputs, from whatever they come."""
    inputs: dict[str, dict[int, list[int]]] = {}
    for rank, it in attempt.of("forward"):
        inputs.setdefault(it["at"], {}).setdefault(rank, []).append(it["sum"])
    for at, of_ranks in inputs.items():
        varying = {rank: repr(sums[:_FIRST]) for rank, sums in of_ranks.items() if len(set(sums[:_FIRST])) > 1}
        same = [ranks for ranks in alike(varying).values() if len(ranks) > 1 and attempt.are_together(ranks)]
        if same:
            each = "; ".join(named(ranks) for ranks in same[:4])
            yield Finding(
                at, f"ranks train on the same samples: the inputs of the model are equal on {each}",
                "divide the data by rank, and seed what is random with the rank",
            )  # fmt: skip
            return


# -- files -------------------------------------------------------------------------------------------------------------


def of_files(attempt: Attempt) -> Iterator[Finding]:
    """Files that several ranks write at the same time, or that one may read before another one has written it."""
    order = _Order(attempt)
    uses: dict[str, list[tuple[int, int, Event]]] = {}
    for rank in attempt.ranks:
        for place, it in enumerate(attempt.events[rank]):
            if it["e"] == "file" and not it["child"]:
                uses.setdefault(it["path"], []).append((rank, place, it))
    raced: dict[str, list[str]] = {}
    for path, those in uses.items():
        writes = [use for use in those if use[2]["kind"] == "write"]
        races = {
            rank
            for one in writes
            for other in writes
            if one[0] != other[0] and not order.has(one, other)
            for rank in (one[0], other[0])
        }
        if races:
            at = next(it["at"] for rank, _, it in writes if rank in races)
            raced.setdefault(at, []).append(f"{named(races)} write {os.path.basename(path)}")
            continue
        early = [
            (reader, writer) for writer in writes for reader in those
            if reader[2]["kind"] == "read" and reader[0] != writer[0] and not writer[2]["existed"]
            and not order.has(writer, reader) and (reader[2]["existed"] or reader == _last(those, reader[0]))
        ]  # fmt: skip
        if early:
            reader, writer = early[0]
            readers = named(reader[0] for reader, _ in early)
            yield Finding(
                reader[2]["at"], f"{readers} may read {os.path.basename(path)} before rank {writer[0]} has written it "
                f"({os.path.basename(writer[2]['at'])}): nothing lets them wait",
                "call dist.barrier() on all ranks between the two",
            )  # fmt: skip
    for at, texts in raced.items():
        yield Finding(at, f"at the same time {a_few(texts)}", "let one rank write a file, or name it by the rank")


def _last(uses: list[tuple[int, int, Event]], rank: int) -> tuple[int, int, Event]:
    return [use for use in uses if use[0] == rank][-1]


class _Order:
    """What must have happened before what, by the collectives in which ranks wait for each other."""

    def __init__(self, attempt: Attempt) -> None:
        self._meetings: dict[int, dict[tuple[str, tuple[int, ...]], list[int]]] = {}
        for rank in attempt.ranks:
            those = self._meetings[rank] = {}
            for place, it in enumerate(attempt.events[rank]):
                if it["e"] == "collective" and it["kind"] not in _ONE_WAY:
                    those.setdefault((it["group"], tuple(it["ranks"])), []).append(place)
                elif it["e"] == "step":
                    for group in attempt.exchanging:
                        if rank in group:
                            those.setdefault((f"steps of {it['optimizer']}", group), []).append(place)

    def has(self, one: tuple[int, int, Event], other: tuple[int, int, Event]) -> bool:
        """Whether one of two events of different ranks must have been over before the other one."""
        return self._before(one, other) or self._before(other, one)

    def _before(self, first: tuple[int, int, Event], second: tuple[int, int, Event]) -> bool:
        ours, theirs = self._meetings[first[0]], self._meetings[second[0]]
        return any(
            sum(it < second[1] for it in theirs[key]) > sum(it < first[1] for it in ours[key])
            for key in ours.keys() & theirs.keys()
        )
