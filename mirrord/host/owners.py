"""For which uids a peer may ask for a checkout, and with which gid it is made.

Itself; any uid for an administrator; with `access.owners = "subuid"` the uids that /etc/subuid
gives to a member, by name or by uid. Look-ups run in a thread, because names may come from a
network, and are remembered for a minute.
"""

from __future__ import annotations

import pwd
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio.to_thread

from ..config import Settings
from ..errors import AccessError
from .peers import Access, Peer, Role, iter_subids
from .userns import Owner

_REMEMBERED_S = 60.0


class Owners:
    """Belongs to one event loop."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        access: Access,
        *,
        subuid: Path = Path("/etc/subuid"),
        subgid: Path = Path("/etc/subgid"),
    ) -> None:
        self._settings = settings
        self._access = access
        self._files = subuid, subgid
        self._known: dict[tuple[int, int | None], Owner | None] = {}
        self._known_since = time.monotonic()

    async def find(self, owner: int | None, peer: Peer) -> Owner:
        """The uid and gid of the checkout that `peer` asks for. Raises AccessError."""
        if owner is None or owner == peer.uid:
            return peer.uid, peer.gid
        if self._access.role(peer) is Role.ADMIN:
            found = await self._remembered((owner, None), partial(_of_anybody, owner))
        elif self._settings().access.owners == "subuid" and not self._access.is_admin(owner):
            found = await self._remembered((owner, peer.uid), partial(self._of_member, owner, peer))
        else:
            found = None
        if found is None:
            raise AccessError(
                f"cannot make a checkout for uid {owner}: you may not ask for that uid",
                hint='administrators may ask for any; with [access] owners = "subuid" a member '
                "may ask for the uids that /etc/subuid gives to it",
                owner=owner,
            )
        return found

    async def _remembered(
        self, key: tuple[int, int | None], find: Callable[[], Owner | None]
    ) -> Owner | None:
        if time.monotonic() - self._known_since > _REMEMBERED_S or len(self._known) > 10_000:
            self._known.clear()
            self._known_since = time.monotonic()
        if key not in self._known:
            self._known[key] = await anyio.to_thread.run_sync(find)
        return self._known[key]

    def _of_member(self, owner: int, peer: Peer) -> Owner | None:
        """A subordinate uid goes with the gid at the same place of /etc/subgid, as user namespaces
        map them; where there is none, with the asker's own."""
        users, groups = (
            [(first, count) for first, count, user in iter_subids(file) if user == peer.uid]
            for file in self._files
        )
        before = 0
        for first, count in users:
            if first <= owner < first + count:
                return owner, _nth(groups, before + owner - first, otherwise=peer.gid)
            before += count
        return None


def _of_anybody(owner: int) -> Owner:
    """With the group of its passwd entry; a uid without one goes with the gid of the same number."""
    try:
        return owner, pwd.getpwuid(owner).pw_gid
    except KeyError:
        return owner, owner


def _nth(ranges: list[tuple[int, int]], n: int, *, otherwise: int) -> int:
    for first, count in ranges:
        if n < count:
            return first + n
        n -= count
    return otherwise
