"""`mirrord environment …`"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import mirrord

from ..errors import IntegrityError, UsageError
from ..protocol import Environment, Operation
from .operations import finish, started
from .output import count, facts, short, size, table
from .session import Argument, NoWait, Option, Session

_NAME_HELP = "KEY, or KEY@DIGEST, of which the first digits will do."
Name = Annotated[str, Argument(_NAME_HELP, "KEY")]
_NAMES_HELP = "Instances, or keys of imported recipes and of earlier builds."


def build(
    session: Session,
    names: Annotated[list[str], Argument(_NAMES_HELP, "[NAME]...")] = [],  # noqa: B006
    dataset: Annotated[str | None, Option("All instances of a dataset, or NAME's.")] = None,
    prewarm: Annotated[bool, Option("Prepare each instance of the dataset, too.")] = False,
    again: Annotated[bool, Option("Try failed builds again although nothing changed.")] = False,
    frozen: Annotated[bool, Option("Take no package released after the instance's date.")] = False,
    no_wait: NoWait = False,
) -> None:
    """What is built already is not built again. An instance is prepared, too: its recipe's install
    command runs, and what that leaves is a layer of checkouts with the environment.

    A build that failed is a finding (status 8); it is tried again when its recipe, the interpreter
    or the settings change, or with --again.
    """
    if not names and dataset is None:
        raise UsageError("cannot build: nothing is named", hint="name instances, or --dataset")
    operation = session.client.build_environments(
        *names, dataset=dataset, prewarm=prewarm, again=again, frozen=frozen
    )
    ended = operation if no_wait else finish(session, operation)
    session.answer(ended, _built(ended))
    for failure in (ended.result or {}).get("failed") or []:
        session.note(failure["detail"])
    if (ended.result or {}).get("failed"):
        raise SystemExit(IntegrityError.exit_status)


def _built(operation: Operation) -> Iterator[str]:
    if operation.result is None:
        yield from started(operation)
        return
    report = mirrord.BuildReport.from_json(operation.result)
    yield from report.ready
    if report.prepared:
        yield f"prepared {count(len(report.prepared), 'commit')}"


def add(
    session: Session,
    file: Annotated[Path, Argument("TOML with tables [[environment]].")],
) -> None:
    """A recipe that is imported comes before that of rows with the same key."""
    try:
        recipes = session.client.import_recipes(file)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    session.answer(recipes, (recipe.key for recipe in recipes))


def list_all(session: Session) -> None:
    """Ready ones, failed builds, and those being built."""
    found = session.client.list_environments()
    rows = [
        (each.name, each.state, each.python, each.files, size(each.size_bytes),
         each.holders, each.built_at)
        for each in found
    ]  # fmt: skip
    header = ("ENVIRONMENT", "STATE", "PYTHON", "FILES", "SIZE", "HELD", "BUILT")
    session.answer(found, table(header, rows))


def show(session: Session, key: Name) -> None:
    """With --json, shows its recipe too."""
    found = session.client.get_environment(key)
    session.answer(found, _described(found))


def _described(found: Environment) -> Iterator[str]:
    at = f"{found.mirror}@{short(found.commit)}" if found.mirror and found.commit else None
    known: dict[str, object] = {"environment": found.name, "state": found.state}
    known |= {"python": found.python, "interpreter": found.interpreter, "built at": at}
    known |= {"built": found.built_at, "used": found.used_at, "held": found.holders}
    if found.state == "ready":
        shared = f"{size(found.size_bytes)}, {size(found.shared_bytes)} of it shared before"
        known |= {"files": found.files, "size": shared, "manifest": found.manifest}
    dropped = ", ".join(f"{times} {reason}" for reason, times in found.dropped.items())
    leaks = len(found.findings) + sum(len(each.findings) for each in found.prepared)
    known |= {"left out": dropped or None, "findings": leaks or None, "error": found.error}
    yield from facts(known.items())
    if found.prepared:
        yield ""
        rows = [
            (each.mirror, short(each.commit), each.layer, each.error) for each in found.prepared
        ]
        yield from table(("MIRROR", "COMMIT", "LAYER", "ERROR"), rows)
    if found.tail:
        yield ""
        yield from found.tail


def log(
    session: Session,
    key: Name,
    follow: Annotated[bool, Option("Until the build has ended.")] = False,
) -> None:
    """What the build printed, and the preparations of instances after it."""
    for piece in session.client.environment_log(key, follow=follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def remove(session: Session, keys: Annotated[list[str], Argument(_NAME_HELP, "KEY...")]) -> None:
    """By its key alone, all that was built of it goes, and its imported recipe."""
    session.each(keys, session.client.remove_environment)
