"""What differs between ranks that should not, as findings: how a job ended, collectives, steps and weights."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from paceline.node.failure import SYMPTOM
from paceline.node.watching.typical import is_of_user

from .data import of_data, of_files
from .records import Attempt, Course, Event, Finding, alike, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.contract.records import Failure, OtherFailure
    from paceline.contract.stands import Place

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NUMBER = re.compile(r"\d+")
_SCALARS = 64
_NOISE = 1e-5  # of a sum of numbers, that order of addition may make
_EXACT = 1e-4  # of a ratio of gradients that is a whole number


def findings(attempts: Sequence[Attempt], course: Course) -> list[Finding]:
    """All findings, those that explain most first; each once."""
    found: list[Finding] = []
    for attempt in attempts:
        attempt.has_failed = attempt.number in course.failures
        differing = list(_of_collectives(attempt))
        found += differing  # what follows from these is no finding
        found += of_data(attempt)
        is_last = attempt is attempts[-1]
        if not attempt.was_cut:
            if is_last and course.hang is not None and not differing:
                found += _of_hang(attempt, course)
            if attempt.killed is None:
                found += _of_failures(attempt, course.failures.get(attempt.number, ()), is_explained=bool(differing))
        found += [
            *_of_steps(attempt),
            *([] if differing else _of_weights(attempt)),
            *_of_gradients(attempt),
            *of_files(attempt),
        ]
    if attempts and not found and not course.stopped:
        found += _of_joining(attempts[-1])
    return list({(it.at, it.what.split(" after ")[0]): it for it in reversed(found)}.values())[::-1]


# -- how the job ended -------------------------------------------------------------------------------------------------


def _of_failures(
    attempt: Attempt, failures: Sequence[Failure | OtherFailure], *, is_explained: bool
) -> Iterator[Finding]:
    """Exceptions and signals; of ranks that have lost another one only what that one did."""
    own = {
        rank: it for it in failures if (rank := it["rank"]) is not None and not SYMPTOM.search(it["message"])
        and not (is_explained and it["message"].startswith("killed"))
    }  # fmt: skip
    for ranks in alike({rank: _NUMBER.sub("", it["message"]) for rank, it in own.items()}).values():
        first = max((own[rank] for rank in ranks), key=lambda it: len(it.get("traceback") or ""))
        at = _last_line(first.get("traceback") or "") or _last_at(attempt, ranks[0])
        are_all = len(ranks) == len(attempt.ranks)
        others = "" if are_all else ", and what it has that others do not"
        advice = str(first.get("advice") or f"see the log of rank {ranks[0]}{others}")
        who = "all ranks fail" if are_all else f"{named(ranks)} fail{'s' * (len(ranks) == 1)}"
        yield Finding(at, f"{who}: {first['message']}", advice)
    lost = [rank for it in failures if (rank := it["rank"]) is not None]
    ended = [rank for rank, _ in attempt.of("end") if rank not in lost]
    if lost and not own and not is_explained:
        waiting = lost[0]
        last = next((it for it in reversed(attempt.events.get(waiting, [])) if it["e"] == "collective"), None)
        where = _last_line(failures[0].get("traceback") or "") or (last["at"] if last else _last_at(attempt, waiting))
        is_in_it = last is not None and last["at"] == where
        s = "s" * (len(lost) == 1)
        what = f"enter{s} {last['kind']}" if last is not None and is_in_it else f"wait{s} for the others here"
        if ended:
            yield Finding(
                where, f"{named(lost)} {what}, but {named(ended)} had ended by then",
                f"let {named(ended)} come here too: no rank may leave a loop or the script before the others",
            )  # fmt: skip
        else:
            yield Finding(
                where, f"{named(lost)} lose the others: {failures[0]['message']}", "see the logs of the ranks"
            )


def _of_hang(attempt: Attempt, course: Course) -> Iterator[Finding]:
    """Who waits where, and who is elsewhere."""
    hang = course.hang
    assert hang is not None
    places = list(hang["places"])
    late = [it for it in places if set(it["ranks"]) & set(hang["ranks"])]
    waiting = [it for it in places if it not in late]
    ended = sorted({rank for rank, _ in attempt.of("end")})
    if late and waiting:
        what = hang["collective"]["kind"] if hang["collective"] else "the next collective"
        at, is_one = _line_of(late[0]), len(hang["ranks"]) == 1
        where = ", ".join(f"{named(it['ranks'])} at {_short(_line_of(it))}{_why(it)}" for it in waiting[:3])
        yield Finding(
            at, f"it hangs: {named(hang['ranks'])} {'is' if is_one else 'are'} here{_why(late[0])} and "
            f"{'does' if is_one else 'do'} not enter {what}, in which others wait: {where}",
            "let all ranks enter the same collectives, in the same order",
        )  # fmt: skip
        return
    where = "; ".join(f"{named(it['ranks'])} at {_short(_line_of(it))}{_why(it)}" for it in places[:4])
    gone = f"; {named(ended)} had ended" if ended else ""
    at = next((_line_of(it) for it in reversed(places)), "")
    yield Finding(at, f"it hangs: {where}{gone}", "let all ranks enter the same collectives, in the same order")


def _why(place: Place) -> str:
    return f" ({place['why'].replace('it waits', 'waiting', 1)})" if place["why"] else ""


def _line_of(place: Place) -> str:
    return next((f"{file}:{line}" for file, line, _ in place["stack"] if is_of_user(file) and line), "")


def _short(at: str) -> str:
    return os.path.basename(at) or "no line of the script"


def _last_line(traceback: str) -> str:
    """The innermost line of the script in a traceback."""
    lines = [(file, line) for file, line in _FRAME.findall(traceback) if is_of_user(file)]
    return f"{lines[-1][0]}:{lines[-1][1]}" if lines else ""


def _last_at(attempt: Attempt, rank: int) -> str:
    return next((it["at"] for it in reversed(attempt.events.get(rank, [])) if it.get("at")), "")


# -- collectives -------------------------------------------------------------------------------------------------------


def _of_collectives(attempt: Attempt) -> Iterator[Finding]:
    """The first collective of each group in which its ranks differ."""
    for of_ranks in attempt.collectives.values():
        members = next(iter(of_ranks.values()))[0]["ranks"]
        count = min(len(it) for it in of_ranks.values())
        for number in range(count):
            entries = {rank: it[number] for rank, it in of_ranks.items()}
            if (difference := _difference(attempt, entries)) is not None:
                yield difference
                break
        else:
            lengths = {rank: len(of_ranks.get(rank, ())) for rank in members}
            if attempt.has_ended and len(set(lengths.values())) > 1:
                most = max(lengths.values())
                more = [rank for rank, length in lengths.items() if length == most]
                extra = of_ranks[more[0]][min(lengths.values())]
                fewer = [rank for rank in members if rank not in more]
                never = f"{named(fewer)} never {'does' if len(fewer) == 1 else 'do'}"
                yield Finding(
                    extra["at"],
                    f"{named(more)} enter{'s' * (len(more) == 1)} {_described(extra)}, and {never}",
                    "call it on all ranks of the group",
                )  # fmt: skip


_ASPECTS = (
    ("kind", "enter different collectives"), ("of", "make groups of different ranks"), ("root", "name different roots"),
    ("dtype", "send different types"), ("shape", "send different shapes"), ("op", "reduce by different operations"),
    ("which", "exchange different tensors"),
)  # fmt: skip


def _difference(attempt: Attempt, entries: Mapping[int, Event]) -> Finding | None:
    for aspect, words in _ASPECTS:
        values = {rank: repr(it.get(aspect)) for rank, it in entries.items()}
        groups = alike(values)
        if len(groups) == 1 or (aspect == "which" and ("''" in groups or not _same_models(attempt))):
            continue
        each = "; ".join(
            f"{named(ranks)} {_described(entries[ranks[0]], aspect)} at {_short(entries[ranks[0]]['at'])}"
            for ranks in list(groups.values())[:4]
        )
        fewest = min(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
        return Finding(
            entries[fewest[0]]["at"], f"ranks {words} at the same time: {each}",
            "let what all ranks exchange depend on nothing that differs between them"
            + (", such as the order of a set" if aspect == "which" else ""),
        )  # fmt: skip
    return None


def _described(entry: Event, aspect: str = "") -> str:
    if aspect == "of":
        return f"new_group of {entry.get('of') or 'all'}" if entry["kind"] == "new_group" else entry["kind"]
    facts = [str(entry[it]) for it in ("dtype", "shape") if it in entry]
    more = f" with {aspect} {entry.get(aspect)}" if aspect in ("root", "op") else ""
    more += f" of {entry['which']}" if aspect == "which" else ""
    return f"{entry['kind']}{f' ({chr(32).join(facts)})' if facts else ''}{more}"


def _same_models(attempt: Attempt) -> bool:
    """Whether all ranks train parameters of the same shapes, as far as that is known."""
    return len({it["weights"]["shapes"] for _, it in attempt.of("step") if it.get("weights")}) <= 1


# -- steps, weights and gradients --------------------------------------------------------------------------------------


def _of_steps(attempt: Attempt) -> Iterator[Finding]:
    groups = alike(attempt.steps)
    if attempt.has_ended and len(groups) > 1 and not any(attempt.of("uneven")) and attempt.are_together(attempt.ranks):
        each = ", ".join(f"{named(ranks)} {steps}" for steps, ranks in groups.items())
        at = next((it["at"] for _, it in attempt.of("step")), "")
        yield Finding(at, f"ranks make different numbers of steps: {each}", "give all ranks the same number of batches")


def _of_weights(attempt: Attempt) -> Iterator[Finding]:
    """The first step of each optimizer after which ranks that train together have other weights or another state."""
    after: dict[tuple[int, int], dict[int, Event]] = {}
    for rank, it in attempt.of("step"):
        if it.get("weights") and not it["weights"]["sharded"]:
            after.setdefault((it["optimizer"], it["number"]), {})[rank] = it
    told: set[tuple[int, ...]] = set()
    for (_, number), steps in sorted(after.items(), key=lambda item: item[0][1]):
        for group in attempt.exchanging - told:
            ranks = {rank: steps[rank]["weights"] for rank in group if rank in steps}
            if len({it["shapes"] for it in ranks.values()}) != 1:
                continue
            for aspect, words in (
                ("rate", "learning rates"),
                ("sums", "weights"),
                ("state", "states of the optimizer"),
            ):
                groups = _close({rank: it[aspect] for rank, it in ranks.items()})
                if len(groups) > 1:
                    told.add(group)
                    yield _unlike(attempt, number, steps, groups, words)
                    break


def _unlike(
    attempt: Attempt, number: int, steps: Mapping[int, Event], groups: Sequence[Sequence[int]], words: str
) -> Finding:
    each = " and ".join(named(ranks) for ranks in groups[:4])
    each = f"all {len(groups)} ranks" if len(groups) > 2 and all(len(it) == 1 for it in groups) else each
    at = steps[groups[-1][0]]["at"]
    if attempt.number:
        reads = {rank: it for rank, it in attempt.of("file") if it["kind"] == "read" and it["path"] in attempt.saved}
        only = f"; only {named(reads)} read what was saved" if 0 < len(reads) < len(attempt.ranks) else ""
        return Finding(
            next(iter(reads.values()))["at"] if reads else at,
            f"{words} differ between {each} after step {number} of the resume{only}",
            "load the same model, optimizer and step on all ranks",
        )  # fmt: skip
    todo = {
        "learning rates": "let the learning rate depend on the number of ranks alone",
        "weights": "broadcast the first weights, and exchange the gradients of all parameters among all ranks",
    }.get(words, "begin with the same state on all ranks")
    return Finding(at, f"{words} differ between {each} after step {number}", todo)


def _close(values: Mapping[int, Sequence[Any]]) -> list[list[int]]:
    """The ranks with equal values, but for rounding."""
    groups: list[list[int]] = []
    for rank in sorted(values):
        for group in groups:
            if _is_close(values[group[0]], values[rank]):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups


def _is_close(one: Sequence[Any], other: Sequence[Any]) -> bool:
    if len(one) != len(other):
        return True  # each keeps a part
    for ours, theirs in zip(one, other, strict=True):
        if isinstance(ours, float):
            if abs(ours - theirs) > _NOISE * abs(ours):
                return False
        elif abs(ours[0] - theirs[0]) > _NOISE * max(ours[1], theirs[1], 1e-12):
            return False
    return True


def _of_gradients(attempt: Attempt) -> Iterator[Finding]:
    """Gradients that are not exchanged, or divided by another number than that of the ranks."""
    for rank, it in attempt.of("divided"):
        number = round(it["by"])
        if number >= 2 and abs(it["by"] - number) < _EXACT * number and number % it["ranks"]:
            yield Finding(
                it["at"], f"gradients are summed over {it['ranks']} ranks and divided by {number} (rank {rank})",
                "divide by dist.get_world_size()",
            )  # fmt: skip
            break
    trains = [rank for rank in attempt.ranks if attempt.steps[rank] >= 2]
    if (
        len(trains) < 2
        or not _same_models(attempt)
        or any(it["weights"]["sharded"] for _, it in attempt.of("step") if it.get("weights"))
    ):
        return
    at = next(it["at"] for rank, it in attempt.of("step") if rank == trains[-1])
    if attempt.exchanges_nothing and not any(attempt.of("joined")):
        return  # see `_of_joining`
    if attempt.exchanges_nothing:
        yield Finding(
            at, f"{named(trains)} train, and exchange no gradients: each has a model of its own",
            "wrap the model with DistributedDataParallel, or average the gradients",
        )  # fmt: skip
        return
    if any(attempt.of("library", "message", "horovod")):
        return
    exchanging = {rank for group in attempt.exchanging for rank in group}
    alone = [rank for rank in trains if rank not in exchanging]
    wide = any(
        len(it["ranks"]) == len(attempt.ranks) and it.get("size", 0) >= _SCALARS for _, it in attempt.of("collective")
    )
    if exchanging and alone and not wide:
        yield Finding(
            next(it["at"] for rank, it in attempt.of("step") if rank == alone[0]),
            f"{named(alone)} exchange{'s' * (len(alone) == 1)} no gradients, and {named(exchanging)} do",
            "exchange them among all ranks",
        )  # fmt: skip
    elif exchanging and not alone and not wide and not attempt.are_together(trains):
        groups = "; ".join(named(group) for group in sorted(attempt.exchanging)[:4])
        yield Finding(
            at, f"gradients are exchanged within {groups}, and never among all ranks", "exchange them among all ranks"
        )


def _of_joining(attempt: Attempt) -> Iterator[Finding]:
    """A script whose ranks know nothing of each other."""
    alone = {rank for rank, it in attempt.of("end", "limit") if it["alone"]}
    if alone == set(attempt.ranks) and not any(attempt.of("joined", "horovod", "library")):
        yield Finding(
            "", f"the {len(attempt.ranks)} ranks never meet: each has done all of the work",
            "call dist.init_process_group(), or see docs/library.md for the lines that make a script distributed",
        )  # fmt: skip
