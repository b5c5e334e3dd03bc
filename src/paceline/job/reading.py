"""Job files: a YAML mapping with the keys of a `JobSpec`.

Plain scalars mean what they mean in YAML 1.2 (`yes` and `2:4` are text, only `true` and `false` are booleans), except
that a number with an exponent needs a dot and a sign, as PyYAML writes it. Where a job wants text (arguments,
variables, labels), every scalar is text, as it is written: `1e-3`, `0.10` and `on` reach the script as they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from .errors import UserError
from .flags import field_of
from .model import InvalidError, dotted
from .spec import JobSpec, Rendezvous
from .text import printable
from .yaml_files import Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .model import KeyPath

_MOST_BYTES = 1 << 20
_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class _Loader(Loader):
    """Knows null, booleans and numbers; any other scalar is text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's


for _name, _pattern, _first in (
    ("null", re.compile(r"(~|null|Null|NULL|)"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("int", _INTEGER, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern.pattern})\\Z"), _first)


class _Wrong(Exception):
    """What is wrong with a node, in words."""

    def __init__(self, node: yaml.Node, what: str) -> None:
        super().__init__(what)
        self.line = node.start_mark.line + 1


def read(
    path: str | Path,
    given: Mapping[str, Any] | None = None,
    name_given: Callable[[KeyPath], str] = dotted,
    text: str | None = None,
) -> JobSpec:
    """The job that a file, or its text, describes; what is given wins, in mappings such as `env` key by key."""
    given = given or {}
    text = _text(path) if text is None else text
    root = _compose(path, text)
    if root is None or root.tag == _TAG + "null":
        raise UserError(printable(f"{path} is empty; it needs at least one of script, module and command"))
    try:
        if not isinstance(root, yaml.MappingNode):
            raise _Wrong(root, "a job is a mapping of keys to values; write for example script: train.py")
        written = _name_as_fields(root)
        data: dict[str, Any] = _value(root, [])
    except _Wrong as wrong:
        raise UserError(printable(f"{path}:{wrong.line}: {wrong}")) from None
    for name, value in given.items():
        data[name] = value if name == "code" else _merged(data.get(name), value)

    def where(key_path: KeyPath) -> str:
        if _is_given(key_path, given):
            return name_given(key_path)
        if not key_path:
            return str(path)
        key_path = _in_file(key_path, data)
        shown = (written.get(key_path[0], key_path[0]), *key_path[1:])
        return f"{path}:{_find(root, key_path)[0].start_mark.line + 1}: {dotted(shown)}"

    for name in [name for name, value in data.items() if value is None and name in JobSpec.__struct_fields__]:
        del data[name]  # an empty value is as good as none
    while True:
        try:
            return JobSpec.validated(data)
        except InvalidError as error:
            if not (error.wants_text and _mend(data, root, given, error.key_path)):
                raise error.named(where) from None


def _merged(old: Any, new: Any) -> Any:
    """A value with another one over it, in mappings key by key."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def _text(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise UserError(printable(f"no job file {path}; check the name and the folder")) from None
    except IsADirectoryError:
        raise UserError(printable(f"{path} is a folder, not a job file; name the file in it")) from None
    except OSError as error:
        raise UserError(printable(f"cannot read {path}: {error.strerror}; check its permissions")) from None
    if len(content) > _MOST_BYTES:
        raise UserError(printable(f"{path} is larger than 1 MiB; is it a job file?"))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(printable(f"{path}:{line}: this is not UTF-8; save the file as UTF-8")) from None


def _compose(path: str | Path, text: str) -> yaml.Node | None:
    """The only document of a file, with the places of all its parts."""
    try:
        documents = list(yaml.compose_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem or error.context}"
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        what = f"{path}:{line}: not valid YAML: character U+{error.character:04X} is not allowed"
    except (yaml.YAMLError, ValueError, OverflowError):  # an escape such as "\UFFFFFFFF"
        what = f"{path}: not valid YAML: it holds a character that does not exist"
    except RecursionError:
        what = f"{path}: its values are nested too deeply"
    else:
        if len(documents) > 1 and documents[1] is not None:
            line = documents[1].start_mark.line + 1
            raise UserError(printable(f"{path}:{line}: a second document begins here; write one job in one file"))
        return documents[0] if documents else None
    raise UserError(printable(what)) from None


def _name_as_fields(root: yaml.MappingNode) -> dict[str | int, str]:
    """Rename the keys that are called as flags, such as `gpus`; returns field → key as it is written."""
    written: dict[str | int, str] = {}
    keys = [key for key, _ in root.value if isinstance(key, yaml.ScalarNode)]
    fields = {key.value for key in keys}.intersection(JobSpec.__struct_fields__)
    for key in keys:
        if key.value in JobSpec.__struct_fields__:
            continue
        name, field = key.value, field_of(key.value)
        if field in fields:
            raise _Wrong(key, f"{name} and {written.get(field, field)} mean the same; leave one of them out")
        if field in JobSpec.__struct_fields__ or field in Rendezvous.__struct_fields__:
            written[field], key.value = name, field
            fields.add(field)
    return written


def _value(node: yaml.Node, above: list[yaml.Node]) -> Any:
    """What a node stands for: a mapping with text as keys, a list, or a scalar."""
    if any(node is other for other in above):
        raise _Wrong(node, "a value that contains itself; write it out")
    if len(above) > 50:
        raise _Wrong(node, "values are nested too deeply")
    inside = [*above, node]
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Wrong(key, "a list or mapping cannot be a key; write a word")
            name = key.value = _known_text(key)
            if name in mapping:
                raise _Wrong(key, f"{name} is given twice; leave one of them out")
            mapping[name] = _value(value, inside)
        return mapping
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_value(item, inside) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    raise _Wrong(node, f"the tag {node.tag} is not allowed here; leave it out")


def _known_text(node: yaml.ScalarNode) -> str:
    text: str = node.value
    try:  # JSON writes some characters as two escapes
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _Wrong(node, f"{text!r} holds half a character; write the whole one") from None


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    text = _known_text(node)
    kind = node.tag.removeprefix(_TAG)
    try:
        match kind:
            case "str":
                return text
            case "null":
                return None
            case "bool" if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case "int" if _INTEGER.fullmatch(text):
                return int(text, 16 if text.startswith("0x") else 10)
            case "float" if _INTEGER.fullmatch(text) or _FLOAT.fullmatch(text):
                return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
    except ValueError:  # thousands of digits
        raise _Wrong(node, "a number with so many digits cannot be read; write it in quotes if it is text") from None
    if kind in ("bool", "int", "float"):
        raise _Wrong(node, f"{text!r} is not a valid {kind}; leave the tag out")
    raise _Wrong(node, f"the tag {node.tag} is not allowed here; leave it out")


def _mend(data: dict[str, Any], root: yaml.Node, given: Mapping[str, Any], key_path: KeyPath) -> bool:
    """Put in what the file says where it was misread; returns whether anything was.

    A scalar that should be text is what stands in the file, and so are those beside it in a list or in a mapping such
    as `env`.
    """
    key_path = _in_file(key_path, data)
    parent: Any = data
    for part in key_path[:-1]:
        parent = parent[part]
    beside = [*parent] if isinstance(parent, dict) else range(len(parent))
    mended = False
    for part in beside if len(key_path) > 1 else key_path:
        node = _find(root, (*key_path[:-1], part))[1]
        is_misread = isinstance(node, yaml.ScalarNode) and not isinstance(parent[part], str)
        if is_misread and not _is_given((*key_path[:-1], part), given):
            parent[part] = node.value
            mended = True
    return mended


def _is_given(key_path: KeyPath, given: Mapping[str, Any]) -> bool:
    """Whether it is a flag's value, not the file's."""
    if not key_path or key_path[0] not in given:
        return False
    value = given[str(key_path[0])]
    return len(key_path) == 1 or not isinstance(value, dict) or key_path[0] == "code" or key_path[1] in value


def _in_file(key_path: KeyPath, data: Mapping[str, Any]) -> KeyPath:
    """The key path in the file, where the fields of `rendezvous` may be among those of the job."""
    return key_path[1:] if key_path[0] == "rendezvous" and len(key_path) > 1 and key_path[1] in data else key_path


def _find(root: yaml.Node, key_path: KeyPath) -> tuple[yaml.Node, yaml.Node]:
    """The key or list item at a key path, and its value; of the nearest parent that the file has, if it lacks it."""
    begin = value = root
    for part in key_path:
        if isinstance(value, yaml.SequenceNode) and isinstance(part, int):
            begin = value = value.value[part]
        elif isinstance(value, yaml.MappingNode) and (pair := [p for p in value.value if p[0].value == part]):
            begin, value = pair[0]
        else:
            break
    return begin, value
