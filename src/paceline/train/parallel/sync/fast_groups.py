"""Groups of machines with fast links among each other, by measurement."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.train.parallel.sync.forecast import rate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.train.group.group import Group

    Pair = tuple[int, int]  # the lower one first

GAP = 3.0  # between the slowest fast link and the fastest slow one; links of one kind do not differ by that much
_SIZES = [1 << 18, 1 << 20, 1 << 22, 1 << 24]  # bytes of the messages that measure a link
_LONG = 0.05  # seconds of a message that says enough
_REPEATS = 3  # of each message, of which the fastest counts


def measured_groups(group: Group, machines: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of machines whose links are fast, as rank 0 has chosen; it says why. A collective of all ranks."""
    speeds = _measured(group, [ranks[0] for ranks in machines]) if len(machines) > 2 else {}
    chosen = group.broadcast_object(fast_groups(len(machines), speeds))
    groups = [sorted(rank for machine in each for rank in machines[machine]) for each in chosen]
    if group.is_main:
        print(f"paceline: hierarchical=measured: {_sentence(speeds, chosen, groups)}", file=sys.stderr, flush=True)
    return groups


def fast_groups(count: int, speeds: Mapping[Pair, float]) -> list[list[int]]:
    """Put machines into groups in which all links are fast.

    Links are fast or slow by the largest gap between two speeds, or by that of the slower ones among equal gaps. If it
    is less than a factor of `GAP`, each machine is a group of its own.
    """
    ordered = sorted(speeds.values())
    neighbours = itertools.pairwise(ordered)
    slow, limit = max(neighbours, key=lambda pair: pair[1] / pair[0], default=(1.0, 1.0))  # the first of equal ones
    if limit < GAP * slow:
        return [[machine] for machine in range(count)]
    groups: list[list[int]] = []
    for machine in range(count):
        mine = (each for each in groups if all(speeds[other, machine] >= limit for other in each))
        found = next(mine, None)
        if found is None:
            groups.append([machine])
        else:
            found.append(machine)
    return groups


def rounds(count: int) -> Iterator[list[Pair]]:
    """Let each of some players meet each other one once, in rounds in which each has one opponent at most.

    This is the circle method for round-robin tournaments.
    """
    players = list(range(count + count % 2))
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        players.insert(1, players.pop())


def _measured(group: Group, leaders: Sequence[int]) -> dict[Pair, float]:
    """Bytes per second between the machines of some ranks, several links at once. A collective of all ranks."""
    mine: dict[Pair, float] = {}
    with group.guard:
        for pairs in rounds(len(leaders)):
            for one, other in pairs:
                if group.rank == leaders[one]:
                    mine[one, other] = _speed(leaders[other], group.device, first=True)
                elif group.rank == leaders[other]:
                    _speed(leaders[one], group.device, first=False)
            dist.barrier()  # a round uses each link alone
    return {pair: speed for each in group.gather_objects(mine) for pair, speed in each.items()}


def _speed(other: int, device: torch.device, *, first: bool) -> float:
    """Bytes per second to another rank and back, one after the other. The other rank calls this, too."""
    speed = 0.0
    for size in _SIZES:
        seconds = min(_round_trip(size, other, device, first=first) for _ in range(_REPEATS))
        latency = min(_round_trip(1, other, device, first=first) for _ in range(_REPEATS))
        speed = 2 * size / max(seconds - latency, 1e-9)
        is_long = torch.tensor([seconds >= 2 * _LONG], dtype=torch.uint8, device=device)
        if first:
            dist.send(is_long, other)
        else:
            dist.recv(is_long, other)
        if is_long.item():
            break
    return speed


def _round_trip(size: int, other: int, device: torch.device, *, first: bool) -> float:
    """Seconds of a message to another rank and back."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    began = time.perf_counter()
    for sends in (first, not first):
        if sends:
            dist.send(message, other)
        else:
            dist.recv(message, other)
    message[-1:].item()  # on a GPU this waits until it is there
    return time.perf_counter() - began


def _sentence(speeds: Mapping[Pair, float], chosen: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> str:
    """Which groups there are, and why, in one line."""
    named = "groups " + " ".join(str(list(each)) for each in groups)
    if not speeds:
        return f"{named}, the ranks of each machine: there are no three machines whose links could be compared"
    inside = {pair for each in chosen for pair in itertools.combinations(each, 2)}
    if not inside:
        low, high = rate(min(speeds.values())), rate(max(speeds.values()))
        return f"{named}, the ranks of each machine: {low} to {high} between them, less than a factor of {GAP:g}"
    slowest = min(speeds[pair] for pair in inside)
    fastest = max(speed for pair, speed in speeds.items() if pair not in inside)
    return f"{named}: {rate(slowest)} or more within groups, {rate(fastest)} or less between them"
