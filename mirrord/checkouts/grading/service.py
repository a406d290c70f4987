"""Grades as the daemon prepares them: whose tests, by which rules and policies, in a worker.

Knows what answers a task: only administrators get here. What it finds goes into the answer and
nowhere else, for an agent may read events of its own checkout.
"""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from ...config import Settings
from ...datasets.service import Datasets
from ...errors import InstanceNotFoundError, InvalidRequestError
from ...git.workers import Workers
from ...mirrors.service import Mirrors
from ...model import LayerId, Policy, SteeringKind, shown
from ..backend import DIFF_TIMEOUT
from ..leases import Graded, SavedLayer, SavedState
from ..resolve import Outfit, ResolvedRequest
from ..snapshots.layers import objects_path
from .prepare import AgentTree, GradeJob, ModelPatch, Prepared, prepare
from .rules import own_rule
from .steering import Policies

C = TypeVar("C", Policy, SteeringKind)

GRADED = "graded"
"""The snapshot that every grade has: with the change and the tests, and nothing since."""

_DROPPED_KEPT = 1000  # paths in a lease, which is written at each reset and renewal


class Grading:
    """Prepares the layers of grades."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        state_dir: Path,
        workers: Workers,
        mirrors: Mirrors,
        instances: Datasets,
    ) -> None:
        self._settings = settings
        self._state = state_dir
        self._workers = workers
        self._mirrors = mirrors
        self._instances = instances

    async def prepare(
        self,
        layer: Path,
        found: ResolvedRequest,
        saved: SavedLayer | None,
        source: AgentTree | ModelPatch,
        policies: Policies,
    ) -> Prepared:
        """Write the layer of a grade of an instance, or without tests of a bare commit; on its
        prepared layer, if it is to have one.
        """
        settings = self._settings().grading
        mirror = self._mirrors.path(found.mirror)
        job = GradeJob(
            mirror=objects_path(self._state, mirror, found.tree, saved),
            tree=saved.tree if saved else found.tree,
            below=tuple(layer.with_name(each) for each in saved.layers) if saved else (),
            layer=layer,
            test_patch=await self._test_patch(found),
            own_rules=tuple(own_rule(own.name, own.paths, own.policy) for own in settings.rule),
            policies=policies,
            file_bytes=settings.file_bytes,
        )
        return await self._workers.run(prepare, job, source, timeout=DIFF_TIMEOUT)

    def policies(self, asked: str | None) -> Policies:
        """Read `drop`, or `drop,tests=report`; raises InvalidRequestError."""
        settings = self._settings().grading
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
        row = await self._instances.find_instance(found.instance, found.dataset)
        if row is None:  # its dataset was removed or replaced since the checkout
            raise InstanceNotFoundError(
                f"cannot grade instance {found.instance}: no dataset has it any more",
                hint="import its dataset again",
            )
        return row.test_patch.encode(errors="surrogateescape") if row.test_patch else None


def lease_facts(
    prepared: Prepared,
    layer: LayerId,
    found: ResolvedRequest,
    outfit: Outfit,
    policies: Policies,
    now: datetime,
) -> dict[str, Any]:
    """What the lease of a grade says besides those of all: its layer, which is a snapshot too."""
    graded = SavedState(
        name=GRADED,
        layer=layer,
        commit=found.commit,
        tree=found.tree,
        instance=found.instance,
        dataset=found.dataset,
        taken_at=now,
        files=prepared.files,
        size_bytes=prepared.size_bytes,
        left_out={},
        git=False,
        **outfit._asdict(),
    )
    dropped = tuple(prepared.dropped[:_DROPPED_KEPT]), len(prepared.dropped)
    facts = Graded(layer, policies.text, prepared.strategy, *dropped)
    more = {"layer": layer, "snapshots": (graded,), "graded": facts}
    return outfit._asdict() | more


def _choice(kind: type[C], text: str, noun: str) -> C:
    try:
        return kind(text.strip())
    except ValueError:
        raise InvalidRequestError(
            f"cannot read the policy: {shown(text)} is no {noun}",
            hint=f"one of {', '.join(kind)}; write for example drop,tests=report",
        ) from None
