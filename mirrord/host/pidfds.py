"""Processes that leases are bound to: which one a peer is, and when it ends.

A process is told from every other that has or will have its number by the inode of its pidfd, which
is its own since Linux 6.9, and by its start time, where /proc shows it (ProtectProc=invisible does
not). Both outlive the daemon: after a restart the same process is found again, or it has ended.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ..errors import ProcessGoneError
from .files import opened
from .peers import Peer
from .processes import boot_id

_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """`mark` is what tells it from others with the same pid, in this boot or another."""

    pid: int
    mark: str


def process_of(connection: socket.socket, peer: Peer) -> Process:
    """The process that made a connection, which may have handed it on. Raises ProcessGoneError."""
    try:
        with opened(_peer_pidfd(connection, peer)) as fd:
            return Process(peer.pid, _mark(fd, peer.pid))
    except OSError as error:
        if error.errno not in {
            errno.ESRCH,
            errno.EINVAL,
            errno.ENODATA,
        }:  # pid 0: of another pid namespace
            raise
        raise process_gone(peer.pid) from error


def process_gone(pid: int) -> ProcessGoneError:
    return ProcessGoneError(
        f"cannot bind a checkout to process {pid}: it has ended, or the daemon cannot see it",
        hint="leave out bind where the daemon is in a container and its client is not",
    )


def _peer_pidfd(connection: socket.socket, peer: Peer) -> int:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return open_by_number(peer)


def open_by_number(peer: Peer) -> int:
    """A pidfd of the peer before Linux 6.5: of its number, unless that is a younger process by now."""
    fd = os.pidfd_open(peer.pid)
    if _started_s(peer.pid) > peer.connected_at:
        os.close(fd)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return fd


def _mark(fd: int, pid: int) -> str:
    return f"{boot_id()} {os.fstat(fd).st_ino} {_started_s(pid)}"


def _started_s(pid: int) -> float:
    """When a process started, in seconds since the boot; 0 where that is not shown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    return int(stat.rpartition(")")[2].split()[19]) / _TICKS_PER_S


def _has_ended(fd: int) -> bool:
    """A process that has ended keeps its number until its parent has waited for it."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class ProcessWatch:
    """Calls `on_end` when a process that is held on to ends. One descriptor for each, however many
    leases are bound to it. Belongs to one event loop."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._held: dict[Process, int] = {}

    def __contains__(self, process: Process) -> bool:
        """Whether it is held on to and has not ended."""
        return process in self._held

    def hold(self, process: Process) -> bool:
        """Watch a process from now on; False where it has ended."""
        if process in self._held:
            return True
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        if _mark(fd, process.pid) != process.mark or _has_ended(fd):
            os.close(fd)
            return False
        self._held[process] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, process)
        return True

    def keep_only(self, wanted: Collection[Process]) -> None:
        for process in self._held.keys() - wanted:
            self._let_go(process)

    def _ended(self, process: Process) -> None:
        self._let_go(process)
        self._on_end()

    def _let_go(self, process: Process) -> None:
        fd = self._held.pop(process)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
