"""`python -m paddle.distributed.launch` (fleetrun), of 2020 and of today.

Source: `python/paddle/distributed/launch.py` of Paddle 1.8, and `…/launch/context/args_envs.py` of 3.3.
"""

from __future__ import annotations

import os
import socket

from paceline.job.errors import UserError

from .cluster import has_devices
from .engine import Ignored, Line, Refused, Tool, later
from .shell import is_expanded

_NO_SERVERS = Refused("paceline trains without parameter servers; leave the flags for them out")


def _devices(line: Line, value: str) -> None:
    line.add("--devices", value.strip("'\""))


def _log_dir(line: Line, value: str) -> None:
    line.add("--env", f"PADDLE_LOG_DIR={value if is_expanded(value) else os.path.abspath(value)}")


def _master(line: Line, value: str) -> None:
    """HOST:PORT, or a store that paceline does not use."""
    kind, separator, address = value.rpartition("://")
    if separator and kind not in ("http", "https", "tcp"):
        raise UserError(
            f"--master {value}: paceline's agents find each other without {kind}; name a host, as HOST:PORT"
        )
    line.add("--rdzv-endpoint", address)


def _backend(line: Line, value: str) -> None:
    """Of GPUs and CPUs alone; Paddle chooses between them where nothing says which."""
    if value not in ("auto", "nccl", "gloo"):
        raise UserError(f"--backend {value}: paceline knows GPUs and CPUs; leave it out, or write nccl or gloo")
    if value != "auto":
        line.add("--env", f"PADDLE_DISTRI_BACKEND={value}")


def _mode(line: Line, value: str) -> None:
    """Collective training alone."""
    if value != "collective":
        raise UserError(f"--run_mode {value}: {_NO_SERVERS}")


def _addresses(line: Line) -> tuple[list[str], str | None]:
    """The addresses of the nodes, and this node's, of flags or of the variables of a PaddleCloud job."""
    addresses, mine = line.given.get("--ips", ""), line.given.get("--node-ip")
    if "--use-paddlecloud" in line.given:
        found = os.environ.get("PADDLE_TRAINERS")
        if found is None:
            line.notes.append("--use-paddlecloud has no effect: PADDLE_TRAINERS is not set")
        else:
            addresses, mine = found, os.environ.get("POD_IP", mine)
    return [it.strip() for it in addresses.split(",") if it.strip()], mine


def _is_mine(address: str) -> bool:
    """Whether this machine has an address."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _finish(line: Line) -> None:
    """Say which node this is, and how many ranks it has: one per device."""
    addresses, mine = _addresses(line)
    if addresses and line.get("--rdzv-endpoint") is not None:
        line.notes.append("the addresses of the nodes have no effect beside --master: the nodes meet there")
    elif len(addresses) > 1:
        ours = [number for number, it in enumerate(addresses) if it == mine or (mine is None and _is_mine(it))]
        if not ours:
            raise UserError(
                f"{mine or 'this machine'} is none of the nodes {', '.join(addresses)}; say which with --node_ip"
            )
        line.add("--nnodes", str(len(addresses)))
        line.add("--node-rank", str(ours[0]))
        line.add("--master-addr", addresses[0])
    if line.get("-n") is None and (line.get("--devices") is not None or has_devices(line)):
        line.add("-n", "gpu")
    if line.get("--framework") is None:
        line.add("--framework", "paddle")


PADDLE_LAUNCH = Tool(
    "paddle-launch",
    {
        "--devices --gpus --selected-gpus --seletected-gpus LIST": _devices,
        "--npus --xpus LIST": Refused("paceline knows GPUs alone; write --nproc_per_node N"),
        "--nproc-per-node N": "-n",
        "--ips --cluster-node-ips LIST": later,
        "--node-ip IP": later,
        "--use-paddlecloud": later,
        "--nnodes N|MIN:MAX": "--nnodes",
        "--master HOST:PORT": _master,
        "--rank I": "--node-rank",
        "--host IP": "--local-addr",
        "--start-port --started-port PORT": "--env PADDLE_START_PORT={}",
        "--log-dir DIR": _log_dir,
        "--max-restart N": "--max-restarts",
        "--elastic-level LEVEL": Ignored("--nnodes MIN:MAX and --max-restarts say what a job survives"),
        "--elastic-timeout SECONDS": "--rdzv-conf last_call_timeout={}",
        "--job-id ID": "--rdzv-id",
        "--run-mode MODE": _mode,
        "--backend NAME": _backend,
        "--training-script SCRIPT": Refused("write the script behind the flags"),
        "--log-level LEVEL": Ignored("paceline's own lines have one level"),
        "--log-overwrite BOOL": Ignored("each job has log files of its own"),
        "--sort-ip BOOL": Ignored("--rank says which node is which"),
        "--enable-gpu-log BOOL": Ignored("paceline top job shows what the GPUs do"),
        "--legacy BOOL": "",
        "--print-config BOOL": Ignored("--dry-run prints the job and the ranks' variables"),
        "--auto-parallel-config FILE": Refused("it is for Paddle's automatic parallel training; start that by Paddle"),
        "--auto-cluster-config BOOL": Refused("it is for Paddle's automatic parallel training; start that by Paddle"),
        "--auto-tuner-json FILE": Refused("paceline tune measures which settings are the fastest"),
        "--servers LIST": _NO_SERVERS,
        "--trainers LIST": _NO_SERVERS,
        "--server-num N": _NO_SERVERS,
        "--worker-num --trainer-num N": _NO_SERVERS,
        "--workers --endpoints LIST": _NO_SERVERS,
        "--gloo-port PORT": _NO_SERVERS,
        "--with-gloo N": _NO_SERVERS,
    },
    finish=_finish,
    variables={
        "POD_IP": "--host",
        "PADDLE_MASTER": "--master",
        "PADDLE_DEVICES": "--devices",
        "PADDLE_NNODES": "--nnodes",
        "PADDLE_RUN_MODE": "--run-mode",
        "PADDLE_NPROC_PER_NODE": "--nproc-per-node",
        "PADDLE_JOB_ID": "--job-id",
        "PADDLE_RANK": "--rank",
        "PADDLE_MAX_RESTART": "--max-restart",
        "PADDLE_ELASTIC_TIMEOUT": "--elastic-timeout",
        "PADDLE_IPS": "--ips",
    },
    shortens=True,
)
