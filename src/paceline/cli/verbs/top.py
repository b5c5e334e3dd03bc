"""`paceline top`: what jobs and machines use now."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from paceline.backends.base import Metered, able
from paceline.cli.flags.options import SectionedCommand
from paceline.cli.flags.selection import all_jobs, known, warn
from paceline.cli.flags.where import backend, remember_jobs, where_options
from paceline.cli.terminal.live import once_or_live, watch_option
from paceline.cli.terminal.tables import STATE_COLOURS, Column, output_option, show

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.contract.records import GpuRecord, GpuUseRecord, SyncRecord
    from paceline.job.job import Job, Node, Usage

_OF_EXCHANGE = ("SYNC", "SENT/STEP", "NETWORK/STEP")  # columns that are shown if some job exchanges gradients
_Number = TypeVar("_Number", int, float)


class _Row(NamedTuple):
    job: Job
    usage: Usage | None  # None where it does not run


@click.group()
def top() -> None:
    """Show what jobs and machines use now."""


def _job(jobs: tuple[str, ...], watch: bool, output: str) -> None:
    """Show what JOBs use now: devices, cores, memory, the use and memory of their GPUs, and the network in each step.

    Without JOB, show all jobs that have not ended. With -w, continue until the named jobs have ended.
    """
    here = able(backend(), Metered)

    def look() -> bool:
        shown = known(jobs) if jobs else [job for job in all_jobs().jobs if not job.is_over]
        usage = here.usage([job.name for job in shown if not job.is_over], warn)
        exchanges = any(_sync(job) for job in shown)
        columns = [column for column in _job_columns() if exchanges or column.title not in _OF_EXCHANGE]
        show([_Row(job, usage.get(job.name)) for job in shown], columns, output, _job_to_dict)
        if not shown and output in ("table", "wide") and not watch:
            click.echo("paceline: no job runs; see those that have ended with: paceline list", err=True)
        return not jobs or not all(job.is_over for job in shown)

    once_or_live(look, watch, "paceline top job")


def _node(watch: bool, output: str) -> None:
    """Show what machines have and what is in use: devices and the jobs that use them, cores, memory, disk."""
    here = able(backend(), Metered)

    def look() -> bool:
        nodes = here.nodes(warn)
        has_states = any(node.state for node in nodes)
        has = {"STATE": has_states, "PARTITIONS": any(node.partitions for node in nodes)}
        columns = [column for column in _node_columns() if has.get(column.title, True)]
        show(nodes, columns, output, asdict)
        return True

    once_or_live(look, watch, "paceline top node")


# -- jobs --------------------------------------------------------------------------------------------------------------


def _job_columns() -> list[Column[_Row]]:
    from paceline.job.quantities import show_size

    def size(number: int | None) -> str | None:
        return None if number is None else show_size(number)

    return [
        Column("JOB", lambda row: row.job.name),
        Column("STATE", lambda row: row.job.state, colours=STATE_COLOURS),
        Column("DEVICES", lambda row: _asked(row.job)),
        Column("ALLOCATED", lambda row: _allocated(row.job)),
        Column("CPU", lambda row: f"{row.usage.cpu:.1f}" if row.usage else None),
        Column("MEMORY", lambda row: size(row.usage.memory) if row.usage else None),
        Column("GPU", lambda row: _percent(_sum(gpu["use"] for gpu in _gpus(row)))),
        Column("GPU MEMORY", lambda row: size(_sum(gpu["memory"] for gpu in _gpus(row)))),
        Column("SYNC", lambda row: sync["method"] if (sync := _sync(row.job)) else None),
        Column("SENT/STEP", lambda row: size(sync["sent_bytes"]) if (sync := _sync(row.job)) else None),
        Column("NETWORK/STEP", lambda row: _waited(_sync(row.job))),
        Column("RANKS", lambda row: str(row.job.ranks), wide=True),
        Column("PROCESSES", lambda row: str(row.usage.processes) if row.usage else None, wide=True),
        Column("BY DEVICE", lambda row: _by_device(row.usage), wide=True, is_text=True),
    ]


def _sync(job: Job) -> SyncRecord | None:
    """How its ranks exchange gradients; None if the library does not report it."""
    return None if job.progress is None else job.progress.get("sync")


def _waited(sync: SyncRecord | None) -> str | None:
    """How long a step waits for the network, and how much of the step that is."""
    if not sync or not sync["step_seconds"]:
        return None
    share = 100 * sync["sync_seconds"] / sync["step_seconds"]
    return f"{1000 * sync['sync_seconds']:.3g} ms ({_percent(share)})"


def _asked(job: Job) -> str | None:
    asked = job.devices_asked
    return None if asked is None else str(asked) if isinstance(asked, int) else ",".join(asked)


def _allocated(job: Job) -> str | None:
    return f"{len(job.devices)} ({','.join(job.devices)})" if job.devices else None


def _gpus(row: _Row) -> tuple[GpuUseRecord, ...]:
    return row.usage.gpus if row.usage else ()


def _sum(values: Iterable[_Number | None]) -> _Number | None:
    """The sum of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _percent(number: float | None) -> str | None:
    return None if number is None else f"{number:.0f} %"


