"""What a package has that is made from the program: units, manual pages, completions.

Run by the Python of the staged environment, so that it describes what is in there.
"""

import gzip
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from mirrord import __version__
from mirrord.cli.commands import build
from mirrord.cli.table import EXIT_STATUSES, VERBS
from mirrord.doctor import user_service
from mirrord.doctor.installer import SHARE, render_unit
from mirrord.doctor.units import NAMES

COMPLETIONS = {
    "bash": "share/bash-completion/completions/mirrord",
    "zsh": "share/zsh/vendor-completions/_mirrord",
    "fish": "share/fish/vendor_completions.d/mirrord.fish",
}
ENDS = {verb.name: (0, 1, 2, *verb.ends) for verb in VERBS}
EXAMPLES = {verb.name: verb.example for verb in VERBS}
FILES = {
    "/etc/mirrord/config.toml": "The configuration; it has every key with its default.",
    "/var/lib/mirrord": "Mirrors, catalog, templates and checkouts.",
    "/run/mirrord/mirrord.sock": "The daemon's socket.",
}


def main() -> None:
    usr, environment, date = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    for name in NAMES:
        text = (SHARE / "systemd" / name).read_text()
        write(usr / "lib/systemd/system" / name, render_unit(text, environment))
    for kind in ("sysusers", "tmpfiles"):
        text = (SHARE / f"systemd/mirrord.{kind}").read_text()
        write(usr / f"lib/{kind}.d/mirrord.conf", text)
    write(usr / "lib/systemd/user/mirrord.service", user_service.render_unit(environment))
    root = build()
    for shell, path in COMPLETIONS.items():
        known = get_completion_class(shell)
        assert known
        completion = known(root, {}, "mirrord", "_MIRRORD_COMPLETE")
        write(usr / path, completion.source_template % completion.source_vars())
    for name, text in manual(root, click.Context(root, info_name="mirrord"), date):
        with open(made(usr / f"share/man/man1/{name}.1.gz"), "wb") as file:
            file.write(gzip.compress(text.encode(), mtime=0))


def write(path: Path, text: str) -> None:
    made(path).write_text(text)


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def manual(command: click.Command, context: click.Context, date: str) -> Iterator[tuple[str, str]]:
    """A page for a command, and those of its subcommands: `man mirrord-mirror-add`."""
    below = command.commands if isinstance(command, click.Group) else {}
    name = context.command_path.replace(" ", "-")
    lines = page(command, context, date, list(below.values()))
    yield name, "".join(f"{line}\n" for line in lines)
    for each, child in below.items():
        inside = child.make_context(each, [], parent=context, resilient_parsing=True)
        yield from manual(child, inside, date)


def page(
    command: click.Command, context: click.Context, date: str, below: list[click.Command]
) -> Iterator[str]:
    words = context.command_path
    name = words.replace(" ", "-")
    summary, _, details = inspect.cleandoc(command.help or "").partition("\n\n")
    yield f'.TH "{quote(name.upper())}" 1 "{date}" "mirrord {__version__}" "mirrord"'
    yield from (".SH NAME", f"{quote(name)} \\- {quote(summary.rstrip('.'))}")
    yield from (".SH SYNOPSIS", f".B {quote(words)}")
    yield quote(" ".join(command.collect_usage_pieces(context)))
    yield from (".SH DESCRIPTION", *paragraphs(f"{summary}\n\n{details}"))
    if example := EXAMPLES.get(words.partition(" ")[2]):
        yield from (".SH EXAMPLE", f".B mirrord {quote(example)}")
    if below:
        prefix = f"{words} "
        yield ".SH COMMANDS"
        named = [(f"{prefix}{each.name}", str(each.help).partition("\n")[0]) for each in below]
        yield from terms(named)
    for title, kind in (("ARGUMENTS", click.Argument), ("OPTIONS", click.Option)):
        params = [each for each in command.get_params(context) if isinstance(each, kind)]
        records = filter(None, (each.get_help_record(context) for each in params))
        if shown := list(terms(records)):
            yield from (f".SH {title}", *shown)
    statuses = ENDS.get(words.partition(" ")[2], () if below and " " in words else EXIT_STATUSES)
    if statuses:
        yield ".SH EXIT STATUS"
        yield from terms((str(each), EXIT_STATUSES[each]) for each in statuses)
    if " " not in words:
        yield from (".SH FILES", *terms(FILES.items()))
    else:
        yield from (".SH SEE ALSO", f".BR {quote(words.rpartition(' ')[0].replace(' ', '-'))} (1)")


def terms(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in pairs:
        yield from (".TP", f".B {quote(term)}", quote(" ".join(text.split())))


def paragraphs(text: str) -> Iterator[str]:
    for block in filter(None, (each.strip() for each in text.split("\n\n"))):
        is_literal = block.startswith("\b\n")
        yield from (".PP", *((".nf",) if is_literal else ()))
        yield from (quote(line) for line in block.removeprefix("\b\n").splitlines())
        if is_literal:
            yield ".fi"


def quote(text: str) -> str:
    """Text that roff shows as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    main()
