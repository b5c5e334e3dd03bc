"""The batch script of a job: what it asks Slurm for, and how it starts one agent on each node.

Sources: https://slurm.schedmd.com/sbatch.html and https://slurm.schedmd.com/srun.html.
"""

from __future__ import annotations

import math
import re
import shlex
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.host.slurm.job_folder import COMMENT, UNSEEN
from paceline.node.host.slurm.look.partitions import seconds_of

from . import container

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.contract.nodejob import NodeJob
    from paceline.contract.records import SlurmOptions

_PLAIN = re.compile(r"[A-Za-z0-9_./:,=@%+*\[\]&|!()-]+")
_CLOSING = 60.0  # seconds beyond its grace that a job may take to end: to commit, and to say so
_LEAST_WARNING = 10  # seconds before the time limit, at least
_EARLIER = 60  # seconds by which Slurm may warn a job too early: see --signal in sbatch(1)
_MOST_WARNING = 65535  # more than that sbatch does not take

SEES = (  # what a task of srun does first, with the job's folder as $0 and the command of an agent behind it
    '[ -e "$0/job.json" ] || {\n'
    f'  echo "{UNSEEN} $(uname -n) $0" >&2\n'
    '  scancel --quiet --signal=TERM "${number:-$SLURM_JOB_ID}.$SLURM_STEP_ID"\n'
    "  exit 2\n"
    '}; exec "$@"'
)

_BODY = """
# One agent on each node. The agents start the ranks, and end with the job's exit code.
# Each rank runs: {program}
job={job}
start="$job/lives/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"
export SLURM_EXPORT_ENV=ALL
export number=${{SLURM_ARRAY_TASK_ID:+${{SLURM_ARRAY_JOB_ID}}_}}${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}}
heard=
# Slurm sends USR2 before the time limit: all nodes are asked to save and to stop.
trap 'heard=1; echo limit > "$start/warned"; scancel --quiet --signal=TERM "$number"' USR2
trap 'heard=1' TERM CONT
mkdir -p "$start"
sees='{sees}'
srun {srun} sh -c "$sees" "$job" {task} "$job" &
started=$!
while :; do
  heard=
  wait "$started"
  code=$?
  [ -n "$heard" ] || break
done
# It ends here, is requeued, or goes on in another job.
{command} slurm-finish "$job" "$code"
"""


def text(job: NodeJob, folder: Path, command: Sequence[str], options: SlurmOptions, job_id: str) -> str:
    """The script."""
    asked = lines(directives(job, folder, options, job_id))
    srun = [
        '--nodes="$SLURM_JOB_NUM_NODES"', '--ntasks="$SLURM_JOB_NUM_NODES"', "--ntasks-per-node=1",
        "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}", *map(shlex.quote, flags(job, options)),
    ]  # fmt: skip
    body = _BODY.format(
        program=_program(job),
        sees=SEES,
        job=shlex.quote(str(folder)) + ('-"$SLURM_ARRAY_TASK_ID"' if options["array"] else ""),
        srun=" ".join(srun),
        task=shlex.join(agent(command, options)),
        command=shlex.join(command),
    )
    return "#!/bin/sh\n" + "".join(asked) + body


def _program(job: NodeJob) -> str:
    """The program of a job with its arguments, in one line."""
    kind, target = job.program
    words = shlex.join([*(["-m"] if kind == "module" else []), target, *job.args])
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)


def lines(options: Mapping[str, str]) -> list[str]:
    """Options of sbatch as lines of a script."""
    return [
        f"#SBATCH --{name}" + (f"={_quoted(name, value)}" if value else "") + "\n" for name, value in options.items()
    ]


def flags(job: NodeJob, options: SlurmOptions) -> list[str]:
    """The flags of srun that do not depend on the nodes."""
    return [
        "--cpu-bind=none", "--kill-on-bad-exit=0", f"--wait={_wait(job, options)}",
        "--input=none", *(["--no-kill"] if options["no_kill"] else []), *container.flags(options["container"]),
    ]  # fmt: skip


def _wait(job: NodeJob, options: SlurmOptions) -> int:
    """Seconds from the end of the first agent to the end of the others; 0 for no limit: an elastic job goes on."""
    return 0 if options["no_kill"] else math.ceil(float(job.grace) + _CLOSING)


