"""`mirrord dataset derive`: compute missing columns of a dataset's rows."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from ...client.primitives_sync import write
from ...errors import MirrordError, NoDaemonError, UsageError
from ...git.objects.repository import describe
from ...host.files import FOR_READING, open_beneath, open_directory, opened
from ...model import MirrorName
from ...protocol import Progress
from ...sources.derive import Column, Derived, Deriver, Row
from ...sources.pullrequests import SplitRule
from ...sources.versions import Version, find_version
from ..output import cell, count, table
from ..session import Argument, Option, Session
from ..waiting import watching
from .datasets import open_sources

_ONLY_HELP = "Column to derive; repeatable; default: all. Only `version` needs a daemon."
_RULE_HELP = "Rule that separates tests from the solution."


def derive(
    session: Session,
    sources: Annotated[list[str], Argument("As for `dataset import`.", "SOURCE...")],
    output: Annotated[
        Path | None, Option("File for the rows; default: standard output.", "FILE")
    ] = None,
    only: Annotated[list[Column] | None, Option(_ONLY_HELP, "COLUMN")] = None,
    rule: Annotated[SplitRule, Option(_RULE_HELP)] = SplitRule.SWEBENCH_V1,
) -> None:
    """Writes JSON lines. Columns that a row has are kept; where the derived value differs, stderr
    lists it, and so does the answer of --json, which needs --output.

    patch and test_patch are derived from `diff`; issue_numbers from `title`, `body` and `commits`
    of a pull request; version from source and tags at the base commit, if the repository is
    mirrored; environment_setup_commit is the last base commit of a version among the rows.
    """
    if session.json and output is None:
        fact = "cannot print both rows and the answer of --json"
        raise UsageError(fact, hint="add --output FILE")
    columns, faults = set(only or Column), dict[str, str]()
    read = open_sources(sources).rows

    def iterate() -> Iterator[Row]:
        for row in read():
            if row.value is not None:
                yield row.value
            else:
                where = f"{row.origin.file}:{row.origin.line}" if row.origin else f"line {row.line}"
                faults[where] = row.fault or "it is not an object"

    versions = _find_versions(session, iterate()) if Column.VERSION in columns else {}
    deriver = Deriver(iterate, columns, rule, versions)
    lines = (json.dumps(row, default=str).encode() + b"\n" for row in deriver.rows())
    try:
        if output is not None:  # with mode 0600, because rows have the answers
            write(output, lines, lambda _: None)
        else:
            sys.stdout.buffer.writelines(lines)
    except BrokenPipeError:
        raise
    except OSError as error:
        fact = f"cannot write {output or 'standard output'}: {error.strerror}"
        raise UsageError(fact, hint="name a writable file") from error
    for where, fault in faults.items():
        session.note(f"{where}: {fault}")
    for line in _remark_lines(deriver.report):
        session.note(line)
    if output is not None:
        session.answer(_answer(deriver.report, len(faults)), _count_lines(deriver.report))


# -- versions -------------------------------------------------------------------------------------


# each asks one repository, mostly waiting for git
_JOBS = 4


def _find_versions(session: Session, rows: Iterator[Row]) -> dict[tuple[str, str], Version | str]:
    """Find the version at each base commit in a checkout of it, or the reason why there is none."""
    client = session.client
    mirrors = {mirror.name.lower() for mirror in client.list_mirrors()}
    listed = ((str(row.get("repo") or ""), str(row.get("base_commit") or "")) for row in rows)
    wanted = list(dict.fromkeys(key for key in listed if all(key)))

    def find(key: tuple[str, str]) -> Version | str:
        repo, commit = key
        try:
            name = MirrorName.parse(repo)
            if name.key not in mirrors:
                return f"{name} is not mirrored"
            with client.checkout(mirror=str(name), commit=commit, auto_renew=False) as checkout:
                return _version_in(checkout.path, repo) or "no rule finds it"
        except NoDaemonError:
            raise
        except MirrordError as error:
            return error.message

    versions: dict[tuple[str, str], Version | str] = {}
    with watching(session, "versions") as watch, ThreadPoolExecutor(_JOBS) as pool:
        for key, version in zip(wanted, pool.map(find, wanted), strict=True):
            versions[key] = version
            watch(Progress(done=len(versions), total=len(wanted), unit="commits", note=key[0]))
    return versions


# a version stands in the first lines of a file; a longer one is cut, not refused
_SOURCE_LIMIT_BYTES = 1024**2


def _version_in(tree: Path, repo: str) -> Version | None:
    with opened(open_directory(tree)) as directory:

        def read(path: str) -> str | None:
            """Read a file of the tree; links that lead out are not followed."""
            try:
                with opened(open_beneath(directory, os.fsencode(path), FOR_READING)) as file:
                    return os.read(file, _SOURCE_LIMIT_BYTES).decode(errors="replace")
            except OSError:
                return None

        return find_version(repo, read, lambda: describe(tree / ".git"))


# -- the answer -----------------------------------------------------------------------------------


def _count_lines(report: Derived) -> Iterator[str]:
    lacking = Counter[str]()
    for (column, _), times in report.lacking.items():
        lacking[column] += times
    disagree = Counter(disagreement.column for disagreement in report.disagreements)
    rows = [(c, report.added[c], report.agreed[c], disagree[c], lacking[c]) for c in Column]
    yield from table(("COLUMN", "ADDED", "AGREES", "DISAGREES", "NOT DERIVED"), rows)


def _remark_lines(report: Derived) -> Iterator[str]:
    for disagreement in report.disagreements:
        recorded, derived = _text(disagreement.recorded), _text(disagreement.derived)
        values = f"recorded {recorded}, {disagreement.rule} gives {derived}"
        yield f"{disagreement.instance}: {disagreement.column}: {values}"
    for instance, paths in report.split_differs.items():
        yield f"{instance}: swebench-v1 and swebench-v2 differ about {_text(paths)}"
    for (column, reason), times in report.lacking.items():
        yield f"{column}: not derived for {count(times, 'row')}: {reason}"


def _text(value: object) -> str:
    return cell(", ".join(map(str, value)) if isinstance(value, list) else value)


def _answer(report: Derived, fault_count: int) -> dict[str, Any]:
    return {
        "rows": report.rows,
        "faults": fault_count,
        "added": report.added,
        "agreed": report.agreed,
        "disagreements": [disagreement._asdict() for disagreement in report.disagreements],
        "split_differs": report.split_differs,
        "not_derived": [
            {"column": column, "reason": reason, "rows": times}
            for (column, reason), times in report.lacking.items()
        ],
    }
