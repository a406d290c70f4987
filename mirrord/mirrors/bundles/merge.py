"""What a bundle does to the refs of a mirror. Decides and writes a transaction; asks git only about ancestry and records.

A ref of the bundle that the mirror has not is made; one that goes on from the mirror's moves forward; any other stays where it
is, and the bundle's tip is kept. Pins are added. The ref history goes on from the longer of the two; one that had to begin anew
is put on top of what the bundle has from before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import anyio

from ...catalog import DatasetHead
from ...catalog.catalog import Catalog
from ...catalog.spool import spooled, unspooled
from ...errors import InvalidBundleError, MirrordError
from ...host.files import full_disk_named
from ...model import CommitId, MirrorName
from ...protocol import RefChange
from ..history import (
    BEGUN_ANEW,
    EVERY_RECORD,
    list_records,
    read_kept,
    read_refs,
    write_again,
    write_record,
)
from ..pins import read_pins
from ..refs import drop_shadowed, is_followed, theirs
from ..repository import HISTORY, KEPT, OURS, PINS, Refs, Repository
from ..transaction import Transaction
from .format import Records, extract_rows

RECORDS = "refs/mirrord/records/"


@dataclass(frozen=True, slots=True)
class Contents:
    """The refs of a bundle by what they are; whatever else it names was left out."""

    theirs: Refs
    kept: list[str]
    pins: list[tuple[str, CommitId]]
    history: str | None
    records: str | None
    mirror: str | None
    head: str | None

    @property
    def tips(self) -> Refs:
        """All of them, by a name."""
        pins = {f"{PINS}{owner}/{commit}": str(commit) for owner, commit in self.pins}
        ours = {HISTORY: self.history, RECORDS: self.records}
        return (
            self.theirs
            | {f"{KEPT}{oid}": oid for oid in self.kept}
            | pins
            | {r: o for r, o in ours.items() if o}
        )


@dataclass(slots=True)
class Merge:
    """`target` is where the refs that follow upstream shall be."""

    target: Refs
    transaction: Transaction = field(default_factory=Transaction)
    changes: list[RefChange] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def sort_refs(refs: Refs) -> Contents:
    """Tell the refs of a bundle apart; names that no mirror may have are dropped."""
    followed = {ref: oid for ref, oid in refs.items() if is_followed(ref)}
    drop_shadowed(followed)
    named = [
        (ref.removeprefix(RECORDS), oid) for ref, oid in refs.items() if ref.startswith(RECORDS)
    ]
    if len(named) > 1:
        raise InvalidBundleError("cannot read the bundle: it holds the records of several mirrors")
    mirror, records = named[0] if named else (None, None)
    return Contents(
        theirs=followed,
        kept=sorted({oid for ref, oid in refs.items() if ref == f"{KEPT}{oid}"}),
        pins=read_pins({ref: oid for ref, oid in refs.items() if ref.startswith(OURS)}),
        history=refs.get(HISTORY),
        records=records,
        mirror=str(MirrorName.parse(mirror)) if mirror else None,
        head=_head(refs),
    )


def _head(refs: Refs) -> str | None:
    """The branch that HEAD is at: a bundle says only the commit."""
    at = [
        ref
        for ref, oid in refs.items()
        if ref.startswith("refs/heads/") and oid == refs.get("HEAD")
    ]
    usual = [ref for ref in ("refs/heads/main", "refs/heads/master") if ref in at]
    return next(iter([*usual, *sorted(at)]), None)


async def merge(
    repository: Repository, contents: Contents, pins: list[tuple[str, CommitId]], head: str | None
) -> Merge:
    """Plan the merge into a repository that has all objects; `pins` with the owners they shall have."""
    present = await repository.all_refs()
    made = Merge(theirs(present))
    for ref, oid in contents.theirs.items():
        await _take(repository, made, ref, oid)
    for oid in sorted({*contents.kept, *made.kept}):
        _create(made, present, f"{KEPT}{oid}", oid)
    for owner, commit in pins:
        _create(made, present, f"{PINS}{owner}/{commit}", commit)
    await _follow_history(repository, made, present, contents.history, head)
    return made


async def _take(repository: Repository, made: Merge, ref: str, oid: str) -> None:
    now = made.target.get(ref)
    if now == oid:
        return
    is_moved_tag = now is not None and ref.startswith("refs/tags/")
    if is_moved_tag or (now is None and _is_shadowed(ref, made.target)):
        made.kept.append(oid)
        return
    if now is not None and not await repository.is_ancestor(now, oid):
        if not await repository.is_ancestor(oid, now):
            made.kept.append(oid)
        return
    made.changes.append(
        RefChange(ref=ref, kind="forwarded" if now else "created", old=now, new=oid)
    )
    made.transaction.move(ref, now, oid)
    made.target[ref] = oid


def _is_shadowed(ref: str, refs: Refs) -> bool:
    parts = ref.split("/")
    return any("/".join(parts[:n]) in refs for n in range(3, len(parts))) or any(
        other.startswith(f"{ref}/") for other in refs
    )


def _create(made: Merge, present: Refs, ref: str, oid: str) -> None:
    if ref not in present:
        made.transaction.create(ref, oid)


async def _follow_history(
    repository: Repository, made: Merge, present: Refs, offered: str | None, head: str | None
) -> None:
    """The bundle's history where it goes on from ours, ours is empty, or below ours; and a record of what differs from it."""
    parent = own = present.get(HISTORY)
    if offered is not None and (own is None or await repository.is_ancestor(own, offered)):
        parent = offered
    elif own is not None and offered is not None and await _is_before(repository, offered, own):
        parent = await write_again(
            repository, await list_records(repository, EVERY_RECORD), parent=offered
        )
    kept = await read_kept(repository, own)
    kept |= {
        ref.removeprefix(KEPT)
        for ref in [*present, *made.transaction.moves]
        if ref.startswith(KEPT)
    }
    said = (
        (*await read_refs(repository, parent), await read_kept(repository, parent))
        if parent
        else None
    )
    if said != (made.target, head if head in made.target else None, kept):
        parents = [parent] if parent else []
        parent = await write_record(
            repository, made.target, head, made.changes, kept=kept, parents=parents, why="import"
        )
    if parent != own:
        made.transaction.move(HISTORY, own, parent)


