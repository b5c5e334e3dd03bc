"""What a job has used, in words: `paceline why`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.job.quantities import show_duration, show_size
from paceline.node.telemetry.thinning import merged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.contract.records import NodeHistory, Telemetry
    from paceline.job.job import Job

RECENT = 600.0  # seconds, of which the use of a job that runs is told
_LEAST_GROWTH = 1.25  # of a rank's memory that is told


def use_in_words(job: Job, nodes: Sequence[NodeHistory]) -> Iterator[str]:
    """Lines about a job that runs, and about one that ran out of memory."""
    if job.cause == "out of memory":
        yield from _growth(nodes)
    if job.is_over:
        return
    now = max((node["telemetry"][-1]["time"] for node in nodes if node["telemetry"]), default=0.0)
    recent = [[line for line in node["telemetry"] if line["time"] > now - RECENT] for node in nodes]
    means = [merged(lines) for lines in recent if lines]
    if means:
        yield f"use in the last {show_duration(max(it['seconds'] for it in means))}: {_summary(means)}"


def _summary(means: Sequence[Telemetry]) -> str:
    def total(group: str, key: str) -> float:
        found: list[Any] = [it[group].get(key) or 0 for it in means]  # type: ignore[literal-required]
        return float(sum(found))

    def size(group: str, key: str) -> str:
        return show_size(int(total(group, key)))

    parts = [
        f"{total('job', 'cpu'):.1f} of {total('machine', 'cores'):g} cores",
        f"{size('job', 'memory')} of {size('machine', 'memory')} memory ({size('machine', 'memory_used')} in use)",
        f"{size('job', 'read')}/s read and {size('job', 'written')}/s written",
        f"{size('machine', 'received')}/s received and {size('machine', 'sent')}/s sent",
    ]
    gpus: list[Any] = [it["gpus"] for it in means if "gpus" in it]
    use, memory, used, power = (
        [value for it in gpus for value in it.get(key) or () if value is not None]
        for key in ("use", "memory", "memory_used", "power")
    )
    if use:
        of = f", {show_size(int(sum(used)))} of {show_size(int(sum(memory)))}" if used and memory else ""
        parts.insert(0, f"GPUs {sum(use) / len(use):.0f} % busy{of}" + (f", {sum(power):.0f} W" if power else ""))
    return "; ".join(parts)


def _growth(nodes: Sequence[NodeHistory]) -> Iterator[str]:
    """The rank whose memory has grown most, if one's has."""
    ranks: dict[int, list[tuple[float, int]]] = {}
    for node in nodes:
        for line in node["telemetry"]:
            columns = line["ranks"]
            for rank, memory in zip(columns.get("rank", ()), columns.get("memory", ()), strict=False):
                if memory:
                    ranks.setdefault(rank, []).append((line["time"], memory))
    if not ranks:
        return
    rank, seen = max(ranks.items(), key=lambda it: it[1][-1][1] - it[1][0][1])
    (begin, first), (end, last) = seen[0], seen[-1]
    if last >= _LEAST_GROWTH * first:
        took = show_duration(max(1, int(end - begin)))
        yield f"the memory of rank {rank} grew from {show_size(first)} to {show_size(last)} in {took}"
