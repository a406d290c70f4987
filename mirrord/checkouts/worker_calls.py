"""What the daemon asks its workers to do with checkouts: one function each, that loads the doing module when it runs there.

Owns the border: this module imports nothing that loads libgit2, so the daemon can name these functions and stay small. Each runs
in a worker process; arguments and results cross by pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from ..protocol import Proof
from .leases import Directories

DIFF_TIMEOUT = timedelta(seconds=60)
"""For what a client does to one checkout: it may have made the tree so that git takes for ever."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pooled checkout is and what it is made from.

    `store` is the sealed `.git`; None links to the mirror. What shall go is put into `grave`, for the caller to remove.
    """

    directory: Path
    private: Path
    mirror: Path
    store: Path | None
    head: str
    owner: tuple[int, int]
    grave: Path

    @property
    def tree(self) -> Path:
        return self.directory / "tree"

    @property
    def manifest(self) -> Path:
        return self.private / "manifest"


@dataclass(frozen=True, slots=True)
class Work:
    """A checkout as patches see it: `root` is the tree, `mirror` has the objects, `scratch` is a private directory of its own."""

    root: Path
    mirror: Path
    commit: str
    owner: tuple[int, int]
    scratch: Path


def make_checkout(
    place: Place, commit: str, tree: str, warm: Directories | None
) -> tuple[str, dict[str, float]]:
    made: tuple[str, dict[str, float]] = _module("pool.worktree").make(place, commit, tree, warm)
    return made


def reset_checkout(place: Place, commit: str, tree: str) -> Proof:
    proof: Proof = _module("pool.worktree").make_clean(place, commit, tree)
    return proof


def scan_checkout(place: Place) -> list[bytes]:
    paths: list[bytes] = _module("pool.worktree").changed_paths(place)
    return paths


def list_overlay_changes(
    root: Path,
    upper: Path,
    layers: tuple[Path, ...],
    mirror: Path,
    tree: str,
    owner: tuple[int, int],
) -> list[bytes]:
    paths: list[bytes] = _module("overlay.changes").changed_paths(
        root, upper, layers, mirror, tree, owner
    )
    return paths


def diff_checkout(work: Work, changed: list[bytes], spool: Path) -> bytes | None:
    """A long patch crosses as the file `spool`, and not by pickle."""
    patch: bytes | None = _module("patches.diff").diff(work, changed, spool)
    return patch


def apply_patch(
    work: Work, changed: list[bytes], patch: bytes | Path, reverse: bool
) -> list[bytes]:
    patch = patch.read_bytes() if isinstance(patch, Path) else patch
    written: list[bytes] = _module("patches.apply").apply(work, changed, patch, reverse=reverse)
    return written


def restore_paths(work: Work, commit: str, paths: list[bytes]) -> list[bytes]:
    written: list[bytes] = _module("patches.apply").restore(work, commit, paths)
    return written


def _module(name: str) -> Any:
    return import_module(f"{__package__}.{name}")
