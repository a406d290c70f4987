"""Dataset rows: the formats, how each is recognised by its columns, and how a row is normalised.

The first format whose test holds is taken, so a special one stands before the general one it
resembles. A new format is a row in the table. One that is not read is refused by name, unless its
rows have the generic shape. Values come from strangers: an invalid field raises RowError with a
reason, and a rule that had to interpret a value is counted, so that an import says how it
understood the file. No I/O.
"""

import ast
import difflib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from ..catalog import InstanceRow
from ..errors import InvalidCommitError, InvalidDatasetError, InvalidNameError
from ..model import CommitId, CommitRole, Direction, MirrorName, parse_commit, shown
from ..protocol import FormatInfo

RawFields = Mapping[str, Any]
_URL = re.compile(r"(?:https?|ssh|git)://(?:[^@/]*@)?[^/]+/|git@[^:/]+:")
_ABBREVIATED = re.compile(r"[0-9a-fA-F]{4,39}")
_KINDS = {"bool": "true or false", "int": "a number", "float": "a number"}
_KINDS |= {"list": "a list", "dict": "an object", "bytes": "binary"}


class RowError(Exception):
    """Why a row is invalid, as half a sentence."""


class Fields:
    """The values of one row. `rules` says how those were read that had to be interpreted."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row
        self.rules: list[str] = []

    def note(self, rule: str) -> None:
        self.rules.append(rule)

    def has(self, name: str) -> bool:
        return self.row.get(name) not in (None, "")

    def instance_id(self, name: str = "instance_id") -> str:
        text = self._required(name)
        if not text.isprintable() or text != text.strip():
            raise RowError(f"{name} {shown(text)} has control characters or outer spaces")
        if len(text) > 500:  # a request can ask for no longer one
            raise RowError(f"{name} {shown(text)} is {len(text)} characters long; 500 are allowed")
        return text

    def mirror(self, name: str = "repo") -> MirrorName:
        """A repository: `owner/name`, or a URL that ends so."""
        text = path = self._required(name)
        if _URL.search(text):
            self.note(f"{name}: URL")
            path = _URL.sub("", text, count=1).strip("/")
        try:
            return MirrorName.parse(path)
        except InvalidNameError as error:
            raise RowError(f"{name} {shown(text)} is not owner/name") from error

    def commit(self, name: str) -> CommitId:
        text = self._required(name)
        try:
            commit = parse_commit(text)
        except InvalidCommitError as error:
            kind = "not a full commit id"
            if _ABBREVIATED.fullmatch(text):
                kind = "abbreviated; it can come to mean another commit"
            raise RowError(f"{name} {shown(text)} is {kind}") from error
        if commit != text:
            self.note(f"{name}: letter case or spaces")
        return commit

    def patch(self, name: str) -> str | None:
        """A patch, byte for byte; None where the field is empty."""
        return self._required(name) if self.has(name) else None

    def text(self, name: str) -> str | None:
        """A short text or a number; None where the field is empty or anything else."""
        value = self.row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip() or not _is_encodable(value):
            return None
        return value.strip()[:500]

    def time(self, name: str) -> datetime | None:
        """A date in any spelling of ISO 8601, UTC where it names no zone; None for another."""
        text = self.text(name)
        if text is None:
            return None
        try:
            time = datetime.fromisoformat(text)
            zone = time.tzinfo or timezone.utc
            return time.replace(tzinfo=zone).astimezone(timezone.utc)
        except (ValueError, OverflowError):
            self.note(f"{name}: not readable as a date, left empty")
            return None

    def names(self, name: str) -> tuple[str, ...]:
        """Test names: a list, a string holding JSON or a Python literal, or an object's keys."""
        if not self.has(name):
            return ()
        value = self.row[name]
        if isinstance(value, str):
            value = self._parsed(name, value)
        if isinstance(value, Mapping):
            self.note(f"{name}: keys of an object")
            value = list(value)
        if isinstance(value, (list, tuple, set)) and all(
            isinstance(item, str) and _is_encodable(item) for item in value
        ):
            return tuple(sorted(value) if isinstance(value, set) else value)
        self.note(f"{name}: not readable as a list of names, left empty")
        return ()

    def _parsed(self, name: str, text: str) -> Any:
        try:
            value = json.loads(text)
            self.note(f"{name}: string holding JSON")
            return value
        except (ValueError, RecursionError):
            pass
        if len(text) > 4 * 1024**2:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a name such as 'a\d' is an invalid escape
                value = ast.literal_eval(text)
            self.note(f"{name}: string holding a Python literal")
            return value
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None

    def _required(self, name: str) -> str:
        if not self.has(name):
            raise RowError(f"{name} is missing")
        value = self.row[name]
        if not isinstance(value, str):
            kind = type(value).__name__
            raise RowError(f"{name} is {_KINDS.get(kind, kind)}, not text")
        if not _is_encodable(value):
            raise RowError(f"{name} holds a lone surrogate, which is no character")
        return value


