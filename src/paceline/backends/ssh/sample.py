"""Which routes between hosts are tried, and which hosts can work together.

Of a few hosts all routes are tried. Of many, each host connects to the next ones at distances 1, 2, 4, …, and all
connect to the first one, where the nodes of a job meet: N·(log₂ N + 1) connections instead of N·(N - 1). This finds

- each host that no other reaches, or that reaches no other, such as one with a wrong interface, by several others;
- each division of the hosts into groups that do not reach each other, since the distance 1 makes a ring of all.

It does not find every single pair that is broken while both hosts of it reach the others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_ALL = 16  # hosts of which all routes are tried

Host = TypeVar("Host")


def tries_all(count: int) -> bool:
    """Whether all routes between so many hosts are tried."""
    return count <= _ALL


def peers(hosts: Sequence[Host]) -> dict[Host, list[Host]]:
    """Host → those that it is to connect to."""
    count = len(hosts)
    if tries_all(count):
        return {host: [other for other in hosts if other != host] for host in hosts}
    distances = [1 << bit for bit in range(count.bit_length()) if 1 << bit < count]
    return {
        host: [hosts[it] for it in dict.fromkeys([0, *((place + far) % count for far in distances)]) if it != place]
        for place, host in enumerate(hosts)
    }


def together(
    hosts: Sequence[Host], tried: Mapping[Host, Collection[Host]], broken: Collection[tuple[Host, Host]]
) -> list[Host]:
    """Hosts that reach each other, as far as tried.

    These are of the largest group that broken routes do not divide; of it the host with the largest share of broken
    routes, from it or to it, is removed until no route is broken.
    """
    remaining, bad = dict.fromkeys(_largest_group(hosts, tried, broken)), set(broken)
    while bad := {pair for pair in bad if pair[0] in remaining and pair[1] in remaining}:
        routes = [(source, target) for source in remaining for target in tried.get(source, ()) if target in remaining]
        share = dict.fromkeys(remaining, 0.0)
        for end in (0, 1):
            of_all, of_bad = Counter(pair[end] for pair in routes), Counter(pair[end] for pair in bad)
            share = {host: max(share[host], of_bad[host] / max(1, of_all[host])) for host in remaining}
        del remaining[max(reversed(remaining), key=share.__getitem__)]
    return list(remaining)


def _largest_group(
    hosts: Sequence[Host], tried: Mapping[Host, Collection[Host]], broken: Collection[tuple[Host, Host]]
) -> list[Host]:
    """The largest group of hosts that are connected by routes that work in all directions in which they were tried."""
    works: dict[Host, set[Host]] = {host: set() for host in hosts}
    for source in hosts:
        for target in tried.get(source, ()):
            if target in works and (source, target) not in broken and (target, source) not in broken:
                works[source].add(target)
                works[target].add(source)
    groups: list[set[Host]] = []
    left = dict.fromkeys(hosts)
    while left:
        group, edge = set(), [next(iter(left))]
        while edge:
            host = edge.pop()
            if host in left:
                del left[host]
                group.add(host)
                edge += works[host]
        groups.append(group)
    largest = max(groups, key=len, default=set())
    return [host for host in hosts if host in largest]
