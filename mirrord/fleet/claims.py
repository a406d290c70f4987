"""The claims that this daemon holds: taken, renewed, given back.

A claim is held while its row in the catalog says so. A daemon that was paused or cut off for longer
than a claim lasts has lost it, and notices late. It can publish nothing then: a publication is
conditional on the claim's epoch.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import anyio

from ..catalog import Catalog, Claim, HeldClaim, MirrorRow
from ..errors import CatalogUnavailableError, ConflictError, MirrordError
from ..telemetry import log
from ..units import Backoff

# of a claim that is not renewed: how long the work of a dead daemon waits, and a little
CLAIM_TTL = timedelta(seconds=20)
# three renewals may fail before CLAIM_TTL ends the claim
RENEWAL_INTERVAL = timedelta(seconds=5)
_WAIT_PAUSES = timedelta(seconds=0.5), timedelta(seconds=5)  # for a claim of another daemon


@dataclass(eq=False, slots=True)
class Hold:
    """A claim in use. With `after`, its end makes the work due again that much later."""

    claim: Claim
    users: int = 0
    after: timedelta | None = None
    has_failed: bool = False
    # of a round: one statement reads the rows of all its mirrors, one records those unchanged
    row: MirrorRow | None = None
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
        """Hold a claim, shared within this daemon; wait while another daemon has it.

        Yields it, and whether another daemon has claimed it and given it back during the wait.
        """
        async with self._taking.setdefault(key, anyio.Lock()):
            hold, was_claimed = await self._take(key, on_wait)
            hold.users += 1
        try:
            yield hold, was_claimed
        finally:
            hold.users -= 1
            if not hold.users:
                # a cancelled request, too, gives it back now; others would wait for CLAIM_TTL
                with anyio.CancelScope(shield=True):
                    await self.give_back([hold])

    async def _take(
        self, key: str, on_wait: Callable[[HeldClaim | None], None]
    ) -> tuple[Hold, bool]:
        first: int | None = None
        pauses = Backoff(*_WAIT_PAUSES, spread=0.3)
        while (hold := self.held.get(key)) is None:  # a round may take it during the wait
            claim = await self.catalog.claim(self.holder, key, CLAIM_TTL, self.host_limit())
            if claim is not None:
                hold = self.held[key] = Hold(claim)
                # our own taking is one epoch; more are of another daemon in between
                return hold, first is not None and claim.epoch > first + 1
            holder = await self.catalog.find_holder(key)
            if first is None and holder is not None:
                first = holder.epoch
            on_wait(holder)
            await anyio.sleep(pauses.next().total_seconds())
        return hold, False

    async def claim_due(
        self, *, most: int, local: Collection[str], grace: timedelta, with_syncs: bool
    ) -> list[Hold]:
        """Claim the work that is due; each claim has to be given back."""
        claims = await self.catalog.claim_due(
            self.holder, CLAIM_TTL, most=most, local=local, grace=grace, with_syncs=with_syncs
        )
        holds = [Hold(claim, users=1) for claim in claims]
        self.held |= {hold.claim.key: hold for hold in holds}
        return holds

    async def give_back(self, holds: Collection[Hold]) -> None:
        """End claims without users; while the catalog is away they expire."""
        ends: dict[tuple[timedelta | None, bool], list[Claim]] = {}
        for hold in holds:
            # a lost one may have been taken again, with another epoch
            if self.held.get(hold.claim.key) is hold:
                del self.held[hold.claim.key]
            ends.setdefault((hold.after, hold.has_failed), []).append(hold.claim)
        for (after, has_failed), claims in ends.items():
            with suppress(CatalogUnavailableError):
                await self.catalog.release(self.holder, claims, after, has_failed=has_failed)

    async def renew(self) -> None:
        """Prolong all claims, and forget those that another daemon has taken over."""
        if not self.held:
            return
        # a copy: what is taken during the query is not in its answer
        before = dict(self.held)
        renewed = await self.catalog.renew(self.holder, CLAIM_TTL, before)
        for key, hold in before.items():
            if hold.claim not in renewed and self.held.get(key) is hold:
                del self.held[key]
                log.warning("claim.lost", key=key)

    async def renew_forever(self) -> None:
        while True:
            try:
                await self.renew()
            except CatalogUnavailableError:
                pass  # reported by health
            except MirrordError as error:
                log.warning("claims.not_renewed", detail=error.message)
            await anyio.sleep(RENEWAL_INTERVAL.total_seconds())

    async def take_catalog(self) -> Hold:
        """Exclude other daemons from a catalog without a store. Raises ConflictError.

        Waits until the claim of a killed daemon has expired; one that is renewed has a daemon.
        """
        least_s = CLAIM_TTL.total_seconds()

        def refuse_if_renewed(holder: HeldClaim | None) -> None:
            nonlocal least_s
            if holder is None:
                return
            if holder.left_s > least_s:
                raise ConflictError(
                    "cannot start a daemon on this catalog: another one uses it",
                    hint="daemons that share a catalog need a store: set [store] url on all of"
                    " them",
                )
            least_s = holder.left_s

        hold, _ = await self._take("catalog", refuse_if_renewed)
        return hold
