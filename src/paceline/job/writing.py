"""Writes job files: a new one, or one variable of one that a person has written, whose other lines stay as they are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .errors import UserError
from .reading import read
from .text import printable
from .yaml_files import Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # These break lines in YAML 1.1; only as escapes they come back as they are.
    style = '"' if re.search("[\x85\u2028\u2029]", text) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represented)


def job_text(fields: Mapping[str, Any]) -> str:
    """The text of a job file."""
    text: str = yaml.dump(dict(fields), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return text


def write_job(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a new job file."""
    replace_file(path, job_text(fields))


def set_variable(path: Path, name: str, value: str) -> None:
    """Set a variable of the ranks in a job file; comments and all else stay as they are."""
    before = read(path)
    text = path.read_bytes().decode("utf-8-sig")
    new = _with_variable(text, name, value)

    def is_right(file: str) -> bool:
        try:
            return read(file) == before.changed({"env": {**before.env, name: value}})
        except UserError:
            return False

    replace_file(path, new, is_right)


def _with_variable(text: str, name: str, value: str) -> str:
    """The text of a YAML file with another variable in its `env`."""
    root = yaml.compose(text, Loader=Loader)
    assert isinstance(root, yaml.MappingNode)  # `read` has found a job in it
    written = value if _PLAIN.fullmatch(value) else json.dumps(value)
    env = next((node for key, node in root.value if key.value == "env"), None)
    if env is None:
        return _added(text, root, f"env: {{{name}: {written}}}", "env", f"{{{json.dumps(name)}: {json.dumps(value)}}}")
    if not isinstance(env, yaml.MappingNode):  # an empty value
        return f"{text[: env.start_mark.index]} {{{name}: {written}}}{text[env.end_mark.index :]}"
    old = next((node for key, node in env.value if key.value == name), None)
    if old is not None:
        return text[: old.start_mark.index] + written + text[old.end_mark.index :]
    return _added(text, env, f"{name}: {written}", name, json.dumps(value))


def _added(text: str, mapping: yaml.MappingNode, line: str, key: str, value: str) -> str:
    """The text with one more key in a mapping."""
    if not mapping.flow_style and mapping.value:
        first = mapping.value[0][0].start_mark
        return f"{text[: first.index]}{line}\n{' ' * first.column}{text[first.index :]}"
    at = mapping.start_mark.index + 1  # behind the brace
    comma = ", " if mapping.value else ""
    return f"{text[:at]}{json.dumps(key)}: {value}{comma}{text[at:]}"


def replace_file(path: Path, text: str, is_right: Callable[[str], bool] = lambda file: True) -> None:
    """Write a file as a whole, or not at all; `is_right` looks at the new one before it takes the place."""
    real = Path(os.path.realpath(path))
    new = ""
    try:
        handle, new = tempfile.mkstemp(prefix=f".{real.name}.", suffix=real.suffix, dir=real.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mode = real.stat().st_mode & 0o777 if real.exists() else 0o666 & ~_umask()
        os.chmod(new, mode)
        if not is_right(new):
            raise UserError(printable(f"{path} has a form into which no variable can be put; write it there yourself"))
        os.replace(new, real)
    except OSError as error:
        raise UserError(printable(f"cannot write {path}: {error.strerror}; check its folder")) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask
