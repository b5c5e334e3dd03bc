"""srun of Slurm.

Source: `man srun` of Slurm 25.11.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from paceline.job.errors import UserError

from .engine import Ignored, Line, Refused, Tool, command, later, say_program, split_command
from .shell import plain
from .tools import unwrap

_BINDING = Ignored("ranks share the cores that Slurm gives the job; --numa-binding binds them to those near their GPU")
_UNITS = {"K": "Ki", "M": "Mi", "G": "Gi", "T": "Ti"}
# Those of sbatch, too, that mean the same there.
_OPTIONS = (
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "extra-node-info", "gpu-freq",
    "gpus-per-socket", "mincpus", "network", "prefer", "priority", "profile", "sockets-per-node", "threads-per-core",
    "time-min", "tmp", "tres-bind", "tres-per-task", "wckey",
)  # fmt: skip
_STEP = Ignored("paceline makes the step")


def _nodes(line: Line, value: str) -> None:
    line.add("--nnodes", value.replace("-", ":"))


def _time(line: Line, value: str) -> None:
    """Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = value.rpartition("-")
    parts = rest.split(":")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", value):
        raise UserError(f"--time {value} is no time of Slurm's; write for example 1-12:00:00")
    numbers = [*map(int, parts)]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, minutes, seconds = ([0, *numbers, 0] if len(numbers) < 3 else numbers)[:3]
    units = zip((int(days or 0), hours, minutes, seconds), "dhms", strict=True)
    line.add("--time-limit", "".join(f"{number}{unit}" for number, unit in units if number) or "0s")


