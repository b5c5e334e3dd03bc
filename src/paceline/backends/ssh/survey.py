"""What several hosts have, how they reach each other, and what would go wrong with a job on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.check.findings import host_findings, unreachable
from paceline.backends.check.report import MOST_FOR_PAIRS, Finding, HostReport, Link, Survey, errors_first
from paceline.node.machine.software import FRAMEWORKS

from .preflight import Preflight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backends.base import ProgressReporter
    from paceline.backends.check.report import Clock
    from paceline.backends.remote.connection import Host
    from paceline.contract.facts import PreflightFacts, RouteFacts
    from paceline.contract.messages import Route

    from .target import Hosts

_READINGS = 5  # of a clock


def survey(target: Hosts, progress: ProgressReporter) -> Survey:
    """Check hosts, and test and measure the routes between them; starts no job."""
    progress("asking the hosts", 0, None)
    hosts = target.all
    with Preflight(target) as preflight:
        for _ in range(_READINGS - 1):
            preflight.read_clocks()
        answers, clocks = dict(preflight.answers), dict(preflight.clocks)
        broken = preflight.broken(hosts)
        links = {pair: Link(pair[0].name, pair[1].name, why) for pair, why in broken.items()}
        links.update(_measure(preflight, list(answers), links, progress))
        found = [unreachable(host.name, error) for host, error in preflight.failed.items()]
        found += preflight.routes(broken)
    by_name = {host.name: answer for host, answer in answers.items()}
    found += host_findings(by_name, {host.name: clock for host, clock in clocks.items()})
    found += _without_framework(by_name)
    order = {host: number for number, host in enumerate(hosts)}
    return Survey(
        [_report(host, answers.get(host), clocks.get(host)) for host in hosts],
        [links[pair] for pair in sorted(links, key=lambda pair: (order[pair[0]], order[pair[1]]))],
        errors_first(found),
    )


def _report(host: Host, answer: PreflightFacts | None, clock: Clock | None) -> HostReport:
    if answer is None:
        return HostReport(host.name)
    return HostReport(
        host.name, answer["address"], clock, answer["python"], answer["packages"], answer["devices"], answer["cores"],
        answer["memory"], answer["disks"],
    )  # fmt: skip


def _measure(
    preflight: Preflight, hosts: list[Host], known: Mapping[tuple[Host, Host], Link], progress: ProgressReporter
) -> dict[tuple[Host, Host], Link]:
    """Latency and bandwidth of the routes that work."""
    turns = [[pair for pair in turn if pair not in known] for turn in rounds(hosts)]
    found = {}
    for number, turn in enumerate(turns):
        progress("measuring the network", number, None)
        values: dict[tuple[Host, Host], RouteFacts] = {pair: {} for pair in turn}
        for do in ("latency", "bandwidth"):  # one after the other on all hosts: what is sent would delay messages
            orders: dict[Host, Route] = {source: {"do": do, "peer": preflight.peers[target]} for source, target in turn}
            answered = preflight.ask(orders)
            for pair in turn:
                values[pair].update(answered.get(pair[0], {}))
        for (source, target), value in values.items():
            seconds, speed = value.get("seconds"), value.get("bandwidth")
            found[source, target] = Link(
                source.name,
                target.name,
                value.get("problem"),
                None if seconds is None else round(seconds * 1e3, 4),
                None if speed is None else round(speed * 8 / 1e6, 2),
            )
    return found


def rounds(hosts: Sequence[Host]) -> list[list[tuple[Host, Host]]]:
    """The pairs to measure, in rounds in which each host has one partner; of many hosts, each with the next only."""
    if len(hosts) > MOST_FOR_PAIRS:
        ring = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
        last = [ring.pop()] if len(ring) % 2 else []
        return [turn for turn in (ring[::2], ring[1::2], last) if turn]
    table: list[Host | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    turns = []
    for _ in range(len(table) - 1):  # round robin: all but the first move on by one position
        half = len(table) // 2
        pairs = [(a, b) for a, b in zip(table[:half], table[: half - 1 : -1], strict=True) if a and b]
        turns += [pairs, [(b, a) for a, b in pairs]]
        table.insert(1, table.pop())
    return [turn for turn in turns if turn]


def _without_framework(answers: Mapping[str, PreflightFacts]) -> list[Finding]:
    found = []
    for name, answer in answers.items():
        if not any(answer["packages"][framework] for framework in FRAMEWORKS):
            python = answer["python"]["executable"]
            what = f"{name}: {python} has no framework: none of {', '.join(FRAMEWORKS)}"
            do = (
                f"install one there, for example: {python} -m pip install torch, or name another python in the settings"
            )
            found.append(Finding("warning", name, what, do))
    return found
