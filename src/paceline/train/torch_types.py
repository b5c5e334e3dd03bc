"""Names for what torch has as plain tuples and dicts."""

from __future__ import annotations

from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call: args and kwargs
StateDict = dict[str, Any]  # what `state_dict()` of a module, an optimizer or a loader returns
ParamGroup = dict[str, Any]  # of an optimizer
