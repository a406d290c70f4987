"""The table of verbs as a tree of click's commands.

A verb is a name and a line until it is called; then its module is loaded. Every verb takes the
shared options, before or after its name; they end up in the session.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

import click

from .. import __version__
from . import parameters
from .session import Session
from .table import EXIT_STATUSES, GROUPS, VERBS, Verb, exit_lines

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Put a shared option into the session; the one after the verb wins."""
    if value and isinstance(ctx.obj, Session):
        setattr(ctx.obj, str(param.name), value)


_shared = partial(click.Option, expose_value=False, callback=_keep)
_SHARED: list[click.Parameter] = [
    _shared(["--json"], is_flag=True, help="Answer as JSON."),
    _shared(["--config"], metavar="FILE", help="The configuration [MIRRORD_CONFIG]."),
    _shared(["--socket"], metavar="PATH", help="The daemon's socket [MIRRORD_SOCKET]."),
    _shared(["--debug"], is_flag=True, help="Show the traceback of a failure."),
]


class _Verb(click.Command):
    """Takes its help, parameters and function from its module when it is called."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(
            verb.name.rpartition(" ")[2], help=verb.summary, context_settings=_SETTINGS
        )
        self._verb = verb

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        module, _, name = self._verb.at.partition(":")
        function = getattr(importlib.import_module(f".{module}", __package__), name)
        if details := inspect.getdoc(function):
            self.help = f"{self._verb.summary}\n\n{details}"
        self.epilog = f"\b\nExit status:\n{exit_lines((0, 1, 2, *self._verb.ends))}"
        self.params = [*parameters.read(function), *_SHARED]
        self.callback = lambda **given: function(click.get_current_context().obj, **given)
        return super().make_context(*args, **kwargs)


class _Group(click.Group):
    def __init__(self, name: str, summary: str, epilog: str | None = None) -> None:
        super().__init__(
            name,
            help=summary,
            epilog=epilog,
            params=list(_SHARED),
            no_args_is_help=True,
            context_settings=_SETTINGS,
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(self.commands)


def build() -> click.Group:
    """The whole command line."""
    summary = "Git-native mirrors and sealed checkouts, served by one daemon per machine."
    epilog = f"\b\nExit status:\n{exit_lines(EXIT_STATUSES)}"
    root = _Group("mirrord", summary, epilog)
    click.version_option(__version__, message="mirrord %(version)s", help="Print the version.")(
        root
    )
    for verb in VERBS:
        parent, _, leaf = verb.name.rpartition(" ")
        if parent and parent not in root.commands:
            root.add_command(_Group(parent, GROUPS[parent]))
        group = root.commands[parent] if parent else root
        assert isinstance(group, click.Group)
        group.add_command(_Verb(verb), leaf)
    return root
