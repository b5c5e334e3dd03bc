"""The installed Python packages, found without importing them."""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.memory import read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# module → the distributions that provide it
PACKAGES = {
    "torch": ("torch",),
    "horovod": ("horovod",),
    "paddle": ("paddlepaddle-gpu", "paddlepaddle"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly"),
    "jax": ("jax",),
    "numpy": ("numpy",),
}
# The same for others, whose versions are only compared; torch computes with NVIDIA's NCCL.
_DISTRIBUTIONS = {
    "torch": ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    "PIL": ("pillow",), "cv2": ("opencv-python", "opencv-python-headless"), "skimage": ("scikit-image",),
    "sklearn": ("scikit-learn",), "yaml": ("pyyaml",), **{name: () for name in PACKAGES if name != "torch"},
    "numpy": ("numpy",),
}  # fmt: skip
FRAMEWORKS = tuple(name for name in PACKAGES if name != "numpy")


@dataclass(frozen=True)
class Python:
    """The interpreter that ranks will run on."""

    version: str
    executable: str
    environment: str | None


@dataclass(frozen=True)
class Package:
    """An installed package."""

    version: str | None  # as its metadata has it, None when it has none
    build: str | None = None  # of torch, what it computes on: "CPU", "CUDA 12.6", "ROCm 6.2"; None when it is not known


def python() -> Python:
    """This interpreter; the environment is a virtual one, or conda's."""
    conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
    return Python(
        version=platform.python_version(),
        executable=sys.executable,
        environment=sys.prefix if sys.prefix != sys.base_prefix or conda else None,
    )


def packages(folder: Path, path: Sequence[str] | None = None) -> dict[str, Package | None]:
    """The frameworks and numpy; a file in `folder` is no installed package, though Python would import it there."""
    return {name: package(name, folder, path) for name in PACKAGES}


def package(name: str, folder: Path, path: Sequence[str] | None = None) -> Package | None:
    """One of them."""
    return _package(name, folder, sys.path if path is None else path)


def versions(modules: Sequence[str]) -> dict[str, str]:
    """The versions of the distributions with these modules, as far as both have one name, or one that is known."""
    found = {}
    for module in modules:
        for name in _DISTRIBUTIONS.get(module, (module,)):
            with contextlib.suppress(metadata.PackageNotFoundError, ValueError):  # ValueError: it is no name
                found[name] = metadata.version(name)
    return found


def _package(name: str, folder: Path, path: Sequence[str]) -> Package | None:
    version = None
    for distribution in PACKAGES[name]:
        try:
            version = metadata.version(distribution)
            break
        except metadata.PackageNotFoundError:
            continue
    spec = _elsewhere(name, folder, path)
    if spec is None and version is not None:
        spec = importlib.util.find_spec(name)  # an editable installation, found by a hook of its own
    if spec is None or spec.origin is None:
        return None
    own = read(Path(spec.origin).with_name("version.py")) if name == "torch" else ""
    stated = assigned(own, "__version__")
    return Package(version or (stated if isinstance(stated, str) else None), torch_build(own) if own else None)


def _elsewhere(name: str, folder: Path, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    others = [entry for entry in path if entry and (not _same(entry, folder) or folder.name.endswith("-packages"))]
    return importlib.machinery.PathFinder.find_spec(name, others)


def _same(one: str | Path, other: str | Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def torch_build(text: str) -> str | None:
    """What torch computes on, from the text of its version.py; None when the text does not say."""
    for variable, word in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        value = assigned(text, variable)
        if isinstance(value, str) and value:
            return f"{word} {value}"
    return "CPU" if re.search(r"^cuda\b", text, re.MULTILINE) else None


def assigned(text: str, name: str) -> object:
    """The literal that a line `name = …` or `name: type = …` of Python text assigns; None when there is none."""
    found = re.search(rf"^{re.escape(name)}[ \t]*(?::[^=\n]*)?=[ \t]*([^\n]+)$", text, re.MULTILINE)
    try:
        return ast.literal_eval(found.group(1).strip()) if found else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def shadows(folder: Path, path: Sequence[str] | None = None) -> dict[str, str]:
    """Files in `folder` that Python would import in place of a framework or of its own library: module → file."""
    standard = set(getattr(sys, "stdlib_module_names", ())) - set(sys.builtin_module_names)
    if _same(folder, os.path.dirname(os.__file__)):
        standard = set()
    found = {}
    for name in (*PACKAGES, *sorted(standard)):
        for file in (f"{name}.py", os.path.join(name, "__init__.py")):
            if (folder / file).is_file() and (name in standard or _hides(name, folder, path)):
                found[name] = file
    return found


def _hides(name: str, folder: Path, path: Sequence[str] | None) -> bool:
    return (folder / f"{name}.py").is_file() or _elsewhere(name, folder, sys.path if path is None else path) is not None


def virtual_environment_elsewhere(env: Mapping[str, str]) -> str | None:
    """The active virtual environment, when it is not this interpreter's."""
    active = env.get("VIRTUAL_ENV")
    return active if active and not _same(active, sys.prefix) else None
