"""Does a repository hold, or lead to, anything outside the closure of a base commit?

Works on repositories that others made, and runs nothing of theirs: files are read here, git runs only in a private directory that
borrows their objects. Turned round: a list says what may be there and in which form (`control.py`, `objects.py`), and all else is
a leak. It judges the seal as of now: commits that an agent made itself are outside the closure too, and are said to be.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..model import CommitId, parse_commit
from ..protocol import SealLeak, SealReport
from .names import Named, judge_control, judge_work_tree, leak, resolve_head
from .objects import TIMEOUT, StoreContents, read_contents
from .repository import ForeignRepository, locate, read_bytes, walk

_EXAMPLES = 5
_TAG = re.compile(rb"object ([0-9a-f]{40})\ntype (commit|tag)\n")
_SQUASHED = re.compile(
    rb"tree ([0-9a-f]{40})\nauthor [^\n]{1,200}\ncommitter [^\n]{1,200}\n\n"
    rb"([^\n]{0,72}\n?|base of this task\n\nThe history before this commit is not part of the checkout\.\n)"
)
_WALK = (
    "-c",
    "core.commitGraph=false",
    "-c",
    "core.multiPackIndex=false",
    "rev-list",
    "--objects",
    "--no-object-names",
)


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
        judged = list(judge_control(repository, private))
        names = [each for each in judged if isinstance(each, Named)]
        names += [
            Named("commit-graph", file, oid.hex())
            for file, ids in contents.graphed.items()
            for oid in ids
        ]
        allowed = closure.ids | _tag_objects(private, names, closure)
        outside = contents.ids - allowed
        leaks = [
            *_head_leaks(head, commit, closure, contents),
            *_object_leaks(private, outside),
            *_closure_leaks(closure, contents, commit),
            *_name_leaks(names, allowed),
            *_gitlink_leaks(private, names, head),
            *(each for each in judged if isinstance(each, SealLeak)),
            *judge_work_tree(repository),
            *contents.leaks,
        ]
        return _report(repository, commit, head, contents, closure, leaks)


def _private_git(scratch: Path, repository: ForeignRepository) -> Path:
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
            run_git_sync(
                *_WALK,
                *options,
                tip,
                git_dir=git_dir,
                stdout_path=listing,
                timeout=TIMEOUT,
                doing=f"walk {tip}",
            )
            complete = not options
            break
        except (CorruptObjectError, GitFailedError):
            complete = False
    with listing.open("rb") as file:
        return _Closure({bytes.fromhex(line[:40].decode()) for line in file}, complete)


def _is_squashed(private: Path, git_dir: Path, head: str, base: CommitId) -> bool:
    """Whether `head` has the tree of `base`, no parents, no other header and no message that could hold more than a name."""
    try:
        made = run_git_sync(
            "cat-file", "commit", head, git_dir=private, doing=f"read {head}"
        ).stdout
        tree = run_git_sync(
            "rev-parse", "--verify", f"{base}^{{tree}}", git_dir=git_dir, doing=f"read {base}"
        ).stdout.strip()
    except (CorruptObjectError, GitFailedError):
        return False
    found = _SQUASHED.fullmatch(made)
    return found is not None and found[1] == tree


def _tag_objects(private: Path, names: Collection[Named], closure: _Closure) -> set[bytes]:
    """Tag objects that refs lead through on their way into the closure."""
    pending = {named.oid for named in names if named.kind == "ref"}
    pending = {oid for oid in pending if bytes.fromhex(oid) not in closure.ids}
    targets: dict[str, tuple[str, bytes]] = {}
    while pending:
        asked = "".join(f"{oid}\n" for oid in sorted(pending)).encode()
        try:
            found = _parse_tags(
                run_git_sync(
                    "cat-file", "--batch", git_dir=private, stdin=asked, doing="read tags"
                ).stdout
            )
        except (CorruptObjectError, GitFailedError):
            break
        targets |= found
        pending = {target for target, kind in found.values() if kind == b"tag"} - targets.keys()
    return {bytes.fromhex(oid) for oid in targets if _leads_inside(oid, targets, closure)}


def _parse_tags(output: bytes) -> dict[str, tuple[str, bytes]]:
    """Where each tag object of `cat-file --batch` points: id and type."""
    targets: dict[str, tuple[str, bytes]] = {}
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        words = output[at:end].split()
        at = end + 1
        if len(words) != 3:
            continue
        body = output[at : at + int(words[2])]
        at += len(body) + 1
        if words[1] == b"tag" and (found := _TAG.match(body)):
            targets[words[0].decode()] = (found[1].decode(), found[2])
    return targets


def _leads_inside(oid: str, targets: dict[str, tuple[str, bytes]], closure: _Closure) -> bool:
    seen = set[str]()
    while oid in targets and oid not in seen:
        seen.add(oid)
        oid = targets[oid][0]
    return bytes.fromhex(oid) in closure.ids


# -- leaks ------------------------------------------------------------------------------------------------------------


def _head_leaks(
    head: str | None, base: CommitId, closure: _Closure, contents: StoreContents
) -> list[SealLeak]:
    if head == base or closure.squashed:
        return []
    is_unknown = bytes.fromhex(base) not in contents.ids and not closure.ids
    hint = (
        "; it is not known here: name a mirror that has it (--mirror), as for a squashed checkout"
        if is_unknown
        else ""
    )
    return [
        SealLeak(kind="head", detail=f"HEAD is {head or 'unreadable or unborn'}, not {base}{hint}")
    ]


def _object_leaks(private: Path, outside: set[bytes]) -> list[SealLeak]:
    """One leak per type of object, with a few examples."""
    if not outside:
        return []
    asked = "".join(f"{oid.hex()}\n" for oid in sorted(outside)).encode()
    try:
        shown = run_git_sync(
            "cat-file",
            "--batch-check=%(objecttype) %(objectname)",
            git_dir=private,
            stdin=asked,
            doing="look at objects",
        ).lines
    except (CorruptObjectError, GitFailedError):
        shown = [f"object {oid.hex()}" for oid in sorted(outside)]
    by_type: dict[str, list[str]] = {}
    for line in shown:
        kind, _, oid = line.partition(" ")
        by_type.setdefault(
            kind if kind in {"commit", "tree", "blob", "tag"} else "object", []
        ).append(oid)
    return [
        SealLeak(
            kind="object",
            detail=f"{len(oids)} of type {kind} outside the closure, such as {', '.join(oids[:_EXAMPLES])}",
        )
        for kind, oids in sorted(by_type.items())
    ]


def _closure_leaks(closure: _Closure, contents: StoreContents, base: CommitId) -> list[SealLeak]:
    missing = closure.ids - contents.ids
    if closure.complete and not missing:
        return []
    count = f"{len(missing)} objects" if missing else "an object"
    return [
        SealLeak(kind="incomplete", detail=f"{count} of the closure of {base} cannot be read here")
    ]


def _name_leaks(names: Collection[Named], allowed: set[bytes]) -> list[SealLeak]:
    """Names of objects outside, one leak per place; replace refs and a stash wherever they point."""
    leaks: dict[tuple[str, str], list[str]] = {}
    for named in names:
        if named.kind == "gitlink":
            continue
        if named.kind in {"replace-ref", "stash"} or bytes.fromhex(named.oid) not in allowed:
            leaks.setdefault((named.kind, named.where), []).append(named.oid)
    return [
        SealLeak(kind=kind, detail=f"{where} names {', '.join(dict.fromkeys(oids[:_EXAMPLES]))}")
        for (kind, where), oids in sorted(leaks.items())
    ]


def _gitlink_leaks(private: Path, names: Collection[Named], head: str | None) -> Iterator[SealLeak]:
    """Submodules in the index name commits of other repositories: only those that the commit itself names."""
    found = {(named.where, named.oid) for named in names if named.kind == "gitlink"}
    if not found or head is None:
        return
    rows = run_git_sync(
        "ls-tree", "-r", "-z", head, git_dir=private, ok=range(256), doing=f"list {head}"
    ).stdout.split(b"\0")
    facts = (row.partition(b"\t") for row in rows if row.startswith(b"160000 "))
    known = {
        (path.decode("utf-8", "surrogateescape"), row.split()[2].decode()) for row, _, path in facts
    }
    yield from (
        leak("index", f"index names commit {oid} of submodule {path}")
        for path, oid in sorted(found - known)
    )


# -- report -----------------------------------------------------------------------------------------------------------


def _report(
    repository: ForeignRepository,
    base: CommitId,
    head: str | None,
    contents: StoreContents,
    closure: _Closure,
    leaks: list[SealLeak],
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
            "every other file, by its exact form; other repositories in the working tree",
        ],
    )


def _digest(file: Path) -> str:
    content = read_bytes(file)
    return "absent" if content is None else hashlib.sha256(content).hexdigest()


def _control_digest(repository: ForeignRepository) -> str:
    """One hash over the names and bytes of every file of the git directory outside its object store and index."""
    digest = hashlib.sha256()
    for found in sorted(
        walk(repository.git_dir, skip=frozenset({"objects"})), key=lambda found: found.where
    ):
        if found.where != "index":
            digest.update(
                f"{found.where}\0{_digest(found.path)}\n".encode("utf-8", "surrogateescape")
            )
    return digest.hexdigest()
