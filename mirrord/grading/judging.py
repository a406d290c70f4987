"""Grades that have an environment are judged by what it loads: asked in sandboxes, round by round.

A checkout with the grade is made for the user of builds, asked about, and ended. A dropped path may
reveal another, so the grade is prepared again without it, until nothing more is dropped. The answer
for the base with the tests is asked once. The layer that was asked about is handed out.
"""

import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cachetools import LRUCache

from ..checkouts.layers import Layers
from ..checkouts.requests.admission import Admitted, Leasing
from ..checkouts.requests.resolve import ResolvedRequest
from ..environments.probing import ProbeAnswer, Probes, Question
from ..errors import ResourceError
from ..host.peers import own_process
from ..model import LayerId, Policy, View
from ..protocol import Recipe, Steering
from ..quoting import decode_name, encode_name
from ..workers.pool import Workers
from .loading import Loaded, compare
from .prepare import AgentTree, GradeJob, ModelPatch, Prepared, book_of, prepare
from .sifting import ACTIONS, Drop, finding, in_order, must_not_refuse

# each drop may reveal another path, and a round costs about half a second
_ROUNDS = 10
# answers about bases: a probe takes half a second, and tasks of one instance ask the same
_BASES = 256
# of the checkout that is asked about, which is released at once; ten rounds take five seconds
_TTL = timedelta(minutes=10)


class Judged(NamedTuple):
    """A prepared grade with its layer; `by_loading` if its environment was asked."""

    layer: LayerId
    prepared: Prepared
    by_loading: bool


class _Place(NamedTuple):
    """Where a grade is asked about: the checkout's terms, its base, and the recipe."""

    admitted: Admitted
    found: ResolvedRequest
    recipe: Recipe


@dataclass(eq=False, repr=False)
class Judge:
    """Prepares grades, and has the environments of those that have one asked."""

    workers: Workers
    layers: Layers
    leasing: Leasing
    probes: Probes
    _bases: LRUCache[Any, ProbeAnswer] = field(default_factory=lambda: LRUCache(_BASES))

    async def prepare(
        self,
        stack: ExitStack,
        job: GradeJob,
        source: AgentTree | ModelPatch,
        admitted: Admitted,
        resolved: ResolvedRequest,
        recipe: Recipe | None,
    ) -> Judged:
        """Prepare a grade in a layer that is kept until `stack` ends.

        Raises SteeringRefusedError.
        """
        if resolved.base.environment is None or recipe is None:
            layer, prepared = await self._prepare(stack, job, source)
            return Judged(layer, prepared, by_loading=False)
        place = _Place(self._for_builds(admitted), resolved, recipe)
        drops: dict[bytes, Drop] = {}
        for _ in range(_ROUNDS):
            job = replace(job, drops=tuple(drops.values()))
            layer, prepared = await self._prepare(stack, job, source)
            try:
                base = await self._ask_base(place, job, prepared.new_tests)
                graded = await self._ask(place, layer, prepared.new_tests, stack)
            except ResourceError as error:
                return Judged(
                    layer, _told(prepared, job, [_not_judged(job, error)]), by_loading=False
                )
            steering, more = _weighed(job, list(compare(base, graded, prepared.kept)))
            if not more:
                return Judged(layer, _told(prepared, job, steering), by_loading=True)
            drops |= more
        endless = _refusal(job, f"not settled after {_ROUNDS} rounds")
        return Judged(layer, _told(prepared, job, [endless]), by_loading=True)

    async def _prepare(
        self, stack: ExitStack, job: GradeJob, source: AgentTree | ModelPatch
    ) -> tuple[LayerId, Prepared]:
        path = stack.enter_context(self.layers.making())
        job = replace(job, layer=path)
        return LayerId(path.name), await self.workers.run(
            prepare, job, source, timeout=self.leasing.settings().checkouts.diff_timeout
        )

    # -- asking ------------------------------------------------------------------------------------

    def _for_builds(self, admitted: Admitted) -> Admitted:
        """Return the terms of a checkout that is asked about: it ends with this process."""
        uid, gid = self.probes.owner
        terms = replace(
            admitted.terms, owner_uid=uid, owner_gid=gid, taken_by=os.geteuid(), view=View.GRADER,
            expires_at=self.leasing.clock() + _TTL, bound_to=own_process(), label=None,
        )  # fmt: skip
        return admitted._replace(terms=terms)

    async def _ask_base(self, place: _Place, job: GradeJob, tests: Sequence[bytes]) -> ProbeAnswer:
        """Return the answer for the base with the tests, from the cache."""
        patch = hashlib.sha256(job.test_patch or b"").digest()
        key = (
            job.mirror,
            job.tree,
            job.below,
            place.found.base.environment,
            place.recipe.key,
            patch,
            job.restored,
        )
        if (answer := self._bases.get(key)) is not None:
            return answer
        with ExitStack() as stack:
            plain = replace(job, drops=(), layered=None, left=())
            layer, _ = await self._prepare(stack, plain, ModelPatch(b""))
            answer = await self._ask(place, layer, tests, stack)
        self._bases[key] = answer
        return answer

    async def _ask(
        self, place: _Place, layer: LayerId, tests: Sequence[bytes], stack: ExitStack
    ) -> ProbeAnswer:
        question = Question(tuple(map(decode_name, tests)), place.recipe)
        async with self._checkout(place, layer, stack) as directory:
            return await self.probes.ask(directory, question)

    @asynccontextmanager
    async def _checkout(
        self, place: _Place, layer: LayerId, stack: ExitStack
    ) -> AsyncIterator[Path]:
        base = replace(place.found.base, layer=layer)
        draft = self.leasing.draft(place.admitted, place.found.mirror, base)
        lease, _ = await self.leasing.begin(draft, place.admitted)
        try:
            stack.enter_context(self.layers.held(layer))  # the end of the lease lets go of it
            yield lease.directory
        finally:
            self.leasing.lifecycle.end(lease)


# -- what to do with it ----------------------------------------------------------------------------


def _weighed(job: GradeJob, loaded: Sequence[Loaded]) -> tuple[list[Steering], dict[bytes, Drop]]:
    """Return the findings that stay in the grade or refuse it, and the paths to drop."""
    book, drops = book_of(job.rules), dict[bytes, Drop]()
    steering: dict[tuple[str, bytes], Steering] = {}
    for entry in loaded:
        rule = book.named(entry.rule)
        policy = job.policies.of(rule)
        if policy is Policy.DROP and entry.paths:
            drops |= {path: Drop(path, entry.rule, entry.detail) for path in entry.paths}
            continue
        # what no path explains cannot be dropped
        action = "refused" if policy is Policy.DROP else ACTIONS[policy]
        for path in entry.paths or (encode_name(entry.name),):
            steering.setdefault((entry.rule, path), finding(rule, path, action, entry.detail))
    return list(steering.values()), drops


def _not_judged(job: GradeJob, error: ResourceError) -> Steering:
    """Return the finding that the environment could not be asked; only a policy refuses it."""
    rule = book_of(job.rules).named("not-judged")
    is_refused = job.policies.of(rule) is Policy.REFUSE
    return finding(rule, b".", "refused" if is_refused else "applied", error.message)


def _refusal(job: GradeJob, detail: str) -> Steering:
    return finding(book_of(job.rules).named("not-judged"), b".", "refused", detail)


def _told(prepared: Prepared, job: GradeJob, more: Sequence[Steering]) -> Prepared:
    """Add findings to a prepared grade. Raises SteeringRefusedError."""
    steering = in_order([*prepared.steering, *more], book_of(job.rules))
    must_not_refuse(steering)
    return prepared._replace(steering=steering)
