"""Ray: actors whose rollouts are checkouts of the daemon on their node.

    ray start --address=HEAD:6379 $(python -m mirrord.integrations.ray)

The options name what a node has. Ray then places an actor where the resource `mirrord_checkouts` is
available, or by a label such as `mirrord/psf__requests` where a mirror has warm templates.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import ray

from .. import Bind, Client, MirrordError, Sandbox, protocol
from ..sandbox.calls import Executed

CHECKOUTS = "mirrord_checkouts"
"""The resource of a node: the number of checkouts that its daemon can still lease."""

# mirrors with recently used templates; the others are left out
LABELS_MAX = 64
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # what Ray takes as a key


def node_resources(socket: Path | str | None = None) -> dict[str, float]:
    """Return the value of `ray start --resources`: the number of free checkouts."""
    with Client(socket) as client:
        status = client.status()
    return {CHECKOUTS: float(max(status.checkout_max - status.checkout_count, 0))}


def node_labels(socket: Path | str | None = None, *, most: int = LABELS_MAX) -> dict[str, str]:
    """Return the value of `ray start --labels`: `most` mirrors with recently used templates.

    Empty unless the caller is an administrator.
    """
    with Client(socket) as client:
        rows = client.usage(verbose=True).rows
    warm = [(row.used_at, row.name) for row in rows if row.kind == "templates" and row.used_at]
    mirrors = dict.fromkeys(name.partition("@")[0] for _, name in sorted(warm, reverse=True))
    return {f"mirrord/{name}": "warm" for name in islice(filter(_LABEL.fullmatch, mirrors), most)}


class Rollouts:
    """Holds checkouts of this node's daemon, each with a sandbox, by their ids.

    `socket` is by default MIRRORD_SOCKET of `ray start`, else the configured one. The client renews
    the leases; they end with the actor's process. Their label is `ray/` and the actor's id.
    """

    def __init__(
        self,
        socket: str | None = None,
        checkout: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        label = f"ray/{ray.get_runtime_context().get_actor_id()}"
        self._client = Client(socket)
        self._checkout = {"bind": Bind.PROCESS, "sandbox": True, "label": label, **(checkout or {})}
        self._sandbox = sandbox or {}
        self._held: dict[str, Sandbox] = {}

    def checkout(self, instance: str, **choices: Any) -> protocol.Checkout:
        """Lease a tree; `choices` are further arguments of `Client.checkout`."""
        held = self._client.checkout(instance, **{**self._checkout, **choices})
        self._held[held.id] = Sandbox(held, **self._sandbox)
        return held.lease

    def run(self, checkout: str, command: str | Sequence[str], **limits: Any) -> Executed:
        """Run a command in the sandbox; `limits` are arguments of `Sandbox.exec`."""
        return self._held[checkout].exec(command, **limits)

    def diff(self, checkout: str) -> bytes:
        return self._client.diff_checkout(checkout)

    def reset(
        self, checkout: str, instance: str | None = None, **target: str | None
    ) -> protocol.Proof:
        """End all processes, and reset the checkout or move it to another instance."""
        return self._held[checkout].reset(instance, **target)

    def grade(
        self, checkout: str, command: str | Sequence[str], *, policy: Any = None, **limits: Any
    ) -> Executed:
        """Run the tests in a temporary grade of a checkout; for administrators."""
        choices = {"policy": policy, "bind": self._checkout["bind"], "sandbox": True}
        leased = self._client.grade_checkout(checkout, **choices)
        with leased as grade, Sandbox(grade, **self._sandbox) as box:
            return box.exec(command, **limits)

    def release(self, checkout: str) -> None:
        """End all processes and release the checkout."""
        self._held.pop(checkout).close()
        self._client.release_checkout(checkout)


# num_cpus=0: an actor class with a custom resource alone takes a whole CPU
RolloutActor = ray.remote(resources={CHECKOUTS: 1}, num_cpus=0)(Rollouts)
"""Rollouts as an actor with one checkout; use `options` for more checkouts, or for CPUs."""


def main() -> None:
    """Print the options of `ray start` for this node."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--socket", type=Path)
    socket = parser.parse_args().socket
    try:
        resources, labels = node_resources(socket), node_labels(socket)
    except MirrordError as error:
        sys.exit(f"mirrord: {error.message}")
    options = [f"--resources={json.dumps(resources, separators=(',', ':'))}"]
    if labels:
        options.append(f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}")
    sys.stdout.write(" ".join(options) + "\n")


if __name__ == "__main__":
    main()
