"""Verify that a repository neither has nor leads to anything outside a base commit's closure.

Works on untrusted repositories and executes nothing from them: files are read here, and git runs
only in a private directory that borrows their objects. Allowed files and their exact forms are
listed (`names.py`, `repository.py`); everything else is a leak. Commits that an agent made are
outside the closure too.
"""

import hashlib
import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..git import WITHOUT_PARENTS
from ..git.batch import read_objects_sync
from ..git.command import run_git_sync
from ..model import CommitId, parse_commit, shown
from ..protocol import SealLeak, SealReport
from ..quoting import encode_name
from .lfs import lfs_leaks
from .modules import ModuleStore, find_modules, gitlinks_of, has_own_work_tree
from .names import Named, judge_control, judge_work_tree, leak, resolve_head
from .repository import (
    ForeignRepository,
    borrow,
    locate,
    read_bytes,
    read_closure,
    read_contents,
    walk,
)

# ids in one finding, beside the count of all
_EXAMPLES = 5
_TYPES = {"commit", "tree", "blob", "tag"}
_TAG = re.compile(rb"object ([0-9a-f]{40})\ntype (commit|tag)\n")


class JudgedRepository(NamedTuple):
    """A report, with the raw ids of all objects in the repository's stores."""

    report: SealReport
    objects: set[bytes]


class _Reachable(NamedTuple):
    """A closure; `squashed` if it is of a single commit that has the base's tree."""

    ids: set[bytes]
    complete: bool
    squashed: bool = False


def verify_seal(path: Path, base: str, mirror: Path | None = None) -> SealReport:
    """Judge the repository at `path` against `base`. The closure is read from `mirror`, if given.

    Raises PathNotFoundError without a repository, and InvalidCommitError.
    """
    commit = parse_commit(base)
    return judge(locate(path), commit, mirror).report


def judge(
    repository: ForeignRepository,
    commit: CommitId,
    mirror: Path | None = None,
    closure_ids: set[bytes] | None = None,
) -> JudgedRepository:
    """Judge a repository. `closure_ids` is the closure of `commit`, if the caller has read it."""
    with tempfile.TemporaryDirectory(prefix="mirrord-seal-") as scratch:
        private = borrow(Path(scratch), repository)
        contents = read_contents(repository, private)
        head = resolve_head(repository)
        modules = find_modules(repository, private, head)
        closure = _closure(private, mirror, commit, head, closure_ids)
        stores = [module.where for module in modules]
        judged = list(judge_control(repository, private, stores))
        names = [item for item in judged if isinstance(item, Named)]
        for file, ids in contents.graphed.items():
            names += [Named("commit-graph", file, oid.hex()) for oid in ids]
        allowed = closure.ids | _tag_objects(private, names, closure)
        leaks = [
            *_closure_leaks(head, commit, closure, contents.ids),
            *_object_leaks(private, contents.ids - allowed),
            *_name_leaks(names, allowed),
            *_gitlink_leaks(private, names, head),
            *(item for item in judged if isinstance(item, SealLeak)),
            *lfs_leaks(repository.git_dir, private, head),
            *(lfs_leaks(repository.lender, private, head) if repository.lender else ()),
            *judge_work_tree(repository, [module.path for module in modules]),
            *contents.leaks,
        ]
    expected = {f"configured: {shown(key)}" for module in modules for key in module.settings}
    if has_own_work_tree(repository):  # the repository of a submodule
        expected.add("configured: 'core.worktree'")
    expected |= {f"the alternate: {detail}" for detail in expected}
    leaks = [leak for leak in leaks if leak.detail not in expected]
    leaks += (leak for module in modules for leak in _module_leaks(module))
    report = SealReport(
        path=str(repository.path),
        base=commit,
        sealed=not leaks,
        head=head,
        objects_present=len(contents.ids),
        objects_in_closure=len(closure.ids),
        leaks=leaks,
        checked=[
            f"HEAD {head}",
            f"history {'squashed' if closure.squashed else 'sealed'}",
            f"objects {len(contents.ids)} hashed, of {len(contents.packs)} packs and loose files",
            *([f"borrowed: the sealed store {repository.lender}"] if repository.lender else []),
            f"index {_digest(repository.git_dir / 'index')}",
            f"control files {_control_digest(repository)}",
            *(f"submodule {module.path} at {module.commit}" for module in modules),
            "every other file, by its exact form; other repositories in the working tree",
        ],
    )
    return JudgedRepository(report, contents.ids)


def _module_leaks(module: ModuleStore) -> Iterator[SealLeak]:
    """Judge the store of a submodule by the commit that HEAD's tree names."""
    leaks = judge(module.repository, CommitId(module.commit)).report.leaks
    return (leak(inner.kind, f"submodule {shown(module.path)}: {inner.detail}") for inner in leaks)


def _closure(
    private: Path, mirror: Path | None, base: CommitId, head: str | None, ids: set[bytes] | None
) -> _Reachable:
    """Read the closure of `base`, or of the squashed commit; of a damaged one what is readable."""
    git_dir = mirror or private
    if head is not None and head != base and _is_squashed(private, git_dir, head, base):
        return _Reachable(*read_closure(private, head, private), squashed=True)
    if ids is not None:
        return _Reachable(ids, complete=True)
    return _Reachable(*read_closure(git_dir, base, private))


# the longer text is that of `squashed_commit` (templates/builder.py)
_SQUASHED = re.compile(
    rb"tree ([0-9a-f]{40})\nauthor [^\n]{1,200}\ncommitter [^\n]{1,200}\n\n"
    rb"([^\n]{0,72}\n?|base of this task\n\n"
    rb"The history before this commit is not part of the checkout\.\n)"
)


