"""Preparing what checkouts are made from before anybody asks: the base commits of a dataset that was imported.

One commit after the other, so that it takes at most one worker from those who wait for an answer. One that cannot be prepared
is counted and left: whoever checks it out gets the error. Being killed costs nothing; what is built is found again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from ..catalog import Catalog
from ..config import Settings
from ..errors import DiskFullError, MirrordError
from ..jobs.operations import Operations, ProgressSink
from ..model import CommitId, CommitRole, DatasetName, History, MirrorName
from ..protocol import Progress

log = structlog.get_logger()

Prepare = Callable[[MirrorName, CommitId, History], Awaitable[object]]


class Prewarm:
    """Starts an operation for each dataset that changed, where the settings ask for it."""

    def __init__(self, *, settings: Callable[[], Settings], catalog: Catalog, operations: Operations, prepare: Prepare) -> None:
        self._settings = settings
        self._catalog = catalog
        self._operations = operations
        self._prepare = prepare

    def start(self, dataset: DatasetName) -> None:
        """To be called when a dataset was imported or removed."""
        checkouts = self._settings().checkouts
        if checkouts.prewarm and checkouts.history is not History.LINKED and not self._operations.is_stopping:
            self._operations.start("prewarm", dataset, lambda progress: self._run(dataset, progress))

    async def _run(self, dataset: DatasetName, progress: ProgressSink) -> dict[str, Any]:
        history = self._settings().checkouts.history
        rows = await self._catalog.list_recorded(dataset=dataset)
        wanted = sorted(
            {(row.mirror.key, row.commit, row.mirror) for row in rows if row.role is CommitRole.BASE}, key=lambda w: w[:2]
        )
        failed = 0
        for number, (_, commit, name) in enumerate(wanted):
            progress(Progress(done=number, total=len(wanted), unit="commits", note=str(name)))
            try:
                await self._prepare(name, commit, history)
            except DiskFullError:
                raise
            except MirrordError as error:
                failed += 1
                log.info("prewarm.failed", mirror=str(name), commit=commit, detail=error.message)
        progress(Progress(done=len(wanted), total=len(wanted), unit="commits"))
        return {"prepared": len(wanted) - failed, "failed": failed}
