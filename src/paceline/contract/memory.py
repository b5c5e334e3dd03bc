"""How much memory there is, read from the kernel's files, and what of it a user lets a rank have.

Every function takes the files and folders that it reads as arguments, so that a test can pass others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

# The memory that a rank may use for training, such as "24G", in place of what its device or machine has.
MEMORY = "PACELINE_MEMORY"
# In `paceline plan`: the file that the script's process writes what it has measured to, before it ends.
PLAN = "PACELINE_PLAN"
# The numbers of ranks of that.
PLANNED = "PACELINE_PLANNED_RANKS"
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number near 2**63
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Memory:
    """Memory in bytes: of the machine, what could be used now, and what the cgroup allows (None: all of it)."""

    total: int
    available: int
    limit: int | None = None


class PlannedWay(TypedDict):
    """A way to keep a model: its memory in bytes, by what it is for, and whether that fits."""

    name: str
    parts: dict[str, int]
    total: int
    fits: bool


class PlannedRow(TypedDict):
    """What a number of ranks can do: which way would be chosen, all of them, and the one that the script names."""

    ranks: int
    memory: int
    used: float  # the part of it that may be used
    chosen: str
    ways: list[PlannedWay]
    own: PlannedWay | None


class Planned(TypedDict):
    """What the script's process writes in `paceline plan`."""

    model: str
    trained: int
    frozen: int
    units: int
    shard: bool | int | str
    together: str | None
    optimizers: list[str]
    measured: bool
    rows: list[PlannedRow]


def memory_given(env: Mapping[str, str]) -> int | None:
    """The bytes that a rank may use, if the environment says so.

    Raises:
        ValueError: it is not an amount.
    """
    text = env.get(MEMORY)
    return None if not text else amount(text, MEMORY)


def amount(text: str, name: str) -> int:
    """The bytes of "24G" or "512M", in powers of 1024; `name` is that of the option, for the message.

    Raises:
        ValueError: it is not an amount.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    size = 0 if match is None else int(float(match[1]) * 1024 ** _UNITS[match[2].upper()])
    if size < 1:
        raise ValueError(f"{name}={text}: it is not an amount of memory such as 24G or 512M")
    return size


def read(path: Path) -> str:
    """The text of a file of the kernel, empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: no file can have such a name
        return ""


def machine_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Memory:
    """The memory, and the tightest of the cgroups' limits when it is below what the machine has."""
    lines = re.findall(r"^(\w+):\s+([0-9]+) kB$", read(proc / "meminfo"), re.MULTILINE)
    amounts = {name: int(kib) << 10 for name, kib in lines}
    total = amounts.get("MemTotal", 0)
    available = amounts.get("MemAvailable", amounts.get("MemFree", 0))
    limit: int | None = None
    for path, text in limits_of_cgroups("memory", ("memory.max", "memory.limit_in_bytes"), proc, cgroup):
        allowed = number_of(text)
        if allowed is None or (total and allowed >= total):
            continue
        limit = allowed if limit is None else min(limit, allowed)
        used = number_of(read(path.with_name("memory.current")) or read(path.with_name("memory.usage_in_bytes"))) or 0
        cached = re.search(r"^(?:total_)?inactive_file ([0-9]+)$", read(path.with_name("memory.stat")), re.MULTILINE)
        used -= min(used, int(cached.group(1)) if cached else 0)  # the kernel drops this before it kills a process
        available = min(available, max(0, allowed - used))
    return Memory(total, available, limit)


def number_of(text: str) -> int | None:
    """The number in a file of a cgroup; None if it sets no limit."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) and int(text) < _NO_LIMIT else None


def limits_of_cgroups(controller: str, files: tuple[str, ...], proc: Path, cgroup: Path) -> list[tuple[Path, str]]:
    """Every file with one of these names in the cgroups of this process and those above, with its text.

    A container often sees the names of its cgroups outside but only the folders inside; names that are not there are
    passed over, down to the root of the hierarchy, which then is the container's own cgroup.
    """
    found = {}
    for line in read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            roots = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):
            roots = [cgroup / controllers, cgroup / controller]
        else:
            continue
        inner = Path(*(part for part in Path(name).parts if part not in ("/", "..")))
        for folder in (root / part for root in roots for part in (inner, *inner.parents)):
            found.update({folder / file: text for file in files if (text := read(folder / file))})
    return list(found.items())
