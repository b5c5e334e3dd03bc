"""What a script does before it imports its framework: the variables that it sets, and whether all of it is understood.

The fork server imports the framework before the script runs. This makes no difference only if nothing that the script
does before its own import can affect the framework. Understood are imports of packages that change no variable and of
the script's own modules, undecorated functions, names bound to literals, and `os.environ[…] = "literal"`. At anything
else reading ends, and the ranks are started by exec. No code is run.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .packages import BEFORE_TORCH, FRAMEWORKS, HARMLESS, standard_library

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MAX_FILES = 100


@dataclass(frozen=True)
class Prelude:
    """What a script does before it imports its framework."""

    variables: dict[str, str] = field(default_factory=dict)  # environment variables that it sets
    # the first thing that is not understood, such as `train.py:3 imports dotenv`; "" if there is none
    unclear: str = ""


def prelude_of(files: Sequence[Path], root: Path) -> Prelude:
    """What a script does before it imports its framework; `files` run in this order, its packages before itself."""
    reader, unclear = _Reader(root), ""
    try:
        for file in files:
            reader.read(file)
    except _ImportsFramework:
        pass
    except _Unclear as problem:
        unclear = str(problem)
    return Prelude(reader.variables, unclear)


class _ImportsFramework(Exception):
    """A framework is imported here."""


class _Unclear(Exception):
    """A statement may affect the framework, and only running it can show whether it does."""


class _Reader:
    """Reads modules, statement by statement; its own ones lie in `root`."""

    def __init__(self, root: Path) -> None:
        self.variables: dict[str, str] = {}
        self._root = root
        self._seen: set[Path] = set()

    def read(self, file: Path) -> None:
        """Read a module, once; one that cannot be read or parsed fails when it is run, and so counts as empty."""
        if file in self._seen:
            return
        self._seen.add(file)
        if len(self._seen) > _MAX_FILES:
            raise _Unclear(f"{file.name} is one of more than {_MAX_FILES} modules")
        try:
            statements = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError, ValueError, RecursionError):
            return
        for node in statements:
            if problem := self._problem(node, file):
                raise _Unclear(f"{file.name}:{node.lineno} {problem}")

    def _problem(self, node: ast.stmt, file: Path) -> str:
        """Why a statement is not understood; "" if it is."""
        if isinstance(node, ast.Import):
            return next(filter(None, (self._import(alias.name, self._root) for alias in node.names)), "")
        if isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if node.level else self._root
            names = (f"{node.module}.{it.name}" if node.module else it.name for it in node.names)  # perhaps of modules
            return next(filter(None, (self._import(it, folder, is_relative=node.level > 0) for it in names)), "")
        is_understood = self._sets_variables(node) or _does_nothing(node)
        return "" if is_understood else f"has {_text(node)}"

    def _sets_variables(self, node: ast.stmt) -> bool:
        """Note the variables that a statement sets to literals; returns whether it does nothing else."""
        if not isinstance(node, ast.Assign):
            return False
        value = _text_in(node.value)
        for target in node.targets:
            name = None
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) in ("os.environ", "environ"):
                name = _text_in(target.slice)
            if name is None or value is None:
                return False
            self.variables[name] = value
        return True

    def _import(self, name: str, folder: Path, *, is_relative: bool = False) -> str:
        """Read the import of a module; returns why it is not understood."""
        top = name.partition(".")[0]
        if not is_relative and top in FRAMEWORKS:
            raise _ImportsFramework
        if self._is_local(name.split("."), folder) or (is_relative and top == name):  # a name of the package itself
            return ""
        if not is_relative and (top == "paceline" or top in HARMLESS or top in standard_library()):
            return ""
        return f"imports {top}{' (which must come before torch)' if top in BEFORE_TORCH else ''}"

    def _is_local(self, parts: Sequence[str], folder: Path) -> bool:
        """Read a module in `folder`, its packages first; returns whether the first of these is there."""
        for index, part in enumerate(parts):
            package, module = folder / part / "__init__.py", folder / f"{part}.py"
            file = package if package.is_file() else module
            if file.is_file():
                self.read(file)
            elif not any((folder / part).glob("*.py" if index == len(parts) - 1 else "*")):
                return index > 0
            folder = folder / part
        return True


def _text_in(node: ast.expr) -> str | None:
    """The text that a literal is; None if it is another expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _does_nothing(node: ast.stmt) -> bool:
    """Whether a statement only defines a function, or names for literals."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        return not node.decorator_list and all(map(_is_literal, defaults))
    if isinstance(node, ast.Assign):
        return _is_literal(node.value) and all(isinstance(it, ast.Name) for it in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and (node.value is None or _is_literal(node.value))
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and _is_literal(node.value))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return False
    return True


def _text(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 40 else f"{text[:39]}…"
