"""The formats of dataset rows: how each is detected, and which columns have its fields.

The first format that detects a row is taken, so a special one precedes the general one it
resembles. A new format is an entry of FORMATS: its columns, and a function that unwraps rows whose
values are nested. No I/O.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..catalog import InstanceRow
from ..errors import InvalidCommitError, InvalidDatasetError
from ..model import CommitId, CommitRole, Direction, History, parse_commit, shown
from ..protocol import FormatInfo
from .fields import OWNERS, STANDARD, URLS, Columns, Fields, RawFields, RowError, find_value
from .guessing import guess_mapping
from .unwrapping import (
    INSTANCE_DICT,
    Note,
    find_inner,
    find_only_image,
    unwrap_image,
    unwrap_inner,
    unwrap_lancer,
    unwrap_nemo,
    unwrap_pro,
    unwrap_r2e,
)


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """A format. `detects` judges by one row.

    `unwrap` makes plain columns; with `is_wrapped` the result is a row of another format.
    `complete` adds fields that only this format has.
    """

    name: str
    title: str
    detected_by: str
    detects: Callable[[RawFields], bool]
    columns: Columns = STANDARD
    unwrap: Callable[[RawFields, Note], RawFields] | None = None
    is_wrapped: bool = False
    complete: Callable[[InstanceRow, RawFields], InstanceRow] = lambda found, _: found

    def read(self, row: RawFields) -> InstanceRow:
        """Normalise a row; raises RowError."""
        rules: list[str] = []
        row_format = self
        if self.is_wrapped:
            row = self.unwrap(row, rules.append) if self.unwrap else row
            inner = (other for other in FORMATS if not other.is_wrapped and other.detects(row))
            row_format = next(inner, FORMATS[-1])
            rules.append(f"row inside: {row_format.name}")
        if row_format.unwrap is not None:
            row = row_format.unwrap(row, rules.append)
        return row_format.complete(normalise(Fields(row, row_format.columns, rules)), row)


def normalise(fields: Fields) -> InstanceRow:
    """Build the normalised row.

    Besides the base commit it records the environment's commit, which may be empty, and gold
    commits. A row without a base commit names a branch that has it.
    """
    base, revision = _base_of(fields)
    commits = [(base, CommitRole.BASE)] if base else []
    if setup := fields.commit("environment_setup_commit"):
        commits.append((setup, CommitRole.ENVIRONMENT))
    elif "environment_setup_commit" in fields.row:
        fields.note("environment_setup_commit: none")
    commits += [(c, CommitRole.GOLD) for c in fields.commits("gold_commits") if c != base]
    mirror, repo_url = fields.repository()
    return InstanceRow(
        id=fields.instance_id(),
        dataset="",
        mirror=mirror,
        repo_url=repo_url,
        base_commit=base,
        direction=fields.choice("direction", Direction) or Direction.FORWARD,
        commits=tuple(commits),
        patch=fields.patch("patch"),
        test_patch=fields.patch("test_patch"),
        fail_to_pass=fields.names("fail_to_pass"),
        pass_to_pass=fields.names("pass_to_pass"),
        revision=revision,
        environment=fields.text("image_name"),
        python_version=fields.text("python_version"),
        version=fields.text("version"),
        created_at=fields.time("created_at"),
        history=fields.choice("history", History),
        install_config=fields.install_config(),
        workdir=fields.workdir(),
        rules=tuple(dict.fromkeys(fields.rules)),
    )


def _base_of(fields: Fields) -> tuple[CommitId | None, str | None]:
    if written := fields.base_revision():
        return None, written
    if base := fields.commit("base_commit"):
        return base, None
    revision = fields.revision()
    if revision is None:
        raise RowError(f"{fields.name_of('base_commit')} is missing")
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return parse_commit(revision), None
    return None, revision


def _with_commits(instance: InstanceRow, row: RawFields) -> InstanceRow:
    """Add an exported row's commits with their roles, and the branch of its base commit."""
    try:
        named = [
            (parse_commit(entry["commit"]), CommitRole(entry["role"])) for entry in row["commits"]
        ]
    except (InvalidCommitError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RowError("commits is not a list of objects with commit and role") from error
    return replace(instance, commits=tuple(dict.fromkeys(named)), revision=Fields(row).revision())


def _has(*names: str) -> Callable[[RawFields], bool]:
    return lambda row: all(name in row for name in names)


def _is_folder(kind: str) -> Callable[[RawFields], bool]:
    return lambda row: row.get("task_folder") == kind


def _is_nemo(row: RawFields) -> bool:
    return not row.get("base_commit") and find_value(row, INSTANCE_DICT) is not None


def _is_scale(row: RawFields) -> bool:
    has_commit = bool(row.get("parent_commit")) or "f2p_patch" in row
    return bool(row.get("user") and row.get("repo")) and has_commit


def _is_smith(row: RawFields) -> bool:
    return str(row.get("repo", "")).lower().startswith("swesmith/")


def _is_sandbox(row: RawFields) -> bool:
    is_task = bool(row.get("image_name")) and "instance_id" in row and "task_folder" not in row
    return is_task and ("base_commit" not in row or bool(row.get("python_version")))


def _is_multilingual(row: RawFields) -> bool:
    has_space = " " in str(row.get("created_at") or "")
    has_environment = "environment_setup_commit" in row
    return _has_shape(row) and not has_environment and ("log_parser" in row or has_space)


_OF_CL = ("metadata.base_commit", "evaluation.patch")
_SHAPE = ("instance_id", "repo", "base_commit")
_has_shape = _has(*_SHAPE)

# the branch has the instance's name; its parent, the commit without the bug, is the answer
_INTRODUCES_BUG = {"revision": "{instance_id}", "direction": "reverse", "history": "squashed"}

FORMATS = (
    DatasetFormat(
        "mirrord", "what `mirrord dataset export` writes", "commits and direction",
        _has("instance_id", "commits", "direction", "base_commit"), complete=_with_commits,
    ),
    DatasetFormat(
        "swe-bench-tasks", "SWE-bench v5 task folders", "a folder with task.yaml",
        _is_folder("swe-bench-tasks"), is_wrapped=True,
    ),
    DatasetFormat(  # a task can hold a row of any other format
        "harbor", "Harbor task folders", "a folder with task.toml", _is_folder("harbor"),
        is_wrapped=True,
    ),
    DatasetFormat(
        "nemo-gym", "NeMo Gym rows", f"{INSTANCE_DICT}, and no base_commit beside it", _is_nemo,
        unwrap=unwrap_nemo, is_wrapped=True,
    ),
    DatasetFormat(
        "swe-bench-cl", "SWE-Bench-CL", "metadata.base_commit and evaluation.patch",
        lambda row: all(find_value(row, path) for path in _OF_CL),
        STANDARD.replace(
            {
                **{name: f"metadata.{name}" for name in (*_SHAPE, "created_at")},
                **{name: f"evaluation.{name}" for name in ("patch", "test_patch")},
                "fail_to_pass": "evaluation.FAIL_TO_PASS",
                "pass_to_pass": "evaluation.PASS_TO_PASS",
            },
            {},
        ),
    ),
    DatasetFormat(
        "swe-lancer", "SWE-Lancer", "question_id and manager_commit",
        _has("question_id", "manager_commit"),
        STANDARD.replace({"instance_id": "question_id", "workdir": "cwd"}, {}), unwrap_lancer,
    ),
    DatasetFormat(
        "nested", "rows of trainers (SkyRL, verl)",
        "a column with instance_id, repo and base_commit in it, and no base_commit beside it",
        lambda row: find_inner(row) is not None, unwrap=unwrap_inner, is_wrapped=True,
    ),
    DatasetFormat(
        "multi-swe-bench", "Multi-SWE-bench, Multi-SWE-RL", "org, repo and base",
        _has("org", "repo", "base"),
        STANDARD.replace(
            {
                "repo": "{org}/{repo}", "base_commit": "base.sha", "patch": "fix_patch",
                "fail_to_pass": "fixed_tests", "pass_to_pass": "p2p_tests",
            },
            {"instance_id": "{org}__{repo}-{number}"},
        ),
    ),
    DatasetFormat(
        "r2e-gym", "R2E-Gym", "parsed_commit_content", _has("parsed_commit_content"),
        unwrap=unwrap_r2e,
    ),
    DatasetFormat(  # the base commit is `SHA^`
        "gso", "GSO", "opt_commit and gt_diff", _has("opt_commit", "gt_diff"),
        STANDARD.replace({"gold_commits": "opt_commit", "patch": "gt_diff"}, {}),
    ),
    DatasetFormat(  # `repo` has no owner, which is in `user`
        "scale-swe", "Scale-SWE, BeyondSWE, DeNovoSWE",
        "user and repo, and parent_commit or f2p_patch", _is_scale,
        STANDARD.replace(
            {
                "base_commit": ("base_commit", "parent_commit"), "test_patch": "f2p_patch",
                "gold_commits": ("pr_commit", "commit_id"),
                "image_name": ("image_url", "image_name"),
            },
            {"instance_id": "{user}_{repo}_pr{pull_number}"},
        ),
    ),
    DatasetFormat(
        "commit0", "commit0", "reference_commit",
        _has("reference_commit", "base_commit"),
        STANDARD.replace(
            {"gold_commits": "reference_commit", "python_version": "setup.python"},
            {"instance_id": "{repo}"},
        ),
    ),
    DatasetFormat(
        "swe-bench-pro", "SWE-bench Pro", "before_repo_set_cmd", _has("before_repo_set_cmd"),
        STANDARD.replace({"image_name": "dockerhub_tag"}, {}), unwrap_pro,
    ),
    DatasetFormat(  # commits of the pull request
        "swe-bench-live", "SWE-bench-Live", "commit_urls", _has("commit_urls"),
        STANDARD.replace({"gold_commits": "commit_urls"}, {}),
    ),
    DatasetFormat(
        "swe-polybench", "SWE-PolyBench", "F2P and P2P", _has("F2P", "P2P"),
        STANDARD.replace({"fail_to_pass": "F2P", "pass_to_pass": "P2P"}, {}),
    ),
    DatasetFormat(
        "swe-smith", "SWE-smith", "a repo of swesmith/", _is_smith,
        STANDARD.replace({}, _INTRODUCES_BUG),
    ),
    # test patches hold stubs of binary files
    DatasetFormat(
        "swe-bench-multimodal", "SWE-bench Multimodal", "image_assets", _has("image_assets")
    ),
    DatasetFormat(
        "swe-rebench", "SWE-rebench, SWE-rebench V2, SWE-bench-extra",
        "install_config, FAIL_TO_FAIL or PASS_TO_FAIL",
        lambda row: not row.keys().isdisjoint(("install_config", "FAIL_TO_FAIL", "PASS_TO_FAIL")),
    ),
    DatasetFormat(  # tests are lists as JSON text; in SWE-agent's copies real lists
        "swe-bench", "SWE-bench, Lite, Verified", "environment_setup_commit",
        _has("environment_setup_commit"),
    ),
    DatasetFormat(  # its columns come last: others have a repository, too
        "image", "rows that name only an image",
        "an image, and neither a repository nor a commit",
        lambda row: find_only_image(row) is not None, unwrap=unwrap_image,
    ),
    DatasetFormat(
        "swe-minisandbox", "custom rows of SWE-MiniSandbox",
        "image_name, and python_version or no base_commit", _is_sandbox,
        STANDARD.replace({}, {**_INTRODUCES_BUG, "python_version": "3.11"}),
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

_UNWRAPPED = {"before_repo_set_cmd", "parsed_commit_content", "commit_hash", "repo_name"}
_UNWRAPPED |= {
    "image_url",
    "instance_image_key",
    "responses_create_params",
    "manager_commit",
    "instance",
    "extra_info",
    "task_folder",
    "commits",
    *OWNERS,
    *URLS,
}

# all columns that a format reads or is detected by; other columns of Parquet are not read
COLUMNS = frozenset(_UNWRAPPED.union(*(each.columns.names() for each in FORMATS)))


def format_infos() -> list[FormatInfo]:
    return [FormatInfo(name=f.name, title=f.title, detected_by=f.detected_by) for f in FORMATS]


def find_format(asked: str | Columns | None, rows: Sequence[RawFields]) -> DatasetFormat | None:
    """Find the format of this name or mapping, by default the one that the rows show.

    Raises InvalidDatasetError for a name that no format has.
    """
    if isinstance(asked, Columns):
        return DatasetFormat("mapping", "", "", lambda row: True, asked)
    if asked is not None:
        return get_format(asked)
    for row in rows:
        for candidate in FORMATS:
            if candidate.detects(row):
                return candidate
    return None


def unknown_format(source: str, rows: Sequence[RawFields]) -> InvalidDatasetError:
    """Return the error about rows of no known format, with a mapping guessed from them."""
    names = ", ".join(shown(str(column), 40) for column in list(rows[0])[:12])
    mapping = guess_mapping(rows)
    return InvalidDatasetError(
        f"cannot import dataset {shown(source)}: no known format has its columns: {names}",
        hint="`mirrord dataset formats` lists the formats and --format chooses one; or write this"
        f" guess to a file, correct it, and add --mapping FILE:\n{mapping.rstrip()}",
        mapping=mapping,
    )


def get_format(name: str) -> DatasetFormat:
    """Raises InvalidDatasetError."""
    by_name = {dataset_format.name: dataset_format for dataset_format in FORMATS}
    if name.lower() not in by_name:
        close = difflib.get_close_matches(name.lower(), by_name, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise InvalidDatasetError(
            f"cannot read format {shown(name)}: no format has that name",
            hint=f"{guess}mirrord reads {', '.join(by_name)}",
        )
    return by_name[name.lower()]
