"""Small helpers that scripts import from `horovod.tensorflow.util`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Callable


def _executing_eagerly() -> bool:
    """Whether operations are executed at once."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a part of a graph."""
    made: Callable[..., Any] = tf.function(f)
    return made


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that keeps what it has returned for the same arguments."""
    return functools.cache(f)


def vars_to_refs(vars: Any) -> Any:
    """References to variables, which can be keys of a dict; lists and tuples become tuples of them."""
    if isinstance(vars, (list, tuple)):
        return tuple(map(vars_to_refs, vars))
    return vars.ref() if hasattr(vars, "ref") else vars


def refs_to_vars(refs: Any) -> Any:
    """The variables of such references; tuples become lists."""
    if isinstance(refs, (list, tuple)):
        return list(map(refs_to_vars, refs))
    return refs.deref() if hasattr(refs, "deref") else refs
