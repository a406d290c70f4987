"""Pins: refs that keep recorded commits alive, `refs/mirrord/pins/OWNER/COMMIT`, each with a row.

A pin is a proof: its ref is written only after everything that the commit reaches was found in the
mirror. An error leaves refs and rows as they were; where the disk does not allow that, a cleanup
does it later. A crash leaves at worst a ref without a row, which the next start adopts.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import anyio
from anyio import to_thread

from ..catalog import Catalog, PinRow
from ..errors import GitFailedError, MirrordError, ResourceError
from ..git.batch import object_info
from ..model import CommitId, utc_now
from ..presence import exists
from ..telemetry import log
from .pinrefs import pin_ref, read_pins
from .proofs import find_proven, prove
from .refs import Moves, commit, recover
from .repository import Repository
from .upstreams.upstream import find_bad

# the reason of a pin that the catalog lacked, after a crash or with an older catalog
ADOPTED = "found in the mirror"


def is_sole_record(row: PinRow) -> bool:
    """True if no dataset need record the commit: the pin is a person's, or was adopted."""
    return row.owner.startswith("person/") or row.reason == ADOPTED


async def verify_commits(
    repository: Repository, commits: Collection[CommitId]
) -> dict[CommitId, str]:
    """Prove that commits can be served; return those that cannot, each with the reason."""
    doing = f"look up commits of mirror {repository.name}"
    refused: dict[CommitId, str] = {}
    unproven = set(commits) - await to_thread.run_sync(find_proven, repository.path, commits)
    for answer in await object_info(repository.git, repository.path, sorted(unproven), doing=doing):
        if answer.kind == "missing":
            refused[CommitId(answer.name)] = f"commit {answer.name} is not in the mirror"
        elif answer.kind != "commit":
            refused[CommitId(answer.name)] = f"{answer.name} is a {answer.kind}, not a commit"

    def is_about_commits(error: MirrordError) -> bool:
        return isinstance(error, GitFailedError) or not isinstance(error, ResourceError)

    failed = await find_bad(
        sorted(unproven - refused.keys()), partial(prove, repository),
        is_item_error=is_about_commits, max_failures=400, max_first_failures=400,
    )  # fmt: skip
    return refused | {oid: error.message for oid, error in failed.items()}


async def adopt_pins(catalog: Catalog, repository: Repository) -> None:
    """Add rows for pins that the catalog lacks, and report pins whose refs are lost."""
    in_refs = set(read_pins(await repository.all_refs()))
    in_catalog = {(row.owner, row.commit) for row in await catalog.list_pins(repository.name.key)}
    now = utc_now()
    unknown = sorted(in_refs - in_catalog)
    if adopted := [PinRow(repository.name, oid, owner, ADOPTED, now) for owner, oid in unknown]:
        await catalog.put_pins(adopted)
        owners = sorted({row.owner for row in adopted})
        log.warning("pins.adopted", mirror=str(repository.name), count=len(adopted), owners=owners)
    for owner, commit_id in sorted(in_catalog - in_refs):
        # an unpin deletes the row first, so this ref is lost; audits find it and heals restore it
        log.warning("pin.lost", mirror=str(repository.name), commit=commit_id, owner=owner)


class _Unfinished(NamedTuple):
    """The cleanup of a failed operation on the `commits` of an owner.

    Commits whose ref exists get their row of `rows` back; those without a row lose their ref.
    """

    owner: str
    commits: frozenset[CommitId]
    rows: tuple[PinRow, ...] = ()