async def _is_before(repository: Repository, offered: str, own: str) -> bool:
    """Whether our history began anew after what is offered: nobody had the records then that are offered now."""
    first = (await list_records(repository, EVERY_RECORD, start=own))[-1]
    last = (await list_records(repository, limit=1, start=offered))[0]
    return first.summary.startswith(BEGUN_ANEW) and last.at <= first.at


async def must_be_history(repository: Repository, offered: str) -> None:
    """Refuse a history that could not be read later."""
    try:
        await list_records(repository, start=offered)
        await read_refs(repository, offered)
    except (MirrordError, ValueError) as error:
        raise InvalidBundleError(
            "cannot import the bundle: its ref history is not one",
            hint="nothing was changed; make the bundle again",
        ) from error


Spools = dict[str, tuple[DatasetHead, Path]]
"""By dataset: its head, and its checked rows as the catalog takes them."""


async def spool_datasets(scratch: Repository, commit: str | None, records: Records) -> Spools:
    """Check the rows of a bundle; none where they speak of a mirror of another name than this one will have."""
    if commit is None or MirrorName.parse(records.mirror).key != scratch.name.key:
        return {}
    directory = scratch.path.parent
    spools: Spools = {}
    for number, dataset in enumerate(records.datasets):
        raw, spool = directory / "rows.raw", directory / f"rows-{number}.jsonl"
        if not await extract_rows(scratch, commit, dataset.name, raw):
            raise InvalidBundleError(
                f"cannot import the bundle: the rows of dataset {dataset.name} are not in it"
            )
        await anyio.to_thread.run_sync(_check, raw, spool, scratch.name)
        spools[dataset.name] = (dataset.head(), spool)
    return spools


async def merge_datasets(
    catalog: Catalog, records: Records, spools: Spools
) -> tuple[dict[str, int], list[str]]:
    """Add what is missing; answers how many rows each dataset got, and the datasets that are not the bundle's."""
    restored: dict[str, int] = {}
    for name, (head, spool) in spools.items():
        added = await catalog.merge_dataset(head, spool)
        if added is not None:
            restored[name] = added
    return restored, sorted({dataset.name for dataset in records.datasets} - restored.keys())


def _check(raw: Path, spool: Path, name: MirrorName) -> None:
    with full_disk_named("quarantine"), raw.open("rb") as lines, spool.open("wb") as out:
        for number, line in enumerate(lines, 1):
            try:
                row = unspooled(line)
            except (ValueError, KeyError, TypeError, MirrordError) as error:
                raise InvalidBundleError(
                    f"cannot import the bundle: row {number} of a dataset is none: {error}"
                ) from error
            if row.mirror.key == name.key:
                out.write(spooled(row))
