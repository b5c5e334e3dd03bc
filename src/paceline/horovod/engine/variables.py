"""The HOROVOD_* variables that have a meaning here."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What the variables say; those that all ranks must share come from rank 0."""

    fusion_threshold: int = 128 * 1024 * 1024  # HOROVOD_FUSION_THRESHOLD, bytes of tensors in one; 0 fuses none
    cycle_time: float = 0.001  # HOROVOD_CYCLE_TIME in milliseconds, here in seconds: how long submissions are collected
    cache_capacity: int = 4096  # HOROVOD_CACHE_CAPACITY, operations whose responses are cached; 0 caches none
    stall_check: float = 60.0  # HOROVOD_STALL_CHECK_TIME_SECONDS; 0 if HOROVOD_STALL_CHECK_DISABLE is set
    stall_shutdown: float = 0.0  # HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; 0 for never
    timeline: str = ""  # HOROVOD_TIMELINE, a file; "" for none
    mark_cycles: bool = False  # HOROVOD_TIMELINE_MARK_CYCLES
    shared_memory: bool = True  # PACELINE_SHARED_MEMORY, whether ranks of one machine add up in memory that they share
    replicas: str = "check"  # HOROVOD_REPLICAS: "check", "warn" or "off"
    start_timeout: float = 600.0  # HOROVOD_ELASTIC_TIMEOUT, seconds that `init` waits for the other ranks

    @classmethod
    def read(cls) -> Settings:
        off = os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
        replicas = os.environ.get("HOROVOD_REPLICAS", "") or cls.replicas
        if replicas not in ("check", "warn", "off"):
            raise ValueError(f"HOROVOD_REPLICAS={replicas} is none of check, warn and off; correct or unset it")
        return cls(
            fusion_threshold=int(_number("HOROVOD_FUSION_THRESHOLD", cls.fusion_threshold)),
            cycle_time=_number("HOROVOD_CYCLE_TIME", cls.cycle_time * 1000) / 1000,
            cache_capacity=int(_number("HOROVOD_CACHE_CAPACITY", cls.cache_capacity)),
            stall_check=0.0 if off else _number("HOROVOD_STALL_CHECK_TIME_SECONDS", cls.stall_check),
            stall_shutdown=0.0 if off else _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown),
            timeline=os.environ.get("HOROVOD_TIMELINE", ""),
            mark_cycles=os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"),
            shared_memory=os.environ.get("PACELINE_SHARED_MEMORY", "1") != "0",
            replicas=replicas,
            start_timeout=_number("HOROVOD_ELASTIC_TIMEOUT", cls.start_timeout),
        )


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else float(default)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ValueError(f"{name}={text} is not a number of 0 or more; correct or unset it")
    return value
