"""Patches out of and into a checkout, and files of other commits into it. The sync half of `revisions.py`, run in workers.

Owns what is a change and how it is written. git works in a private staging on objects and copies only; the checkout itself is
read and written through descriptors, and only once everything is known to fit. A crash while writing leaves files of the patch,
which `diff` shows and `reset` removes. The checkout's index is not touched: git sees by stat data which files are new.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import (
    InvalidPatchError,
    InvalidRequestError,
    MirrordError,
    PatchConflictError,
    PathNotFoundError,
    PathOutsideCheckoutError,
)
from ...host.credentials import ActingAs
from ...host.files import open_directory, open_regular, opened, shown_path
from ...model import NAME_LIMIT_BYTES, TREE_DEPTH_LIMIT, TREE_PATH_LIMIT_BYTES
from ..files.reader import Descent
from ..files.writer import TreeWriter
from .diff import Staging, Work, staged

_OUTSIDE = re.compile(r"invalid path|beyond a symbolic link|outside repository")
_INVALID = re.compile(
    r"corrupt (?:binary )?patch|No valid patches|unrecognized (?:input|binary patch)|fragment without header|header lacks"
    r" filename|without full index line|inconsistent (?:new |old )?(?:filename|mode)|bad git-diff|invalid mode on line"
)


@dataclass(frozen=True, slots=True)
class _Step:
    """One path that the result has differently. `mode` is git's, None where the path goes."""

    path: bytes
    is_new: bool
    mode: str | None


def apply(work: Work, changed: list[bytes], patch: bytes | Path, reverse: bool) -> list[bytes]:
    """Apply a patch to the files as they are; the paths that it wrote or removed. Where it does not fit, nothing changes."""
    patch = patch.read_bytes() if isinstance(patch, Path) else patch
    with staged(work) as staging:
        staging.add_changes(changed, keep_ignored=lambda path: path in patch)
        before = staging.write_tree()
        _apply_to_index(staging, patch, reverse)
        steps = _steps(staging, before)
        _must_fit([step.path for step in steps if step.mode is not None], InvalidPatchError)
        _must_be_free(staging, steps)
        return _write(staging, steps)


def restore(work: Work, commit: str, paths: list[bytes]) -> list[bytes]:
    """Write the files of `commit` at `paths`, files or directories, into the checkout; the paths that were written."""
    wanted = [_checked(path) for path in paths]
    with staged(work) as staging:
        listing = staging.run(
            "ls-tree", "-r", "-z", "--full-tree", commit, "--", *map(os.fsdecode, wanted)
        ).stdout
        lines = listing.split(b"\0")[:-1]
        entries = {line.partition(b"\t")[2]: line[:6].decode() for line in lines}
        for path in wanted:
            _must_match(path, entries, commit)
        _must_fit(entries, InvalidRequestError)
        staging.run("update-index", "-z", "--replace", "--index-info", stdin=listing)
        return _write(staging, [_Step(path, False, mode) for path, mode in entries.items()])


# -- applying ---------------------------------------------------------------------------------------------------------


def _apply_to_index(staging: Staging, patch: bytes, reverse: bool) -> None:
    """Patches of datasets may lack the newline at their end, which git calls corrupt."""
    if not patch.endswith(b"\n"):
        patch += b"\n"
    direction = ("--reverse",) if reverse else ()
    done = staging.run(
        "apply", "--cached", "--whitespace=nowarn", *direction, "-", stdin=patch, ok=(0, 1, 128)
    )
    if done.status:
        raise _refusal(done.stderr)


def _refusal(stderr: str) -> MirrordError:
    reasons = [
        line.removeprefix("error: ").removeprefix("fatal: ")
        for line in stderr.splitlines()
        if line.strip()
    ]
    reason = "; ".join(reasons[:5]) or "git does not say why"
    if _OUTSIDE.search(stderr):
        return PathOutsideCheckoutError(
            f"cannot apply the patch: {reason}", hint="a patch may only name files of the checkout"
        )
    if _INVALID.search(stderr):
        return InvalidPatchError(
            f"cannot read the patch: {reason}",
            hint="make it with `git diff --binary`",
            reasons=reasons[:50],
        )
    return PatchConflictError(
        f"cannot apply the patch: {reason}",
        hint="nothing was changed; see `mirrord diff` for what the checkout has",
        reasons=reasons[:50],
    )


