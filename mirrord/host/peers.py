"""Who is at the other end of a Unix socket, what that user may do, and for which uids it may ask.

The kernel says who: SO_PEERCRED holds what the peer was when it connected, and cannot be forged.
The endpoint table says which request needs which role.
"""

import asyncio
import errno
import grp
import os
import pwd
import select
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio.to_thread

from ..errors import AccessError, ProcessGoneError
from ..telemetry import log
from .files import opened
from .processes import Owner, boot_id

if TYPE_CHECKING:  # workers load this module, and no pydantic
    from ..config import Settings

_SO_PEERGROUPS = 59  # Linux 4.13; not in Python's socket module
_CREDENTIALS = struct.Struct("3i")
_REMEMBERED_S = 60.0
_SUBUID, _SUBGID = Path("/etc/subuid"), Path("/etc/subgid")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Peer:
    """A process at the other end, as it was when it connected, in seconds since the boot."""

    uid: int
    gid: int
    pid: int
    groups: tuple[int, ...] = ()
    connected_at: float = field(default=0.0, compare=False)


class Role(IntEnum):
    """What a peer may do; each role includes those below it.

    An OWNER is no member, but a checkout was made for its uid: it may use that one.
    """

    STRANGER = 0
    OWNER = 1
    MEMBER = 2
    ADMIN = 3


def peer_of(connection: socket.socket) -> Peer:
    """Read the credentials of a connected Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
    except OSError:  # ERANGE for more than fit: such a peer is judged by its first group alone
        raw = b""
    groups = struct.unpack(f"{len(raw) // 4}I", raw)
    return Peer(uid=uid, gid=gid, pid=pid, groups=groups, connected_at=now)


class Access:
    """The role of a peer.

    Administrators are root, the daemon's own user and `access.admins`; members are in
    `access.group`. Names are looked up at most once a minute and after a reload: a group may be
    created while the daemon runs.
    """

    def __init__(
        self,
        settings: "Callable[[], Settings]",
        *,
        own_uid: int | None = None,
        subuid: Path = _SUBUID,
    ) -> None:
        self._settings, self._subuid = settings, subuid
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._logged: frozenset[str] = frozenset()
        self.refresh()

    def role(self, peer: Peer) -> Role:
        """ADMIN, MEMBER or STRANGER: checkouts and their owners are not known here."""
        if self.is_admin(peer.uid):
            return Role.ADMIN
        is_member = self._group is not None and self._group in (peer.gid, *peer.groups)
        return Role.MEMBER if is_member else Role.STRANGER

    def is_admin(self, uid: int) -> bool:
        if uid in {0, self._own_uid}:
            return True
        if time.monotonic() - self._looked_up_at > _REMEMBERED_S:
            self.refresh()
        return uid in self._admins

    def user_of(self, uid: int) -> int:
        """The user of a subordinate uid, so that a user with 65,536 of them counts once."""
        at = bisect_right(self._subuids, (uid, 1 << 32, 0)) - 1
        first, count, user = self._subuids[at] if at >= 0 else (0, 0, 0)
        return user if first <= uid < first + count else uid

    @property
    def warnings(self) -> list[str]:
        """Names in the settings that this host does not know."""
        access = self._settings().access
        group = f"the group {access.group} does not exist: only administrators are admitted"
        unknown = [name for name in access.admins if _find_uid(name) is None]
        admins = [f"the administrator {name} does not exist" for name in unknown]
        return admins if self._group is not None else [group, *admins]

    def refresh(self) -> None:
        """Look the names up again, and log those once that this host does not know."""
        access = self._settings().access
        found = (_find_uid(name) for name in access.admins)
        self._admins = frozenset(uid for uid in found if uid is not None)
        self._group = _find_gid(access.group)
        # a range of root's is a user of its own
        ranges = iter_subids(self._subuid)
        self._subuids = sorted((first, count, user or first) for first, count, user in ranges)
        self._looked_up_at = time.monotonic()
        warnings = frozenset(self.warnings)
        for warning in sorted(warnings - self._logged):
            log.warning("access.warned", detail=warning)
        self._logged = warnings


class Owners:
    """For which uids a peer may ask for a checkout, and with which gid. Belongs to one event loop.

    For itself; an administrator for any uid; with `access.owners = "subuid"` a member for the uids
    that /etc/subuid gives to it, by name or by uid. Look-ups run in a thread, because names may
    come from a network, and are remembered for a minute.
    """

    def __init__(
        self,
        settings: "Callable[[], Settings]",
        access: Access,
        *,
        subuid: Path = _SUBUID,
        subgid: Path = _SUBGID,
    ) -> None:
        self._settings, self._access, self._files = settings, access, (subuid, subgid)
        self._known: dict[tuple[int, int | None], Owner | None] = {}
        self._known_since = time.monotonic()

    async def find(self, owner: int | None, peer: Peer) -> Owner:
        """The uid and gid of the checkout that `peer` asks for. Raises AccessError."""
        if owner is None or owner == peer.uid:
            return peer.uid, peer.gid
        key: tuple[int, int | None] | None = None
        look_up: Callable[[], Owner | None] = partial(self._of_member, owner, peer)
        if self._access.role(peer) is Role.ADMIN:
            key, look_up = (owner, None), partial(_of_anybody, owner)
        elif self._settings().access.owners == "subuid" and not self._access.is_admin(owner):
            key = owner, peer.uid
        if time.monotonic() - self._known_since > _REMEMBERED_S or len(self._known) > 10_000:
            self._known.clear()
            self._known_since = time.monotonic()
        if key is not None and key not in self._known:
            self._known[key] = await anyio.to_thread.run_sync(look_up)
        if key is None or (found := self._known[key]) is None:
            raise AccessError(
                f"cannot make a checkout for uid {owner}: you may not ask for that uid",
                hint='administrators may ask for any; with [access] owners = "subuid" a member '
                "may ask for the uids that /etc/subuid gives to it",
                owner=owner,
            )
        return found

    def _of_member(self, owner: int, peer: Peer) -> Owner | None:
        """With the gid at the same place of /etc/subgid, as user namespaces map it, or its own."""
        users, groups = (
            [(first, count) for first, count, user in iter_subids(file) if user == peer.uid]
            for file in self._files
        )
        place = 0
        for first, count in users:
            if not first <= owner < first + count:
                place += count
                continue
            place += owner - first
            for first_gid, gids in groups:
                if place < gids:
                    return owner, first_gid + place
                place -= gids
            return owner, peer.gid
        return None


def _of_anybody(owner: int) -> Owner:
    """With the group of its passwd entry; without one, with the gid of the same number."""
    try:
        return owner, pwd.getpwuid(owner).pw_gid
    except KeyError:
        return owner, owner


def iter_subids(file: Path) -> Iterator[tuple[int, int, int]]:
    """First id, count and user of each range in a file of subuid(5), in its order.

    Incomplete lines, and users that this host does not know, are skipped.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        name, *numbers = line.split(":")
        is_whole = len(numbers) == 2 and all(number.isdecimal() for number in numbers)
        if is_whole and (user := _find_uid(name)) is not None:
            yield int(numbers[0]), int(numbers[1]), user


