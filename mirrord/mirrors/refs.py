"""Refs: the offer of an upstream, names that are allowed, differences, transactions.

A mirror takes the refs that the configured patterns match, but none below `refs/mirrord/` or
`refs/replace/`, and no name that git or a file system could misread.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
from anyio import to_thread

from ..errors import GitFailedError, full_disk_named
from ..host.files import read_plain, sync_directory
from ..presence import exists
from ..protocol import RefChange, RefFault
from ..quoting import decode_name, encode_name
from ..telemetry import log
from .maintenance import remove_stale_files
from .repository import HISTORY, KEPT, OURS, PINS, Refs, Repository

# ours are pins and the ref history, a replace ref changes what a commit checks out to, the others
# belong to a working tree
_NEVER_FOLLOWED = (
    OURS,
    "refs/replace/",
    "refs/bisect/",
    "refs/worktree/",
    "refs/rewritten/",
    "refs/stash",
)


@dataclass(frozen=True, slots=True)
class Offer:
    """The refs of an upstream at one moment.

    `head` is the branch that its HEAD names; `redirected_to` is the URL that it redirected to.
    """

    refs: Refs
    head: str | None = None
    faults: list[RefFault] = field(default_factory=list)
    redirected_to: str | None = None


def read_offer(lines: Iterable[str], patterns: Sequence[str]) -> Offer:
    """Read `git ls-remote --symref`; a hostile name becomes a fault."""
    parts = (".+".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    find = re.compile(rf"([0-9a-f]{{40}})\t({'|'.join(parts)})").fullmatch
    refs: Refs = {}
    faults: list[RefFault] = []
    head = None
    for line in lines:
        if line.startswith("ref: ") and line.endswith("\tHEAD"):
            head = line[5:-5]
        match = find(line)
        # `^{}` marks what an annotated tag leads to, listed after the tag itself
        if not match or match[2].startswith(_NEVER_FOLLOWED) or match[2].endswith("^{}"):
            continue
        oid, ref = match.groups()
        if is_safe_ref(ref):
            refs[ref] = oid
        else:
            reason = "git does not allow the name of this ref"
            faults.append(RefFault(ref=ref, commit=oid, reason=reason))
    faults += drop_shadowed(refs)
    return Offer(refs, head if head in refs else None, faults)


def is_followed(ref: str) -> bool:
    """True if a ref may follow upstream: a safe name, not mirrord's, not special to git."""
    return is_safe_ref(ref) and not ref.startswith(_NEVER_FOLLOWED)


def names_of_revision(revision: str) -> list[str]:
    """Return what git may call the commit of a revision: a branch precedes a tag, as for checkout.

    Only names of upstream's refs and full ids; steps back follow them.
    """
    name = re.split(r"[~^]", revision, maxsplit=1)[0]
    steps = revision.removeprefix(name)
    if re.fullmatch(r"[0-9a-f]{40}", name):
        return [f"{revision}^{{commit}}"]
    refs = [name] if name.startswith("refs/") else [f"refs/heads/{name}", f"refs/tags/{name}"]
    return [f"{ref}{steps}^{{commit}}" for ref in refs if is_followed(ref)]


_PART_MAX_BYTES = 240  # of the 255 of a file name; git's lock adds `.lock`
_BAD_NAME = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|\.$|/$|\.\./")


def is_safe_ref(ref: str) -> bool:
    """Check a name by git check-ref-format's rules, and for a length that every disk can hold."""
    try:
        parts = encode_name(ref).split(b"/")
    except UnicodeEncodeError:  # a surrogate that is no byte: it is not from git
        return False
    is_short = all(len(part) <= _PART_MAX_BYTES for part in parts)
    return ref.startswith("refs/") and is_short and not _BAD_NAME.search(ref)


def directories_of(ref: str, shortest: int = 3) -> list[str]:
    """List the directories of a loose ref that have `shortest` parts or more.

    None of them may be a ref.
    """
    parts = ref.split("/")
    return ["/".join(parts[:n]) for n in range(shortest, len(parts))]


