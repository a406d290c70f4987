"""A checkout's changes as git prints them, in one call of a worker and mostly without a git.

What libgit2 cannot print like git (`render.py` names the cases) one `git diff-tree` prints, between
the base tree and one that is written into a private object directory beside the mirror's. A long
answer goes to a file as it is made. Sync; runs in workers.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from ...errors import DiffTooLargeError
from ...git.command import run_git_sync
from ...git.objects.trees import ScratchObjects
from ...host.files import full_disk_named, write_all
from ...host.trash import remove_tree
from ...model import DiffFormat
from .base import Change
from .collect import collect
from .render import NeedsGit, Renderer, pair_up
from .worktree import PatchJob, Worktree, open_worktree

PATCH_LIMIT_BYTES = 256 * 1024**2
SPOOLED_BYTES = 1024**2
_TIMEOUT = timedelta(minutes=4)
_OPTIONS = {
    DiffFormat.PATCH: ("-p", "--binary", "--full-index"),
    DiffFormat.STAT: ("--stat",),
    DiffFormat.NAME_STATUS: ("--name-status",),
}


class Diff(NamedTuple):
    """`content` is None where it is in the spool; `reason` is why git made it, if it did."""

    content: bytes | None
    reason: str | None
    files: int


def diff(
    job: PatchJob, list_changed: Callable[[], list[bytes]], form: DiffFormat, spool: Path
) -> Diff:
    """What changed from the base commit to the checkout as `git add --all` would see it.

    A long answer is left in `spool`.
    """
    with open_worktree(job) as worktree:
        changes = collect(worktree, list_changed())
        reason = None
        try:
            content = _spooled(_rendered(worktree, changes, form), spool)
        except NeedsGit as error:
            reason = error.reason
            with full_disk_named("a private copy of the changes"):
                content = _by_git(job, worktree, changes, form, spool)
        return Diff(content, reason, len(changes))


def _rendered(worktree: Worktree, changes: list[Change], form: DiffFormat) -> Iterator[bytes]:
    pairs = pair_up(worktree.objects, changes)
    renderer = Renderer(worktree.objects, worktree.attributes)
    if form is DiffFormat.STAT:
        return iter([renderer.stat(pairs)])
    return renderer.patch(pairs) if form is DiffFormat.PATCH else renderer.name_status(pairs)


def _spooled(pieces: Iterable[bytes], spool: Path) -> bytes | None:
    """The pieces as one, or None where they are long and in the file."""
    held, size, fd = bytearray(), 0, -1
    try:
        for piece in pieces:
            size += len(piece)
            if size > PATCH_LIMIT_BYTES:
                raise _too_large()
            held += piece
            if len(held) > SPOOLED_BYTES:
                if fd < 0:
                    fd = os.open(spool, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                write_all(fd, bytes(held))
                held.clear()
        if fd < 0:
            return bytes(held)
        write_all(fd, bytes(held))
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def _by_git(
    job: PatchJob, worktree: Worktree, changes: list[Change], form: DiffFormat, spool: Path
) -> bytes | None:
    remove_tree(job.scratch)
    try:
        rules = job.scratch / "rules"
        rules.mkdir(parents=True, mode=0o700)
        scratch = ScratchObjects(job.scratch / "objects")
        edits = {
            path: None if mode is None else (mode, scratch.write_blob(data))
            for path, mode, data, _ in changes
        }
        for directory, content in worktree.find_attribute_files(edits):
            above = rules / os.fsdecode(directory)
            above.mkdir(parents=True, exist_ok=True)
            (above / ".gitattributes").write_bytes(content)
        run_git_sync(
            "diff-tree", "-r", *_OPTIONS[form], "-M", "--no-ext-diff", "--no-textconv",
            "--src-prefix=a/", "--dst-prefix=b/",
            job.tree, scratch.write_tree(worktree.base, edits),
            git_dir=job.mirror, work_tree=rules, quarantine_objects=job.scratch / "objects",
            stdout_path=spool, timeout=_TIMEOUT,
        )  # fmt: skip
    finally:
        remove_tree(job.scratch)
    size = spool.stat().st_size
    if size > PATCH_LIMIT_BYTES:
        raise _too_large()
    if size > SPOOLED_BYTES:
        return None
    content = spool.read_bytes()
    spool.unlink()
    return content


def _too_large() -> DiffTooLargeError:
    return DiffTooLargeError(
        f"cannot give the diff: it is larger than {PATCH_LIMIT_BYTES >> 20} MiB",
        hint="remove large files, or let a .gitignore name them",
    )