def _memory(line: Line, value: str) -> None:
    """A number of MiB, or with a unit; 0 is all."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", value.upper())
    if match is None:
        raise UserError(f"--mem {value} is no size of Slurm's; write for example 32G")
    if int(match[1]):
        line.add("--memory", match[1] + _UNITS[match[2] or "M"])
    else:
        line.add("--slurm", "mem=0")


def _gpus(line: Line, value: str) -> None:
    """N or TYPE:N per node."""
    if ":" in value:
        line.add("--slurm", f"gres=gpu:{value}")
    else:
        line.add("--gpus", value)


def _gres(line: Line, value: str) -> None:
    if re.fullmatch(r"gpu(:\w+)?:\d+", value):
        _gpus(line, value.removeprefix("gpu:"))
    else:
        line.add("--slurm", f"gres={value}")


def _export(line: Line, value: str) -> None:
    for pair in value.split(","):
        if "=" in pair:
            line.add("--env", pair)
        elif pair not in ("ALL", "NONE", "NIL"):
            line.add("--secret", pair)


def _mpi(line: Line, value: str) -> None:
    if value.startswith("pm"):
        line.add("--framework", "mpi")


def _finish(line: Line) -> None:
    """Count per node what srun counts per task or job, and say what the program is."""
    if line.get("--on") is None:
        line.flags.insert(0, ("--on", "slurm"))
    tasks, cores, on_each = line.get("-np"), line.given.get("-c"), line.given.get("--gpus-per-task")
    nodes = (line.get("--nnodes") or "1").partition(":")[0]

    def share(total: str) -> str | None:
        """The share of a node; None if the numbers are none, or there is no node, which is refused later."""
        return str(int(total) // int(nodes)) if (total + nodes).isdecimal() and int(nodes) else None

    ranks = line.get("-n") or (tasks and share(tasks)) or "1"
    for flag, number in (("--cpus", cores), ("--gpus", on_each)):
        if number is not None and line.get(flag) is None:
            if not (number + ranks).isdecimal():
                raise UserError(f"{flag} {number}: write the number for a node, as {flag} N")
            line.add(flag, str(int(number) * int(ranks)))
    if (total := line.given.get("-G")) is not None and line.get("--gpus") is None:
        line.add("--gpus", share(total) or total)
    if line.get("-n") is not None:
        line.take("-np")
    unwrap(line)
    say_program(line)


def _jobid(line: Line, value: str) -> None:
    """An allocation: only that of the shell which reads the line will do."""
    own = os.environ.get("SLURM_JOB_ID")
    if value != own and not re.fullmatch(r"\$\{?SLURM_JOB_?ID\}?", plain(value)):
        raise UserError(f"--jobid {value}: run the line in the shell of that allocation")


def _batch(line: Line) -> None:
    split_command(line)
    _finish(line)


def _option(name: str) -> str:
    return f"--slurm {name}={{}}"


SRUN = Tool(
    "srun",
    {
        "-N --nodes N[-M]": _nodes,
        "-n --ntasks N": "-np",
        "--ntasks-per-node --tasks-per-node N": "-n",
        "-c --cpus-per-task N": later,
        "-G --gpus N": later,
        "--gpus-per-node [TYPE:]N": _gpus,
        "--gpus-per-task N": later,
        "--gres LIST": _gres,
        "--mem SIZE": _memory,
        "--mem-per-cpu SIZE": _option("mem-per-cpu"),
        "--mem-per-gpu SIZE": _option("mem-per-gpu"),
        "-t --time TIME": _time,
        "-p --partition NAME": "--queue",
        "-J --job-name NAME": "--name",
        "-A --account NAME": _option("account"),
        "-q --qos NAME": _option("qos"),
        "-C --constraint LIST": _option("constraint"),
        "-w --nodelist NODES": _option("nodelist"),
        "-x --exclude NODES": _option("exclude"),
        "-M --clusters NAMES": Refused("give each cluster a target of its own, with its login node, and --on TARGET"),
        "-L --licenses NAMES": _option("licenses"),
        "-d --dependency LIST": _option("dependency"),
        "--reservation NAME": _option("reservation"),
        "--switches N": _option("switches"),
        "--comment TEXT": Ignored("paceline finds its jobs by the comment; give --label"),
        "--mail-type TYPES": _option("mail-type"),
        "--mail-user USER": _option("mail-user"),
        "--begin TIME": _option("begin"),
        "--nice [N]": _option("nice"),
        "--exclusive [WHO]": "--slurm exclusive",
        "-D --chdir DIR": "--working-dir",
        "--export LIST": _export,
        "--container-image IMAGE": "--image",
        "--container-mounts LIST": Refused("name the folder as a volume: [volumes] in paceline.toml, then --data"),
        "--mpi TYPE": _mpi,
        "-l --label": "--tee all",
        "-o --output FILE": Refused("each rank has a log file; see paceline logs JOB, or write > FILE behind the line"),
        "-e --error FILE": Refused("each rank has a log file; see paceline logs JOB, or write 2> FILE behind the line"),
        "-i --input FILE": Refused("the ranks of a job in Slurm read no standard input; leave it out"),
        "--pty": Refused("start the job, then paceline attach JOB opens a shell in the place of a rank"),
        "--multi-prog": Refused("a job runs one program; start one job for each"),
        "--jobid ID": _jobid,
        "--het-group LIST": Refused("a job runs one program; start one job for each"),
        "--signal SIGNAL": Refused("--grace says how long ranks have, from the warning of Slurm on"),
        **{f"--{name} VALUE": _option(name) for name in _OPTIONS},
        "-K --kill-on-bad-exit [N]": Ignored("a rank that fails always ends the job"),
        "-W --wait SECONDS": Ignored("a rank that fails always ends the job"),
        "-u --unbuffered": "",
        "-v --verbose": "-v",
        "-Q --quiet": "",
        "--cpu-bind --cpu_bind --accel-bind HOW": _BINDING,
        "--gpu-bind HOW": Ignored(
            "ranks choose their GPU by LOCAL_RANK; --virtual-local-rank shows each its own alone"
        ),
        "--mem-bind HOW": _BINDING,
        "--hint WHAT": _BINDING,
        "-m --distribution HOW": Ignored("ranks are numbered node by node"),
        "-I --immediate [N]": Ignored("a job waits until there are nodes for it"),
        "-s --oversubscribe --overlap": _STEP,
        "--exact": _STEP,
        "-k --no-kill": _STEP,
        "-X --disable-status": "",
    },
    finish=_finish,
)
_EACH = Ignored("each rank has a log file; see paceline logs JOB")
# As lines of a script, for sbatch and salloc start a launcher, which starts the ranks.
SALLOC = replace(SRUN, name="salloc")
SBATCH = Tool(
    "sbatch",
    {
        **SRUN.flags,
        "--wrap COMMAND": command,
        "-o --output FILE": _EACH,
        "-e --error FILE": _EACH,
        "-a --array LIST": "--array",
        "--open-mode MODE": _EACH,
        "--parsable": "",
        "--requeue": "",
        "--no-requeue": "--slurm no-requeue",
        "-H --hold": _option("hold"),
    },
    "submit",
    _batch,
)
