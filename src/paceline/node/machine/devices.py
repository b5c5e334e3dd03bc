"""The accelerators and cores that a process started here may use, found without importing a framework."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.node.spec import NodeSpec

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NVIDIA = Path("/proc/driver/nvidia")
_NVIDIACTL = Path("/dev/nvidiactl")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def cores() -> int:
    """Cores that a process may use: its affinity, or the control group's quota if that is less."""
    from . import hardware

    found = hardware.cores()
    return found.usable if found.quota is None else max(1, min(found.usable, math.ceil(found.quota)))


def accelerators() -> tuple[str, ...]:
    """Names of the GPUs a process started here would see: the visibility variable's entries, or 0 … count - 1."""
    for variable in _VISIBLE:
        if variable in os.environ:
            names = map(str.strip, os.environ[variable].split(","))
            return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it
    return tuple(str(index) for index in range(_installed()))


def _installed() -> int:
    can_ask = _NVIDIACTL.exists() or shutil.which("nvidia-smi")  # containers often hide /proc/driver, and WSL has none
    if not (can_ask or _NVIDIA.exists() or _AMD.exists()):
        return 0
    from . import gpus

    found = gpus.nvidia_of_kernel(_NVIDIA) or gpus.amd_of_kernel(_AMD)
    if not found and can_ask:
        found, _ = gpus.parse_nvidia_smi(gpus.ask(gpus.NVIDIA_SMI_MODEL)[0], gpus.MODEL_FIELDS)
    return len(found)


def granted(spec: NodeSpec, names: tuple[str, ...]) -> NodeSpec:
    """The spec of a job to which the queue has granted these; slots are no accelerators, and ranks do not see them."""
    if spec.request is None or spec.request.slots:
        return spec
    return replace(spec, devices=names, env={**spec.env, **visibility(names)})


def visibility(names: tuple[str, ...]) -> dict[str, str]:
    """The variables that make these devices, and no others, visible to a process."""
    variables = ["CUDA_VISIBLE_DEVICES"] + (["HIP_VISIBLE_DEVICES"] if _AMD.is_dir() else [])
    found = dict.fromkeys(variables, ",".join(names))
    if names and not {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"} & os.environ.keys():
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the driver numbers them; CUDA itself begins with the fastest
    return found
