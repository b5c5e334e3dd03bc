"""The launcher of DeepSpeed.

Source: DeepSpeed 0.18, `deepspeed/launcher/runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .cluster import has_devices
from .engine import BINDING, Ignored, Line, Refused, Tool

if TYPE_CHECKING:
    from paceline.backends.hosts import NamedHost

_STARTS = Ignored("paceline starts the ranks itself")
_ELASTIC = Refused("--num_nodes MIN:MAX says it")


def _include(line: Line, value: str) -> None:
    """HOST[:GPU,…][@HOST…]: hosts, or GPUs of this machine."""
    host, colon, gpus = value.partition(":")
    if not colon:
        line.add("-H", value.replace("@", ","))
    elif host in ("localhost", "127.0.0.1") and "@" not in value:
        line.add("--devices", gpus)
    else:
        raise UserError(f"--include {value}: write -H HOST:N,… for the number of ranks on each host")


def _count_hosts(line: Line, file: str, hosts: list[NamedHost]) -> None:
    """With --no_ssh each node is started by hand: a hostfile only says how many there are, and how many ranks each."""
    counts = {slots or 1 for _, slots in hosts}
    if len(counts) > 1:
        raise UserError(f"--no_ssh: the nodes of {file} have different numbers of slots; leave it out, or --hostfile")
    for flag, number in (("--nnodes", len(hosts)), ("-n", counts.pop())):
        if line.get(flag) is None:
            line.add(flag, str(number))


def _read_hosts(line: Line, file: str) -> None:
    """Of a hostfile, --include takes some, with the slots that they have there."""
    from paceline.backends.hosts import in_file

    hosts, included = in_file("--hostfile", file), line.take("-H")
    wanted = [it.name for it in hosts] if included is None else included.split(",")
    if others := sorted({*wanted} - {it.name for it in hosts}):
        raise UserError(f"--include {', '.join(others)}: not in {file}; name hosts that are there")
    hosts = [it for it in hosts if it.name in wanted]
    line.take("--hostfile")
    if "--no-ssh" in line.given:
        _count_hosts(line, file, hosts)
    else:
        line.add("-H", ",".join(f"{name}:{slots or 1}" for name, slots in hosts))


def _finish(line: Line) -> None:
    """Without a number of GPUs there is one rank for each."""
    file = line.get("--hostfile")
    if file is not None and ("--no-ssh" in line.given or line.get("-H") is not None):
        _read_hosts(line, file)
    if line.get("-n") is None and file is None and (line.get("--devices") or has_devices(line)):
        line.add("-n", "gpu")


DEEPSPEED = Tool(
    "deepspeed",
    {
        "--num-gpus --num-accelerators N": "-n",
        "--num-nodes N|MIN:MAX": "--nnodes",
        "-H --hostfile FILE": "--hostfile",
        "-i --include SPEC": _include,
        "-e --exclude SPEC": Refused("name the GPUs that it is to use, with --devices"),
        "--master-addr HOST": "--master-addr",
        "--master-port PORT": "--master-port",
        "--node-rank I": "--node-rank",
        "--module": "-m",
        "--no-python": "--no-python",
        "--no-local-rank": "--use-env",
        "--enable-each-rank-log DIR": "--log-dir",
        "--launcher NAME": _STARTS,
        "--launcher-args ARGS": _STARTS,
        "--no-ssh": "",
        "--no-ssh-check": "",
        "--ssh-port PORT": "-p",
        "--force-multi": "",
        "--save-pid": Ignored("paceline list shows the jobs"),
        "--elastic-training": "",
        "--min-elastic-nodes N": _ELASTIC,
        "--max-elastic-nodes N": _ELASTIC,
        "--autotuning MODE": Refused("it starts jobs by itself; start it by DeepSpeed"),
        "--bind-cores-to-rank": BINDING,
        "--bind-core-list LIST": BINDING,
    },
    finish=_finish,
)
