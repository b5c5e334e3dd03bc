"""What a job runs with: the versions of its software, and the commit of its code with the changes since."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from paceline.contract import found
from paceline.node.files import write_json
from paceline.node.machine.environments import packages_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.spec import NodeSpec

    class Origin(TypedDict, total=False):
        """What a job runs with, in origin.json."""

        software: dict[str, str]  # name → version
        commit: str
        branch: str
        diff: str


_NOTE = ".origin.paceline"  # in a copy of the code, which has no history of its own
_SECONDS = 20.0  # for a command
_MOST = 64 << 10  # bytes of the changes
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_NO_FETCH = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}  # which may run programs that the repository names
_NAMES = (
    "torch", "torchvision", "torchaudio", "triton", "tensorflow", "keras", "jax", "jaxlib", "paddlepaddle",
    "paddlepaddle-gpu", "mindspore", "numpy", "transformers", "datasets", "accelerate", "deepspeed", "lightning",
    "pytorch-lightning", "flash-attn", "xformers", "peft", "trl", "mpi4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_VERSIONS = """
import sys
sys.path.pop(0)
import json, platform
from importlib import metadata
found = {"Python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def write(run: RunDirectory, spec: NodeSpec, *, is_first: bool) -> None:
    """Find it out, and write origin.json; takes a second or so, and must be done once."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    env = {**own, **spec.env}
    origin: Origin = {}
    with contextlib.suppress(ValueError):
        versions = json.loads(_output([*spec.python, "-c", _VERSIONS, *_NAMES], spec.working_dir, env))
        origin["software"] = {**versions, **packages_of(spec.python[0])}
    if is_first:
        folder = Path(spec.working_dir)
        noted = next((it for at in (folder, *folder.parents) if (it := _noted(at / _NOTE)) is not None), None)
        origin = {**origin, **(_code(spec.working_dir, env) if noted is None else noted)}
    with contextlib.suppress(OSError):
        write_json(run.origin, origin)


def note(copy: Path, folder: Path | None) -> None:
    """Note in a copy of a folder which commit that has, and the changes since."""
    write_json(copy / _NOTE, {} if folder is None else _code(str(folder), os.environ))


def _noted(file: Path) -> Origin | None:
    try:
        note = json.loads(found.read(file) or b"null")
    except (OSError, ValueError, RecursionError):
        return None
    return cast("Origin", note) if isinstance(note, dict) else None


def _code(folder: str, env: Mapping[str, str]) -> Origin:
    commit = _git(("rev-parse", "HEAD"), folder, env).strip()
    if not commit:
        return {}
    return {
        "commit": commit,
        "branch": _git(("branch", "--show-current"), folder, env).strip(),
        "diff": _diff(folder, env),
    }


def _diff(folder: str, env: Mapping[str, str]) -> str:
    """The changes since the commit; the repository's filters, which are programs, do not run for them."""
    configured = _git(("config", "--name-only", "-z", "--get-regexp", r"^filter\."), folder, env).split("\0")
    drivers = {name.rpartition(".")[0] for name in configured if name}
    if any("=" in driver for driver in drivers):  # git takes what is before it for the name
        return ""
    off = [f"{it}.{key}" for it in sorted(drivers) for key in ("clean=", "process=", "required=false")]
    # In a submodule its own filters would run.
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    return _git((*(it for setting in off for it in ("-c", setting)), "diff", *options, "HEAD"), folder, env)


def _git(arguments: Sequence[str], folder: str, env: Mapping[str, str]) -> str:
    return _output([*_GIT, "-C", folder, *arguments], folder, {**env, **_NO_FETCH})


def _output(command: Sequence[str], folder: str, env: Mapping[str, str]) -> str:
    """What a command prints, up to `_MOST` bytes; "" if it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    text = done.stdout.decode(errors="replace")
    more = "" if len(text) <= _MOST else f"\n… and {len(text) - _MOST} more bytes\n"
    return text[:_MOST] + more if done.returncode == 0 else ""
