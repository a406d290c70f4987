"""One invocation of the command line, from arguments to exit status.

The table of verbs becomes a tree of click commands. Every verb takes the shared options, before or
after its name. Every failure ends in `run`.
"""

import errno
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import click

from .. import __version__
from ..errors import InternalError, MirrordError, UsageError, host_error
from .session import Argument, Session
from .table import EXIT_STATUSES, GROUPS, VERBS, Verb, exit_lines

_PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main(args: Sequence[str] | None = None) -> None:
    """Run a verb and exit with its status: the console script."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit status."""
    session = Session()
    arguments = sys.argv[1:] if args is None else args
    try:
        os.getcwd()
    except FileNotFoundError:  # a reset replaced the current directory: enter the new one
        with suppress(OSError):
            os.chdir(os.environ.get("PWD", "/"))
    try:
        root = build()
        if "_MIRRORD_COMPLETE" in os.environ:
            root.main(prog_name="mirrord")  # prints completions and exits
        with root.make_context("mirrord", list(arguments), obj=session) as context:
            root.invoke(context)
        sys.stdout.flush()
    except BrokenPipeError:  # `mirrord … | head`
        _flush_or_drop()
        return 128 + signal.SIGPIPE
    except click.ClickException as error:
        # click may have failed before it reached --json; what follows -- is another command's.
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        session.json |= "--json" in own
        if session.json:
            session.fail(_usage_error(error))
        else:
            error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except click.exceptions.Exit as end:  # --help, --version
        return end.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except Exception as error:  # noqa: BLE001
        hint = None if session.debug else "report it with the output of --debug"
        bug = InternalError(f"a bug: {type(error).__name__}: {error}", hint=hint)
        failure = error if isinstance(error, MirrordError) else _fault_of_path(error) or bug
        session.fail(failure)
        _flush_or_drop()
        if session.debug:
            sys.excepthook(*sys.exc_info())
        return failure.exit_status
    finally:
        session.close()
    return 0


def _flush_or_drop() -> None:
    """Drop output that cannot be written: Python's flush at exit would end with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fault_of_path(error: Exception) -> MirrordError | None:
    """Return our error for a path that the user may not use, or a full disk; None for others."""
    if not isinstance(error, OSError):
        return None
    if error.errno in _PATH_ERRORS and error.filename is not None:
        fact = f"cannot use {os.fsdecode(error.filename)}: {error.strerror}"
        return UsageError(fact, hint="name a path that this user may use")
    return host_error(error, "write")


def _usage_error(error: click.ClickException) -> UsageError:
    text = error.format_message()
    # without a verb, click's message is the whole help text
    fact = "a verb is missing" if "\n" in text else text.rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "mirrord"
    return UsageError(f"cannot read the command line: {fact}", hint=f"see `{command} --help`")


# -- the tree of commands


def _store_shared(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store a shared option in the session; the one after the verb wins."""
    if value and isinstance(ctx.obj, Session):
        setattr(ctx.obj, str(param.name), value)


_shared = partial(click.Option, expose_value=False, callback=_store_shared)
_SHARED: list[click.Parameter] = [
    _shared(["--json"], is_flag=True, help="Print JSON."),
    _shared(["--config"], metavar="FILE", help="Configuration file [MIRRORD_CONFIG]."),
    _shared(["--socket"], metavar="PATH", help="Socket of the daemon [MIRRORD_SOCKET]."),
    _shared(["--debug"], is_flag=True, help="Print the traceback of an error."),
]


class _Command(click.Command):
    """A verb; help, parameters and function are read from its module when it is called."""

    def __init__(self, verb: Verb) -> None:
        name = verb.name.rpartition(" ")[2]
        super().__init__(name, help=verb.summary, context_settings=_SETTINGS)
        self._verb = verb

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        module, _, name = self._verb.at.partition(":")
        function = getattr(importlib.import_module(f".verbs.{module}", __package__), name)
        if details := inspect.getdoc(function):
            self.help = f"{self._verb.summary}\n\n{details}"
        self.epilog = f"\b\nExit status:\n{exit_lines((0, 1, 2, *self._verb.ends))}"
        self.params = [*_parameters(function), *_SHARED]
        self.callback = lambda **values: function(click.get_current_context().obj, **values)
        return super().make_context(*args, **kwargs)


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the table's order


def build() -> click.Group:
    summary = "Git-native mirrors and sealed checkouts, served by one daemon per machine."
    settings: dict[str, Any] = {"no_args_is_help": True, "context_settings": _SETTINGS}
    epilog = f"\b\nExit status:\n{exit_lines(EXIT_STATUSES)}"
    root = _Group("mirrord", help=summary, epilog=epilog, params=[*_SHARED], **settings)
    message = "mirrord %(version)s"
    click.version_option(__version__, message=message, help="Print the version.")(root)
    for verb in VERBS:
        parent, _, leaf = verb.name.rpartition(" ")
        if parent and parent not in root.commands:
            root.add_command(_Group(parent, help=GROUPS[parent], params=[*_SHARED], **settings))
        group = root.commands[parent] if parent else root
        assert isinstance(group, click.Group)
        group.add_command(_Command(verb), leaf)
    return root


# -- parameters from annotations; typer does the same, but takes 26 ms longer to load (0.29.2)


class _Choice(click.Choice[str]):
    """A member of an enum, by value; click's own choice takes names."""

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__([member.value for member in kind])
        self._kind = kind

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> StrEnum:
        return self._kind(super().convert(value, param, ctx))


class _ShownArgument(click.Argument):
    def make_metavar(self, ctx: click.Context | None = None) -> str:
        return self.metavar or (self.name or "").upper()


def _parameters(function: Callable[..., None]) -> Iterator[click.Parameter]:
    """Yield click's parameters for those of a verb, without the first, its session.

    Each is `Annotated[type, Argument(…) or Option(…)]`. The type is str, Path, bool or a StrEnum, a
    list of one of them, or one of them or None.
    """
    hints = get_type_hints(function, include_extras=True)
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        kind, spec = get_args(hints[parameter.name])
        if get_args(kind)[-1:] == (NoneType,):
            kind = get_args(kind)[0]
        is_list = get_origin(kind) is list
        item = get_args(kind)[0] if is_list else kind
        if issubclass(item, StrEnum):
            value_type: click.ParamType[Any] = _Choice(item)
        else:
            value_type = click.types.FuncParamType(Path) if item is Path else click.STRING
        common: dict[str, Any] = {"metavar": spec.metavar, "help": spec.help}
        common["required"] = parameter.default is inspect.Parameter.empty
        if not common["required"]:
            common["default"] = getattr(parameter.default, "value", parameter.default)
        if isinstance(spec, Argument):
            nargs = -1 if is_list else 1
            yield _ShownArgument([parameter.name], type=value_type, nargs=nargs, **common)
            continue
        flags = (spec.flags or f"--{parameter.name.replace('_', '-')}").split()
        if kind is bool:
            common |= {"is_flag": True}
        else:
            common |= {"type": value_type, "show_default": bool(common.get("default"))}
            common["multiple"] = is_list
        yield click.Option([parameter.name, *flags], **common)
