"""What a script does before it imports its framework: the variables that it sets, and whether all of it is understood.

The fork server imports the framework before the script runs. This makes no difference only if nothing that the script
does before its own import can affect the framework. So the statements are read in the order in which they run,
including those of called functions and of modules beside the script. If a statement is not understood, that is
reported, and the ranks are started by exec. No code is run.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from .packages import BEFORE_TORCH, FRAMEWORKS, HARMLESS, POWERFUL, is_installed, standard_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_BUILTINS_THAT_RUN = frozenset({"__import__", "compile", "delattr", "eval", "exec", "globals", "setattr", "vars"})
_BUILTINS_THAT_COPY = frozenset({"bool", "dict", "frozenset", "len", "list", "print", "repr", "set", "sorted", "str"})
_READS = frozenset({"copy", "get", "items", "keys", "values", "__contains__", "__getitem__"})
_MAX_FILES = 100
_MAX_CALLS = 200


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
    """What a script does before it imports its framework.

    Args:
        files: the modules that run one after the other: packages, and at last the script itself.
        root: the folder where it finds its own modules.
    """
    reader = _Reader(root)
    unclear = ""
    try:
        for file in files:
            reader.run(file, is_main=file == files[-1])
    except _ImportsFramework:
        pass
    except _Unclear as problem:
        unclear = str(problem)
    return Prelude(reader.variables, reader.defaults, unclear)


class _ImportsFramework(Exception):
    """A framework is imported here."""


class _Unclear(Exception):
    """A statement may affect the framework, and only running it can show whether it does."""


class _Thing:
    """The meaning of a name, if it matters."""

    def __init__(self, name: str) -> None:
        self.name = name


_PLAIN = _Thing("a value that changes no variable")
_UNKNOWN = _Thing("anything")
_OS = _Thing("the module os")
_SYS = _Thing("the module sys")
_ENVIRON = _Thing("os.environ")
_CHANGES = _Thing("a function that changes os.environ")
_LIBRARY = _Thing("the package paceline")


class _Scope:
    """The names of a module or a function."""

    def __init__(self, file: Path, *, is_main: bool = False, outer: _Scope | None = None) -> None:
        self.file, self.is_main, self.outer = file, is_main, outer
        self.names: dict[str, _Value] = {}

    def look_up(self, name: str) -> _Value:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        if name in _BUILTINS_THAT_RUN:
            return _UNKNOWN
        return _PLAIN if hasattr(builtins, name) or name.startswith("__") else _UNKNOWN


@dataclass(frozen=True)
class _Defined:
    """A function or class that the script defines, and where."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    scope: _Scope


_Value = Union[_Thing, _Scope, _Defined]


