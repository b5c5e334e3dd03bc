"""Reads a script without running it: whether it can run, and which framework it uses."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.node.errors import Refused

from .packages import standard_library
from .prelude import Prelude, prelude_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.contract.records import ProgramKind

# Which import means which framework. If there are several, the first of these wins: a script that imports horovod
# imports torch or tensorflow too, and ranks of every framework but horovod get torch's variables besides their own.
# MPI connects the ranks beside any of these, so it is none of them.
MPI = "mpi4py"
IMPORTS = {"horovod": "horovod", "paddle": "paddle", "tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}
# What trains with these uses optimizers, although it may not mention them.
_TRAINERS = frozenset({"accelerate", "fastai", "lightning", "pytorch_lightning", "transformers"})
NEED_TORCH = _TRAINERS | {"paceline"}
# These set variables from a file.
_SETTERS = frozenset({"dotenv", "environs"})
_MAX_FILES = 200
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")


@dataclass(frozen=True)
class Imports:
    """What a script imports, by top-level names."""

    required: frozenset[str] = frozenset()  # what it imports when it starts, unconditionally
    loaded: frozenset[str] = frozenset()  # the same of it and the modules beside it that are loaded with it
    every: frozenset[str] = frozenset()  # what any import statement in these files mentions, also within functions
    prelude: Prelude = field(default_factory=Prelude)  # what it does before it imports a framework
    optimizers: bool = False  # whether it uses optimizers of torch, and sets no variable that torch._dynamo reads
    # how it spells the argument --local_rank, which `torch.distributed.launch` gives to every script; "" if none has it
    local_rank: str = ""

    @property
    def packages(self) -> list[str]:
        """Every top-level module that is not in the standard library."""
        return sorted(self.every - standard_library())

    @property
    def framework(self) -> str | None:
        """The framework's name, or None when no known one is imported; what the script itself imports comes first."""
        for level in (self.required, self.loaded, self.every):
            for module, name in IMPORTS.items():
                if module in level:
                    return name
        return "torch" if self.every & NEED_TORCH else None

    @property
    def mpi(self) -> Literal["", "may", "must"]:
        """Whether it uses MPI: `may` if it has a framework, and imports mpi4py in a `try` or a function alone."""
        if MPI in self.required | self.loaded:
            return "must"
        if MPI in self.every:
            return "may" if self.framework else "must"
        return ""


def is_shell_text(path: Path, start: bytes | None = None) -> bool:
    """Whether a file is for `sh`, and does not say so in its first line."""
    if path.suffix != ".sh":
        return False
    if start is None:
        with open(path, "rb") as file:
            start = file.read(2)
    return not start.startswith(b"#!")


def program_kind(target: str, folder: Path) -> ProgramKind:
    """Whether `target` is a Python "script" or another "command" that its first line or bytes name."""
    path = folder / target
    if not target:
        raise Refused("the name of the script is empty; name a file")
    if path.is_dir():
        raise Refused(f"{target} is a folder, not a script; name the file in it, or use -m for a package")
    if not path.exists():
        if shutil.which(target) and os.sep not in target:
            raise Refused(f"no script {target} in {folder}; to run the program {target} from PATH add --no-python")
        raise Refused(f"no script {target} in {folder}; check the name and the folder")
    if path.is_char_device() or path.is_block_device() or path.is_socket():
        raise Refused(f"{target} is a device or a socket, not a script; name a file")
    try:
        with open(path, "rb") as file:
            start = file.read(128)
    except OSError as error:
        raise Refused(f"cannot read {target}: {error.strerror}; check its permissions") from None
    first_line = start.split(b"\n", 1)[0]
    foreign = start.startswith(b"\x7fELF") or (first_line.startswith(b"#!") and b"python" not in first_line)
    if is_shell_text(path, start):
        return "command"
    if path.suffix in (".py", ".pyc") or not foreign:
        return "script"
    if not os.access(path, os.X_OK):
        raise Refused(f"{target} is neither a Python script nor executable; run chmod +x {target}")
    return "command"


def run_by_python(command: Sequence[str]) -> tuple[ProgramKind, str] | None:
    """Kind and name of what a command such as `numactl -N 0 python -O train.py` runs in Python; None if it does not."""
    words = iter(command)
    if not any(_PYTHON.fullmatch(os.path.basename(word)) for word in words):
        return None
    for word in words:
        if word in ("-W", "-X"):
            next(words, None)
        elif not word.startswith("-"):
            return "script", word
        elif word.endswith("m") and not word.startswith("--"):
            return "module", next(words, "")
        elif word.endswith("c"):
            return None
    return None


def module_file(name: str, folder: Path) -> Path | None:
    """The file of a module that lies in `folder`, or None when it is installed elsewhere."""
    base = folder.joinpath(*name.split("."))
    candidates = (base.with_name(base.name + ".py"), base / "__main__.py", base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def imports_of(kind: ProgramKind, name: str, args: Sequence[str], folder: Path) -> Imports:
    """What a program in a folder imports; nothing if it is none of Python's."""
    if kind == "command":
        kind, name = run_by_python([name, *args]) or (kind, name)
    if kind == "script":
        file = folder / name
        return imports_of_file(file, file.parent)
    if kind == "module":
        found = module_file(name, folder)
        if found is None:
            return Imports(required=frozenset({name.partition(".")[0]}))
        return imports_of_file(found, folder, _packages_of(name, folder))
    return Imports()


def imports_of_file(file: Path, root: Path, packages: Sequence[Path] = ()) -> Imports:
    """What `file` and the modules in `root` that it imports import themselves. Broken files count as empty."""
    modules = list(_modules(file, root, top_level_only=False))
    every = frozenset(name for module in modules for name in _top(module.all_names))
    sets_variables = any(module.sets_variables for module in modules) or _SETTERS & every
    return Imports(
        required=frozenset(_top(_module(file).names)),
        loaded=frozenset(name for it in _modules(file, root, top_level_only=True) for name in _top(it.names)),
        every=every,
        prelude=prelude_of([*packages, file], root),
        optimizers=not sets_variables and bool(any(module.optimizers for module in modules) or _TRAINERS & every),
        local_rank=next((module.local_rank for module in modules if module.local_rank), ""),
    )


def _packages_of(name: str, folder: Path) -> list[Path]:
    """The files that `python -m name` runs before the module itself: those of the packages that it is in."""
    *parents, _ = [*name.split("."), ""] if folder.joinpath(*name.split(".")).is_dir() else name.split(".")
    files = [folder.joinpath(*parents[: count + 1], "__init__.py") for count in range(len(parents))]
    return [file for file in files if file.is_file()]


class _Module(NamedTuple):
    """What is looked for in a file."""

    names: frozenset[str] = frozenset()  # modules that it imports when it is loaded, as dotted names
    all_names: frozenset[str] = frozenset()  # the same with those that it imports within functions
    local_rank: str = ""  # the spelling in which it declares --local_rank; "" if it does not
    optimizers: bool = False  # whether it mentions torch.optim
    # whether it may set a variable that torch._dynamo reads, which has its effect then if the script does so after it
    # has imported torch
    sets_variables: bool = False


def _module(file: Path) -> _Module:
    """What is looked for in a file; nothing if it cannot be read or parsed."""
    try:
        status = file.stat()
        return _read(file, status.st_mtime_ns, status.st_size)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return _Module()


@functools.lru_cache(maxsize=4 * _MAX_FILES)  # several questions are asked of a file
def _read(file: Path, _changed: int, _size: int) -> _Module:  # these two notice that the file is another one now
    tree = ast.parse(file.read_bytes())
    nodes = list(ast.walk(tree))
    return _Module(
        names=_names(tree.body),
        all_names=_names(nodes),
        local_rank=next(_local_rank(nodes), ""),
        optimizers=any(_mentions(node, "optim") for node in nodes),
        sets_variables=may_set_variables(nodes),
    )


def _modules(file: Path, root: Path, top_level_only: bool) -> Iterator[_Module]:
    """A script and, transitively, the modules in `root` that it imports."""
    queue = [_module(file)]
    seen: set[Path] = set()
    while queue and len(seen) < _MAX_FILES:
        module = queue.pop(0)
        yield module
        for name in sorted(module.names if top_level_only else module.all_names):
            local = module_file(name, root)
            if local is not None and local not in seen:
                seen.add(local)
                queue.append(_module(local))


def _local_rank(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The arguments of `parser.add_argument("--local_rank", …)` and the like."""
    for node in nodes:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("add_argument", "option"):  # of argparse, of click
                given = [it.value for it in node.args if isinstance(it, ast.Constant)]
                yield from (flag for flag in ("--local_rank", "--local-rank") if flag in given)


def _mentions(node: ast.AST, name: str) -> bool:
    """Whether this is `torch.name`, or an import of it or from it."""
    if isinstance(node, ast.Attribute):
        return node.attr == name
    if isinstance(node, ast.Import):
        return any(name in alias.name.split(".") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return name in (node.module or "").split(".") or any(alias.name == name for alias in node.names)
    return False


def _top(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names if not name.startswith("paceline.node")}  # a function's own script


def _names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Dotted names of the modules that import statements among `nodes` name."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                names.add(node.module)
            elif node.level:
                names |= {alias.name for alias in node.names} | ({node.module} if node.module else set())
    return frozenset(names)


# -- whether a file may set variables that `torch._dynamo` reads when it is imported -----------------------------------

# What torch._dynamo and the packages that it imports read begins with one of these, or is one of the names below.
_PREFIXES = (
    "AOT", "CUTEDSL_", "CUTLASS_", "DUMP_AOT", "ENABLE_PERSISTENT_", "ENABLE_T", "FAKE_ALLOW_", "INDUCTOR",
    "LOG_AUTOTUNE", "LOG_TLPARSE", "MPMATH_", "PARTITIONER_",
    "PT2_", "PYTORCH", "SYMPY_", "TORCH", "TRITON", "UNSAFE_SKIP_",
)  # fmt: skip
_NAMES = frozenset({"CI", "CXX"})
_READERS = frozenset({"copy", "get", "items", "keys", "values", "__contains__", "__getitem__"})
_WRITERS = frozenset({"setdefault", "pop"})


def may_set_variables(nodes: Iterable[ast.AST]) -> bool:
    """Whether these nodes mention such a variable, or use `os.environ` in a way that may set one."""
    nodes = list(nodes)
    if any(_is_mentioned(node) or _is_renamed(node) for node in nodes):
        return True
    harmless = {id(use) for node in nodes for use in _harmless_uses(node)}
    return any(_is_environ(node) and id(node) not in harmless for node in nodes) or any(
        "putenv" in (getattr(node, "attr", ""), getattr(node, "id", "")) for node in nodes
    )


def _is_mentioned(node: ast.AST) -> bool:
    """Whether this is a constant, or the name of an argument (`update(CXX="c++")`), that names such a variable."""
    name = node.value if isinstance(node, ast.Constant) else node.arg if isinstance(node, ast.keyword) else None
    return isinstance(name, str) and (name.startswith(_PREFIXES) or name in _NAMES)


def _is_renamed(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and any(
        alias.name in ("environ", "putenv") and alias.asname is not None for alias in node.names
    )


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _harmless_uses(node: ast.AST) -> Iterator[ast.AST]:
    """Those parts of a node that are `os.environ`, and only read it or set variables with constant names."""
    if isinstance(node, ast.Subscript):
        if isinstance(node.ctx, ast.Load) or _is_text(node.slice):
            yield node.value
    elif isinstance(node, ast.Compare):
        yield from node.comparators
    elif isinstance(node, ast.Attribute):
        if node.attr in _READERS:
            yield node.value
    elif isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _WRITERS and node.args and _is_text(node.args[0]):
            yield function.value
    elif isinstance(node, ast.Dict):  # {**os.environ}
        yield from (value for key, value in zip(node.keys, node.values) if key is None)
    elif isinstance(node, ast.keyword):  # f(env=os.environ), f(**os.environ)
        yield node.value


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
