"""Judge any repository: does it hold, or lead to, anything outside the closure of a base commit?

Works with no daemon, on repositories that others made, and runs nothing of theirs: files are read here, git runs only in a
private directory that borrows their objects. It judges the seal as of now: commits that an agent made itself are outside the
closure too, and are said to be.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ...errors import CorruptObjectError, GitFailedError
from ...git.command import run_git_sync
from ...model import CommitId, parse_commit
from ...protocol import SealLeak, SealReport
from .contents import TIMEOUT, Contents, read_contents
from .names import Named, iter_names, iter_sources, resolve_head
from .repository import Repository, iter_files, locate, read_bytes
from .tags import parse_targets

__all__ = ["verify_seal"]

_EXAMPLES = 5
_WALK = ("-c", "core.commitGraph=false", "-c", "core.multiPackIndex=false", "rev-list", "--objects", "--no-object-names")


@dataclass(frozen=True, slots=True)
class _Closure:
    """`complete` is false where an object of it is missing; `squashed` where it is one commit made from the base's tree."""

    ids: set[bytes]
    complete: bool
    squashed: bool = False


def verify_seal(path: Path, base: str, mirror: Path | None = None) -> SealReport:
    """Judge the repository at `path` against `base`; `mirror` is where the closure is read from when not from itself.

    Raises PathNotFoundError when there is no repository, InvalidCommitError.
    """
    commit = parse_commit(base)
    repository = locate(path)
    with tempfile.TemporaryDirectory(prefix="mirrord-seal-") as scratch:
        private = _private_git(Path(scratch), repository)
        contents = read_contents(repository, private)
        head = resolve_head(repository)
        closure = _closure(private, mirror, commit, head)
        names = list(iter_names(repository))
        allowed = closure.ids | _tag_objects(private, names, closure)
        outside = contents.ids - allowed
        leaks = [
            *_head_leaks(head, commit, closure, contents),
            *_object_leaks(private, outside),
            *_closure_leaks(closure, contents, commit),
            *_name_leaks(names, allowed),
            *iter_sources(repository, private),
            *contents.leaks,
        ]
        return _report(repository, commit, head, contents, closure, leaks)


def _private_git(scratch: Path, repository: Repository) -> Path:
    """A git directory of ours whose alternates are the stores of theirs, through names that need no quoting."""
    (scratch / "objects/info").mkdir(parents=True)
    (scratch / "refs").mkdir()
    (scratch / "HEAD").write_text("ref: refs/heads/none\n")
    links = [scratch / f"store{number}" for number in range(len(repository.stores))]
    for link, store in zip(links, repository.stores, strict=True):
        link.symlink_to(store.resolve())
    (scratch / "objects/info/alternates").write_text("".join(f"{link}\n" for link in links))
    return scratch


def _closure(private: Path, mirror: Path | None, base: CommitId, head: str | None) -> _Closure:
    git_dir = mirror or private
    if head is not None and head != base and _is_squashed(private, git_dir, head, base):
        walked = _walk(private, private, head)
        return _Closure(walked.ids, walked.complete, squashed=True)
    return _walk(git_dir, private, base)


def _walk(git_dir: Path, private: Path, tip: str) -> _Closure:
    """Every object that `tip` leads to; where one is missing, what can still be reached."""
    listing = private / "closure"
    for options in ((), ("--missing=allow-any",)):
        try:
            run_git_sync(*_WALK, *options, tip, git_dir=git_dir, stdout_path=listing, timeout=TIMEOUT, doing=f"walk {tip}")
            complete = not options
            break
        except (CorruptObjectError, GitFailedError):
            complete = False
    with listing.open("rb") as file:
        return _Closure({bytes.fromhex(line[:40].decode()) for line in file}, complete)


def _is_squashed(private: Path, git_dir: Path, head: str, base: CommitId) -> bool:
    """Whether `head` is a commit without parents that has the tree of `base`."""
    try:
        made = run_git_sync("cat-file", "commit", head, git_dir=private, doing=f"read {head}").stdout
        tree = run_git_sync("rev-parse", "--verify", f"{base}^{{tree}}", git_dir=git_dir, doing=f"read {base}").stdout.strip()
    except (CorruptObjectError, GitFailedError):
        return False
    header = made.partition(b"\n\n")[0]
    return header.startswith(b"tree " + tree + b"\n") and b"\nparent " not in header


