"""Pins: refs that keep recorded commits alive, each with an owner.

Owns `refs/mirrord/pins/OWNER/COMMIT`. A pin is a proof: the ref is written only after everything the commit reaches was found in
the mirror. `update-ref` alone would pin a commit whose tree lacks a blob. The refs are the truth; the catalog follows them. An
error leaves both as they were, or, where the disk does not let that be, a debt that is settled later; a crash leaves a ref
without a row at worst, and a start brings them in line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import anyio
import structlog

from ..catalog import Catalog, PinRow
from ..errors import GitFailedError, InvalidRequestError, MirrordError, ResourceError
from ..git.batch import object_info
from ..model import CommitId, shown
from .bisect import find_bad
from .repository import PINS, Refs, Repository
from .transaction import Transaction, commit, recover

_OWNER = re.compile(r"dataset/[A-Za-z0-9][A-Za-z0-9._-]{0,99}|person/\d{1,10}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FAILURES = 400

ADOPTED = "found in the mirror"
"""The reason of a pin that the catalog did not know at a start: a crash in a pin, or a catalog that is lost or older."""

PERSON = "person/"
"""What no dataset records: only the pin itself and the catalog know of it."""

log = structlog.get_logger()


def stands_alone(row: PinRow) -> bool:
    """Whether nothing but the pin says that its commit is wanted: a person's, or one whose dataset went with a catalog."""
    return row.owner.startswith(PERSON) or row.reason == ADOPTED


@dataclass(frozen=True, slots=True)
class Debt:
    """What an operation that failed still owes: of an owner's `commits`, those whose ref stands get their row of `rows` back, and
    those without one lose their ref.
    """

    owner: str
    commits: frozenset[CommitId]
    rows: tuple[PinRow, ...] = ()


def check_owner(owner: str) -> None:
    """A pin belongs to `dataset/NAME` or `person/UID`."""
    if not _OWNER.fullmatch(owner) or ".." in owner or owner.endswith((".lock", ".")):
        raise InvalidRequestError(
            f"cannot pin for {shown(owner)}: an owner is dataset/NAME or person/UID"
        )


def is_pin(ref: str) -> bool:
    """Whether a ref has the name of a pin."""
    owner, _, commit_id = ref.removeprefix(PINS).rpartition("/")
    return (
        ref.startswith(PINS)
        and bool(_OWNER.fullmatch(owner))
        and bool(_COMMIT.fullmatch(commit_id))
    )


def read_pins(refs: Refs) -> list[tuple[str, CommitId]]:
    """The pins among refs, as (owner, commit)."""
    found = []
    for ref, oid in refs.items():
        if is_pin(ref) and ref.endswith(oid):
            found.append((ref.removeprefix(PINS).rpartition("/")[0], CommitId(oid)))
    return found


async def verify(repository: Repository, commits: Collection[CommitId]) -> dict[CommitId, str]:
    """Prove that each is a commit that can be served; answers those that are not, with the reason."""
    refused = await _must_be_commits(repository, commits)
    absent = await repository.absent(set(commits) - refused.keys())
    refused |= {CommitId(oid): f"commit {oid} is not in the mirror" for oid in absent}

    async def attempt(some: Sequence[CommitId]) -> None:
        await repository.verify_closure(some)

    present = sorted(set(commits) - refused.keys())
    failed = await find_bad(
        present, attempt, is_theirs=_blames_commits, budget=_FAILURES, hopeless=_FAILURES
    )
    return refused | {oid: error.message for oid, error in failed.items()}


def _blames_commits(error: MirrordError) -> bool:
    return isinstance(error, GitFailedError) or not isinstance(error, ResourceError)


async def keep(
    repository: Repository, catalog: Catalog, rows: Sequence[PinRow], owner: str, debts: list[Debt]
) -> None:
    """Make pins of commits that were verified: refs, then their rows. Where the rows cannot be written no ref is left.

    What cannot be undone at once is added to `debts`.
    """
    present = await repository.all_refs()
    fresh = [row.commit for row in rows if f"{PINS}{owner}/{row.commit}" not in present]
    with anyio.CancelScope(shield=True):
        await _write_refs(repository, fresh, owner)
        try:
            await catalog.put_pins(rows)
        except Exception:
            await _settle_or_owe(repository, catalog, Debt(owner, frozenset(fresh)), debts)
            raise


