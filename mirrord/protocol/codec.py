"""The base class of messages, frozen dataclasses, with their conversion to and from JSON.

The client uses only the standard library. The daemon reads requests through pydantic with the same
classes, and with the `Bounds` in their annotations. Requests refuse unknown members; answers ignore
them, so an older client can read a newer daemon.
"""

import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from datetime import datetime
from enum import StrEnum
from inspect import get_annotations
from threading import RLock
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union

from ..jsontext import dumps
from ..quoting import as_utf8, quote_name, unquote_name
from ..units import parse_duration

API = "/v1"


class MalformedError(ValueError):
    """A value does not fit its message. `place` is its path of members and indexes."""

    def __init__(self, message: str, *place: str | int) -> None:
        super().__init__(message)
        self.place = place

    def __str__(self) -> str:
        return ": ".join(filter(None, [".".join(map(str, self.place)), self.args[0]]))


class Bounds:
    """Bounds of a value, as items of pydantic's core schemas, which are plain dicts."""

    def __init__(self, *, description: str | None = None, **bounds: Any) -> None:
        self._described = {} if description is None else {"description": description}
        self._bounds = bounds

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        return {**handler(source), **self._bounds}

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        return {**handler(schema), **self._described}


class NameBounds(Bounds):
    """Bounds of a name of git in its printable form (`quoting.py`), which a message has as text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        text = super().__get_pydantic_core_schema__(source, handler)
        read = {"type": "no-info", "function": unquote_name}
        return {"type": "function-after", "function": read, "schema": text}


def _is_name(kind: Any) -> bool:
    """Return whether values of this type are names, or have names in them."""
    bounds = getattr(kind, "__metadata__", ())
    return any(isinstance(bound, NameBounds) for bound in bounds) or any(
        map(_is_name, typing.get_args(kind))
    )


def _quoted(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_quoted, value))
    return quote_name(value) if isinstance(value, str) else value


class _Fields:
    """The `__dataclass_fields__` of a message until pydantic or `replace` first looks at them."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self._defaults = defaults

    def __get__(self, message: object, kind: type["Message"]) -> Any:
        with _one_thread:
            if vars(kind)["__dataclass_fields__"] is self:
                for name, default in self._defaults.items():
                    if isinstance(default, list | dict):
                        # dataclass refuses lists and dicts as they are
                        setattr(kind, name, field(default_factory=default.copy))
                dataclass(init=False, repr=False, eq=False, kw_only=True)(kind)
        return vars(kind)["__dataclass_fields__"]


