"""In which order a stage computes the passes of its microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

Schedule = Literal["1f1b", "gpipe"]
Pass = tuple[Literal["forward", "backward"], int]


def order(schedule: Schedule, stage: int, stages: int, microbatches: int) -> Iterator[Pass]:
    """The passes of one stage: each with the number of its microbatch.

    "gpipe" computes all forward passes first (Huang et al. 2019, arXiv:1811.06965). "1f1b" takes turns as soon as the
    last stage has computed one, so a stage keeps what its backward passes need of as many microbatches at most as
    there are stages from it to the last (Narayanan et al. 2021, arXiv:2104.04473). Both compute the same numbers.
    """
    ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - 1 - stage)
    for number in range(ahead):
        yield "forward", number
    for number in range(ahead, microbatches):
        yield "forward", number
        yield "backward", number - ahead
    for number in range(microbatches - ahead, microbatches):
        yield "backward", number
