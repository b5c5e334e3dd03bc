"""`paceline check`: what this machine has, or hosts, and what would go wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from paceline.backends.base import Checks, able
from paceline.cli.flags.option import Option, SectionedCommand
from paceline.cli.flags.where import backend, where_options
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.tables import bold
from paceline.job.quantities import show_size
from paceline.job.text import printable

if TYPE_CHECKING:
    from paceline.backends.check.inspect import Inspection
    from paceline.backends.check.report import Finding, Report

    Section = tuple[str, list[tuple[str, str]]]


def _check(output: str) -> int:
    """Say what this machine, hosts or a cluster have, and what would go wrong.

    Imports no framework. Only on Slurm it runs a short job, which tries the nodes and leaves nothing behind. The exit
    code is 1 when there is an error, that is, when no run here can work, or not on every host; warnings leave it at 0.
    """
    with ProgressLine() as progress:
        report = able(backend(), Checks).check(progress)
    from paceline.backends.check.inspect import Inspected
    from paceline.backends.check.report import Report

    if isinstance(report, Report):
        return _show_report(report, output)
    if not isinstance(report, Inspected):
        from .check_hosts import show_survey

        return show_survey(report, output)
    seen, found = report.seen, report.findings
    if output == "json":
        click.echo(
            json.dumps(
                {**asdict(seen), "devices": seen.devices.to_dict(), "findings": [asdict(finding) for finding in found]},
                indent=2,
            )
        )
    else:
        click.echo("\n".join([*_sections(seen), *_found(found)]))
    return int(any(finding.level == "error" for finding in found))


def _show_report(report: Report, output: str) -> int:
    """Show what a system that runs jobs has; returns the exit code."""
    if output == "json":
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        width = max((len(label) for rows in report.sections.values() for label, _ in rows), default=0)
        for title, rows in report.sections.items():
            click.echo("\n".join([bold(title), *(f"  {label:{width}}  {text}" for label, text in rows), ""]))
        click.echo("\n".join(_found(list(report.findings))))
        if report.remedy:
            click.echo(f"\n{bold(report.remedy_use)}\n{report.remedy}")
    return int(any(finding.level == "error" for finding in report.findings))


def _sections(seen: Inspection) -> list[str]:
    """The tables, a blank line after each."""
    memory = f"{show_size(seen.memory.total)}, {show_size(seen.memory.available)} available"
    if seen.memory.limit is not None:
        memory += f", limited to {show_size(seen.memory.limit)}"
    cores = f"{seen.cores.usable} of {seen.cores.present} usable"
    if seen.cores.quota is not None:
        cores += f", CPU quota {seen.cores.quota:g}"
    sections: list[Section] = [
        (
            "Python",
            [
                ("version", seen.python.version),
                ("executable", seen.python.executable),
                ("environment", seen.python.environment or "none"),
                ("paceline", seen.paceline),
            ],
        ),
        ("Frameworks", _packages(seen)),
        ("Devices", _devices(seen)),
        ("Cores and memory", [("cores", cores), ("memory", memory), *_disks(seen)]),
        ("Network", _network(seen)),
        (
            "Limits",
            [
                ("open files", _limit(seen.limits.open_files)),
                ("processes", _limit(seen.limits.processes)),
                ("core dumps", "on" if seen.limits.core_dumps else "off"),
            ],
        ),
    ]
    width = max(len(label) for _, rows in sections for label, _ in rows)
    lines = []
    for title, rows in sections:
        lines += [bold(title), *(f"  {label:{width}}  {text}" for label, text in rows), ""]
    return lines


def _packages(seen: Inspection) -> list[tuple[str, str]]:
    rows = []
    for name, package in seen.packages.items():
        if package is None:
            rows.append((name, "not installed"))
        else:
            version = package.version or "version unknown"
            rows.append((name, f"{version}, {package.build} build" if package.build else version))
    return rows


def _devices(seen: Inspection) -> list[tuple[str, str]]:
    rows = []
    for gpu in (*seen.devices.nvidia, *seen.devices.amd):
        memory = f", {show_size(gpu.memory)}" if gpu.memory else ""
        used = f", {show_size(gpu.memory_used)} in use" if gpu.memory_used is not None else ""
        rows.append((f"GPU {gpu.index}", f"{gpu.name}{memory}{used}"))
    if not rows:
        count = seen.devices.nvidia_on_bus
        rows.append(("GPUs", f"{count} of NVIDIA, without a driver" if count else "none"))
    if seen.devices.driver is not None:
        rows.append(("NVIDIA driver", seen.devices.driver))
    return rows + [("variable", f"{name}={value}") for name, value in seen.variables.items()]


def _disks(seen: Inspection) -> list[tuple[str, str]]:
    rows = []
    for label, space in (("/dev/shm", seen.shared_memory), ("jobs' folder", seen.jobs)):
        if space is None:
            rows.append((label, "none"))
        else:
            where = "" if space.path == label else f"{space.path}: "
            rows.append((label, f"{where}{show_size(space.free)} free of {show_size(space.total)}"))
    return rows


def _network(seen: Inspection) -> list[tuple[str, str]]:
    rows = []
    for interface in seen.interfaces:
        state = {True: "up", False: "down", None: "state unknown"}[interface.up]
        speed = [_speed(interface.speed)] if interface.speed is not None else []
        addresses = [interface.ipv4] if interface.ipv4 else []
        rows.append((interface.name, ", ".join([state, *addresses, *interface.ipv6, *speed])))
    resolved = ", ".join(seen.host.addresses) or f"does not resolve: {seen.host.problem}"
    rows.append(("host name", f"{seen.host.name}: {resolved}"))
    where = " ".join(part for part in (seen.gloo.interface, seen.gloo.address) if part) or "nothing"
    rows.append(("gloo takes", f"{where}: {seen.gloo.why}"))
    if seen.ports is not None:
        ports = f"TCP {seen.ports.first} to {seen.ports.last}"
        rows.append(("ports", f"{ports}: torch's have no password; close them to all but the machines of a job"))
    return rows


def _speed(megabits: int) -> str:
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"


def _limit(number: int | None) -> str:
    return "no limit" if number is None else str(number)


def _found(found: list[Finding]) -> list[str]:
    """What would go wrong, one line per problem."""
    if not found:
        return [bold("What would go wrong"), "  nothing that paceline knows of"]
    colours = {"error": "red", "warning": "yellow"}
    lines = [bold("What would go wrong")]
    for finding in found:
        level = click.style(f"{finding.level:7}", fg=colours[finding.level])
        lines.append(f"  {level}  " + printable(f"{finding.where} {finding.what}; {finding.do}"))
    return lines


check = SectionedCommand(
    "check",
    callback=_check,
    params=[
        *where_options(),
        Option(
            ["-o", "--output"],
            section="Output",
            type=click.Choice(["table", "json"]),
            default="table",
            help="json: for programs, with stable keys.  [default: table]",
        ),
    ],
)
