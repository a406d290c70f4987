"""Ray: a cluster with a node for each daemon, on one machine; the example on it, and actors that end.

The arguments are sockets; the first one's daemon alone is warm.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from mirrord import Client
from mirrord.integrations.ray import CHECKOUTS, RolloutActor, node_labels, node_resources

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_rollouts.py"
INSTANCE, COMMAND, TEST = json.loads(os.environ["INSTANCE"])


def main(directory: str, *sockets: str) -> None:
    cluster = Cluster()
    cluster.add_node(num_cpus=0, include_dashboard=False, temp_dir=directory)
    try:
        for socket in sockets:
            cluster.add_node(
                wait=False,
                num_cpus=1,
                object_store_memory=80 * 1024**2,
                resources=node_resources(socket),
                labels=node_labels(socket),
                env_vars={"MIRRORD_SOCKET": socket},
            )
        cluster.wait_for_nodes()
        rows = roll_out(cluster.address)
        ray.init(cluster.address, log_to_driver=False)
        facts = {"resources": ray.cluster_resources()[CHECKOUTS], "rows": rows, **warm(*sockets)}
        ray.shutdown()
    finally:
        cluster.shutdown()
    print(json.dumps(facts))


def roll_out(address: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), INSTANCE, COMMAND, TEST],
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        check=True,
        timeout=150,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def warm(first: str, *_: str) -> dict[str, Any]:
    """An actor that wants a warm mirror is with the first daemon; what it held ends with it."""
    selector = {"mirrord/acme__shapes": "warm"}
    wanted = RolloutActor.options(label_selector=selector, max_concurrency=2)
    actor = wanted.remote(checkout={"ttl": "2s"})
    with Client(first) as client:
        lease = ray.get(actor.checkout.remote(INSTANCE))
        ray.get(actor.run.remote(lease.id, COMMAND))
        patches = [ray.get(actor.diff.remote(lease.id))]
        ray.get(actor.reset.remote(lease.id))
        patches.append(ray.get(actor.diff.remote(lease.id)))
        waits = actor.run.remote(lease.id, "until [ -e mark ]; do sleep 0.1; done", timeout=60)
        marks = actor.run.remote(lease.id, "touch mark")
        assert [each.exit_code for each in ray.get([waits, marks])] == [0, 0]
        time.sleep(5)
        held = [each.label for each in client.list_checkouts()]
        other = ray.get(actor.checkout.remote(INSTANCE, ttl=3600))
        ray.get(actor.release.remote(lease.id))
        left = [each.id for each in client.list_checkouts()]
        ray.kill(actor)
        until(lambda: not client.list_checkouts())
    return {
        "patches": [patch.decode() for patch in patches],
        "held": held == [f"ray/{actor._actor_id.hex()}"],
        "left": left == [other.id],
    }


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


main(*sys.argv[1:])
