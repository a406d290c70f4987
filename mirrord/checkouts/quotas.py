"""The disk that each user has taken, weighed now and then, and the bound on it.

A user pays for what was written in the checkouts of its uids, for their snapshots, and for the
prepared layers that it saved. Agents write without the daemon's knowledge, so a worker walks
through all of it for a bounded time. Over the bound nothing new is made for the user.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio

from ..config import Settings
from ..errors import QuotaExceededError
from ..git.workers import Workers
from ..host.peers import Access
from ..jobs.events import Events
from ..model import Backend
from .files.reader import weigh
from .leases import Leases
from .prepared import PreparedLayers
from .snapshots import Layers

_WALK, _CALL = timedelta(seconds=20), timedelta(seconds=40)
_PAUSE_S = 5.0  # between two weighings for those who are over the bound


@dataclass(eq=False, repr=False)
class Quotas:
    """Belongs to the event loop. `used` are bytes by user, as they were last weighed or added."""

    settings: Callable[[], Settings]
    access: Access
    leases: Leases
    layers: Layers
    prepared: PreparedLayers
    workers: Workers
    events: Events

    def __post_init__(self) -> None:
        self._over: set[int] = set()
        self._weighed_at = -_PAUSE_S
        self._weighing = anyio.Lock()
        self.used: dict[int, int] = {}

    async def ensure(self, doing: str, asker: int, owner: int) -> None:
        """Raise QuotaExceededError where the user of one of these uids is over the bound, and is so
        when weighed again; never for an administrator who asks.
        """
        users = {self.access.user_of(uid) for uid in (asker, owner)}
        if self.access.is_admin(asker) or not any(map(self._is_over, users)):
            return
        async with self._weighing:
            if time.monotonic() - self._weighed_at > _PAUSE_S:
                await self.weigh()
        limit = self.settings().access.bytes_per_user
        for user in filter(self._is_over, users):
            used = self.used[user]
            raise QuotaExceededError(
                f"cannot {doing}: uid {user} has {used >> 20} MiB in checkouts, snapshots and"
                f" layers, and {limit >> 20} is the most",
                hint="reset or release checkouts, remove snapshots and layers (see `mirrord du"
                " --verbose`), or raise access.bytes_per_user",
                uid=user,
                used_bytes=used,
                limit_bytes=limit,
            )

    def add(self, uid: int, size_bytes: int) -> None:
        """Count what was just written for a user, until it is weighed."""
        user = self.access.user_of(uid)
        self.used[user] = self.used.get(user, 0) + size_bytes

    async def weigh(self) -> None:
        """Weigh what all users have, and publish who is over the bound now, or no longer."""
        self._weighed_at = time.monotonic()
        things = self._things()
        if not things and not self.used:
            return
        paths = {str(user): each for user, each in things.items()}
        found = await self.workers.run(weigh, paths, _WALK.total_seconds(), timeout=_CALL)
        before, self.used = self.used, {}
        for user in things:
            weights = found[str(user)]
            is_whole = all(each.is_whole for each in weights.each)
            earlier = 0 if is_whole else before.get(user, 0)
            self.used[user] = max(weights.total_bytes, earlier)
        over = {user for user in self.used if self._is_over(user)}
        limit = self.settings().access.bytes_per_user
        for name, users in ("exceeded", over - self._over), ("recovered", self._over - over):
            for user in sorted(users):
                facts = {"owner_uid": user, "used_bytes": self.used.get(user, 0)}
                self.events.publish(f"quota.{name}", **facts, limit_bytes=limit)
        self._over = over

    def _is_over(self, user: int) -> bool:
        limit = self.settings().access.bytes_per_user
        return 0 < limit <= self.used.get(user, 0) and not self.access.is_admin(user)

    def _things(self) -> dict[int, list[tuple[Path, ...]]]:
        """The places of what each user has."""
        found: defaultdict[int, list[tuple[Path, ...]]] = defaultdict(list)
        for lease in self.leases:
            trees = [lease.tree_path] if lease.backend is Backend.POOL else []
            own = map(self.layers.path, sorted(lease.own_layers))
            found[self.access.user_of(lease.owner_uid)].append((lease.private, *trees, *own))
        for record in self.prepared.all():
            places = map(self.layers.path, record.own_layers)
            objects = self.layers.path(record.saved.id).with_suffix(".git")
            found[self.access.user_of(record.saved.saved_by)].append((objects, *places))
        return found
