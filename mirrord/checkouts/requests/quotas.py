"""How much disk each user has, and the bound on it."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio
import anyio.to_thread

from ... import errors
from ...config import Settings
from ...host.peers import Access
from ...jobs.events import Events
from ...model import CheckoutId
from ...trees.reader import Weight, weigh
from ...workers.pool import Workers
from ..layers import Layers
from ..leases import Leases
from ..prepared import PreparedLayers

_WEIGHING_TIME = timedelta(seconds=20)  # of a walk; what is not reached weighs what it did

_WEIGHING_TIMEOUT = timedelta(seconds=40)

_NEAR = 0.8  # of the limits of a copy: an agent needs hours to write the last fifth

_WEIGHING_PAUSE_S = 5.0  # between two weighings for users over the bound


@dataclass(eq=False, repr=False)
class Quotas:
    """The bytes that each user has on disk (`used`), and the bound on them.

    A user is charged for what was written in the checkouts of its uids, for their snapshots, and
    for the prepared layers that it saved. Clients write without the daemon's knowledge, so a worker
    weighs all of it once a minute. A user over `access.bytes_per_user` gets nothing new.
    """

    settings: Callable[[], Settings]
    access: Access
    leases: Leases
    layers: Layers
    prepared: PreparedLayers
    workers: Workers
    events: Events

    def __post_init__(self) -> None:
        self._over: set[int] = set()
        self._weighed_at = -_WEIGHING_PAUSE_S
        self._weighing = anyio.Lock()
        self.used: dict[int, int] = {}
        self._large: dict[CheckoutId, Weight] = {}

    async def ensure(self, doing: str, asker: int, owner: int) -> None:
        """Raise QuotaExceededError if the user of either uid is still over the bound when weighed
        again. Administrators are never refused.
        """
        users = {self.access.user_of(uid) for uid in (asker, owner)}
        if self.access.is_admin(asker) or not any(map(self._is_over, users)):
            return
        async with self._weighing:
            if time.monotonic() - self._weighed_at > _WEIGHING_PAUSE_S:
                await self.weigh()
        limit = self.settings().access.bytes_per_user
        for user in filter(self._is_over, users):
            used = self.used[user]
            raise errors.QuotaExceededError(
                f"cannot {doing}: uid {user} has {used >> 20} MiB in checkouts, snapshots and"
                f" layers; the limit is {limit >> 20} MiB",
                hint="reset or release checkouts, remove snapshots and layers (see `mirrord du"
                " --verbose`), or raise access.bytes_per_user",
                uid=user,
                used_bytes=used,
                limit_bytes=limit,
            )

    def add(self, uid: int, size_bytes: int) -> None:
        """Charge a user for what was just written, until the next weighing."""
        user = self.access.user_of(uid)
        self.used[user] = self.used.get(user, 0) + size_bytes

    async def weigh(self) -> None:
        """Weigh what all users have; publish `quota.exceeded` and `quota.recovered`."""
        self._weighed_at = time.monotonic()
        paths = self._paths_by_user()
        if not paths and not self.used:
            return
        weighed = await self.workers.run(
            weigh, {str(user): [owned for _, owned in things] for user, things in paths.items()},
            _WEIGHING_TIME.total_seconds(), timeout=_WEIGHING_TIMEOUT,
        )  # fmt: skip
        before, self.used = self.used, {}
        weight_of: dict[CheckoutId, Weight] = {}
        for user, things in paths.items():
            weights = weighed[str(user)]
            weight_of |= {
                lease: weight
                for (lease, _), weight in zip(things, weights.each, strict=True)
                if lease
            }
            # a walk that ran out of time must not let a user fall below the bound
            is_whole = all(weight.is_whole for weight in weights.each)
            earlier = 0 if is_whole else before.get(user, 0)
            self.used[user] = max(weights.total_bytes, earlier)
        self._note_large(weight_of)
        over = {user for user in self.used if self._is_over(user)}
        limit = self.settings().access.bytes_per_user
        for name, users in ("exceeded", over - self._over), ("recovered", self._over - over):
            for user in sorted(users):
                fields = {"owner_uid": user, "used_bytes": self.used.get(user, 0)}
                self.events.publish(f"quota.{name}", **fields, limit_bytes=limit)
        self._over = over

    def _note_large(self, weights: dict[CheckoutId, Weight]) -> None:
        """Publish `checkout.large` for each checkout that comes near the limits of a copy."""
        limits, earlier, self._large = self.settings().checkouts, self._large, {}
        for checkout, weight in weights.items():
            is_near = weight.paths > limits.copy_files * _NEAR
            if is_near or weight.size_bytes > limits.copy_bytes * _NEAR:
                self._large[checkout] = weight
        for lease in self.leases:
            if lease.id in self._large and lease.id not in earlier:
                weight = self._large[lease.id]
                self.events.publish(
                    "checkout.large", checkout=lease.id, owner_uid=lease.terms.owner_uid,
                    files=weight.paths, size_bytes=weight.size_bytes,
                    files_limit=limits.copy_files, bytes_limit=limits.copy_bytes,
                )  # fmt: skip

    def warnings(self) -> list[str]:
        """Say which checkouts will be too large for a fork, a snapshot or a prepared layer."""
        limits = self.settings().checkouts
        return [
            f"checkout {checkout} has {weight.paths:,} paths with {weight.size_bytes >> 20:,} MiB:"
            f" a fork, snapshot or layer copies at most {limits.copy_files:,} with"
            f" {limits.copy_bytes >> 20:,} MiB ([checkouts] copy_files, copy_bytes)"
            for checkout, weight in self._large.items()
        ]

    def _is_over(self, user: int) -> bool:
        limit = self.settings().access.bytes_per_user
        return 0 < limit <= self.used.get(user, 0) and not self.access.is_admin(user)

    def _paths_by_user(self) -> dict[int, list[tuple[CheckoutId | None, tuple[Path, ...]]]]:
        """Return what each user has; a checkout's own files with its id."""
        things: defaultdict[int, list[tuple[CheckoutId | None, tuple[Path, ...]]]]
        things = defaultdict(list)
        for lease in self.leases:
            user = self.access.user_of(lease.terms.owner_uid)
            things[user].append((lease.id, tuple(lease.own_paths)))
            things[user].append((None, tuple(map(self.layers.path, sorted(lease.own_layers)))))
        for record in self.prepared.all():
            user = self.access.user_of(record.saved.saved_by)
            things[user].append((None, tuple(self.prepared.paths_of(record))))
        return things