async def give_up(
    repository: Repository,
    catalog: Catalog,
    commits: Collection[CommitId],
    owner: str,
    debts: list[Debt],
) -> None:
    """Remove pins: rows, then refs, so that a crash leaves a pin too many, never one that is only said.

    Where the refs cannot be removed the rows are put back; what cannot be undone at once is added to `debts`.
    """
    wanted = set(commits)
    rows = [
        row
        for row in await catalog.list_pins(repository.name.key, owner=owner)
        if row.commit in wanted
    ]
    with anyio.CancelScope(shield=True):
        await catalog.delete_pins(repository.name.key, commits, owner)
        try:
            await _delete_refs(repository, commits, owner)
        except Exception:  # a disk that fails is an OSError
            await _settle_or_owe(
                repository, catalog, Debt(owner, frozenset(wanted), tuple(rows)), debts
            )
            raise


async def give_up_unrecorded(
    repository: Repository, catalog: Catalog, rows: Collection[PinRow], debts: list[Debt]
) -> None:
    """Give up those of the pins just made that are of a dataset which no longer records their commit.

    A removal deletes what the dataset records, and then reads which pins to give up: it saw these, or it is seen here.
    """
    made = {(row.owner, row.commit) for row in rows}
    stale: dict[str, list[CommitId]] = {}
    for row in await catalog.list_stale_pins(repository.name.key):
        if (row.owner, row.commit) in made:
            stale.setdefault(row.owner, []).append(row.commit)
    for owner, commits in stale.items():
        await give_up(repository, catalog, commits, owner, debts)


async def settle(repository: Repository, catalog: Catalog, debt: Debt) -> None:
    """Bring refs and rows of a debt in line, as they are now: what was pinned since stays pinned."""
    await recover(repository)
    refs = await repository.all_refs()
    said = {row.commit for row in await catalog.list_pins(repository.name.key, owner=debt.owner)}
    open_ones = {
        oid for oid in debt.commits if f"{PINS}{debt.owner}/{oid}" in refs and oid not in said
    }
    back = [row for row in debt.rows if row.commit in open_ones]
    if back:
        await catalog.put_pins(back)
    await _delete_refs(repository, open_ones - {row.commit for row in back}, debt.owner)


async def _settle_or_owe(
    repository: Repository, catalog: Catalog, debt: Debt, debts: list[Debt]
) -> None:
    try:
        await settle(repository, catalog, debt)
    except Exception as error:  # noqa: BLE001 the caller hears of what came first
        log.warning(
            "pins.pending",
            mirror=str(repository.name),
            owner=debt.owner,
            count=len(debt.commits),
            detail=str(error),
        )
        debts.append(debt)


async def _write_refs(repository: Repository, commits: Collection[CommitId], owner: str) -> None:
    transaction = Transaction()
    for oid in commits:
        transaction.create(f"{PINS}{owner}/{oid}", oid)
    await commit(repository, transaction)


async def _delete_refs(repository: Repository, commits: Collection[CommitId], owner: str) -> None:
    """Those that are there, if there is a mirror."""
    if not repository.path.exists():
        return
    present = await repository.all_refs()
    transaction = Transaction()
    for oid in commits:
        if f"{PINS}{owner}/{oid}" in present:
            transaction.delete(f"{PINS}{owner}/{oid}", oid)
    await commit(repository, transaction)


async def _must_be_commits(
    repository: Repository, oids: Collection[CommitId]
) -> dict[CommitId, str]:
    """Which of the ids name something else than a commit, and what."""
    doing = f"look up commits of mirror {repository.name}"
    found = await object_info(repository.git, repository.path, oids, doing=doing)
    return {
        CommitId(each.oid): f"{each.oid} is a {each.kind}, not a commit"
        for each in found
        if each.kind not in {"commit", "missing"}
    }
