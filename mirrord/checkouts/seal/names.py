"""Everything in a repository that names an object, and everything that more objects could come from.

Answers with names only; whether a named object is inside the seal is judged elsewhere. Configuration is read by git as a plain
file: nothing it includes is followed, nothing it says is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import CorruptObjectError, GitFailedError
from ...git import commitgraph
from ...git.command import run_git_sync
from ...model import shown
from ...protocol import SealLeak
from .repository import Repository, iter_files, read_bytes, read_start, read_text

_OID = re.compile(r"\b[0-9a-f]{40}\b")
_SYMREF_DEPTH = 5
_ARCHIVES = (
    b"PACK\0\0\0",
    b"# v2 git bundle\n",
    b"# v3 git bundle\n",
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"PK\3\4",
    b"\x28\xb5\x2f\xfd",
)
_NO_NAMES = {"index", "config", "config.worktree", "description", "COMMIT_EDITMSG", "packed-refs", "HEAD", "commondir", "gitdir"}
_ZERO = "0" * 40


@dataclass(frozen=True, slots=True)
class Named:
    """One place that names an object. `kind` is the leak it would be."""

    kind: str
    where: str
    oid: str


def resolve_head(repository: Repository) -> str | None:
    """The commit that HEAD names, itself or through a branch."""
    text = read_text(repository.git_dir / "HEAD") or ""
    for _ in range(_SYMREF_DEPTH):
        if not text.startswith("ref:"):
            found = _OID.match(text.strip())
            return found[0] if found else None
        ref = text.removeprefix("ref:").strip()
        text = _ref_value(repository, ref)
    return None


def _ref_value(repository: Repository, ref: str) -> str:
    if ".." in ref:
        return ""
    for directory in repository.directories:
        if (value := read_text(directory / ref)) is not None:
            return value
    return next((named.oid for named in _packed(repository.common_dir) if named.where == ref), "")


def iter_names(repository: Repository) -> Iterator[Named]:
    """Every object named by a ref, a reflog, a control file or a commit-graph."""
    for directory in repository.directories:
        yield from _loose_refs(directory)
        yield from _packed(directory)
        yield from _reflogs(directory)
        yield from _control_files(repository, directory)
    for store in repository.stores:
        for file in commitgraph.files(store):
            yield from (Named("commit-graph", f"objects/{file.relative_to(store)}", oid.hex()) for oid in _graphed(file))


def _loose_refs(directory: Path) -> Iterator[Named]:
    for file in iter_files(directory / "refs"):
        ref = file.relative_to(directory).as_posix()
        for oid in _OID.findall(read_text(file) or ""):
            yield Named(ref_kind(ref), ref, oid)


def _packed(directory: Path) -> Iterator[Named]:
    for line in (read_text(directory / "packed-refs") or "").splitlines():
        oid, _, ref = line.partition(" ")
        if _OID.fullmatch(oid) and ref:
            yield Named(ref_kind(ref), ref, oid)


def ref_kind(ref: str) -> str:
    if ref.startswith("refs/replace/"):
        return "replace-ref"
    return "stash" if ref == "refs/stash" else "ref"


def _reflogs(directory: Path) -> Iterator[Named]:
    for file in iter_files(directory / "logs"):
        where = file.relative_to(directory).as_posix()
        for line in (read_text(file) or "").splitlines():
            yield from (Named("reflog", where, oid) for oid in line.split(" ")[:2] if _OID.fullmatch(oid) and oid != _ZERO)


def _control_files(repository: Repository, directory: Path) -> Iterator[Named]:
    """FETCH_HEAD, ORIG_HEAD, rebase-merge/…, and whatever else a name was written into."""
    skipped = frozenset(directory / name for name in ("refs", "logs", "hooks", "modules", "objects")) | {repository.common_dir}
    for file in iter_files(directory, skip=skipped):
        where = file.relative_to(directory).as_posix()
        if where in _NO_NAMES:
            continue
        kind = {"shallow": "shallow", "info/grafts": "graft"}.get(where, "pseudo-ref")
        yield from (Named(kind, where, oid) for oid in sorted(set(_OID.findall(read_text(file) or ""))) if oid != _ZERO)


def _graphed(file: Path) -> list[bytes]:
    try:
        return commitgraph.commit_ids(file)
    except (CorruptObjectError, OSError):
        return [b"\xff" * 20]  # nobody can say what is in it, so it is taken to name what is outside


# -- where more could come from ---------------------------------------------------------------------------------------


def iter_sources(repository: Repository, private: Path) -> Iterator[SealLeak]:
    """Leaks that need no object: remotes, alternates, another repository's store, grafts, hidden archives."""
    if repository.git_dir != repository.common_dir:
        yield _leak("shared-store", f"this is a linked worktree: its objects are those of {repository.common_dir.resolve()}")
    if (repository.common_dir / "objects").is_symlink():
        yield _leak("shared-store", "objects is a symbolic link")
    yield from (_leak("alternate", f"objects are also read from {line}") for line in repository.alternates)
    for directory in repository.directories:
        yield from _configured(directory, private)
        yield from _files(directory)
        yield from _archives(directory)


def _configured(directory: Path, private: Path) -> Iterator[SealLeak]:
    for name in ("config", "config.worktree"):
        content = read_bytes(directory / name)
        if content is None:
            continue
        try:
            keys = run_git_sync(
                "config",
                "--file=-",
                "--no-includes",
                "--list",
                "-z",
                "--name-only",
                stdin=content,
                git_dir=private,
                doing=f"read {name}",
            )
        except GitFailedError as error:
            yield _leak("unreadable", error.message)
            continue
        yield from filter(None, map(_configured_leak, sorted(set(keys.stdout.decode("utf-8", "replace").split("\0")))))


def _configured_leak(key: str) -> SealLeak | None:
    kinds = {
        "remote.": "remote",
        "url.": "remote",
        "include.": "include",
        "includeif.": "include",
        "extensions.partialclone": "partial-clone",
        "extensions.refstorage": "unreadable",
        "extensions.objectformat": "unreadable",
    }
    kind = next((kind for prefix, kind in kinds.items() if key.startswith(prefix)), None)
    return _leak(kind, f"configured: {shown(key)}") if kind else None


def _files(directory: Path) -> Iterator[SealLeak]:
    for name, kind in (("shallow", "shallow"), ("info/grafts", "graft"), ("reftable", "unreadable")):
        if (directory / name).exists():
            yield _leak(kind, f"{name} is there")
    for name in ("remotes", "branches"):
        for file in iter_files(directory / name):
            yield _leak("remote", f"{file.relative_to(directory)} is there")
    for name, kind in (("modules", "submodule"), ("worktrees", "shared-store")):
        if any(iter_files(directory / name)):
            yield _leak(kind, f"{name} holds other repositories' state")


def _archives(directory: Path) -> Iterator[SealLeak]:
    """Packs, bundles and compressed files outside the object store."""
    for file in iter_files(directory, skip=frozenset({directory / "objects"})):
        if read_start(file).startswith(_ARCHIVES):
            yield _leak("stray-file", f"{file.relative_to(directory)} is a pack, a bundle or an archive")


def _leak(kind: str, detail: str) -> SealLeak:
    return SealLeak(kind=kind, detail=detail)
