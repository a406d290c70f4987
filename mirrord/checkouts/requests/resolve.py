"""Resolve a request to a mirror, commit, tree and instance, a prepared layer and an environment.

The tree of a commit never changes and is cached: a warm checkout of an instance asks neither git
nor the catalog. A refused name gets the same answer whether or not it exists.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from cachetools import LRUCache

from ... import errors
from ...catalog import Choice, InstanceRow
from ...config.values import is_accepted
from ...datasets.service import Datasets
from ...host.peers import Peer
from ...mirrors.service import Mirrors
from ...model import (
    CommitId,
    EnvironmentName,
    FindingKind,
    History,
    MirrorName,
    Resolved,
    View,
    shown,
)
from ...protocol import ResetCheckout, StartCheckout
from ...quoting import unquote_name
from ...templates.environments import EnvironmentStore
from ..lease import Base, Lease, SavedLayer
from ..prepared import PreparedLayers, layer_name

# makes the layer of an image for a commit, unless there is one
ImagePreparer = Callable[[EnvironmentName, MirrorName, CommitId, History], Awaitable[None]]
# commits; for one forgotten, git is asked again
_CACHED = 100_000


class Naming(Enum):
    """Which commits a peer may name.

    NOTHING: none, not even instances; such a peer may only reset to clean. RECORDED: instances, and
    their base commits by id. PUBLIC: also what upstream's branches and tags name or reach.
    """

    NOTHING = 0
    RECORDED = 1
    PUBLIC = 2
    ANYTHING = 3


class ResolvedRequest(NamedTuple):
    """What a request names. `lacks_past`: upstream is shallow, and lacks the commit's parents."""

    mirror: MirrorName
    base: Base
    lacks_past: bool = False

    def of_instance(self, choice: Choice) -> "ResolvedRequest":
        """Add the instance, with its dataset unless a grade has to name that."""
        row = choice.row
        dataset = None if choice.rivals else row.dataset
        base = replace(self.base, instance=row.public_id, dataset=dataset, workdir=row.workdir)
        return self._replace(base=base)


CoverOf = Callable[[EnvironmentName, MirrorName, CommitId], Awaitable[str | None]]