def _find_uid(name: str | int) -> int | None:
    try:
        return name if isinstance(name, int) else pwd.getpwnam(name).pw_uid
    except KeyError:
        return int(name) if str(name).isdigit() else None


def _find_gid(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return int(name) if name.isdigit() else None


# -- processes that leases are bound to: which one a peer is, and when it ends ---------------------
#
# The inode of a pidfd is its process's own since Linux 6.9; with the start time, where /proc shows
# it (ProtectProc=invisible does not), it tells the process from all others with the same number,
# now or later. Both outlive the daemon: after a restart the same process is found, or has ended.

_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module


class Process(NamedTuple):
    """`mark` tells it from others with the same pid, in this boot or another."""

    pid: int
    mark: str


def process_of(connection: socket.socket, peer: Peer) -> Process:
    """The process that made a connection, which may have handed it on. Raises ProcessGoneError."""
    try:
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
            pidfd = int(struct.unpack("i", raw)[0])
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
            pidfd = open_by_number(peer)
        with opened(pidfd):
            return Process(peer.pid, _mark(pidfd, peer.pid))
    except OSError as error:
        # EINVAL, ENODATA: pid 0, of another pid namespace
        if error.errno not in {errno.ESRCH, errno.EINVAL, errno.ENODATA}:
            raise
        raise process_gone(peer.pid) from error


def own_process() -> Process:
    pid = os.getpid()
    with opened(os.pidfd_open(pid)) as pidfd:
        return Process(pid, _mark(pidfd, pid))


def process_gone(pid: int) -> ProcessGoneError:
    return ProcessGoneError(
        f"cannot bind a checkout to process {pid}: it has ended, or the daemon cannot see it",
        hint="leave out bind where the daemon is in a container and its client is not",
    )


def open_by_number(peer: Peer) -> int:
    """A pidfd of the peer before Linux 6.5: by number, unless a younger process has that now."""
    pidfd = os.pidfd_open(peer.pid)
    if _started_s(peer.pid) > peer.connected_at:
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return pidfd


def _mark(pidfd: int, pid: int) -> str:
    return f"{boot_id()} {os.fstat(pidfd).st_ino} {_started_s(pid)}"


def _started_s(pid: int) -> float:
    """When a process started, in seconds since the boot; 0 where /proc does not show it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


class ProcessWatch:
    """Calls `on_end` when a held process ends. Belongs to one event loop.

    One descriptor for each process, however many leases are bound to it.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._held: dict[Process, int] = {}

    def __contains__(self, process: Process) -> bool:
        """Whether it is held and has not ended."""
        return process in self._held

    def hold(self, process: Process) -> bool:
        """Watch a process from now on; False where it has ended."""
        if process in self._held:
            return True
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        ended = select.poll()  # an ended process keeps its number until its parent waits for it
        ended.register(pidfd, select.POLLIN)
        if _mark(pidfd, process.pid) != process.mark or ended.poll(0):
            os.close(pidfd)
            return False
        self._held[process] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._end, process)
        return True

    def keep_only(self, wanted: Collection[Process]) -> None:
        """Release the other processes."""
        for process in self._held.keys() - wanted:
            self._release(process)

    def _end(self, process: Process) -> None:
        self._release(process)
        self._on_end()

    def _release(self, process: Process) -> None:
        pidfd = self._held.pop(process)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
