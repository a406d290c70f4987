"""Pin a dataset's commits: add and sync mirrors, fetch and verify commits, pin them.

Writes to the catalog only through the mirrors. A failing mirror affects its own commits only, each
gets a reason. Every step can be repeated, so after a crash the import starts over.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import anyio
import anyio.to_thread

from ..catalog import ALL_COMMITS, MirrorRow, PinRow
from ..errors import MirrordError, StoppingError, UpstreamNotFoundError
from ..host.files import read_plain, sync_directory
from ..jobs.operations import together
from ..mirrors.quarantine import SPOOL_PREFIX
from ..mirrors.refs import write_durably
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import image_upstream
from ..model import FROM_IMAGE, CommitId, CommitRole, DatasetName, MirrorName
from ..presence import matching
from ..protocol import Progress, ProgressSink
from ..telemetry import log


class PinOutcome(NamedTuple):
    """The outcome for one mirror.

    `refused` has the reason of each commit without a pin (`*`: all of them), `found` the commit of
    each revision, of each recorded id that is an annotated tag, and of each that lacks its parents
    upstream.
    """

    refused: dict[str, str]
    found: dict[str, CommitId]


def owner_of(dataset: str) -> str:
    """Return the owner of a dataset's pins."""
    return f"dataset/{dataset}"


class Standing(NamedTuple):
    """A dataset's pins with their reasons, by mirror key; `whole` are mirrors that have all of
    theirs, each with a proof.
    """

    pins: dict[str, dict[CommitId, str]]
    whole: set[str]

    def same(
        self,
        names: Collection[str],
        commits: Mapping[str, Mapping[CommitId, str]],
        revisions: Mapping[str, Collection[str]],
    ) -> set[str]:
        """Return the keys of mirrors of which an import asks for nothing but pins that stand."""
        return {
            key
            for key in self.whole.intersection(names)
            if not revisions.get(key) and self.pins[key].items() >= commits.get(key, {}).items()
        }


async def list_standing(
    mirrors: Mirrors, dataset: DatasetName, keys: Collection[str] | None = None
) -> Standing:
    """Look at the pins of a dataset, in all its mirrors or in some."""
    names: dict[str, MirrorName] = {}
    standing = Standing({}, set())
    for row in await mirrors.catalog.list_pins(owner=owner_of(dataset)):
        if keys is None or row.mirror.key in keys:
            names[row.mirror.key] = row.mirror
            standing.pins.setdefault(row.mirror.key, {})[row.commit] = row.reason

    async def look(batch: Sequence[MirrorName]) -> None:
        asked = {name: standing.pins[name.key].keys() for name in batch}
        with suppress(MirrordError):  # each is looked at alone then
            pinned = await mirrors.list_pinned(asked, owner_of(dataset))
            standing.whole.update(name.key for name in pinned)

    had = [*names.values()]
    await together(look(had[first : first + _BATCH]) for first in range(0, len(had), _BATCH))
    return standing


