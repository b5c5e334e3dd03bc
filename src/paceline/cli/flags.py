"""What the flags of `paceline run` mean, torchrun's and Horovod's as well as paceline's own: a `JobSpec`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import ValidationError

from paceline.contract import CONTRACTS
from paceline.job.errors import UserError, nearest
from paceline.job.script import Kind, module_file, program_kind
from paceline.job.spec import JobSpec, new_name
from paceline.job.validation import validation_error

from .options import BOTH, ERR, OUT, parse_address, parse_env, parse_numbers, parse_streams

if TYPE_CHECKING:
    from paceline.job.validation import Place

MOST_RANKS = 4096
Counted = Literal["auto", "gpu", "cpu"]


def job_spec(given: dict[str, Any]) -> JobSpec:
    """The job that the flags describe.

    Raises:
        UserError: they contradict each other or cannot be read.
    """
    folder = _working_dir()
    script, framework = given["script"], given["framework"]
    if framework is not None and framework not in CONTRACTS:
        raise UserError(f"unknown framework {framework!r}; {nearest(framework, CONTRACTS)}")
    if given["pass_index"] and framework != "indexed":
        raise UserError("--pass-index needs independent processes; add --framework indexed")
    if given["module"] and given["no_python"]:
        raise UserError("--module and --no-python contradict each other; give one of them")
    nodes, node_rank, meeting = _meeting(given)
    if given["module"]:
        kind: Kind = "module"
        _check_module(script, folder)
    elif given["no_python"]:
        kind = "command"
        _check_program(script, folder)
    else:
        kind = program_kind(script, folder)
    target = str(folder / script) if kind == "command" and not given["no_python"] else script
    try:
        return JobSpec.model_validate(
            dict(
                name=given["name"] or new_name(script.rpartition(".")[2] if kind == "module" else Path(script).stem),
                **{kind: target},
                args=given["args"],
                framework=framework,
                nodes=nodes,
                ranks=_ranks(given, nodes),
                devices=None if given["devices"] is None else _devices(given["devices"]),
                env=parse_env(given["env"]),
                working_dir=str(folder),
                log_dir=given["log_dir"],
                start_method="exec" if given["start_method"] in ("exec", "spawn") else "fork",
                preload=tuple(filter(None, (given["preload"] or "").split(","))),
                max_restarts=given["max_restarts"],
                grace=given["grace"],
                pass_index=given["pass_index"],
                role=given["role"],
                node_rank=node_rank,
                detached=given["detach"],
                **meeting,
            )
        )
    except ValidationError as error:
        raise validation_error(error, JobSpec, flag) from None


def flag(place: Place) -> str:
    """The flag that sets a field of a job."""
    return f"--{str(place[0]).replace('_', '-')}" if place else "the job"


def _ranks(given: dict[str, Any], nodes: int) -> int | Counted:
    ranks, total = given["ranks"], given["total"]
    if total is not None:
        if ranks is not None and os.environ.get("PET_NPROC_PER_NODE") != ranks:
            raise UserError("-np counts the ranks of all nodes, -n those of one; give one of them")
        if total < 1 or total % nodes:
            raise UserError(f"-np {total} cannot be shared by {nodes} nodes; take a positive multiple of {nodes}")
        return int(total // nodes)
    if ranks is None:
        return 1
    if ranks in ("auto", "gpu", "cpu"):
        return cast("Counted", ranks)
    try:
        count = int(ranks)
    except ValueError:
        raise UserError(f"-n {ranks} is neither a number nor auto, gpu or cpu") from None
    if count < 1:
        raise UserError(f"-n {count} starts no rank; take 1 or more")
    if count > MOST_RANKS:
        raise UserError(f"-n {count} is more ranks than a machine can bear; take {MOST_RANKS} or fewer")
    return count


def _meeting(given: dict[str, Any]) -> tuple[int, int | None, dict[str, Any]]:
    """How many nodes there are, this one's number, and where they meet."""
    nodes = _nodes(given["nnodes"])
    backend = given["rdzv_backend"]
    if backend not in (None, "c10d", "static"):
        raise UserError(
            f"--rdzv-backend {backend}: paceline brings its own rendezvous; leave the flag out, or say c10d"
        )
    if given["standalone"] and nodes > 1:
        raise UserError(f"--standalone is one machine, --nnodes {nodes} is several; leave one of them out")
    meeting: dict[str, Any] = {"run_id": given["rdzv_id"], "local_address": given["local_addr"]}
    address, port = given["master_addr"], given["master_port"]
    if given["rdzv_endpoint"] and nodes > 1:
        if address is not None:
            raise UserError("--rdzv-endpoint and --master-addr name the same thing; give one of them")
        address, endpoint_port = parse_address("--rdzv-endpoint", given["rdzv_endpoint"])
        port = port or endpoint_port or 29400
    conf = dict(pair.partition("=")[::2] for pair in (given["rdzv_conf"] or "").split(",") if pair)
    for key in ("join_timeout", "timeout"):
        if key in conf:
            try:
                meeting["join_timeout"] = float(conf[key])
                if not 0 < meeting["join_timeout"] < float("inf"):
                    raise ValueError
            except ValueError:
                raise UserError(f"--rdzv-conf {key}={conf[key]} is no number of seconds") from None
            break
    meeting.update(main_address=address if nodes > 1 else None, main_port=port)
    node_rank = given["node_rank"] if nodes > 1 else 0
    return nodes, node_rank, meeting


