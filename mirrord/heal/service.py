"""Heals as the daemon runs them.

A mirror whose heal left something unhealed is tried again after pauses that double, and at once
after a start, because an operator may just have repaired something. A heal reports its changes;
the audit after it judges the mirror.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

from anyio import to_thread

from .. import errors
from ..audit.defects import BadFile, FileKind
from ..audit.report import MirrorJudgement
from ..catalog import MirrorRow
from ..git.lfs import OBJECTS
from ..mirrors.history import columns_of, list_records
from ..mirrors.lfs import fetch_again
from ..mirrors.service import Mirrors
from ..model import AuditLevel, MirrorName
from ..presence import exists, is_dir, lexists
from ..protocol import Audit, Progress, ProgressSink, Repair
from ..telemetry import log
from ..units import Backoff
from .donors import STORE, Donors, open_store
from .publish import DamagedFiles
from .repair import MirrorRepair

# of a mirror whose heal failed: each attempt may fetch it whole from upstream
_backoff = partial(Backoff, timedelta(minutes=10), timedelta(hours=24))


class Heals:
    """Repairs mirrors, and schedules what has to be tried again."""

    def __init__(self, mirrors: Mirrors) -> None:
        self.mirrors, self.catalog = mirrors, mirrors.catalog
        self._lent: list[Path] = []
        # by key, mirrors with something unhealed, and when to try again
        self._unhealed: dict[str, tuple[MirrorName, Backoff, float]] = {}

    async def open(self) -> None:
        """Schedule heals of the mirrors that the last heals before the start left unhealed."""
        seen: set[str] = set()
        for audit in await self.catalog.list_audits():
            unhealed = _unhealed_mirrors(audit)
            # the newest audit of a mirror counts
            for mirror in unhealed.keys() - seen:
                if unhealed[mirror]:
                    name = MirrorName.parse(mirror)
                    self._unhealed[name.key] = (name, _backoff(), time.monotonic())
            seen |= unhealed.keys()

    def settle(self, audit: Audit) -> None:
        """Unschedule the mirrors that an audit found sound."""
        for mirror, is_unhealed in _unhealed_mirrors(audit).items():
            if not is_unhealed:
                self._unhealed.pop(MirrorName.parse(mirror).key, None)

    def due(self) -> list[MirrorName]:
        """List the mirrors to heal again now."""
        now = time.monotonic()
        return [name for name, _, when in self._unhealed.values() if when <= now]

    @contextmanager
    def lending(self, bundle: Path) -> Iterator[None]:
        """Add a bundle to the donors of every heal that begins in the block."""
        self._lent.append(bundle)
        try:
            yield
        finally:
            self._lent.remove(bundle)

    async def repair(self, judged: MirrorJudgement, progress: ProgressSink | None = None) -> Repair:
        """Heal what an audit found, as far as donors allow; the result has errors too."""
        name = judged.name
        try:
            repair = await self._repair(judged, progress)
        except errors.StoppingError:
            raise
        except (errors.MirrordError, OSError) as error:
            reason = f"cannot heal mirror {name}: {error}"
            reason = error.message if isinstance(error, errors.MirrordError) else reason
            log.warning("heal.failed", mirror=str(name), detail=reason)
            self._postpone(name)
            return Repair(mirror=str(name), error=reason)
        if repair.unhealed_count:
            self._postpone(name)
        else:
            self._unhealed.pop(name.key, None)
        self.mirrors.events.publish(
            "mirror.repaired", mirror=str(name), objects=sum(repair.objects.values()),
            files=len(repair.files), refs=len(repair.refs), unhealed=repair.unhealed_count,
        )  # fmt: skip
        return repair

    def _postpone(self, name: MirrorName) -> None:
        _, backoff, _ = self._unhealed.get(name.key, (name, _backoff(), math.inf))
        due_at = time.monotonic() + backoff.next().total_seconds()
        self._unhealed[name.key] = (name, backoff, due_at)

    async def _repair(self, judged: MirrorJudgement, progress: ProgressSink | None) -> Repair:
        row = await self.catalog.find_mirror(judged.name.key)
        if row is None and not await self.catalog.list_recorded(judged.name.key):
            return Repair(mirror=str(judged.name))  # it was removed since the audit
        row = row or await self.mirrors.add(judged.name.repo)
        refused = await self._make_again(row, progress)
        async with self.mirrors.lock(row.name), self.mirrors.quarantine.directory("heal") as work:
            pinned = {pin.commit for pin in await self.catalog.list_pins(row.name.key)}
            donors = Donors(self.mirrors, row, tuple(self._lent), work, progress)
            recorded = pinned | {recorded.commit for recorded in judged.rows}
            suspects, path = judged.examined.defects, self.mirrors.path(row.name)
            start = f"{OBJECTS}/"
            lfs = [name.removeprefix(start) for name in suspects if name.startswith(start)]
            if lfs:
                await fetch_again(self.mirrors, row, lfs, progress)
            repair = await MirrorRepair(donors, path, recorded, suspects).perform()
            if refused and not repair.objects:
                await self.mirrors.quarantine.discard(path)
                raise refused
            # after a lost record, the history on disk is the right one
            record = None if repair.history else row.history
            repository = self.mirrors.repository(row.name)
            columns = await columns_of(repository, record)
            if row.synced_at is None and (newest := await list_records(repository, limit=1)):
                columns["synced_at"] = newest[0].at
            await self.catalog.update_mirror(row.name.key, **columns)
        await self.mirrors.restore_pins(row.name)
        return repair

    async def _make_again(
        self, row: MirrorRow, progress: ProgressSink | None
    ) -> errors.UpstreamError | None:
        """Make a mirror that is gone again, from the store or upstream.

        Where both fail, make it empty for other donors, and return upstream's error.
        """
        path, root = self.mirrors.path(row.name), self.mirrors.quarantine.root
        if lexists(path) and not is_dir(path):
            bad = BadFile(path.name, FileKind.LAYOUT, "it is not a directory")
            async with self.mirrors.lock(row.name):
                damaged = await to_thread.run_sync(DamagedFiles, root, row.name, path.parent, [bad])
                await to_thread.run_sync(damaged.move, bad.path)
        if exists(path) or await self._follow_store(row.name, progress):
            return None
        try:
            await self.mirrors.sync(row.name, progress)
        except errors.UpstreamError as error:
            if row.history is None:
                raise
            await self.mirrors.make_again(row.name)
            return error
        return None

    async def _follow_store(self, name: MirrorName, progress: ProgressSink | None) -> bool:
        """Make a mirror that is gone again from the store; False where that is impossible."""
        try:
            store = await open_store(self.mirrors, name)
            if store is None:
                return False
            if progress:
                progress(Progress(unit="steps", note=f"{name}: download it from the store"))
            await self.mirrors.make_again(name, partial(store.fill, self.mirrors.quarantine))
        except errors.StoppingError:
            raise
        except errors.MirrordError as error:
            fields = {"donor": STORE, "code": error.code, "detail": error.message}
            log.warning("donor.failed", mirror=str(name), **fields)
            return False
        return True


def _unhealed_mirrors(audit: Audit) -> dict[str, bool]:
    """Tell of each mirror that was healed, or is certainly sound, whether something is unhealed.

    Only an audit at level `content` can tell that a mirror is sound.
    """
    tried = {repair.mirror: bool(repair.unhealed_count or repair.error) for repair in audit.repairs}
    damaged = {finding.mirror for finding in audit.findings if not finding.accepted}
    sound = set(audit.mirrors) - damaged if audit.level is AuditLevel.CONTENT else set[str]()
    return dict.fromkeys(sound, False) | tried