async def pin_all(
    mirrors: Mirrors,
    dataset: DatasetName,
    names: Mapping[str, MirrorName],
    commits: Mapping[str, Mapping[CommitId, str]],
    revisions: Mapping[str, Collection[str]],
    sink: ProgressSink | None,
    *,
    is_synced: bool = False,
    urls: Mapping[str, str] = MappingProxyType({}),
    standing: Standing | None = None,
) -> dict[str, PinOutcome]:
    """Pin all commits that can be pinned, and those of `revisions`. All arguments by mirror key.

    `commits` map to their pin's reason; `urls` are upstreams of mirrors that do not exist yet,
    where they are not the configured; `standing` is what was looked at already. A mirror that lacks
    some is synced once more, unless it was just synced (`is_synced`). Progress counts commits, of
    mirrors that can be had; its note is about the last mirror.
    """
    total, done = sum(map(len, (*commits.values(), *revisions.values()))), 0
    slots = anyio.Semaphore(mirrors.settings().sync.concurrency)
    if standing is None and not is_synced:
        standing = await list_standing(mirrors, dataset, names)
    same = standing.same(names, commits, revisions) if standing else set[str]()
    outcomes = {key: PinOutcome({}, {}) for key in same}
    done += sum(len(commits.get(key, {})) for key in same)

    def report(note: str) -> None:
        if sink:
            sink(Progress(done=done, total=total, unit="commits", note=note))

    async def pin_mirror(key: str) -> None:
        nonlocal done, total
        name, request = names[key], (commits.get(key, {}), revisions.get(key, ()))
        url = urls.get(key)

        def report_step(step: Progress) -> None:
            of_total = f"/{step.total}" if step.total else ""
            report(f"{name.repo}: {step.note or step.unit} {step.done}{of_total}")

        async with slots:
            try:
                outcomes[key] = await _pin(
                    mirrors, dataset, name, url, *request, is_synced, report_step
                )
            except StoppingError:
                raise
            except MirrordError as error:
                fields = {"code": error.code, "detail": error.message}
                log.warning("dataset.mirror_failed", dataset=dataset, mirror=str(name), **fields)
                outcomes[key] = PinOutcome({ALL_COMMITS: error.message}, {})
                # not done: a rate counted from what fails at once would promise too much
                total -= sum(map(len, request))
            else:
                done += sum(map(len, request))
        report(name.repo)

    await together(pin_mirror(key) for key in names if key not in same)
    return outcomes


_BATCH = 200  # mirrors that a worker looks at in one call


async def _pin(
    mirrors: Mirrors,
    dataset: DatasetName,
    name: MirrorName,
    url: str | None,
    commits: Mapping[CommitId, str],
    revisions: Collection[str],
    is_synced: bool,
    sink: ProgressSink,
) -> PinOutcome:
    row = await _have(mirrors, name, url, sink)
    is_new = row.synced_at is None
    refused = await _ensure(mirrors, row.name, commits, revisions, sink)
    resolved = await mirrors.resolve_revisions(row.name, revisions)
    # upstream may serve through its refs a commit that it refuses by id
    if not (is_new or is_synced) and (refused or len(resolved) < len(revisions)):
        with suppress(MirrordError):
            await mirrors.sync(row.name, sink)
            refused = await _ensure(mirrors, row.name, refused, revisions, sink)
            resolved = await mirrors.resolve_revisions(row.name, revisions)
    cut = await mirrors.replace_shallow(row.name, refused) if refused and not is_synced else {}
    refused = {commit: reason for commit, reason in refused.items() if commit not in cut}
    owner = owner_of(dataset)
    pinned = {} if is_new else await mirrors.standing_pins(row.name, owner)
    if not is_synced:  # an import: what it finds goes into its rows
        tags = await mirrors.find_tags(row.name, [*(commits.keys() - pinned.keys())])
        other = tags | cut
        commits = {other.get(commit, commit): reason for commit, reason in commits.items()}
        resolved = resolved | other
    asked: dict[CommitId, str] = dict.fromkeys(resolved.values(), CommitRole.BASE) | {**commits}
    new = {
        commit: reason
        for commit, reason in asked.items()
        if commit not in refused and pinned.get(commit) != reason
    }
    if new:
        refused |= await mirrors.pin_each(row.name, new, owner)
    if len(set(refused.values())) == 1 and len(refused) == len(commits) + len(revisions) > 1:
        reason = next(iter(refused.values()))  # for example, upstream is down
        return PinOutcome({ALL_COMMITS: reason}, resolved)
    return PinOutcome({str(commit): reason for commit, reason in refused.items()}, resolved)


