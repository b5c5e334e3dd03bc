"""What a warm server has imported, from which files, and which variables decided what the imports did."""

from __future__ import annotations

import contextlib
import os
import site
import sys
from typing import TYPE_CHECKING, Any

from paceline.node.ranks.forkserver import import_shared

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

# Read by the interpreter and the dynamic loader before a program runs.
_AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_")
_NAMES = frozenset({"LANG", "LANGUAGE", "TZ", "HOME"})
# Read by C libraries of modules, where Python does not see it.
_BY_LIBRARIES = (
    "OMP_", "GOMP_", "KMP_", "LIBOMP_", "MKL_", "OPENBLAS_", "GOTO_",
    "BLIS_", "VECLIB_", "NUMEXPR_", "NPY_", "TORCH", "PYTORCH_", "ATEN_", "CAFFE2_", "C10_", "GLOO_", "TP_", "UCC_",
    "ONEDNN_", "DNNL_", "TF_", "XLA_", "JAX_", "FLAGS_", "GLOG_", "TRITON_",
)  # fmt: skip
THREADS = "OMP_NUM_THREADS"
_OVER_THREADS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")  # which count for more
# Variables that a launcher sets for its ranks, and those that only a rank's own start reads.
_NOT = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC", "TP_SOCKET", "GLOO_SOCKET")


def serves_fewer_threads(modules: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether ranks of a process that has imported these can be told to use fewer threads than it was to use."""
    is_known = all(name.partition(".")[0] in ("torch", "numpy") for name in modules)
    return "torch" in modules and is_known and not any(name in env for name in _OVER_THREADS)


def deciding(env: Mapping[str, str], modules: Sequence[str]) -> dict[str, str]:
    """The variables that may decide what the import of modules does, as far as that is known before it."""
    prefixes = (*_AT_START, *(_BY_LIBRARIES if modules else ()))
    return {
        name: value
        for name, value in env.items()
        if name in _NAMES or (name.startswith(prefixes) and not name.startswith(_NOT))
    }


class _Recorder(type(os.environ)):  # type: ignore[misc]  # the class has no public name
    """`os.environ`, which notes which variables are read one by one; a loop over all of them says nothing."""

    def __getitem__(self, key: str) -> str:
        if key != self.__dict__.get("passing"):
            self.__dict__["read"].add(key)
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.__dict__["passing"] = key
            yield key
        self.__dict__["passing"] = None


class Imported:
    """Imports modules, and remembers what that depended on.

    Attributes:
        changes: by module, variables that its import has set; None for those that it has removed.
        names: of the variables that have decided something.
        tops: names of the top-level modules that were imported: a script's folder must not have another one.
    """

    def __init__(self, modules: Sequence[str], before: Collection[str]) -> None:
        """Import the modules."""
        environ: Any = os.environ
        at_start, plain = dict(environ), environ.__class__
        self.changes: dict[str, dict[str, str | None]] = {}
        environ.__dict__.update(read=set(), passing=None)
        environ.__class__ = _Recorder
        try:
            for name in modules:
                old = dict(environ.items())
                import_shared(name)
                now = dict(environ.items())
                self.changes[name] = {it: now.get(it) for it in {*old, *now} if old.get(it) != now.get(it)}
        finally:
            read: set[str] = environ.__dict__.pop("read")
            del environ.__dict__["passing"]
            environ.__class__ = plain
        self._modules = modules
        self.names = read | set(deciding(at_start, modules))
        self._env = {name: value for name, value in at_start.items() if name in self.names}
        self.tops = {name.partition(".")[0] for name in sys.modules} - {"paceline", "__main__"}
        self.tops -= {name.partition(".")[0] for name in before}
        self._files: dict[str, tuple[int, int, int] | None] = dict(_files())
        self._files.update({path: _identity(path) for path in _installed()})

    def other_variable(self, env: Mapping[str, str]) -> str:
        """The first variable that decides something and is different in `env`, as a message; "" if there is none."""
        for name in sorted(self.names | set(deciding(env, self._modules))):
            here, there = self._env.get(name), env.get(name)
            if here != there and not (name == THREADS and self._serves(here, there)):
                values = ["not set" if value is None else f"{value[:40]!r}" for value in (there, here)]
                return f"{name} is {values[0]}, and was {values[1]} when the warm process imported its modules"
        return ""

    def _serves(self, here: str | None, threads: str | None) -> bool:
        """Whether ranks can have so many threads: their number is set after the fork."""
        counts = [int(it) for it in (threads, here) if it is not None and it.isdecimal()]
        return serves_fewer_threads(self._modules, self._env) and len(counts) == 2 and 1 <= counts[0] <= counts[1]

    def changed_file(self) -> str:
        """A file that has changed since it was imported; "" if none has."""
        for path, before in self._files.items():
            if _identity(path) != before:
                return path
        return ""

    def shadowed(self, folder: str) -> str:
        """A module in a folder that has the name of one that was imported from elsewhere; "" if there is none."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                name, dot, ending = entry.name.partition(".")
                file = str(getattr(sys.modules.get(name), "__file__", None) or "")
                if file.startswith(os.path.join(os.path.realpath(folder), "")) or file.startswith(f"{folder}/"):
                    continue
                if name in self.tops and (
                    (dot and ending.endswith(("py", "so", "pyc"))) or os.path.isfile(f"{entry.path}/__init__.py")
                ):
                    return entry.name
        return ""


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _installed() -> Iterator[str]:
    """Where packages are installed: what is added there the interpreter and imports look for when they begin."""
    for folder in {*site.getsitepackages(), site.getusersitepackages()}:
        yield folder
        with contextlib.suppress(OSError):
            yield from (it.path for it in os.scandir(folder) if it.name.endswith(".pth"))


def _files() -> Iterator[tuple[str, tuple[int, int, int]]]:
    """The files of all modules, and the libraries that the process has mapped, with what identifies their content."""
    paths = {sys.executable}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            paths.add(path)
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths.update(line[line.index("/") : -1] for line in maps if "/" in line and " (deleted)" not in line)
    for path in paths:
        identity = _identity(path)
        if identity is not None and not path.startswith(("/dev/", "/memfd:")):
            yield path, identity
