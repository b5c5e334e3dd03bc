"""`paceline check --on TARGET`: what hosts have, how they reach each other, and what would go wrong there."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.terminal.tables import Column, bold, show
from paceline.job.quantities import show_size
from paceline.job.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backends.check.report import HostReport, Link, Survey

_COLOURS = {"error": "red", "warning": "yellow"}


def show_survey(seen: Survey, output: str) -> int:
    """Print it; the exit code is 1 where something keeps a job from running on one of the hosts."""
    if output == "json":
        click.echo(json.dumps(asdict(seen), indent=2))
    else:
        _print(seen)
    return int(any(finding.level == "error" for finding in seen.findings))


def _print(seen: Survey) -> None:
    from paceline.backends.check.findings import grouped, line

    click.echo(bold("Hosts"))
    _show(seen.hosts, _host_columns())
    if seen.links:
        _print_links(seen)
    click.echo(f"\n{bold('What would go wrong')}")
    for level, colour in _COLOURS.items():
        about = [(finding.where, line(finding)) for finding in seen.findings if finding.level == level]
        for text in grouped(about):
            click.echo(f"  {click.style(f'{level:7}', fg=colour)}  {printable(text)}")
    if not seen.findings:
        click.echo("  nothing that paceline knows of")


def _show(rows: Sequence[Any], columns: Sequence[Column[Any]]) -> None:
    show(rows, columns, "table", asdict)


def _host_columns() -> list[Column[HostReport]]:
    def disk(host: HostReport) -> str | None:
        sizes = [show_size(disk["free"]) for disk in host.disks or () if "free" in disk]
        return f"{' and '.join(sizes)} free" if sizes else None

    def memory(host: HostReport) -> str | None:
        if host.memory is None:
            return None
        return show_size(min(host.memory["total"], host.memory["limit"] or host.memory["total"]))

    def cores(host: HostReport) -> str | None:
        return None if host.cores is None else f"{host.cores['quota'] or host.cores['usable']:g}"

    return [
        Column("HOST", lambda host: host.name),
        Column("ADDRESS", lambda host: host.address),
        Column("PYTHON", lambda host: host.python and host.python["version"]),
        Column("FRAMEWORKS", _frameworks),
        Column("GPUS", _gpus),
        Column("CORES", cores),
        Column("MEMORY", memory),
        Column("DISK", disk),
        Column("CLOCK", _clock),
    ]


def _frameworks(host: HostReport) -> str | None:
    found = {name: package for name, package in (host.packages or {}).items() if package and name != "numpy"}
    return ", ".join(f"{name} {package['version'] or ''}".rstrip() for name, package in found.items()) or None


def _gpus(host: HostReport) -> str | None:
    if host.devices is None:
        return None
    names = [gpu["name"] for gpu in (*host.devices["nvidia"], *host.devices["amd"])]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _clock(host: HostReport) -> str | None:
    if host.clock is None:
        return None
    return f"{host.clock.offset:+.3f} s ± {host.clock.uncertainty:.3f}"


def _print_links(seen: Survey) -> None:
    from paceline.backends.check.report import MOST_FOR_PAIRS

    measured = [link for link in seen.links if link.latency is not None]
    if len(seen.hosts) > MOST_FOR_PAIRS:
        click.echo(f"\n{bold('Network')} (of more than {MOST_FOR_PAIRS} hosts: from each to the next)")
        columns: list[Column[Link]] = [
            Column("FROM", lambda link: link.source),
            Column("TO", lambda link: link.target),
            Column("LATENCY", lambda link: None if link.latency is None else f"{_digits(link.latency)} ms"),
            Column("BANDWIDTH", lambda link: None if link.bandwidth is None else _speed(link.bandwidth)),
        ]
        _show(measured, columns)
        return
    by_pair = {(link.source, link.target): link for link in seen.links}
    click.echo(f"\n{bold('Latency')} (ms, there and back, from each row's host to each column's)")
    _matrix(seen, by_pair, lambda link: None if link.latency is None else _digits(link.latency))
    click.echo(f"\n{bold('Bandwidth')} (one connection)")
    _matrix(seen, by_pair, lambda link: None if link.bandwidth is None else _speed(link.bandwidth))


def _matrix(seen: Survey, links: dict[tuple[str, str], Link], text: Callable[[Link], str | None]) -> None:
    def cell(source: str, target: str) -> str | None:
        link = links.get((source, target))
        return None if link is None else "no route" if link.problem else text(link)

    names = [host.name for host in seen.hosts if host.address is not None]

    def column(target: str) -> Column[str]:
        return Column(target, lambda source: cell(source, target))

    _show(names, [Column("", lambda source: source), *map(column, names)])


def _digits(number: float) -> str:
    return f"{number:.2f}" if number < 10 else f"{number:.0f}"


def _speed(megabits: float) -> str:
    return f"{megabits / 1000:.1f} Gbit/s" if megabits >= 1000 else f"{megabits:.0f} Mbit/s"
