"""What a script does before it imports its framework: the variables that it sets, and whether all of it is understood.

The fork server imports the framework before the script runs. This makes no difference only if nothing that the script
does before its own import can affect the framework. Understood are imports, definitions, expressions that call only
packages which change no variable, and variables set to literals. At anything else reading ends, and the ranks are
started by exec. No code is run.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .packages import BEFORE_TORCH, FRAMEWORKS, HARMLESS, POWERFUL, is_installed, standard_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_CALLS = frozenset({
    "os.cpu_count", "os.environ.get", "os.getcwd", "os.getenv", "os.getpid", "os.makedirs", "sys.path.append",
    "sys.path.insert",
})  # fmt: skip  # of os and sys; what lies in os.path too
_BUILTINS_THAT_RUN = frozenset({"__import__", "compile", "delattr", "eval", "exec", "globals", "setattr", "vars"})
_TRANSPARENT = (
    ast.BinOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Dict, ast.FormattedValue, ast.IfExp, ast.JoinedStr, ast.List,
    ast.Set, ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp,
)  # fmt: skip
_POWERFUL = ("os.environ", "os.putenv", "os.unsetenv", "os.exec", "sys.modules")
_VALUE = "a value"  # what a name stands for that is bound to an expression
_MAX_FILES = 100


@dataclass(frozen=True)
class Prelude:
    """What a script does before it imports its framework.

    Attributes:
        variables: environment variables that it sets to constants.
        defaults: those that it sets only if they are not set.
        unclear: the first thing that is not understood, such as `train.py:3 imports dotenv`; "" if there is none.
    """

    variables: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    unclear: str = ""


def prelude_of(files: Sequence[Path], root: Path) -> Prelude:
    """What a script does before it imports its framework."""
    found, unclear = Prelude(), ""
    read: set[Path] = set()
    try:
        for file in files:
            _Reader(found, read, root, file, is_main=file == files[-1]).run()
    except _ImportsFramework:
        pass
    except _Unclear as problem:
        unclear = str(problem)
    return Prelude(found.variables, found.defaults, unclear)


class _ImportsFramework(Exception):
    """A framework is imported here."""


class _Unclear(Exception):
    """A statement may affect the framework, and only running it can show whether it does."""


class _Reader:
    """Reads the statements of a module, in order, and adds the variables that they set to `found`."""

    def __init__(self, found: Prelude, read: set[Path], root: Path, file: Path, *, is_main: bool = False) -> None:
        self._found, self._read, self._root, self._file, self._is_main = found, read, root, file, is_main
        self._names: dict[str, str | None] = {"__file__": _VALUE, "__name__": _VALUE}  # to what they are: "os.environ"
        self._may_fail = self._is_conditional = False  # whether this is in a `try`, in an `except`

    def run(self) -> None:
        """Read a module, once; one that cannot be read or parsed fails when it is run, and so counts as empty."""
        if self._file in self._read:
            return
        self._read.add(self._file)
        if len(self._read) > _MAX_FILES:
            raise _Unclear(f"{self._file.name} is one of more than {_MAX_FILES} modules")
        try:
            tree = ast.parse(self._file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return
        self._block(tree.body)

    def _block(self, statements: Iterable[ast.stmt]) -> None:
        for node in statements:
            self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import):
            self._import(node)
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._definition(node)
        elif isinstance(node, ast.Assign):
            self._assignment(node.targets, node.value, node)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assignment([node.target], node.value, node)
        elif isinstance(node, ast.Expr):
            self._expression(node.value)
        elif isinstance(node, ast.If):
            self._if(node)
        elif isinstance(node, ast.Try):
            self._try(node)
        elif not isinstance(node, ast.Pass):
            raise self._unclear(node, f"has {_text(node)}")

    def _if(self, node: ast.If) -> None:
        test = _text(node.test)
        if test in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._block(node.orelse)
        elif test == "__name__ == '__main__'":
            self._block(node.body if self._is_main else node.orelse)
        else:
            raise self._unclear(node, f"has {_text(node)}")

    def _try(self, node: ast.Try) -> None:
        self._may_fail = True
        self._block(node.body)
        self._may_fail, self._is_conditional = False, True
        for handler in node.handlers:
            self._block(it for it in handler.body if not isinstance(it, ast.Raise))
        self._is_conditional = False
        self._block([*node.orelse, *node.finalbody])

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._names[node.name] = None  # a call of it is not understood
        for decorator in node.decorator_list:
            self._expression(decorator)
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self._expression(default)
            return
        for expression in (*node.bases, *(keyword.value for keyword in node.keywords)):
            self._expression(expression)
        names, self._names = self._names, dict(self._names)
        self._block(node.body)
        self._names = names

    def _assignment(self, targets: Iterable[ast.expr], value: ast.expr, node: ast.stmt) -> None:
        for target in targets:
            if isinstance(target, ast.Subscript) and self._dotted(target.value) == "os.environ":
                variable, text = self._literals(target.slice, value, node)
                self._found.variables[variable] = text
                continue
            self._expression(value)
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if not isinstance(name, ast.Name):
                    raise self._unclear(node, f"changes {_text(name)}")
                self._names[name.id] = _VALUE

    def _literals(self, name: ast.expr, value: ast.expr, node: ast.AST) -> tuple[str, str]:
        """Name and value of a variable that is set, if they are literals and it is set for certain."""
        key, text = (it.value if isinstance(it, ast.Constant) else None for it in (name, value))
        if not isinstance(key, str) or not isinstance(text, str):
            what = key if isinstance(key, str) else "a variable"
            raise self._unclear(node, f"sets {what} to a value that is computed")
        if self._is_conditional:
            raise self._unclear(node, f"may set {key}")
        return key, text

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _dotted(self, node: ast.AST) -> str | None:
        """What a name or an attribute stands for, such as `os.environ.get`; None if that is not known."""
        if isinstance(node, ast.Attribute):
            holder = self._dotted(node.value)
            if holder is None and isinstance(node.value, (ast.Call, ast.Constant, ast.JoinedStr, ast.Subscript)):
                self._expression(node.value)
                return _VALUE
            return holder if holder in (None, _VALUE) else f"{holder}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        is_builtin = hasattr(builtins, node.id) and node.id not in _BUILTINS_THAT_RUN
        return self._names.get(node.id, f"builtins.{node.id}" if is_builtin else None)

    def _expression(self, node: ast.expr) -> None:
        """Read an expression whose value is used in no way that matters."""
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            meaning = self._dotted(node)
            if meaning is None or meaning in ("os", "sys") or meaning.startswith(_POWERFUL):
                raise self._unclear(node, f"uses {_text(node)}")
        elif isinstance(node, _TRANSPARENT):
            for child in ast.iter_child_nodes(node):
                reads = isinstance(node, (ast.Subscript, ast.Compare)) and self._dotted(child) == "os.environ"
                if isinstance(child, ast.expr) and not reads:
                    self._expression(child)
        else:
            raise self._unclear(node, f"has {_text(node)}")

    def _call(self, node: ast.Call) -> None:
        called = self._dotted(node.func)
        top = (called or "").partition(".")[0]
        if top == "paceline":
            raise _ImportsFramework  # it imports torch
        if called == "os.environ.setdefault" and len(node.args) == 2 and not node.keywords:
            name, text = self._literals(node.args[0], node.args[1], node)
            if name not in self._found.variables:
                self._found.defaults.setdefault(name, text)
            return
        if top in ("os", "posix", "sys"):
            is_known = called in _CALLS or str(called).startswith("os.path.")
        else:
            is_known = called == _VALUE or top == "builtins" or _changes_nothing(top)
        if not is_known:
            raise self._unclear(node, f"calls {_text(node.func)}")
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._expression(argument)

    # -- imports -------------------------------------------------------------------------------------------------------

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self._names[alias.asname or name] = None if self._module(alias.name, self._root, node) else name

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.module == "__future__":
            return
        folder = self._file.parents[node.level - 1] if node.level else self._root
        local = self._module(node.module, folder, node) if node.module else folder
        for alias in node.names:
            if local is not None:
                self._local([alias.name], local)
            self._names[alias.asname or alias.name] = None if local else f"{node.module}.{alias.name}"

    def _module(self, name: str, folder: Path, node: ast.Import | ast.ImportFrom) -> Path | None:
        """Read the import of a module; returns where its submodules lie if it is one of the script's own."""
        top = name.partition(".")[0]
        is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
        is_framework = not is_relative and top in FRAMEWORKS
        is_local = not is_framework and self._local(name.split("."), folder)
        if self._is_conditional and (is_framework or is_local):
            raise self._unclear(node, f"may import {name}")
        if is_framework:
            raise _ImportsFramework
        if is_local:
            return folder.joinpath(*name.split("."))
        known = top == "paceline" or top in POWERFUL or _changes_nothing(top)
        if is_relative or not (known or (self._may_fail and not is_installed(top))):
            must = " (which must come before torch)" if top in BEFORE_TORCH else ""
            raise self._unclear(node, f"imports {name if is_relative else top}{must}")
        return None

    def _local(self, parts: Sequence[str], folder: Path) -> bool:
        """Read a module in `folder`, its packages first; returns whether it is there."""
        for index, part in enumerate(parts):
            package, module = folder / part / "__init__.py", folder / f"{part}.py"
            file = package if package.is_file() else module
            if file.is_file():
                _Reader(self._found, self._read, self._root, file).run()
            elif not any((folder / part).glob("*.py" if index == len(parts) - 1 else "*")):
                return index > 0
            folder = folder / part
        return True

    def _unclear(self, node: ast.AST, what: str) -> _Unclear:
        return _Unclear(f"{self._file.name}:{getattr(node, 'lineno', 0)} {what}")


def _changes_nothing(top: str) -> bool:
    """Whether neither the import of a package nor its functions change a variable that a framework reads."""
    return top not in POWERFUL and (top in HARMLESS or top in standard_library())


def _text(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 40 else f"{text[:39]}…"