def _nodes(text: str) -> int:
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()) or int(low) < 1:
        raise UserError(f"--nnodes {text!r} is no number of machines; write for example --nnodes 2")
    if colon and low != high:
        raise UserError(f"--nnodes {text}: a changing number of machines is not supported; give one number")
    return int(low)


def _devices(text: str) -> tuple[str, ...]:
    devices = tuple(part.strip() for part in text.split(","))
    if not all(devices):
        raise UserError(f"--devices {text!r} is no list of devices; write for example --devices 0,1")
    return devices


def _working_dir() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder that you are in was deleted; change to one that exists") from None


def _check_module(name: str, folder: Path) -> None:
    """Refuse a module that is not there. Parent packages are not imported: that is the ranks' business."""
    top = name.partition(".")[0]
    if module_file(name, folder) is None and importlib.util.find_spec(top) is None:
        raise UserError(
            f"no module {name} in {folder} or installed for {sys.executable}; check the name and the folder"
        )


def _check_program(name: str, folder: Path) -> None:
    path = folder / name if os.sep in name else None
    if shutil.which(str(path) if path else name) is None:
        raise UserError(
            f"no program {name} {'that can be run' if path else 'on PATH'}; check the name, or give its whole path"
        )


def shown_streams(given: dict[str, Any], ranks: int) -> dict[int, int]:
    """Which streams of which local ranks go to the screen: rank 0's, and those that --tee names."""
    shown = {rank: BOTH if rank == 0 else 0 for rank in range(ranks)}
    if given["local_ranks_filter"]:
        chosen = parse_numbers("--local-ranks-filter", given["local_ranks_filter"])
        if max(chosen) >= ranks:
            raise UserError(f"--local-ranks-filter names {max(chosen)}, but there are {ranks} ranks, numbered from 0")
        shown = {rank: BOTH if rank in chosen else 0 for rank in range(ranks)}
    if given["redirects"]:
        hidden = parse_streams("--redirects", given["redirects"], ranks)
        shown = {rank: shown[rank] & ~hidden[rank] for rank in range(ranks)}
    if given["tee"]:
        added = parse_streams("--tee", given["tee"], ranks)
        allowed = {r: BOTH for r in range(ranks)}
        if given["local_ranks_filter"]:
            allowed = {rank: BOTH if rank in chosen else 0 for rank in range(ranks)}
        shown = {rank: shown[rank] | (added[rank] & allowed[rank]) for rank in range(ranks)}
    return shown


def split_streams(shown: dict[int, int]) -> tuple[int, ...]:
    """The local ranks whose stdout and stderr must be told apart: one is hidden, or they go to different places."""
    out, err = os.fstat(1), os.fstat(2)
    apart = (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino)
    return tuple(rank for rank, streams in shown.items() if streams in (OUT, ERR) or (streams and apart))
