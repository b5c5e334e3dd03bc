"""`paceline horovodrun`: `paceline run` with the flags of horovodrun."""

from __future__ import annotations

import os
import shutil
from typing import Any

import click

from paceline.cli.flags.options import Option, SectionedCommand
from paceline.cli.flags.program import program_of
from paceline.job.errors import UserError

from .run import _run, run

# Flags of horovodrun that set a variable: name, variable, factor or fixed value, help.
_NUMBERS = (
    ("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", 1024 * 1024, "Bytes up to which tensors are fused, in MiB."),
    ("--cycle-time-ms", "HOROVOD_CYCLE_TIME", 1, "How long submitted tensors are collected."),
    ("--cache-capacity", "HOROVOD_CACHE_CAPACITY", 1, "Number of operations whose responses are cached."),
    ("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", 1, "When missing ranks are named."),
    ("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 1, "When to give them up."),
    ("--elastic-timeout", "HOROVOD_ELASTIC_TIMEOUT", 1, "How long init waits for the other ranks."),
)
_SWITCHES = (
    ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "1", "Do not name missing ranks."),
    ("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "1", "Mark cycles in the timeline."),
)
_TEXTS = (
    ("--timeline-filename", "HOROVOD_TIMELINE", "Write a timeline to this file on rank 0."),
    ("--network-interface", "GLOO_SOCKET_IFNAME", "Network interface of the collectives."),
)
_SECTION = "horovodrun alone"

_RESTARTS = 100  # of an elastic job without --reset-limit: enough for any that makes progress

OPTIONS = [
    Option(["--num-proc"], section=_SECTION, type=int, metavar="N", help="The same as -np."),
    *(Option([flag], section=_SECTION, type=float, metavar="N", help=text) for flag, _, _, text in _NUMBERS),
    *(Option([flag], section=_SECTION, is_flag=True, help=text) for flag, _, _, text in _SWITCHES),
    *(Option([flag], section=_SECTION, metavar="NAME", help=text) for flag, _, text in _TEXTS),
    Option(
        ["--reset-limit"],
        section=_SECTION,
        type=click.IntRange(0),
        metavar="N",
        help=f"The same as --max-restarts.  [default with --min-np, --max-np or --host-discovery-script: {_RESTARTS}]",
    ),
    Option(
        ["--blacklist-cooldown-range"],
        section=_SECTION,
        type=click.FloatRange(0, min_open=True),
        nargs=2,
        metavar="MIN MAX",
        help="Seconds after which a host that has failed comes back: MIN, then twice as many each time, up to MAX.",
    ),
    Option(["--disable-cache"], section=_SECTION, is_flag=True, help="Accepted; no check is left out."),
    Option(["--gloo"], section=_SECTION, is_flag=True, help="Accepted; collectives use gloo."),
    Option(["--mpi"], section=_SECTION, is_flag=True, help="Refused; there is no MPI here."),
]


def _horovodrun(**given: Any) -> int:
    """Run SCRIPT with ARGS as horovodrun does: paceline run --framework horovod."""
    own = {str(option.name): given.pop(str(option.name)) for option in OPTIONS}
    if own["mpi"]:
        raise UserError("--mpi: the collectives of paceline's Horovod API use gloo; leave the flag out")
    if own["num_proc"] is not None:
        if given["total"] is not None:
            raise UserError("-np and --num-proc say the same; give one of them")
        given["total"] = own["num_proc"]
    given.update(_elastic(given, own["reset_limit"], own["blacklist_cooldown_range"]))
    given["framework"] = given["framework"] or "horovod"
    given = program_of(given)
    if not given["module"] and _is_on_path(given["script"], given["working_dir"] or "."):
        given["no_python"] = True  # horovodrun runs commands: env X=1 python train.py
    return _run(**{**given, "env": (*_variables(own), *given["env"])})


def _elastic(given: dict[str, Any], limit: int | None, cooldown: tuple[float, float] | None) -> dict[str, Any]:
    """What changes in the flags of a job that goes on without hosts that fail, as horovodrun's does.

    Raises:
        UserError: the flags contradict each other.
    """
    if limit is not None and given["max_restarts"] is not None:
        raise UserError("--reset-limit and --max-restarts say the same; give one of them")
    restarts = limit if limit is not None else given["max_restarts"]
    if given["min_np"] is None and given["max_np"] is None and given["host_discovery_script"] is None:
        if cooldown is not None:
            raise UserError("--blacklist-cooldown-range: hosts come back only to a job with --min-np; add that")
        return {"max_restarts": restarts}
    if cooldown is not None and cooldown[1] < cooldown[0]:
        raise UserError("--blacklist-cooldown-range {:g} {:g}: MIN comes first, then MAX".format(*cooldown))
    least = given["min_np"]
    return {
        "max_restarts": _RESTARTS if restarts is None else restarts,
        "min_np": given["total"] if least is None and given["nnodes"] is None else least,
        "cooldown": list(cooldown or ()),
    }


def _is_on_path(name: str, folder: str) -> bool:
    """Whether a name is that of a program, and not of a file in the folder."""
    return os.sep not in name and not os.path.exists(os.path.join(folder, name)) and shutil.which(name) is not None


def _variables(own: dict[str, Any]) -> list[str]:
    """The variables that the flags set, as NAME=VALUE."""
    found = {}
    for flag, variable, factor, _ in _NUMBERS:
        if (value := own[_name(flag)]) is not None:
            found[variable] = f"{value * factor:g}" if factor == 1 else str(int(value * factor))
    for flag, variable, fixed, _ in _SWITCHES:
        if own[_name(flag)]:
            found[variable] = fixed
    for flag, variable, _ in _TEXTS:
        if own[_name(flag)] is not None:
            found[variable] = own[_name(flag)]
    return [f"{name}={value}" for name, value in found.items()]


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


_USUAL = (
    "-np", "--hosts", "--hostfile", "--nproc-per-node", "--env", "--min-np", "--max-np", "--host-discovery-script",
    "--reset-limit", "--blacklist-cooldown-range", "--start-timeout", "--verbose",
    "--network-interface", "--timeline-filename", "--fusion-threshold-mb",
    "--cycle-time-ms", "--no-stall-check", "--output-filename", "--dry-run",
)  # fmt: skip
_params: list[click.Parameter] = [*run.params, *OPTIONS]

horovodrun = SectionedCommand(
    "horovodrun",
    callback=_horovodrun,
    help=_horovodrun.__doc__,
    usual=_USUAL,
    context_settings=run.context_settings,
    params=sorted(_params, key=lambda parameter: isinstance(parameter, click.Argument)),
)
