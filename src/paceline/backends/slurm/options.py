"""What a target on a Slurm cluster can set, and flags for one job; what counts if several of these say the same."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from paceline.job.errors import UserError, nearest
from paceline.job.model import Model, Parsers

from .sbatch_options import KNOWN, MAY_LACK_VALUE, OPPOSITE, OURS, SWITCHES, YES_OR_NO, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.job.spec import JobSpec

    Value = str | int | bool

MOST_TASKS = 1000  # of an array: each is a job of its own
# Field of a job → the flag, and the options of sbatch that say the same.
_SAME = {
    "queue": ("--queue", ("partition",)),
    "time_limit": ("--time-limit", ("time", "time-min")),
    "cpus": ("--cpus", ("cpus-per-task", "cpus-per-gpu")),
    "memory": ("--memory", ("mem", "mem-per-cpu", "mem-per-gpu")),
    "devices": ("--gpus", ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")),
}


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


def _login(name: Any) -> Any:
    if isinstance(name, str) and (name.startswith("-") or not name.isprintable() or len(name.split()) != 1):
        raise ValueError(f"{name!r} is not the name of a host; name a login node as ssh knows it")
    return name


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

    parsers: ClassVar[Parsers] = {"ssh": _login, "slurm": _known, "array": _array, "identity_file": _key}


# -- what sbatch is asked for if a job, --slurm and the settings say the same ------------------------------------------


def asked(spec: JobSpec, options: Mapping[str, Value], typed: Mapping[str, Value]) -> dict[str, Value]:
    """The options of sbatch without those of the settings that the job itself sets."""
    found = dict(options)
    for field, (flag, names) in _SAME.items():
        if getattr(spec, field) is None:
            continue
        for name in names:
            if name not in found or (name == "gres" and not _gpus(found[name])):
                continue
            if name in typed:
                if _agree(getattr(spec, field), name, str(found[name])):
                    continue
                raise UserError(f"{flag} and --slurm {name} say the same; give one")
            value = found.pop(name)
            if field == "devices":
                found.update(_of_kind(spec, name, str(value)))
    return found


def replaced(job: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """A job that is submitted again, without what it said of something that these changes say in the other way."""
    kept = {name_of(given): value for given, value in job.options.get("slurm", {}).items()}
    new: Any = (changes.get("options") or {}).get("slurm")
    pairs = new.items() if isinstance(new, dict) else ()  # anything else is refused later
    typed = {name_of(given): value for given, value in pairs if value != ""}  # others are taken back
    fields = {field: changes.get(field) for field in _SAME}
    remaining = asked(job.changed(fields), kept, {})
    gone = {
        field: None
        for field, (_, names) in _SAME.items()
        if fields[field] is None and any(name in typed and (name != "gres" or _gpus(typed[name])) for name in names)
    }
    return job.changed({**gone, "options": {**job.options, "slurm": remaining}} if kept else gone)


def _agree(asked: object, name: str, value: str) -> bool:
    """Whether an option of sbatch has what a field of the job has, perhaps with the kind of GPU."""
    if name in ("gres", "gpus-per-node"):
        kinds = _gpus(value) if name == "gres" else value.split(",")
        return [kind.rpartition(":")[2] for kind in kinds] == [str(asked)]
    return name in ("partition", "cpus-per-task") and value == str(asked)


def _gpus(gres: Value) -> list[str]:
    """Those of some generic resources that are GPUs."""
    return [part for part in str(gres).split(",") if part.startswith("gpu")]


def _of_kind(spec: JobSpec, name: str, value: str) -> dict[str, Value]:
    """As many GPUs as the job asks for, of the kind that the settings name, with their other generic resources."""
    gpus, others = _gpus(value), [part for part in value.split(",") if not part.startswith("gpu")]
    first = (gpus or ["gpu"])[0].split(":")[1:] if name == "gres" else value.split(":")  # a kind, a number or both
    has_kind = len(first) > 1 or (len(first) == 1 and not first[0].isdecimal())
    wanted = [f"gpu:{first[0]}:{spec.devices}"] if spec.devices and has_kind else []
    parts = [*wanted, *(others if name == "gres" else [])]
    return {"gres": ",".join(parts)} if parts else {}
