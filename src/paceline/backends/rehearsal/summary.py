"""What ranks that agree have done, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.job.quantities import show_size
from paceline.job.text import counted

from .records import Attempt, Course, named

if TYPE_CHECKING:
    from collections.abc import Sequence


_COMPARED = ("step", "collective", "batch", "forward")


def nothing(attempts: Sequence[Attempt], course: Course) -> str:
    """Why nothing of a training could be compared, in one line; "" if there was something."""
    if any(True for attempt in attempts for _ in attempt.of(*_COMPARED)):
        return ""
    why = f"; {course.stopped}: --time-limit 1h lets it come further" if course.stopped else ""
    return (
        "nothing was compared but files: no rank has made a step of an optimizer, a batch or a collective, and "
        f"processes that a script starts itself, as mp.spawn does, are not seen{why}"
    )


def summary(attempts: Sequence[Attempt], course: Course, ranks: int) -> str:
    """`8 ranks agree: 24 steps, …`, and how far that has been seen."""
    steps = [max(attempt.steps.values(), default=0) for attempt in attempts]
    done = sum(steps)
    first = "the first " if attempts and attempts[-1].was_cut else ""
    facts = [f"{first}{counted(done, 'step')}" if done else "no step of an optimizer"]
    facts += [it for attempt in attempts[-1:] for it in _of(attempt)]
    killed = next((it.killed for it in attempts if it.killed), None)
    saves = any(it["kind"] == "write" for attempt in attempts for _, it in attempt.of("file"))
    if killed is not None and len(attempts) > 1:
        facts.append(f"rank {killed[0]} was killed after step {killed[1]}, and all went on")
    else:
        facts.append("none was killed, as no state was saved before the end" if not saves else "none was killed")
    line = f"{ranks} ranks agree: {', '.join(facts)}"
    if course.stopped:
        line = f"{ranks} ranks agree as far as they came ({course.stopped}): {', '.join(facts)}"
        line += (
            "; --time-limit 1h and --rehearse-steps 2 let them come further" if "time limit" in course.stopped else ""
        )
    return line


def _of(attempt: Attempt) -> list[str]:
    facts = []
    lines = {it["at"] for _, it in attempt.of("collective")}
    first = next((of_ranks for of_ranks in attempt.collectives.values()), {})
    if first:
        count = max(len(it) for of_ranks in attempt.collectives.values() for it in of_ranks.values())
        groups = f" in {counted(len(attempt.collectives), 'group')}" if len(attempt.collectives) > 1 else ""
        facts.append(f"{counted(count, 'collective')} at {counted(len(lines), 'line')}{groups}")
    samples = sum(len(it["indices"]) for _, it in attempt.of("batch"))
    if samples:
        facts.append(counted(samples, "sample"))
    for kind, verb in (("read", "read"), ("write", "written")):
        files: dict[str, set[int]] = {}
        for rank, it in attempt.of("file"):
            if it["kind"] == kind:
                files.setdefault(it["path"], set()).add(rank)
        if files:
            by = {rank for ranks in files.values() for rank in ranks}
            facts.append(
                f"{counted(len(files), 'file')} {verb} by {'all' if len(by) == len(attempt.ranks) else named(by)}"
            )
    memory = {
        rank: max((it["memory"] for it in attempt.events[rank] if it["e"] == "step"), default=0)
        for rank in attempt.ranks
    }
    if any(memory.values()):
        most = max(memory, key=lambda rank: memory[rank])
        facts.append(f"at most {show_size(memory[most])} of memory (rank {most})")
    return facts
