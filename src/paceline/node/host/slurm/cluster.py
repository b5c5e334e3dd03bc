"""Which Slurm cluster this machine belongs to. Several may mount one home, and number their jobs alike."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import TYPE_CHECKING

from paceline.contract.machine import boot_id
from paceline.node.files import read_json, write_json

from .call import Rejected, call

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"^ClusterName\s*=\s*(\S+)", re.MULTILINE)
_MOST = 100  # machines, each since its last start, whose clusters are kept


def known(root: Path) -> str | None:
    """The name of the cluster, "" if it has none; None if Slurm was never asked for it on this machine."""
    if os.environ.get("SLURM_JOB_ID") and os.environ.get("SLURM_CLUSTER_NAME"):
        return os.environ["SLURM_CLUSTER_NAME"].lower()
    kept = (read_json(root / "clusters.json") or {}).get(_here())
    return kept if isinstance(kept, str) else None


def asked(root: Path, seconds: float) -> str:
    """The name of the cluster, "" if it has none; it is asked for once on each machine."""
    found = known(root)
    if found is not None:
        return found
    try:
        match = _NAME.search(call("scontrol", "show", "config", seconds=seconds))
    except Rejected:
        match = None
    name = match[1].lower() if match is not None else ""
    others = list((read_json(root / "clusters.json") or {}).items())[-_MOST:]
    with contextlib.suppress(OSError):
        write_json(root / "clusters.json", {**dict(others), _here(): name})
    return name


def _here() -> str:
    """This machine since its last start, and the Slurm that it uses: some machines can choose one."""
    start = boot_id() or os.uname().nodename
    return " ".join((start, os.environ.get("SLURM_CONF", ""), shutil.which("scontrol") or ""))
