"""`paddlecloud job …`.

Source: lines of public repositories, for example `paddlecloud job train --job-name … --start-cmd …`.
"""

from __future__ import annotations

import shlex

from paceline.job.errors import UserError

from .cluster import placed
from .engine import Ignored, Line, Refused, Tool, command, split_command
from .tools import unwrap

_ACCOUNT = Ignored("paceline asks no server; the cluster knows you by its own credentials")
_SITE = Ignored("the target says it; name one with --on")
_NO_SERVERS = Refused("paceline trains without parameter servers; leave the flags for them out")


def _time(line: Line, value: str) -> None:
    """H:M:S; 0 is without a limit."""
    numbers = value.split(":")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise UserError(f"--wall-time {value} is no time; write for example 10:00:00")
    limit = "".join(f"{int(number)}{unit}" for number, unit in zip(numbers, "hms", strict=True) if int(number))
    if limit:
        line.add("--time-limit", limit)


def _priority(line: Line, value: str) -> None:
    number = {"low": "-1", "normal": None, "high": "1", "very_high": "2"}.get(value, value)
    if number is not None:
        line.add("--priority", number)


def _kind(line: Line, value: str) -> None:
    if value.upper() not in ("NCCL2", "COLLECTIVE"):
        raise UserError(f"--distribute-job-type {value}: {_NO_SERVERS}")


def _finish(line: Line) -> None:
    """The command, and how many nodes run it."""
    if not line.program:
        raise UserError("paddlecloud job train: no command; give it with --start-cmd")
    if line.given.get("--is-standalone") == "1":
        line.take("--nnodes")
    split_command(line)
    unwrap(line)
    placed(line)


def _named(line: Line) -> None:
    line.program = [*line.program, *shlex.split(line.given.get("--job-id", ""))]


def _about(verb: str) -> Tool:
    return Tool(f"paddlecloud job {verb}", {"--job-id ID": "", "--json": ""}, verb, _named, is_mixed=True)


_TRAIN = Tool(
    "paddlecloud job train",
    {
        "--job-name NAME": "--name",
        "--start-cmd COMMAND": command,
        "--k8s-trainers N": "--nnodes",
        "--k8s-gpu-cards N": "--gpus",
        "--k8s-cpu-cores N": "--cpus",
        "--k8s-memory SIZE": "--memory",
        "--k8s-wall-time --k8s-walltime --wall-time TIME": _time,
        "--k8s-priority PRIORITY": _priority,
        "--image-addr IMAGE": "--image",
        "--file-dir DIR": "--sync-mode snapshot --sync-source {}",
        "--files FILE+": "",
        "--is-standalone 0|1": "",
        "--k8s-not-local": "",
        "--k8s-is-local 0|1": "",
        "--distribute-job-type TYPE": _kind,
        "--job-version NAME": Ignored("the image says which framework there is; name one with --image-addr"),
        "--job-conf FILE": Ignored("what it says is given by flags, or by a job file; see paceline schema"),
        "--k8s-gpu-type TYPE": Ignored("--selector chooses nodes"),
        "--group-name --k8s-group NAME": Ignored("--queue names a queue of the cluster"),
        "--cluster-name NAME": _SITE,
        "--is-auto-over-sell 0|1": Ignored("pods get what they ask for"),
        "--permission WHO": _SITE,
        "--algo-id ID": _SITE,
        "--json": "",
        "--k8s-ps-num --k8s-pservers-count N": _NO_SERVERS,
        "--k8s-ps-cores --k8s-pscpu-cores N": _NO_SERVERS,
        "--k8s-ps-memory --k8s-psmemory SIZE": _NO_SERVERS,
        "--mpi-nodes N": Refused("that cluster has no successor here; give --k8s-trainers, or --nnodes"),
        "--mpi-memory SIZE": Refused("give --k8s-memory, or --memory"),
        "--mpi-wall-time TIME": _time,
        "--mpi-priority PRIORITY": _priority,
    },
    "submit",
    _finish,
    is_mixed=True,
)
_ACCOUNTS = {
    "--server HOST": _ACCOUNT,
    "--port PORT": _ACCOUNT,
    "--ak --user-ak KEY": _ACCOUNT,
    "--sk --user-sk KEY": _ACCOUNT,
}

PADDLECLOUD = Tool(
    "paddlecloud",
    tools={
        "job": Tool(
            "paddlecloud job",
            _ACCOUNTS,
            tools={
                "train": _TRAIN,
                "list": _about("list"),
                "info": _about("get"),
                "state": _about("get"),
                "logs": _about("logs"),
                "log": _about("logs"),
                "kill": _about("stop"),
                "delete": _about("delete"),
            },
            usual="train",
        )
    },
)
