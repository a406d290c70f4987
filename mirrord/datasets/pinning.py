"""Making what a dataset records servable: mirrors added and synced, commits fetched, proven and pinned.

Owns the order of that work and its concurrency. Nothing here is written to the catalog but through the mirrors. A mirror that
fails costs its own commits, each with a reason, and not those of the others. Every step may be repeated, so after a crash the
whole is simply done again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import anyio
import structlog

from ..catalog import EVERY, Catalog, PinRow
from ..errors import MirrordError, StoppingError
from ..mirrors.service import Mirrors
from ..model import CommitId, DatasetName, MirrorName
from ..protocol import Progress, ProgressSink

Refused = dict[CommitId, str]
"""Why commits of one mirror have no pin."""

log = structlog.get_logger()


def owner_of(dataset: str) -> str:
    """Who a dataset's pins belong to."""
    return f"dataset/{dataset}"


def in_short(refused: Refused, commits: Collection[CommitId]) -> dict[str, str]:
    """Reasons by commit; one under `*` when all commits share it, as when their mirror failed."""
    reasons = set(refused.values())
    if len(reasons) == 1 and len(refused) == len(commits) > 1:
        return {EVERY: reasons.pop()}
    return {str(commit): reason for commit, reason in refused.items()}


class PinProgress:
    """Commits done of all; the note says what the mirror that spoke last is doing."""

    def __init__(self, total: int, sink: ProgressSink | None) -> None:
        self._total = total
        self._sink = sink
        self._done = 0

    def of(self, name: MirrorName) -> ProgressSink:
        return lambda progress: self._tell(_note(name, progress))

    def finished(self, name: MirrorName, count: int) -> None:
        self._done += count
        self._tell(name.repo)

    def _tell(self, note: str) -> None:
        if self._sink:
            self._sink(Progress(done=self._done, total=self._total, unit="commits", note=note))


def _note(name: MirrorName, progress: Progress) -> str:
    counted = f"{progress.done}/{progress.total}" if progress.total else str(progress.done)
    return f"{name.repo}: {progress.note or progress.unit} {counted}"


class Pinner:
    def __init__(
        self, *, catalog: Catalog, mirrors: Mirrors, concurrency: Callable[[], int]
    ) -> None:
        self._catalog = catalog
        self._mirrors = mirrors
        self._concurrency = concurrency

    async def pin_all(
        self,
        dataset: DatasetName,
        names: Mapping[str, MirrorName],
        commits: Mapping[str, Mapping[CommitId, str]],
        sink: ProgressSink | None,
    ) -> dict[str, Refused]:
        """Pin every commit that can be; answers the others by mirror key. `commits` have their pin's reason."""
        progress = PinProgress(sum(map(len, commits.values())), sink)
        slots = anyio.Semaphore(self._concurrency())
        refused: dict[str, Refused] = {}

        async def work(key: str) -> None:
            async with slots:
                refused[key] = await self._pin_or_say_why(
                    dataset, names[key], commits[key], progress
                )
            progress.finished(names[key], len(commits[key]))

        try:
            async with anyio.create_task_group() as tasks:
                for key in commits:
                    tasks.start_soon(work, key)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        return {key: reasons for key, reasons in refused.items() if reasons}

    async def _pin_or_say_why(
        self,
        dataset: DatasetName,
        name: MirrorName,
        commits: Mapping[CommitId, str],
        progress: PinProgress,
    ) -> Refused:
        try:
            return await self._pin(dataset, name, commits, progress.of(name))
        except StoppingError:
            raise
        except MirrordError as error:
            log.warning(
                "dataset.mirror_failed",
                dataset=dataset,
                mirror=str(name),
                code=error.code,
                detail=error.message,
            )
            return dict.fromkeys(commits, error.message)

    async def _pin(
        self,
        dataset: DatasetName,
        name: MirrorName,
        commits: Mapping[CommitId, str],
        sink: ProgressSink,
    ) -> Refused:
        row = await self._catalog.find_mirror(name.key) or await self._mirrors.add(name.repo)
        is_new = row.synced_at is None
        if is_new:
            await self._mirrors.sync(row.name, sink)
        missing = await self._mirrors.ensure_commits(row.name, list(commits), sink)
        if missing and not is_new:  # upstream may serve by its refs what it does not serve by id
            with suppress(MirrordError):
                await self._mirrors.sync(row.name, sink)
                missing = await self._mirrors.ensure_commits(row.name, list(missing), sink)
        return missing | await self._pin_present(
            dataset, row.name, {c: why for c, why in commits.items() if c not in missing}
        )

    async def _pin_present(
        self, dataset: DatasetName, name: MirrorName, commits: Mapping[CommitId, str]
    ) -> Refused:
        """Pin by reason: the roles of a commit are what its pin is for."""
        by_reason: dict[str, list[CommitId]] = {}
        for commit, reason in commits.items():
            by_reason.setdefault(reason, []).append(commit)
        refused: Refused = {}
        for reason, group in sorted(by_reason.items()):
            refused |= await self._mirrors.pin(name, group, owner=owner_of(dataset), reason=reason)
        return refused

    async def unpin(self, rows: Collection[PinRow]) -> bool:
        """Remove pins; those of a mirror that fails stay. Answers whether all are removed."""
        is_done = True
        groups: dict[tuple[MirrorName, str], list[CommitId]] = {}
        for row in rows:
            groups.setdefault((row.mirror, row.owner), []).append(row.commit)
        for (name, owner), commits in groups.items():
            try:
                await self._mirrors.unpin(name, commits, owner=owner)
            except StoppingError:
                raise
            except (MirrordError, OSError) as error:
                log.warning(
                    "pins.left",
                    mirror=str(name),
                    owner=owner,
                    count=len(commits),
                    detail=str(error),
                )
                is_done = False
        return is_done