def agent(command: Sequence[str], options: SlurmOptions) -> list[str]:
    """The command of an agent on a node, or in a container there, without the job's folder."""
    own = [options["python"], *command[1:]] if options["container"] else command
    return [*container.command(options["container"]), *own, "slurm"]


def directives(job: NodeJob, folder: Path, options: SlurmOptions, job_id: str) -> dict[str, str]:
    """The options of sbatch, by their names: those that follow from the job, then those that the user gives."""
    least, _, most = str(job.nodes).partition(":")
    found = {
        "job-name": job.name,
        "comment": f"{COMMENT}{job_id}",
        "nodes": f"{least}-{most}" if most else least,
        **({} if most else {"ntasks-per-node": "1"}),  # of a range of nodes Slurm would take the least then
        "output": str(folder).replace("%", "%%") + ("-%a/" if options["array"] else "/") + "slurm.out",
        "open-mode": "append",
        "chdir": str(folder.parent if options["array"] else folder),
        "requeue": "",
        **({"array": options["array"]} if options["array"] else {}),
        "signal": f"B:USR2@{_warning(job, limit_of(job, options['slurm'], options.get('limit')))}",
    }
    ranks = job.devices if job.ranks in ("gpu", "auto") else job.ranks
    if job.cpus is not None:
        found["cpus-per-task"] = str(job.cpus)
    elif isinstance(ranks, int) and ranks > 1 and not {"cpus-per-gpu", "exclusive"} & options["slurm"].keys():
        found["cpus-per-task"] = str(ranks)
    if job.memory is not None:
        found["mem"] = f"{math.ceil(job.memory / (1 << 20))}M"
    if isinstance(job.devices, int) and job.devices:
        found["gres"] = f"gpu:{job.devices}"
    if job.queue is not None:
        found["partition"] = job.queue
    if job.time_limit is not None:
        found["time"] = duration(job.time_limit)
    if options["no_kill"]:
        found["no-kill"] = ""
    users = given(options["slurm"])
    if "gres" in found and "gres" in users and "gpu" not in users["gres"]:
        users["gres"] = f"{found['gres']},{users['gres']}"
    for own, others in _INSTEAD.items():  # the user's words for the same
        if own in found and any(other in users for other in others):
            del found[own]
    return {**found, **users}


def given(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    """The options of sbatch that the user gives, each with its value; "" if it has none."""
    return {name: "" if value is True else str(value) for name, value in options.items() if value is not False}


_INSTEAD = {
    "gres": ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
    "mem": ("mem-per-cpu", "mem-per-gpu"),
    "requeue": ("no-requeue",),
}


def _warning(job: NodeJob, limit: float | None) -> int:
    """How many seconds before the time limit a job is asked to stop."""
    needed = math.ceil(float(job.grace) + _CLOSING)
    if limit is not None:
        needed = min(needed, int(limit / 2))
    return min(_MOST_WARNING, max(_LEAST_WARNING, needed))


def notes_on_limit(job: NodeJob, options: SlurmOptions) -> list[str]:
    """What the user should know of a time limit of which much is needed to stop in time."""
    limit = limit_of(job, options["slurm"], options.get("limit"))
    if limit is None or limit - (first := _warning(job, limit) + _EARLIER) >= limit / 2:
        return []
    return [
        f"of its time limit of {limit:g} s, the last {first - _EARLIER} to {min(first, limit):g} s are for saving and "
        "ending, as Slurm asks it to stop so long before; give it a longer --time-limit"
    ]


def limit_of(job: NodeJob, options: Mapping[str, str | int | bool], of_partition: float | None) -> float | None:
    """The time limit of a job in seconds; None if it has none, or it is not known."""
    if "time" in options:
        return seconds_of(str(options["time"]))
    return float(job.time_limit) if job.time_limit is not None else of_partition


def duration(seconds: float) -> str:
    """A time limit as Slurm writes it: days-hours:minutes:seconds."""
    whole = math.ceil(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    return f"{days}-{hours:02}:{rest // 60:02}:{rest % 60:02}"


def _quoted(name: str, value: str) -> str:
    """A value as sbatch reads it from a script."""
    if "\n" in value or "\r" in value:
        raise Refused(f"--slurm {name}: its value has a line end, which no batch script can; write it in one line")
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
