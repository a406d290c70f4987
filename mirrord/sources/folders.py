"""Read task folders as rows: SWE-bench v5 (`task.yaml`) and Harbor (`task.toml`).

A row has SWE-bench's columns, and `task_folder` with the kind of folder. Folders are read in the
order of their names. A folder that lacks a file, or in which one is a link, special or huge, is a
fault with its name and is skipped.
"""

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from ..datasets.rows import Origin, RawRow
from ..errors import InvalidDatasetError, UsageError
from ..model import shown
from ..presence import is_dir, is_symlink, lexists

# levels below the given folder that are searched, as by Harbor's tools
DEPTH_LIMIT = 6
# a longer file makes the task an error, not the folder
FILE_LIMIT_BYTES = 128 * 1024**2
# for `task.yaml` and `task.toml`; FILE_LIMIT_BYTES is for patches and lists of tests
HEAD_LIMIT_BYTES = 1024**2

_SWE_BENCH, _HARBOR = "task.yaml", "task.toml"
_HINT = f"a task is a folder with {_SWE_BENCH} or {_HARBOR}; name files of rows one by one"


class TaskError(Exception):
    """A folder is not a valid task. The message is a clause, such as `test.patch is missing`."""


def iter_tasks(root: Path, *, links_within: Path | None = None) -> Iterator[RawRow]:
    """Iterate over the tasks at or below a folder; raises InvalidDatasetError if there are none.

    Links are followed only to files below `links_within`: the Hub's cache consists of links.
    """
    root, number = root.resolve(), 0
    try:
        for folder in _iter_folders(_Folder(root, root.name, links_within), 0):
            number += 1
            origin = Origin(folder.name, 1)
            try:
                yield RawRow(number, folder.read_row(), origin=origin)
            except TaskError as error:
                yield RawRow(number, fault=str(error), origin=origin)
    except OSError as error:
        fact = f"{error.filename}: {error.strerror}"
        raise UsageError(f"cannot import {shown(str(root))}: {fact}", hint=_HINT) from error
    if not number:
        fact = "it contains no task folder"
        raise InvalidDatasetError(f"cannot import {shown(str(root))}: {fact}", hint=_HINT)


