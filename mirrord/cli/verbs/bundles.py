"""`mirrord bundle …`, `restore`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from ...errors import UsageError, from_problem
from ...protocol import BundleImported, Restored
from ..output import count, facts_of
from ..session import Argument, MirrorArgument, NoWait, Option, Session
from ..waiting import conclude, exit_as, finish, started, watching
from .checkouts import restore_paths
from .upkeep import audit_lines


def bundle(
    session: Session,
    name: MirrorArgument,
    file: Annotated[Path, Argument("File to write; it appears once it is complete.")],
    since: Annotated[
        str | None,
        Option("Only what is newer than this record: an id, a time, or latest.", "RECORD"),
    ] = None,
) -> None:
    """The file has refs, pins, kept refs, ref history, and the dataset rows of the mirror. It is as
    private as the mirror: rows have patches. git can verify it, clone it and fetch from it. Prints
    the record to name in the next --since.
    """
    if not file.parent.is_dir():
        fact = f"there is no directory {file.parent}"
        raise UsageError(f"cannot write {file}: {fact}", hint="create it first")
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a directory", hint="name a file in it")
    with watching(session, f"bundling {name}") as watch:
        made = session.client.create_bundle(name, file, since=since, progress=watch)
    session.answer(made, facts_of(made, "file mirror size=size_bytes record since"))


def bundle_import(
    session: Session,
    file: Annotated[Path, Argument("A bundle of mirrord or git.")],
    mirror: Annotated[
        str | None, Option("Mirror to import into; default: the bundle's.", "NAME")
    ] = None,
    no_wait: NoWait = False,
) -> None:
    """Creates a missing mirror. In an existing one refs are added or fast-forwarded; refs that
    differ otherwise become kept refs. A damaged or hostile file changes nothing.
    """
    if not file.is_file():
        raise UsageError(f"cannot import {file}: it is not a file", hint="name a bundle file")
    with watching(session, f"sending {file.name}") as watch:
        operation = session.client.import_bundle(file, mirror=mirror, progress=watch)
    conclude(session, operation, no_wait, BundleImported, _bundle_lines)


def _bundle_lines(result: BundleImported) -> Iterator[str]:
    verb = "created" if result.created else "merged into"
    counts = f"{len(result.kept)} kept, {count(result.pins, 'pin')}"
    yield f"{verb} mirror {result.mirror}: {result.summary}, {counts}"
    for name, rows in result.datasets.items():
        yield f"dataset {name}: {count(rows, 'instance')} added"
    for name in result.datasets_refused:
        yield f"dataset {name}: another dataset has this name; you own its pins now"


_RESTORE_HELP = (
    "A checkout, and paths from the top of the commit's tree; with --from-store mirrors, default:"
    " all."
)


def restore(
    session: Session,
    targets: Annotated[list[str] | None, Argument(_RESTORE_HELP, "[ID PATH...|MIRROR...]")] = None,
    commit: Annotated[
        str | None,
        Option("Pinned commit, or a role of the instance's commits, such as gold.", "SHA"),
    ] = None,
    from_store: Annotated[bool, Option("Restore mirrors, pins and rows from [store] url.")] = False,
    no_wait: NoWait = False,
) -> None:
    """Files need a checkout in the grader view.

    With --from-store, existing data stays, and the restored mirrors are audited. A failed mirror
    does not stop the others; run the command again to retry it.
    """
    if from_store:
        if commit:
            hint = "restore files of a checkout without --from-store"
            raise UsageError("cannot use --commit with --from-store", hint=hint)
        _restore_mirrors(session, targets or [], no_wait)
    elif commit and targets and len(targets) > 1:
        restore_paths(session, targets[0], commit, targets[1:])
    else:
        hint = "`mirrord restore ID PATH... --commit SHA`, or `--from-store` for mirrors"
        raise UsageError("cannot restore: a checkout, a path or a commit is missing", hint=hint)


def _restore_mirrors(session: Session, names: list[str], no_wait: bool) -> None:
    operation = session.client.start_restore(*names)
    if no_wait:
        session.answer(operation, started(operation))
        return
    result = Restored.from_json(finish(session, operation).result)
    for each in result.failed:
        session.fail(from_problem(each.error.to_json()))
    session.answer(result, _restore_lines(result))
    exit_as(result)


def _restore_lines(result: Restored) -> Iterator[str]:
    for each in result.mirrors:
        yield from _bundle_lines(each)
    if result.audit:
        yield from audit_lines(result.audit)
        yield f"audit {result.audit.id}"
