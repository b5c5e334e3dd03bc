"""What makes a job slow, and what to change: from what its ranks have spent their time on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.stands import Spent

_MOST = 3  # causes that are named


class _Cause(NamedTuple):
    """The share of the time from which on it is named, what it is, and what helps."""

    least: float
    what: str
    helps: str


_CAUSES = {
    "loading": _Cause(
        0.2, "the script loads its data itself (num_workers=0)",
        "DataLoader(…, num_workers=4) loads beside the training, and can save up to {percent} % of the time",
    ),
    "workers": _Cause(
        0.2, "it waits for the workers of a DataLoader",
        "more of them, if cores are free, or less work on each sample: cache what is decoded, store larger files",
    ),
    "checkpoint": _Cause(
        0.1, "it writes or reads checkpoints", "save less often, or in the background (docs/checkpoints.md)"
    ),
    "logging": _Cause(0.1, "it logs and prints", "log every hundredth step"),
    "item": _Cause(
        0.1, "it copies results to the CPU (.item(), .cpu(), .tolist()), and waits for the device each time",
        "keep sums on the device, and copy them every hundredth step",
    ),
    "copy": _Cause(
        0.1, "it copies batches to the device", "DataLoader(…, pin_memory=True) and .to(device, non_blocking=True)"
    ),
    "exchange": _Cause(
        0.3, "it waits for other ranks, or for the network",
        "paceline tune compares the ways to exchange gradients; if one rank is slow, why --live shows where it is",
    ),
}  # fmt: skip


def causes(spent: Spent) -> list[str]:
    """What makes ranks slow, one line each, the worst first, at most three; nothing if there is nothing to say."""
    found: Sequence[tuple[str, float]] = sorted(spent["parts"].items(), key=lambda it: -it[1])
    return [
        f"{share * 100:.0f} % of the time {_CAUSES[part].what}, at {spent['lines'][part]}; "
        + _CAUSES[part].helps.format(percent=round(share * 100))
        for part, share in found
        if part in _CAUSES and share >= _CAUSES[part].least
    ][:_MOST]


def in_words(spent: Spent) -> str:
    """`loading 62 %, backward 20 %, …`: what is at least a hundredth."""
    return ", ".join(f"{part} {share * 100:.0f} %" for part, share in spent["parts"].items() if share >= 0.01)
