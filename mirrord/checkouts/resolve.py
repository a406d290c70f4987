"""What a request for a checkout means: which mirror, which full commit, which tree, for which instance.

Owns the reading of names. What a full commit's tree is never changes, so it is remembered, and a warm checkout of an instance
asks neither git nor the catalog. What a peer may name is the caller's to say (`Naming`); a name that it may not use is refused in
the same words whether or not there is such a commit.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ..catalog import InstanceRow
from ..errors import (
    AccessError,
    CommitNotFoundError,
    CommitUnservableError,
    InstanceNotFoundError,
    InvalidRequestError,
    MirrorNotFoundError,
)
from ..model import CommitId, MirrorName, Resolved, shown
from ..protocol import ResetCheckout, StartCheckout
from .backend import Target
from .leases import Lease

_REMEMBERED = 100_000
_DIGITS = re.compile(r"[0-9a-f]{4,40}")
_HOW = "name an instance, or NAME@COMMIT, or a mirror and a commit"


class Naming(Enum):
    """Which commits a request may name, besides instances.

    RECORDED: base commits of instances, by their ids. PUBLIC: what a branch or tag of upstream names
    or reaches. NOTHING: not even instances; a reset to clean is all.
    """

    NOTHING = 0
    RECORDED = 1
    PUBLIC = 2
    ANYTHING = 3


class Instances(Protocol):
    """Where instances are looked up."""

    async def find_instance(
        self, instance: str, dataset: str | None = None
    ) -> InstanceRow | None: ...

    async def find_base_commit(self, name: MirrorName, digits: str) -> CommitId | None: ...


class Commits(Protocol):
    """Where commits are looked up: the mirrors."""

    def get_name(self, text: str) -> MirrorName: ...

    async def resolve(self, name: MirrorName, commitish: str) -> Resolved: ...

    async def resolve_public(self, name: MirrorName, commitish: str) -> Resolved: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """`instance` is None for a checkout of a bare commit."""

    mirror: MirrorName
    target: Target
    instance: InstanceRow | None = None


class Requests:
    """Reads requests against the catalog and the mirrors. `learn` is told what was found of a commit, for who makes its tree."""

    def __init__(
        self,
        *,
        instances: Instances,
        commits: Commits,
        learn: Callable[[MirrorName, Resolved], None],
    ) -> None:
        self._instances = instances
        self._commits = commits
        self._learn = learn
        self._trees: OrderedDict[tuple[str, CommitId], str] = OrderedDict()
        self._public: set[tuple[str, str]] = set()

    async def read_start(self, request: StartCheckout, naming: Naming) -> Wanted:
        """Raises AccessError, InvalidRequestError, InstanceNotFoundError, MirrorNotFoundError,
        CommitNotFoundError, CommitUnservableError."""
        if (request.instance is None) == (request.mirror is None) or (request.mirror is None) != (
            request.commit is None
        ):
            raise InvalidRequestError(
                "cannot tell what to check out: the request names too little or too much", hint=_HOW
            )
        _must_name_an_instance(request)
        if request.instance is None:
            return await self._commit(str(request.mirror), str(request.commit), naming)
        row = await self._instances.find_instance(request.instance, request.dataset)
        if row is not None:
            return await self._instance(row)
        name, at, commitish = request.instance.partition("@")
        if request.dataset or not at or not commitish:
            raise _no_instance(request.instance, request.dataset)
        return await self._commit(name, commitish, naming)

    async def read_reset(self, request: ResetCheckout, lease: Lease, naming: Naming) -> Wanted:
        """Where a reset goes; the instance stays what it was unless another is named. Only within the lease's mirror."""
        if request.instance is not None and request.commit is not None:
            raise InvalidRequestError(
                "cannot reset to an instance and a commit at the same time", hint="name one of them"
            )
        _must_name_an_instance(request)
        if naming is Naming.NOTHING and (request.instance or request.commit):
            raise AccessError(
                "cannot reset to another commit: only members of the access group may",
                hint="reset without one: to clean, at the commit it is at",
            )
        if request.commit is not None:
            return Wanted(lease.mirror, await self._named(lease.mirror, request.commit, naming))
        if request.instance is None:
            row = (
                await self._instances.find_instance(lease.instance, lease.dataset)
                if lease.instance
                else None
            )
            return Wanted(lease.mirror, Target(lease.commit, lease.tree), row)
        wanted = await self.read_start(
            StartCheckout(instance=request.instance, dataset=request.dataset), naming
        )
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

    async def _commit(self, mirror: str, commitish: str, naming: Naming) -> Wanted:
        name = self._commits.get_name(mirror)
        return Wanted(name, await self._named(name, commitish, naming))

    async def _named(self, name: MirrorName, commitish: str, naming: Naming) -> Target:
        """The target of a name, where the peer may use it."""
        if naming is Naming.ANYTHING:
            return await self._target(name, commitish)
        digits = commitish.lower()
        base = (
            await self._instances.find_base_commit(name, digits)
            if _DIGITS.fullmatch(digits)
            else None
        )
        if base is not None:
            return await self._target(name, base)
        if naming is Naming.PUBLIC:
            if (name.key, digits) in self._public:  # stays so when upstream moves on
                return await self._target(name, digits)
            found = await self._commits.resolve_public(name, commitish)
            if len(self._public) < _REMEMBERED:
                self._public.add((name.key, found.commit))
            return self._learnt(name, found)
        raise AccessError(
            f"cannot check out {shown(commitish)} of {name}: it is not the id of the base commit of an instance",
            hint='[access] commits = "recorded" of the configuration lets members name instances and their base commits only',
        )

    async def _target(self, name: MirrorName, commitish: str) -> Target:
        known = self._trees.get((name.key, CommitId(commitish)))
        if known is not None:
            return Target(CommitId(commitish), known)
        return self._learnt(name, await self._commits.resolve(name, commitish))

    def _learnt(self, name: MirrorName, found: Resolved) -> Target:
        self._learn(name, found)
        self._trees[name.key, found.commit] = found.tree
        while len(self._trees) > _REMEMBERED:
            self._trees.popitem(last=False)
        return Target(found.commit, found.tree)


def _must_name_an_instance(request: StartCheckout | ResetCheckout) -> None:
    if request.dataset is not None and request.instance is None:
        raise InvalidRequestError(
            "cannot check out of a dataset without an instance",
            hint="name one of its instances, or leave the dataset out",
        )


def _no_instance(text: str, dataset: str | None) -> InstanceNotFoundError:
    fact = f"dataset {shown(dataset)} has no such instance" if dataset else "no dataset has it"
    return InstanceNotFoundError(
        f"cannot find instance {shown(text)}: {fact}",
        hint="see `mirrord dataset list`, or write NAME@COMMIT",
    )
