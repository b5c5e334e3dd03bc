"""What a target on a Slurm cluster can set, and flags for one job."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from paceline.job.errors import nearest
from paceline.job.model import Model

from .sbatch_options import KNOWN, MAY_LACK_VALUE, OPPOSITE, OURS, SWITCHES, YES_OR_NO, name_of

MOST_TASKS = 1000  # of an array: each is a job of its own


def indices(array: str) -> list[int]:
    """The indices of an array as sbatch takes it: 0-3, 1,5,7 or 0-9:2, each with %MOST behind if need be."""
    text, percent, most = array.partition("%")
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part)
        those = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1) or 1) if match else range(0)
        if match is None or match[3] == "0" or not those or len(those) > MOST_TASKS:
            raise ValueError(_no_array(array))
        found.update(those)
    if len(found) > MOST_TASKS or (percent and (not most.isdecimal() or int(most) < 1)):
        raise ValueError(_no_array(array))
    return sorted(found)


def _no_array(array: str) -> str:
    return f"{array!r} names no array of up to {MOST_TASKS} jobs; write for example 0-3 or 1,5,7%2"


def _as_sbatch_has_it(given: str, name: str, value: str | int | bool) -> tuple[str, str | int | bool]:
    """An option and its value: True for one that has none, False for one that is left out."""
    if name in SWITCHES or name in MAY_LACK_VALUE:
        value = {"": True, "true": True, "yes": True, "false": False, "no": False}.get(str(value).lower(), value)
        if name in OPPOSITE and value is False:
            return OPPOSITE[name], True
        if name in SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{given} is a switch of sbatch and has no value; leave ={value} out")
    elif name in YES_OR_NO and isinstance(value, bool):
        value = "yes" if value else "no"
    elif value is True or value == "":
        raise ValueError(f"{given} needs a value; write it as {given}=VALUE")
    return name, value


def _known(options: Any) -> Any:
    found: dict[str, str | int | bool] = {}
    if not isinstance(options, dict):
        return options
    for given, value in options.items():
        name = name_of(given)
        if name in OURS:
            raise ValueError(f"{given} is not for --slurm: {OURS[name]}")
        if name not in KNOWN:
            raise ValueError(f"sbatch has no option {given!r}; {nearest(name, KNOWN)}")
        if not isinstance(value, (str, int)):
            return options  # which is refused for its type
        if isinstance(value, str) and any(letter in value for letter in "\n\r\0"):
            raise ValueError(f"{given}: its value has a line end, which no batch script can; write it in one line")
        name, written = _as_sbatch_has_it(given, name, value)
        if written is not False:
            found.pop(OPPOSITE.get(name, ""), None)  # the last one counts
            found[name] = written
    return found


def _array(array: Any) -> Any:
    if isinstance(array, str):
        indices(array)
    return array


def _key(file: Any) -> Any:
    if isinstance(file, str) and not os.path.exists(os.path.expanduser(file)):
        raise ValueError(f"no file {file!r}; name the private key that the login node accepts")
    return file


class Options(Model, frozen=True, kw_only=True):
    """The keys of a target other than `backend`; flags can set them too.

    Attributes:
        ssh: a login node that ssh reaches; the default is this machine.
        identity_file: the private key.
        python: the interpreter on login node and nodes.
        root: a folder that all nodes share.
        slurm: options of sbatch, such as partition, qos, account, constraint.
        chain: when a time limit ends the job, it goes on in a new job of Slurm.
        array: a job for each of these indices, such as 0-3%2.
        containers: what runs the images of --image.
    """

    ssh: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    identity_file: str | None = None
    python: str | None = None
    root: str = "~/.local/state/paceline"
    slurm: dict[str, str | int | bool] = {}
    chain: bool = False
    array: str | None = None
    containers: Literal["pyxis", "apptainer", "singularity"] | None = None

    parsers: ClassVar[dict[str, Any]] = {"slurm": _known, "array": _array, "identity_file": _key}
