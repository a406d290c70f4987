"""What a request for a checkout means: which mirror, which full commit, which tree, for which instance.

Owns the reading of names. What a full commit's tree is never changes, so it is remembered, and a warm checkout of an instance
asks neither git nor the catalog. Never decides who may have it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..catalog.rows import InstanceRow
from ..errors import CommitNotFoundError, CommitUnservableError, InstanceNotFoundError, InvalidRequestError, MirrorNotFoundError
from ..model import CommitId, MirrorName, Resolved, shown
from ..protocol import ResetCheckout, StartCheckout
from .backend import Target
from .leases import Lease

_REMEMBERED = 100_000
_HOW = "name an instance, or NAME@COMMIT, or a mirror and a commit"


class Instances(Protocol):
    """Where instances are looked up."""

    async def find_instance(self, instance: str) -> InstanceRow | None: ...


class Commits(Protocol):
    """Where commits are looked up: the mirrors."""

    def get_name(self, text: str) -> MirrorName: ...

    async def resolve(self, name: MirrorName, commitish: str) -> Resolved: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """`instance` is None for a checkout of a bare commit."""

    mirror: MirrorName
    target: Target
    instance: InstanceRow | None = None


class Requests:
    """Reads requests against the catalog and the mirrors. `learn` is told what was found of a commit, for who makes its tree."""

    def __init__(self, *, instances: Instances, commits: Commits, learn: Callable[[MirrorName, Resolved], None]) -> None:
        self._instances = instances
        self._commits = commits
        self._learn = learn
        self._trees: OrderedDict[tuple[str, CommitId], str] = OrderedDict()

    async def read_start(self, request: StartCheckout) -> Wanted:
        """Raises InvalidRequestError, InstanceNotFoundError, MirrorNotFoundError, CommitNotFoundError, CommitUnservableError."""
        if (request.instance is None) == (request.mirror is None) or (request.mirror is None) != (request.commit is None):
            raise InvalidRequestError("cannot tell what to check out: the request names too little or too much", hint=_HOW)
        if request.instance is None:
            return await self._commit(str(request.mirror), str(request.commit))
        row = await self._instances.find_instance(request.instance)
        if row is not None:
            return await self._instance(row)
        name, at, commitish = request.instance.partition("@")
        if not at or not commitish:
            raise _no_instance(request.instance)
        return await self._commit(name, commitish)

    async def read_reset(self, request: ResetCheckout, lease: Lease) -> Wanted:
        """Where a reset goes; the instance stays what it was unless another is named. Only within the lease's mirror."""
        if request.instance is not None and request.commit is not None:
            raise InvalidRequestError("cannot reset to an instance and a commit at the same time", hint="name one of them")
        if request.commit is not None:
            return Wanted(lease.mirror, await self._target(lease.mirror, request.commit))
        if request.instance is None:
            row = await self._instances.find_instance(lease.instance) if lease.instance else None
            return Wanted(lease.mirror, Target(lease.commit, lease.tree), row)
        wanted = await self.read_start(StartCheckout(instance=request.instance))
        if wanted.mirror.key != lease.mirror.key:
            raise InvalidRequestError(
                f"cannot reset to {shown(request.instance)}: it is of {wanted.mirror}, the checkout of {lease.mirror}",
                hint="release this checkout and ask for another",
            )
        return wanted

    async def _instance(self, row: InstanceRow) -> Wanted:
        try:
            return Wanted(row.mirror, await self._target(row.mirror, row.base_commit), row)
        except (CommitNotFoundError, MirrorNotFoundError) as error:
            raise CommitUnservableError(
                f"cannot serve instance {row.id}: {row.mirror} does not have its base commit {row.base_commit}",
                hint=f"run `mirrord mirror sync {row.mirror}`, then `mirrord audit {row.mirror}`",
                instance=row.id,
                mirror=str(row.mirror),
                commit=row.base_commit,
            ) from error

    async def _commit(self, mirror: str, commitish: str) -> Wanted:
        name = self._commits.get_name(mirror)
        return Wanted(name, await self._target(name, commitish))

    async def _target(self, name: MirrorName, commitish: str) -> Target:
        known = self._trees.get((name.key, CommitId(commitish)))
        if known is not None:
            return Target(CommitId(commitish), known)
        found = await self._commits.resolve(name, commitish)
        self._learn(name, found)
        self._trees[name.key, found.commit] = found.tree
        while len(self._trees) > _REMEMBERED:
            self._trees.popitem(last=False)
        return Target(found.commit, found.tree)


def _no_instance(text: str) -> InstanceNotFoundError:
    return InstanceNotFoundError(
        f"cannot find instance {shown(text)}: no dataset has it", hint="see `mirrord dataset list`, or write NAME@COMMIT"
    )
