"""How the daemons of a fleet share mirrors: the contract, and the daemon alone.

A daemon alone has every claim at once and publishes nothing. The implementation for a fleet is
`mirrord.fleet.service`.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from ..catalog import Generation, MirrorRow
from ..model import CommitId, MirrorName
from ..protocol import ProgressSink
from .repository import Repository


class MirrorClaim:
    """The right of one daemon to change a mirror. `row` is its row, if the claim read it.

    `is_fresh`: another daemon has synced the mirror since this claim was requested. A sync that
    succeeds sets `is_synced`, which makes the next one due an interval later.
    """

    row: MirrorRow | None = None
    is_fresh = False
    is_synced = False

    async def publish(self, repository: Repository) -> None:
        """Publish the mirror for other daemons. Raises ClaimLostError, StoreUnavailableError."""

    def defers_recording(self, row: MirrorRow) -> bool:
        """True if the claim will record a sync that changed nothing but its time."""
        return False


class Sharing:
    """Sharing of mirrors with other daemons, for a daemon alone."""

    is_fleet = False

    @asynccontextmanager
    async def claim(
        self, name: MirrorName, progress: ProgressSink | None = None
    ) -> AsyncIterator[MirrorClaim]:
        """Wait for the claim of a mirror, and hold it; taken before the mirror's lock."""
        yield MirrorClaim()

    @asynccontextmanager
    async def exclusive(self, work: str) -> AsyncIterator[None]:
        """Exclude other daemons from a piece of work, by its name."""
        yield

    async def is_behind(self, repository: Repository, *, ask: bool = False) -> bool:
        """True if a generation is published that a mirror lacks; with `ask`, query the catalog."""
        return False

    async def is_known(self, repository: Repository) -> bool:
        """True if a mirror on this disk has a generation."""
        return False

    async def has_published(self, repository: Repository, commits: Collection[CommitId]) -> bool:
        """True if the refs of the newest generation reach all these commits; under the lock."""
        return True

    async def follow(self, repository: Repository) -> None:
        """Bring a mirror, which may be empty, to the newest generation; under its lock."""

    async def enrol(self, rows: Collection[MirrorRow]) -> None:
        """Schedule the syncs of mirrors."""

    async def find_published(self, name: MirrorName) -> Generation | None:
        """Find the newest generation in the store, which the catalog need not know."""
        return None

    def is_kept_elsewhere(self, key: str) -> bool:
        """True if the store has a mirror that is not on this disk."""
        return False

    def records_changed(self, keys: Collection[str]) -> None:
        """Publish what the catalog has of these mirrors, soon."""
