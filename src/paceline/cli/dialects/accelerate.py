"""`accelerate launch`.

Source: accelerate 1.15, `commands/launch.py` and `utils/launch.py`.
"""

from __future__ import annotations

from .cluster import has_devices
from .engine import Ignored, Line, Refused, Tool

_PLUGIN = Refused("give its settings to Accelerator() in the script, as a plugin")
_NO_TPU = Refused("paceline knows GPUs and CPUs")


def _devices(line: Line, value: str) -> None:
    if value != "all":
        line.add("--devices", value)


def _backend(line: Line, value: str) -> None:
    line.add("--env", f"ACCELERATE_DYNAMO_BACKEND={value.upper()}")


def _finish(line: Line) -> None:
    """Without a number of processes there is one for each GPU."""
    if line.get("-np") is None and (line.get("--devices") is not None or has_devices(line)):
        line.add("-n", "gpu")


_LAUNCH = Tool(
    "accelerate launch",
    {
        "--num-processes N": "-np",
        "--num-machines N": "--nnodes",
        "--machine-rank I": "--node-rank",
        "--main-process-ip HOST": "--master-addr",
        "--main-process-port PORT": "--master-port",
        "--multi-gpu": "",
        "--gpu-ids LIST": _devices,
        "--cpu": "--env ACCELERATE_USE_CPU=true",
        "--num-cpu-threads-per-process N": "--env OMP_NUM_THREADS={}",
        "--enable-cpu-affinity": "--numa-binding node",
        "--mixed-precision HOW": "--env ACCELERATE_MIXED_PRECISION={}",
        "--dynamo-backend NAME": _backend,
        "--dynamo-mode MODE": "--env ACCELERATE_DYNAMO_MODE={}",
        "--dynamo-use-fullgraph": "--env ACCELERATE_DYNAMO_USE_FULLGRAPH=True",
        "--dynamo-use-dynamic": "--env ACCELERATE_DYNAMO_USE_DYNAMIC=True",
        "--dynamo-use-regional-compilation": "--env ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=True",
        "--gradient-accumulation-steps N": "--env ACCELERATE_GRADIENT_ACCUMULATION_STEPS={}",
        "--debug": "--env ACCELERATE_DEBUG_MODE=true",
        "-m --module": "-m",
        "--no-python": "--no-python",
        "--max-restarts N": "--max-restarts",
        "--role NAME": "--role",
        "--log-dir DIR": "--log-dir",
        "-t --tee SPEC": "-t",
        "--monitor-interval SECONDS": Ignored("paceline waits for events"),
        "--rdzv-backend NAME": Ignored("paceline's agents find each other without it"),
        "--rdzv-conf K=V,…": "--rdzv-conf",
        "--same-network": "",
        "-q --quiet": "",
        "--config-file FILE": Refused("give what it says by flags, or in a job file; see paceline init"),
        "--main-training-function NAME": _NO_TPU,
        "--tpu": _NO_TPU,
        "--tpu-* VALUE": _NO_TPU,
        "--no-tpu-cluster": _NO_TPU,
        "--vm VALUE": _NO_TPU,
        "--downcast-bf16": _NO_TPU,
        "--env NAME=VALUE": "--env",
        "--use-*": _PLUGIN,
        "--fsdp-* VALUE": _PLUGIN,
        "--deepspeed-* VALUE": _PLUGIN,
        "--zero-stage N": _PLUGIN,
        "--zero3-* VALUE": _PLUGIN,
        "--offload-* VALUE": _PLUGIN,
        "--gradient-clipping VALUE": _PLUGIN,
        "--megatron-lm-* VALUE": _PLUGIN,
        "--parallelism-config-* VALUE": _PLUGIN,
        "--fp8-* VALUE": _PLUGIN,
        "--aws-* VALUE": Refused("paceline starts jobs on machines that are there; see docs/jobs.md"),
        "--mpirun-hostfile FILE": "--hostfile",
    },
    finish=_finish,
)
ACCELERATE = Tool(
    "accelerate",
    tools={
        "launch": _LAUNCH,
        "config": Refused("paceline init writes a job file"),
        "env": Refused("write paceline check"),
        "test": Refused("write paceline check"),
    },
)
