"""Parameters of a verb, read from its function: `Annotated[type, Argument(…) or Option(…)]`.

The types are str, Path, bool, a StrEnum, a list of them, or one of them or None. click parses;
typer, which reads the same, takes 26 ms more to load (0.29.2), a third of a verb's time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import click


class Argument(NamedTuple):
    """A positional parameter; `metavar` is its name in capitals by default."""

    help: str
    metavar: str | None = None


class Option:
    """`--name` by default, after the parameter."""

    def __init__(self, *flags: str, help: str, metavar: str | None = None) -> None:  # noqa: A002
        self.flags = flags
        self.help = help
        self.metavar = metavar


class _Choice(click.Choice[str]):
    """One of an enum, by value: click's own takes their names."""

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__([member.value for member in kind])
        self._kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> StrEnum:
        return self._kind(super().convert(value, param, ctx))


class _Argument(click.Argument):
    def make_metavar(self, ctx: click.Context | None = None) -> str:
        return self.metavar or (self.name or "").upper()


def read(function: Callable[..., None]) -> list[click.Parameter]:
    """The parameters of a verb in order, without the first, which is the session."""
    hints = get_type_hints(function, include_extras=True)
    return [
        _parameter(given, hints[given.name])
        for given in list(inspect.signature(function).parameters.values())[1:]
    ]


def _parameter(given: inspect.Parameter, hint: Any) -> click.Parameter:
    annotated, described = get_args(hint)
    kind = next(
        (each for each in get_args(annotated) if get_args(annotated)[-1:] == (NoneType,)), annotated
    )
    is_list = get_origin(kind) is list
    is_required = given.default is inspect.Parameter.empty
    common: dict[str, Any] = {
        "required": is_required,
        "metavar": described.metavar,
        "help": described.help,
    }
    if not is_required:
        common["default"] = getattr(given.default, "value", given.default)
    if isinstance(described, Argument):
        one = _type(get_args(kind)[0] if is_list else kind)
        return _Argument([given.name], type=one, nargs=-1 if is_list else 1, **common)
    return click.Option(
        [given.name, *(described.flags or [f"--{given.name.replace('_', '-')}"])],
        type=None if kind is bool else _type(kind),
        is_flag=kind is bool,
        show_default=bool(common.get("default")),
        **common,
    )


def _type(kind: type) -> click.ParamType[Any]:
    if issubclass(kind, StrEnum):
        return _Choice(kind)
    return click.types.FuncParamType(kind) if kind is Path else click.STRING
