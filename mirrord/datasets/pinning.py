"""Making a dataset's commits servable: mirrors added and synced, commits fetched, proven, pinned.

Owns the order of that work and its concurrency; writes to the catalog only through the mirrors. A
mirror that fails costs its own commits, each with a reason. Every step may be repeated, so after a
crash the whole is done again.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from ..catalog import EVERY, PinRow
from ..errors import MirrordError, StoppingError
from ..host.files import sync_directory
from ..mirrors.quarantine import SPOOL_PREFIX
from ..mirrors.service import Mirrors
from ..mirrors.transaction import write_durably
from ..model import CommitId, DatasetName, MirrorName
from ..protocol import Progress, ProgressSink
from ..telemetry import log

Refused = dict[CommitId, str]
"""Why commits of one mirror have no pin."""


def owner_of(dataset: str) -> str:
    """The owner of a dataset's pins."""
    return f"dataset/{dataset}"


def in_short(refused: Refused, commits: Collection[CommitId]) -> dict[str, str]:
    """Reasons by commit; one under `*` when all commits share it, as when their mirror failed."""
    reasons = set(refused.values())
    if len(reasons) == 1 and len(refused) == len(commits) > 1:
        return {EVERY: reasons.pop()}
    return {str(commit): reason for commit, reason in refused.items()}


async def pin_all(
    mirrors: Mirrors,
    dataset: DatasetName,
    names: Mapping[str, MirrorName],
    commits: Mapping[str, Mapping[CommitId, str]],
    sink: ProgressSink | None,
) -> dict[str, Refused]:
    """Pin every commit possible; answers the others by mirror key.

    `commits` have their pin's reason. Progress counts commits; its note is the last mirror's.
    """
    total, done = sum(map(len, commits.values())), 0
    slots = anyio.Semaphore(mirrors.settings().sync.concurrency)
    refused: dict[str, Refused] = {}

    def report(note: str) -> None:
        if sink:
            sink(Progress(done=done, total=total, unit="commits", note=note))

    async def pin_mirror(key: str) -> None:
        nonlocal done
        name = names[key]

        def pass_on(step: Progress) -> None:
            of_total = f"/{step.total}" if step.total else ""
            report(f"{name.repo}: {step.note or step.unit} {step.done}{of_total}")

        async with slots:
            try:
                refused[key] = await _pin(mirrors, dataset, name, commits[key], pass_on)
            except StoppingError:
                raise
            except MirrordError as error:
                facts = {"code": error.code, "detail": error.message}
                log.warning("dataset.mirror_failed", dataset=dataset, mirror=str(name), **facts)
                refused[key] = dict.fromkeys(commits[key], error.message)
        done += len(commits[key])
        report(name.repo)

    try:
        async with anyio.create_task_group() as tasks:
            for key in commits:
                tasks.start_soon(pin_mirror, key)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return {key: reasons for key, reasons in refused.items() if reasons}


async def _pin(
    mirrors: Mirrors,
    dataset: DatasetName,
    name: MirrorName,
    commits: Mapping[CommitId, str],
    sink: ProgressSink,
) -> Refused:
    row = await mirrors.catalog.find_mirror(name.key) or await mirrors.add(name.repo)
    is_new = row.synced_at is None
    if is_new:
        await mirrors.sync(row.name, sink)
    refused = await mirrors.ensure_commits(row.name, list(commits), sink)
    if refused and not is_new:  # upstream may serve by its refs what it does not serve by id
        with suppress(MirrordError):
            await mirrors.sync(row.name, sink)
            refused = await mirrors.ensure_commits(row.name, list(refused), sink)
    by_reason: dict[str, list[CommitId]] = {}
    for commit, reason in commits.items():
        if commit not in refused:
            by_reason.setdefault(reason, []).append(commit)
    for reason, group in sorted(by_reason.items()):
        owner = owner_of(dataset)
        refused |= await mirrors.pin(row.name, group, owner=owner, reason=reason)
    return refused


async def unpin(mirrors: Mirrors, rows: Collection[PinRow]) -> bool:
    """Remove pins; those of a mirror that fails stay. Answers whether all are removed."""
    is_done = True
    groups: dict[tuple[MirrorName, str], list[CommitId]] = {}
    for row in rows:
        groups.setdefault((row.mirror, row.owner), []).append(row.commit)
    for (name, owner), commits in groups.items():
        try:
            await mirrors.unpin(name, commits, owner=owner)
        except StoppingError:
            raise
        except (MirrordError, OSError) as error:
            facts = {"mirror": str(name), "owner": owner, "count": len(commits)}
            log.warning("pins.left", **facts, detail=str(error))
            is_done = False
    return is_done


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