def drop_shadowed(refs: Refs) -> list[RefFault]:
    """Drop `a/b` where `a` is a ref too: an upstream may offer both, but git cannot hold them."""
    faults = []
    for ref in sorted(refs, key=len, reverse=True):
        if not refs.keys().isdisjoint(directories_of(ref)):
            reason = "another ref is its directory"
            faults.append(RefFault(ref=ref, commit=refs.pop(ref), reason=reason))
    return faults


def followed_refs(refs: Refs) -> Refs:
    """Return the refs that follow upstream: all but those below `refs/mirrord/`."""
    return {ref: oid for ref, oid in refs.items() if not ref.startswith(OURS)}


def lasting_refs(refs: Refs) -> Refs:
    """Return the refs that bundles and generations have: all but marks of a running fetch."""
    kinds = (HISTORY, KEPT, PINS)
    return followed_refs(refs) | {ref: oid for ref, oid in refs.items() if ref.startswith(kinds)}


def compare(old: Refs, new: Refs) -> list[RefChange]:
    """List the differences by name. A move counts as `forced` until `classify` compares commits."""
    changes = []
    for ref in sorted({ref for ref, _ in old.items() ^ new.items()}, key=encode_name):
        before, after = old.get(ref), new.get(ref)
        kind: Literal["created", "deleted", "forced"] = (
            "created" if before is None else "deleted" if after is None else "forced"
        )
        changes.append(RefChange(ref=ref, kind=kind, old=before, new=after))
    return changes


def summarise(changes: Iterable[RefChange]) -> str:
    """Summarise changes in one line: `2 created, 1 forced`."""
    counts = Counter[str](change.kind for change in changes)
    kinds = ("created", "forwarded", "forced", "deleted")
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if kind in counts) or "no change"


async def classify(
    repository: Repository, changes: Sequence[RefChange], held: set[str] | None = None
) -> list[RefChange]:
    """Mark fast-forwards `forwarded`, and other moves `kept` if their old tip is in `held`."""
    classified = []
    for change in changes:
        if change.old and change.kind != "created":
            is_branch = change.new and not change.ref.startswith("refs/tags/")
            if is_branch and await repository.is_ancestor(change.old, str(change.new)):
                change = replace(change, kind="forwarded")
            else:
                change = replace(change, kept=held is None or change.old in held)
        classified.append(change)
    return classified


# -- transactions: all refs move or none, also across a crash --------------------------------------
#
# git's own transaction is atomic for other writers, but it renames one lock file after another, so
# a crash leaves half of it. Therefore a journal is written and flushed first, and a start finishes
# it. git refuses to move a ref to a missing object.

JOURNAL = "mirrord-transaction"
# ref to (old, new); None stands for absent
Moves = dict[str, tuple[str | None, str | None]]


def journal_text(moves: Moves, head: str | None = None) -> str:
    """Format moves for `git update-ref --stdin`, sorted; HEAD on a line of its own."""
    lines = []
    for ref, (old, new) in sorted(moves.items()):
        if new is None:
            lines.append(f"delete {ref} {old}\n")
        else:
            lines.append(f"create {ref} {new}\n" if old is None else f"update {ref} {new} {old}\n")
    return "".join([*lines, f"head {head}\n" if head else ""])


async def commit(
    repository: Repository,
    moves: Moves,
    head: str | None = None,
    *,
    held: Collection[str] = (),
) -> None:
    """Make all moves, or none on an error; finish what a killed git began.

    `head` is the new target of HEAD, if that changes too. `held` are ids whose objects were just
    seen in the repository.
    """
    if not moves and head is None:
        return
    await recover(repository)  # an old journal names tips to keep, so it must not be overwritten
    journal = repository.path / JOURNAL
    text = journal_text(moves, head)
    before = await repository.all_refs()
    try:
        await to_thread.run_sync(write_durably, journal, encode_name(text))
        if moves:
            await _apply(repository, moves, before, held)
        if head:
            await repository.set_head(head)
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(remove_stale_files, repository.path, timedelta())
        # cancelled: the journal stays, and the next transaction or start finishes it
        if not isinstance(error, Exception):
            raise
        # git died between two renames: what moved is visible, so the rest follows it
        if await repository.all_refs() != before:
            await recover(repository)
            return
        await to_thread.run_sync(_remove, journal)
        raise
    await to_thread.run_sync(_remove, journal)


