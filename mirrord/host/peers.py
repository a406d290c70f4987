"""Peers of the Unix socket: their identity, their role, the uids that they may ask for.

SO_PEERCRED gives the peer's credentials at the time of its connect(2), and cannot be forged. The
table of endpoints says which role a request needs.
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
from .processes import Owner, boot_id, in_user_namespace, is_mapped

if TYPE_CHECKING:  # workers load this module, and no pydantic
    from ..config import Settings

_SO_PEERGROUPS = 59  # Linux 4.13; not in Python's socket module
# struct ucred of linux/socket.h: process, user, group
_CREDENTIALS = struct.Struct("iII")
# membership of groups and /etc/subuid: a change counts within a minute
_REMEMBERED_S = 60.0
# no user's: (uid_t) -1
UNKNOWN = 2**32 - 1
SUBUID, SUBGID = Path("/etc/subuid"), Path("/etc/subgid")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Peer:
    """A peer with its credentials at `connected_at`, in seconds since the boot."""

    uid: int
    gid: int
    pid: int
    groups: tuple[int, ...] = ()
    connected_at: float = field(default=0.0, compare=False)


class Role(IntEnum):
    """A peer's rights; each role includes those below it.

    An OWNER is not a member, but may use the checkout that was made for its uid.
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
    except OSError:  # ERANGE above 256 groups: then only the primary group counts
        raw = b""
    groups = struct.unpack(f"{len(raw) // 4}I", raw)
    if in_user_namespace() and not is_mapped((uid, gid)):
        # The kernel gives every id without a mapping the same number, such as 65534 (user_ns(7)).
        own_uid, own_gid = os.geteuid(), os.getegid()
        uid = uid if is_mapped((uid, own_gid)) else UNKNOWN
        gid, groups = (own_gid if uid == own_uid else UNKNOWN), ()
    return Peer(uid=uid, gid=gid, pid=pid, groups=groups, connected_at=now)


class Access:
    """Decides the role of a peer.

    Administrators are root, the daemon's own user and `access.admins`; members are in
    `access.group`. Names are looked up once a minute and after a reload, because a group may be
    created while the daemon runs.
    """

    def __init__(
        self,
        settings: "Callable[[], Settings]",
        *,
        own_uid: int | None = None,
        subuid: Path = SUBUID,
    ) -> None:
        self._settings, self._subuid = settings, subuid
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._logged: frozenset[str] = frozenset()
        self.refresh()

    def role(self, peer: Peer) -> Role:
        """Return ADMIN, MEMBER or STRANGER. Who owns a checkout is not known here."""
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
        """Return the user of a subordinate uid, so that a user with 65,536 of them counts once."""
        # 2³² is above every count, so a range that begins with this uid is found too
        index = bisect_right(self._subuids, (uid, 1 << 32, 0)) - 1
        first, count, user = self._subuids[index] if index >= 0 else (0, 0, 0)
        return user if first <= uid < first + count else uid

    @property
    def warnings(self) -> list[str]:
        """The names in the configuration that do not exist on this host.

        The default group exists only where mirrord was installed for others than root and the
        daemon's own user.
        """
        access = self._settings().access
        unknown = [name for name in access.admins if _find_uid(name) is None]
        warnings = [f"the administrator {name} does not exist" for name in unknown]
        if self._group is None and "group" in access.model_fields_set:
            group = f"the group {access.group} does not exist: only administrators are admitted"
            warnings.insert(0, group)
        return warnings

    def refresh(self) -> None:
        """Look names up again. A name that does not exist is logged once."""
        access = self._settings().access
        uids = (_find_uid(name) for name in access.admins)
        self._admins = frozenset(uid for uid in uids if uid is not None)
        self._group = _find_gid(access.group)
        # a range of root's counts as a user of its own
        ranges = iter_subids(self._subuid)
        self._subuids = sorted((first, count, user or first) for first, count, user in ranges)
        self._looked_up_at = time.monotonic()
        warnings = frozenset(self.warnings)
        for warning in sorted(warnings - self._logged):
            log.warning("access.warned", detail=warning)
        self._logged = warnings


