"""systemd's protocols: socket activation and sd_notify(3).

The variables are read once and removed, so that no child process acts on them. Without a service
manager a notification does nothing. None raises.
"""

import os
import socket
import stat
import time
from datetime import timedelta


def take_sockets() -> dict[str, socket.socket]:
    """Take the listening Unix sockets that systemd passed to this process, by name.

    LISTEN_PID must be this process: a child may have inherited the variables.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    # SD_LISTEN_FDS_START; before systemd 227 there are no names
    descriptors = range(3, 3 + int(count))
    names += [f"unknown{n}" for n in range(len(names), len(descriptors))]
    taken = ((name, _find_listener(fd)) for name, fd in zip(names, descriptors, strict=False))
    return {name: listener for name, listener in taken if listener is not None}


def _find_listener(fd: int) -> socket.socket | None:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        listener = socket.socket(fileno=fd)
        # with Accept=yes systemd would pass a connection instead of the listener
        is_ours = (
            listener.family == socket.AF_UNIX
            and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        )
    except OSError:
        return None
    if not is_ours:
        listener.detach()
        return None
    os.set_inheritable(fd, False)
    listener.setblocking(False)
    return listener


class Notifier:
    """Sends the daemon's state to the service manager: sd_notify(3) without libsystemd."""

    def __init__(self) -> None:
        """Take NOTIFY_SOCKET and WATCHDOG_USEC out of the environment."""
        address, own_pid = os.environ.pop("NOTIFY_SOCKET", ""), str(os.getpid())
        usec, pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", own_pid)
        self._address = "\0" + address[1:] if address.startswith("@") else address  # abstract
        is_watched = usec.isdecimal() and pid == own_pid
        self._watchdog = timedelta(microseconds=int(usec)) if is_watched else None

    @property
    def watchdog_interval(self) -> timedelta | None:
        """The interval for `alive`: half of WatchdogSec=; None without one."""
        return self._watchdog / 2 if self._watchdog and self._address else None

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """`ready` follows. Type=notify-reload (systemd 253) requires MONOTONIC_USEC."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        # a newline in a status would begin another assignment
        lines = "\n".join(line.replace("\n", " ") for line in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(lines.encode(), self._address)
        except OSError:  # no listener, or its queue is full; a later one may get through
            pass