async def recover(repository: Repository) -> None:
    """Finish a transaction that a crash interrupted."""
    journal = repository.path / JOURNAL
    if not exists(journal):
        return
    targets: dict[str, str | None] = {}
    head = None
    for line in decode_name(await to_thread.run_sync(read_plain, journal)).split("\n")[:-1]:
        verb, ref, *oids = line.split(" ")
        if verb == "head":
            head = ref
        else:
            targets[ref] = None if verb == "delete" else oids[0]
    now = await repository.all_refs()
    left = {ref: (now.get(ref), new) for ref, new in targets.items() if now.get(ref) != new}
    await _apply(repository, left, now)
    await repository.pack_refs()
    if head:
        await repository.set_head(head)
    await to_thread.run_sync(_remove, journal)
    log.info("transaction.recovered", mirror=str(repository.name), refs=len(targets))


async def _apply(
    repository: Repository, moves: Moves, before: Refs, held: Collection[str] = ()
) -> None:
    # git (2.39) cannot create `a/b` in the transaction that deletes `a`, nor `a` in the one that
    # deletes `a/b`; such deletions need a transaction before it
    new = {ref for ref, (old, target) in moves.items() if old is None and target is not None}
    above = {directory for ref in new for directory in directories_of(ref, 2)}
    first: Moves = {
        ref: move
        for ref, move in moves.items()
        if move[1] is None and (ref in above or not new.isdisjoint(directories_of(ref, 2)))
    }
    if not first:
        if not before and await _write_first(repository, moves, held):
            return
        await _update(repository, moves)
        return
    await _update(repository, first)
    try:
        await _update(repository, {ref: move for ref, move in moves.items() if ref not in first})
    except Exception:
        await _update(repository, {ref: (None, old) for ref, (old, _) in first.items()})
        raise


_MANY = 50  # from here on, one flushed packed-refs is cheaper than a flush for each ref


async def _write_first(repository: Repository, moves: Moves, held: Collection[str]) -> bool:
    """Create the first refs of a repository without git; False where git has to do it.

    git (2.39) would write a file for each, minutes for 100,000. It alone would refuse a ref to a
    missing object, so those not in `held` are looked up, which for a few costs what git does.
    """
    created = {ref: new for ref, (old, new) in moves.items() if new and old is None}
    unseen = set(created.values()).difference(held)
    if len(created) < len(moves) or (unseen and len(moves) < _MANY):
        return False
    if unseen and await repository.absent(unseen):
        return False
    path = repository.path / "packed-refs"
    await to_thread.run_sync(write_durably, path, packed_refs(created))
    return True


async def _update(repository: Repository, moves: Moves) -> None:
    many = len(moves) >= _MANY
    update = partial(
        repository.run,
        *(("-c", "core.fsync=none") if many else ()), "update-ref", "--stdin",
        stdin=encode_name(f"start\n{journal_text(moves)}prepare\ncommit\n"),
        doing=f"move refs of mirror {repository.name}",
    )  # fmt: skip
    try:
        done = await update()
    except GitFailedError as error:  # prepare met the lock of a ref, so nothing has moved
        if "File exists" not in error.message:
            raise
        if not await to_thread.run_sync(remove_stale_files, repository.path, timedelta()):
            raise
        done = await update()
    if done.stderr:  # git only warns of a lock that it cannot remove; it would stop the next git
        await to_thread.run_sync(remove_stale_files, repository.path, timedelta())
    if many:
        await repository.pack_refs()


def packed_refs(refs: Mapping[str, str]) -> bytes:
    """Format a packed-refs file without peeled tags, which git then peels when asked.

    git (2.39) looks a ref up by bisection, in the order of bytes, which is not that of text.
    """
    lines = (f"{refs[ref]} {ref}\n" for ref in sorted(refs, key=encode_name))
    return encode_name("".join(["# pack-refs with: sorted \n", *lines]))


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file so that a crash leaves the old content or the new."""
    new = path.with_name(path.name + ".new")
    with full_disk_named(path.name), new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_directory(path.parent)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    sync_directory(path.parent)
