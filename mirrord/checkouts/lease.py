"""A lease: what a checkout is made from, who has it until when, and its form on disk."""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..host.peers import Process
from ..host.processes import boot_id
from ..model import (
    Backend,
    CheckoutId,
    CommitId,
    EnvironmentName,
    History,
    LayerId,
    MirrorName,
    ObjectSource,
    View,
)


class LeaseState(StrEnum):
    """LIVE: the tree has its commit and its owner's changes. RESETTING: it is being reset.

    The state is the name of the lease's file, so one rename changes it. A crash may leave both
    files; then the tree was not touched yet, or the reset was complete, and the lease is live.
    """

    LIVE = "lease.json"
    RESETTING = "resetting.json"


class Directories(NamedTuple):
    """The two directories of a checkout, of the same name."""

    public: Path
    private: Path

    def renamed(self, name: str) -> "Directories":
        return Directories(self.public.with_name(name), self.private.with_name(name))


class SavedLayer(NamedTuple):
    """A prepared layer as a checkout has it: `id` is that of its record (`prepared.py`).

    `saved_by` is the uid that saved it, `tree` git's tree of the commit with the layer's changes.
    `layers` are over the commit, `environment_layers` over the environment, top first. It was saved
    from a checkout of the uid `written_by`, which had the prepared layer `below`.
    """

    id: LayerId
    name: str
    saved_by: int
    tree: str
    layers: tuple[LayerId, ...]
    environment_layers: tuple[LayerId, ...]
    written_by: int
    below: "SavedLayer | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a tree is made from. `instance` is a public id of `dataset`, None for a bare commit.

    Over the commit, whose git tree is `tree`, the checkout has the prepared layer `saved`, to which
    diffs and resets are relative, and over that `layer`, the content of a fork, snapshot or grade
    (`layers.py`); `environment_layer` is likewise over the environment. A sandbox shows the
    tree at `workdir` too. `whole` is the composed tree of a commit with submodules.
    `image` is what commands in the environment start with, as JSON, if that is an image; `cover` is
    the layer that hides what of the environment came after the commit.
    """

    commit: CommitId
    tree: str
    instance: str | None = None
    dataset: str | None = None
    saved: SavedLayer | None = None
    layer: LayerId | None = None
    environment: EnvironmentName | None = None
    environment_layer: LayerId | None = None
    workdir: str | None = None
    whole: str | None = None
    image: str | None = None
    cover: str | None = None

    @property
    def clean_tree(self) -> str:
        """git's tree that a diff is relative to."""
        return self.saved.tree if self.saved else self.plain_tree

    @property
    def plain_tree(self) -> str:
        """git's tree of the commit, with the files of its submodules."""
        return self.whole or self.tree

    @property
    def own_layers(self) -> Iterator[LayerId]:
        """The layers that belong to no prepared layer."""
        return filter(None, (self.layer, self.environment_layer))

    @property
    def layers(self) -> Iterator[LayerId]:
        saved = self.saved
        return chain(self.own_layers, *((saved.layers, saved.environment_layers) if saved else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Who has a checkout, with which rights, until when.

    The uid `taken_by` asked for it for `owner_uid`; it ends with the process `bound_to`. `label` is
    chosen by the caller, to list and release checkouts by.
    """

    owner_uid: int
    owner_gid: int
    taken_by: int
    view: View
    created_at: datetime
    expires_at: datetime
    bound_to: Process | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A saved state of a checkout: its base, whose layers have the copied content, and what the
    copy has (`changes.pieces.Taken`).
    """

    name: str
    base: Base
    taken_at: datetime
    files: int
    size_bytes: int
    left_out: dict[str, int]
    git: bool


@dataclass(frozen=True, slots=True)
class Graded:
    """How the layer of a grade was made; `dropped` has the first of the dropped paths."""

    layer: LayerId
    policy: str
    strategy: str | None
    dropped: tuple[str, ...]
    dropped_count: int


@dataclass(frozen=True, slots=True)
class Volume:
    """A name under which docker or podman mount a checkout, made with `options`.

    It shows `part` of the checkout. After the last unmount the lease lives for `ttl_s`. `mounts`
    are ids of the engine's, valid during the boot `boot`. A lease ends with the volume that `holds`
    it, for which it was taken.
    """

    name: str
    part: str
    options: dict[str, str]
    holds: bool
    ttl_s: float
    mounts: tuple[str, ...] = ()
    boot: str = ""

    @property
    def mounted_by(self) -> frozenset[str]:
        """The ids of the present mounts: a restart of the host undoes all."""
        return frozenset(self.mounts) if self.boot == boot_id() else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to one checkout. `base` is what it has, while RESETTING what it gets.

    Mirror, history, backend, objects and owner stay the same for the whole lease. `parent` is the
    checkout that it was forked from.
    """

    id: CheckoutId
    directories: Directories
    mirror: MirrorName
    history: History
    backend: Backend
    base: Base
    terms: Terms
    objects: ObjectSource = ObjectSource.PRIVATE
    resets: int = 0
    reset_at: datetime | None = None
    parent: CheckoutId | None = None
    snapshots: tuple[SavedState, ...] = ()
    graded: Graded | None = None
    volumes: tuple[Volume, ...] = ()
    state: LeaseState = LeaseState.LIVE

    @property
    def directory(self) -> Path:
        """The directory to mount elsewhere: it shows every reset."""
        return self.directories.public

    @property
    def private(self) -> Path:
        return self.directories.private

    @property
    def tree_path(self) -> Path:
        return self.directory / "tree"

    @property
    def own_paths(self) -> tuple[Path, ...]:
        """What is written in the checkout: on an overlay its upper layer, on the pool all."""
        if self.backend is not Backend.POOL:
            return (self.private,)
        environment = (self.directory / "environment",) if self.base.environment else ()
        return (self.private, self.tree_path, *environment)

    @property
    def owner(self) -> tuple[int, int]:
        return self.terms.owner_uid, self.terms.owner_gid

    @property
    def template(self) -> tuple[MirrorName, CommitId, History]:
        """What its template and its sealed store are made of."""
        return self.mirror, self.base.commit, self.history

    @property
    def borrows(self) -> bool:
        """Whether `.git` borrows the objects of its sealed store."""
        is_pool = self.backend is Backend.POOL and self.history is not History.LINKED
        return is_pool and self.objects is ObjectSource.SHARED

    @property
    def is_grader(self) -> bool:
        """Whether to hide its instance from strangers, who must not learn that it is graded."""
        return self.terms.view is View.GRADER or self.graded is not None

    def until(self, expires_at: datetime) -> "Lease":
        """Return the lease with another deadline."""
        return replace(self, terms=replace(self.terms, expires_at=expires_at))

    def shifted(self, step: timedelta, now: datetime) -> "Lease":
        """Return the lease after a step of the wall clock to `now`, with as much time left.

        At most as much as it ever had: a machine without a clock of its own boots in 1970.
        """
        terms = self.terms
        left = min(terms.expires_at - (now - step), terms.expires_at - terms.created_at)
        created_at = min(terms.created_at + step, now)
        return replace(self, terms=replace(terms, created_at=created_at, expires_at=now + left))

    def with_volumes(self, *volumes: Volume) -> "Lease":
        """Return the lease of a new checkout with volumes, whose container sees no store."""
        objects = ObjectSource.PRIVATE if volumes else self.objects
        return replace(self, volumes=volumes, objects=objects)

    @property
    def bases(self) -> tuple[Base, ...]:
        """The present base, and those of the snapshots."""
        return self.base, *(snapshot.base for snapshot in self.snapshots)

    @property
    def layers(self) -> frozenset[LayerId]:
        """All layers that the lease keeps on disk."""
        return frozenset(chain.from_iterable(base.layers for base in self.bases))

    @property
    def own_layers(self) -> frozenset[LayerId]:
        """The layers of the lease that belong to no prepared layer."""
        return frozenset(chain.from_iterable(base.own_layers for base in self.bases))

    @property
    def environments(self) -> frozenset[str]:
        """The digests of the environments that the lease keeps on disk."""
        return frozenset(base.environment.digest for base in self.bases if base.environment)


def resetting(lease: Lease) -> Lease:
    return replace(lease, state=LeaseState.RESETTING)


def _saved_layer(value: Any) -> SavedLayer:
    identity, name, saved_by, tree, layers, of_environment, written_by, below = value
    return SavedLayer(
        identity, name, saved_by, tree, tuple(layers), tuple(of_environment), written_by,
        None if below is None else _saved_layer(below),
    )  # fmt: skip


_READERS: dict[str, Callable[[Any], Any]] = {
    "mirror": MirrorName.parse,
    "history": History,
    "view": View,
    "backend": Backend,
    "objects": ObjectSource,
    "base": lambda value: Base(**from_json(Base, value)),
    "terms": lambda value: Terms(**from_json(Terms, value)),
    "bound_to": lambda value: Process(*value),
    "environment": lambda value: EnvironmentName(*value),
    "saved": _saved_layer,
    "graded": lambda value: Graded(**from_json(Graded, value)),
    "snapshots": lambda value: tuple(SavedState(**from_json(SavedState, state)) for state in value),
    "volumes": lambda value: tuple(Volume(**from_json(Volume, volume)) for volume in value),
    **dict.fromkeys(("dropped", "mounts"), tuple),
    **dict.fromkeys(
        ("created_at", "expires_at", "reset_at", "saved_at", "taken_at"), datetime.fromisoformat
    ),
}


def to_json(value: Any, *without: str) -> bytes:
    """Return a dataclass as JSON, without some of its members."""
    return json.dumps(_members(value, without), default=_members).encode()


def _members(value: Any, without: Collection[str] = ()) -> Any:
    # Not `asdict`, which copies deeply: a third of the processor time of a checkout.
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, MirrorName):
        return str(value)
    return {name: getattr(value, name) for name in value.__slots__ if name not in without}


def from_json(kind: type, members: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a dataclass. Another version may have written more of them, or fewer
    of the optional ones.
    """
    return {
        member.name: _READERS[member.name](value)
        if member.name in _READERS and value is not None
        else value
        for member in fields(kind)
        if (value := members.get(member.name, MISSING)) is not MISSING
    }
