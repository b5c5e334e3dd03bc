"""Models of what users give: structs of msgspec, with errors that name a key path and fit into one line.

A model is made from fields by its constructor, or by `validated` from a mapping; either checks them. It keeps which
fields were given.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from .errors import UserError, nearest
from .text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    KeyPath = tuple[str | int, ...]

_LONGEST = 60  # characters of a bad value that are shown
_YES_OR_NO = {"yes": True, "on": True, "no": False, "off": False}
_WORDS: dict[Any, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping of names to values",
    list: "a list", tuple: "a list",
}  # fmt: skip
_COMPARISONS = {
    ">=": "greater than or equal to", ">": "greater than", "<=": "less than or equal to", "<": "less than",
}  # fmt: skip


class InvalidError(UserError, ValueError):
    """A field is unknown, missing or malformed.

    Attributes:
        key_path: keys and indices that lead to it; empty for the whole input.
        wants_text: whether it should be text, and is not.
    """

    def __init__(self, key_path: KeyPath, message: str, value: Any = None, *, wants_text: bool = False) -> None:
        self.key_path, self.wants_text = key_path, wants_text
        self._message, self._value = message, value
        super().__init__(str(self.named(dotted)))

    def named(self, where: Callable[[KeyPath], str]) -> UserError:
        """The same with another name for the key path: a flag, or a line of a file."""
        name = where(self.key_path)
        text = printable(f"{name}{_shown(self._value, self._message)}: {self._message}" if name else self._message)
        return UserError(text)

    def below(self, above: KeyPath) -> InvalidError:
        """The same with a longer key path."""
        return InvalidError((*above, *self.key_path), self._message, self._value, wants_text=self.wants_text)


def dotted(key_path: KeyPath) -> str:
    """`env.LR`, `data[0].path`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key_path)
    return text.removeprefix(".")


class _Validating(msgspec.StructMeta):
    """Has constructors validate; msgspec's own does so only for what it decodes."""

    def __call__(cls, *unnamed: Any, **fields: Any) -> Any:
        if unnamed:
            raise InvalidError(
                (), f"{cls.__name__} takes its fields by name, such as {next(iter(cls.__struct_fields__))}=…"
            )
        return cls.validated(fields)  # type: ignore[attr-defined]  # of a Model