def _steps(staging: Staging, before: str) -> list[_Step]:
    """What the index has differently from the tree `before`."""
    listed = staging.run("diff-index", "--cached", "-z", "--raw", "--no-renames", before)
    fields = listed.stdout.split(b"\0")[:-1]
    return [
        _step(meta.decode(), path) for meta, path in zip(fields[::2], fields[1::2], strict=True)
    ]


def _step(meta: str, path: bytes) -> _Step:
    _, mode, _, _, status = meta.split(" ")
    return _Step(path, status == "A", None if status == "D" else mode)


def _must_be_free(staging: Staging, steps: Iterable[_Step]) -> None:
    """Where the patch creates a file there must be nothing, of which git knows only what is tracked
    or not ignored, and directories in which the owner may make it.
    """
    replaced = {step.path for step in steps if step.mode is None}
    with staging.owner, Descent(staging.root, staging.owner) as reader:
        for path in (step.path for step in steps if step.is_new):
            seen = reader.find_stat(path)
            if seen and not (
                stat.S_ISDIR(seen.st_mode)
                and any(gone.startswith(path + b"/") for gone in replaced)
            ):
                raise _in_the_way(path)
            while not (seen := reader.find_stat(above := path.rpartition(b"/")[0])):
                path = above
            if not stat.S_ISDIR(seen.st_mode) and above not in replaced:
                raise _in_the_way(above)


def _in_the_way(path: bytes) -> PatchConflictError:
    return PatchConflictError(
        f"cannot apply the patch: {shown_path(path)} already exists in the checkout",
        hint="nothing was changed; remove it first",
    )


# -- restoring --------------------------------------------------------------------------------------------------------


def _checked(path: bytes) -> bytes:
    """A path of the tree; raises PathOutsideCheckoutError for any other."""
    trimmed = path.rstrip(b"/")
    parts = trimmed.split(b"/")
    if b"\0" in path or any(
        part in (b"", b".", b"..") or part.lower() == b".git" for part in parts
    ):
        raise PathOutsideCheckoutError(
            f"cannot restore {shown_path(path)}: it is not a path in the checkout",
            hint="name paths from the top of the repository",
        )
    return trimmed


def _must_match(path: bytes, entries: dict[bytes, str], commit: str) -> None:
    if path not in entries and not any(found.startswith(path + b"/") for found in entries):
        raise PathNotFoundError(
            f"cannot restore {shown_path(path)}: commit {commit} does not have it",
            hint="nothing was changed",
        )


# -- writing ----------------------------------------------------------------------------------------------------------


def _must_fit(paths: Iterable[bytes], error: type[MirrordError]) -> None:
    """git's index takes names of any length; a file system does not."""
    for path in paths:
        parts = path.split(b"/")
        if (
            len(path) > TREE_PATH_LIMIT_BYTES
            or len(parts) > TREE_DEPTH_LIMIT
            or max(map(len, parts)) > NAME_LIMIT_BYTES
        ):
            raise error(
                f"cannot write {shown_path(path[:100])}: a path may have {TREE_PATH_LIMIT_BYTES} bytes,"
                f" {TREE_DEPTH_LIMIT} directories, and {NAME_LIMIT_BYTES} bytes in each name",
                hint="nothing was changed",
            )


def _write(staging: Staging, steps: list[_Step]) -> list[bytes]:
    """Remove what goes, then write what comes, as the owner and as its new files."""
    out = staging.check_out([step.path for step in steps if step.mode is not None])
    with (
        opened(open_directory(out)) as top,
        Descent(top, ActingAs(None)) as source,
        TreeWriter(staging.root, staging.owner, mtime_ns=time.time_ns()) as writer,
    ):
        for step in sorted(steps, key=lambda step: step.mode is not None):
            try:
                _write_one(writer, source, step)
            except PermissionError as error:
                raise PermissionError(error.errno, error.strerror, step.path) from error
    return [step.path for step in steps]


def _write_one(writer: TreeWriter, source: Descent, step: _Step) -> None:
    if step.mode is None:
        writer.remove(step.path)
        writer.remove_empty_above(step.path)
        return
    writer.make_directories(step.path.rpartition(b"/")[0])
    if step.mode == "160000":
        writer.make_directory(step.path)
        return
    directory, name = source.locate(step.path)
    if step.mode == "120000":
        writer.write_symlink(step.path, os.readlink(name, dir_fd=directory))
    else:
        permissions = 0o755 if step.mode == "100755" else 0o644
        with opened(open_regular(directory, name)) as file:
            writer.copy_file(step.path, file, permissions=permissions)
