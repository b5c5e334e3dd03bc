"""What a user or `paceline tune` sets in place of a script: variables of the ranks, which the library reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Setting:
    """Something of a job that is tried with one value after the other."""

    variable: str  # that gives it to the ranks
    values: tuple[str, ...]  # that are tried if none are named
    form: str = r"[1-9]\d*"  # what a value looks like
    of: str = "run.dataloader"  # what of the script takes it; "" if every process does
    changes: bool = False  # whether another value is another optimisation, which is never chosen


SETTINGS = {
    "workers": Setting("PACELINE_NUM_WORKERS", ("0", "1", "2", "4"), r"\d+"),
    "prefetch": Setting("PACELINE_PREFETCH_FACTOR", ("2", "4", "8")),
    "pin_memory": Setting("PACELINE_PIN_MEMORY", ("0", "1"), "[01]"),
    "batch_size": Setting("PACELINE_BATCH_SIZE", (), changes=True),
    "threads": Setting("OMP_NUM_THREADS", ("1", "2", "4"), of=""),
    "bucket_mb": Setting("PACELINE_BUCKET_MB", ("1", "4", "25"), of="run.setup"),
    "precision": Setting("PACELINE_PRECISION", ("fp32", "bf16"), "fp32|bf16", of="run.setup"),
}
_taken: set[str] = set()  # settings that this process has used


def setting(name: str, env: Mapping[str, str]) -> str | None:
    """The value of a setting that the environment has; None if it has none."""
    variable, form = SETTINGS[name].variable, SETTINGS[name].form
    value = env.get(variable)
    if not value:
        return None
    if re.fullmatch(form, value) is None:
        raise ValueError(f"{variable}={value!r} is no value for {name}; it must match {form}")
    _taken.add(name)
    return value


def taken() -> list[str]:
    """The settings that the environment has and this process has used."""
    return sorted(_taken)
