"""Moving refs: all of them or none, whatever dies when.

Owns the journal of a mirror, `mirrord-transaction`. git's own transaction is all-or-nothing against other writers, but it renames
one lock file after the other, so a crash in the middle leaves half of it. The journal is written and flushed first; a start that
finds one finishes it. Never moves a ref to an object that is not there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import anyio
import structlog

from ..host.files import full_disk_named, sync_directory
from .repository import Repository
from .stale_files import remove_stale_files, removed_on_failure

JOURNAL = "mirrord-transaction"
_MANY = 50  # from here on one flushed packed-refs is cheaper than a flush for every loose ref

log = structlog.get_logger()


@dataclass(slots=True)
class Transaction:
    """Moves to make together. `moves` maps a ref to (old, new); None stands for absent. `head` is
    the ref that HEAD is to name, where that changes too."""

    moves: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    head: str | None = None

    def create(self, ref: str, new: str) -> None:
        self.moves[ref] = (None, new)

    def move(self, ref: str, old: str | None, new: str | None) -> None:
        self.moves[ref] = (old, new)

    def delete(self, ref: str, old: str) -> None:
        self.moves[ref] = (old, None)

    def text(self) -> str:
        """The moves as `git update-ref --stdin` reads them; HEAD on a line of its own."""
        return _text(self.moves) + (f"head {self.head}\n" if self.head else "")


Moves = dict[str, tuple[str | None, str | None]]


def _text(moves: Moves) -> str:
    return "".join(_line(ref, old, new) for ref, (old, new) in sorted(moves.items()))


def _line(ref: str, old: str | None, new: str | None) -> str:
    if new is None:
        return f"delete {ref} {old}\n"
    return f"create {ref} {new}\n" if old is None else f"update {ref} {new} {old}\n"


async def commit(repository: Repository, transaction: Transaction) -> None:
    """Make all moves; on any error none. A git that was killed in the middle is finished."""
    if not transaction.moves and transaction.head is None:
        return
    await recover(
        repository
    )  # the journal of one that was killed must not be written over: it says which tips are to be kept
    journal = repository.path / JOURNAL
    before = await repository.all_refs()
    try:
        async with removed_on_failure(repository.path):
            await anyio.to_thread.run_sync(write_durably, journal, transaction.text().encode())
            if transaction.moves:
                await _make(repository, transaction.moves)
            if transaction.head:
                await repository.set_head(transaction.head)
    except Exception:
        if await repository.all_refs() != before:
            await recover(repository)
            return
        await anyio.to_thread.run_sync(_remove, journal)
        raise
    await anyio.to_thread.run_sync(_remove, journal)


async def _make(repository: Repository, moves: Moves) -> None:
    """git (2.39) cannot make `a/b` in the transaction that deletes `a`, nor the other way, so such deletions go first."""
    first = _in_the_way(moves)
    if not first:
        await _update(repository, moves)
        return
    await _update(repository, first)
    try:
        await _update(repository, {ref: move for ref, move in moves.items() if ref not in first})
    except Exception:
        await _update(repository, {ref: (None, old) for ref, (old, _) in first.items()})
        raise


def _in_the_way(moves: Moves) -> Moves:
    """The deletions of refs that are a directory of a new ref, or lie in the directory that one replaces."""
    new = {ref for ref, (old, target) in moves.items() if old is None and target is not None}
    above = {directory for ref in new for directory in _directories(ref)}
    return {
        ref: (old, target)
        for ref, (old, target) in moves.items()
        if target is None
        and (ref in above or any(directory in new for directory in _directories(ref)))
    }


def _directories(ref: str) -> list[str]:
    parts = ref.split("/")
    return ["/".join(parts[:n]) for n in range(2, len(parts))]


async def _update(repository: Repository, moves: Moves) -> None:
    many = len(moves) >= _MANY
    flush = ("-c", "core.fsync=none") if many else ()
    done = await repository.git.run(
        *flush,
        "update-ref",
        "--stdin",
        git_dir=repository.path,
        stdin=f"start\n{_text(moves)}prepare\ncommit\n".encode(),
        doing=f"move refs of mirror {repository.name}",
    )
    if done.stderr:  # a lock that it cannot remove it only warns of, and the next one stops at it
        await anyio.to_thread.run_sync(remove_stale_files, repository.path, timedelta())
    if many:
        await repository.pack_refs()


async def recover(repository: Repository) -> bool:
    """Finish a transaction that a crash interrupted. True when there was one."""
    journal = repository.path / JOURNAL
    if not journal.exists():
        return False
    targets, head = _read(await anyio.to_thread.run_sync(journal.read_text, "utf-8"))
    now = await repository.all_refs()
    await _make(
        repository,
        {ref: (now.get(ref), new) for ref, new in targets.items() if now.get(ref) != new},
    )
    await repository.pack_refs()
    if head:
        await repository.set_head(head)
    await anyio.to_thread.run_sync(_remove, journal)
    log.info("transaction.recovered", mirror=str(repository.name), refs=len(targets))
    return True


def _read(text: str) -> tuple[dict[str, str | None], str | None]:
    targets: dict[str, str | None] = {}
    head = None
    for line in text.splitlines():
        verb, ref, *oids = line.split(" ")
        if verb == "head":
            head = ref
        else:
            targets[ref] = None if verb == "delete" else oids[0]
    return targets, head


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file so that a crash leaves the old one or the new one."""
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
