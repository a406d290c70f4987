"""The mirrors of a daemon: synced, maintained, read, pinned, put back to a record.

A first clone is made in quarantine and renamed, so a mirror that exists is complete.
"""

import re
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from .. import errors, protocol
from ..catalog import MirrorRow
from ..git.batch import object_info
from ..git.configuration import Remote
from ..git.objects.repository import resolve
from ..model import CommitId, MirrorName, Resolved, shown, utc_now
from ..presence import exists
from ..telemetry import mask_url
from ..workers.coalesce import Coalescer, SharedWork
from .history import columns_of, diff_records, get_record, list_records, read_record
from .inventory import Inventory
from .maintenance import maintain, size_bytes
from .moving import find_lacking, record_move
from .pinrefs import check_owner, pin_ref
from .proofs import are_proven, find_proven, prove
from .refs import is_followed, names_of_revision
from .repository import HISTORY, Repository
from .sharing import MirrorClaim
from .sync import move_refs, sync
from .upstreams.credentials import Credentials
from .upstreams.fetching import Fetcher
from .upstreams.shallow import fetch_parentless, find_parentless, is_shallow
from .upstreams.upstream import (
    REQUEST_PATIENCE_S,
    HostLimits,
    Upstream,
    default_url,
    parse_upstream,
    upstream_url,
)

# less than a cancelled import has until its cancellation is answered
_WITHDRAWAL_S = 2.0


