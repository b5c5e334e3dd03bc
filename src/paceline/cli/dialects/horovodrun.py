"""horovodrun.

Source: Horovod 0.28, `horovod/runner/launch.py` and `horovod/runner/common/util/config_parser.py`.
"""

from __future__ import annotations

from paceline.job.errors import UserError

from .engine import Ignored, Line, Refused, Tool, say_program, split_command

_RESTARTS = "100"  # of an elastic job without --reset-limit: enough for any that makes progress
_MPI = Refused("the collectives of paceline's Horovod API use gloo; leave the flag out")
_NO_MPI = Ignored("the collectives of paceline's Horovod API use no MPI")
_TUNED = Ignored("paceline chooses how gradients go within and between machines itself")


def _fusion(line: Line, value: str) -> None:
    try:
        line.add("--env", f"HOROVOD_FUSION_THRESHOLD={int(float(value) * 1024 * 1024)}")
    except (ValueError, OverflowError):
        raise UserError(f"--fusion-threshold-mb {value} is not a number; write for example 64") from None


def _elastic(line: Line) -> None:
    """Complete a job that goes on without hosts that fail, as horovodrun's does; and say what the program is."""
    if "--reset-limit" in line.given and len([it for it in line.flags if it[0] == "--max-restarts"]) > 1:
        raise UserError("--reset-limit and --max-restarts say the same; give one of them")
    if any(line.get(flag) is not None for flag in ("--min-np", "--max-np", "--host-discovery-script")):
        if line.get("--max-restarts") is None:
            line.add("--max-restarts", _RESTARTS)
        total = line.get("-np")
        if line.get("--min-np") is None and line.get("--nnodes") is None and total is not None:
            line.add("--min-np", total)
    if line.get("--framework") is None:
        line.add("--framework", "horovod")
    split_command(line)
    say_program(line)


HOROVODRUN = Tool(
    "horovodrun",
    {
        "-np --num-proc N": "-np",
        "-H --hosts HOST:SLOTS,…": "-H",
        "-hostfile --hostfile FILE": "--hostfile",
        "--host-discovery-script PROGRAM": "--host-discovery-script",
        "--min-np --min-num-proc N": "--min-np",
        "--max-np --max-num-proc N": "--max-np",
        "--reset-limit N": "--max-restarts",
        "--blacklist-cooldown-range MIN MAX": "--blacklist-cooldown-range {}s",
        "--slots-per-host --slots N": Refused("the script prints the slots, as HOST:SLOTS"),
        "--elastic-timeout SECONDS": "--env HOROVOD_ELASTIC_TIMEOUT={}",
        "--start-timeout SECONDS": "--start-timeout {}s",
        "-p --ssh-port PORT": "-p",
        "-i --ssh-identity-file FILE": "-i",
        "--network-interfaces --network-interface NAMES": "--env GLOO_SOCKET_IFNAME={}",
        "--output-filename DIR": "--output-filename",
        "--verbose": "--verbose",
        "-v --version": Refused("write paceline --version"),
        "-cb --check-build": Refused("write paceline check"),
        "--config-file FILE": Refused("give its options as flags, or write a job file; see paceline schema"),
        "--fusion-threshold-mb N": _fusion,
        "--cycle-time-ms N": "--env HOROVOD_CYCLE_TIME={}",
        "--cache-capacity N": "--env HOROVOD_CACHE_CAPACITY={}",
        "--timeline-filename FILE": "--env HOROVOD_TIMELINE={}",
        "--timeline-mark-cycles": "--env HOROVOD_TIMELINE_MARK_CYCLES=1",
        "--no-timeline-mark-cycles": "",
        "--no-stall-check": "--env HOROVOD_STALL_CHECK_DISABLE=1",
        "--stall-check": "",
        "--stall-check-warning-time-seconds N": "--env HOROVOD_STALL_CHECK_TIME_SECONDS={}",
        "--stall-check-shutdown-time-seconds N": "--env HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={}",
        "--gloo": Ignored("the collectives use gloo anyway"),
        "--gloo-timeout-seconds N": Ignored("a rank that is late is waited for and named; see --stall-check-…"),
        "--mpi": _MPI,
        "--jsrun": _MPI,
        "--mpi-args ARGS": _NO_MPI,
        "--mpi-threads-disable": _NO_MPI,
        "--no-mpi-threads-disable": _NO_MPI,
        "--tcp": _NO_MPI,
        "--binding-args ARGS": Ignored("--numa-binding binds ranks to cores"),
        "--disable-cache": Ignored("it is about checks of the launcher, and paceline makes them each time"),
        "--autotune": _TUNED,
        "--no-autotune": "",
        "--autotune-log-file FILE": _TUNED,
        "--autotune-warmup-samples N": _TUNED,
        "--autotune-steps-per-sample N": _TUNED,
        "--autotune-bayes-opt-max-samples N": _TUNED,
        "--autotune-gaussian-process-noise N": _TUNED,
        "--hierarchical-allreduce": _TUNED,
        "--no-hierarchical-allreduce": _TUNED,
        "--hierarchical-allgather": _TUNED,
        "--no-hierarchical-allgather": _TUNED,
        "--torus-allreduce": _TUNED,
        "--no-torus-allreduce": "",
        "--num-nccl-streams N": _TUNED,
        "--thread-affinity N": Ignored("--numa-binding binds ranks to cores"),
        "--log-level LEVEL": Ignored("paceline's Horovod API warns on stderr, and logs nothing else"),
        "--log-with-timestamp": "",
        "--log-without-timestamp --log-hide-timestamp": "",
        "--no-log-hide-timestamp": "",
        "-prefix-timestamp --prefix-output-with-timestamp": Ignored("times are kept; see paceline logs --timestamps"),
    },
    finish=_elastic,
    shortens=True,
)
