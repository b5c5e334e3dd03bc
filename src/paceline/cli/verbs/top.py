"""`paceline top`: what jobs and machines use now."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from paceline.backends.base import Metered, able
from paceline.backends.registry import HERE
from paceline.cli.flags.option import Option, SectionedCommand, output_option, watch_option
from paceline.cli.flags.selection import all_jobs, known, node_of
from paceline.cli.flags.where import OF_JOBS, backend, is_narrowed, where_options
from paceline.cli.terminal.live import once_or_live
from paceline.cli.terminal.tables import STATE_COLOURS, Column, if_known, show, show_newest
from paceline.cli.terminal.write import say, say_once
from paceline.job.errors import UserError
from paceline.job.quantities import show_instant, show_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.backends.base import Backend
    from paceline.contract.records import GpuRecord, GpuUseRecord, SyncRecord
    from paceline.job.job import Job, Node, Usage

_Number = TypeVar("_Number", int, float)


class _Row(NamedTuple):
    job: Job
    usage: Usage | None  # None where it does not run


class _Verbs(click.Group):
    """Says what shows one job: `top JOB` is what most people type first."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            raise UserError(f"top {name}: write paceline top job {name} for a job of that name, or paceline top node")
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs)
def top() -> None:
    """Show what jobs and machines use now."""


def _job(jobs: tuple[str, ...], every: bool, watch: bool, output: str) -> None:
    """Show what JOBs use now: devices, cores, memory, the use and memory of their GPUs, and the network in each step.

    Without JOB, show all jobs that have not ended. With -w, continue until the named jobs have ended.
    """

    if jobs or is_narrowed():  # else a target that cannot be measured is warned of, and its jobs are shown
        able(backend(), Metered)

    def look() -> bool:
        usage: dict[tuple[str, float], Usage] = {}

        def measure(there: Backend, found: list[Job]) -> None:
            running = [job for job in found if not job.is_over]
            try:
                used = able(there, Metered).usage([job.name for job in running], say_once)
            except UserError as error:
                say_once(str(error))
                return
            usage.update({(job.name, job.created): used[job.name] for job in running if job.name in used})

        if jobs:
            shown = known(jobs)
            measure(backend(), shown)
        else:
            shown = [job for job in all_jobs(repeats=watch, each=measure).jobs if every or not job.is_over]
        has_targets = any(job.backend != HERE for job in shown) and not jobs and not is_narrowed()
        columns = [column for column in _job_columns() if column.title != "TARGET" or has_targets]
        rows = [_Row(job, usage.get((job.name, job.created))) for job in shown]
        show_newest(rows, columns, output, _job_to_dict, watch=watch)
        if output in ("table", "wide"):
            if counts := _totals_of_jobs(shown):
                click.echo(counts)
            if not shown and not watch:
                hint = "no jobs; start one with: paceline submit SCRIPT" if every else "no job runs; see all with -A"
                say(hint)
        return not jobs or not all(job.is_over for job in shown)

    once_or_live(look, watch, "paceline top job")


def _totals_of_jobs(jobs: list[Job]) -> str | None:
    """How many devices they have requested, and have; None without any."""
    going = [job for job in jobs if not job.is_over]
    requested, allocated = sum(_requested(job) or 0 for job in going), sum(_allocated(job) or 0 for job in going)
    return f"devices: {requested} requested, {allocated} allocated" if requested or allocated else None


def _node(watch: bool, output: str) -> None:
    """Show what machines have and what is in use: devices and the jobs that use them, cores, memory, disk."""
    here = able(backend(), Metered)

    def look() -> bool:
        nodes = here.nodes(say_once)
        show(nodes, _node_columns(), output, asdict)
        has, taken = sum(node.device_count for node in nodes), sum(node.allocated_count for node in nodes)
        if has and output in ("table", "wide"):
            kinds = {"slots" if it.slots else "GPUs" if it.gpus or not it.devices else "devices"
                     for it in nodes if it.device_count}  # fmt: skip
            kind = kinds.pop() if len(kinds) == 1 else "devices"
            click.echo(f"{kind} allocated: {taken}/{has} ({100 * taken / has:.0f} %)")
        return True

    once_or_live(look, watch, "paceline top node")


# -- jobs --------------------------------------------------------------------------------------------------------------


def _job_columns() -> list[Column[_Row]]:
    return [
        Column("JOB", lambda row: row.job.name),
        Column("TARGET", lambda row: row.job.backend, keep=1),
        Column("STATE", lambda row: row.job.state, colours=STATE_COLOURS, keep=9),
        Column("REQUESTED", lambda row: if_known(str, _requested(row.job)), is_optional=True, keep=7),
        Column("ALLOCATED", lambda row: if_known(str, _allocated(row.job)), is_optional=True, keep=8),
        Column("NODE", lambda row: node_of(row.job), is_optional=True, keep=1),
        Column("GPU", lambda row: _percent(_sum(gpu["use"] for gpu in _gpus(row))), is_optional=True, keep=6),
        Column("GPU MEMORY", lambda row: if_known(show_size, _sum(gpu["memory"] for gpu in _gpus(row))),
               is_optional=True, keep=5),
        Column("CPU", lambda row: f"{row.usage.cpu:.1f}" if row.usage else None, is_optional=True, keep=4),
        Column("MEMORY", lambda row: show_size(row.usage.memory) if row.usage else None, is_optional=True, keep=3),
        Column("SYNC", lambda row: sync["method"] if (sync := _sync(row.job)) else None, is_optional=True),
        Column("SENT/STEP", lambda row: show_size(sync["sent_bytes"]) if (sync := _sync(row.job)) else None,
               is_optional=True),
        Column("NETWORK/STEP", lambda row: _waited(_sync(row.job)), is_optional=True, keep=2),
        Column("DEVICES", lambda row: ",".join(row.job.devices) or None, is_optional=True, wide=True),
        Column("RANKS", lambda row: str(row.job.ranks), wide=True),
        Column("PROCESSES", lambda row: str(row.usage.processes or "-") if row.usage else None, is_optional=True,
               wide=True),
        Column("BY DEVICE", lambda row: _by_device(row.usage), is_optional=True, wide=True, is_text=True),
    ]  # fmt: skip


