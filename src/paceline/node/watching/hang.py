"""Whether the ranks of a job can go on, and which keep the others waiting: a pure function of where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .slowness import size
from .typical import JOINS, described, entered, is_asleep, is_in_checkpoint, place, why

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.contract.stands import Hang, Kind, Place, Stand


def find(stands: Sequence[Stand], after: float) -> Hang | None:
    """Why no rank has gone on for `after` seconds; None as long as one may.

    A rank that works keeps others waiting for good reason: it compiles, evaluates, loads or saves.
    """
    by_rank = {stand["rank"]: stand for stand in stands}
    seconds = min((stand["still"] for stand in stands), default=0.0)
    if seconds < after:
        return None
    differing = _mismatch(by_rank)
    late = _late(by_rank)
    if len(late) == len(stands):  # each waits for another one
        differing = differing or _crossed(by_rank)
    if differing:
        return _hang("mismatch", differing, by_rank, seconds)
    if late:
        is_slow = any(by_rank[rank]["idle"] < after for rank in late)
        return None if is_slow else _hang("late", late, by_rank, seconds)
    if any(stand["idle"] < after for stand in stands) or not any(
        (it["answer"] or {}).get("framework") for it in stands
    ):
        return None
    inside = [rank for rank, stand in by_rank.items() if entered(stand) is not None]
    if not inside and all(map(is_asleep, stands)):
        return None
    return _hang("together" if len(inside) == len(by_rank) else "idle", [], by_rank, seconds)


def grouped(stands: Sequence[Stand], first: Sequence[int] = ()) -> list[Place]:
    """The places of ranks; ranks at one line, with one reason, are one place, unless some keep the others waiting."""
    found: dict[tuple[bool, str, str, tuple[str, ...]], Place] = {}
    for stand in sorted(stands, key=lambda it: (it["rank"] not in first, it["rank"])):
        new = place(stand)
        key = stand["rank"] in first, new["where"], new["why"], tuple(function for _, _, function in new["stack"])
        if (there := found.setdefault(key, new)) is not new:
            there["ranks"] += new["ranks"]
            there["hosts"] += new["hosts"]
            there["pids"] += new["pids"]
            there["devices"] += new["devices"]
    return list(found.values())


def _numbers(stand: Stand) -> Mapping[str, int]:
    return (stand["answer"] or {}).get("numbers", {})


def _late(stands: Mapping[int, Stand]) -> list[int]:
    """The ranks that are behind in a group, and ahead in none: the others may wait for these."""
    behind: set[int] = set()
    ahead: set[int] = set()
    for group in {group for stand in stands.values() for group in _numbers(stand)}:
        numbers = {rank: _numbers(stand)[group] for rank, stand in stands.items() if group in _numbers(stand)}
        most = max(numbers.values())
        absent = set(stands) - set(numbers) if _size(stands, group) == len(stands) else set()
        behind |= {rank for rank, number in numbers.items() if number < most} | absent
        ahead |= {
            rank for rank, number in numbers.items() if number == most and (len(set(numbers.values())) > 1 or absent)
        }
    joining = {rank for rank, stand in stands.items() if why(stand) == JOINS}
    if joining:  # the others have not come, or have a group already
        behind |= set(stands) - joining
        ahead -= set(stands) - joining
    silent = {rank for rank, stand in stands.items() if stand["answer"] is None}
    if silent and len(silent) < len(stands):  # where these are nobody knows, and the others wait
        behind |= silent
    found = behind - ahead or behind
    return sorted({rank for rank in found if entered(stands[rank]) is None} or found)  # who is in one waits as well


def _size(stands: Mapping[int, Stand], group: str) -> int:
    return max((stand["answer"] or {}).get("sizes", {}).get(group, 0) for stand in stands.values())


def _mismatch(stands: Mapping[int, Stand]) -> list[int]:
    """Ranks that have entered another collective than the others under the same number of the same group."""
    by_number: dict[tuple[str, int], dict[int, tuple[str, str]]] = {}
    for rank, stand in stands.items():
        if (it := entered(stand)) is not None:
            what = it["kind"], str((it["shapes"], it["dtypes"])) if it["kind"] == "all_reduce" else ""
            by_number.setdefault((it["group"], it["number"]), {})[rank] = what
    for ranks in by_number.values():
        kinds = list(ranks.values())
        if len(set(kinds)) > 1:
            return _unusual(ranks, stands)
    return []


def _crossed(stands: Mapping[int, Stand]) -> list[int]:
    """Ranks that are in a collective of another group than most, if all are in one."""
    groups = {rank: it["group"] for rank, stand in stands.items() if (it := entered(stand)) is not None}
    return _unusual(groups, stands) if len(groups) == len(stands) and len(set(groups.values())) > 1 else []


def _unusual(found: Mapping[int, object], stands: Mapping[int, Stand]) -> list[int]:
    """The ranks that have something else than most; of as many, those in a checkpoint, or else the later ones."""
    values = list(found.values())

    def weight(rank: int) -> tuple[int, bool, int]:
        return values.count(found[rank]), not is_in_checkpoint(stands[rank]), -rank

    usual = found[max(found, key=weight)]
    return sorted(rank for rank, value in found.items() if value != usual)


def _apart(places: Sequence[Place]) -> list[int]:
    """The ranks that are elsewhere than more than half of all; none if no place has more than half."""
    most = max(places, key=lambda it: len(it["ranks"]))
    others = sorted(rank for it in places if it is not most for rank in it["ranks"])
    return others if len(others) < len(most["ranks"]) else []


def _hang(kind: Kind, ranks: list[int], stands: Mapping[int, Stand], seconds: float) -> Hang:
    """A hang with its words."""
    waiting = [rank for rank in stands if rank not in ranks]
    opened = [it for rank in waiting if (it := entered(stands[rank])) is not None]
    collective = opened[0] if opened else None
    apart = _apart(grouped(list(stands.values()))) if kind == "idle" else []
    places = grouped(list(stands.values()), ranks or apart)
    first, last = places[0], places[-1]
    joins = any(why(stands[rank]) == JOINS for rank in waiting)
    what = described(collective) if collective else "a process group" if joins else "a collective"
    if kind == "late":
        them = who(first) if len(first["ranks"]) == len(ranks) else listed(ranks)
        wait = "waits" if len(waiting) == 1 else "wait"
        line = f"{them} {'has' if len(ranks) == 1 else 'have'} not entered {what}, in which {listed(waiting)} {wait}"
        line += f"; {_at(first)}"
    elif kind == "mismatch":
        other = entered(stands[ranks[0]])
        assert other is not None
        theirs, order = described(other), ""
        if collective is not None and collective["group"] != other["group"]:
            theirs, what = (f"{described(it)} of process group {it['group']}" for it in (other, collective))
            order = ": they enter collectives of several groups in different orders"
        line = f"{listed(ranks)} {'is' if len(ranks) == 1 else 'are'} in {theirs}"
        line += f", and {listed(waiting)} in {what}{order}; {_at(first, who(first) if len(places) == 2 else '')}"
        line += f", and {_at(last, who(last))}" if len(places) == 2 else ""
    elif kind == "together":
        line = f"all ranks are in {what}, and none goes on; {_at(first)}{_of_machines(stands.values())}"
    else:
        line = f"no rank works; {_at(first, who(first))}"
        if apart or len(places) == 2:
            line += f", {'while' if apart else 'and'} {_at(last, who(last))}"
        line += _of_machines(stands.values())
    if nccl := list(dict.fromkeys(it for stand in stands.values() for it in stand["machine"].get("nccl", ()))):
        line += f"; NCCL: {', '.join(nccl)}"
    return {
        "kind": kind, "ranks": ranks, "waiting": waiting, "seconds": seconds, "collective": collective,
        "line": line, "places": places,
    }  # fmt: skip


def _of_machines(stands: Iterable[Stand]) -> str:
    """What networks and GPUs do meanwhile, as far as that is known."""
    machines = {(stand["host"], stand["node"]): stand["machine"] for stand in stands}.values()
    rates, uses = ([it[key] for it in machines if key in it] for key in ("network", "gpu_use"))
    words = ""
    if len(rates) == len(machines) > 1:
        words += f"; the network of each machine carries {_between(*map(size, (min(rates), max(rates))))}/s"
    if uses:
        words += (
            f"; their GPUs compute {_between(*(f'{use * 100:.0f}' for use in (min(uses), max(uses))))} % of the time"
        )
    return words


def _between(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def who(it: Place) -> str:
    """`rank 3 on gpu-1 (GPU 0, pid 4711)`."""
    host = f" on {it['hosts'][0]}" if len(set(it["hosts"])) == 1 else ""
    device = f"GPU {', '.join(it['devices'])}, " if it["devices"] else ""
    process = f" ({device}pid {it['pids'][0]})" if len(it["pids"]) == 1 else ""
    return f"{listed(it['ranks'])}{host}{process}"


def stood(it: Place) -> str:
    """`rank 3 on gpu-1 (pid 4711): train.py:31 in load: it waits for a lock`."""
    return f"{who(it)}: {': '.join(filter(None, (it['where'], it['why']))) or 'no line is known'}"


def _at(it: Place, them: str = "") -> str:
    """Where ranks are, whose name `them` is where the words before have not said it."""
    one = len(it["ranks"]) == 1
    if not it["where"] and it["why"]:
        return f"{them}{them and ': '}{it['why']}"
    pronoun = f"{them} {'is' if one else 'are'}" if them else "it is" if one else "they are"
    return f"{pronoun} at {it['where'] or 'a line that is not known'}{it['why'] and ': ' + it['why']}"


def listed(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2 to 5`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [f"{it[0]} to {it[-1]}" if len(it) > 2 else ", ".join(map(str, it)) for it in parts]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(texts)}"