def _by_device(usage: Usage | None) -> str | None:
    from paceline.job.quantities import show_size

    def figures(gpu: GpuUseRecord) -> str:
        memory = None if gpu["memory"] is None else show_size(gpu["memory"])
        return " ".join(part for part in (_percent(gpu["use"]), memory) if part) or "unknown"

    return ", ".join(f"{gpu['device']}: {figures(gpu)}" for gpu in (usage.gpus if usage else ())) or None


def _job_to_dict(row: _Row) -> dict[str, Any]:
    job, usage = row
    return {
        "name": job.name,
        "state": job.state,
        "ranks": job.ranks,
        "devices_asked": job.devices_asked,
        "devices": job.devices,
        "processes": usage and usage.processes,
        "cpu": usage and usage.cpu,
        "memory": usage and usage.memory,
        "gpus": usage and usage.gpus,
        "sync": _sync(job) or None,
    }


# -- machines ----------------------------------------------------------------------------------------------------------


def _node_columns() -> list[Column[Node]]:
    from paceline.job.quantities import show_size

    def part(used: int, size: int) -> str:
        return f"{show_size(used)} of {show_size(size)}"

    return [
        Column("NODE", lambda node: node.name),
        Column("STATE", lambda node: node.state or None),
        Column("PARTITIONS", lambda node: ",".join(node.partitions) or None, is_text=True),
        Column("DEVICES", lambda node: str(len(node.devices))),
        Column("ALLOCATED", lambda node: str(len(node.allocated))),
        Column("CPU", lambda node: f"{node.load:.1f} of {node.cores:g}"),
        Column("MEMORY", lambda node: part(node.memory_used, node.memory)),
        Column("DISK", lambda node: part(node.disk_used, node.disk) if node.disk else None),
        Column(
            "JOBS",
            lambda node: ", ".join(f"{d}: {'+'.join(jobs)}" for d, jobs in node.allocated.items()) or None,
            is_text=True,
        ),
        Column("GPUS", lambda node: ", ".join(map(_gpu, node.gpus)) or None, wide=True, is_text=True),
    ]


def _gpu(gpu: GpuRecord) -> str:
    from paceline.job.quantities import show_size

    parts = [_percent(gpu["use"])]
    if gpu["memory"] is not None and gpu["memory_used"] is not None:
        parts.append(f"{show_size(gpu['memory_used'])} of {show_size(gpu['memory'])}")
    parts.append(None if gpu["temperature"] is None else f"{gpu['temperature']:.0f} °C")
    parts.append(None if gpu["power"] is None else f"{gpu['power']:.0f} W")
    return f"{gpu['index']}: {' '.join(part for part in parts if part) or 'unknown'}"


top.add_command(
    SectionedCommand(
        "job",
        callback=_job,
        help=_job.__doc__,
        params=[
            click.Argument(["jobs"], nargs=-1, metavar="[JOB]…", callback=remember_jobs),
            *where_options(),
            watch_option(),
            output_option(),
        ],
    )
)
top.add_command(
    SectionedCommand(
        "node",
        callback=_node,
        help=_node.__doc__,
        params=[*where_options(), watch_option(), output_option()],
    )
)