@dataclass(eq=False, repr=False)
class Resolver:
    """Resolves requests by datasets, mirrors, prepared layers and environments.

    `learn` is called with each commit that is found; `environment_of` names an instance's
    environment, `cover_of` the layer that hides what of an environment came after a commit;
    `prepare_image` makes the layer of an image for a commit. Belongs to one event loop.
    """

    datasets: Datasets
    mirrors: Mirrors
    learn: Callable[[MirrorName, Resolved], None]
    prepared: PreparedLayers
    environments: EnvironmentStore
    environment_of: Callable[[InstanceRow], str | None]
    cover_of: CoverOf
    prepare_image: ImagePreparer

    def __post_init__(self) -> None:
        # tree, and whether it lacks its past
        self._trees: LRUCache[tuple[str, str], tuple[str, bool]] = LRUCache(_CACHED)
        self._public: LRUCache[tuple[str, str], None] = LRUCache(_CACHED)

    async def resolve_start(self, request: StartCheckout, naming: Naming) -> ResolvedRequest:
        """Resolve the request for a new checkout, without layer and environment.

        Raises AccessError, InvalidRequestError, InstanceNotFoundError, MirrorNotFoundError,
        CommitNotFoundError, CommitUnservableError.
        """
        is_named = request.instance is not None
        if (request.mirror is None) != is_named or (request.commit is None) != is_named:
            raise errors.InvalidRequestError(
                "cannot choose what to check out: name an instance, or a mirror and a commit",
                hint="NAME@COMMIT as the instance also names a mirror and a commit",
            )
        _must_name_an_instance(request)
        if request.instance is None:
            name, commitish = str(request.mirror), str(request.commit)
        else:
            choice = await self.datasets.choose_instance(request.instance, request.dataset)
            if choice is not None:
                resolved = await self._resolve_base(choice.row)
                return resolved.of_instance(choice)
            name, _, commitish = request.instance.partition("@")
            commitish = unquote_name(commitish)  # as `mirrord ref` prints it
            if request.dataset or not commitish:
                fact = "no dataset has it"
                if request.dataset:
                    fact = f"dataset {shown(request.dataset)} has no such instance"
                raise errors.InstanceNotFoundError(
                    f"cannot find instance {shown(request.instance)}: {fact}",
                    hint="see `mirrord dataset list`, or write NAME@COMMIT",
                )
        return await self._resolve_name(await self.mirrors.resolve_name(name), commitish, naming)

    async def _resolve_base(self, row: InstanceRow) -> ResolvedRequest:
        cause: errors.MirrordError | None = None
        lacks = "the branch that holds its base commit"
        if row.base_commit is not None:
            try:
                return await self._resolve_commit(row.mirror, row.base_commit)
            except (errors.CommitNotFoundError, errors.MirrorNotFoundError) as error:
                cause, lacks = error, f"its base commit {row.base_commit}"
        sync = f"run `mirrord mirror sync {row.mirror}`"
        raise errors.CommitUnservableError(
            f"cannot serve instance {row.public_id}: {row.mirror} does not have {lacks}",
            hint=f"{sync}, then `mirrord audit {row.mirror}`",
            instance=row.public_id,
            mirror=str(row.mirror),
            commit=row.base_commit,
        ) from cause

    async def choose_history(
        self, resolved: ResolvedRequest, view: View, asked: History | None, default: History
    ) -> History:
        """Return how much of the past to show: `asked`, or `default` within the dataset's limit.

        Raises AccessError if an agent asks for more than the limit, and CommitUnservableError where
        there is no past to show.
        """
        named = resolved.base.instance or resolved.base.commit
        if resolved.lacks_past:
            if asked is not None and asked is not History.SQUASHED:
                raise errors.CommitUnservableError(
                    f"cannot show {named} with history {asked}:"
                    " upstream is shallow, and lacks the parents of this commit",
                    hint="use history squashed, or run `git fetch --unshallow` upstream and sync"
                    " the mirror",
                    commit=resolved.base.commit,
                )
            return History.SQUASHED
        limit = None
        if view is View.AGENT:
            limit = await self.datasets.find_history_limit(resolved.mirror, resolved.base.commit)
        if limit is None or (asked or default).is_within(limit):
            return asked or default
        if asked is None:
            return limit
        raise errors.AccessError(
            f"cannot show an agent {named} with history {asked}:"
            f" its dataset allows {limit}, because the past of this commit reveals the answer",
            hint=f"use history {limit}, or leave it out; the grader view has no limit",
        )

    async def find_base(self, instance: str, dataset: str | None) -> CommitId | None:
        """Return the base commit of an instance; None if it is unknown or ambiguous."""
        with suppress(errors.InstanceAmbiguousError):
            choice = await self.datasets.choose_instance(instance, dataset)
            return choice.row.base_commit if choice else None
        return None

    async def resolve_reset(
        self, request: ResetCheckout, lease: Lease, naming: Naming
    ) -> ResolvedRequest:
        """Resolve the target of a reset in the lease's mirror; without a name, its own commit."""
        if request.instance is not None and request.commit is not None:
            raise errors.InvalidRequestError(
                "cannot reset to an instance and a commit at the same time", hint="name one of them"
            )
        _must_name_an_instance(request)
        if naming is Naming.NOTHING and (request.instance or request.commit):
            raise errors.AccessError(
                "cannot reset to another commit: only members of the access group may",
                hint="reset without naming one, which restores the present commit",
            )
        if request.commit is not None:
            return await self._resolve_name(lease.mirror, request.commit, naming)
        if request.instance is None:
            base = Base(commit=lease.base.commit, tree=lease.base.tree)
            resolved = ResolvedRequest(lease.mirror, base)
            if lease.base.instance:
                named = lease.base.instance, lease.base.dataset
                if (choice := await self.datasets.choose_instance(*named)) is not None:
                    resolved = resolved.of_instance(choice)
            return resolved
        start = StartCheckout(instance=request.instance, dataset=request.dataset)
        resolved = await self.resolve_start(start, naming)
        if resolved.mirror.key != lease.mirror.key:
            raise errors.InvalidRequestError(
                f"cannot reset to {shown(request.instance)}: it belongs to {resolved.mirror},"
                f" the checkout to {lease.mirror}",
                hint="release this checkout and make another",
            )
        return resolved

    async def _resolve_name(
        self, name: MirrorName, commitish: str, naming: Naming
    ) -> ResolvedRequest:
        if naming is Naming.ANYTHING:
            return await self._resolve_commit(name, commitish)
        digits = commitish.lower()
        # git takes no abbreviation shorter than four digits
        if re.fullmatch(r"[0-9a-f]{4,40}", digits):
            base = await self.datasets.find_base_commit(name, digits)
            if base is not None:
                return await self._resolve_commit(name, base)
        if naming is not Naming.PUBLIC:
            raise errors.AccessError(
                f"cannot check out {shown(commitish)} of {name}: it is not the id of the base"
                " commit of an instance",
                hint='[access] commits = "recorded" of the configuration lets members name'
                " instances and their base commits only",
            )
        if (name.key, digits) in self._public:  # what was public once stays public
            return await self._resolve_commit(name, digits)
        resolved = await self.mirrors.resolve_public(name, commitish)
        self._public[name.key, resolved.commit] = None
        return self._cache(name, resolved)

    async def _resolve_commit(self, name: MirrorName, commitish: str) -> ResolvedRequest:
        # the keys are whole ids, so a branch, which moves, is looked up each time
        cached = self._trees.get((name.key, commitish))
        if cached is not None:
            tree, lacks_past = cached
            return ResolvedRequest(name, Base(commit=CommitId(commitish), tree=tree), lacks_past)
        return self._cache(name, await self.mirrors.resolve(name, commitish))

    def _cache(self, name: MirrorName, resolved: Resolved) -> ResolvedRequest:
        accept = self.mirrors.settings().audit.accept
        for oid, reason in resolved.refused:
            if not is_accepted(accept, FindingKind.REFUSED, name, oid):
                raise errors.CommitUnservableError(
                    f"cannot serve commit {resolved.commit}: git's fsck refuses object {oid} of its"
                    f" tree: {reason}",
                    hint=f'to serve it as it is, add "{FindingKind.REFUSED} {name.repo} {oid}" to'
                    " [audit] accept; docs/security-inside.md says what it could do",
                    commit=resolved.commit,
                    objects=[oid],
                )
        self.learn(name, resolved)
        lacks_past = resolved.replaces is not None
        self._trees[name.key, resolved.commit] = resolved.tree, lacks_past
        base = Base(commit=resolved.commit, tree=resolved.tree)
        return ResolvedRequest(name, base, lacks_past)

    # -- prepared layers and environments ----------------------------------------------------------

    @asynccontextmanager
    async def completed(
        self,
        request: StartCheckout | ResetCheckout,
        resolved: ResolvedRequest,
        history: History,
        peer: Peer,
        lease: Lease | None = None,
    ) -> AsyncIterator[ResolvedRequest]:
        """Add the prepared layer and the environment, which cannot be removed meanwhile.

        A reset `lease` keeps its environment unless the request names one, and its layer unless the
        request names one or the commit or the environment changes.
        """
        environment, saved = (lease.base.environment, lease.base.saved) if lease else (None, None)
        if request.environment is not None:
            environment = await self._find_environment(request.environment, resolved)
        before = lease and (lease.base.commit, lease.base.environment)
        is_same = before == (resolved.base.commit, environment)
        with ExitStack() as stack:
            if environment is not None:
                self.environments.hold(environment.digest)
                stack.callback(self.environments.drop, environment.digest)
            # the layer of an image may have been replaced
            is_own = saved and environment and saved.name == layer_name(environment.digest)
            if request.layer or not is_same or is_own:
                saved = await self._choose_layer(
                    request.layer, resolved, history, peer, environment
                )
            if saved is not None:
                stack.enter_context(self.prepared.held(saved))
            whole = None
            if history is not History.LINKED:
                composed = await self.datasets.find_composition(
                    resolved.mirror, resolved.base.commit
                )
                whole = composed.tree if composed else None
            image = cover = None
            if environment is not None:
                image = self.environments.find_image(environment.digest)
                cover = await self.cover_of(environment, resolved.mirror, resolved.base.commit)
            base = replace(
                resolved.base, saved=saved, environment=environment, whole=whole, image=image,
                cover=cover,
            )  # fmt: skip
            yield resolved._replace(base=base)

    async def _choose_layer(
        self, name: str | None, resolved: ResolvedRequest, history: History, peer: Peer,
        environment: EnvironmentName | None,
    ) -> SavedLayer | None:  # fmt: skip
        """Return the layer of a name, or else the environment's; an image's is made if need be."""
        if not (name or environment):
            return None
        mirror, commit = resolved.mirror, resolved.base.commit
        if environment and not name and self.environments.find_image(environment.digest):
            await self.prepare_image(environment, mirror, commit, history)
        return self.prepared.choose(name, (mirror.key, commit, history), peer.uid, environment)

    async def _find_environment(self, name: str, resolved: ResolvedRequest) -> EnvironmentName:
        if name == "auto":
            choice = None
            if resolved.base.instance is not None:
                choice = await self.datasets.choose_instance(
                    resolved.base.instance, resolved.base.dataset
                )
            if choice is not None and not choice.shares_setup:
                choice.must_be_one()
            row = choice.row if choice else None
            if (asked := self.environment_of(row) if row else None) is None:
                fact = f"instance {row.public_id} has no recipe" if row else "it has no instance"
                raise errors.NotFoundError(
                    f"cannot find the environment of the checkout: {fact}",
                    hint="name one by its key; see `mirrord environment list`",
                )
            name = asked
        ready = self.environments.get(name)
        return EnvironmentName(ready.key, ready.digest)


def _must_name_an_instance(request: StartCheckout | ResetCheckout) -> None:
    if request.dataset is not None and request.instance is None:
        raise errors.InvalidRequestError(
            "cannot check out of a dataset without an instance",
            hint="name one of its instances, or leave the dataset out",
        )