def _sync(job: Job) -> SyncRecord | None:
    """How its ranks exchange gradients; None if the library does not report it."""
    return None if job.progress is None else job.progress.get("sync")


def _waited(sync: SyncRecord | None) -> str | None:
    """How long a step waits for the network, and how much of the step that is."""
    if not sync or not sync["step_seconds"]:
        return None
    share = 100 * sync["sync_seconds"] / sync["step_seconds"]
    return f"{show_instant(sync['sync_seconds'])} ({_percent(share)})"


def _requested(job: Job) -> int | None:
    """How many devices a job has asked for, on all nodes together; None if it did not say."""
    asked = job.devices_asked
    return None if asked is None else job.nodes * (asked if isinstance(asked, int) else len(asked))


def _allocated(job: Job) -> int | None:
    """How many devices a job has now; None if it has none."""
    if job.is_over:
        return None
    return len(job.devices) or job.allocated or None


def _gpus(row: _Row) -> tuple[GpuUseRecord, ...]:
    return row.usage.gpus if row.usage else ()


def _sum(values: Iterable[_Number | None]) -> _Number | None:
    """The sum of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _percent(number: float | None) -> str | None:
    return None if number is None else f"{number:.0f} %"


def _by_device(usage: Usage | None) -> str | None:
    def figures(gpu: GpuUseRecord) -> str:
        parts = (_percent(gpu["use"]), if_known(show_size, gpu["memory"]))
        return " ".join(filter(None, parts)) or "unknown"

    return ", ".join(f"{gpu['device']}: {figures(gpu)}" for gpu in (usage.gpus if usage else ())) or None


def _job_to_dict(row: _Row) -> dict[str, object]:
    job, usage = row
    return {
        "name": job.name,
        "target": job.backend,
        "state": job.state,
        "ranks": job.ranks,
        "devices_asked": job.devices_asked,
        "devices": job.devices,
        "allocated": _allocated(job) or 0,
        "processes": usage and usage.processes,
        "cpu": usage and usage.cpu,
        "memory": usage and usage.memory,
        "gpus": usage and usage.gpus,
        "sync": _sync(job) or None,
    }


# -- machines ----------------------------------------------------------------------------------------------------------


def _node_columns() -> list[Column[Node]]:
    def part(used: int, size: int) -> str:
        return f"{show_size(used)} of {show_size(size)}"

    return [
        Column("NODE", lambda node: node.name),
        Column("IP", lambda node: node.address or None, is_optional=True, keep=2),
        Column("ROLE", lambda node: ",".join(node.roles) or None, is_optional=True, keep=1),
        Column("STATE", lambda node: node.state or None, is_optional=True, wraps=True, least=16, keep=8),
        Column("PARTITIONS", lambda node: ",".join(node.partitions) or None, is_optional=True, is_text=True),
        Column("DEVICES", lambda node: str(node.device_count), keep=9),
        Column("ALLOCATED", lambda node: str(node.allocated_count), keep=9),
        Column("CPU", lambda node: f"{node.load:.1f} of {node.cores:g}" if node.cores else None, keep=6),
        Column("MEMORY", lambda node: part(node.memory_used, node.memory) if node.memory else None, keep=5),
        Column("DISK", lambda node: part(node.disk_used, node.disk) if node.disk else None, is_optional=True),
        Column("JOBS", _jobs_of, is_optional=True, wraps=True, least=20, keep=3),
        Column(
            "GPUS",
            lambda node: ", ".join(map(_gpu, node.gpus)) or None,
            is_optional=True,
            wide=True,
            wraps=True,
            least=40,
            keep=-1,
        ),
    ]


def _jobs_of(node: Node) -> str | None:
    """Which devices each job has, or how many where these have no names."""
    if not node.allocated:
        return ", ".join(f"{job}: {count}" for job, count in node.jobs.items()) or None
    devices = {job: [name for name, those in node.allocated.items() if job in those] for job in node.jobs}
    return ", ".join(f"{job} ({','.join(names)})" for job, names in devices.items())


def _gpu(gpu: GpuRecord) -> str:
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
        short_help="Show what jobs use now, and have requested.",
        params=[
            click.Argument(["jobs"], nargs=-1, metavar="[JOB]…", **OF_JOBS),
            Option(["-A", "--all", "every"], is_flag=True, help="Also jobs that have ended."),
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
        short_help="Show what machines have, and what is in use.",
        params=[*where_options(), watch_option(), output_option()],
    )
)
