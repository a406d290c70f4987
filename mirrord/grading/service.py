"""The service of grades: which tests, rules and policies apply, and who may grade.

Its answers reveal the solution of a task, so only administrators may ask. Findings go into the
answer and nowhere else, because an agent may read the events of its own checkout.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from .. import protocol
from ..catalog import InstanceRow
from ..checkouts.layers import Layers, objects_path
from ..checkouts.lease import Base, Graded, SavedLayer, SavedState
from ..checkouts.patching import DiffAnswer, Patches
from ..checkouts.requests.admission import Admitted, Leasing, checkout_fields
from ..checkouts.requests.resolve import ResolvedRequest, Resolver
from ..config import Settings
from ..datasets.service import Datasets
from ..environments.probing import Probes
from ..environments.service import Environments
from ..errors import ConflictError, InstanceNotFoundError, InvalidRequestError
from ..host.peers import Peer, Process
from ..mirrors.service import Mirrors
from ..model import CheckoutId, DiffFormat, Policy, SteeringKind, View, shown
from ..patches.diff import Diff
from ..telemetry import elapsed_s
from ..workers.pool import Workers
from .judging import Judge, Judged
from .prepare import AgentTree, DiffOrder, GradeJob, ModelPatch
from .rules import own_rule, runner_rule
from .runners import files_of
from .sifting import Policies
from .trust import split

C = TypeVar("C", Policy, SteeringKind)

# the snapshot of every grade: the base with the change and the tests, as it was made
GRADED = "graded"

# from a request for a grade to one for a checkout
_COPIED = ("backend", "ttl", "owner", "bind", "attach", "sandbox")
_DROPPED_KEPT = 1000  # paths in a lease, which is written at each reset and renewal


@dataclass(eq=False, repr=False)
class Grading:
    """Makes checkouts for graders. Belongs to one event loop."""

    settings: Callable[[], Settings]
    state_dir: Path
    workers: Workers
    mirrors: Mirrors
    datasets: Datasets
    layers: Layers
    leasing: Leasing
    resolver: Resolver
    patches: Patches
    environments: Environments
    probes: Probes

    def __post_init__(self) -> None:
        self._judge = Judge(self.workers, self.layers, self.leasing, self.probes)

    async def grade(
        self,
        checkout: str,
        request: protocol.StartGrade,
        peer: Peer,
        process: Process | None = None,
    ) -> protocol.Grade:
        """Make a grader's checkout with the changes in another checkout, and the tests."""
        return (await self._grade(checkout, request, peer, process, None))[0]

    async def grade_and_diff(
        self,
        checkout: str,
        request: protocol.StartGrade,
        peer: Peer,
        process: Process | None,
        form: DiffFormat,
    ) -> tuple[protocol.Grade, DiffAnswer]:
        """Make a grade, and the diff of the checkout, from one reading of its tree.

        Raises TooLargeError for a diff that does not fit into an answer.
        """
        async with self.patches.spool() as spool:
            order = DiffOrder(form, spool)
            grade, printed = await self._grade(checkout, request, peer, process, order)
        assert printed is not None
        return grade, DiffAnswer.of(printed, spool)

    async def _grade(
        self,
        checkout: str,
        request: protocol.StartGrade,
        peer: Peer,
        process: Process | None,
        order: DiffOrder | None,
    ) -> tuple[protocol.Grade, Diff | None]:
        began = time.perf_counter()
        policies = self.policies(request.policy)
        with ExitStack() as stack:
            async with self.leasing.held(checkout, peer, live=True) as parent:
                choices = {name: getattr(request, name) for name in _COPIED}
                start = protocol.StartCheckout(
                    view=View.GRADER, history=parent.history, label=parent.terms.label, **choices
                )
                admitted = await self.leasing.admit(start, peer, process)
                self.leasing.must_be_gradable(parent, admitted.terms.owner_uid)
                base = replace(parent.base, layer=None, environment_layer=None)
                resolved = ResolvedRequest(parent.mirror, base)
                if request.dataset is not None:
                    resolved = await self._of_dataset(resolved, request.dataset, peer)
                changed = self.leasing.lifecycle.backend_of(parent).changed_paths(parent)
                source = AgentTree(self.patches.job(parent), changed, order)
                judged, resolved = await self._prepare(stack, admitted, resolved, source, policies)
                # under the lock: while it is held, the parent keeps its layer and environment
                terms = admitted, resolved, judged, policies
                return await self._hand_out(began, *terms, parent.id), judged.prepared.diff

    async def grade_patch(
        self,
        request: protocol.StartCheckout,
        source: ModelPatch,
        policy: str | None,
        peer: Peer,
        process: Process | None = None,
    ) -> protocol.Grade:
        """Make a grader's checkout of what the request names, with a patch and the tests."""
        began = time.perf_counter()
        policies = self.policies(policy)
        admitted = await self.leasing.admit(request, peer, process)
        resolved = await self.resolver.resolve_start(request, self.leasing.naming(peer))
        with ExitStack() as stack:
            async with self.resolver.completed(
                request, resolved, admitted.history, peer
            ) as resolved:
                judged, resolved = await self._prepare(stack, admitted, resolved, source, policies)
                return await self._hand_out(began, admitted, resolved, judged, policies)

    async def _prepare(
        self,
        stack: ExitStack,
        admitted: Admitted,
        resolved: ResolvedRequest,
        source: AgentTree | ModelPatch,
        policies: Policies,
    ) -> tuple[Judged, ResolvedRequest]:
        """Write the layer of a grade: of an instance, or of a bare commit without tests.

        Also return what it is made from: prepared layers that others wrote are part of the change.
        """
        settings, row = self.settings().grading, await self._row(resolved)
        layered = split(resolved.base, self.leasing.access.is_admin, self.probes.owner[0])
        before, resolved = resolved.base, resolved._replace(base=layered.base)
        base, saved = layered.base, layered.base.saved
        recipe = await self._recipe(resolved, row)
        own = [own_rule(own.name, own.paths, own.policy) for own in settings.rule]
        layers = self.layers.directory
        job = GradeJob(
            mirror=self._objects(resolved, before),
            tree=base.clean_tree,
            below=tuple(layers / name for name in saved.layers) if saved else (),
            layer=layers,
            test_patch=_test_patch_of(row),
            restored=_restored_of(row),
            rules=(*own, *([runner_rule(files_of(recipe))] if recipe else [])),
            policies=policies,
            file_bytes=settings.file_bytes,
            layered=before.clean_tree if layered.judged else None,
            left=tuple(map(_left_of, layered.judged)),
        )
        return await self._judge.prepare(stack, job, source, admitted, resolved, recipe), resolved

    def _objects(self, resolved: ResolvedRequest, before: Base) -> Path:
        """Return the repository with the trees of all layers: that of the top one that has a tree
        of its own, which borrows from those below.
        """
        mirror, layer = self.mirrors.path(resolved.mirror), before.saved
        while layer is not None and layer.tree == before.plain_tree:
            layer = layer.below
        return objects_path(self.state_dir, mirror, replace(before, saved=layer))

    async def _recipe(
        self, resolved: ResolvedRequest, row: InstanceRow | None
    ) -> protocol.Recipe | None:
        """Return the recipe of the environment, or else of the instance."""
        if (environment := resolved.base.environment) is not None:
            record = self.environments.store.record(environment.digest)
            written = record.facts["recipe"] if record else None
            return protocol.Recipe.from_json(written) if written else None
        return await self.environments.find_recipe(row) if row else None

    async def _hand_out(
        self,
        began: float,
        admitted: Admitted,
        resolved: ResolvedRequest,
        judged: Judged,
        policies: Policies,
        parent: CheckoutId | None = None,
    ) -> protocol.Grade:
        layer, prepared, prepared_s = judged.layer, judged.prepared, elapsed_s(began)
        base = replace(resolved.base, layer=layer)
        snapshot = SavedState(
            name=GRADED, base=base, taken_at=self.leasing.clock(), git=False, left_out={},
            files=prepared.files, size_bytes=prepared.size_bytes,
        )  # fmt: skip
        dropped = tuple(prepared.dropped[:_DROPPED_KEPT]), len(prepared.dropped)
        graded = Graded(layer, policies.text, prepared.strategy, *dropped)
        draft = replace(
            self.leasing.draft(admitted, resolved.mirror, base),
            parent=parent, snapshots=(snapshot,), graded=graded,
        )  # fmt: skip
        lease, timings = await self.leasing.begin(draft, admitted)
        timings = {"prepare": prepared_s, **timings, "total": elapsed_s(began)}
        # counts alone: the uids of the checkout read its events, and others may read the log
        counts = {"changed": prepared.changed, "dropped": len(prepared.dropped)}
        counts["steering"] = len(prepared.steering)
        self.leasing.publish("checkout.graded", lease, duration_s=timings["total"], **counts)
        names = "strategy", "tests_strategy", "changed", "dropped", "steering", "tests", "notes"
        answer = {name: getattr(prepared, name) for name in names}
        answer["judged_by"] = "loading" if judged.by_loading else "names"
        return protocol.Grade(**checkout_fields(lease, timings), **answer)

    def policies(self, asked: str | None) -> Policies:
        """Parse `drop`, or `drop,tests=report`. Raises InvalidRequestError."""
        settings = self.settings().grading
        default, kinds = None, dict[SteeringKind, Policy]()
        for word in asked.split(",") if asked else ():
            name, equals, text = word.strip().rpartition("=")
            policy = _choice(Policy, text, "policy")
            if equals:
                kinds[_choice(SteeringKind, name, "kind of rule")] = policy
            else:
                default = policy
        return Policies(settings.policy, settings.policies, default, kinds)

    async def _of_dataset(
        self, resolved: ResolvedRequest, dataset: str, peer: Peer
    ) -> ResolvedRequest:
        """Use the tests of this dataset, which must record the checkout's commit."""
        base = resolved.base
        if base.instance is None:
            raise InvalidRequestError(
                "cannot grade by a dataset: the checkout has no instance",
                hint="leave the dataset out, or check out an instance",
            )
        named = protocol.StartCheckout(instance=base.instance, dataset=dataset)
        other = await self.resolver.resolve_start(named, self.leasing.naming(peer))
        if (other.mirror.key, other.base.commit) != (resolved.mirror.key, base.commit):
            raise ConflictError(
                f"cannot grade {base.instance} by dataset {shown(dataset)}: it records another"
                " commit than the checkout has",
                hint=f"check it out with --dataset {dataset}",
            )
        return resolved._replace(base=replace(base, dataset=dataset))

    async def _row(self, resolved: ResolvedRequest) -> InstanceRow | None:
        if resolved.base.instance is None:
            return None
        row = await self.datasets.find_instance(resolved.base.instance, resolved.base.dataset)
        if row is None:  # its dataset was removed or replaced since the checkout
            raise InstanceNotFoundError(
                f"cannot grade instance {resolved.base.instance}: no dataset records it any more",
                hint="import its dataset again",
            )
        return row


def _left_of(layer: SavedLayer) -> protocol.Steering:
    """Say that a layer is part of the change, and so without what git ignores."""
    detail = f"uid {layer.written_by} wrote it: as part of the change, without ignored files"
    return protocol.Steering(
        rule="prepared-layer", kind=SteeringKind.TREE, path=layer.name, action="left", detail=detail
    )


def _test_patch_of(row: InstanceRow | None) -> bytes | None:
    if row is None or not row.test_patch:
        return None
    return row.test_patch.encode(errors="surrogateescape")


def _restored_of(row: InstanceRow | None) -> tuple[bytes, ...]:
    files = (row.install_config or {}).get("restored_files", ()) if row else ()
    return tuple(map(os.fsencode, files))


def _choice(kind: type[C], text: str, noun: str) -> C:
    try:
        return kind(text.strip())
    except ValueError:
        raise InvalidRequestError(
            f"cannot read the policy: {shown(text)} is no {noun}",
            hint=f"use one of {', '.join(kind)}, for example drop,tests=report",
        ) from None
