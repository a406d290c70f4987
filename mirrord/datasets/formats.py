"""The table of dataset formats: how each is recognised by its columns, and its normaliser.

The first format whose test holds is taken, so a special one stands before the general one it
resembles. A new format is a row here, with a small normaliser where its columns differ. A format
without one is refused by name, unless its rows have the generic shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..catalog import InstanceRow
from ..errors import InvalidDatasetError
from ..model import CommitId, CommitRole, Direction, shown
from ..protocol import FormatInfo
from .fields import Fields

RawFields = Mapping[str, Any]
Normaliser = Callable[[Fields], InstanceRow]


class DatasetFormat(NamedTuple):
    """`detects` looks at one row; a format without `normalise` is recognised only."""

    name: str
    title: str
    detected_by: str
    detects: Callable[[RawFields], bool]
    normalise: Normaliser | None = None


# -- normalisers ----------------------------------------------------------------------------------


def row_of(
    fields: Fields,
    *,
    further: tuple[tuple[CommitId, CommitRole], ...] = (),
    direction: Direction = Direction.FORWARD,
) -> InstanceRow:
    """The row by the columns that the SWE-bench family shares, with `further` commits.

    A further commit in an unknown column is not found: such a format needs its own normaliser.
    """
    base = fields.commit("base_commit")
    tests = {}
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):  # some formats write them in lower case
        is_lower = name not in fields.row and name.lower() in fields.row
        tests[name] = fields.names(name.lower() if is_lower else name)
    return InstanceRow(
        id=fields.instance_id(),
        dataset="",
        mirror=fields.mirror(),
        base_commit=base,
        direction=direction,
        commits=((base, CommitRole.BASE), *further),
        patch=fields.patch("patch"),
        test_patch=fields.patch("test_patch"),
        fail_to_pass=tests["FAIL_TO_PASS"],
        pass_to_pass=tests["PASS_TO_PASS"],
    )


def _with_environment(fields: Fields) -> InstanceRow:
    """The commit that the environment is built at is a second pin; some rows leave it empty."""
    if not fields.has("environment_setup_commit"):
        fields.count("environment_setup_commit: none")
        return row_of(fields)
    environment = fields.commit("environment_setup_commit")
    return row_of(fields, further=((environment, CommitRole.ENVIRONMENT),))


def _multimodal(fields: Fields) -> InstanceRow:
    """Some rows lack the column of the environment. Test patches hold stubs of binary files."""
    has_column = "environment_setup_commit" in fields.row
    return _with_environment(fields) if has_column else row_of(fields)


# -- the table ------------------------------------------------------------------------------------


def _has(*columns: str) -> Callable[[RawFields], bool]:
    return lambda row: all(column in row for column in columns)


def _is_smith(row: RawFields) -> bool:
    has_name = "image_name" in row or str(row.get("repo", "")).startswith("swesmith/")
    return has_name and "base_commit" not in row


def _is_multilingual(row: RawFields) -> bool:
    has_space = " " in str(row.get("created_at") or "")
    has_environment = "environment_setup_commit" in row
    return _has_shape(row) and not has_environment and ("log_parser" in row or has_space)


_has_shape = _has("instance_id", "repo", "base_commit")

FORMATS = (
    DatasetFormat(
        "nemo-gym",
        "NeMo Gym rows",
        "responses_create_params and no base_commit",
        lambda row: "responses_create_params" in row and "base_commit" not in row,
    ),
    DatasetFormat(
        "multi-swe-bench", "Multi-SWE-bench", "org, repo and base", _has("org", "repo", "base")
    ),
    DatasetFormat("r2e-gym", "R2E-Gym", "parsed_commit_content", _has("parsed_commit_content")),
    DatasetFormat(
        "swe-bench-pro", "SWE-bench Pro", "before_repo_set_cmd", _has("before_repo_set_cmd")
    ),
    DatasetFormat("swe-bench-live", "SWE-bench-Live", "commit_urls", _has("commit_urls")),
    DatasetFormat(
        "swe-smith", "SWE-smith", "image_name or a repo of swesmith/, and no base_commit", _is_smith
    ),
    DatasetFormat(
        "swe-bench-multimodal",
        "SWE-bench Multimodal",
        "image_assets",
        _has("image_assets"),
        _multimodal,
    ),
    DatasetFormat(
        "swe-rebench",
        "SWE-rebench, SWE-bench-extra",
        "install_config, FAIL_TO_FAIL or PASS_TO_FAIL",
        lambda row: any(c in row for c in ("install_config", "FAIL_TO_FAIL", "PASS_TO_FAIL")),
        _with_environment,
    ),
    DatasetFormat(
        "swe-bench",  # lists of tests are strings holding JSON; lists in SWE-agent's copies
        "SWE-bench, Lite, Verified",
        "environment_setup_commit",
        _has("environment_setup_commit"),
        _with_environment,
    ),
    DatasetFormat(
        "swe-bench-multilingual",  # repositories are lower-cased
        "SWE-bench Multilingual",
        "no environment_setup_commit, and log_parser or dates with a space",
        _is_multilingual,
        row_of,
    ),
    DatasetFormat(
        "swe-gym",
        "SWE-Gym",
        "no environment_setup_commit, and hints_text",
        _has("instance_id", "repo", "base_commit", "hints_text"),
        row_of,
    ),
    DatasetFormat(
        "generic", "rows of the same shape", "instance_id, repo and base_commit", _has_shape, row_of
    ),
)

COLUMNS = (
    *("instance_id", "repo", "base_commit", "environment_setup_commit", "patch", "test_patch"),
    *("FAIL_TO_PASS", "PASS_TO_PASS", "fail_to_pass", "pass_to_pass", "created_at"),
)
"""All columns whose values a normaliser or a test reads: Parquet files are read for no others."""


def format_infos() -> list[FormatInfo]:
    """The formats that `dataset formats` lists: those with a normaliser."""
    return [
        FormatInfo(name=f.name, title=f.title, detected_by=f.detected_by)
        for f in FORMATS
        if f.normalise
    ]


def choose_format(
    source: str, asked: str | None, rows: Sequence[RawFields]
) -> tuple[str, Normaliser]:
    """The name and normaliser of the format asked for, else of the one the first rows show.

    Rows of a format without a normaliser are read as generic where they have that shape. Raises
    InvalidDatasetError.
    """
    detected = (each for row in rows for each in FORMATS if each.detects(row))
    by_name = {each.name: each for each in FORMATS}
    found = by_name.get(asked.lower()) if asked else next(detected, None)
    if asked and found is None:
        close = difflib.get_close_matches(asked.lower(), by_name, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        readable = ", ".join(each.name for each in FORMATS if each.normalise)
        raise InvalidDatasetError(
            f"cannot read format {shown(asked)}: no format has that name",
            hint=f"{guess}mirrord reads {readable}",
        )
    if found is None:
        columns = ", ".join(shown(str(column), 40) for column in list(rows[0])[:12])
        raise InvalidDatasetError(
            f"cannot import dataset {shown(source)}: its rows are of no known format; their columns"
            f" are {columns}",
            hint="a row needs instance_id, repo and base_commit; `mirrord dataset formats` lists"
            " the formats, --format chooses one",
        )
    if found.normalise is None and not asked and any(map(_has_shape, rows)):
        found = FORMATS[-1]
    if found.normalise is None:
        raise InvalidDatasetError(
            f"cannot import dataset {shown(source)}: its rows, from the first on, are {found.title}"
            f" ({found.detected_by}), a format that this version recognises and does not read",
            hint="convert the rows to instance_id, repo, base_commit, patch and test_patch, and"
            " import those with --format generic",
            format=found.name,
        )
    return found.name, found.normalise
