"""The connections of all users, counted.

Each user may open a share of the connections, strangers a small one, and some are reserved for
administrators. At the limit, a new connection of a user replaces an idle one of the user with most,
so idle connections exclude nobody.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .. import errors
from ..engine.activity import Traffic
from ..host.peers import Peer, Role
from ..telemetry import Seldom, log

if TYPE_CHECKING:
    from .server import HttpConnection

# A connection is a descriptor of the daemon, which has 65,536 (LimitNOFILE=) under systemd; where
# there are fewer, a quarter of them is left for files.
MAX_CONNECTIONS = 4096
# for root, the daemon's user and administrators
RESERVED_CONNECTIONS = 64
# of one user, including its subordinate uids
CONNECTIONS_OF = {Role.STRANGER: 16, Role.OWNER: 256, Role.MEMBER: 1024}
# of all uids that have no rights here: many local users together keep nobody out
ALL_STRANGERS_CONNECTIONS = 128

_MIN_OTHER_FILES = 128  # open files of an idle daemon, its workers, and a few requests


class Connections:
    """The connections of all users, counted. Belongs to one event loop."""

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
        allowed = files - max(_MIN_OTHER_FILES, files // 4)
        self._max_connections = max(RESERVED_CONNECTIONS + 1, min(MAX_CONNECTIONS, allowed))
        self._by_user: dict[int, dict[HttpConnection, None]] = {}  # oldest first
        self._strangers: set[int] = set()
        self._user_by_connection: dict[HttpConnection, int] = {}
        self._refusals = Seldom()

    @property
    def warnings(self) -> list[str]:
        if self._max_connections == MAX_CONNECTIONS:
            return []
        fact = f"low limit on open files: at most {self._max_connections} connections are accepted"
        return [f"{fact}; raise LimitNOFILE= of the unit, or ulimit -n"]

    def by_user(self) -> dict[int, int]:
        return {uid: len(connections) for uid, connections in self._by_user.items()}

    def add(self, connection: HttpConnection) -> None:
        """Count a connection. Raises TooManyConnectionsError; logs a line per user and minute."""
        uid, role = self._user_of(connection.peer.uid), self._role(connection.peer)
        if not self._make_room(uid, role):
            self._traffic.refusals[errors.TooManyConnectionsError.code] += 1
            if count := self._refusals.count(uid):
                log.warning(
                    "connection.refused",
                    uid=uid,
                    count=count,
                    connections=len(self._user_by_connection),
                )
            raise errors.TooManyConnectionsError(
                f"cannot accept another connection of uid {uid}: too many are open",
                hint="reuse connections, and close idle ones",
                retry_after=1,
            )
        self._by_user.setdefault(uid, {})[connection] = None
        self._user_by_connection[connection] = uid
        (self._strangers.add if role is Role.STRANGER else self._strangers.discard)(uid)

    def remove(self, connection: HttpConnection) -> None:
        """Stop counting a connection. Does nothing if it is not counted."""
        uid = self._user_by_connection.pop(connection, None)
        if uid is not None:
            del self._by_user[uid][connection]
            if not self._by_user[uid]:
                del self._by_user[uid]
                self._strangers.discard(uid)

    def _make_room(self, uid: int, role: Role) -> bool:
        """Return whether a user may open a connection, after closing an idle one if necessary."""
        # `own + 1` below: the other user is left with as many, so no two evict each other in turn
        own = len(self._by_user.get(uid, ()))
        if role is Role.ADMIN:
            return len(self._user_by_connection) < self._max_connections or self._evict_idle(
                self._by_user, 0
            )
        if own >= CONNECTIONS_OF[role]:
            return False
        if role is Role.STRANGER:
            strangers = sum(len(self._by_user.get(stranger, ())) for stranger in self._strangers)
            limit = min(ALL_STRANGERS_CONNECTIONS, self._max_connections // 8)
            if strangers >= limit and not self._evict_idle(self._strangers, own + 1):
                return False
        return len(
            self._user_by_connection
        ) < self._max_connections - RESERVED_CONNECTIONS or self._evict_idle(self._by_user, own + 1)

    def _evict_idle(self, uids: Iterable[int], more_than: int) -> bool:
        """Close the oldest idle connection of the user with most, if these are over `more_than`.

        Returns whether one was closed.
        """
        for uid in sorted(uids, key=lambda uid: len(self._by_user.get(uid, ())), reverse=True):
            connections = self._by_user.get(uid, {})
            if len(connections) <= more_than:
                return False
            if idle := next((connection for connection in connections if connection.is_idle), None):
                self.remove(idle)
                idle.evict()
                return True
        return False
