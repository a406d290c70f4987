"""The table of verbs as a tree of commands. A verb is a name and a line until it is called; then its module is loaded.

Every verb takes the shared options, before or after its name; they end up in the session.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from .session import Session
from .table import EXIT_STATUSES, GROUPS, VERBS, Verb, exit_lines

_SHARED = ("json", "config", "socket", "debug")
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def _keep(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Put a shared option into the session; the one after the verb wins."""
    if value and isinstance(ctx.obj, Session):
        setattr(ctx.obj, str(param.name), value)
    return value


def _version(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        typer.echo(f"mirrord {__version__}")
        raise typer.Exit


def _top(
    json: Annotated[bool, typer.Option("--json", help="Answer as JSON.", callback=_keep)] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The configuration [MIRRORD_CONFIG].", callback=_keep)
    ] = None,
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", help="The daemon's socket [MIRRORD_SOCKET].", callback=_keep)
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.", callback=_keep)] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)] = False,
) -> None:
    """Git-native mirrors and sealed checkouts, served by one daemon per machine."""


class _Deferred(TyperCommand):
    """A verb whose module was not loaded yet."""

    def __init__(self, verb: Verb, shared: list[Any]) -> None:
        super().__init__(verb.name.rpartition(" ")[2], help=verb.summary, rich_markup_mode=None)
        self._verb = verb
        self._shared = shared

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return _load(self._verb, self._shared).make_context(info_name, args, parent, **extra)


def _load(verb: Verb, shared: list[Any]) -> Any:
    module, _, name = verb.at.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __package__), name)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=_SETTINGS)
    details = f"\n\n{inspect.getdoc(function)}" if function.__doc__ else ""
    ends = f"\b\nExit status:\n{exit_lines((0, 1, 2, *verb.ends))}"
    settings = getattr(function, "context_settings", None)
    app.command(verb.name, help=verb.summary + details, epilog=ends, context_settings={**_SETTINGS, **(settings or {})})(function)
    command = typer.main.get_command(app)
    command.params.extend(shared)
    return command


def build() -> TyperGroup:
    """The whole command line."""
    app = typer.Typer(rich_markup_mode=None, context_settings=_SETTINGS, no_args_is_help=True)
    app.callback(epilog=f"\b\nExit status:\n{exit_lines(EXIT_STATUSES)}")(_top)
    root = typer.main.get_command(app)
    if not isinstance(root, TyperGroup):
        raise TypeError("typer built no group")
    shared = [param for param in root.params if param.name in _SHARED]
    for param in shared:
        param.expose_value = False
    for verb in VERBS:
        group, _, leaf = verb.name.rpartition(" ")
        _group(root, group, shared).add_command(_Deferred(verb, shared), leaf)
    return root


def _group(root: TyperGroup, name: str, shared: list[Any]) -> TyperGroup:
    if not name:
        return root
    found = root.commands.get(name)
    if not isinstance(found, TyperGroup):
        found = TyperGroup(
            name=name,
            help=GROUPS[name],
            params=list(shared),
            no_args_is_help=True,
            rich_markup_mode=None,
            context_settings=_SETTINGS,
        )
        root.add_command(found)
    return found
