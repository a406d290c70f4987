"""`mirrord dataset …`"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from ..errors import IntegrityError, UsageError
from .operations import finish, started, watching
from .output import count, facts, short, table
from .parameters import Argument, NoWait, Option
from .session import Session

if TYPE_CHECKING:
    from ..protocol import Dataset, Operation
    from ..sources.opening import Source

Name = Annotated[str, Argument(help="The dataset's name.")]
_NAME_HELP = "What to call the dataset; default: the source's name."
NameOption = Annotated[str | None, Option(help=_NAME_HELP)]
_FORMAT_HELP = "See `mirrord dataset formats`; default: found by the columns."
FormatOption = Annotated[str | None, Option("--format", help=_FORMAT_HELP)]
_SOURCE_HELP = "A file, a folder of tasks, hf://owner/name, or - for standard input."
_MAPPING_HELP = "TOML that says which column is what, in place of a format."
MappingOption = Annotated[Path | None, Option("--mapping", metavar="FILE", help=_MAPPING_HELP)]
_SHOWN_IDS = 10


def open_sources(words: list[str]) -> Source:
    """The rows of these sources; loads their readers, which other verbs do not need."""
    opening = importlib.import_module("mirrord.sources.opening")
    return cast("Source", opening.open_sources(words))


def add(
    session: Session,
    sources: Annotated[list[str], Argument(metavar="SOURCE...", help=_SOURCE_HELP)],
    name: NameOption = None,
    format_name: FormatOption = None,
    mapping: MappingOption = None,
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
            progress=watch,
        )
    ended = operation if no_wait else finish(session, operation)
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


def list_all(session: Session) -> None:
    found = session.client.list_datasets()
    rows = []
    for d in found:
        counts = (d.instance_count, d.commit_count, len(d.mirrors), d.fault_count, d.unpinned_count)
        rows.append((d.name, d.format, *counts, d.imported_at))
    columns = ["DATASET", "FORMAT", "INSTANCES", "COMMITS", "MIRRORS"]
    session.answer(found, table([*columns, "BAD ROWS", "UNPINNED", "IMPORTED"], rows))


def show(session: Session, name: Name) -> None:
    dataset = session.client.get_dataset(name)
    session.answer(dataset, _described(dataset))


def _described(dataset: Dataset) -> Iterator[str]:
    rules = ", ".join(f"{rule} {times}" for rule, times in dataset.rules.items())
    known: dict[str, object] = {"dataset": dataset.name, "format": dataset.format}
    known |= {"source": dataset.source, "sha256": dataset.sha256}
    known |= {"instances": dataset.instance_count, "commits": dataset.commit_count}
    known |= {"mirrors": ", ".join(dataset.mirrors), "rules": rules or None}
    yield from facts({**known, "imported": dataset.imported_at}.items())
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
