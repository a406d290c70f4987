"""The CSI node plugin: serves gRPC at a Unix socket, and renews the leases of published volumes.

Ends on SIGTERM; volumes stay published.
"""

import argparse
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc

from ... import Client
from ...errors import MirrordError
from ...units import parse_duration
from .server import NAME, add_services
from .volumes import PodVolumes

_THREADS_MAX = 128  # a kubelet has at most 110 pods
_ENDING = (signal.SIGTERM, signal.SIGINT)

log = logging.getLogger("mirrord.kubernetes")


def main() -> None:
    parser = argparse.ArgumentParser(prog="mirrord.integrations.kubernetes", description=NAME)
    parser.add_argument("--endpoint", required=True, help="unix:///csi/csi.sock")
    parser.add_argument("--node", required=True, help="name of the node")
    parser.add_argument(
        "--socket", help="socket of the daemon; default: MIRRORD_SOCKET, or as configured"
    )
    parser.add_argument(
        "--kubelet", type=Path, default=Path("/var/lib/kubelet"), help="directory of the kubelet"
    )
    parser.add_argument(
        "--ttl",
        type=parse_duration,
        default=timedelta(days=1),
        help="length of leases, which outlive mounts and plugin by that time",
    )
    options = parser.parse_args()
    if not options.endpoint.startswith("unix:"):
        parser.error("--endpoint: must be a Unix socket, unix:///…, which keeps others out")
    if options.ttl < timedelta(seconds=1):
        parser.error("--ttl: must be at least a second")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    # Before any thread, which inherits the mask. A handler that sets an Event may interrupt `wait`
    # while that holds the event's lock, or just before it sleeps: the plugin would never end.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    # the kubelet retries, with growing pauses, while the daemon is busy or starting
    with Client(options.socket, patience=timedelta(), retries=0) as client:
        volumes = PodVolumes(client, options.kubelet, options.ttl)
        server = grpc.server(ThreadPoolExecutor(_THREADS_MAX))
        add_services(server, options.node, volumes)
        server.add_insecure_port(options.endpoint)
        server.start()
        log.info("%s serves node %s at %s", NAME, options.node, options.endpoint)
        pause = timedelta()
        while signal.sigtimedwait(_ENDING, pause.total_seconds()) is None:
            pause = _renew(volumes)
        server.stop(grace=5).wait()


# after a renewal that failed; usually it is a quarter of the lease
_RETRY_AFTER = timedelta(seconds=30)


def _renew(volumes: PodVolumes) -> timedelta:
    """Renew the leases; returns the pause before the next renewal."""
    # three in a row may fail before a lease ends
    pause = volumes.ttl / 4
    try:
        return pause if volumes.renew() else min(pause, _RETRY_AFTER)
    except MirrordError as error:
        log.warning("cannot renew leases: %s", error)
        return min(pause, _RETRY_AFTER)


if __name__ == "__main__":
    main()