def _tag_objects(private: Path, names: Collection[Named], closure: _Closure) -> set[bytes]:
    """Tag objects that refs lead through on their way into the closure."""
    pending = {named.oid for named in names if named.kind == "ref"}
    pending = {oid for oid in pending if bytes.fromhex(oid) not in closure.ids}
    targets: dict[str, tuple[str, bytes]] = {}
    while pending:
        asked = "".join(f"{oid}\n" for oid in sorted(pending)).encode()
        try:
            found = parse_targets(run_git_sync("cat-file", "--batch", git_dir=private, stdin=asked, doing="read tags").stdout)
        except (CorruptObjectError, GitFailedError):
            break
        targets |= found
        pending = {target for target, kind in found.values() if kind == b"tag"} - targets.keys()
    return {bytes.fromhex(oid) for oid in targets if _leads_inside(oid, targets, closure)}


def _leads_inside(oid: str, targets: dict[str, tuple[str, bytes]], closure: _Closure) -> bool:
    seen = set[str]()
    while oid in targets and oid not in seen:
        seen.add(oid)
        oid = targets[oid][0]
    return bytes.fromhex(oid) in closure.ids


# -- leaks ------------------------------------------------------------------------------------------------------------


def _head_leaks(head: str | None, base: CommitId, closure: _Closure, contents: Contents) -> list[SealLeak]:
    if head == base or closure.squashed:
        return []
    is_unknown = bytes.fromhex(base) not in contents.ids and not closure.ids
    hint = "; it is not known here: name a mirror that has it (--mirror), as for a squashed checkout" if is_unknown else ""
    return [SealLeak(kind="head", detail=f"HEAD is {head or 'unreadable or unborn'}, not {base}{hint}")]


def _object_leaks(private: Path, outside: set[bytes]) -> list[SealLeak]:
    """One leak per type of object, with a few examples."""
    if not outside:
        return []
    asked = "".join(f"{oid.hex()}\n" for oid in sorted(outside)).encode()
    try:
        shown = run_git_sync(
            "cat-file", "--batch-check=%(objecttype) %(objectname)", git_dir=private, stdin=asked, doing="look at objects"
        ).lines
    except (CorruptObjectError, GitFailedError):
        shown = [f"object {oid.hex()}" for oid in sorted(outside)]
    by_type: dict[str, list[str]] = {}
    for line in shown:
        kind, _, oid = line.partition(" ")
        by_type.setdefault(kind if kind in {"commit", "tree", "blob", "tag"} else "object", []).append(oid)
    return [
        SealLeak(kind="object", detail=f"{len(oids)} of type {kind} outside the closure, such as {', '.join(oids[:_EXAMPLES])}")
        for kind, oids in sorted(by_type.items())
    ]


def _closure_leaks(closure: _Closure, contents: Contents, base: CommitId) -> list[SealLeak]:
    missing = closure.ids - contents.ids
    if closure.complete and not missing:
        return []
    count = f"{len(missing)} objects" if missing else "an object"
    return [SealLeak(kind="incomplete", detail=f"{count} of the closure of {base} cannot be read here")]


def _name_leaks(names: Collection[Named], allowed: set[bytes]) -> list[SealLeak]:
    """Names of objects outside, one leak per place; replace refs and a stash wherever they point."""
    leaks: dict[tuple[str, str], list[str]] = {}
    for named in names:
        if named.kind in {"replace-ref", "stash"} or bytes.fromhex(named.oid) not in allowed:
            leaks.setdefault((named.kind, named.where), []).append(named.oid)
    return [
        SealLeak(kind=kind, detail=f"{where} names {', '.join(dict.fromkeys(oids[:_EXAMPLES]))}")
        for (kind, where), oids in sorted(leaks.items())
    ]


# -- report -----------------------------------------------------------------------------------------------------------


def _report(
    repository: Repository, base: CommitId, head: str | None, contents: Contents, closure: _Closure, leaks: list[SealLeak]
) -> SealReport:
    history = "squashed" if closure.squashed else "sealed"
    return SealReport(
        path=str(repository.path),
        base=base,
        sealed=not leaks,
        head=head,
        objects_present=len(contents.ids),
        objects_in_closure=len(closure.ids),
        leaks=leaks,
        checked=[
            f"HEAD {head}",
            f"history {history}",
            f"objects {len(contents.ids)} hashed, of {len(contents.packs)} packs and loose files",
            f"index {_digest(repository.git_dir / 'index')}",
            f"control files {_control_digest(repository)}",
            "refs, reflogs, remotes, alternates, grafts, replace refs, submodules, stray packs, commit-graphs",
        ],
    )


def _digest(file: Path) -> str:
    content = read_bytes(file)
    return "absent" if content is None else hashlib.sha256(content).hexdigest()


def _control_digest(repository: Repository) -> str:
    """One hash over the names and bytes of every file of the git directory outside its object store and index."""
    digest = hashlib.sha256()
    skipped = frozenset({repository.git_dir / "objects"})
    for file in sorted(iter_files(repository.git_dir, skip=skipped)):
        if file.name != "index":
            digest.update(f"{file.relative_to(repository.git_dir)}\0{_digest(file)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
