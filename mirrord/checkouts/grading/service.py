"""Grades as the daemon hands them out: whose tests, by which rules and policies, for whom.

Knows what answers a task: only administrators get here. What it finds goes into the answer and
nowhere else, for an agent may read events of its own checkout.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ... import protocol
from ...config import Settings
from ...datasets.service import Datasets
from ...errors import InstanceNotFoundError, InvalidRequestError
from ...git.workers import Workers
from ...host.peers import Peer, Process
from ...mirrors.service import Mirrors
from ...model import CheckoutId, LayerId, Policy, SteeringKind, View, shown
from ..admission import Admitted, Leasing, members, must_mount
from ..backend import DIFF_TIMEOUT
from ..leases import Graded, SavedState
from ..patches.service import Patches
from ..resolve import Outfit, ResolvedRequest, Resolver
from ..snapshots import Layers, objects_path
from .prepare import AgentTree, GradeJob, ModelPatch, Prepared, prepare
from .rules import Policies, own_rule

C = TypeVar("C", Policy, SteeringKind)

GRADED = "graded"
"""The snapshot that every grade has: with the change and the tests, and nothing since."""

_RESOLVED = ("mirror", "commit", "tree", "instance", "dataset")
_OF_GRADE = ("backend", "ttl", "owner", "bind")
_DROPPED_KEPT = 1000  # paths in a lease, which is written at each reset and renewal


@dataclass(eq=False, repr=False)
class Grading:
    """Hands out graders' checkouts. Belongs to one event loop."""

    settings: Callable[[], Settings]
    state_dir: Path
    workers: Workers
    mirrors: Mirrors
    datasets: Datasets
    layers: Layers
    leasing: Leasing
    resolver: Resolver
    patches: Patches

    async def grade(
        self,
        checkout: str,
        request: protocol.StartGrade,
        peer: Peer,
        process: Process | None = None,
    ) -> protocol.Grade:
        """Hand out a grader's checkout with what a checkout's owner changed, and the tests."""
        began = time.perf_counter()
        policies = self.policies(request.policy)
        with self.layers.making() as layer:
            async with self.leasing.held(checkout, peer, whole=True) as parent:
                choices = {name: getattr(request, name) for name in _OF_GRADE}
                start = protocol.StartCheckout(
                    view=View.GRADER, history=parent.history, label=parent.label, **choices
                )
                admitted = await self.leasing.admit(start, peer, process)
                self.leasing.must_be_gradable(parent, admitted.owner)
                found = ResolvedRequest(**{name: getattr(parent, name) for name in _RESOLVED})
                changed = self.leasing.lifecycle.backend_of(parent).changed_paths(parent)
                source = AgentTree(self.patches.job(parent), changed)
                outfit = Outfit(parent.saved, parent.environment)
                if parent.environment is not None:
                    admitted = admitted._replace(backends=must_mount(admitted.backends))
                prepared = await self._prepare(layer, found, outfit, source, policies)
            return await self._hand_out(
                began, admitted, found, LayerId(layer.name), prepared, policies, outfit, parent.id
            )

    async def grade_patch(
        self,
        request: protocol.StartCheckout,
        source: ModelPatch,
        policy: str | None,
        peer: Peer,
        process: Process | None = None,
    ) -> protocol.Grade:
        """Hand out a grader's checkout with a patch for what the request names, and the tests."""
        began = time.perf_counter()
        policies = self.policies(policy)
        admitted = await self.leasing.admit(request, peer, process)
        naming = self.leasing.naming(peer)
        found = await self.resolver.resolve_start(request, naming)
        with self.layers.making() as layer:
            async with self.resolver.chosen(request, found, admitted.history, peer) as outfit:
                prepared = await self._prepare(layer, found, outfit, source, policies)
                return await self._hand_out(
                    began, admitted, found, LayerId(layer.name), prepared, policies, outfit
                )

    async def _prepare(
        self,
        layer: Path,
        found: ResolvedRequest,
        outfit: Outfit,
        source: AgentTree | ModelPatch,
        policies: Policies,
    ) -> Prepared:
        """Write the layer of a grade of an instance, or without tests of a bare commit."""
        settings, saved = self.settings().grading, outfit.saved
        mirror = self.mirrors.path(found.mirror)
        job = GradeJob(
            mirror=objects_path(self.state_dir, mirror, found.tree, saved),
            tree=saved.tree if saved else found.tree,
            below=tuple(layer.with_name(each) for each in saved.layers) if saved else (),
            layer=layer,
            test_patch=await self._test_patch(found),
            own_rules=tuple(own_rule(own.name, own.paths, own.policy) for own in settings.rule),
            policies=policies,
            file_bytes=settings.file_bytes,
        )
        return await self.workers.run(prepare, job, source, timeout=DIFF_TIMEOUT)

    async def _hand_out(
        self,
        began: float,
        admitted: Admitted,
        found: ResolvedRequest,
        layer: LayerId,
        prepared: Prepared,
        policies: Policies,
        outfit: Outfit,
        parent: CheckoutId | None = None,
    ) -> protocol.Grade:
        prepared_s = round(time.perf_counter() - began, 6)
        base: dict[str, Any] = {**outfit._asdict(), "layer": layer}
        facts: dict[str, Any] = {name: getattr(found, name) for name in _RESOLVED[1:]}
        facts |= {"files": prepared.files, "size_bytes": prepared.size_bytes, "left_out": {}}
        now = self.leasing.clock()
        snapshot = SavedState(name=GRADED, taken_at=now, git=False, **base, **facts)
        dropped = tuple(prepared.dropped[:_DROPPED_KEPT]), len(prepared.dropped)
        graded = Graded(layer, policies.text, prepared.strategy, *dropped)
        lease, timings = await self.leasing.begin(
            admitted, found, parent=parent, snapshots=(snapshot,), graded=graded, **base
        )
        timings = {"prepare": prepared_s, **timings, "total": round(time.perf_counter() - began, 6)}
        # numbers only: an event is for the uids of its checkout, a log for whoever reads logs
        counts = {"changed": prepared.changed, "dropped": len(prepared.dropped)}
        counts["steering"] = len(prepared.steering)
        self.leasing.publish("checkout.graded", lease, duration_s=timings["total"], **counts)
        told = ("strategy", "changed", "dropped", "steering", "tests")
        answer = {name: getattr(prepared, name) for name in told}
        return protocol.Grade(**members(lease, timings), **answer)

    def policies(self, asked: str | None) -> Policies:
        """Read `drop`, or `drop,tests=report`; raises InvalidRequestError."""
        settings = self.settings().grading
        default, kinds = None, dict[SteeringKind, Policy]()
        for word in asked.split(",") if asked else ():
            kind, equals, policy = word.strip().rpartition("=")
            if equals:
                kinds[_choice(SteeringKind, kind, "kind of rule")] = _choice(
                    Policy, policy, "policy"
                )
            else:
                default = _choice(Policy, policy, "policy")
        return Policies(settings.policy, settings.policies, default, kinds)

    async def _test_patch(self, found: ResolvedRequest) -> bytes | None:
        if found.instance is None:
            return None
        row = await self.datasets.find_instance(found.instance, found.dataset)
        if row is None:  # its dataset was removed or replaced since the checkout
            raise InstanceNotFoundError(
                f"cannot grade instance {found.instance}: no dataset has it any more",
                hint="import its dataset again",
            )
        return row.test_patch.encode(errors="surrogateescape") if row.test_patch else None


def _choice(kind: type[C], text: str, noun: str) -> C:
    try:
        return kind(text.strip())
    except ValueError:
        raise InvalidRequestError(
            f"cannot read the policy: {shown(text)} is no {noun}",
            hint=f"one of {', '.join(kind)}; write for example drop,tests=report",
        ) from None