_one_thread = RLock()  # of a base class within that of its subclass


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """A message. Subclasses are frozen dataclasses; lists and dicts as defaults are copied.

    The methods are written out because dataclasses compile six of them per class, and the rest that
    makes a class a dataclass waits until it is asked for: the command line knows 120 messages, uses
    three, and would spend half of its start on them.
    """

    _defaults: ClassVar[dict[str, Any]] = {}
    _names: ClassVar[list[str]] = []
    _required: ClassVar[set[str]] = set()

    def __init_subclass__(cls) -> None:
        own = [name for name in get_annotations(cls) if not name.startswith("_")]
        defaults = {name: getattr(cls, name) for name in own if hasattr(cls, name)}
        cls._defaults = {**cls._defaults, **defaults}
        cls._names = [*dict.fromkeys((*cls._names, *own))]
        cls._required = {*cls._names} - cls._defaults.keys()
        cls.__dataclass_fields__ = _Fields(defaults)  # type: ignore[attr-defined]

    def __init__(self, **members: Any) -> None:
        for name, default in self._defaults.items():
            if name not in members:
                members[name] = default.copy() if isinstance(default, list | dict) else default
        if members.keys() != self._required | self._defaults.keys():
            raise TypeError(f"the members of {type(self).__name__} are not {sorted(members)}")
        self.__dict__.update(members)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to {name}: a message is frozen")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    # a message may hold lists
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        members = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({members})"

    def to_json(self) -> dict[str, Any]:
        values = {name: to_json(self.__dict__[name]) for name in self._names}
        return values | {name: _quoted(values[name]) for name in _names_of_git(type(self))}

    @classmethod
    def of(cls, **members: Any) -> Self:
        """Make a message of values, which are checked as those of JSON are."""
        quoted = {name: _quoted(members[name]) for name in members.keys() & _names_of_git(cls)}
        return cls.from_json(members | quoted)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises MalformedError with the place of the fault."""
        if not isinstance(value, dict):
            raise MalformedError("Input should be an object")
        if cls not in _readers:
            # at the first reading: a process reads few of the messages
            hints = typing.get_type_hints(cls, include_extras=True)
            _readers[cls] = {name: _reader(hints[name]) for name in cls._names}
        read = {
            name: _read_at(name, reader, value[name])
            for name, reader in _readers[cls].items()
            if name in value
        }
        if missing := sorted(cls._required - read.keys()):
            raise MalformedError("Field required", missing[0])
        return cls(**read)


class Request(Message):
    __pydantic_config__: ClassVar = {"extra": "forbid"}


class Answer(Message):
    pass


class Problem(Answer):
    """A problem by RFC 9457. `code` is stable. Further members are the `facts` of the error."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    hint: str | None = None
    facts: dict[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        members = super().to_json()
        return {**members.pop("facts"), **members}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        if isinstance(value, dict):
            others = {name: fact for name, fact in value.items() if name not in cls._names}
            value = {**value, "facts": others}
        return super().from_json(value)


_of_git: dict[type[Message], set[str]] = {}


def _names_of_git(kind: type[Message]) -> set[str]:
    """Return the members that are names of git, or have some in them."""
    if kind not in _of_git:
        annotations = [item for base in kind.__mro__ for item in get_annotations(base).items()]
        _of_git[kind] = {name for name, annotation in annotations if _is_name(annotation)}
    return _of_git[kind]


# -- to JSON and back -----------------------------------------------------------------------------

_PLAIN = {str, int, float, bool, NoneType}  # most values; their subclasses are looked at


def to_json(value: Any) -> Any:
    """Convert a message, or the value of a member, to JSON values."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Message):
        return value.to_json()
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, Mapping):
        return {to_json(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    return str(value)  # a fact of an error may be a path


def to_bytes(value: Any) -> bytes:
    """Encode as JSON in UTF-8."""
    return dumps(to_json(value), separators=(",", ":")).encode()


def canonical(value: Any) -> bytes:
    """Encode as canonical JSON (RFC 8785), without members that are None.

    Takes objects with ASCII names, arrays, strings, booleans and integers below 2**53, which Python
    writes as the RFC demands. A float is a TypeError.
    """
    return _canonical(to_json(value)).encode()


def _canonical(value: Any) -> str:
    if isinstance(value, dict):
        # the RFC sorts by UTF-16 units, which for ASCII is this order
        members = sorted((name, item) for name, item in value.items() if item is not None)
        return f"{{{','.join(f'{_canonical(name)}:{_canonical(item)}' for name, item in members)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, float):
        raise TypeError(f"{value} has no canonical form here")
    # nothing is escaped that JSON lets stand
    return json.dumps(as_utf8(value) if isinstance(value, str) else value, ensure_ascii=False)


_Reader = Callable[[Any], Any]
_readers: dict[type[Message], dict[str, _Reader]] = {}
_KINDS: dict[type, str] = {list: "an array", dict: "an object", str: "a string"}
_KINDS |= {bool: "true or false", int: "an integer", float: "a number"}


def _read_at(place: str | int, reader: _Reader, value: Any) -> Any:
    try:
        return reader(value)
    except MalformedError as error:
        raise MalformedError(error.args[0], place, *error.place) from error


def _reader(kind: Any) -> _Reader:
    """Make a function that reads values of a type, one of those in messages."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: value
    if origin is Annotated:
        inner = _reader(arguments[0])
        is_name = any(isinstance(bound, NameBounds) for bound in kind.__metadata__)
        return _name_reader(inner) if is_name else inner
    if origin is list:
        item = _reader(arguments[0])
        return lambda value: [
            _read_at(index, item, element) for index, element in enumerate(_checked(list, value))
        ]
    if origin is dict:
        key, item = map(_reader, arguments)
        return lambda value: {
            key(name): _read_at(name, item, member)
            for name, member in _checked(dict, value).items()
        }
    if origin is Literal:
        return _choice_reader(arguments, str)
    if origin in (Union, UnionType):
        inner = _reader(next(argument for argument in arguments if argument is not NoneType))
        return lambda value: None if value is None else inner(value)
    if issubclass(kind, Message):
        read: _Reader = kind.from_json
        return read
    if issubclass(kind, StrEnum):
        return _choice_reader(tuple(choice.value for choice in kind), kind)
    if kind is datetime:
        return _read_time
    return lambda value: _checked(kind, value)


def _name_reader(inner: _Reader) -> _Reader:
    def read(value: Any) -> str:
        try:
            return unquote_name(inner(value))
        except UnicodeEncodeError as error:
            raise MalformedError("Input should be text in UTF-8") from error

    return read


def _checked(kind: type, value: Any) -> Any:
    accepted = (int, float) if kind is float else kind
    # bool is a subclass of int, but `true` is no number
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise MalformedError(f"Input should be {_KINDS[kind]}")
    return value


def _choice_reader(choices: tuple[str, ...], kind: Callable[[str], Any]) -> _Reader:
    *most, last = map(repr, choices)
    expected = f"Input should be {', '.join(most)} or {last}" if most else f"Input should be {last}"

    def read(value: Any) -> Any:
        if value not in choices:
            raise MalformedError(expected)
        return kind(value)

    return read


def _read_time(value: Any) -> datetime:
    try:
        # reads the Z of `to_json` since Python 3.11
        return datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise MalformedError("Input should be a time in ISO 8601") from error


# -- bounds of requests ---------------------------------------------------------------------------


class SecondsBounds(Bounds):
    """Bounds of seconds, given as a number or as a duration in the configuration's form."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        number = super().__get_pydantic_core_schema__(source, handler)
        read = {"type": "no-info", "function": self._read}
        return {"type": "function-before", "function": read, "schema": number}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        number = super().__get_pydantic_json_schema__(schema, handler)
        return {"anyOf": [number, {"type": "string"}], "description": number.pop("description")}

    @staticmethod
    def _read(value: object) -> object:
        return parse_duration(value).total_seconds() if isinstance(value, str) else value


Repo = Annotated[str, Bounds(min_length=1, max_length=400)]
Text = Annotated[str, Bounds(max_length=2000)]
Word = Annotated[str, Bounds(min_length=1, max_length=500)]
_NAME = 'a name of git; bytes that are not UTF-8 in git\'s quotes, as "caf\\351"'
GitName = Annotated[str, NameBounds(description=_NAME)]
# a byte takes four characters in quotes; a path of git has up to 4,096
GitPath = Annotated[str, NameBounds(min_length=1, max_length=4 * 4096 + 2, description=_NAME)]
Revision = Annotated[str, NameBounds(min_length=1, max_length=4 * 500 + 2)]
_SNAPSHOT = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
SnapshotName = Annotated[str, Bounds(pattern=_SNAPSHOT)]
_LAYER = "letters, digits, '.', '_' and '-'"
LayerName = Annotated[str, Bounds(pattern=_SNAPSHOT, description=_LAYER)]
_LABEL = (
    "label chosen by the caller, to list and release checkouts by; inherited by forks and grades"
)
Label = Annotated[
    str, Bounds(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/=@-]{0,199}$", description=_LABEL)
]
_ENVIRONMENT = "KEY, KEY@DIGEST (a prefix is enough), or auto: the instance's"
EnvironmentName = Annotated[str, Bounds(min_length=1, max_length=300, description=_ENVIRONMENT)]
_TTL = "how long the lease lives unless renewed: seconds, or a duration such as 90s, 30m or 2h"
Ttl = Annotated[float, SecondsBounds(strict=True, gt=0, le=366 * 86400, description=_TTL)]
_OWNER = "the uid whose checkout it is, if the caller may name it; default: the caller's own"
# 2³²-1 is `(uid_t) -1`, which means no change to chown(2)
OwnerUid = Annotated[int, Bounds(strict=True, ge=0, lt=2**32 - 1, description=_OWNER)]
