"""Guess a mapping for rows of which no format is known, from names and values of columns. No I/O.

The guess is TOML, as `--mapping` reads it. It is offered in an error and never used unasked.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RawFields = Mapping[str, Any]

_NAMES = {
    "repo": "repo repository repo_name repo_full_name full_name nwo github_repo original_repo"
    " github_url repo_url repo_addr repository_url clone_url github project project_name url"
    " html_url",
    "instance_id": "instance_id instance task_id task problem_id issue_id bug_id uid id key name",
    "base_commit": "base_commit base_sha base_commit_sha base_commit_hash base_commit_id base_rev"
    " base base_ref parent_commit parent_sha parent parent_hash before_commit commit_before before"
    " start_commit initial_commit old_commit old_commit_hash buggy_commit bug_commit"
    " buggy_commit_id revision_buggy revision_id_buggy previous_commit_hash previous_commit_id"
    " prev_commit previous_commit pre_commit source_commit vulnerable_commit"
    " commit_id commit commit_sha commit_hash sha hash revision",
    "gold_commits": "gold_commit gold_commits pr_commit merge_commit merge_commit_sha fix_commit"
    " fixing_commit fixed_commit opt_commit reference_commit solution_commit target_commit"
    " after_commit fixed_commit_id revision_fixed revision_id_fixed"
    " commit_after after new_commit head_commit head_sha commit_urls patch_commit",
    "patch": "patch gold_patch golden_patch gt_patch gt_diff fix_patch fix reference_patch"
    " solution_patch solution ground_truth_patch code_patch oracle_patch feature_patch bug_patch"
    " developers_patch"
    " diff",
    "test_patch": "test_patch tests_patch f2p_patch test_diff gold_test_patch golden_test_patch",
    "fail_to_pass": "fail_to_pass fail2pass f2p f2p_tests fixed_tests failing_tests fail_tests",
    "pass_to_pass": "pass_to_pass pass2pass p2p p2p_tests passing_tests",
    "image_name": "image_name docker_image docker_image_name image image_url image_uri image_tag"
    " instance_image_tag dockerhub_tag docker_url container_image",
    "created_at": "created_at created date commit_date merged_at timestamp",
    "version": "version repo_version",
}
_REQUIRED = ("instance_id", "repo", "base_commit")
_COMMIT = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{40}(?![0-9a-fA-F])")


def guess_mapping(rows: Sequence[RawFields]) -> str:
    """Return a mapping of the columns that look like fields; a comment for each required one
    that no column looks like.
    """
    # reversed, so that the first row with a column decides by its value
    columns = {path: value for row in reversed(rows) for path, value in _iter_columns(row)}
    names = {_plain_name(path): path for path in columns}
    for path in columns:
        names.setdefault(_plain_name(path.rpartition(".")[2]), path)
    mapping: dict[str, str] = {}
    for field, candidates in _NAMES.items():
        for name in candidates.split():
            column = names.get(name)
            if column and column not in mapping.values() and _fits(field, columns[column]):
                mapping[field] = column
                break
    _complete(mapping, names, columns)
    lines = [f"{field} = {json.dumps(mapping[field])}" for field in _NAMES if field in mapping]
    lines += [
        f'# {field} = ""  # no column looks like it' for field in _REQUIRED if field not in mapping
    ]
    return "\n".join(lines) + "\n"


def _plain_name(path: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", path)  # baseCommit
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _iter_columns(row: RawFields) -> Iterator[tuple[str, Any]]:
    """Iterate over columns, and members of objects in them, such as `base.sha`."""
    for name, value in row.items():
        # a mapping's value names a column in braces, so one with braces cannot be named
        if not isinstance(name, str) or re.search(r"[{}\x00-\x1f\x7f]", name) or len(name) > 100:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items() if key)
        else:
            yield name, value


_FITS = {"base_commit": _COMMIT, "gold_commits": _COMMIT}


def _fits(field: str, value: Any) -> bool:
    """Return whether a value can be of the field. Without a value the name alone decides."""
    if value is None or value == "" or field not in _FITS:
        return True
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return _FITS[field].search(text) is not None


_OWNERS = [
    "user",
    "owner",
    "org",
    "organization",
    "organisation",
    "repo_owner",
    "username",
    "namespace",
]
_NUMBERS = [
    "number",
    "pr_number",
    "pull_number",
    "pr_id",
    "pull_request",
    "pr",
    "issue_number",
    "issue",
]
_REPO = re.compile(r"(?:\S+[/:])?[\w.-]+/[\w.-]+/?")


def _complete(mapping: dict[str, str], names: dict[str, str], columns: dict[str, Any]) -> None:
    """Add the owner to a repository without one, an id made of repository and number, and the
    parent of a fix as the base.
    """
    fix = mapping.get("gold_commits")
    if "base_commit" not in mapping and fix and _COMMIT.fullmatch(str(columns[fix])):
        mapping["base_commit"] = f"{{{fix}}}^"
    owner = next((names[name] for name in _OWNERS if name in names), None)
    repo = mapping.get("repo")
    if repo and owner and not _REPO.fullmatch(str(columns[repo])):
        mapping["repo"] = f"{{{owner}}}/{{{repo}}}"
    number = next((names[name] for name in _NUMBERS if name in names), None)
    if "instance_id" not in mapping and repo and number:
        parts = f"{{{owner}}}__{{{repo}}}" if owner else f"{{{repo}}}"
        mapping["instance_id"] = f"{parts}-{{{number}}}"
