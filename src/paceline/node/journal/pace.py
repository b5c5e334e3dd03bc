"""Which node keeps the ranks of the others waiting: a pure function of what each node knows of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.stands import Pace

LEAST_DIFFERENCE = 0.2  # of the shares of the time in which ranks wait for each other


def across(nodes: Sequence[Pace]) -> list[str]:
    """What makes the ranks of one node slower than those of the others, in a line; nothing if nothing does."""
    if len(nodes) < 2:
        return []
    mine = min(nodes, key=lambda it: it["exchange"])
    others = [it for it in nodes if it is not mine]
    waits = sum(it["others"] * it["ranks"] for it in others) / sum(it["ranks"] for it in others)
    if waits - mine["exchange"] < LEAST_DIFFERENCE or mine["is_named"]:
        return []
    return [
        f"{waits * 100:.0f} % of the time ranks on other nodes wait for those on {mine['host']}, of which rank "
        f"{mine['rank']} is at {mine['line']} ({mine['part']}) when it does not wait; as fast as the others they would "
        f"save about {(waits - mine['exchange']) * 100:.0f} % of the time; look at this host: {mine['seen']}"
    ]
