"""What of a mirror's past may go when a person said how long it is kept: old records of the ref history, and tips that left then.

Owns the end of the ref history. Records from before the time are folded into the one that stood at it, which becomes the first;
those after it are written again on top, with the ids they had. Kept refs go whose commits only folded records had, so that what
the history knows and what is kept stay one: an audit misses nothing. Never a pin, nor a kept ref that something recorded needs.
All of it is one transaction; a crash before it leaves objects that nothing names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..protocol import RefRecord
from .history import EVERY_RECORD, list_records, read_refs, write_again
from .repository import HISTORY, KEPT, Refs, Repository
from .transaction import Transaction, commit

_AT_ONCE = 4  # a fold gives every later record a new id: it waits until a quarter of the time more has come together


@dataclass(frozen=True, slots=True)
class Aged:
    """How many records were folded and how many kept refs dropped."""

    records: int
    kept: int


async def age(repository: Repository, kept_for: timedelta, now: datetime, recorded: Collection[str]) -> Aged | None:
    """Fold what is due; None where nothing is. `recorded` are commits that must stay reachable. The caller holds the lock."""
    present = await repository.all_refs()
    records = await list_records(repository, limit=EVERY_RECORD) if HISTORY in present else []
    end = now - kept_for
    staying = next((n + 1 for n, record in enumerate(records) if record.at <= end), len(records))
    if staying == len(records) or records[-2].at > end - kept_for / _AT_ONCE:
        return None
    going = await _droppable(repository, present, records[:staying], records[staying:], recorded)
    transaction = Transaction()
    for ref in going:
        transaction.delete(ref, present[ref])
    transaction.move(HISTORY, present[HISTORY], await write_again(repository, records[:staying], parent=None))
    await commit(repository, transaction)
    return Aged(len(records) - staying, len(going))


async def _droppable(
    repository: Repository, present: Refs, staying: Sequence[RefRecord], folded: Sequence[RefRecord], recorded: Collection[str]
) -> list[str]:
    """Kept refs that only folded records speak of, and without which everything recorded is still reached."""
    past = await _named(repository, folded) - await _named(repository, staying)
    old = sorted(ref for oid in past if (ref := f"{KEPT}{oid}") in present)
    others = {oid for ref, oid in present.items() if ref not in old}
    return [ref for ref in old if not await _needed(repository, present[ref], others, recorded)]


async def _named(repository: Repository, records: Sequence[RefRecord]) -> set[str]:
    return {oid for record in records for oid in (await read_refs(repository, record.id))[0].values()}


async def _needed(repository: Repository, tip: str, others: Collection[str], recorded: Collection[str]) -> bool:
    """Whether something recorded, which should have a pin and has not, is reached from the tip alone."""
    walked = await repository.git.run(
        "rev-list", "--stdin",
        git_dir=repository.path,
        stdin="".join(f"{line}\n" for line in [tip, *(f"^{oid}" for oid in sorted(others))]).encode("ascii"),
        doing=f"look what a kept ref of mirror {repository.name} keeps",
    )  # fmt: skip
    return not set(recorded).isdisjoint(walked.lines)
