"""The bounds on connections: a share for each user, a small one for strangers, room for admins.

At a bound, a user with fewer connections than another takes the place of an idle one of theirs, so
that idle connections keep nobody out. Each connection is an open file: a low RLIMIT_NOFILE lowers
the bounds, so that requests can still open files.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..errors import TooManyConnectionsError
from ..host.peers import Peer, Role
from ..telemetry import Seldom, log
from ..traffic import Traffic

if TYPE_CHECKING:
    from .server import HttpConnection

MAX_CONNECTIONS = 4096
RESERVED_CONNECTIONS = 64
"""Of all, for root, the daemon's user and administrators."""
CONNECTIONS_OF = {Role.STRANGER: 16, Role.OWNER: 256, Role.MEMBER: 1024}
"""Of one user, with all subordinate uids."""
ALL_STRANGERS_CONNECTIONS = 128

_FILES_LEFT = 128  # at least: of an idle daemon, its workers, and a few requests


class Connections:
    """All connections of a daemon. Belongs to one event loop."""

    def __init__(
        self,
        role: Callable[[Peer], Role],
        user_of: Callable[[int], int],
        traffic: Traffic,
    ) -> None:
        self._role = role
        self._traffic = traffic
        traffic.connections = self.by_user
        self._user_of = user_of
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = files - max(_FILES_LEFT, files // 4)
        self._most = max(RESERVED_CONNECTIONS + 1, min(MAX_CONNECTIONS, allowed))
        self._of: dict[int, dict[HttpConnection, None]] = {}  # the oldest first
        self._strangers: set[int] = set()
        self._users: dict[HttpConnection, int] = {}
        self._refusals = Seldom()

    @property
    def warnings(self) -> list[str]:
        if self._most == MAX_CONNECTIONS:
            return []
        fact = f"the limit on open files is low: at most {self._most} connections are taken"
        return [f"{fact}; raise LimitNOFILE= of the unit, or ulimit -n"]

    def by_user(self) -> dict[int, int]:
        """How many are open."""
        return {uid: len(connections) for uid, connections in self._of.items()}

    def add(self, connection: HttpConnection) -> None:
        """Count a connection. Raises TooManyConnectionsError; logs a line per user and minute."""
        uid, role = self._user_of(connection.peer.uid), self._role(connection.peer)
        if not self._has_room(uid, role):
            self._traffic.refusals[TooManyConnectionsError.code] += 1
            if count := self._refusals.count(uid):
                log.warning(
                    "connection.refused", uid=uid, count=count, connections=len(self._users)
                )
            raise TooManyConnectionsError(
                f"cannot take another connection of uid {uid}: too many are open",
                hint="use connections again, and close those that are idle",
                retry_after=1,
            )
        self._of.setdefault(uid, {})[connection] = None
        self._users[connection] = uid
        (self._strangers.add if role is Role.STRANGER else self._strangers.discard)(uid)

    def remove(self, connection: HttpConnection) -> None:
        """Stop counting a connection; again is fine."""
        uid = self._users.pop(connection, None)
        if uid is not None:
            del self._of[uid][connection]
            if not self._of[uid]:
                del self._of[uid]
                self._strangers.discard(uid)

    def _has_room(self, uid: int, role: Role) -> bool:
        own = len(self._of.get(uid, ()))
        if role is Role.ADMIN:
            return len(self._users) < self._most or self._shed(self._of, 0)
        if own >= CONNECTIONS_OF[role]:
            return False
        if role is Role.STRANGER:
            strangers = sum(len(self._of.get(each, ())) for each in self._strangers)
            limit = min(ALL_STRANGERS_CONNECTIONS, self._most // 8)
            if strangers >= limit and not self._shed(self._strangers, own + 1):
                return False
        return len(self._users) < self._most - RESERVED_CONNECTIONS or self._shed(self._of, own + 1)

    def _shed(self, uids: Iterable[int], more_than: int) -> bool:
        """Close the oldest idle connection of the user with most connections, over `more_than`."""
        for uid in sorted(uids, key=lambda uid: len(self._of.get(uid, ())), reverse=True):
            connections = self._of.get(uid, {})
            if len(connections) <= more_than:
                return False
            if idle := next((each for each in connections if each.is_idle), None):
                self.remove(idle)
                idle.shed()
                return True
        return False
