"""What every message is made from: frozen dataclasses, and their way to JSON and back.

The client needs nothing but the standard library for them. The daemon reads requests through
pydantic, which takes the same classes: `Bounds` beside a type are its words.
Requests refuse unknown members; answers ignore them, so that an older client reads a newer daemon.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from inspect import get_annotations
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

API = "/v1"


class MalformedError(ValueError):
    """A value is not what its message says. `place` is the path to it, members and indexes."""

    def __init__(self, message: str, *place: str | int) -> None:
        super().__init__(message)
        self.place = place

    def __str__(self) -> str:
        return (
            f"{'.'.join(map(str, self.place))}: {self.args[0]}" if self.place else str(self.args[0])
        )


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """A subclass is a frozen dataclass; a list or dict as a default is copied for each message.

    The methods are here and not generated: dataclasses compile six for each class, 50 ms in all,
    which each start of the command line would pay.
    """

    _defaults: ClassVar[dict[str, Any]] = {}
    _names: ClassVar[list[str]] = []
    _required: ClassVar[set[str]] = set()

    def __init_subclass__(cls) -> None:
        own = {
            name: getattr(cls, name, MISSING)
            for name in get_annotations(cls)
            if not name.startswith("_")
        }
        for name, default in own.items():
            if isinstance(default, list | dict):
                setattr(cls, name, field(default_factory=default.copy))
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        cls._defaults = {
            **cls._defaults,
            **{name: default for name, default in own.items() if default is not MISSING},
        }
        cls._names = [member.name for member in fields(cls)]  # type: ignore[arg-type]
        cls._required = {*cls._names} - cls._defaults.keys()

    def __init__(self, **members: Any) -> None:
        for name, default in self._defaults.items():
            if name not in members:
                members[name] = default.copy() if isinstance(default, list | dict) else default
        if members.keys() != self._required | self._defaults.keys():
            raise TypeError(f"{type(self).__name__} has other members than {sorted(members)}")
        self.__dict__.update(members)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to {name}: a message is frozen")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {name: to_json(self.__dict__[name]) for name in self._names}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises MalformedError with the place of the fault."""
        if not isinstance(value, dict):
            raise MalformedError("Input should be an object")
        read = {
            name: _read_at(name, reader, value[name])
            for name, reader in _readers(cls).items()
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
    """RFC 9457. `code` is stable; further members are the `facts` of the error."""

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
        if not isinstance(value, dict):
            raise MalformedError("Input should be an object")
        facts = {name: fact for name, fact in value.items() if name not in cls._names}
        return super().from_json({**value, "facts": facts})


# -- to JSON and back -------------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Messages, and values of their members, as JSON values."""
    if isinstance(value, Message):
        return value.to_json()
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, Mapping):
        return {to_json(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    return str(value)  # a fact of an error may be a path


def to_bytes(value: Any) -> bytes:
    """The same as UTF-8. A lone surrogate, from a name that is not UTF-8, becomes JSON's escape of it."""
    return json.dumps(to_json(value), ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )


_Reader = Callable[[Any], Any]
_KINDS = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}


_known: dict[type[Message], dict[str, _Reader]] = {}


def _readers(cls: type[Message]) -> dict[str, _Reader]:
    """The readers of a message's members, made when one is read first."""
    if cls not in _known:
        hints = get_type_hints(cls)
        _known[cls] = {name: _reader(hints[name]) for name in cls._names}
    return _known[cls]


def _read_at(place: str | int, reader: _Reader, value: Any) -> Any:
    try:
        return reader(value)
    except MalformedError as error:
        raise MalformedError(error.args[0], place, *error.place) from error


def _reader(kind: Any) -> _Reader:
    """The function that reads values of one type of those that messages use."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if origin is list:
        return _list_reader(_reader(arguments[0]))
    if origin is dict:
        return _dict_reader(*map(_reader, arguments))
    if origin is Literal:
        return _choice_reader(arguments, str)
    if origin in (Union, UnionType):
        inner = _reader(next(each for each in arguments if each is not NoneType))
        return lambda value: None if value is None else inner(value)
    if issubclass(kind, Message):
        read: _Reader = kind.from_json
        return read
    if issubclass(kind, StrEnum):
        return _choice_reader(tuple(each.value for each in kind), kind)
    if kind is datetime:
        return _read_time
    return _plain_reader(kind)


def _plain_reader(kind: type) -> _Reader:
    accepted = (int, float) if kind is float else kind

    def read(value: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise MalformedError(f"Input should be {_KINDS[kind]}")
        return value

    return read


def _choice_reader(choices: tuple[str, ...], kind: Callable[[str], Any]) -> _Reader:
    *most, last = map(repr, choices)
    expected = f"Input should be {', '.join(most)} or {last}" if most else f"Input should be {last}"

    def read(value: Any) -> Any:
        if value not in choices:
            raise MalformedError(expected)
        return kind(value)

    return read


def _list_reader(item: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise MalformedError("Input should be an array")
        return [_read_at(at, item, each) for at, each in enumerate(value)]

    return read


def _dict_reader(key: _Reader, item: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MalformedError("Input should be an object")
        return {key(name): _read_at(name, item, each) for name, each in value.items()}

    return read


def _read_time(value: Any) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise MalformedError("Input should be a time in ISO 8601") from error


# -- bounds of requests -------------------------------------------------------------------------------------------------


class Bounds:
    """Bounds of a value, in the words of pydantic's core schemas, which are plain dicts."""

    def __init__(self, *, description: str | None = None, **words: Any) -> None:
        self._described = {} if description is None else {"description": description}
        self._words = words

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        return {**handler(source), **self._words}

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        return {**handler(schema), **self._described}


Repo = Annotated[str, Bounds(min_length=1, max_length=400)]
Text = Annotated[str, Bounds(max_length=2000)]
