"""`paceline check`: what this machine has, or hosts, and what would go wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from paceline.backends.base import Checks, Installs, RunsImages, able
from paceline.cli.flags.option import Option, SectionedCommand
from paceline.cli.flags.where import backend, where_options
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.tables import Column, bold, show
from paceline.job.quantities import show_duration, show_size
from paceline.job.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline.backends.base import EnvironmentLook, ImageLook
    from paceline.backends.check.inspect import Inspection
    from paceline.backends.check.report import HostReport, Link, Survey

_COLOURS = {"error": "red", "warning": "yellow"}


def _check(output: str, environment: str | None, image: str | None) -> int:
    """Say what this machine, hosts or a cluster have, and what would go wrong.

    Imports no framework. Only on Slurm it runs a short job, which tries the machines and leaves nothing behind. The
    exit code is 1 when there is an error, that is, when no run here can work, or not on every host; warnings leave it
    at 0.
    """
    if environment is not None:
        return _look(environment, output)
    if image is not None:
        return _look_for(image, output)
    with ProgressLine() as progress:
        report = able(backend(), Checks).check(progress)
    from paceline.backends.check.inspect import Inspected
    from paceline.backends.check.report import Report, Survey

    if output == "json":
        click.echo(json.dumps(report.to_dict() if isinstance(report, Inspected) else asdict(report), indent=2))
    elif isinstance(report, Survey):
        _show_survey(report)
    else:
        lines = _sections(_of_machine(report.seen) if isinstance(report, Inspected) else report.sections)
        lines += _found([(it.level, f"{it.where} {it.what}; {it.do}") for it in report.findings])
        if isinstance(report, Report) and report.remedy:
            lines += ["", bold(report.remedy_use), report.remedy]
        click.echo("\n".join(lines))
    return int(any(finding.level == "error" for finding in report.findings))


def _look(source: str, output: str) -> int:
    """Say what would be installed for jobs with an environment."""
    looks = able(backend(), Installs).installer().look(source)
    columns: list[Column[EnvironmentLook]] = [
        Column("HOST", lambda it: it.host),
        Column("PYTHON", lambda it: it.python),
        Column("INSTALLED", lambda it: "no" if it.origin else "yes"),
        Column("BY", lambda it: it.builder),
        Column("FROM", lambda it: it.origin or None),
        Column("SIZE", lambda it: None if it.bytes is None else show_size(it.bytes)),
        Column("TOOK", lambda it: None if it.seconds is None else show_duration(it.seconds)),
    ]
    show(looks, columns, output, lambda it: it._asdict())
    return 0


def _look_for(image: str, output: str) -> int:
    """Say what would run an image; the exit code is 1 if nothing can on some machine."""
    looks = able(backend(), RunsImages).images(image)
    columns: list[Column[ImageLook]] = [
        Column("HOST", lambda it: it.host),
        Column("BY", lambda it: it.program or None),
        Column("IMAGE", lambda it: None if it.problem else "there" if it.is_there else "to be pulled"),
        Column("PROBLEM", lambda it: it.problem or None),
    ]
    show(looks, columns, output, lambda it: it._asdict())
    return int(any(it.problem for it in looks))


def _sections(sections: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """The tables, a blank line after each."""
    width = max((len(label) for rows in sections.values() for label, _ in rows), default=0)
    lines = []
    for title, rows in sections.items():
        lines += [bold(title), *(f"  {label:{width}}  {text}" for label, text in rows), ""]
    return lines


def _found(found: Iterable[tuple[str, str]]) -> list[str]:
    """What would go wrong, one line per problem, each given with its level."""
    lines = [f"  {click.style(f'{level:7}', fg=_COLOURS[level])}  {printable(text)}" for level, text in found]
    return [bold("What would go wrong"), *(lines or ["  nothing that paceline knows of"])]


# -- this machine ------------------------------------------------------------------------------------------------------


def _of_machine(seen: Inspection) -> dict[str, list[tuple[str, str]]]:
    memory = f"{show_size(seen.memory.total)}, {show_size(seen.memory.available)} available"
    if seen.memory.limit is not None:
        memory += f", limited to {show_size(seen.memory.limit)}"
    cores = f"{seen.cores.usable} of {seen.cores.present} usable"
    if seen.cores.quota is not None:
        cores += f", CPU quota {seen.cores.quota:g}"
    return {
        "Python": [
            ("version", seen.python.version),
            ("executable", seen.python.executable),
            ("environment", seen.python.environment or "none"),
            ("paceline", seen.paceline),
        ],
        "Frameworks": _packages(seen),
        "Devices": _devices(seen),
        "Cores and memory": [("cores", cores), ("memory", memory), *_disks(seen)],
        "Network": _network(seen),
        "Limits": [
            ("open files", _limit(seen.limits.open_files)),
            ("processes", _limit(seen.limits.processes)),
            ("core dumps", "on" if seen.limits.core_dumps else "off"),
        ],
    }


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
        rate = interface.speed
        speed = [] if rate is None else [f"{rate / 1000:g} Gbit/s" if rate >= 1000 else f"{rate} Mbit/s"]
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


def _limit(number: int | None) -> str:
    return "no limit" if number is None else str(number)


# -- hosts -------------------------------------------------------------------------------------------------------------


def _show_survey(seen: Survey) -> None:
    """Show what hosts have, how they reach each other, and what would go wrong there."""
    from paceline.backends.check.findings import grouped, line

    click.echo(bold("Hosts"))
    _show(seen.hosts, _host_columns())
    if seen.links:
        _show_links(seen)
    about = {level: [(it.where, line(it)) for it in seen.findings if it.level == level] for level in _COLOURS}
    click.echo("\n".join(["", *_found((level, text) for level in _COLOURS for text in grouped(about[level]))]))


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

    def frameworks(host: HostReport) -> str | None:
        found = {name: package for name, package in (host.packages or {}).items() if package and name != "numpy"}
        return ", ".join(f"{name} {package['version'] or ''}".rstrip() for name, package in found.items()) or None

    def gpus(host: HostReport) -> str | None:
        if host.devices is None:
            return None
        names = [gpu["name"] for gpu in (*host.devices["nvidia"], *host.devices["amd"])]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"

    def clock(host: HostReport) -> str | None:
        if host.clock is None:
            return None
        return f"{host.clock.offset:+.3f} s ± {host.clock.uncertainty:.3f}"

    return [
        Column("HOST", lambda host: host.name),
        Column("ADDRESS", lambda host: host.address),
        Column("PYTHON", lambda host: host.python and host.python["version"]),
        Column("FRAMEWORKS", frameworks),
        Column("GPUS", gpus),
        Column("CORES", cores),
        Column("MEMORY", memory),
        Column("DISK", disk),
        Column("CLOCK", clock),
    ]


def _show_links(seen: Survey) -> None:
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


check = SectionedCommand(
    "check",
    callback=_check,
    params=[
        *where_options(),
        Option(
            ["--environment"],
            metavar="SOURCE",
            help="Say instead what would be installed on each machine for jobs with this --environment.",
        ),
        Option(
            ["--image"],
            metavar="IMAGE",
            help="Say instead what would run this --image on each host, and whether the image is there.",
        ),
        Option(
            ["-o", "--output"],
            section="Output",
            type=click.Choice(["table", "json"]),
            default="table",
            help="json: for programs, with stable keys.  [default: table]",
        ),
    ],
)