class Owners:
    """Decides for which uids a peer may ask for a checkout, and with which gid.

    For its own; an administrator for any; with `access.owners = "subuid"` a member for the uids
    that /etc/subuid assigns to it. Look-ups run in a thread, because names may come from a network,
    and are cached for a minute. Belongs to one event loop.
    """

    def __init__(self, settings: "Callable[[], Settings]", access: Access) -> None:
        self._settings, self._access = settings, access
        self._known: dict[tuple[int, int | None], Owner | None] = {}
        self._known_since = time.monotonic()

    async def find(self, owner: int | None, peer: Peer) -> Owner:
        """Return uid and gid for the checkout that `peer` asks for. Raises AccessError."""
        if owner is None or owner == peer.uid:
            return peer.uid, peer.gid
        key: tuple[int, int | None] | None = None
        look_up: Callable[[], Owner | None] = partial(self._of_member, owner, peer)
        if self._access.role(peer) is Role.ADMIN:
            key, look_up = (owner, None), partial(_of_admin, owner)
        elif self._settings().access.owners == "subuid" and not self._access.is_admin(owner):
            key = owner, peer.uid
        # peers choose the keys: an administrator may name any uid
        if time.monotonic() - self._known_since > _REMEMBERED_S or len(self._known) > 10_000:
            self._known.clear()
            self._known_since = time.monotonic()
        if key is not None and key not in self._known:
            self._known[key] = await anyio.to_thread.run_sync(look_up)
        if key is None or (pair := self._known[key]) is None:
            raise AccessError(
                f"cannot make a checkout for uid {owner}: you may not name that uid",
                hint='administrators may name any uid; with [access] owners = "subuid" a member '
                "may name those that /etc/subuid gives to it",
                owner=owner,
            )
        return pair

    def _of_member(self, owner: int, peer: Peer) -> Owner | None:
        """Pair with the gid at the same offset in /etc/subgid, or the member's own gid."""
        users, groups = (
            [(first, count) for first, count, user in iter_subids(file) if user == peer.uid]
            for file in (SUBUID, SUBGID)
        )
        offset = 0
        for first, count in users:
            if not first <= owner < first + count:
                offset += count
                continue
            offset += owner - first
            for first_gid, gids in groups:
                if offset < gids:
                    return owner, first_gid + offset
                offset -= gids
            return owner, peer.gid
        return None


def _of_admin(owner: int) -> Owner:
    """Pair with the group of its passwd entry; without one, with the gid of the same number."""
    try:
        return owner, pwd.getpwuid(owner).pw_gid
    except KeyError:
        return owner, owner


def iter_subids(file: Path) -> Iterator[tuple[int, int, int]]:
    """Iterate first id, count and user of the ranges in a file of subuid(5), in order.

    Skips incomplete lines and unknown users.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        name, *numbers = line.split(":")
        is_complete = len(numbers) == 2 and all(number.isdecimal() for number in numbers)
        if is_complete and (user := _find_uid(name)) is not None:
            yield int(numbers[0]), int(numbers[1]), user


def _find_uid(name: str | int) -> int | None:
    try:
        return name if isinstance(name, int) else pwd.getpwnam(name).pw_uid
    except KeyError:
        return int(name) if str(name).isdecimal() else None


def _find_gid(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return int(name) if name.isdecimal() else None


# -- processes that leases are bound to ------------------------------------------------------------
#
# Since Linux 6.9 the inode of a pidfd is unique to its process. With the start time, if /proc shows
# it (ProtectProc=invisible does not), it tells a process from all others with the same pid, now or
# later. Both still hold after a restart of the daemon.

_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module


class Process(NamedTuple):
    """A process. `mark` tells it from others with the same pid, in this boot or another."""

    pid: int
    mark: str


def process_of(connection: socket.socket, peer: Peer) -> Process:
    """Return the process that connected; it may have passed the connection on.

    Raises ProcessGoneError.
    """
    try:
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
            pidfd = int(struct.unpack("i", raw)[0])
        except OSError as error:
            # SO_PEERPIDFD came with Linux 6.5
            if error.errno != errno.ENOPROTOOPT:
                raise
            pidfd = open_by_number(peer)
        with opened(pidfd):
            return Process(peer.pid, _mark(pidfd, peer.pid))
    except OSError as error:
        # EINVAL, ENODATA: pid 0, which is a process of another pid namespace
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
    """Open a pidfd of the peer by its pid (before Linux 6.5), unless a younger process has it."""
    pidfd = os.pidfd_open(peer.pid)
    if _started_s(peer.pid) > peer.connected_at:
        os.close(pidfd)
        # as pidfd_open(2) says of one that has ended
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return pidfd


def _mark(pidfd: int, pid: int) -> str:
    return f"{boot_id()} {os.fstat(pidfd).st_ino} {_started_s(pid)}"


def _started_s(pid: int) -> float:
    """Return when a process started, in seconds since the boot; 0 if /proc does not show it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    # field 22 of proc_pid_stat(5); the second, a name in parentheses, may have blanks and `)` too
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


class ProcessWatch:
    """Calls `on_end` when a watched process ends. Belongs to one event loop.

    Holds one descriptor for each process, however many leases are bound to it.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._held: dict[Process, int] = {}

    def __contains__(self, process: Process) -> bool:
        """Return whether a process is watched and has not ended."""
        return process in self._held

    def hold(self, process: Process) -> bool:
        """Watch a process from now on; False if it has ended."""
        if process in self._held:
            return True
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        ended = select.poll()  # an ended process keeps its pid until its parent waits for it
        ended.register(pidfd, select.POLLIN)
        if _mark(pidfd, process.pid) != process.mark or ended.poll(0):
            os.close(pidfd)
            return False
        self._held[process] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._end, process)
        return True

    def keep_only(self, wanted: Collection[Process]) -> None:
        """Stop watching all other processes."""
        for process in self._held.keys() - wanted:
            self._release(process)

    def _end(self, process: Process) -> None:
        self._release(process)
        self._on_end()

    def _release(self, process: Process) -> None:
        pidfd = self._held.pop(process)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