class Pins:
    """The pins of all mirrors, in refs and catalog. The caller holds the mirror's lock."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._pending: dict[str, list[_Unfinished]] = {}

    async def add(
        self,
        repository: Repository,
        reasons: Mapping[CommitId, str],
        owner: str,
        publish: Callable[[Collection[CommitId]], Awaitable[None]],
    ) -> dict[CommitId, str]:
        """Pin the commits that can be served; return the others, each with why not.

        `reasons` are those of the pins. An existing pin keeps its row, and its reason unless there
        is a new one. `publish` is called with commits that had no pin of this owner, before other
        daemons can read of their pins in the catalog.
        """
        refused = await verify_commits(repository, reasons)
        listed = await self._catalog.list_pins(repository.name.key, owner=owner)
        before = {row.commit: row for row in listed}
        rows = []
        for commit_id in sorted(reasons.keys() - refused.keys()):
            new = PinRow(repository.name, commit_id, owner, reasons[commit_id], utc_now())
            old = before.get(commit_id, new)
            rows.append(replace(old, reason=new.reason or old.reason))
        await self._write(repository, rows, owner, publish)
        return refused

    async def follow(self, repository: Repository) -> None:
        """Make the refs of pins match the catalog, to which other daemons write too.

        A pin whose commit is not here yet waits for the generation that has it.
        """
        refs, key = await repository.all_refs(), repository.name.key
        present = {pin_ref(owner, oid): oid for owner, oid in read_pins(refs)}
        wanted = {
            pin_ref(row.owner, row.commit): row.commit for row in await self._catalog.list_pins(key)
        }
        new = {ref: oid for ref, oid in wanted.items() if ref not in present}
        refused = await verify_commits(repository, {*new.values()}) if new else {}
        moves: Moves = {ref: (oid, None) for ref, oid in present.items() if ref not in wanted}
        moves |= {ref: (None, oid) for ref, oid in new.items() if oid not in refused}
        await commit(repository, moves)
        if refused:
            log.warning("pins.waiting", mirror=str(repository.name), count=len(refused))

    async def restore(self, repository: Repository) -> tuple[int, int]:
        """Restore lost pins, the catalog's and those of recorded commits, after proving them.

        Adopts pins that the catalog lacks. Returns how many were lost, and how many of their
        commits cannot be served.
        """
        name = repository.name
        if not self._pending.get(name.key):
            await adopt_pins(self._catalog, repository)
        refs = await repository.all_refs()
        unpinned = await self._catalog.list_recorded(name.key, unpinned=True)
        recorded = [
            PinRow(name, commit_id, f"dataset/{dataset}", "recorded by the dataset", utc_now())
            for dataset, commit_id in sorted({(row.dataset, row.commit) for row in unpinned})
        ]
        listed = await self._catalog.list_pins(name.key)
        lost = [row for row in listed if pin_ref(row.owner, row.commit) not in refs] + recorded
        refused = await verify_commits(repository, {row.commit for row in lost})
        for owner in sorted({row.owner for row in lost}):
            rows = [row for row in lost if row.owner == owner and row.commit not in refused]
            await self._write(repository, rows, owner)
        await self.remove_unrecorded(repository, recorded)
        return len(lost), len(refused)

    async def remove(
        self, repository: Repository, commits: Collection[CommitId], owner: str
    ) -> None:
        """Remove pins: rows, then refs, so that a crash leaves a ref without a row.

        Puts the rows back where the refs cannot be removed.
        """
        key, wanted = repository.name.key, frozenset(commits)
        listed = await self._catalog.list_pins(key, owner=owner)
        rows = tuple(row for row in listed if row.commit in wanted)
        # cancelled in between, it would leave refs without rows, which a start adopts again
        with anyio.CancelScope(shield=True):
            await self._catalog.delete_pins(key, commits, owner)
            try:
                await _delete_refs(repository, wanted, owner)
            except Exception:  # an OSError too, of a failing disk
                await self._undo(repository, _Unfinished(owner, wanted, rows))
                raise

    async def remove_unrecorded(self, repository: Repository, rows: Collection[PinRow]) -> None:
        """Remove those of the pins just made whose dataset no longer records their commit.

        The removal of a dataset deletes its recorded commits, then lists the pins to remove: either
        it sees these pins, or this method sees the removal.
        """
        made = {(row.owner, row.commit) for row in rows}
        stale: dict[str, list[CommitId]] = {}
        for row in await self._catalog.list_stale_pins(repository.name.key):
            if (row.owner, row.commit) in made:
                stale.setdefault(row.owner, []).append(row.commit)
        for owner, commits in stale.items():
            await self.remove(repository, commits, owner)

    async def settle(self, repository: Repository) -> None:
        """Finish pending cleanups."""
        pending = self._pending.get(repository.name.key, [])
        while pending:
            await self._settle(repository, pending[0])
            del pending[0]

    async def _write(
        self,
        repository: Repository,
        rows: Sequence[PinRow],
        owner: str,
        publish: Callable[[Collection[CommitId]], Awaitable[None]] | None = None,
    ) -> None:
        """Write refs, then rows; remove the new refs where the rows cannot be written."""
        present = await repository.all_refs()
        new = frozenset(row.commit for row in rows if pin_ref(owner, row.commit) not in present)
        # cancelled in between, it would leave refs without rows
        with anyio.CancelScope(shield=True):
            await commit(repository, {pin_ref(owner, oid): (None, oid) for oid in new})
            try:
                if publish and new:
                    await publish(new)
                await self._catalog.put_pins(rows)
            except Exception:
                await self._undo(repository, _Unfinished(owner, new))
                raise

    async def _undo(self, repository: Repository, pending: _Unfinished) -> None:
        try:
            await self._settle(repository, pending)
        except Exception as error:  # noqa: BLE001 the caller raises the first error
            fields = {"owner": pending.owner, "count": len(pending.commits), "detail": str(error)}
            log.warning("pins.pending", mirror=str(repository.name), **fields)
            self._pending.setdefault(repository.name.key, []).append(pending)

    async def _settle(self, repository: Repository, pending: _Unfinished) -> None:
        """Bring refs and rows in line as they are now; a commit pinned since stays pinned."""
        await recover(repository)
        refs, owner = await repository.all_refs(), pending.owner
        listed = await self._catalog.list_pins(repository.name.key, owner=owner)
        without_row = pending.commits - {row.commit for row in listed}
        refs_alone = {oid for oid in without_row if pin_ref(owner, oid) in refs}
        if restored := [row for row in pending.rows if row.commit in refs_alone]:
            await self._catalog.put_pins(restored)
        await _delete_refs(repository, refs_alone - {row.commit for row in restored}, owner)


async def _delete_refs(repository: Repository, commits: Collection[CommitId], owner: str) -> None:
    if not exists(repository.path):
        return
    present = await repository.all_refs()
    refs = {pin_ref(owner, oid): oid for oid in commits}
    await commit(repository, {ref: (oid, None) for ref, oid in refs.items() if ref in present})