class _Reader:
    """Follows the statements of a script.

    Attributes:
        variables: the variables that it sets.
        defaults: the variables that it sets only if they are not set.
    """

    def __init__(self, root: Path) -> None:
        self.variables: dict[str, str] = {}
        self.defaults: dict[str, str] = {}
        self._root = root
        self._modules: dict[Path, _Scope] = {}
        self._calls: list[ast.AST] = []
        self._number_of_calls = 0
        self._is_conditional = False  # whether the current statements may run or not, now or later
        self._may_be_imported = False  # whether a conditional statement may have imported the framework
        self._catches_import_errors = False

    def run(self, file: Path, *, is_main: bool = False) -> _Scope:
        """Read a module, once; one that cannot be read or parsed fails when it is run, and so counts as empty."""
        if file in self._modules:
            return self._modules[file]
        scope = self._modules[file] = _Scope(file, is_main=is_main)
        if len(self._modules) > _MAX_FILES:
            raise _Unclear(f"{file.name} is one of more than {_MAX_FILES} modules")
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return scope
        self._block(tree.body, scope)
        return scope

    # -- statements ----------------------------------------------------------------------------------------------------

    def _block(self, statements: Sequence[ast.stmt], scope: _Scope) -> None:
        for statement in statements:
            self._statement(statement, scope)
            if isinstance(statement, (ast.Return, ast.Raise)):
                return

    def _maybe(self, statements: Sequence[ast.stmt], scope: _Scope) -> bool:
        """Read statements that may run or not; returns whether they import a framework."""
        with self._conditional():
            try:
                self._block(statements, scope)
            except _ImportsFramework:
                self._may_be_imported = True
                return True
        return False

    @contextlib.contextmanager
    def _conditional(self) -> Iterator[None]:
        before, self._is_conditional = self._is_conditional, True
        try:
            yield
        finally:
            self._is_conditional = before

    def _statement(self, node: ast.stmt, scope: _Scope) -> None:
        method: Callable[[Any, _Scope], None] | None = getattr(self, f"_on_{type(node).__name__}", None)
        if method is None:
            raise self._unclear(node, scope, "has a statement that is not understood")
        method(node, scope)

    def _on_Pass(self, node: ast.stmt, scope: _Scope) -> None:
        """Do nothing."""

    _on_Break = _on_Continue = _on_Global = _on_Nonlocal = _on_Pass

    def _on_Import(self, node: ast.Import, scope: _Scope) -> None:
        for alias in node.names:
            found = self._import(alias.name, node, scope)
            top = alias.name.partition(".")[0]
            if alias.asname is None and "." in alias.name:
                found = self._module_value(top, node, scope)
            scope.names[alias.asname or top] = found

    def _on_ImportFrom(self, node: ast.ImportFrom, scope: _Scope) -> None:
        if node.module == "__future__":
            return
        if node.level:
            folder = scope.file.parent
            for _ in range(node.level - 1):
                folder = folder.parent
            found = self._local(node.module.split("."), folder) if node.module else self._package(folder)
            if found is None:
                raise self._unclear(node, scope, f"imports {'.' * node.level}{node.module or ''}")
            module: _Value = found
        else:
            assert node.module is not None
            module = self._import(node.module, node, scope)
        for alias in node.names:
            scope.names[alias.asname or alias.name] = self._member(module, alias.name, node, scope)
        if isinstance(module, _Scope) and any(alias.name == "*" for alias in node.names):
            scope.names.update(module.names)
        if module is _OS and any(alias.name == "*" for alias in node.names):
            scope.names["environ"] = _ENVIRON

    def _on_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: _Scope) -> None:
        for expression in (*node.args.defaults, *node.args.kw_defaults):
            if expression is not None:
                self._value(expression, scope)
        scope.names[node.name] = defined = _Defined(node, scope)
        for decorator in node.decorator_list:
            self._decorate(decorator, defined, scope)

    _on_AsyncFunctionDef = _on_FunctionDef

    def _on_ClassDef(self, node: ast.ClassDef, scope: _Scope) -> None:
        bases = [self._value(base, scope) for base in node.bases]
        for keyword in node.keywords:
            self._value(keyword.value, scope)
        self._block(node.body, _Scope(scope.file, outer=scope))
        is_known = all(base is _PLAIN or isinstance(base, _Defined) for base in bases)
        scope.names[node.name] = defined = _Defined(node, scope) if is_known else _UNKNOWN
        for decorator in node.decorator_list:
            self._decorate(decorator, defined, scope)

    def _decorate(self, decorator: ast.expr, defined: _Value, scope: _Scope) -> None:
        called = self._value(decorator, scope)
        if isinstance(called, _Defined):
            self._maybe_called(called)
        elif called is not _PLAIN:
            raise self._unclear(decorator, scope, f"calls {_text(decorator)}")

    def _on_Expr(self, node: ast.Expr, scope: _Scope) -> None:
        self._value(node.value, scope)

    def _on_Return(self, node: ast.Return, scope: _Scope) -> None:
        if node.value is not None:
            self._value(node.value, scope)

    def _on_Raise(self, node: ast.Raise, scope: _Scope) -> None:
        for expression in (node.exc, node.cause):
            if expression is not None:
                self._value(expression, scope)

    def _on_Assert(self, node: ast.Assert, scope: _Scope) -> None:
        self._value(node.test, scope)

    def _on_Assign(self, node: ast.Assign, scope: _Scope) -> None:
        value = self._value(node.value, scope)
        for target in node.targets:
            self._bind(target, value, scope, node.value)

    def _on_AnnAssign(self, node: ast.AnnAssign, scope: _Scope) -> None:
        if node.value is not None:
            self._bind(node.target, self._value(node.value, scope), scope, node.value)

    def _on_AugAssign(self, node: ast.AugAssign, scope: _Scope) -> None:
        value = self._value(node.value, scope)
        read = ast.copy_location(_as_load(node.target), node.target)
        if self._value(read, scope) is _ENVIRON:
            if not isinstance(node.op, ast.BitOr):
                raise self._unclear(node, scope, "changes os.environ")
            self._set_all(node.value, node, scope)
        elif isinstance(node.target, ast.Name):
            scope.names[node.target.id] = value if value is not _ENVIRON else _PLAIN
        else:
            self._bind(node.target, value, scope, None)

    def _on_Delete(self, node: ast.Delete, scope: _Scope) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self._bind(target, _PLAIN, scope, None)

    def _on_If(self, node: ast.If, scope: _Scope) -> None:
        test = _text(node.test)
        if test in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._block(node.orelse, scope)
        elif "__name__" in test and "__main__" in test and isinstance(node.test, ast.Compare):
            self._block(node.body if scope.is_main == isinstance(node.test.ops[0], ast.Eq) else node.orelse, scope)
        else:
            self._value(node.test, scope)
            if self._maybe(node.body, scope) & self._maybe(node.orelse, scope):
                raise _ImportsFramework

    def _on_For(self, node: ast.For | ast.AsyncFor, scope: _Scope) -> None:
        self._value(node.iter, scope)
        self._bind(node.target, _PLAIN, scope, None)
        self._maybe(node.body, scope)
        self._maybe(node.orelse, scope)

    _on_AsyncFor = _on_For

    def _on_While(self, node: ast.While, scope: _Scope) -> None:
        self._value(node.test, scope)
        self._maybe(node.body, scope)
        self._maybe(node.orelse, scope)

    def _on_With(self, node: ast.With | ast.AsyncWith, scope: _Scope) -> None:
        for item in node.items:
            value = self._value(item.context_expr, scope)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value, scope, None)
        self._block(node.body, scope)

    _on_AsyncWith = _on_With

    def _on_Try(self, node: ast.Try, scope: _Scope) -> None:
        before = self._catches_import_errors
        self._catches_import_errors = before or any(
            handler.type is None
            or any(name in _text(handler.type) for name in ("ImportError", "ModuleNotFound", "Exc"))
            for handler in node.handlers
        )
        try:
            self._block(node.body, scope)
        finally:
            self._catches_import_errors = before
        for handler in node.handlers:
            self._maybe(handler.body, scope)
        self._block([*node.orelse, *node.finalbody], scope)

    _on_TryStar = _on_Try

    def _on_Match(self, node: Any, scope: _Scope) -> None:
        self._value(node.subject, scope)
        for case in node.cases:
            self._maybe(case.body, scope)

    def _bind(self, target: ast.expr, value: _Value, scope: _Scope, source: ast.expr | None) -> None:
        """Bind a target of an assignment to a value, whose expression is `source` if that is known."""
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = source.elts if isinstance(source, (ast.Tuple, ast.List)) else []
            for index, element in enumerate(target.elts):
                part = parts[index] if len(parts) == len(target.elts) else None
                self._bind(element, self._value(part, scope) if part is not None else value, scope, part)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, value, scope, None)
        elif isinstance(target, ast.Subscript):
            holder = self._value(target.value, scope)
            self._value(target.slice, scope)
            if holder is _ENVIRON:
                self._set(target.slice, source, target, scope)
            elif _text(target.value) == "sys.modules":
                raise self._unclear(target, scope, "changes sys.modules")
        elif isinstance(target, ast.Attribute):
            holder = self._value(target.value, scope)
            if (holder is _OS and target.attr == "environ") or holder is _ENVIRON:
                raise self._unclear(target, scope, "changes os.environ")

    # -- variables -----------------------------------------------------------------------------------------------------

    def _set(
        self, name: ast.expr, value: ast.expr | None, node: ast.AST, scope: _Scope, *, is_default: bool = False
    ) -> None:
        """Note that a variable is set, or that its value is not known."""
        constant = _constant(name), None if value is None else _constant(value)
        if constant[0] is None or constant[1] is None:
            what = constant[0] or "a variable"
            raise self._unclear(node, scope, f"sets {what} to a value that is computed")
        if self._is_conditional or self._may_be_imported:
            raise self._unclear(node, scope, f"may set {constant[0]}")
        if not is_default:
            self.variables[constant[0]] = constant[1]
        elif constant[0] not in self.variables:
            self.defaults.setdefault(constant[0], constant[1])

    def _set_all(self, value: ast.expr, node: ast.AST, scope: _Scope) -> None:
        """The same for the items of a dictionary: `{"A": "1"}` or `dict(A="1")`."""
        if isinstance(value, ast.Dict):
            for key, item in zip(value.keys, value.values):
                if key is None:
                    raise self._unclear(node, scope, "sets variables that are computed")
                self._set(key, item, node, scope)
        elif isinstance(value, ast.Call) and _text(value.func) == "dict" and not value.args:
            for keyword in value.keywords:
                self._set(ast.Constant(keyword.arg), keyword.value, node, scope)
        else:
            raise self._unclear(node, scope, "sets variables that are computed")

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, scope: _Scope) -> _Value:
        """What an expression stands for; reads what it calls."""
        if isinstance(node, ast.Name):
            return scope.look_up(node.id)
        if isinstance(node, ast.Attribute):
            return self._member(self._value(node.value, scope), node.attr, node, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.Lambda):
            return _Defined(node, scope)
        if isinstance(node, ast.NamedExpr):
            value = self._value(node.value, scope)
            self._bind(node.target, value, scope, node.value)
            return value
        if isinstance(node, ast.Subscript):
            holder = self._value(node.value, scope)
            self._value(node.slice, scope)
            return _PLAIN if holder is _ENVIRON else holder
        return self._composed(node, scope)

    def _composed(self, node: ast.expr, scope: _Scope) -> _Value:
        """What an expression of other ones stands for."""
        for generator in getattr(node, "generators", ()):
            self._value(generator.iter, scope)
            self._bind(generator.target, _PLAIN, scope, None)
        values = [self._value(child, scope) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        keeps = (ast.BoolOp, ast.IfExp, ast.Tuple, ast.List, ast.Set, ast.Starred)
        if isinstance(node, keeps):
            if any(value in (_ENVIRON, _CHANGES) for value in values):
                raise self._unclear(node, scope, "passes os.environ on")
            for value in values:
                if isinstance(value, _Defined):
                    self._maybe_called(value)
        is_unknown = any(value is _UNKNOWN for value in values)
        return _UNKNOWN if is_unknown else _PLAIN

    def _member(self, holder: _Value, name: str, node: ast.AST, scope: _Scope) -> _Value:
        """What an attribute stands for."""
        if holder is _OS:
            changes = ("putenv", "unsetenv", "execv", "execve")
            return _ENVIRON if name in ("environ", "environb") else _CHANGES if name in changes else _PLAIN
        if holder is _SYS:
            return _UNKNOWN if name == "setdlopenflags" else _PLAIN
        if holder is _ENVIRON:
            return _PLAIN if name in _READS else _CHANGES
        if isinstance(holder, _Scope):
            if name in holder.names:
                return holder.names[name]
            found = self._local([name], holder.file.parent) if holder.file.name == "__init__.py" else None
            return found or _UNKNOWN
        if isinstance(holder, _Defined):
            return _PLAIN  # all methods of a class are read where it is called
        return holder

    def _call(self, node: ast.Call, scope: _Scope) -> _Value:
        called = self._value(node.func, scope)
        arguments = [argument.value if isinstance(argument, ast.Starred) else argument for argument in node.args]
        values = [self._value(value, scope) for value in (*arguments, *(keyword.value for keyword in node.keywords))]
        if called is _CHANGES:
            self._change(node, scope)
            return _PLAIN
        if called is _LIBRARY:
            raise _ImportsFramework  # it imports torch
        if called is _UNKNOWN or called in (_ENVIRON, _OS):
            raise self._unclear(node, scope, f"calls {_text(node.func)}")
        copies = isinstance(node.func, ast.Name) and node.func.id in _BUILTINS_THAT_COPY
        if not copies and any(value in (_ENVIRON, _CHANGES, _OS) for value in values):
            raise self._unclear(node, scope, f"passes os.environ to {_text(node.func)}")
        for value in values:
            if isinstance(value, _Defined):
                self._maybe_called(value)
        if isinstance(called, _Defined):
            if isinstance(called.node, ast.ClassDef):
                self._maybe_called(called)
            else:
                self._read_function(called)
        return _PLAIN

    def _change(self, node: ast.Call, scope: _Scope) -> None:
        """Read a call of a method that changes os.environ."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name == "setdefault" and len(node.args) == 2 and not node.keywords:
            self._set(node.args[0], node.args[1], node, scope, is_default=True)
        elif name == "__setitem__" and len(node.args) == 2:
            self._set(node.args[0], node.args[1], node, scope)
        elif name == "update" and len(node.args) <= 1:
            if node.args:
                self._set_all(node.args[0], node, scope)
            for keyword in node.keywords:
                if keyword.arg is None:
                    self._set_all(keyword.value, node, scope)
                else:
                    self._set(ast.Constant(keyword.arg), keyword.value, node, scope)
        else:
            raise self._unclear(node, scope, f"calls {_text(node.func)}")

    def _maybe_called(self, defined: _Defined) -> None:
        """Read a function, or all methods of a class, that may be called now, later or never."""
        with self._conditional():
            try:
                if isinstance(defined.node, ast.ClassDef):
                    for statement in defined.node.body:
                        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                            self._read_function(_Defined(statement, defined.scope))
                else:
                    self._read_function(defined)
            except _ImportsFramework:
                self._may_be_imported = True

    def _read_function(self, defined: _Defined) -> None:
        node = defined.node
        assert not isinstance(node, ast.ClassDef)
        self._number_of_calls += 1
        if node in self._calls:
            return  # it calls itself
        if self._number_of_calls > _MAX_CALLS:
            raise self._unclear(node, defined.scope, "is called too often to be followed")
        scope = _Scope(defined.scope.file, is_main=defined.scope.is_main, outer=defined.scope)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            scope.names[argument.arg] = _PLAIN
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                scope.names[extra.arg] = _PLAIN
        self._calls.append(node)
        try:
            if isinstance(node, ast.Lambda):
                self._value(node.body, scope)
            else:
                self._block(node.body, scope)
        finally:
            self._calls.pop()

    # -- imports -------------------------------------------------------------------------------------------------------

    def _import(self, name: str, node: ast.AST, scope: _Scope) -> _Value:
        """Read the import of a module; returns what stands for the module itself."""
        parts = name.split(".")
        if parts[0] in FRAMEWORKS:
            raise _ImportsFramework
        local = self._local(parts, self._root)
        if local is not None:
            return local
        return self._module_value(parts[0], node, scope)

    def _module_value(self, top: str, node: ast.AST, scope: _Scope) -> _Value:
        if (local := self._local([top], self._root)) is not None:
            return local
        special = {"os": _OS, "posix": _OS, "sys": _SYS, "paceline": _LIBRARY}
        if top in special:
            return special[top]
        if top in POWERFUL:
            return _UNKNOWN
        if top in HARMLESS or top in standard_library():
            return _PLAIN
        if self._catches_import_errors and not is_installed(top):
            return _UNKNOWN
        must = " (which must come before torch)" if top in BEFORE_TORCH else ""
        raise self._unclear(node, scope, f"imports {top}{must}")

    def _local(self, parts: Sequence[str], folder: Path) -> _Scope | None:
        """Read a module in `folder`, its packages first; None if it is not there."""
        found: _Scope | None = None
        for index, part in enumerate(parts):
            package, module = folder / part / "__init__.py", folder / f"{part}.py"
            is_folder = (folder / part).is_dir()
            if package.is_file():
                found = self.run(package)
            elif module.is_file():
                found = self.run(module)
            elif is_folder and (index < len(parts) - 1 or self._has_modules(folder / part)):
                found = _Scope(package)  # a package without __init__.py
            else:
                return found if index else None
            folder = folder / part
        return found

    @staticmethod
    def _has_modules(folder: Path) -> bool:
        return any(folder.glob("*.py"))

    def _package(self, folder: Path) -> _Scope:
        init = folder / "__init__.py"
        return self.run(init) if init.is_file() else _Scope(init)

    def _unclear(self, node: ast.AST, scope: _Scope, what: str) -> _Unclear:
        return _Unclear(f"{scope.file.name}:{getattr(node, 'lineno', 0)} {what}")


def _constant(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _as_load(node: ast.Name | ast.Attribute | ast.Subscript) -> ast.expr:
    """The expression that reads what an assignment would change."""
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    if isinstance(node, ast.Attribute):
        return ast.Attribute(node.value, node.attr, ast.Load())
    return ast.Subscript(node.value, node.slice, ast.Load())


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 40 else f"{text[:39]}…"
