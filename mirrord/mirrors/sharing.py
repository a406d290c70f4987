"""How daemons that share a catalog and a store work on one mirror: one after the other.

These are the ways of a daemon alone, which has every turn at once and publishes nothing; those of a
fleet are `mirrord.fleet.service`.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from ..catalog import Generation, MirrorRow
from ..model import MirrorName
from ..protocol import ProgressSink
from .repository import Repository


class Turn:
    """The right to change a mirror for all daemons."""

    row: MirrorRow | None = None
    """The mirror's row, where the turn had to read it."""
    is_fresh = False
    """Whether another daemon has synced the mirror since this turn was asked for."""
    is_synced = False
    """Set by a sync that succeeded: the next one is due an interval later."""

    async def publish(self, repository: Repository) -> None:
        """Give other daemons what the mirror has. Raises ClaimLostError, StoreUnavailableError."""

    def is_noted(self, row: MirrorRow) -> bool:
        """Note a sync that changed no more than its time; answers whether it will be recorded."""
        return False


class Sharing:
    """A daemon alone."""

    is_fleet = False

    @asynccontextmanager
    async def turn(
        self, name: MirrorName, progress: ProgressSink | None = None
    ) -> AsyncIterator[Turn]:
        """Wait for the turn at a mirror, and hold it; taken before the mirror's lock."""
        yield Turn()

    @asynccontextmanager
    async def sole(self, work: str) -> AsyncIterator[None]:
        """Exclude other daemons from some work, by its name."""
        yield

    async def is_behind(self, repository: Repository, *, ask: bool = False) -> bool:
        """Whether other daemons have published what this one lacks; `ask` the catalog now."""
        return False

    async def is_known(self, repository: Repository) -> bool:
        """Whether a mirror on this disk has been published, or is of what was."""
        return False

    async def follow(self, repository: Repository) -> None:
        """Bring a mirror, which may be empty, to what was published last; under its lock."""

    async def enrol(self, rows: Collection[MirrorRow]) -> None:
        """Have mirrors synced by the clock."""

    async def find_published(self, name: MirrorName) -> Generation | None:
        """What the store has of a mirror that the catalog does not know, or no longer."""
        return None

    def is_kept_elsewhere(self, key: str) -> bool:
        """Whether the store has a mirror that need not be on this disk."""
        return False

    def records_changed(self, keys: Collection[str]) -> None:
        """What the catalog says of these mirrors changed, and is to be published too."""
