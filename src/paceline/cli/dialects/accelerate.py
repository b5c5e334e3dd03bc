"""`accelerate launch`.

Source: accelerate 1.15, `commands/launch.py` and `utils/launch.py`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from paceline.job.errors import UserError

from .cluster import has_devices
from .engine import Document, Ignored, Line, Refused, Tool, knows, later, normal, parse

_PLUGIN = Refused("give its settings to Accelerator() in the script, as a plugin")
_HOSTS = Refused("-H or --hostfile names the hosts, and --devices the GPUs")
_SETTINGS = {"use_cpu": "cpu"}  # keys of its settings that are not called as their flag
_NO_FLAGS = (
    "compute_environment", "distributed_type", "main_training_function", "downcast_bf16", "rdzv_backend",
    "same_network",
)  # fmt: skip
# What the keys in a part of its settings begin with, written or not.
_PREFIXES = {it: it.replace("config", "") for it in ("fsdp_config", "fp8_config", "dynamo_config")}
_PREFIXES["parallelism_config"] = "parallelism_config_"
# What accelerate launch --use_fsdp sets where no flag says otherwise, and the plugin would not.
_FSDP = {
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
}
_NO_TPU = Refused("paceline knows GPUs and CPUs")


def _devices(line: Line, value: str) -> None:
    if value != "all":
        line.add("--devices", value)


def _port(line: Line, value: str) -> None:
    if value != "0":  # a free one
        line.add("--master-port", value)


def _backend(line: Line, value: str) -> None:
    line.add("--env", f"ACCELERATE_DYNAMO_BACKEND={value.upper()}")


def _settings(path: str) -> list[str]:
    """The flags that a file of `accelerate config` stands for."""
    import yaml

    from paceline.job.yaml_files import load

    try:
        found = load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "it is no YAML"
        raise UserError(f"--config-file {path}: {reason}; write the line where the file is") from None
    if not isinstance(found, dict):
        raise UserError(f"--config-file {path}: it holds no settings; accelerate config writes such a file")
    return _words(found)


def _words(content: Document) -> list[str]:
    """The flags that settings stand for."""
    found = dict(content)
    for part, inner in content.items():
        begin = _PREFIXES.get(part, "")
        for name, value in inner.items() if isinstance(inner, dict) else ():
            found[name if name.startswith(begin) else f"{begin}{name}"] = value
    kind = str(found.get("distributed_type", "no")).lower()
    if kind in ("fsdp", "deepspeed", "megatron_lm"):
        found[f"use_{kind}"] = True
    alone = ("num_machines", "machine_rank", "main_process_ip") if found.get("num_machines") == 1 else ()
    return [
        f"--{_SETTINGS.get(name, name)}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in found.items()
        if isinstance(value, (str, int, float)) and name not in (*_NO_FLAGS, *alone) and not name.startswith("tpu_")
    ]


def _default(line: Line) -> str | None:
    """The file that `accelerate config` has written, which counts where no flag says otherwise."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(caches, "huggingface"))
    path = Path(home, "accelerate/default_config.yaml").expanduser()
    if "--cpu" in line.given or not path.is_file():
        return None
    line.notes.append(f"the settings of {path} count where no flag says otherwise; --config_file names another file")
    return str(path)


def _add_words(line: Line, words: list[str]) -> None:
    known = [word for word in words if knows(_LAUNCH, normal(word.partition("=")[0]))]
    inner = parse(replace(_LAUNCH, finish=None), [*known, "SCRIPT"])
    given = {words[1].partition("=")[0] for words in line.flags if words[0] == "--env"}
    line.flags[:0] = [it for it in inner.flags if it[0] != "--env" or it[1].partition("=")[0] not in given]
    line.notes += inner.notes
    line.notes += [f"{word} of the settings has no effect: it is unknown" for word in words if word not in known]


def with_settings(content: Document) -> Line:
    """The line that settings alone become."""
    line = Line()
    _add_words(line, _words(content))
    _complete(line)
    return line


def _divide(line: Line) -> None:
    """Give each machine as many ranks as accelerate does, which rounds down."""
    ranks, machines = line.get("-np") or "", line.get("--nnodes") or "1"
    if not (ranks + machines).isdecimal() or not ranks or not int(machines) or int(ranks) % int(machines) == 0:
        return
    each = int(ranks) // int(machines)
    if not each:
        raise UserError(f"--num_processes {ranks} on {machines} machines: write at least one for each")
    line.take("-np")
    line.add("-n", str(each))
    both = f"--num_processes {ranks} on {machines} machines"
    line.notes.append(f"{both}: accelerate starts {each} on each, {each * int(machines)} in all")


def _finish(line: Line) -> None:
    """What the file of settings says, but what flags say otherwise."""
    if (path := line.given.get("--config-file") or _default(line)) is not None:
        _add_words(line, _settings(path))
    _complete(line)


def _complete(line: Line) -> None:
    """Without a number of processes there is one for each GPU; FSDP has settings of its own."""
    given = {pair.partition("=")[0] for _, pair in (words for words in line.flags if words[0] == "--env")}
    if "ACCELERATE_USE_FSDP" in given:
        line.flags += [("--env", f"{name}={value}") for name, value in _FSDP.items() if name not in given]
    _divide(line)
    if line.get("-np") is None and line.get("-n") is None and (line.get("--devices") is not None or has_devices(line)):
        line.add("-n", "gpu")


_LAUNCH = Tool(
    "accelerate launch",
    {
        "--num-processes N": "-np",
        "--num-machines N": "--nnodes",
        "--machine-rank I": "--node-rank",
        "--main-process-ip HOST": "--master-addr",
        "--main-process-port PORT": _port,
        "--multi-gpu": Ignored("each rank takes a GPU where the machine has some"),
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
        "--config-file FILE": later,
        "--main-training-function NAME": _NO_TPU,
        "--tpu": _NO_TPU,
        "--tpu-* VALUE": _NO_TPU,
        "--no-tpu-cluster": _NO_TPU,
        "--vm VALUE": _NO_TPU,
        "--downcast-bf16": _NO_TPU,
        "--env NAME=VALUE": "--env",
        "--use-fsdp": "--env ACCELERATE_USE_FSDP=true",
        "--fsdp-transformer-layer-cls-to-wrap NAMES": "--env FSDP_TRANSFORMER_CLS_TO_WRAP={}",
        "--fsdp-* VALUE": "--env FSDP_{*}={}",
        "--use-deepspeed": "--env ACCELERATE_USE_DEEPSPEED=true",
        "--zero-stage N": "--env ACCELERATE_DEEPSPEED_ZERO_STAGE={}",
        "--zero3-init-flag BOOL": "--env ACCELERATE_DEEPSPEED_ZERO3_INIT={}",
        "--zero3-* BOOL": "--env ACCELERATE_DEEPSPEED_ZERO3_{*}={}",
        "--offload-* VALUE": "--env ACCELERATE_DEEPSPEED_OFFLOAD_{*}={}",
        "--gradient-clipping VALUE": "--env ACCELERATE_GRADIENT_CLIPPING={}",
        "--deepspeed-hostfile FILE": "--hostfile",
        "--deepspeed-exclusion-filter --deepspeed-inclusion-filter HOSTS": _HOSTS,
        "--deepspeed-multinode-launcher NAME": Ignored("paceline starts the ranks itself"),
        "--deepspeed-* VALUE": "--env ACCELERATE_DEEPSPEED_{*}={}",
        "--use-megatron-lm": _PLUGIN,
        "--use-parallelism-config": _PLUGIN,
        "--use-xpu --use-mps-device": _NO_TPU,
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