class _Folder(NamedTuple):
    """A folder that may be a task. `name` is its path below the given folder."""

    path: Path
    name: str
    links_within: Path | None

    @property
    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))

    def has(self, name: str) -> bool:
        return lexists(self.path / name)

    def find(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def find_patch(self, directory: str) -> str | None:
        if not is_dir(self.path / directory):
            return None
        names = [name for name in sorted(os.listdir(self.path / directory)) if _PATCH.search(name)]
        # of several, nothing says which is the patch
        return self.text(f"{directory}/{names[0]}") if len(names) == 1 else None

    def text(self, name: str, limit: int = FILE_LIMIT_BYTES) -> str:
        """Read a file as text, byte for byte; raises TaskError."""
        path = self.path / name
        if self.links_within and path.resolve().is_relative_to(self.links_within):
            path = path.resolve()
        try:  # O_NONBLOCK: opening a FIFO without a writer would wait
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise TaskError(f"{name} is missing") from error
        except OSError as error:
            fact = "a symbolic link" if is_symlink(path) else f"unreadable: {error.strerror}"
            raise TaskError(f"{name} is {fact}") from error
        with open(descriptor, "rb") as file:
            st = os.fstat(descriptor)
            if not stat.S_ISREG(st.st_mode):
                raise TaskError(f"{name} is not a regular file")
            if st.st_size > limit:
                raise TaskError(f"{name} is longer than {limit >> 20} MiB")
            # it may have grown since
            data = file.read(limit)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise TaskError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error

    def mapping(self, name: str, parse: Callable[[str], Any], limit: int) -> dict[str, Any]:
        """Read a file that holds one mapping; raises TaskError."""
        try:
            value = parse(self.text(name, limit))
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            fact = " ".join(str(error).split())[:200]
            raise TaskError(f"{name} cannot be read: {fact}") from error
        if not isinstance(value, dict):
            raise TaskError(f"{name} is not a mapping")
        return value

    def read_row(self) -> dict[str, Any]:
        if is_symlink(self.path):
            raise TaskError("it is a symbolic link")
        if self.has(_SWE_BENCH):
            return _read_swe_bench(self)
        if self.has(_HARBOR):
            return _read_harbor(self)
        raise TaskError(f"it has neither {_SWE_BENCH} nor {_HARBOR}")


_SIGNS = {"gold.patch", "test.patch", "tests.json", "instruction.md", "problem_statement.md"}


def _iter_folders(folder: _Folder, depth: int) -> Iterator[_Folder]:
    """Iterate over folders that are tasks or have a task's files; does not descend into them."""
    names = folder.names
    if _SWE_BENCH in names or _HARBOR in names or (depth and not _SIGNS.isdisjoint(names)):
        yield folder
    elif depth < DEPTH_LIMIT and not is_symlink(folder.path):
        for name in names:
            path = folder.path / name
            if not name.startswith(".") and is_dir(path):
                below = f"{folder.name}/{name}" if depth else name
                yield from _iter_folders(_Folder(path, below, folder.links_within), depth + 1)


# -- SWE-bench ------------------------------------------------------------------------------------

_TESTS = "tests.json"
_REQUIRED = {"patch": "gold.patch", "test_patch": "test.patch"}
_PROSE = {"problem_statement": "problem_statement.md", "hints_text": "hints.md"}
_PROSE |= {"eval_script": "eval.sh"}


def _read_swe_bench(folder: _Folder) -> dict[str, Any]:
    """Read the row that `swebench dataset build` makes of a task folder of version 5."""
    row = folder.mapping(_SWE_BENCH, _parse_yaml, HEAD_LIMIT_BYTES)
    row.setdefault("instance_id", folder.path.name)
    row |= {column: folder.text(name) for column, name in _REQUIRED.items()}
    row |= folder.mapping(_TESTS, json.loads, FILE_LIMIT_BYTES)
    row |= {column: text for column, name in _PROSE.items() if (text := folder.find(name))}
    return {**row, "task_folder": "swe-bench-tasks"}


# PyYAML may have been built without libyaml
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _TextLoader(_Loader):  # type: ignore[misc]
    """Reads plain values as text, except null: version 1.10 is not the number 1.1."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in known if tag.endswith(":null")]
        for first, known in _Loader.yaml_implicit_resolvers.items()
    }


def _parse_yaml(text: str) -> Any:
    """Parse YAML without aliases, with which a kilobyte can expand to gigabytes of JSON."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_TextLoader)):
        raise ValueError("it has aliases")
    # _TextLoader is derived from a safe loader: it makes no objects but plain ones
    return yaml.load(text, Loader=_TextLoader)  # noqa: S506


# -- Harbor ---------------------------------------------------------------------------------------

_PATCH = re.compile(r"\.(?:patch|diff)$")
_REPO_KEYS = ("repo", "repository", "repository_url")  # the last ones are DeepSWE's
_BASE_KEYS = ("base_commit", "base_sha", "ref", "base_commit_hash")
_CLONE = re.compile(
    r"git clone\s[^\n]*?(?:https?://|git@)[^/:\s]+[/:]([\w.-]+/[\w.-]+?)(?:\.git)?[/\s\"']"
)
_CHECKOUT = re.compile(r"git (?:checkout|reset|switch)\s[^\n]*?\b([0-9a-f]{40})\b")
# flags, such as --platform, may stand before the image
_FROM = re.compile(r"^FROM\s+(?:--\S+\s+)*(\S+)", re.MULTILINE | re.IGNORECASE)
# a patch that a script of shell feeds to git or patch
_HERE_DOCUMENT = re.compile(
    r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(diff --git .*?\n)\1\s*$", re.DOTALL | re.MULTILINE
)


def _read_harbor(folder: _Folder) -> dict[str, Any]:
    """Read the row of a Harbor task; each value from the first place that has it.

    Harbor's adapters of the SWE-bench family keep the dataset's row in `tests/config.json`. Others
    name repository and commit in `[metadata]`, in a table below it, or only in the Dockerfile.
    """
    config = folder.mapping(_HARBOR, tomllib.loads, HEAD_LIMIT_BYTES)
    row: dict[str, Any] = {"task_folder": "harbor"}
    if folder.has("tests/config.json"):
        row |= folder.mapping("tests/config.json", json.loads, FILE_LIMIT_BYTES)
    metadata = _table(config, "metadata")
    tables = [metadata, *(table for table in metadata.values() if isinstance(table, dict))]
    dockerfile = folder.find("environment/Dockerfile") or ""
    image = _table(config, "environment").get("docker_image") or _first(_FROM, dockerfile)
    solver = folder.find("solution/solve.sh") or ""  # writes and applies a patch
    columns = {
        "instance_id": metadata.get("instance_id") or folder.path.name,
        "repo": _named(tables, _REPO_KEYS) or _first(_CLONE, dockerfile),
        "base_commit": _named(tables, _BASE_KEYS) or _first(_CHECKOUT, dockerfile),
        "version": metadata.get("version"),
        "image_name": image,
        "workdir": _table(config, "environment").get("workdir"),
        "patch": folder.find_patch("solution") or _first(_HERE_DOCUMENT, solver),
        "test_patch": folder.find_patch("tests"),
        "problem_statement": None if folder.has("steps") else folder.text("instruction.md"),
    }
    return {**{column: value for column, value in columns.items() if value}, **row}


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _named(tables: list[dict[str, Any]], keys: tuple[str, ...]) -> str | None:
    values = (table.get(key) for table in tables for key in keys)
    return next((value for value in values if value and isinstance(value, str)), None)


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[pattern.groups] if match else None
