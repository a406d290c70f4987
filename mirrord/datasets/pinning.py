"""Making a dataset's commits servable: mirrors added and synced, commits fetched, proven, pinned.

Owns the order of that work and its concurrency; writes to the catalog only through the mirrors. A
mirror that fails costs its own commits, each with a reason. Every step may be repeated, so after a
crash the whole is done again.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio

from ..catalog import EVERY, PinRow, roles_of
from ..errors import MirrordError, StoppingError
from ..host.files import sync_directory
from ..jobs.operations import together
from ..mirrors.quarantine import SPOOL_PREFIX
from ..mirrors.refs import write_durably
from ..mirrors.service import Mirrors
from ..model import CommitId, DatasetName, MirrorName
from ..protocol import Progress, ProgressSink
from ..telemetry import log


class PinOutcome(NamedTuple):
    """What became of one mirror's commits.

    `refused` says why some have no pin (`*`: all of them); `found` are the commits that revisions
    are at.
    """

    refused: dict[str, str]
    found: dict[str, CommitId]


def owner_of(dataset: str) -> str:
    """The owner of a dataset's pins."""
    return f"dataset/{dataset}"


async def pin_all(
    mirrors: Mirrors,
    dataset: DatasetName,
    names: Mapping[str, MirrorName],
    commits: Mapping[str, Mapping[CommitId, str]],
    revisions: Mapping[str, Collection[str]],
    sink: ProgressSink | None,
    *,
    is_synced: bool = False,
) -> dict[str, PinOutcome]:
    """Pin every commit possible, by mirror key; also those that revisions are at.

    A mirror that lacks some is synced once more, unless that has just been done (`is_synced`).
    `commits` have their pin's reason. Progress counts commits; its note is the last mirror's.
    """
    total, done = sum(map(len, (*commits.values(), *revisions.values()))), 0
    slots = anyio.Semaphore(mirrors.settings().sync.concurrency)
    outcomes: dict[str, PinOutcome] = {}

    def report(note: str) -> None:
        if sink:
            sink(Progress(done=done, total=total, unit="commits", note=note))

    async def pin_mirror(key: str) -> None:
        nonlocal done
        name, wanted = names[key], (commits.get(key, {}), revisions.get(key, ()))

        def pass_on(step: Progress) -> None:
            of_total = f"/{step.total}" if step.total else ""
            report(f"{name.repo}: {step.note or step.unit} {step.done}{of_total}")

        async with slots:
            try:
                outcomes[key] = await _pin(mirrors, dataset, name, *wanted, is_synced, pass_on)
            except StoppingError:
                raise
            except MirrordError as error:
                facts = {"code": error.code, "detail": error.message}
                log.warning("dataset.mirror_failed", dataset=dataset, mirror=str(name), **facts)
                outcomes[key] = PinOutcome({EVERY: error.message}, {})
        done += sum(map(len, wanted))
        report(name.repo)

    await together(pin_mirror(key) for key in names)
    return outcomes


async def _pin(
    mirrors: Mirrors,
    dataset: DatasetName,
    name: MirrorName,
    commits: Mapping[CommitId, str],
    revisions: Collection[str],
    is_synced: bool,
    sink: ProgressSink,
) -> PinOutcome:
    row = await mirrors.catalog.find_mirror(name.key) or await mirrors.add(name.repo)
    is_new = row.synced_at is None
    if is_new:
        await mirrors.sync(row.name, sink)
    refused = await mirrors.ensure_commits(row.name, list(commits), sink)
    found = await mirrors.resolve_revisions(row.name, revisions)
    # upstream may serve by its refs what it does not serve by id
    if not (is_new or is_synced) and (refused or len(found) < len(revisions)):
        with suppress(MirrordError):
            await mirrors.sync(row.name, sink)
            refused = await mirrors.ensure_commits(row.name, list(refused), sink)
            found = await mirrors.resolve_revisions(row.name, revisions)
    owner = owner_of(dataset)
    standing = {} if is_new else await mirrors.standing_pins(row.name, owner)
    by_reason: dict[str, set[CommitId]] = {}
    roles_found = {found[each]: ", ".join(sorted(roles_of(each))) for each in found}
    for commit, reason in (roles_found | {**commits}).items():
        if commit not in refused and standing.get(commit) != reason:
            by_reason.setdefault(reason, set()).add(commit)
    for reason, group in sorted(by_reason.items()):
        refused |= await mirrors.pin(row.name, group, owner=owner, reason=reason)
    return PinOutcome(_in_short(refused, len(commits) + len(revisions)), found)


def _in_short(refused: Mapping[CommitId, str], count: int) -> dict[str, str]:
    """Reasons by commit; one under `*` when all commits share it, as when upstream is away."""
    reasons = set(refused.values())
    if len(reasons) == 1 and len(refused) == count > 1:
        return {EVERY: reasons.pop()}
    return {str(commit): reason for commit, reason in refused.items()}


async def unpin(mirrors: Mirrors, rows: Collection[PinRow]) -> bool:
    """Remove pins; those of a mirror that fails stay. Answers whether all are removed."""
    groups: dict[tuple[MirrorName, str], list[CommitId]] = {}
    for row in rows:
        groups.setdefault((row.mirror, row.owner), []).append(row.commit)
    slots = anyio.Semaphore(mirrors.settings().sync.concurrency)
    left: list[MirrorName] = []

    async def unpin_mirror(name: MirrorName, owner: str, commits: list[CommitId]) -> None:
        try:
            async with slots:
                await mirrors.unpin(name, commits, owner=owner)
        except StoppingError:
            raise
        except (MirrordError, OSError) as error:
            facts = {"mirror": str(name), "owner": owner, "count": len(commits)}
            log.warning("pins.left", **facts, detail=str(error))
            left.append(name)

    await together(unpin_mirror(*whose, commits) for whose, commits in groups.items())
    return not left


# -- the journal of an import or removal, in `quarantine/dataset-*`: the dataset's pins before --
#
# It tells a killed import from a lost catalog: both leave pins in a mirror that no dataset records.
# It is on disk before the first pin is made or removed, and goes with its directory. So a start
# keeps the pins that a journal lists, and removes other pins of its dataset.

_FILE = "pins-before.json"

PinKeys = frozenset[tuple[str, str]]
"""Mirror key and commit of each pin."""


def pin_key(row: PinRow) -> tuple[str, str]:
    return row.mirror.key, str(row.commit)


def write_journal(directory: Path, owner: str, before: PinKeys) -> None:
    """Record durably which pins an owner has."""
    content = json.dumps({"owner": owner, "pins": sorted(before)}).encode()
    write_durably(directory / _FILE, content)
    sync_directory(directory.parent)


def read_journals(quarantine: Path) -> dict[str, PinKeys]:
    """The owners of pins whose work was killed, each with the pins that all its journals list."""
    found: dict[str, PinKeys] = {}
    for path in quarantine.glob(f"{SPOOL_PREFIX}*/{_FILE}"):
        try:
            facts = json.loads(path.read_bytes())
            owner, pins = facts["owner"], frozenset((key, commit) for key, commit in facts["pins"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("journal.unreadable", path=str(path), error=str(error))  # its pins stay
            continue
        found[owner] = found.get(owner, pins) & pins
    return found
