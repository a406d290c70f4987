"""Transactions of refs: all of them move or none, also across a crash.

git's own transaction is all-or-nothing against other writers, but it renames one lock file after
the other, so a crash in the middle leaves half of it. Therefore a journal, `mirrord-transaction` in
the mirror, is written and flushed first; a start that finds one finishes it. Never moves a ref to
an object that is missing.
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from anyio import to_thread

from ..git.command import object_info
from ..host.files import full_disk_named, sync_directory
from ..telemetry import log
from .maintenance import remove_stale_files, stale_files_removed_on_failure
from .refs import directories_of
from .repository import Repository

JOURNAL = "mirrord-transaction"

Moves = dict[str, tuple[str | None, str | None]]
"""Ref to (old, new); None stands for absent."""


def journal_text(moves: Moves, head: str | None = None) -> str:
    """Moves as `git update-ref --stdin` reads them, sorted; HEAD on a line of its own."""
    lines = []
    for ref, (old, new) in sorted(moves.items()):
        if new is None:
            lines.append(f"delete {ref} {old}\n")
        else:
            lines.append(f"create {ref} {new}\n" if old is None else f"update {ref} {new} {old}\n")
    return "".join([*lines, f"head {head}\n" if head else ""])


async def commit(repository: Repository, moves: Moves, head: str | None = None) -> None:
    """Make all moves, or none on an error. What a killed git began is finished.

    `head` is the new target of HEAD, where that changes too.
    """
    if not moves and head is None:
        return
    await recover(repository)  # an old journal names tips to keep: it must not be overwritten
    journal = repository.path / JOURNAL
    text = journal_text(moves, head)
    before = await repository.all_refs()
    try:
        async with stale_files_removed_on_failure(repository.path):
            await to_thread.run_sync(write_durably, journal, text.encode())
            if moves:
                await _apply(repository, moves)
            if head:
                await repository.set_head(head)
    except Exception:
        if await repository.all_refs() != before:
            await recover(repository)
            return
        await to_thread.run_sync(_remove, journal)
        raise
    await to_thread.run_sync(_remove, journal)


async def recover(repository: Repository) -> bool:
    """Finish a transaction that a crash interrupted; answers whether there was one."""
    journal = repository.path / JOURNAL
    if not journal.exists():
        return False
    targets: dict[str, str | None] = {}
    head = None
    for line in (await to_thread.run_sync(journal.read_text, "utf-8")).splitlines():
        verb, ref, *oids = line.split(" ")
        if verb == "head":
            head = ref
        else:
            targets[ref] = None if verb == "delete" else oids[0]
    now = await repository.all_refs()
    left = {ref: (now.get(ref), new) for ref, new in targets.items() if now.get(ref) != new}
    await _apply(repository, left)
    await repository.pack_refs()
    if head:
        await repository.set_head(head)
    await to_thread.run_sync(_remove, journal)
    log.info("transaction.recovered", mirror=str(repository.name), refs=len(targets))
    return True


async def _apply(repository: Repository, moves: Moves) -> None:
    # git (2.39) cannot make `a/b` in the transaction that deletes `a`, nor `a` in the one that
    # deletes `a/b`: such deletions go first
    new = {ref for ref, (old, target) in moves.items() if old is None and target is not None}
    above = {directory for ref in new for directory in directories_of(ref, 2)}
    first: Moves = {
        ref: move
        for ref, move in moves.items()
        if move[1] is None and (ref in above or not new.isdisjoint(directories_of(ref, 2)))
    }
    if not first:
        await _update(repository, moves)
        return
    await _update(repository, first)
    try:
        await _update(repository, {ref: move for ref, move in moves.items() if ref not in first})
    except Exception:
        await _update(repository, {ref: (None, old) for ref, (old, _) in first.items()})
        raise


async def _update(repository: Repository, moves: Moves) -> None:
    many = len(moves) >= 50  # one flushed packed-refs is cheaper then than a flush for each ref
    if many and await _are_first(repository, moves):  # as git clone does: a file each is slow
        refs = {ref: str(new) for ref, (_, new) in moves.items()}
        await to_thread.run_sync(write_durably, repository.path / "packed-refs", packed_refs(refs))
        await repository.pack_refs()  # which notes what tags lead to
        return
    done = await repository.run(
        *(("-c", "core.fsync=none") if many else ()), "update-ref", "--stdin",
        stdin=f"start\n{journal_text(moves)}prepare\ncommit\n".encode(),
        doing=f"move refs of mirror {repository.name}",
    )  # fmt: skip
    if done.stderr:  # git only warns of a lock that it cannot remove, and the next git stops at it
        await to_thread.run_sync(remove_stale_files, repository.path, timedelta())
    if many:
        await repository.pack_refs()


async def _are_first(repository: Repository, moves: Moves) -> bool:
    """Whether these are the first refs of a repository, and update-ref would make each."""
    if any(old or not new for old, new in moves.values()) or await repository.all_refs():
        return False
    oids, doing = [str(new) for _, new in moves.values()], "look up what refs are to name"
    found = await object_info(repository.git, repository.path, oids, doing=doing)
    return all(
        it.kind == "commit" if ref.startswith("refs/heads/") else it.exists
        for ref, it in zip(moves, found, strict=True)
    )


def packed_refs(refs: Mapping[str, str]) -> bytes:
    """The content of a packed-refs file. Nothing is peeled, so git does that when it is asked."""
    lines = (f"{oid} {ref}\n" for ref, oid in sorted(refs.items()))
    return "".join(["# pack-refs with: sorted \n", *lines]).encode("utf-8", "surrogateescape")


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
