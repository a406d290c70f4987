"""Ports of loopback for servers that are told where to listen, and may be stopped and started."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_HELD: list[socket.socket] = []


def free_port() -> int:
    """Return a port at which nobody listens, and which no other test is given while this process runs.

    It is below those that the kernel gives to a bind to port 0 and to connections (ip(7)): a server
    that begins a second later, or anew, would find one of them taken now and then.
    """
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    while True:
        port = random.SystemRandom().randrange(_FIRST, int(limits[0]))
        claim = socket.socket(socket.AF_UNIX)
        try:
            # of the whole machine, until this process ends
            claim.bind(f"\0mirrord-tests-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            claim.close()
            continue
        _HELD.append(claim)
        return port
