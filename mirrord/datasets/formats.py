"""The table of dataset formats: how each is told from its columns, and who normalises it.

The first format whose test holds is taken, so a special one stands before the general one it resembles. A format that is
recognised and has no normaliser is refused by name, unless its rows have the generic shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..catalog import InstanceRow
from ..errors import InvalidDatasetError
from ..model import CommitId, CommitRole, Direction, shown
from ..protocol import FormatInfo
from .fields import Fields

Commits = tuple[tuple[CommitId, CommitRole], ...]


def _generic(fields: Fields) -> InstanceRow:
    return row_of(fields, further=())


def _with_environment(fields: Fields) -> InstanceRow:
    return row_of(fields, further=environment(fields))


def _multimodal(fields: Fields) -> InstanceRow:
    """Only some rows have the column."""
    return row_of(
        fields, further=environment(fields) if "environment_setup_commit" in fields.row else ()
    )


def row_of(
    fields: Fields, *, further: Commits, direction: Direction = Direction.FORWARD
) -> InstanceRow:
    """The row by its common columns, with `further` commits beside the base commit."""
    base = fields.commit("base_commit")
    return InstanceRow(
        id=fields.instance_id(),
        dataset="",
        mirror=fields.mirror(),
        base_commit=base,
        direction=direction,
        commits=((base, CommitRole.BASE), *further),
        patch=fields.patch("patch"),
        test_patch=fields.patch("test_patch"),
        fail_to_pass=tests(fields, "FAIL_TO_PASS"),
        pass_to_pass=tests(fields, "PASS_TO_PASS"),
    )


def tests(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of tests, whose column some formats write in lower case."""
    if name in fields.row or name.lower() not in fields.row:
        return fields.names(name)
    return fields.names(name.lower())


def environment(fields: Fields) -> Commits:
    """The commit that the environment is built at, where the row has one."""
    if not fields.has("environment_setup_commit"):
        fields.fired("environment_setup_commit: none")
        return ()
    return ((fields.commit("environment_setup_commit"), CommitRole.ENVIRONMENT),)


Row = Mapping[str, Any]
Normaliser = Callable[[Fields], InstanceRow]


@dataclass(frozen=True, slots=True)
class Format:
    """`detects` looks at one row of a file; `normalise` is None for a format that is recognised only."""

    name: str
    title: str
    detected_by: str
    detects: Callable[[Row], bool]
    normalise: Normaliser | None


def _has(*columns: str) -> Callable[[Row], bool]:
    return lambda row: all(column in row for column in columns)


def _has_any(*columns: str) -> Callable[[Row], bool]:
    return lambda row: any(column in row for column in columns)


def _is_smith(row: Row) -> bool:
    return "base_commit" not in row and (
        "image_name" in row or str(row.get("repo", "")).startswith("swesmith/")
    )


def _is_wrapped(row: Row) -> bool:
    return "responses_create_params" in row and "base_commit" not in row


def _is_multilingual(row: Row) -> bool:
    dated_with_space = " " in str(row.get("created_at") or "")
    return (
        _has_shape(row)
        and "environment_setup_commit" not in row
        and ("log_parser" in row or dated_with_space)
    )


_has_shape = _has("instance_id", "repo", "base_commit")

FORMATS: tuple[Format, ...] = (
    Format(
        "nemo-gym", "NeMo Gym rows", "responses_create_params and no base_commit", _is_wrapped, None
    ),
    Format(
        "multi-swe-bench",
        "Multi-SWE-bench",
        "org, repo and base",
        _has("org", "repo", "base"),
        None,
    ),
    Format("r2e-gym", "R2E-Gym", "parsed_commit_content", _has("parsed_commit_content"), None),
    Format(
        "swe-bench-pro", "SWE-bench Pro", "before_repo_set_cmd", _has("before_repo_set_cmd"), None
    ),
    Format("swe-bench-live", "SWE-bench-Live", "commit_urls", _has("commit_urls"), None),
    Format(
        "swe-smith",
        "SWE-smith",
        "image_name or a repo of swesmith/, and no base_commit",
        _is_smith,
        None,
    ),
    Format(
        "swe-bench-multimodal",
        "SWE-bench Multimodal",
        "image_assets",
        _has("image_assets"),
        _multimodal,
    ),
    Format(
        "swe-rebench",
        "SWE-rebench, SWE-bench-extra",
        "install_config, FAIL_TO_FAIL or PASS_TO_FAIL",
        _has_any("install_config", "FAIL_TO_FAIL", "PASS_TO_FAIL"),
        _with_environment,
    ),
    Format(
        "swe-bench",
        "SWE-bench, Lite, Verified",
        "environment_setup_commit",
        _has("environment_setup_commit"),
        _with_environment,
    ),
    Format(
        "swe-bench-multilingual",
        "SWE-bench Multilingual",
        "no environment_setup_commit, and log_parser or dates with a space",
        _is_multilingual,
        _generic,
    ),
    Format(
        "swe-gym",
        "SWE-Gym",
        "no environment_setup_commit, and hints_text",
        _has("instance_id", "repo", "base_commit", "hints_text"),
        _generic,
    ),
    Format(
        "generic",
        "rows of the same shape",
        "instance_id, repo and base_commit",
        _has_shape,
        _generic,
    ),
)

COLUMNS = (
    "instance_id",
    "repo",
    "base_commit",
    "environment_setup_commit",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "fail_to_pass",
    "pass_to_pass",
    "created_at",
)
"""All columns that a normaliser or a test reads the value of: a columnar file gives up no others."""


def format_infos() -> list[FormatInfo]:
    """What `dataset formats` shows: the formats that are read."""
    return [
        FormatInfo(name=f.name, title=f.title, detected_by=f.detected_by)
        for f in FORMATS
        if f.normalise
    ]


def choose_format(source: str, asked: str | None, rows: Sequence[Row]) -> tuple[Format, Normaliser]:
    """The format asked for, else the one that the first rows of a file show. Raises InvalidDatasetError.

    Rows of a format that is only recognised are read as generic where they have that shape.
    """
    chosen = _named(asked) if asked else _detected(source, rows)
    if chosen.normalise is not None:
        return chosen, chosen.normalise
    if not asked and any(_has_shape(row) for row in rows):
        return FORMATS[-1], _generic
    raise InvalidDatasetError(
        f"cannot import dataset {shown(source)}: its rows, from the first on, are {chosen.title} ({chosen.detected_by}),"
        " a format that this version recognises and does not read",
        hint="convert the rows to instance_id, repo, base_commit, patch and test_patch, and import those with --format generic",
        format=chosen.name,
    )


def _named(asked: str) -> Format:
    by_name = {format_.name: format_ for format_ in FORMATS}
    if found := by_name.get(asked.lower()):
        return found
    close = difflib.get_close_matches(asked.lower(), by_name, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    readable = ", ".join(format_.name for format_ in FORMATS if format_.normalise)
    raise InvalidDatasetError(
        f"cannot read format {shown(asked)}: there is no such format",
        hint=f"{guess}there are: {readable}",
    )


def _detected(source: str, rows: Sequence[Row]) -> Format:
    for row in rows:
        for format_ in FORMATS:
            if format_.detects(row):
                return format_
    columns = (
        ", ".join(shown(str(column), 40) for column in list(rows[0])[:12]) if rows else "no rows"
    )
    raise InvalidDatasetError(
        f"cannot import dataset {shown(source)}: its rows are of no known format; their columns are {columns}",
        hint="a row needs instance_id, repo and base_commit; `mirrord dataset formats` lists the formats, --format chooses one",
    )
