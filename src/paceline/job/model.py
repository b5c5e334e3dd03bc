"""Models of what users give: structs of msgspec, with errors that name a key path and fit into one line.

A model is made from fields by its constructor, or by `validated` from a mapping; either checks them. It keeps which
fields were given.
"""

from __future__ import annotations

import json
import operator
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from .errors import UserError, nearest
from .text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    KeyPath = tuple[str | int, ...]

Parsers = Mapping[str, Callable[[Any], Any]]  # field → what reads it; raises ValueError

_LONGEST = 60  # characters of a bad value that are shown
_YES_OR_NO = {"yes": True, "on": True, "no": False, "off": False}
_WORDS: dict[Any, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping of names to values",
    list: "a list", tuple: "a list",
}  # fmt: skip
_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, "greater than or equal to"), "gt": (operator.gt, "greater than"),
    "le": (operator.le, "less than or equal to"), "lt": (operator.lt, "less than"),
}  # fmt: skip
_WRONG = object()  # in the place of a value that could not be converted


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
    parsers: ClassVar[Parsers] = {}

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
        new: Self = _converted(cls, parsed, cls.is_strict)
        if new is _WRONG:
            found = _refusal(cls, parsed, cls.is_strict)
            assert found is not None
            raise found
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
        if isinstance(value, str) and value in _YES_OR_NO and not cls.is_strict:
            allowed = _members(get_type_hints(cls, include_extras=True)[name])
            return _YES_OR_NO[value] if any(kind is bool for kind, _ in allowed) else value
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


def _restored(model: type[Model], fields: dict[str, object], rest: dict[str, object]) -> Model:
    new: Model = msgspec.StructMeta.__call__(model, **fields)
    new.__dict__.update(rest)
    return new


def as_list(given: Any) -> Any:
    """A text alone as a list of it."""
    return [given] if isinstance(given, str) else given


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


def _refusal(annotation: Any, value: Any, strict: bool, key_path: KeyPath = ()) -> InvalidError | None:
    """Find the innermost part of a value that is not of its type, which msgspec names only in the text of an error."""
    if _converted(annotation, value, strict) is not _WRONG:
        return None
    members = _members(annotation)
    kinds = [kind for kind, _ in members]
    for kind in kinds:
        for key, inside, part in _inside(kind, value):
            if inside is None:
                return InvalidError((*key_path, key), _unknown(kind, str(key)))
            if part is msgspec.UNSET:
                return InvalidError((*key_path, key), "missing; add it")
            if (found := _refusal(inside, part, strict, (*key_path, key))) is not None:
                return found
    for kind, limits in members:
        converted = _converted(kind, value, strict)
        for limit in limits if converted is not _WRONG else ():
            if (than := _exceeded(limit, converted)) is not None:
                return InvalidError(key_path, f"should {than}", value)
    message = f"should be {' or '.join(_words(kinds))}"
    return InvalidError(key_path, message, value, wants_text=str in kinds and not isinstance(value, str))


def _converted(annotation: Any, value: Any, strict: bool) -> Any:
    try:
        return msgspec.convert(value, annotation, strict=strict)
    except msgspec.ValidationError:
        return _WRONG


def _exceeded(limit: msgspec.Meta, value: Any) -> str | None:
    """Say which of its limits a value is beyond."""
    for name, (is_within, words) in _LIMITS.items():
        if (bound := getattr(limit, name)) is not None and not is_within(value, bound):
            return f"be {words} {str(bound).removesuffix('.0')}"
    if limit.min_length is not None and len(value) < limit.min_length:
        return f"have a length greater than or equal to {limit.min_length}"
    return None


def _unknown(model: type[Model], name: str) -> str:
    meant = model.elsewhere.get(name.lower().replace("-", "_"))
    return f"unknown key; {f'did you mean {meant}?' if meant else nearest(name, model.__struct_fields__)}"


def _inside(kind: Any, value: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """The parts of a value as one type has them: key, type (None for an unknown key), and value (UNSET if missing)."""
    if _is_model(kind) and isinstance(value, Mapping):
        types_of = get_type_hints(kind, include_extras=True)
        yield from ((name, types_of.get(name) if name in kind.__struct_fields__ else None, it)
                    for name, it in value.items())  # fmt: skip
        yield from ((name, types_of[name], msgspec.UNSET) for name in kind.required() if name not in value)
    elif get_origin(kind) is dict and isinstance(value, Mapping):
        yield from ((name, get_args(kind)[1], it) for name, it in value.items() if isinstance(name, str))
    elif get_origin(kind) in (list, tuple) and isinstance(value, (list, tuple)):
        yield from ((number, get_args(kind)[0], it) for number, it in enumerate(value))


def _members(annotation: Any, limits: tuple[Any, ...] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """The types that an annotation allows, each with its constraints."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _members(inner, (*limits, *more))
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part, limits)]
    return [(annotation, limits)]


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
