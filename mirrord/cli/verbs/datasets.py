"""`mirrord dataset …` and `mirrord instance …`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...errors import AccessError, UsageError
from ...model import UNREAD_LIST, CommitRole, View
from ...protocol import (
    Dataset,
    DatasetDiff,
    DatasetImported,
    DatasetNeeds,
    DatasetSummary,
    Instance,
    InstanceName,
    UnpinnedCommit,
)
from ..output import count, facts, facts_of, listing, short
from ..session import Argument, NoWait, Option, Session
from ..waiting import conclude, exit_as, watching

if TYPE_CHECKING:
    from ...sources.opening import Source

Name = Annotated[str, Argument("Name of the dataset.", "NAME", "dataset")]
NameOption = Annotated[
    str | None, Option("Name of the dataset; default: the source's name.", "NAME")
]
_FORMAT_HELP = "Format, see `mirrord dataset formats`; default: found by the columns."
FormatOption = Annotated[str | None, Option(_FORMAT_HELP, "FORMAT", "--format")]
_SOURCE_HELP = "A file, a folder of tasks, hf://owner/name, or - for standard input."
_MAPPING_HELP = "TOML file that maps columns to fields, instead of a format."
MappingOption = Annotated[Path | None, Option(_MAPPING_HELP, "FILE")]
# a table for a terminal; --json has all of them
_SHOWN_IDS = 10
_SHOWN_MIRRORS = 20


def open_sources(words: list[str]) -> Source:
    """Read the rows of sources; loads the readers, which other verbs do not need."""
    from ...sources import opening  # noqa: PLC0415

    return opening.open_sources(words)


def add(
    session: Session,
    sources: Annotated[list[str], Argument(_SOURCE_HELP, "SOURCE...", "file")],
    name: NameOption = None,
    format_name: FormatOption = None,
    mapping: MappingOption = None,
    dry_run: Annotated[bool, Option("Print what would change, and change nothing.")] = False,
    no_wait: NoWait = False,
) -> None:
    """A source is a file (jsonl, json, parquet, csv, arrow), - for standard input, a folder of
    tasks (SWE-bench v5, Harbor), or hf://owner/name[@revision][?split=test&config=…]. Several
    sources make one dataset and need --name.

    Bad rows are reported and skipped. A second import of a source prints what changed. Status 8
    if a recorded commit cannot be pinned: it cannot be served.
    """
    columns = None if mapping is None else _read_mapping(mapping)
    source = open_sources(sources)
    name = name or source.name
    if name is None and (source.file is None or "-" in sources):
        raise UsageError(f"cannot name a dataset after {source.label}", hint="add --name NAME")
    with watching(session, f"sending {source.label}") as watch:
        operation = session.client.import_dataset(
            source.file or source.pieces(),
            source=source.label,
            name=name,
            format=format_name,
            mapping=columns,
            dry_run=dry_run,
            progress=watch,
        )
    if dry_run:
        compared = conclude(session, operation, no_wait, DatasetDiff, _diff_lines)
        for fault in compared.faults if compared else ():
            session.note(f"{fault.file}:{fault.line}: {fault.instance or 'row'}: {fault.reason}")
        return
    imported = conclude(
        session, operation, no_wait, DatasetImported, partial(_import_lines, session)
    )
    for text in _warnings(imported) if imported else ():
        session.note(text)
    exit_as(imported)


def _read_mapping(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fact = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read the mapping {file}: {fact}") from error


def _import_lines(session: Session, imported: DatasetImported) -> Iterator[str]:
    dataset, change = imported.dataset, imported.change
    instances = f"{count(dataset.instance_count, 'instance')} of format {dataset.format}"
    commits, mirrors = count(dataset.commit_count, "commit"), len(dataset.mirrors)
    yield f"{dataset.name}: {instances}, {commits} in {count(mirrors, 'mirror')}"
    kinds = f"{len(change.added)} added, {len(change.changed)} changed"
    yield f"{kinds}, {len(change.removed)} removed, {change.unchanged_count} unchanged"
    summary = session.client.get_dataset(dataset.name)
    if ready := readiness_of(summary):
        yield f"{ready} ready"
    for group in summary.not_ready[:_SHOWN_MIRRORS]:
        yield f"  {group.mirror}: {group.count:,} not ready: {group.reason}"
    if (more := len(summary.not_ready) - _SHOWN_MIRRORS) > 0:
        yield f"  and {count(more, 'more mirror')}: mirrord dataset show {dataset.name}"


def readiness_of(dataset: DatasetSummary) -> str | None:
    """Return `186 of 500`, or None if nobody has counted."""
    if dataset.ready_count is None:
        return None
    return f"{dataset.ready_count:,} of {dataset.instance_count:,}"


def _warnings(imported: DatasetImported) -> Iterator[str]:
    dataset = imported.dataset
    yield from lacking_lines(imported.needs)
    for rule, times in dataset.rules.items():
        if rule.endswith(UNREAD_LIST):
            yield f"{count(times, 'row')}: {rule}; `mirrord rehearse --run` fails for them"
    for fault in dataset.faults:
        yield f"{fault.file}:{fault.line}: {fault.instance or 'row'}: {fault.reason}"
    for row in imported.ambiguous:
        others = ", ".join(name for name in row.datasets if name != dataset.name)
        fact = "other tests; grade it" if row.differs == "tests" else "another commit; check it out"
        yield f"{row.id}: {others} records {fact} with --dataset"
    if more := imported.ambiguous_count - len(imported.ambiguous):
        yield f"{more} more instances are recorded differently by other datasets"
    by_reason: dict[tuple[str, str], list[UnpinnedCommit]] = {}
    for commit in dataset.unpinned:
        by_reason.setdefault((commit.mirror, commit.reason), []).append(commit)
    for (mirror, reason), commits in by_reason.items():
        commits_text = commits[0].commit if len(commits) == 1 else f"{len(commits)} commits"
        instances = _ids(sorted({identity for commit in commits for identity in commit.instances}))
        roles = {role for commit in commits for role in commit.roles}
        only = "" if "base" in roles else f" ({', '.join(sorted(roles))}; checkouts do not need it)"
        yield f"{mirror}: cannot pin {commits_text} of {instances}{only}: {reason}"


def list_all(session: Session) -> None:
    datasets = session.client.list_datasets()
    columns = "DATASET=name READY BAD_ROWS=fault_count UNPINNED=unpinned_count"
    columns += " IMPORTED=imported_at FORMAT COMMITS=commit_count MIRRORS=mirrors:count"
    session.answer(datasets, listing(datasets, columns, READY=readiness_of))


def show(
    session: Session,
    name: Name,
    every: Annotated[bool, Option("Include the ids of all its instances.", flags="--all")] = False,
) -> None:
    """Shows bad rows, unpinned commits, and what is not ready, with reasons. Datasets with the same
    rows have the same digest, from whatever files.
    """
    dataset = session.client.get_dataset(name)
    ids = session.client.list_instances(name) if every else []
    answer = dataset.to_json() | ({"instances": [row.id for row in ids]} if every else {})
    session.answer(answer, _dataset_lines(dataset, ids))


def _dataset_lines(dataset: Dataset, instances: list[InstanceName]) -> Iterator[str]:
    rules = ", ".join(f"{rule} {times}" for rule, times in dataset.rules.items())
    roles = ", ".join(f"{n:,} {role}" for role, n in dataset.commits_by_role.items())
    commits = f"{dataset.commit_count:,}" + (f": {roles}" if roles else "")
    created = None
    if dataset.first_created_at and dataset.last_created_at:
        ends = (dataset.first_created_at, dataset.last_created_at)
        created = " to ".join(f"{end:%Y-%m-%d}" for end in ends)
    names = "dataset=name format source sha256 digest instances=instance_count ready"
    names += " repositories=mirrors:count commits unpinned=unpinned_count bad_rows=fault_count"
    names += " environments=environment_count created rules imported=imported_at"
    ready = readiness_of(dataset)
    yield from facts_of(
        dataset, names, ready=ready, commits=commits, created=created, rules=rules or None
    )
    if dataset.not_ready:
        yield ""
        yield from listing(dataset.not_ready, "MIRROR NOT_READY=count REASON")
    if instances:
        yield ""
        yield from (instance.id for instance in instances)
    else:
        yield from ("", "mirrors", *(f"  {name}" for name in dataset.mirrors[:_SHOWN_MIRRORS]))
        if more := len(dataset.mirrors) - _SHOWN_MIRRORS:
            yield from [f"  and {more} more"] if more > 0 else []
    if dataset.faults:
        yield ""
        places = "BAD_ROW INSTANCE REASON"
        yield from listing(dataset.faults, places, BAD_ROW=lambda bad: f"{bad.file}:{bad.line}")
    if dataset.unpinned:
        yield ""
        columns = "MIRROR UNPINNED=commit:short ROLES INSTANCES REASON"
        yield from listing(
            dataset.unpinned, columns, INSTANCES=lambda commit: _ids(commit.instances)
        )


def _ids(instances: list[str]) -> str:
    more = f" and {len(instances) - _SHOWN_IDS} more" if len(instances) > _SHOWN_IDS else ""
    return ", ".join(instances[:_SHOWN_IDS]) + more


def diff(
    session: Session,
    a: Annotated[str, Argument("A dataset.", names="dataset")],
    b: Annotated[str, Argument("Another dataset.", names="dataset")],
) -> None:
    """Rows of B that A lacks are added. `dataset import --dry-run` compares with a file."""
    compared = session.client.diff_datasets(a, b)
    session.answer(compared, _diff_lines(compared))


def _diff_lines(compared: DatasetDiff) -> Iterator[str]:
    change = compared.change
    yield from (f"+ {identity}" for identity in change.added)
    yield from (f"- {identity}" for identity in change.removed)
    for row in change.changed:
        bases = f" ({short(row.base_before)} to {short(row.base_after)})"
        moved = bases if "base_commit" in row.fields else ""
        yield f"~ {row.id}: {', '.join(row.fields)}{moved}"
    moved_count = sum("base_commit" in row.fields for row in change.changed)
    counts = [
        f"{len(change.added)} added",
        f"{len(change.removed)} removed",
        f"{len(change.changed)} changed, {moved_count} of them moved to another commit",
        f"{change.unchanged_count} unchanged",
    ]
    yield ", ".join(counts)
    if compared.new_mirrors:
        mirrors = compared.new_mirrors
        yield f"would add {count(len(mirrors), 'mirror')}: {', '.join(mirrors)}"


def export(session: Session, name: Name) -> None:
    """Rows include all answers and are ordered by id: the same rows give the same bytes. An import
    of them gives an equal dataset.
    """
    for piece in session.client.export_dataset(name):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


_SHOW_VIEW_HELP = "For an agent or for a grader; default: grader if you may, agent with --json."


def show_instance(
    session: Session,
    instance: Annotated[str, Argument("Id of the instance.", "INSTANCE", "instance")],
    dataset: Annotated[
        str | None,
        Option("Dataset of the instance, where several record its id.", "NAME", names="dataset"),
    ] = None,
    view: Annotated[View | None, Option(_SHOW_VIEW_HELP)] = None,
) -> None:
    """The grader view has commits, patches and tests; --json prints patches and lists of tests."""
    row = _find_shown(session, instance, dataset, view)
    session.answer(row, facts(_instance_facts(row)))


def _find_shown(
    session: Session, instance: str, dataset: str | None, view: View | None
) -> Instance:
    get = session.client.get_instance
    if view is None and not session.json:  # a person reads it, not a program that feeds an agent
        try:
            return get(instance, view=View.GRADER, dataset=dataset)
        # no administrator: then as an agent sees it
        except AccessError:
            pass
    return get(instance, view=view or View.AGENT, dataset=dataset)


def _instance_facts(row: Instance) -> Iterator[tuple[str, object]]:
    yield from (("instance", row.id), ("dataset", row.dataset), ("repository", row.repo))
    for commit in row.commits or []:
        is_written = commit.role is CommitRole.BASE and row.revision
        written = f" ({row.revision})" if is_written else ""
        yield str(commit.role), f"{commit.commit}{written}"
    for name in ("direction", "environment", "python_version", "version", "created_at", "history"):
        yield name.replace("_", " "), getattr(row, name, None)
    for name in ("patch", "test_patch"):
        if (text := getattr(row, name)) is not None:
            # chr(10), because an f-string takes no backslash before Python 3.12
            yield name.replace("_", " "), f"{text.count(chr(10)):,} lines"
    for name in ("fail_to_pass", "pass_to_pass"):
        if (tests := getattr(row, name)) is not None:
            yield name.replace("_", " "), count(len(tests), "test")


def remove(session: Session, name: Name) -> None:
    """Mirrors stay, and so do pins of other datasets and of users."""
    with watching(session, f"removing dataset {name}"):
        session.client.remove_dataset(name)
    session.answer(None, [])
    session.note(f"removed dataset {name}")


def formats(session: Session) -> None:
    listed = session.client.list_formats()
    session.answer(listed, listing(listed, "FORMAT=name TITLE DETECTED_BY"))


def lacking_lines(needs: DatasetNeeds) -> Iterator[str]:
    """Say which submodules and LFS objects of base commits are not had."""
    for lacking in needs.missing:
        of = count(lacking.commits, "base commit")
        yield f"submodule {lacking.path} of {of} stays empty: {lacking.reason}"
    if more := needs.missing_count - sum(lacking.commits for lacking in needs.missing):
        yield f"{count(more, 'submodule')} more stay empty"
    if needs.lfs_missing:
        of = count(needs.lfs_commits, "base commit")
        pointers = count(needs.lfs_missing, "Git LFS pointer")
        why = "; ".join(needs.lfs_reasons[:_SHOWN_MIRRORS])
        yield f"{pointers} in {of}: their files are not had: {why}"
