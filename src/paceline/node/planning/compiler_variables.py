"""Whether a file may set environment variables that `torch._dynamo` reads when it is imported."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
    return any(_is_environ(node) and id(node) not in harmless for node in nodes) or any(map(_calls_putenv, nodes))


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


def _calls_putenv(node: ast.AST) -> bool:
    return isinstance(node, (ast.Attribute, ast.Name)) and getattr(node, "attr", getattr(node, "id", "")) == "putenv"