def _is_squashed(private: Path, git_dir: Path, head: str, base: CommitId) -> bool:
    """Return whether `head` has the tree of `base`, no parents, and nothing hidden in its text."""
    try:
        (commit,) = read_objects_sync(private, [head], doing=f"read {head}")
        tree = _tree_of(git_dir, base)
    except (CorruptObjectError, GitFailedError):
        return False
    match = _SQUASHED.fullmatch(commit.data) if commit.kind == "commit" else None
    return match is not None and match[1] == tree


def _tree_of(git_dir: Path, base: CommitId) -> bytes | None:
    """Return the tree of a commit, or of the one that stands for it, as a shallow upstream's."""
    tree_name = f"{base}^{{tree}}"
    (tree,) = read_objects_sync(git_dir, (), info=[tree_name], doing=f"read {base}")
    if tree.exists:
        return tree.oid.encode()
    words = ("rev-list", "--no-walk", "--header", "--glob=refs/mirrord/*")  # pins, and kept refs
    listed = run_git_sync(*words, git_dir=git_dir, doing=f"find what stands for {base}").stdout
    for commit in listed.split(b"\0"):
        lines = commit.partition(b"\n\n")[0].split(b"\n")  # its id, then the headers
        if WITHOUT_PARENTS + base.encode() in lines:
            return next(line[5:] for line in lines if line.startswith(b"tree "))
    return None


def _tag_objects(private: Path, names: Collection[Named], closure: _Reachable) -> set[bytes]:
    """Return the tag objects on the way from refs into the closure."""
    pending = {named.oid for named in names if named.kind == "ref"}
    pending = {oid for oid in pending if bytes.fromhex(oid) not in closure.ids}
    targets: dict[str, tuple[str, bytes]] = {}
    while pending:
        try:
            tags = list(read_objects_sync(private, sorted(pending), doing="read tags"))
        except (CorruptObjectError, GitFailedError):
            break
        matches = {tag.oid: _TAG.match(tag.data) for tag in tags if tag.kind == "tag"}
        tagged = {oid: (match[1].decode(), match[2]) for oid, match in matches.items() if match}
        targets |= tagged
        pending = {target for target, kind in tagged.values() if kind == b"tag"} - targets.keys()

    def leads_inside(oid: str) -> bool:
        seen = set[str]()
        while oid in targets and oid not in seen:
            seen.add(oid)
            oid = targets[oid][0]
        return bytes.fromhex(oid) in closure.ids

    return {bytes.fromhex(oid) for oid in targets if leads_inside(oid)}


# -- leaks -----------------------------------------------------------------------------------------


def _closure_leaks(
    head: str | None, base: CommitId, closure: _Reachable, present: set[bytes]
) -> Iterator[SealLeak]:
    if head != base and not closure.squashed:
        hint = ""
        if not closure.ids and bytes.fromhex(base) not in present:
            hint = "; the base is not in it: for a squashed checkout name its mirror (--mirror)"
        yield leak("head", f"HEAD is {head or 'unreadable or unborn'}, not {base}{hint}")
    missing = closure.ids - present
    if missing or not closure.complete:
        count = f"{len(missing)} objects" if missing else "an object"
        yield leak("incomplete", f"{count} of the closure of {base} cannot be read")


def _object_leaks(private: Path, outside: set[bytes]) -> Iterator[SealLeak]:
    oids = [oid.hex() for oid in sorted(outside)]
    try:
        objects = list(read_objects_sync(private, (), info=oids, doing="read objects"))
        kinds = [item.kind if item.kind in _TYPES else "object" for item in objects]
    except (CorruptObjectError, GitFailedError):
        kinds = ["object"] * len(oids)
    for kind in sorted(set(kinds)):
        ids = [oid for oid, other in zip(oids, kinds, strict=True) if other == kind]
        examples = ", ".join(ids[:_EXAMPLES])
        yield leak("object", f"{len(ids)} of type {kind} outside the closure, such as {examples}")


def _name_leaks(names: Collection[Named], allowed: set[bytes]) -> Iterator[SealLeak]:
    """Names of objects outside, one leak for each place; replace refs and stashes always leak."""
    leaks: dict[tuple[str, str], list[str]] = {}
    for named in names:
        if named.kind == "gitlink":
            continue
        if named.kind in {"replace-ref", "stash"} or bytes.fromhex(named.oid) not in allowed:
            leaks.setdefault((named.kind, named.where), []).append(named.oid)
    for (kind, where), oids in sorted(leaks.items()):
        yield leak(kind, f"{where} names {', '.join(dict.fromkeys(oids[:_EXAMPLES]))}")


def _gitlink_leaks(private: Path, names: Collection[Named], head: str | None) -> Iterator[SealLeak]:
    """Submodule commits in the index that are not in the commit."""
    indexed = {(named.where, named.oid) for named in names if named.kind == "gitlink"}
    if not indexed or head is None:
        return
    for path, oid in sorted(indexed - set(gitlinks_of(private, head).items())):
        yield leak("index", f"index names commit {oid} of submodule {path}")


# -- what was checked ------------------------------------------------------------------------------


def _digest(file: Path) -> str:
    content = read_bytes(file)
    return "absent" if content is None else hashlib.sha256(content).hexdigest()


def _control_digest(repository: ForeignRepository) -> str:
    """Hash names and content of every file outside the object store and the index."""
    digest = hashlib.sha256()
    files = walk(repository.git_dir, skip=frozenset({"objects"}))
    for file in sorted(files, key=lambda file: file.where):
        if file.where != "index":
            line = f"{file.where}\0{_digest(file.path)}\n"
            digest.update(encode_name(line))
    return digest.hexdigest()
