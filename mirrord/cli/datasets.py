"""`mirrord dataset …`"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import mirrord

from ..errors import IntegrityError, ResourceError, UsageError
from ..model import View
from ..protocol import Dataset, DatasetDiff, Instance, InstanceName, Operation
from .operations import finish, started, watching
from .output import count, facts, short, table
from .session import Argument, NoWait, Option, Session, ViewOption

if TYPE_CHECKING:
    from ..sources.opening import Source

Name = Annotated[str, Argument("The dataset's name.")]
NameOption = Annotated[str | None, Option("What to call the dataset; default: the source's name.")]
_FORMAT_HELP = "See `mirrord dataset formats`; default: found by the columns."
FormatOption = Annotated[str | None, Option(_FORMAT_HELP, flags="--format")]
_SOURCE_HELP = "A file, a folder of tasks, hf://owner/name, or - for standard input."
_MAPPING_HELP = "TOML that says which column is what, in place of a format."
MappingOption = Annotated[Path | None, Option(_MAPPING_HELP, "FILE")]
_SHOWN_IDS = 10
_SHOWN_MIRRORS = 20


def open_sources(words: list[str]) -> Source:
    """The rows of these sources; loads their readers, which other verbs do not need."""
    opening = importlib.import_module("mirrord.sources.opening")
    return cast("Source", opening.open_sources(words))


def add(
    session: Session,
    sources: Annotated[list[str], Argument(_SOURCE_HELP, "SOURCE...")],
    name: NameOption = None,
    format_name: FormatOption = None,
    mapping: MappingOption = None,
    dry_run: Annotated[bool, Option("Only say what would change.")] = False,
    no_wait: NoWait = False,
) -> None:
    """A source is a file (jsonl, json, parquet, csv, arrow), - for standard input, a folder of
    tasks (SWE-bench v5, Harbor), or hf://owner/name[@revision][?split=test&config=…]. Several are
    one dataset and need --name.

    Invalid rows are reported and skipped. Importing a changed source again prints what changed.
    Status 8 when a recorded commit cannot be pinned, and so not served.
    """
    columns = None if mapping is None else _read_mapping(mapping)
    source = open_sources(sources)
    name = name or source.name
    if name is None and (source.file is None or "-" in sources):
        raise UsageError(f"cannot name a dataset after {source.label}", hint="add --name")
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
    ended = operation if no_wait else finish(session, operation)
    if dry_run and ended.result is not None:
        found = mirrord.DatasetDiff.from_json(ended.result)
        session.answer(ended, _differences(found))
        for fault in found.faults:
            session.note(f"{fault.file}:{fault.line}: {fault.instance or 'row'}: {fault.reason}")
        return
    session.answer(ended, _imported(ended))
    result = ended.result or {}
    for text in _complaints(result):
        session.note(text)
    if (result.get("dataset") or {}).get("unpinned"):
        raise SystemExit(IntegrityError.exit_status)


def _read_mapping(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fact = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read the mapping {file}: {fact}") from error


def _imported(operation: Operation) -> Iterator[str]:
    if operation.result is None:
        yield from started(operation)
        return
    dataset, change = operation.result["dataset"], operation.result.get("change") or {}
    instances = f"{count(dataset['instance_count'], 'instance')} of format {dataset['format']}"
    commits, mirrors = count(dataset["commit_count"], "commit"), len(dataset["mirrors"])
    yield f"{dataset['name']}: {instances}, {commits} in {count(mirrors, 'mirror')}"
    kinds = [f"{len(change.get(kind) or [])} {kind}" for kind in ("added", "changed", "removed")]
    yield ", ".join([*kinds, f"{change.get('unchanged_count', 0)} unchanged"])


def _complaints(result: dict[str, Any]) -> Iterator[str]:
    dataset = result.get("dataset") or {}
    for fault in dataset.get("faults") or []:
        where = f"{fault['file']}:{fault['line']}"
        yield f"{where}: {fault.get('instance') or 'row'}: {fault['reason']}"
    for instance in result.get("ambiguous") or []:
        others = ", ".join(name for name in instance["datasets"] if name != dataset["name"])
        other = f"{others} records another repository or base commit"
        yield f"{instance['id']}: {other}; check it out with --dataset"
    if unseen := result.get("ambiguous_count", 0) - len(result.get("ambiguous") or []):
        yield f"{unseen} more instances are recorded differently by other datasets"
    by_reason: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for commit in dataset.get("unpinned") or []:
        by_reason.setdefault((commit["mirror"], commit["reason"]), []).append(commit)
    for (mirror, reason), commits in by_reason.items():
        which = commits[0]["commit"] if len(commits) == 1 else f"{len(commits)} commits"
        instances = _ids(sorted({each for commit in commits for each in commit["instances"]}))
        roles = {role for commit in commits for role in commit["roles"]}
        only = "" if "base" in roles else f" ({', '.join(sorted(roles))}; checkouts work without)"
        yield f"{mirror}: cannot pin {which} of {instances}{only}: {reason}"


def prepare(
    session: Session,
    name: Name,
    instances: Annotated[
        list[str], Argument("These instances; default: all.", "[INSTANCE]...")
    ] = [],  # noqa: B006
    no_wait: NoWait = False,
) -> None:
    """What is warm already costs nothing; nothing in use is evicted, so there may be no room for
    all (status 7). Status 8 when a base commit cannot be served. Ctrl-C ends the waiting alone.
    """
    operation = session.client.prepare_dataset(name, *instances)
    ended = operation if no_wait else finish(session, operation)
    if ended.result is None:
        session.answer(ended, started(ended))
        return
    found = mirrord.Prewarmed.from_json(ended.result)
    counts = f"{count(found.prepared, 'commit')} prepared, {found.failed} failed, {found.left} left"
    session.answer(ended, [counts])
    if found.failed:
        raise SystemExit(IntegrityError.exit_status)
    if found.left:
        raise SystemExit(ResourceError.exit_status)


def list_all(session: Session) -> None:
    found = session.client.list_datasets()
    rows = []
    for d in found:
        counts = (d.instance_count, d.commit_count, len(d.mirrors), d.fault_count, d.unpinned_count)
        rows.append((d.name, d.format, *counts, d.imported_at))
    columns = ["DATASET", "FORMAT", "INSTANCES", "COMMITS", "MIRRORS"]
    session.answer(found, table([*columns, "BAD ROWS", "UNPINNED", "IMPORTED"], rows))


def show(
    session: Session,
    name: Name,
    instances: Annotated[bool, Option("With the ids of its instances.")] = False,
) -> None:
    """The digest is the same for datasets with the same rows, whatever files they came from."""
    dataset = session.client.get_dataset(name)
    ids = session.client.list_instances(name) if instances else []
    answer = dataset.to_json() | ({"instances": [each.id for each in ids]} if instances else {})
    session.answer(answer, _described(dataset, ids))


def _described(dataset: Dataset, instances: list[InstanceName]) -> Iterator[str]:
    rules = ", ".join(f"{rule} {times}" for rule, times in dataset.rules.items())
    known: dict[str, object] = {"dataset": dataset.name, "format": dataset.format}
    known |= {"source": dataset.source, "sha256": dataset.sha256, "digest": dataset.digest}
    known |= {"instances": dataset.instance_count, "repositories": len(dataset.mirrors)}
    roles = ", ".join(f"{n:,} {role}" for role, n in dataset.commits_by_role.items())
    known |= {"commits": f"{dataset.commit_count:,}" + (f": {roles}" if roles else "")}
    known |= {"unpinned": dataset.unpinned_count, "bad rows": dataset.fault_count}
    known |= {"environments": dataset.environment_count}
    if dataset.first_created_at and dataset.last_created_at:
        ends = (dataset.first_created_at, dataset.last_created_at)
        known["created"] = " to ".join(f"{end:%Y-%m-%d}" for end in ends)
    yield from facts({**known, "rules": rules or None, "imported": dataset.imported_at}.items())
    if instances:
        yield ""
        yield from (each.id for each in instances)
    else:
        yield from ("", "mirrors", *(f"  {name}" for name in dataset.mirrors[:_SHOWN_MIRRORS]))
        if more := len(dataset.mirrors) - _SHOWN_MIRRORS:
            yield from [f"  and {more} more"] if more > 0 else []
    if dataset.faults:
        yield ""
        bad = [(f"{each.file}:{each.line}", each.instance, each.reason) for each in dataset.faults]
        yield from table(("BAD ROW", "INSTANCE", "REASON"), bad)
    if dataset.unpinned:
        yield ""
        lacking = dataset.unpinned
        rows = [
            (u.mirror, short(u.commit), ", ".join(u.roles), _ids(u.instances), u.reason)
            for u in lacking
        ]
        yield from table(("MIRROR", "UNPINNED", "ROLES", "INSTANCES", "REASON"), rows)


def _ids(instances: list[str]) -> str:
    more = f" and {len(instances) - _SHOWN_IDS} more" if len(instances) > _SHOWN_IDS else ""
    return ", ".join(instances[:_SHOWN_IDS]) + more


def diff(
    session: Session,
    a: Annotated[str, Argument("A dataset.")],
    b: Annotated[str, Argument("Another one.")],
) -> None:
    """Rows that B has and A has not are added. `dataset import --dry-run` does it with a file."""
    found = session.client.diff_datasets(a, b)
    session.answer(found, _differences(found))


def _differences(found: DatasetDiff) -> Iterator[str]:
    change = found.change
    yield from (f"+ {identity}" for identity in change.added)
    yield from (f"- {identity}" for identity in change.removed)
    for each in change.changed:
        bases = f" ({short(each.base_before)} to {short(each.base_after)})"
        moved = bases if "base_commit" in each.fields else ""
        yield f"~ {each.id}: {', '.join(each.fields)}{moved}"
    moved_count = sum("base_commit" in each.fields for each in change.changed)
    counts = [
        f"{len(change.added)} added",
        f"{len(change.removed)} removed",
        f"{len(change.changed)} changed, {moved_count} of them moved to another commit",
        f"{change.unchanged_count} unchanged",
    ]
    yield ", ".join(counts)
    if found.new_mirrors:
        yield f"would add {count(len(found.new_mirrors), 'mirror')}: {', '.join(found.new_mirrors)}"


def export(session: Session, name: Name) -> None:
    """Prints JSON lines with all answers, in the order of ids: the same bytes for the same rows.

    Importing them again gives an equal dataset.
    """
    for piece in session.client.export_dataset(name):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def list_instances(
    session: Session,
    dataset: Annotated[str | None, Option("Of this dataset only.", "NAME")] = None,
) -> None:
    """For administrators: an id can tell the answer."""
    found = session.client.list_instances(dataset)
    session.answer(found, (each.id for each in found))


def show_instance(
    session: Session,
    instance: Annotated[str, Argument("An instance id.", "INSTANCE")],
    dataset: Annotated[str | None, Option("Of this dataset.", "NAME")] = None,
    view: ViewOption = View.AGENT,
) -> None:
    """The grader view has the commits, patches and tests; patches and lists are in --json."""
    found = session.client.get_instance(instance, view=view, dataset=dataset)
    session.answer(found, facts(_instance_facts(found)))


def _instance_facts(found: Instance) -> Iterator[tuple[str, object]]:
    yield from (("instance", found.id), ("dataset", found.dataset), ("repository", found.repo))
    for each in found.commits or []:
        yield str(each.role), each.commit
    for name in ("direction", "environment", "python_version", "version", "created_at", "history"):
        yield name.replace("_", " "), getattr(found, name, None)
    for name in ("patch", "test_patch"):
        if (text := getattr(found, name)) is not None:
            yield name.replace("_", " "), f"{text.count(chr(10)):,} lines"
    for name in ("fail_to_pass", "pass_to_pass"):
        if (tests := getattr(found, name)) is not None:
            yield name.replace("_", " "), count(len(tests), "test")


def remove(session: Session, name: Name) -> None:
    """Mirrors stay, and so do the pins that another dataset or a person owns."""
    with watching(session, f"removing dataset {name}"):
        session.client.remove_dataset(name)
    session.answer(None, [])
    session.note(f"removed dataset {name}")


def formats(session: Session) -> None:
    known = session.client.list_formats()
    rows = [(each.name, each.title, each.detected_by) for each in known]
    session.answer(known, table(("FORMAT", "TITLE", "DETECTED BY"), rows))
