"""Turns pydantic's validation errors into one line."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from .errors import UserError, nearest
from .text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import ValidationError

    KeyPath = tuple[str | int, ...]

_LONGEST = 60  # characters of a bad value that are shown
_MESSAGES = {
    "missing": "missing; add it",
    "string_type": "should be text",
    "tuple_type": "should be a list",
    "dict_type": "should be a mapping of names to values",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "model_type": "should be a mapping",
    "model_attributes_type": "should be a mapping",
}


def validation_error(error: ValidationError, model: type[BaseModel], where: Callable[[KeyPath], str]) -> UserError:
    """The first thing that is wrong, as one line; an unknown key comes first, because others may be missing for it.

    Args:
        error: what `model` raised.
        model: the model that was validated.
        where: how a message names a key path of the input: by a flag, a line of a file, or a field. A key path has keys
            and indices; it is empty for the whole input.
    """
    errors = [(*key_path_of(model, entry["loc"]), entry) for entry in error.errors(include_url=False)]
    key_path, known, first = next((e for e in errors if e[2]["type"] == "extra_forbidden"), errors[0])
    if first["type"] == "extra_forbidden":
        return UserError(printable(f"{where(key_path)}: unknown key; {nearest(str(key_path[-1]), known)}"))
    messages = [_message(entry) for other, _, entry in errors if other == key_path]  # one for each member of a union
    message = " or ".join(dict.fromkeys(messages))
    shown = _shown(first["input"], message) if key_path and first["type"] != "missing" else ""
    return UserError(printable(f"{where(key_path)}{shown}: {message}"))


def dotted(key_path: KeyPath) -> str:
    """`env.LR`, `data[0].path`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key_path)
    return text.removeprefix(".")


def key_path_of(model: type[BaseModel], location: KeyPath) -> tuple[KeyPath, list[str]]:
    """A location of pydantic's without the names of union members, and the known keys at the level of its last part."""
    key_path: list[str | int] = []
    known: list[str] = []
    around = [model]
    for part in location:
        fields = {name: field for kind in around if _is_model(kind) for name, field in kind.model_fields.items()}
        containers = [kind for kind in around if get_origin(kind) in (dict, list, tuple)]
        if fields:
            known = list(fields)
            around = _members(fields[part].annotation) if part in fields else []
        elif any(isinstance(part, int) or get_origin(kind) is dict for kind in containers):
            around = [member for kind in containers for member in _members(get_args(kind)[-1 if _is_dict(kind) else 0])]
        else:
            continue
        key_path.append(part)
    return tuple(key_path), known


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_dict(kind: Any) -> bool:
    return get_origin(kind) is dict


def _members(annotation: Any) -> list[Any]:
    """The types that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _message(entry: Any) -> str:
    text = _MESSAGES.get(entry["type"]) or entry["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return str(text)


def _shown(value: Any, message: str) -> str:
    """The bad value for a message, cut to a readable length; "" if the message has it already."""
    text = repr(value)
    if not isinstance(value, (str, int, float, bool)) or text in message:
        return ""
    return f" {text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}"