class Model(
    msgspec.Struct, metaclass=_Validating, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True
):  # fmt: skip
    """Fields that are checked."""

    is_strict: ClassVar[bool] = False  # if not, "3" is a number where only a number can be meant
    elsewhere: ClassVar[Mapping[str, str]] = {}  # what other tools call a field → its name
    parsers: ClassVar[dict[str, Any]] = {}  # field → what reads it; raises ValueError

    @classmethod
    def validated(cls, given: Any) -> Self:
        """The model with these fields."""
        if isinstance(given, cls):
            return given
        fields = cls.arranged(given)
        if not isinstance(fields, Mapping):
            raise InvalidError((), "should be a mapping", fields)
        for name in fields:
            if name not in cls.__struct_fields__:
                raise InvalidError((name,), _unknown(cls, str(name)))
        parsed = {name: cls._parsed(name, value) for name, value in fields.items()}
        try:
            new = msgspec.convert(parsed, cls, strict=cls.is_strict)
        except msgspec.ValidationError as error:
            raise _explained(cls, parsed, str(error)) from None
        new.__dict__["given"] = frozenset(fields)
        new.check()
        return new

    @classmethod
    def arranged(cls, given: Any) -> Any:
        """What was given as a mapping of fields; models with other forms, such as a short one, override it."""
        return given

    def check(self) -> None:
        """Refuse fields that contradict each other; raises `InvalidError`."""

    @classmethod
    def _parsed(cls, name: str, value: Any) -> Any:
        try:
            if name in cls.parsers:
                return cls.parsers[name](value)
        except InvalidError as error:
            raise error.below((name,)) from None
        except ValueError as error:
            raise InvalidError((name,), str(error), value) from None
        if isinstance(value, str) and value in _YES_OR_NO and not cls.is_strict and bool in _kinds(cls, (name,)):
            return _YES_OR_NO[value]
        return value

    @property
    def given(self) -> frozenset[str]:
        """The fields that were given, and do not have their values by default."""
        found: frozenset[str] = self.__dict__.get("given", frozenset(self.__struct_fields__))
        return found

    def changed(self, fields: Mapping[str, Any]) -> Self:
        """A copy with other values, which are not checked."""
        new = msgspec.structs.replace(self, **fields)
        new.__dict__.update(self.__dict__, given=self.given | fields.keys())
        return new

    def dumped(self, *, only_given: bool = False, only_changed: bool = False) -> dict[str, Any]:
        """The fields as JSON can hold them, as `validated` takes them."""
        # msgspec's own JSON refuses bytes that are no UTF-8, which Linux allows in arguments and paths.
        found: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(self, str_keys=True)))
        if only_given:
            return {name: value for name, value in found.items() if name in self.given}
        if only_changed:
            return {name: value for name, value in found.items() if getattr(self, name) != self.default(name)}
        return found

    def __copy__(self) -> Self:
        return self.changed({})

    def __reduce__(self) -> Any:
        """What has been read is not read again: a duration has no unit any more."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return _restored, (type(self), fields, self.__dict__)

    @classmethod
    def required(cls) -> list[str]:
        """The fields that must be given."""
        return [field.name for field in msgspec.structs.fields(cls) if field.required]

    @classmethod
    def default(cls, field: str) -> Any:
        """The value that a field has if it is not given; of one that need not be."""
        found = next(it for it in msgspec.structs.fields(cls) if it.name == field)
        factory = found.default_factory
        return factory() if callable(factory) else found.default


def _restored(model: type[Model], fields: dict[str, Any], rest: dict[str, Any]) -> Model:
    new: Model = msgspec.StructMeta.__call__(model, **fields)
    new.__dict__.update(rest)
    return new


def each(model: type[Model]) -> Callable[[Any], Any]:
    """A parser of a list or mapping of models, which takes them in all their forms."""

    def parse(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: one(name, value) for name, value in values.items()}
        return [one(n, value) for n, value in enumerate(values)] if isinstance(values, (list, tuple)) else values

    def one(part: str | int, value: Any) -> Model:
        try:
            return model.validated(value)
        except InvalidError as error:
            raise error.below((part,)) from None

    return parse


def _explained(model: type[Model], fields: Mapping[str, Any], text: str) -> InvalidError:
    """What msgspec says of fields, with the key path, in other words."""
    what, _, place = text.rpartition(" - at ")
    what, place = (what, place.strip("`")) if place.startswith(("`$", "`key` in `$")) else (text, "$")
    key_path: KeyPath = ()
    for name, number in re.findall(r"\.(\w+)|\[([0-9]+|\.\.\.)\]", place):
        key = _wrong_key(model, key_path, _at(fields, key_path)) if number == "..." else name or int(number)
        key_path = (*key_path, key)
    kinds = _kinds(model, key_path)
    field = re.fullmatch(r"Object (?:missing required|contains unknown) field `(.*)`", what, re.DOTALL)
    if field is not None and what.startswith("Object missing"):
        return InvalidError((*key_path, field[1]), "missing; add it")
    if field is not None:
        return InvalidError((*key_path, field[1]), _unknown(next(filter(_is_model, kinds)), field[1]))
    value = _at(fields, key_path)
    limit = re.fullmatch(r"Expected `\w+` (?P<length>of length )?(?P<how>[<>]=?) (?P<number>.+)", what)
    if limit is not None:
        than = f"{_COMPARISONS[limit['how']]} {limit['number'].removesuffix('.0')}"
        return InvalidError(key_path, f"should {'have a length ' if limit['length'] else 'be '}{than}", value)
    message = f"should be {' or '.join(_words(kinds))}"
    return InvalidError(key_path, message, value, wants_text=str in kinds and not isinstance(value, str))


def _unknown(model: type[Model], name: str) -> str:
    meant = model.elsewhere.get(name.lower().replace("-", "_"))
    return f"unknown key; {f'did you mean {meant}?' if meant else nearest(name, model.__struct_fields__)}"


def _at(value: Any, key_path: KeyPath) -> Any:
    """What is at a key path."""
    for part in key_path:
        value = value[part]
    return value


def _wrong_key(model: type[Model], key_path: KeyPath, mapping: Mapping[str, Any]) -> str:
    """The first key of a mapping whose value is malformed: msgspec does not name it."""
    for key, value in mapping.items():
        for kind in _kinds(model, (*key_path, key)):
            try:
                msgspec.convert(value, kind, strict=model.is_strict)
                break
            except msgspec.ValidationError:
                continue
        else:
            return key
    raise AssertionError("msgspec has refused one")


def _kinds(model: type[Model], key_path: KeyPath) -> list[Any]:
    """The types that are allowed at a key path, without their constraints."""
    kinds: list[Any] = [model]
    for part in key_path:
        kinds = [inside for kind in kinds for inside in _inside(kind, part)]
    return kinds


def _inside(kind: Any, part: str | int) -> list[Any]:
    if _is_model(kind):
        return _members(get_type_hints(kind, include_extras=True).get(str(part), Any))
    if get_origin(kind) is dict and isinstance(part, str):
        return _members(get_args(kind)[1])
    if get_origin(kind) in (list, tuple) and isinstance(part, int):
        return _members(get_args(kind)[0])
    return []


def _members(annotation: Any) -> list[Any]:
    """The types that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Model)


def _words(kinds: list[Any]) -> Iterator[str]:
    """What is allowed, in words; that a field may be left empty goes without saying."""
    for kind in kinds:
        if get_origin(kind) is Literal:
            *names, last = map(repr, get_args(kind))
            yield f"{', '.join(names)} or {last}" if names else last
        elif kind is not type(None):
            yield "a mapping" if _is_model(kind) else _WORDS[get_origin(kind) or kind]


def _shown(value: Any, message: str) -> str:
    """The bad value for a message, cut to a readable length; "" if the message has it already."""
    text = repr(value)
    if not isinstance(value, (str, int, float, bool)) or text in message:
        return ""
    return f" {text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}"