@dataclass(kw_only=True, eq=False, repr=False)
class Mirrors(Inventory):
    """All mirrors, with the operations on them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hosts = HostLimits(concurrency=lambda: self.settings().sync.concurrency)
        self.credentials = Credentials(self.settings)
        self._syncs: Coalescer[protocol.Synced] = Coalescer()

    async def close(self) -> None:
        """Cancel running syncs; each leaves its mirror as it was."""
        await self._syncs.close()

    # -- syncs ----------------------------------------------------------------------------------

    async def sync(
        self,
        name: MirrorName,
        progress: protocol.ProgressSink | None = None,
        *,
        accept_loss: bool = False,
        retry_faults: bool = False,
    ) -> protocol.Synced:
        """Bring a mirror up to date with its upstream; join a sync that has not asked it yet.

        Raises and records an UpstreamError: an UpstreamLossError where upstream lost most of its
        refs, unless `accept_loss`. `retry_faults` asks for refs that upstream could not give.
        """
        resolved = await self.resolve_name(str(name))
        key = f"{resolved.key} {accept_loss} {retry_faults}"
        run = partial(self._sync, resolved, accept_loss, retry_faults)
        return await self._syncs.join(key, run, progress)

    def is_syncing(self, name: MirrorName) -> bool:
        """True if a sync runs or waits for its turn."""
        return self._syncs.runs(f"{name.key} ")

    async def remove(self, name: MirrorName) -> None:
        """Delete a mirror, and end its syncs first; raises ConflictError while something needs it.

        A sync holds the mirror's lock, also while it waits for a connection to its host.
        """
        row = await self.get(str(name))
        await self._must_be_unused(row.name)
        failure = f"cannot sync mirror {row.name}: it is being removed"
        await self._syncs.end(f"{row.name.key} ", errors.ConflictError(failure))
        await super().remove(name)

    async def withdraw(self, name: MirrorName) -> bool:
        """Remove a mirror that was never synced, and that nobody else syncs or needs."""
        row = await self.catalog.find_mirror(name.key)
        if row is None or row.synced_at is not None or self.is_syncing(name):
            return False
        # in a fleet, another daemon may have begun to sync it
        with suppress(errors.MirrordError), anyio.move_on_after(_WITHDRAWAL_S):
            await super().remove(name)
            return True
        return False

    async def _sync(
        self,
        name: MirrorName,
        accept_loss: bool,
        retry_faults: bool,
        work: SharedWork[protocol.Synced],
    ) -> protocol.Synced:
        started_at, began_s = utc_now(), time.monotonic()
        work.report(protocol.Progress(unit="syncs", note=protocol.QUEUED))
        await self._hosts.wait(parse_upstream((await self.get(str(name))).url).host)
        try:
            async with self.sharing.claim(name, work.report) as claim, self.lock(name):
                row = claim.row or await self.get(str(name))
                is_done = claim.is_fresh and not accept_loss and not retry_faults
                if not is_done:
                    result = await self._ask(row, accept_loss, retry_faults, work)
                    await self._record(row, result, claim)
            if is_done:  # after the claim was given back, which others wait for
                work.close()
                await self.follow(row.name)
                return _as_synced(row)
        except errors.ClaimLostError:
            raise  # the row has the result of the other node
        except errors.MirrordError as error:
            await self._record_failure(name, error, started_at)
            raise
        except Exception as error:
            doing = f"sync mirror {name}"
            await self._record_failure(name, errors.unexpected(error, doing), started_at)
            raise
        if to := result.redirected_to:
            url = mask_url(row.url)
            self.events.publish("mirror.redirected", mirror=str(row.name), url=url, to=to)
        took = round(time.monotonic() - began_s, 3)
        fields = {"summary": result.summary, "faults": len(result.faults), "duration_s": took}
        self.events.publish("mirror.synced", mirror=str(row.name), changed=result.changed, **fields)
        return result

    async def _ask(
        self,
        row: MirrorRow,
        accept_loss: bool,
        retry_faults: bool,
        work: SharedWork[protocol.Synced],
    ) -> protocol.Synced:
        """Follow what is published of a mirror, then bring it up to date with its upstream."""
        mirror, upstream = self.repository(row.name), parse_upstream(row.url)
        if await to_thread.run_sync(mirror.is_stub):
            await self.quarantine.discard(mirror.path)
        await self.catch_up(row.name)
        if is_here := exists(mirror.path):
            await mirror.must_be_ours()
        async with self._hosts.turn(upstream.host):
            # from here on a request is not joined: it may know of a push that this answer lacks
            work.close()
            work.report(protocol.Progress(unit="syncs", note="ask upstream for its refs"))
            target = nullcontext(mirror) if is_here else self._building(row.name)
            async with target as repository:
                return await sync(
                    self._fetcher(repository, upstream, work.report),
                    self.settings().upstream.refs,
                    known_faults=_known_faults(row),
                    accept_loss=accept_loss and is_here,
                    retry_faults=retry_faults,
                )

    async def _record_failure(
        self, name: MirrorName, error: errors.MirrordError, attempted_at: datetime
    ) -> None:
        """Record why a sync failed, so that the mirror is not shown as ready without a word."""
        await self.catalog.update_mirror(name.key, attempted_at=attempted_at, error=error.problem())
        self._unsynced[name.key] = error.code  # not its message, because health is public
        fact = {"code": error.code, "detail": error.message}
        self.events.publish("mirror.failed", mirror=str(name), **fact)

    async def _record(self, row: MirrorRow, result: protocol.Synced, claim: MirrorClaim) -> None:
        self._unsynced.pop(row.name.key, None)
        claim.is_synced = True
        now, repository = utc_now(), self.repository(row.name)
        columns: dict[str, Any] = {"ref_count": result.ref_count, "kept_count": result.kept_count}
        refs = await repository.all_refs()
        # an earlier sync may have failed before it was recorded
        if result.changed or row.size_bytes is None or row.history != refs.get(HISTORY):
            await claim.publish(repository)
            columns = await columns_of(repository, row.history)
            columns["size_bytes"] = await to_thread.run_sync(size_bytes, repository.path)
        faults = [fault.to_json() for fault in result.faults]
        columns |= {"default_branch": result.default_branch, "error": None, "ref_faults": faults}
        is_same = all(getattr(row, name) == value for name, value in columns.items())
        if not (is_same and claim.defers_recording(row)):
            columns |= {"synced_at": now, "attempted_at": now}
            await self.catalog.update_mirror(row.name.key, **columns)

    async def set_url(self, name: MirrorName, url: str, *, accept_loss: bool = False) -> None:
        """Follow another upstream from the next sync on; the mirror keeps all it has.

        Raises an UpstreamError where that does not answer; an UpstreamLossError where it lacks
        recorded or pinned commits, unless `accept_loss`.
        """
        row, upstream = await self.get(str(name)), parse_upstream(url)
        configured = default_url(self.settings(), row.name)
        if row.url == upstream.url:
            await self.catalog.update_mirror(row.name.key, configured_url=configured)
            return
        await self._hosts.wait(upstream.host)
        async with self.sharing.claim(row.name) as claim, self.lock(row.name):
            await self.catch_up(row.name, ask=True)  # also where it was never on this disk
            repository = self.repository(row.name)
            if exists(repository.path):
                await repository.must_be_ours()
                if not accept_loss:
                    await self._must_have_commits(row, upstream)
                await record_move(repository, f"upstream set to {upstream.shown}")
                await claim.publish(repository)
            await self.catalog.update_mirror(
                row.name.key,
                url=upstream.url,
                configured_url=configured,
                error=None,
                ref_faults=[],  # which were the former upstream's
            )
        self.events.publish("mirror.moved", mirror=str(row.name), url=upstream.shown)

    async def _must_have_commits(self, row: MirrorRow, upstream: Upstream) -> None:
        commits = {it.commit for it in await self.catalog.list_recorded(row.name.key)}
        commits |= {pin.commit for pin in await self.catalog.list_pins(row.name.key)}
        commits -= await self.repository(row.name).absent(commits)
        fetcher = self._fetcher(self.repository(row.name), upstream, None)
        async with self._hosts.turn(upstream.host):
            await fetcher.offer(self.settings().upstream.refs)
            lacking = await find_lacking(self.git, fetcher, commits)
        if lacking:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise errors.UpstreamLossError(
                f"cannot set the upstream of mirror {row.name}: {upstream.shown} lacks recorded"
                f" commit {lacking[0]}{more}",
                hint="nothing was changed; if it is the right one, `--accept-loss` follows it, and"
                " the mirror keeps what it has",
                mirror=str(row.name),
                lacking=lacking,
            )

    # -- what other daemons published -----------------------------------------------------------

    async def follow(self, name: MirrorName) -> bool:
        """Bring a mirror to its newest generation; return whether that was new here."""
        async with self.lock(name):
            return await self.catch_up(name, ask=True)

    async def catch_up(self, name: MirrorName, *, ask: bool = False) -> bool:
        """Do the same under the mirror's lock; without `ask`, the catalog is not queried."""
        mirror = self.repository(name)
        if not await self.sharing.is_behind(mirror, ask=ask):
            return False
        target = nullcontext(mirror) if exists(mirror.path) else self._building(name)
        async with target as repository:
            await self.sharing.follow(repository)
        await self.pins.follow(self.repository(name))
        self.events.publish("mirror.followed", mirror=str(name))
        return True

    def outages(self) -> list[str]:
        """Report that the last sync of every mirror failed."""
        if not self._names or not self._names.keys() <= self._unsynced.keys():
            return []
        name, count = next(iter(self._names)), len(self._names)
        failed = f"{name}: cannot sync it ({self._unsynced[name]})"
        return [f"no mirror can be synced ({count} of {count} fail); {failed}"]

    def warnings(self) -> list[str]:
        """Report mirrors whose last sync met an unexpected error, which no retry may mend."""
        crashed = sorted(key for key, code in self._unsynced.items() if code == "internal")
        if not crashed:
            return []
        others = f" and {len(crashed) - 1} more" if len(crashed) > 1 else ""
        hint = "this is a bug; the daemon's log has the details"
        return [f"cannot sync mirror {crashed[0]}{others}: an unexpected error; {hint}"]

    async def maintain(
        self, name: MirrorName, progress: protocol.ProgressSink | None = None
    ) -> None:
        """Pack a mirror, and remove stale files."""
        row = await self.get(str(name))
        repository = self.repository(row.name)
        if not exists(repository.path):
            return
        await self.quarantine.clean()
        async with self.lock(row.name):
            await repository.must_be_ours()
            await maintain(repository, progress)
        size = await to_thread.run_sync(size_bytes, repository.path)
        await self.catalog.update_mirror(row.name.key, size_bytes=size)
        self.events.publish("mirror.maintained", mirror=str(row.name), size_bytes=size)

    async def _synced(
        self, name: MirrorName, progress: protocol.ProgressSink | None = None
    ) -> MirrorRow:
        """Return the row of a mirror, after following or syncing one that is not on disk."""
        row = await self.get(str(name))
        if not exists(self.path(row.name)):
            async with self.lock(row.name):
                is_filled = exists(self.path(row.name)) or await self.catch_up(row.name, ask=True)
            if not is_filled:
                await self.sync(row.name, progress)
        return row

    async def _on_disk(
        self, name: MirrorName, progress: protocol.ProgressSink | None = None
    ) -> MirrorName:
        """Return the name as the mirror has it, after following or syncing one that is not on disk.

        The catalog is not asked for a mirror of this daemon alone.
        """
        if not self.sharing.is_fleet and exists(self.path(known := self.get_name(str(name)))):
            return known
        return (await self._synced(name, progress)).name

    # -- commits --------------------------------------------------------------------------------

    async def resolve(self, name: MirrorName, commitish: str) -> Resolved:
        """Resolve a branch, tag or id; raises CommitNotFoundError.

        For a commit of a shallow upstream, that is what the mirror has in its place.
        """
        row = await self._synced(name)
        path, timeout = self.path(row.name), timedelta(seconds=30)

        async def find(text: str) -> Resolved:
            return await self.workers.run(resolve, path, text, timeout=timeout)

        try:
            return await find(commitish)
        except errors.CommitNotFoundError:
            if self.sharing.is_fleet:
                # another daemon may have published it just now; who waited for the mirror's lock
                # while this one followed finds nothing new, and the commit all the same
                await self.follow(row.name)
                with suppress(errors.CommitNotFoundError):
                    return await find(commitish)
            parentless = find_parentless(_faults(row), commitish)
            if parentless is None:
                raise
            return await find(parentless)

    async def resolve_revisions(
        self, name: MirrorName, revisions: Collection[str]
    ) -> dict[str, CommitId]:
        """Resolve branches, tags and full ids, also with steps back (`SHA^`, `v1.0~2`).

        Leaves out what is missing.
        """
        names = [(name, revision) for revision in revisions for name in names_of_revision(revision)]
        if not names:
            return {}
        doing = f"look up branches of mirror {name}"
        row = await self._synced(name)
        path, words = self.path(row.name), [name for name, _ in names]
        commits = await object_info(self.git, path, words, doing=doing)
        resolved: dict[str, CommitId] = {}
        for (_, revision), item in zip(names, commits, strict=True):
            if item.kind == "commit":
                resolved.setdefault(revision, CommitId(item.oid))
        for revision in revisions:
            if revision not in resolved and (it := find_parentless(_faults(row), revision)):
                resolved[revision] = it
        return resolved

    async def find_tags(
        self, name: MirrorName, oids: Collection[CommitId]
    ) -> dict[CommitId, CommitId]:
        """Return the commits of those ids that are annotated tags."""
        if not oids:
            return {}
        git, path = self.git, self.path(await self._on_disk(name))
        doing = f"look up commits of mirror {name}"
        unproven = {*oids} - await to_thread.run_sync(find_proven, path, oids)
        kinds = await object_info(git, path, sorted(unproven), doing=doing)
        tags = [item.name for item in kinds if item.kind == "tag"]
        names = [f"{tag}^{{commit}}" for tag in tags]
        commits = await object_info(git, path, names, doing=doing) if names else []
        return {
            CommitId(tag): CommitId(item.oid)
            for tag, item in zip(tags, commits, strict=True)
            if item.kind == "commit"
        }

    async def resolve_public(self, name: MirrorName, commitish: str) -> Resolved:
        """Resolve a public name, to a commit that a ref which follows upstream reaches.

        A commit that only private refs reach is CommitNotFoundError, like one that is missing.
        """
        ref = re.split(r"[~^]", commitish, maxsplit=1)[0]
        if not is_followed(ref if ref.startswith("refs/") else f"refs/{ref}"):
            raise errors.AccessError(
                f"cannot check out {shown(commitish)}: it names no branch, tag or commit",
                hint="the daemon's own refs are for administrators",
            )
        try:
            resolved = await self.resolve(name, commitish)
        except errors.CommitNotFoundError:
            resolved = None
        # what stands for a commit of a shallow upstream has a ref of ours alone
        is_public = resolved and (
            resolved.replaces or await self.repository(name).is_public(resolved.commit)
        )
        if resolved is None or not is_public:
            raise errors.CommitNotFoundError(
                f"cannot resolve commit {shown(commitish)}: no branch or tag of {name} has that"
                " name or reaches that id",
                hint="sync the mirror, check the spelling, or give the whole id",
            )
        return resolved

    def upstreams(self, row: MirrorRow) -> list[Upstream]:
        """List the upstream of a mirror and its fallbacks."""
        fallbacks = self.settings().upstream.fallbacks
        urls = [row.url, *(upstream_url(template, row.name) for template in fallbacks)]
        return [parse_upstream(url) for url in urls]

    async def ensure_commits(
        self,
        name: MirrorName,
        commits: Collection[CommitId],
        progress: protocol.ProgressSink | None = None,
    ) -> dict[CommitId, str]:
        """Fetch missing commits by id, from upstream and then from the fallbacks.

        Returns those still missing, with the reason that upstream gave.
        """
        name = await self._on_disk(name, progress)
        async with self.lock(name):
            repository = self.repository(name)
            unproven = {*commits} - await to_thread.run_sync(find_proven, repository.path, commits)
            if unproven:
                # mostly all is here, and what is proven need not be looked up again
                with suppress(errors.CorruptObjectError, errors.GitFailedError):
                    await prove(repository, sorted(unproven))
                    unproven -= await to_thread.run_sync(find_proven, repository.path, commits)
            missing = [CommitId(oid) for oid in sorted(await repository.absent(unproven))]
            reasons: dict[CommitId, str] = {}
            if not missing:
                return {}
            row = await self.get(str(name))
            for upstream in self.upstreams(row):
                path = self.path(name)
                unfetched = await self.fetch_into(row, path, upstream, missing, progress)
                reasons = {oid: reasons.get(oid, reason) for oid, reason in unfetched.items()}
                missing = sorted(reasons)
                if not missing:
                    break
            return {oid: reasons[oid] for oid in missing}

    async def replace_shallow(
        self, name: MirrorName, refused: Mapping[CommitId, str]
    ) -> dict[CommitId, CommitId]:
        """Fetch those of the refused commits that only lack their parents, because upstream does.

        Returns what the mirror has in the place of each. The caller pins it.
        """
        wanted = [oid for oid, reason in refused.items() if is_shallow(reason)]
        if not wanted:
            return {}
        row, parentless = await self.get(str(name)), dict[str, CommitId]()
        upstream = parse_upstream(row.url)
        async with self.lock(row.name):
            fetcher = self._fetcher(self.repository(row.name), upstream, None)
            with suppress(errors.UpstreamError, errors.GitFailedError):  # they stay refused
                async with self._hosts.turn(upstream.host):
                    parentless = await fetch_parentless(fetcher, wanted)
        return {CommitId(oid): commit for oid, commit in parentless.items()}

    async def fetch_into(
        self,
        row: MirrorRow,
        path: Path,
        upstream: Upstream,
        oids: Collection[CommitId],
        progress: protocol.ProgressSink | None = None,
    ) -> dict[CommitId, str]:
        """Fetch objects by id into a repository; return those that failed, with reasons."""
        fetcher = self._fetcher(Repository(self.git, row.name, path), upstream, progress)
        try:
            async with self._hosts.turn(upstream.host):
                failed = await fetcher.fetch(sorted(oids))
        except errors.UpstreamError as error:
            return dict.fromkeys(oids, error.message)
        return {CommitId(oid): error.message for oid, error in failed.items()}

    def _fetcher(
        self, repository: Repository, upstream: Upstream, progress: protocol.ProgressSink | None
    ) -> Fetcher:
        quiet = self.settings().upstream.timeout
        return Fetcher(repository, upstream, self.quarantine, quiet, self.credentials, progress)

    @asynccontextmanager
    async def asking(self, upstream: Upstream) -> AsyncIterator[Remote]:
        """Hold a connection to an upstream's host; give the upstream with its credentials."""
        async with self._hosts.turn(upstream.host), self.credentials.used(upstream) as remote:
            yield remote

    async def check_credential(self, url: str) -> protocol.CredentialCheck:
        """Ask an upstream for its refs with the entry that applies to it; changes nothing."""
        upstream = parse_upstream(url)
        entry = self.credentials.find(upstream.remote.url)
        fields: dict[str, Any] = {
            "url": upstream.shown,
            "credential": entry.url if entry else None,
            "secret": next(iter(entry.sources), None) if entry else None,
        }
        await self._hosts.wait(upstream.host, patience_s=REQUEST_PATIENCE_S)
        try:
            async with self.asking(upstream) as remote:
                await self.git.run(
                    "ls-remote", "--", remote.url, "HEAD", remote=remote,
                    timeout=self.settings().upstream.timeout,
                    doing=f"ask upstream {upstream.shown}",
                )  # fmt: skip
        except errors.UpstreamError as error:
            problem = protocol.Problem.from_json(error.problem())
            return protocol.CredentialCheck(**fields, accepted=False, error=problem)
        return protocol.CredentialCheck(**fields, accepted=True)

    # -- pins -----------------------------------------------------------------------------------

    async def pin(
        self, name: MirrorName, commits: Collection[CommitId], *, owner: str, reason: str
    ) -> dict[CommitId, str]:
        """Prove commits and pin them for an owner; return those refused, with why."""
        return await self.pin_each(name, dict.fromkeys(commits, reason), owner)

    async def pin_each(
        self, name: MirrorName, reasons: Mapping[CommitId, str], owner: str
    ) -> dict[CommitId, str]:
        """Do so with a reason for each."""
        check_owner(owner)
        name = await self._on_disk(name)
        repository = self.repository(name)
        async with self.sharing.claim(name) as claim, self.lock(name):

            async def publish(new: Collection[CommitId]) -> None:
                # other daemons have what published refs reach; their pins follow soon
                if not await self.sharing.has_published(repository, new):
                    await claim.publish(repository)

            await self.catch_up(name)
            await repository.must_be_ours()
            refused = await self.pins.add(repository, reasons, owner, publish)
        self.sharing.records_changed([name.key])
        if pinned := reasons.keys() - refused.keys():
            counts = {"count": len(pinned), "refused": len(refused)}
            self.events.publish("commits.pinned", mirror=str(name), owner=owner, **counts)
        return refused

    async def standing_pins(self, name: MirrorName, owner: str) -> dict[CommitId, str]:
        """Return the reasons of an owner's pins that have their ref: each is proven."""
        rows = await self.catalog.list_pins(name.key, owner=owner)
        refs = await self.repository(name).all_refs() if rows else {}
        return {row.commit: row.reason for row in rows if pin_ref(owner, row.commit) in refs}

    async def list_pinned(
        self, wanted: Mapping[MirrorName, Collection[CommitId]], owner: str
    ) -> set[MirrorName]:
        """Return the mirrors that have an owner's pins of all these commits, and their proof."""
        names = [*wanted]
        asked = [
            (self.path(name), {pin_ref(owner, commit): commit for commit in wanted[name]})
            for name in names
        ]
        answers = await self.workers.run(are_proven, asked)
        return {name for name, is_proven in zip(names, answers, strict=True) if is_proven}

    async def unpin(self, name: MirrorName, commits: Collection[CommitId], *, owner: str) -> None:
        check_owner(owner)
        row = await self.get(str(name))
        async with self.lock(row.name):
            await self.pins.remove(self.repository(row.name), commits, owner)
        self.sharing.records_changed([row.name.key])
        fact = {"owner": owner, "count": len(commits)}
        self.events.publish("commits.unpinned", mirror=str(row.name), **fact)

    async def restore_pins(self, name: MirrorName) -> None:
        """Restore lost pins: the catalog's, and those of what datasets record now."""
        async with self.lock(name):
            if self.sharing.is_fleet:
                await self.pins.follow(self.repository(name))
                return
            lost, refused = await self.pins.restore(self.repository(name))
        if lost:
            self.events.publish("pins.restored", mirror=str(name), count=lost, refused=refused)

    async def list_pins(self, name: MirrorName | None = None) -> list[protocol.Pin]:
        return [
            protocol.Pin(
                mirror=str(row.mirror),
                commit=row.commit,
                owner=row.owner,
                reason=row.reason,
                created_at=row.created_at,
            )
            for row in await self.catalog.list_pins(name.key if name else None)
        ]

    # -- ref history ----------------------------------------------------------------------------

    async def refs_log(self, name: MirrorName) -> list[protocol.RefRecord]:
        """List ref records, the newest first."""
        return await list_records(self.repository((await self._synced(name)).name))

    async def refs_diff(self, name: MirrorName, a: str, b: str) -> protocol.RefDiff:
        """Compare two records, each named by id or time."""
        repository = self.repository((await self._synced(name)).name)
        old = await get_record(repository, a)
        new = await get_record(repository, b)
        refs = await repository.all_refs()
        changes = await diff_records(repository, old.id, new.id, refs)
        return protocol.RefDiff(mirror=str(repository.name), a=old.id, b=new.id, changes=changes)

    async def refs_restore(self, name: MirrorName, at: str) -> protocol.RefDiff:
        """Move the refs back to a record, and keep the tips that they leave.

        The next sync follows upstream again.
        """
        row = await self._synced(name)
        repository = self.repository(row.name)
        async with self.sharing.claim(row.name) as claim, self.lock(row.name):
            await self.catch_up(row.name)
            record = await get_record(repository, at)
            before = await get_record(repository, "latest")
            recorded = await read_record(repository, record.id)
            present, why = await repository.all_refs(), f"restore {record.id[:12]}"
            refs, head = recorded.followed, recorded.head
            changes = (await move_refs(repository, present, refs, head, why=why)).changes
            await claim.publish(repository)
            columns = await columns_of(repository, row.history)
            await self.catalog.update_mirror(row.name.key, **columns)
        fact = {"at": record.id, "changes": len(changes)}
        self.events.publish("refs.restored", mirror=str(row.name), **fact)
        return protocol.RefDiff(mirror=str(row.name), a=before.id, b=record.id, changes=changes)


# a fault of the line says nothing of the ref, so the next sync does not leave it alone
_LINE_BROKE = {
    errors.TransferBrokenError.code,
    errors.UpstreamUnavailableError.code,
    errors.UpstreamTimeoutError.code,
}


def _known_faults(row: MirrorRow) -> list[protocol.RefFault]:
    """Return the refs that upstream could not give, without those whose transfer broke."""
    return [fault for fault in _faults(row) if fault.code not in _LINE_BROKE]


def _faults(row: MirrorRow) -> list[protocol.RefFault]:
    return [protocol.RefFault.from_json(fault) for fault in row.ref_faults]


def _as_synced(row: MirrorRow) -> protocol.Synced:
    return protocol.Synced(
        mirror=str(row.name),
        changed=False,
        summary="another daemon synced it",
        ref_count=row.ref_count or 0,
        kept_count=row.kept_count or 0,
        default_branch=row.default_branch,
        changes=[],
        faults=_faults(row),
    )
