"""Begin to record, in a rank that is about to run its script."""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import importlib
import json
import operator
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from paceline.contract.rehearsal import FOLDER, PLAN
from paceline.node.ranks import joining

from .recording import Record

if TYPE_CHECKING:
    from types import CodeType

    from paceline.contract.rehearsal import Plan

_DIVIDED = "__paceline_divided__"
_ON_GPUS = re.compile(rb"cuda|\.to\(")  # what a script says that may compute on GPUs
_current: Record | None = None


def begin() -> None:
    """Record what this rank does, if it is one of a rehearsal."""
    global _current  # noqa: PLW0603 - a rank has one record
    folder = os.environ.get(FOLDER)
    if folder is None or "PACELINE_RANK" not in os.environ:
        return
    with open(os.path.join(folder, PLAN), "rb") as file:
        plan: Plan = json.load(file)
    record = _current = Record(folder)
    with contextlib.suppress(ImportError):  # the script's own import reports the error
        importlib.import_module("torch.distributed")
        from .collectives import Collectives
        from .training import Training

        training = Training(record, plan)
        Collectives(record, training.name_of, training.reduced)
    record.watch_files()
    atexit.register(lambda: record.note("end", alone=joining.is_alone()) if record.is_rank else None)


def compiled(source: bytes, path: str) -> CodeType | None:
    """A script whose divisions of whole numbers by the number of ranks are recorded; None without a rehearsal."""
    record = _current
    if record is None:
        return None
    if _ON_GPUS.search(source) and "torch" in sys.modules:
        from .cores import use

        use(record.local_rank)
    world = record.world

    def divided(one: Any, other: Any, line: int, rounds: bool) -> Any:
        if type(one) is int and type(other) is int and other == world and one > 0 and one % other:
            record.note("rest", of=one, at=f"{path}:{line}")
        return operator.floordiv(one, other) if rounds else operator.truediv(one, other)

    setattr(builtins, _DIVIDED, divided)
    return compile(
        ast.fix_missing_locations(_Divisions().visit(ast.parse(source, path))), path, "exec", dont_inherit=True
    )


class _Divisions(ast.NodeTransformer):
    """Replaces `a // b` and `int(a / b)`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return _call(node, rounds=True) if isinstance(node.op, ast.FloorDiv) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "int" and len(node.args) == 1:
            inner = node.args[0]
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div):
                node.args = [_call(inner, rounds=False)]
        return node


def _call(node: ast.BinOp, *, rounds: bool) -> ast.expr:
    name = ast.Name(_DIVIDED, ast.Load())
    args = [node.left, node.right, ast.Constant(node.lineno), ast.Constant(rounds)]
    return ast.copy_location(ast.Call(name, args, []), node)
