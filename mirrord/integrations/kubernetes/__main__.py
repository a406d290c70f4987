"""The CSI plugin of a node: serves gRPC at a Unix socket, and renews what is published.

Ends on SIGTERM; volumes stay as they are.
"""

import argparse
import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc

from ... import Client
from ...errors import MirrordError
from ...units import parse_duration
from .server import NAME, add_services
from .volumes import PodVolumes

_CALLS_MAX = 128  # at once: more than pods that start together; a kubelet has 110 in all
_RETRY = timedelta(seconds=30)

log = logging.getLogger("mirrord.kubernetes")


def main() -> None:
    parser = argparse.ArgumentParser(prog="mirrord.integrations.kubernetes", description=NAME)
    parser.add_argument("--endpoint", required=True, help="unix:///csi/csi.sock")
    parser.add_argument("--node", required=True, help="the node's name")
    parser.add_argument("--socket", help="the daemon's; default: MIRRORD_SOCKET, or as configured")
    parser.add_argument(
        "--kubelet", type=Path, default=Path("/var/lib/kubelet"), help="the kubelet's directory"
    )
    parser.add_argument(
        "--ttl",
        type=parse_duration,
        default=timedelta(days=1),
        help="how long a volume outlives its mount, and the plugin's absence",
    )
    chosen = parser.parse_args()
    if not chosen.endpoint.startswith("unix:"):
        parser.error("--endpoint: only a Unix socket, unix:///…, keeps others out")
    if chosen.ttl < timedelta(seconds=1):
        parser.error("--ttl: at least a second")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    # the kubelet asks a busy daemon again, ever more slowly, and one that starts
    with Client(chosen.socket, patience=timedelta(), retries=0) as client:
        volumes = PodVolumes(client, chosen.kubelet, chosen.ttl)
        server = grpc.server(ThreadPoolExecutor(_CALLS_MAX))
        add_services(server, chosen.node, volumes)
        server.add_insecure_port(chosen.endpoint)
        server.start()
        log.info("%s serves node %s at %s", NAME, chosen.node, chosen.endpoint)
        pause = timedelta()
        while not stopping.wait(pause.total_seconds()):
            pause = _renew(volumes)
        server.stop(grace=5).wait()


def _renew(volumes: PodVolumes) -> timedelta:
    """How long to wait before the next time."""
    pause = volumes.ttl / 4
    try:
        return pause if volumes.renew() else min(pause, _RETRY)
    except MirrordError as error:
        log.warning("cannot renew leases: %s", error)
        return min(pause, _RETRY)


if __name__ == "__main__":
    main()