async def _have(
    mirrors: Mirrors, name: MirrorName, url: str | None, sink: ProgressSink
) -> MirrorRow:
    """Add a mirror where it is missing, and sync one that never was; return the row before that.

    Cancelled, it leaves no mirror that nobody else asked for: the schedule would sync that one.
    """
    row = await mirrors.catalog.find_mirror(name.key)
    is_known = row is not None
    row = row or await mirrors.add(name.repo, url)
    if row.synced_at is not None:
        return row
    if name.owner == FROM_IMAGE:
        path = image_upstream(mirrors.settings(), row.name)
        if not await anyio.to_thread.run_sync(path.exists):
            fact = "its image was not imported: `mirrord environment build --dataset NAME --images`"
            raise UpstreamNotFoundError(f"cannot sync mirror {row.name}: {fact}")
    try:
        await mirrors.sync(row.name, sink)
    except anyio.get_cancelled_exc_class():
        if not is_known:
            with anyio.CancelScope(shield=True):
                await mirrors.withdraw(row.name)
        raise
    return row


_FROM_COMMIT = re.compile(r"[0-9a-f]{40}[~^]")


async def _ensure(
    mirrors: Mirrors,
    name: MirrorName,
    commits: Collection[CommitId],
    revisions: Collection[str],
    sink: ProgressSink,
) -> dict[CommitId, str]:
    """Fetch missing commits, also those from which revisions step back, such as `SHA^`."""
    roots = {CommitId(revision[:40]) for revision in revisions if _FROM_COMMIT.match(revision)}
    refused = await mirrors.ensure_commits(name, [*{*commits, *roots}], sink)
    return {commit: refused[commit] for commit in commits if commit in refused}


async def unpin(mirrors: Mirrors, rows: Collection[PinRow], sink: ProgressSink | None) -> bool:
    """Remove pins, except those of a failing mirror. Return whether all are removed."""
    done = 0
    groups: dict[tuple[MirrorName, str], list[CommitId]] = {}
    for row in rows:
        groups.setdefault((row.mirror, row.owner), []).append(row.commit)
    slots = anyio.Semaphore(mirrors.settings().sync.concurrency)
    failed: list[MirrorName] = []

    def report(note: str) -> None:
        if sink:
            sink(Progress(done=done, total=len(groups), unit="mirrors", note=note))

    async def unpin_mirror(name: MirrorName, owner: str, commits: list[CommitId]) -> None:
        nonlocal done
        try:
            async with slots:
                await mirrors.unpin(name, commits, owner=owner)
        except StoppingError:
            raise
        except (MirrordError, OSError) as error:
            fields = {"mirror": str(name), "owner": owner, "count": len(commits)}
            log.warning("pins.left", **fields, detail=str(error))
            failed.append(name)
        done += 1
        report(name.repo)

    report("remove its pins")
    await together(unpin_mirror(*group, commits) for group, commits in groups.items())
    return not failed


# -- the journal: a dataset's pins before an import or removal, in `quarantine/dataset-*` ----------
#
# It distinguishes a killed import from a lost catalog: both leave pins that no dataset records. It
# is written before the first pin is made or removed, and removed with its directory. A start keeps
# the pins that a journal lists and removes other pins of that dataset.

_FILE = "pins-before.json"

# mirror key and commit of each pin
PinKeys = frozenset[tuple[str, str]]


def pin_key(row: PinRow) -> tuple[str, str]:
    return row.mirror.key, str(row.commit)


def write_journal(directory: Path, owner: str, before: PinKeys) -> None:
    """Record the pins of an owner, flushed to disk."""
    content = json.dumps({"owner": owner, "pins": sorted(before)}).encode()
    write_durably(directory / _FILE, content)
    sync_directory(directory.parent)


def read_journals(quarantine: Path) -> dict[str, PinKeys]:
    """Return, by owner of killed imports, the pins that all its journals list."""
    keys: dict[str, PinKeys] = {}
    for path in matching(quarantine, f"{SPOOL_PREFIX}*/{_FILE}"):
        try:
            journal = json.loads(read_plain(path))
            owner = journal["owner"]
            pins = frozenset((key, commit) for key, commit in journal["pins"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("journal.unreadable", path=str(path), error=str(error))  # its pins stay
            continue
        keys[owner] = keys.get(owner, pins) & pins
    return keys
