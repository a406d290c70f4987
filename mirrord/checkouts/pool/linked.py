"""Linked checkouts: a git worktree of the mirror itself, for trusted callers who may see all of it.

Owns `worktrees/mirrord-<id>` in the mirror and the `.git` file that names it. Written by hand: libgit2's `add_worktree` always
makes a branch in the mirror, and a killed `git worktree add` leaves a lock. A crash leaves an administrative directory whose
checkout is gone; `prune` removes it.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...host.credentials import ActingAs
from ...host.files import opened
from ..files.manifest import Manifest, blob_id
from ..files.scan import open_top
from ..files.writer import TreeWriter
from ..graves import Graves
from .dotgit import git_file

_PREFIX = "mirrord-"
_REASON = "held by a checkout of mirrord"


def link(
    directory: Path, mirror: Path, manifest: Manifest, index: bytes, graves: Graves
) -> Manifest:
    """Make `directory/tree` a worktree of `mirror` with a detached HEAD, whatever its `.git` was."""
    admin = _admin(mirror, directory.name)
    shutil.rmtree(admin, ignore_errors=True)
    admin.mkdir(parents=True)
    (admin / "locked").write_text(
        f"{_REASON}\n"
    )  # first: `git worktree prune` leaves it alone from now on
    (admin / "commondir").write_text("../..\n")
    (admin / "gitdir").write_text(f"{directory}/tree/.git\n")
    (admin / "HEAD").write_text(f"{manifest.commit}\n")
    (admin / "index").write_bytes(index)
    owner, now_ns = ActingAs(manifest.owner), time.time_ns()
    with (
        opened(open_top(directory / "tree")) as root,
        TreeWriter(root, owner, mtime_ns=now_ns, graves=graves) as writer,
    ):
        writer.remove(b".git")
        name = f"gitdir: {admin}\n".encode()
        control = {b".git": git_file(blob_id(name), writer.write_file(b".git", name))}
        files = manifest.files | {b"": manifest.files[b""].with_stat(writer.get_stat(b""))}
    return replace(manifest, files=files, control=control, index=index[-20:].hex())


def unlink(mirror: Path, checkout: str) -> None:
    """Forget the worktree of a checkout; idempotent. Raises OSError where the disk does not let it go."""
    with suppress(FileNotFoundError):
        shutil.rmtree(_admin(mirror, checkout))


def prune(mirrors: Path) -> int:
    """Forget the worktrees in all mirrors whose checkout is gone; answers how many."""
    dead = [admin for admin in mirrors.glob(f"*/worktrees/{_PREFIX}*") if not _is_alive(admin)]
    for admin in dead:
        shutil.rmtree(admin, ignore_errors=True)
    return len(dead)


def _admin(mirror: Path, checkout: str) -> Path:
    return mirror / "worktrees" / f"{_PREFIX}{checkout}"


def _is_alive(admin: Path) -> bool:
    try:
        return Path((admin / "gitdir").read_text().strip()).parent.parent.exists()
    except OSError:
        return False
