"""The table of verbs as a tree of click commands; a verb's module is loaded when it is called."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import click

from .. import __version__
from .session import Argument, Session
from .table import EXIT_STATUSES, GROUPS, LOOP, SECTIONS, VERBS, Verb, exit_lines

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# click would wrap at 80
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _store_shared(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store a shared option in the session; the one after the verb wins."""
    if value and isinstance(ctx.obj, Session):
        setattr(ctx.obj, str(param.name), value)


_shared = partial(click.Option, expose_value=False, callback=_store_shared)
_SHARED: list[click.Parameter] = [
    _shared(["--json"], is_flag=True, help="Print JSON."),
    _shared(["--quiet", "-q"], is_flag=True, help="Print no remarks and no progress."),
    _shared(["--config"], metavar="FILE", help="Configuration file [MIRRORD_CONFIG]."),
    _shared(["--socket"], metavar="PATH", help="Socket of the daemon [MIRRORD_SOCKET]."),
    _shared(["--debug"], is_flag=True, help="Print the traceback of an error."),
]


class _Command(click.Command):
    """A verb; help, parameters and function are read from its module when it is called."""

    def __init__(self, verb: Verb) -> None:
        name = verb.name.rpartition(" ")[2]
        super().__init__(name, help=verb.summary, context_settings=_SETTINGS)
        self.verb = verb

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        module, _, name = self.verb.at.partition(":")
        function = getattr(importlib.import_module(f".verbs.{module}", __package__), name)
        if details := inspect.getdoc(function):
            self.help = f"{self.verb.summary}\n\n{details}"
        # \b: click does not wrap the lines of this paragraph
        self.epilog = f"\b\nExit status:\n{exit_lines((0, 1, 2, *self.verb.ends))}"
        self.params = [*_parameters(function), *_SHARED]
        self.callback = partial(_call, function)
        return super().make_context(*args, **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take what follows the other arguments for the words of a command, with or without --."""
        arguments = [param for param in self.params if isinstance(param, _ShownArgument)]
        if arguments and arguments[-1].is_command:
            args = self._separate(args, len(arguments) - 1)
        return super().parse_args(ctx, args)

    def _separate(self, args: list[str], before: int) -> list[str]:
        """Put -- before a command that follows `before` other arguments."""
        options = {name: param for param in self.params for name in param.opts}
        words = iter(enumerate(args))
        for number, word in words:
            if word == "--":
                break
            if word.startswith("-") and word != "-":
                option = options.get(word)
                if isinstance(option, click.Option) and not option.is_flag:
                    next(words, None)
            elif before == 0:
                return [*args[:number], "--", *args[number:]]
            else:
                before -= 1
        return args

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"Example: mirrord {self.verb.example}\n\n")
        super().format_usage(ctx, formatter)


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the table's order


class _Root(_Group):
    """The command `mirrord`: its help has examples first, and verbs by section."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("".join(f"mirrord {words:<36}  {does}\n" for words, does in LOOP) + "\n")
        super().format_usage(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        section_of = {verb.name.partition(" ")[0]: verb.section for verb in VERBS}
        for section in SECTIONS:
            names = [name for name in self.commands if section_of[name] == section]
            with formatter.section(section):
                formatter.write_dl([(n, str(self.commands[n].help)) for n in names])


def build() -> click.Group:
    summary = "Git-native mirrors and sealed checkouts, served by one daemon per machine."
    settings: dict[str, Any] = {"no_args_is_help": True, "context_settings": _SETTINGS}
    epilog = f"\b\nExit status:\n{exit_lines(EXIT_STATUSES)}"
    root = _Root("mirrord", help=summary, epilog=epilog, params=[*_SHARED], **settings)
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
    is_command = False

    def make_metavar(self, ctx: click.Context | None = None) -> str:
        return self.metavar or (self.name or "").upper()


def _groups(function: Callable[..., None]) -> dict[str, Any]:
    """Return the parameters of a verb that are groups of options, each a named tuple."""
    hints = get_type_hints(function).items()
    return {name: kind for name, kind in hints if hasattr(kind, "_fields")}


def _call(function: Callable[..., None], **values: Any) -> None:
    for name, kind in _groups(function).items():
        values[name] = kind(**{field: values.pop(field) for field in kind._fields})
    function(click.get_current_context().obj, **values)


def _parameters(function: Callable[..., Any]) -> Iterator[click.Parameter]:
    """Yield click's parameters for those of a verb or a group, without the session.

    Each is a group or `Annotated[type, Argument(…) or Option(…)]`. The type is str, Path, bool or a
    StrEnum, a list of one of them, or one of them or None.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = _groups(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "session":
            continue
        if group := groups.get(parameter.name):
            yield from _parameters(group)
            continue
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
        if names := spec.names or ("file" if item is Path else ""):
            common["shell_complete"] = partial(_complete, names)
        common["required"] = parameter.default is inspect.Parameter.empty
        if not common["required"]:
            common["default"] = getattr(parameter.default, "value", parameter.default)
        if isinstance(spec, Argument):
            nargs = -1 if is_list else 1
            argument = _ShownArgument([parameter.name], type=value_type, nargs=nargs, **common)
            argument.is_command = spec.is_command
            yield argument
            continue
        flags = (spec.flags or f"--{parameter.name.replace('_', '-')}").split()
        if kind is bool:
            common |= {"is_flag": True}
        else:
            common |= {"type": value_type, "show_default": bool(common.get("default"))}
            common["multiple"] = is_list
        yield click.Option([parameter.name, *flags], **common)


def _complete(
    names: str, ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Ask the daemon for names that begin so; without one, none are known. A shell lists files."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - only completion asks

    from .completion import candidates  # noqa: PLC0415

    if names == "file":
        return [CompletionItem(incomplete, type="file")]
    session = ctx.obj if isinstance(ctx.obj, Session) else Session()
    offered = candidates(session, names)
    if names == "mirror" and "/" in incomplete:  # both spellings are names of a mirror
        offered = [(name.replace("__", "/", 1), about) for name, about in offered]
    return [CompletionItem(n, help=about) for n, about in offered if n.startswith(incomplete)]
