"""What sbatch is asked for if a job, --slurm and the target's settings say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError

from .sbatch_options import name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.job.spec import JobSpec

    Value = str | int | bool

# Field of a job → the flag, and the options of sbatch that say the same.
_SAME = {
    "queue": ("--queue", ("partition",)),
    "time_limit": ("--time-limit", ("time", "time-min")),
    "cpus": ("--cpus", ("cpus-per-task", "cpus-per-gpu")),
    "memory": ("--memory", ("mem", "mem-per-cpu", "mem-per-gpu")),
    "devices": ("--gpus", ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")),
}


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
    kind = (gpus or [""])[0].split(":")[1:2] if name == "gres" else value.split(":")[:1]
    wanted = [f"gpu:{kind[0]}:{spec.devices}"] if spec.devices and kind and not kind[0].isdecimal() else []
    parts = [*wanted, *(others if name == "gres" else [])]
    return {"gres": ",".join(parts)} if parts else {}
