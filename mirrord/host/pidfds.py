"""Processes that leases are bound to: which one a peer is, and when it ends.

The inode of a pidfd is its process's own since Linux 6.9; with the start time, where /proc shows it
(ProtectProc=invisible does not), it tells the process from all others with the same number, now or
later. Both outlive the daemon: after a restart the same process is found again, or it has ended.
"""

import asyncio
import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from ..errors import ProcessGoneError
from .files import opened
from .peers import Peer
from .processes import boot_id

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
