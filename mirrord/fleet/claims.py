"""The claims that this daemon holds: taken, renewed, given back.

A claim is held while the catalog's row says so; a daemon that was paused or cut off for longer than
a claim lasts has lost it, learns so late, and can publish nothing: what is published is conditional
on the claim's epoch.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import anyio

from ..catalog import Catalog, Claim, Generation, HeldClaim, MirrorRow
from ..errors import AlreadyRunningError, CatalogUnavailableError, MirrordError
from ..telemetry import log
from ..units import Backoff

LIFE = timedelta(seconds=20)
"""Of a claim that nobody renews: how long the work of a dead daemon waits, and a little."""
RENEWAL = timedelta(seconds=5)
_LOOKS = timedelta(seconds=0.5), timedelta(seconds=5)  # at a claim that another daemon has


@dataclass(eq=False, slots=True)
class Hold:
    """A claim while somebody uses it. What its end records is due `after` a time, if given."""

    claim: Claim
    users: int = 0
    after: timedelta | None = None
    has_failed: bool = False
    # of a round of many: read for all of them in one statement
    row: MirrorRow | None = None
    newest: Generation | None = None
    unchanged: list[str] | None = None


@dataclass(eq=False)
class Claims:
    """Belongs to the event loop's thread. `host_limit` bounds claims by host of their upstream."""

    catalog: Catalog
    host_limit: Callable[[], int]
    # not the node's own id: a copy of its state directory is another daemon
    holder: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        self.held: dict[str, Hold] = {}
        self._taking: dict[str, anyio.Lock] = {}

    @asynccontextmanager
    async def holding(
        self, key: str, on_wait: Callable[[HeldClaim | None], None] = lambda _: None
    ) -> AsyncIterator[tuple[Hold, bool]]:
        """Hold a claim, together with others here; waits while another daemon has it.

        Answers with it whether another daemon claimed it first and gave it back meanwhile.
        """
        async with self._taking.setdefault(key, anyio.Lock()):
            hold, is_second = await self._take(key, on_wait)
            hold.users += 1
        try:
            yield hold, is_second
        finally:
            hold.users -= 1
            if not hold.users:
                with anyio.CancelScope(shield=True):
                    await self.give_back([hold])

    async def _take(
        self, key: str, on_wait: Callable[[HeldClaim | None], None]
    ) -> tuple[Hold, bool]:
        first: int | None = None
        pauses = Backoff(*_LOOKS, spread=0.3)
        while (hold := self.held.get(key)) is None:  # or it was due here meanwhile
            claim = await self.catalog.claim(self.holder, key, LIFE, self.host_limit())
            if claim is not None:
                hold = self.held[key] = Hold(claim)
                return hold, first is not None and claim.epoch > first + 1
            holder = await self.catalog.find_holder(key)
            if first is None and holder is not None:
                first = holder.epoch
            on_wait(holder)
            await anyio.sleep(pauses.next().total_seconds())
        return hold, False

    async def claim_due(
        self, *, most: int, here: Collection[str], patience: timedelta, with_syncs: bool
    ) -> list[Hold]:
        """Claim what is due; each has to be given back."""
        found = await self.catalog.claim_due(
            self.holder, LIFE, most=most, local=here, grace=patience, with_syncs=with_syncs
        )
        holds = [Hold(claim, users=1) for claim in found]
        self.held |= {hold.claim.key: hold for hold in holds}
        return holds

    async def give_back(self, holds: Collection[Hold]) -> None:
        """End claims that nobody uses; without the catalog they expire by themselves."""
        ends: dict[tuple[timedelta | None, bool], list[Claim]] = {}
        for hold in holds:
            if self.held.get(hold.claim.key) is hold:
                del self.held[hold.claim.key]
            ends.setdefault((hold.after, hold.has_failed), []).append(hold.claim)
        for (after, has_failed), claims in ends.items():
            with suppress(CatalogUnavailableError):
                await self.catalog.release(self.holder, claims, after, has_failed=has_failed)

    async def renew(self) -> None:
        """Prolong all claims; those that another daemon took over meanwhile are lost."""
        if not self.held:
            return
        before = dict(self.held)
        ours = await self.catalog.renew(self.holder, LIFE, before)
        for key, hold in before.items():
            if hold.claim not in ours and self.held.get(key) is hold:
                del self.held[key]
                log.warning("claim.lost", key=key)

    async def keep(self) -> None:
        """Renew for ever."""
        while True:
            try:
                await self.renew()
            except CatalogUnavailableError:
                pass  # health says so
            except MirrordError as error:
                log.warning("claims.not_renewed", detail=error.message)
            await anyio.sleep(RENEWAL.total_seconds())

    async def take_catalog(self) -> Hold:
        """Exclude other daemons from a catalog without a store. Raises AlreadyRunningError.

        Waits for a daemon that was killed to be forgotten.
        """
        with anyio.move_on_after(1.5 * LIFE.total_seconds()):
            return (await self._take("catalog", lambda _: None))[0]
        raise AlreadyRunningError(
            "cannot start a daemon on this catalog: another one uses it",
            hint="daemons that share a catalog need a store: set [store] url on all of them",
        )
