"""Ray: actors whose rollouts are checkouts of the mirrord on their own node.

    ray start --address=HEAD:6379 $(python -m mirrord.integrations.ray)

That tells Ray what a node has. mirrord places nothing: Ray puts an actor where the resource
`mirrord_checkouts` is left, or by a label such as `mirrord/psf__requests` where a mirror is warm.
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
from ..client.sandboxes.calls import Executed

CHECKOUTS = "mirrord_checkouts"
"""The resource of a node: one for each checkout that its daemon may still hand out."""

LABELS_MAX = 64
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # what Ray takes as a key


def node_resources(socket: Path | str | None = None) -> dict[str, float]:
    """What `ray start --resources` is told: how many checkouts are left now."""
    with Client(socket) as client:
        status = client.status()
    return {CHECKOUTS: float(max(status.checkout_max - status.checkout_count, 0))}


def node_labels(socket: Path | str | None = None, *, most: int = LABELS_MAX) -> dict[str, str]:
    """What `ray start --labels` is told: mirrors with warm commits, those that were used last.

    Administrators alone are told of any.
    """
    with Client(socket) as client:
        rows = client.usage(verbose=True).rows
    warm = [(row.used_at, row.name) for row in rows if row.kind == "templates" and row.used_at]
    mirrors = dict.fromkeys(name.partition("@")[0] for _, name in sorted(warm, reverse=True))
    return {f"mirrord/{each}": "warm" for each in islice(filter(_LABEL.fullmatch, mirrors), most)}


class Rollouts:
    """Holds checkouts of this node's daemon, each with a sandbox for its commands; ids name them.

    `socket` is by default that of the node: MIRRORD_SOCKET where `ray start` ran, else the
    configured one. Leases are renewed by the client, and end with the actor's process, however that
    ends. Their label is `ray/` and the actor's id.
    """

    def __init__(
        self,
        socket: str | None = None,
        checkout: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        label = f"ray/{ray.get_runtime_context().get_actor_id()}"
        self._client = Client(socket)
        self._checkout = {"bind": Bind.PROCESS, "label": label, **(checkout or {})}
        self._sandbox = sandbox or {}
        self._held: dict[str, Sandbox] = {}

    def checkout(self, instance: str, **choices: Any) -> protocol.Checkout:
        """Lease a tree; `choices` are further arguments of `Client.checkout`."""
        held = self._client.checkout(instance, **{**self._checkout, **choices})
        self._held[held.id] = Sandbox(held, **self._sandbox)
        return held.lease

    def run(self, checkout: str, command: str | Sequence[str], **limits: Any) -> Executed:
        """Run a command in the sandbox; `limits` are those of `Sandbox.exec`."""
        return self._held[checkout].exec(command, **limits)

    def diff(self, checkout: str) -> bytes:
        """What changed since the base commit, as a patch."""
        return self._client.diff_checkout(checkout)

    def reset(
        self, checkout: str, instance: str | None = None, **target: str | None
    ) -> protocol.Proof:
        """End all processes and reset the tree, perhaps to another instance of its mirror."""
        return self._held[checkout].reset(instance, **target)

    def grade(
        self, checkout: str, command: str | Sequence[str], *, policy: Any = None, **limits: Any
    ) -> Executed:
        """Run the tests on what was changed, in a grader's tree with the instance's tests.

        For administrators. It is a checkout beside the one that it grades, for that time.
        """
        lent = self._client.grade_checkout(checkout, policy=policy, bind=self._checkout["bind"])
        with lent as grade, Sandbox(grade, **self._sandbox) as box:
            return box.exec(command, **limits)

    def release(self, checkout: str) -> None:
        """End all processes and give the tree back."""
        self._held.pop(checkout).close()
        self._client.release_checkout(checkout)


RolloutActor = ray.remote(resources={CHECKOUTS: 1}, num_cpus=0)(Rollouts)
"""Rollouts as an actor with room for one checkout; `options` asks for more, or for processors."""


def main() -> None:
    """Print what `ray start` is told of this node."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--socket", type=Path)
    socket = parser.parse_args().socket
    try:
        resources, labels = node_resources(socket), node_labels(socket)
    except MirrordError as error:
        sys.exit(f"mirrord: {error.message}")
    words = [f"--resources={json.dumps(resources, separators=(',', ':'))}"]
    if labels:
        words.append(f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}")
    sys.stdout.write(" ".join(words) + "\n")


if __name__ == "__main__":
    main()
