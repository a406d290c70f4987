"""Patches into a checkout, and files of other commits into it.

git works in a private staging on objects and copies only; the checkout itself is read and written
through descriptors, and only once everything is known to fit. A crash while writing leaves files of
the patch, which `diff` shows and `reset` removes. The checkout's index is not touched: git sees by
stat data which files are new. Sync; runs in workers.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

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
from ..files.reader import TreeReader
from ..files.writer import TreeWriter
from .staging import Staging, staged
from .worktree import PatchJob

_OUTSIDE = re.compile(r"invalid path|beyond a symbolic link|outside repository")
_INVALID = re.compile(
    r"corrupt (?:binary )?patch|No valid patches|unrecognized (?:input|binary patch)"
    r"|fragment without header|header lacks filename|without full index line"
    r"|inconsistent (?:new |old )?(?:filename|mode)|bad git-diff|invalid mode on line"
)


class _Step(NamedTuple):
    """One path that the result has differently. `mode` is git's, None where the path is removed."""

    path: bytes
    is_new: bool
    mode: str | None


def apply(
    job: PatchJob, list_changed: Callable[[], list[bytes]], patch: bytes | Path, reverse: bool
) -> list[bytes]:
    """Apply a patch to the files as they are; the paths that it wrote or removed.

    Where it does not fit, nothing changes.
    """
    patch = patch.read_bytes() if isinstance(patch, Path) else patch
    with staged(job) as staging:
        staging.add_changes(list_changed(), keep_ignored=lambda path: path in patch)
        before = staging.write_tree()
        if not patch.endswith(b"\n"):  # as in datasets; git calls it corrupt
            patch += b"\n"
        command = ("apply", "--cached", "--whitespace=nowarn", *(("--reverse",) if reverse else ()))
        done = staging.run(*command, "-", stdin=patch, ok=(0, 1, 128))
        if done.status:
            raise _refusal(done.stderr)
        listed = staging.run("diff-index", "--cached", "-z", "--raw", "--no-renames", before)
        fields = listed.stdout.split(b"\0")[:-1]
        steps = list[_Step]()
        for meta, path in zip(fields[::2], fields[1::2], strict=True):
            _, mode, _, _, status = meta.decode().split(" ")
            steps.append(_Step(path, status == "A", None if status == "D" else mode))
        _must_fit([step.path for step in steps if step.mode is not None], InvalidPatchError)
        _must_be_free(staging, steps)
        return _write(staging, steps)


def restore(job: PatchJob, commit: str, paths: list[bytes]) -> list[bytes]:
    """Write the files of `commit` at `paths`, files or directories, into the checkout.

    Answers the paths that were written.
    """
    wanted = [_checked(path) for path in paths]
    with staged(job) as staging:
        command = ("ls-tree", "-r", "-z", "--full-tree", commit, "--", *map(os.fsdecode, wanted))
        listing = staging.run(*command).stdout
        lines = listing.split(b"\0")[:-1]
        entries = {line.partition(b"\t")[2]: line[:6].decode() for line in lines}
        for path in wanted:
            if path not in entries and not any(at.startswith(path + b"/") for at in entries):
                raise PathNotFoundError(
                    f"cannot restore {shown_path(path)}: commit {commit} does not have it",
                    hint="nothing was changed",
                )
        _must_fit(entries, InvalidRequestError)
        staging.run("update-index", "-z", "--replace", "--index-info", stdin=listing)
        return _write(staging, [_Step(path, False, mode) for path, mode in entries.items()])


def _refusal(stderr: str) -> MirrordError:
    lines = [line for line in stderr.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ").removeprefix("fatal: ") for line in lines]
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


def _must_be_free(staging: Staging, steps: Iterable[_Step]) -> None:
    """Refuse to create a file where something is, or below what is no directory.

    git knows only what is tracked or not ignored.
    """
    replaced = {step.path for step in steps if step.mode is None}
    with staging.owner, TreeReader(staging.root, staging.owner) as reader:
        for path in (step.path for step in steps if step.is_new):
            taken, seen = path, reader.find_stat(path)
            if not seen or (
                stat.S_ISDIR(seen.st_mode) and any(at.startswith(path + b"/") for at in replaced)
            ):
                while not (seen := reader.find_stat(taken := taken.rpartition(b"/")[0])):
                    pass
                if stat.S_ISDIR(seen.st_mode) or taken in replaced:
                    continue
            raise PatchConflictError(
                f"cannot apply the patch: {shown_path(taken)} already exists in the checkout",
                hint="nothing was changed; remove it first",
            )


def _checked(path: bytes) -> bytes:
    """A path of the tree; raises PathOutsideCheckoutError for any other."""
    trimmed = path.rstrip(b"/")
    bad = (b"", b".", b"..", b".git")
    if b"\0" in path or any(part.lower() in bad for part in trimmed.split(b"/")):
        raise PathOutsideCheckoutError(
            f"cannot restore {shown_path(path)}: it is not a path in the checkout",
            hint="name paths from the top of the repository",
        )
    return trimmed


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
                f"cannot write {shown_path(path[:100])}: a path may have {TREE_PATH_LIMIT_BYTES}"
                f" bytes, {TREE_DEPTH_LIMIT} directories, {NAME_LIMIT_BYTES} bytes in each name",
                hint="nothing was changed",
            )


def _write(staging: Staging, steps: list[_Step]) -> list[bytes]:
    """Remove what goes, then write what comes, as the owner and as its new files."""
    out = staging.check_out([step.path for step in steps if step.mode is not None])
    with (
        opened(open_directory(out)) as top,
        TreeReader(top, ActingAs(None)) as source,
        TreeWriter(staging.root, staging.owner, mtime_ns=time.time_ns()) as writer,
    ):
        for path, _, mode in sorted(steps, key=lambda step: step.mode is not None):
            try:
                if mode is None:
                    writer.remove(path)
                    writer.remove_empty_above(path)
                    continue
                writer.make_directories(path.rpartition(b"/")[0])
                if mode == "160000":
                    writer.make_directory(path)
                    continue
                directory, name = source.locate(path)
                if mode == "120000":
                    writer.write_symlink(path, os.readlink(name, dir_fd=directory))
                    continue
                with opened(open_regular(directory, name)) as file:
                    permissions = 0o755 if mode == "100755" else 0o644
                    writer.copy_file(path, file, permissions=permissions)
            except PermissionError as error:
                raise PermissionError(error.errno, error.strerror, path) from error
    return [step.path for step in steps]
