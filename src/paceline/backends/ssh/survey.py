"""What several hosts have, how they reach each other, and what would go wrong with a job on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.backends.check.findings import clock_finding, differing, disk_findings, minor, unreachable
from paceline.backends.check.report import MOST_FOR_PAIRS, Finding, HostReport, Link, Survey
from paceline.node.machine.software import FRAMEWORKS

from .preflight import Preflight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backends.base import ProgressReporter
    from paceline.backends.check.report import Clock
    from paceline.backends.remote.connection import Answer, Host

    from .target import Hosts

_READINGS = 5  # of a clock


def survey(target: Hosts, progress: ProgressReporter) -> Survey:
    """Check hosts, and test and measure the routes between them; starts no job."""
    progress("asking the hosts", 0, None)
    hosts = target.all
    with Preflight(target, lambda host: {"job": None}) as preflight:
        for _ in range(_READINGS - 1):
            preflight.read_clocks()
        answers, clocks = dict(preflight.answers), dict(preflight.clocks)
        broken = preflight.broken(hosts)
        links = {pair: Link(pair[0].name, pair[1].name, why) for pair, why in broken.items()}
        links.update(_measure(preflight, list(answers), links, progress))
        found = [unreachable(host.name, error) for host, error in preflight.failed.items()]
        found += preflight.routes(broken)
    found += _findings(answers, clocks)
    order = {host: number for number, host in enumerate(hosts)}
    return Survey(
        [_report(host, answers.get(host), clocks.get(host)) for host in hosts],
        [links[pair] for pair in sorted(links, key=lambda pair: (order[pair[0]], order[pair[1]]))],
        sorted(found, key=lambda finding: finding.level != "error"),
    )


def _report(host: Host, answer: Answer | None, clock: Clock | None) -> HostReport:
    if answer is None:
        return HostReport(host.name)
    keys = ("address", "python", "packages", "devices", "cores", "memory", "disks")
    return HostReport(host.name, clock=clock, **{key: answer[key] for key in keys})


def _measure(
    preflight: Preflight, hosts: list[Host], known: Mapping[tuple[Host, Host], Link], progress: ProgressReporter
) -> dict[tuple[Host, Host], Link]:
    """Latency and bandwidth of the routes that work."""
    turns = [[pair for pair in turn if pair not in known] for turn in rounds(hosts)]
    found = {}
    for number, turn in enumerate(turns):
        progress("measuring the network", number, None)
        values: dict[tuple[Host, Host], dict[str, Any]] = {pair: {} for pair in turn}
        for do in ("latency", "bandwidth"):  # one after the other on all hosts: what is sent would delay messages
            orders = {source: {"do": do, "peer": preflight.peers[target]} for source, target in turn}
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


def _findings(answers: Mapping[Host, Answer], clocks: Mapping[Host, Clock]) -> list[Finding]:
    """What would go wrong on hosts that answer."""
    found = []
    for host, answer in answers.items():
        found += disk_findings(host.name, answer["disks"])
        found += clock_finding(host.name, clocks[host])
        if not any(answer["packages"][name] for name in FRAMEWORKS):
            python = answer["python"]["executable"]
            what = f"{host.name}: {python} has no framework: none of {', '.join(FRAMEWORKS)}"
            do = (
                f"install one there, for example: {python} -m pip install torch, or name another python in the settings"
            )
            found.append(Finding("warning", host.name, what, do))
    found += differing("Python", {host.name: minor(answer["python"]["version"]) for host, answer in answers.items()})
    for name in FRAMEWORKS:
        versions = {host.name: answer["packages"][name] for host, answer in answers.items()}
        if any(versions.values()):
            found += differing(name, {host: it and (it["version"] or "unknown") for host, it in versions.items()})
    return found