def _is_encodable(text: str) -> bool:
    """JSON can spell half a character (a lone surrogate), which has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- rows -----------------------------------------------------------------------------------------


def row_of(fields: Fields) -> InstanceRow:
    """The row by the columns that the SWE-bench family shares.

    The commit that the environment is built at is a second pin; some rows leave it empty.
    """
    base = fields.commit("base_commit")
    commits = [(base, CommitRole.BASE)]
    if fields.has("environment_setup_commit"):
        commits.append((fields.commit("environment_setup_commit"), CommitRole.ENVIRONMENT))
    elif "environment_setup_commit" in fields.row:
        fields.note("environment_setup_commit: none")
    tests = {}
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):  # some formats write them in lower case
        is_lower = name not in fields.row and name.lower() in fields.row
        tests[name] = fields.names(name.lower() if is_lower else name)
    return InstanceRow(
        id=fields.instance_id(),
        dataset="",
        mirror=fields.mirror(),
        base_commit=base,
        direction=Direction.FORWARD,
        commits=tuple(commits),
        patch=fields.patch("patch"),
        test_patch=fields.patch("test_patch"),
        fail_to_pass=tests["FAIL_TO_PASS"],
        pass_to_pass=tests["PASS_TO_PASS"],
        environment=fields.text("image_name"),
        python_version=fields.text("python_version"),
        version=fields.text("version"),
        created_at=fields.time("created_at"),
        rules=tuple(fields.rules),
    )


# -- the table ------------------------------------------------------------------------------------


class DatasetFormat(NamedTuple):
    """`detects` looks at one row. A format that is not `read` is recognised only."""

    name: str
    title: str
    detected_by: str
    detects: Callable[[RawFields], bool]
    read: bool = True


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
        "nemo-gym", "NeMo Gym rows", "responses_create_params and no base_commit",
        lambda row: "responses_create_params" in row and "base_commit" not in row, read=False,
    ),
    DatasetFormat(
        "multi-swe-bench", "Multi-SWE-bench", "org, repo and base",
        _has("org", "repo", "base"), read=False,
    ),
    DatasetFormat(
        "r2e-gym", "R2E-Gym", "parsed_commit_content", _has("parsed_commit_content"), read=False
    ),
    DatasetFormat(
        "swe-bench-pro", "SWE-bench Pro", "before_repo_set_cmd", _has("before_repo_set_cmd"),
        read=False,
    ),
    DatasetFormat(
        "swe-bench-live", "SWE-bench-Live", "commit_urls", _has("commit_urls"), read=False
    ),
    DatasetFormat(
        "swe-smith", "SWE-smith", "image_name or a repo of swesmith/, and no base_commit",
        _is_smith, read=False,
    ),
    # test patches hold stubs of binary files
    DatasetFormat(
        "swe-bench-multimodal", "SWE-bench Multimodal", "image_assets", _has("image_assets")
    ),
    DatasetFormat(
        "swe-rebench", "SWE-rebench, SWE-bench-extra",
        "install_config, FAIL_TO_FAIL or PASS_TO_FAIL",
        lambda row: any(c in row for c in ("install_config", "FAIL_TO_FAIL", "PASS_TO_FAIL")),
    ),
    DatasetFormat(  # lists of tests are strings holding JSON; lists in SWE-agent's copies
        "swe-bench", "SWE-bench, Lite, Verified", "environment_setup_commit",
        _has("environment_setup_commit"),
    ),
    DatasetFormat(  # repositories are lower-cased
        "swe-bench-multilingual", "SWE-bench Multilingual",
        "no environment_setup_commit, and log_parser or dates with a space", _is_multilingual,
    ),
    DatasetFormat(
        "swe-gym", "SWE-Gym", "no environment_setup_commit, and hints_text",
        _has("instance_id", "repo", "base_commit", "hints_text"),
    ),
    DatasetFormat(
        "generic", "rows of the same shape", "instance_id, repo and base_commit", _has_shape
    ),
)  # fmt: skip

COLUMNS = (
    *("instance_id", "repo", "base_commit", "environment_setup_commit", "patch", "test_patch"),
    *("FAIL_TO_PASS", "PASS_TO_PASS", "fail_to_pass", "pass_to_pass", "created_at"),
    *("version", "image_name", "python_version"),
)
"""All columns whose values a normaliser or a test reads: Parquet files are read for no others."""


def format_infos() -> list[FormatInfo]:
    """The formats that `dataset formats` lists: those that are read."""
    found = [each for each in FORMATS if each.read]
    return [FormatInfo(name=f.name, title=f.title, detected_by=f.detected_by) for f in found]


def choose_format(source: str, asked: str | None, rows: Sequence[RawFields]) -> str:
    """The name of the format asked for, else of the one that the first rows show.

    Rows of a format that is not read count as generic where they have that shape. Raises
    InvalidDatasetError.
    """
    detected = (each for row in rows for each in FORMATS if each.detects(row))
    by_name = {each.name: each for each in FORMATS}
    found = by_name.get(asked.lower()) if asked else next(detected, None)
    if asked and found is None:
        close = difflib.get_close_matches(asked.lower(), by_name, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        readable = ", ".join(each.name for each in FORMATS if each.read)
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
    if not found.read and not asked and any(map(_has_shape, rows)):
        found = FORMATS[-1]
    if not found.read:
        raise InvalidDatasetError(
            f"cannot import dataset {shown(source)}: its rows, from the first on, are {found.title}"
            f" ({found.detected_by}), a format that this version recognises and does not read",
            hint="convert the rows to instance_id, repo, base_commit, patch and test_patch, and"
            " import those with --format generic",
            format=found.name,
        )
    return found.name
