"""Mirrors in which something failed, brought in line again without a restart.

Owns which mirrors those are and what failed pins still owe, both in memory: after a crash a start does the same for all. An error
of upstream leaves nothing; any other may have left a lock, half a pack, a journal, or a ref without its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import timedelta

import anyio
import structlog

from ..catalog import Catalog
from ..errors import MirrordError, StoppingError, UpstreamError
from ..model import MirrorName
from . import pins
from .repository import Repository
from .stale_files import remove_stale_files
from .startup import put_in_line

Locking = Callable[[MirrorName], AbstractAsyncContextManager[None]]

log = structlog.get_logger()


class Mending:
    """`lock` is that of a mirror, and calls `watched` around all that is done with it."""

    def __init__(
        self, catalog: Catalog, repository: Callable[[MirrorName], Repository], lock: Locking
    ) -> None:
        self._catalog = catalog
        self._repository = repository
        self._lock = lock
        self._uneven: dict[str, MirrorName] = {}
        self._debts: dict[str, list[pins.Debt]] = {}

    @contextmanager
    def watched(self, name: MirrorName) -> Iterator[None]:
        """Have the mirror looked over later if the block fails."""
        try:
            yield
        except UpstreamError:
            raise
        except BaseException:
            self._uneven[name.key] = name
            raise

    def note(self, names: Iterable[MirrorName]) -> None:
        """Have these looked over."""
        self._uneven |= {name.key: name for name in names}

    def debts(self, name: MirrorName) -> list[pins.Debt]:
        """What is owed to one mirror; whoever fails adds to it."""
        return self._debts.setdefault(name.key, [])

    async def run(self) -> bool:
        """Try each; answers whether all are in line."""
        for name in list(self._uneven.values()):
            try:
                async with self._lock(name):
                    await self._mend(name)
            except StoppingError:
                raise
            except (MirrordError, OSError) as error:
                log.warning("mirror.cleanup_pending", mirror=str(name), detail=str(error))
        return not self._uneven

    async def _mend(self, name: MirrorName) -> None:
        """What fails here is noted again by the lock."""
        self._uneven.pop(name.key, None)
        repository, debts = self._repository(name), self.debts(name)
        if not repository.path.exists():
            return
        await anyio.to_thread.run_sync(
            remove_stale_files, repository.path, timedelta()
        )  # a lock stops what is owed
        while debts:
            await pins.settle(repository, self._catalog, debts[0])
            del debts[0]
        await put_in_line(self._catalog, repository)
        log.info("mirror.mended", mirror=str(name))
