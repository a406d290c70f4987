"""Turn values nested in commands, JSON or parsed diffs into plain columns, and keep the others.

Raises RowError if the row cannot be read. No I/O.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..model import FROM_IMAGE, FROM_IMAGE_HEAD, shown
from .fields import RawFields, RowError, find_value, full_commits, parse_json

Note = Callable[[str], None]

# instance_OWNER__NAME-GOLD, some with -vDIGITS behind it
_PRO_ID = re.compile(r"(?:instance_)?(.+?)-([0-9a-f]{40})(?:-v\w+)?")

_RESET = re.compile(r"git reset --hard ([0-9a-f]{40})\b")

# lines of `before_repo_set_cmd`; the last one takes the tests' files from the gold commit
_FROM_GOLD = re.compile(r"git checkout ([0-9a-f]{40}) +-- *(.*)")
_TO_BASE = (
    r"git (?:reset --hard|checkout)(?: (?:-f|--force|-q|--quiet))*(?: {})?|git clean -[dfqx ]+"
)


def unwrap_pro(row: RawFields, note: Note) -> RawFields:
    """Read `before_repo_set_cmd`: it resets to the base commit and checks out gold tests.

    The id has the gold commit too, and the repository, which partial rows lack. The tests' files
    are in the test patch, too; an agent may have changed those that it does not change. Commands
    that do anything else are `before_script`.
    """
    command = row.get("before_repo_set_cmd")
    command = command if isinstance(command, str) else ""
    plain, match = dict(row), _PRO_ID.fullmatch(str(row.get("instance_id")))
    if match and not row.get("repo"):
        plain["repo"] = match[1]
        note("repo: from instance_id")
    if (base := _RESET.search(command)) and not row.get("base_commit"):
        plain["base_commit"] = base[1]
        note("base_commit: from before_repo_set_cmd")
    to_base = re.compile(_TO_BASE.format(plain.get("base_commit")))
    gold, restored, others = list[str](), list[str](), list[str]()
    for line in filter(None, map(str.strip, command.splitlines())):
        if tests := _FROM_GOLD.fullmatch(line):
            gold.append(tests[1])
            restored += tests[2].split()
        elif not to_base.fullmatch(line):
            others.append(line)
    if gold:
        note("gold_commits: from before_repo_set_cmd")
        plain["restored_files"] = restored
    if others:
        note("before_script: from before_repo_set_cmd")
        plain["before_script"] = "\n".join(others)
    if match and match[2] not in gold:
        note("gold_commits: from instance_id")
        gold.append(match[2])
    return {**plain, "gold_commits": gold}


# rows have the name without its owner
_R2E_REPOSITORIES = {
    repo.partition("/")[2].lower(): repo
    for repo in (
        *("aio-libs/aiohttp", "bokeh/bokeh", "nedbat/coveragepy", "datalad/datalad", "numpy/numpy"),
        *("biolab/orange3", "pandas-dev/pandas", "python-pillow/Pillow", "Pylons/pyramid"),
        *("scrapy/scrapy", "statsmodels/statsmodels", "sympy/sympy", "tornadoweb/tornado"),
    )
}

_MARKS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}

_TEST_DIRECTORIES = {"test", "tests", "Test", "Tests"}


def unwrap_r2e(row: RawFields, note: Note) -> RawFields:
    """Read `parsed_commit_content`, the gold commit as JSON. The base commit is its parent, `SHA^`.

    Patches are rendered from the parsed diffs of files. The tests that run are in the image.
    """
    parsed = row.get("parsed_commit_content")
    parsed = parse_json(parsed) if isinstance(parsed, str) else parsed
    if not isinstance(parsed, Mapping):
        raise RowError("parsed_commit_content is not a JSON object")
    image = str(row.get("docker_image"))
    gold = (
        *full_commits(f"{row.get('commit_hash')} {parsed.get('new_commit_hash')} {image}"),
        None,
    )
    if gold[0] is None:
        raise RowError("neither commit_hash, new_commit_hash nor docker_image is a full commit id")
    name = str(row.get("repo_name") or row.get("repo"))
    repo = name if "/" in name else _R2E_REPOSITORIES.get(name.lower())
    if repo is None:
        raise RowError(f"repo_name {shown(name)} is not a known repository; give it in a mapping")
    if repo != name:
        note("repo: by repo_name")
    old = str(parsed.get("old_commit_hash") or f"{gold[0]}^")
    note(f"base_commit: {'the parent of the commit' if '^' in old else 'old_commit_hash'}")
    files = [diff for diff in parsed.get("file_diffs") or () if isinstance(diff, Mapping)]
    patches = {"patch": _joined(files, tests=False), "test_patch": _joined(files, tests=True)}
    if any(patches.values()):
        note("patch: from parsed_commit_content")
    base = {"revision" if "^" in old else "base_commit": old}
    return {
        "instance_id": f"{repo.replace('/', '__')}-{gold[0]}",
        "created_at": parsed.get("commit_date"),
        **row, **base, **patches, "repo": repo, "gold_commits": [gold[0]],
    }  # fmt: skip


def _joined(files: Iterable[Mapping[str, Any]], *, tests: bool) -> str:
    """Render the patch of the test files, or of the others. Binary files have no content."""
    try:
        return "".join(
            "".join(_diff_lines(file))
            for file in files
            if not file.get("is_binary_file") and _is_test(file["header"]["file"]["path"]) == tests
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RowError(f"parsed_commit_content is of an unknown shape: {error!r}") from error


def _is_test(path: str) -> bool:
    *directories, name = path.split("/")
    is_named_so = name.startswith("test_") or name.endswith("_test.py")
    return is_named_so or not _TEST_DIRECTORIES.isdisjoint(directories)


def _diff_lines(file: Mapping[str, Any]) -> Iterable[str]:
    path, misc = file["header"]["file"]["path"], file["header"].get("misc_line")
    yield f"diff --git a/{path} b/{path}\n"
    if misc:
        yield f"{misc}\n"
    if index := file.get("index_line"):
        mode = f" {index['mode']}" if index.get("mode") else ""
        yield f"index {index['old_commit_hash']}..{index['new_commit_hash']}{mode}\n"
    if file.get("minus_file") and file.get("plus_file"):
        yield f"--- {file['minus_file']['path']}\n+++ {file['plus_file']['path']}\n"
    for hunk in file.get("hunks") or ():
        where = hunk["descriptor"]
        old, new = (_range(where[f"{side}_range"]) for side in ("old", "new"))
        section = f" {where['section']}" if where.get("section") else ""
        yield f"@@ -{old} +{new} @@{section}\n"
        for line in hunk["line_group"]["all_lines"]:
            yield f"{_MARKS[line['type']]}{line['content']}\n"


def _range(of: Mapping[str, Any]) -> str:
    return f"{of['start']}" if of.get("length") is None else f"{of['start']},{of['length']}"


def unwrap_lancer(row: RawFields, note: Note) -> RawFields:
    """Read the commit of a SWE-Lancer row, which for most is in files beside the table.

    A manager's task is at the parent of `manager_commit`, another at what `revert_command` resets
    to, or at `commit_id`, to which the benchmark's own set-up applies a patch with the bug.
    """
    plain = {**row, "repo": "Expensify/App"}
    if gold := full_commits(str(row.get("manager_commit"))):
        return {**plain, "base_commit": f"{gold[0]}^", "gold_commits": gold}
    if base := _RESET.search(str(row.get("revert_command"))):
        note("base_commit: from revert_command.txt")
        return {**plain, "base_commit": base[1], "gold_commits": row.get("commit_id")}
    if base := row.get("commit_id"):
        note("base_commit: before the set-up, which applies issue_introduction.patch")
        return {**plain, "base_commit": base}
    raise RowError("its commit is in issues/ID/commit_id.txt, which is not beside the table")


INSTANCE_DICT = "responses_create_params.metadata.instance_dict"


def unwrap_nemo(row: RawFields, note: Note) -> RawFields:
    """Read the row in `metadata.instance_dict`, JSON in JSON; `metadata` adds columns to it."""
    inner = find_value(row, INSTANCE_DICT)
    inner = parse_json(inner) if isinstance(inner, str) else inner
    if not isinstance(inner, Mapping):
        raise RowError(f"{INSTANCE_DICT} is not a JSON object")
    metadata = find_value(row, "responses_create_params.metadata")
    return {**(metadata if isinstance(metadata, Mapping) else {}), **inner}


_IMAGES = ("image_name", "docker_image", "image", "image_url", "instance_image_key")
_PLACED = ("repo", "repo_name", "base_commit", "org", "user")


def find_only_image(row: RawFields) -> str | None:
    """Return the image of a row that has neither a repository nor a commit."""
    if not row.get("instance_id") or any(map(row.get, _PLACED)) or "task_folder" in row:
        return None
    return next((str(row[each]) for each in _IMAGES if isinstance(row.get(each), str)), None)


def unwrap_image(row: RawFields, note: Note) -> RawFields:
    """Name the mirror and base commit of a row with only an image: what that has, at its HEAD."""
    image = find_only_image(row)
    if not image:
        raise RowError("it has neither repo nor an image")
    note("repo and base_commit: those of the image")
    # without commits: agents see the name of a mirror, and one of an image may be the fix
    words = re.sub(r"[^a-z0-9.]+", "-", re.sub(r"[0-9a-f]{7,40}", "", image.lower()))[-60:]
    name = f"{words.strip('-.')}-{hashlib.sha256(image.encode()).hexdigest()[:12]}".lstrip("-")
    place = {"repo": f"{FROM_IMAGE}/{name}", "revision": FROM_IMAGE_HEAD}
    return {**row, **place, "image_name": image}


_SHAPE = ("instance_id", "repo", "base_commit")


def find_inner(row: RawFields) -> RawFields | None:
    """Return the row that a column holds, or a member of one, maybe as JSON: rows of trainers."""
    if row.get("base_commit"):
        return None
    members = [value for value in row.values() if isinstance(value, Mapping)]
    texts = (value for value in row.values() if isinstance(value, str) and value[:1] == "{")
    members += [value for value in map(parse_json, texts) if isinstance(value, Mapping)]
    inner = (value for member in members for value in member.values() if isinstance(value, Mapping))
    return next((member for member in (*members, *inner) if all(map(member.get, _SHAPE))), None)


def unwrap_inner(row: RawFields, note: Note) -> RawFields:
    """Read the row in a column; plain columns beside it are added to it."""
    inner = find_inner(row)
    if inner is None:
        raise RowError("no column has a row with instance_id, repo and base_commit")
    plain = {name: value for name, value in row.items() if not isinstance(value, (Mapping, list))}
    return {**plain, **inner}
