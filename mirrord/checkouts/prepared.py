"""Prepared layers: the changes in a checkout, saved under a name for others of its commit.

A prepared layer is `templates/.layers/<id>`, another layer over the environment if there is one,
`<id>.git` with git's tree if tracked files changed, and the record `<id>.json`, written last: after
a crash the next start removes a layer without one. A name belongs to the uid that saved the layer,
for one mirror, commit and history; all may use an administrator's.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from .. import errors
from ..changes.pieces import CopyLimits, CopyRule, Taken
from ..errors import full_disk_named
from ..host.files import opened, read_plain, sync_directory, sync_tree, write_all
from ..model import CommitId, EnvironmentName, History, LayerId, MirrorName, View, shown
from ..patches.diff import write_repository
from ..patches.worktree import PatchJob
from ..presence import exists, is_dir, matching
from ..protocol import Copied, PreparedLayer
from ..telemetry import log
from ..templates.environments import EnvironmentStore
from ..workers.pool import Workers
from .backend import ChangedPaths
from .layers import Layers
from .lease import Lease, SavedLayer, from_json, to_json
from .leases import Leases
from .lifecycle import Lifecycle

LAYERS_LIMIT = 128
# a tree at rest takes two: the second copy finds nothing changed
_ROUNDS = 5
_RETIRED = ".retired"  # at the end of a name
_SYNCED_EACH = 256  # flushing 2,000 files one by one took 1.6 s, the whole host 9 ms


def layer_name(digest: str) -> str:
    """Return the name of the layers that checkouts with an environment get by default, which its
    build saves.
    """
    return f"environment-{digest[:12]}"


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One prepared layer; `environment` is the one whose changes it also has."""

    saved: SavedLayer
    mirror: MirrorName
    commit: CommitId
    history: History
    instance: str | None
    saved_at: datetime
    copied: dict[str, Any]
    environment: EnvironmentName | None = None
    environment_copied: dict[str, Any] | None = None

    @property
    def layers(self) -> tuple[LayerId, ...]:
        return *self.saved.layers, *self.saved.environment_layers

    @property
    def own_layers(self) -> tuple[LayerId, ...]:
        """The layers made for it; the others belong to the layer that its checkout had."""
        return self.saved.layers[:1] + self.saved.environment_layers[:1]

    @property
    def place(self) -> tuple[str, str, str]:
        """The key of the mirror, the commit and the history that it is for."""
        return self.mirror.key, self.commit, self.history


_STACK_LIMIT = 16  # layers of layers: an overlay takes 64, a template has up to 18


@dataclass(eq=False, repr=False)
class PreparedLayers:
    """The prepared layers of a state directory. Belongs to one event loop."""

    leases: Leases
    layers: Layers
    lifecycle: Lifecycle
    environments: EnvironmentStore
    workers: Workers
    is_admin: Callable[[int], bool]
    limits: Callable[[], CopyLimits]

    def __post_init__(self) -> None:
        self._records: dict[LayerId, LayerRecord] = {}

    def open(self) -> None:
        """Read the records of an earlier daemon; call before unused layers are removed."""
        for path in sorted(matching(self.layers.directory, "*.json")):
            try:
                self._add(_read(path))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                # the layers that it needs are unknown, so none is removed (`Layers.open`)
                self.leases.unread[path] = str(error)
                log.warning("layer.unreadable", path=str(path), error=str(error))

    def all(self) -> list[LayerRecord]:
        """Return all records, oldest first."""
        return sorted(self._records.values(), key=lambda record: record.saved_at)

    def visible_to(self, uid: int) -> list[LayerRecord]:
        """Return the records that a uid may see, oldest first."""
        return [record for record in self.all() if self.may_see(record, uid)]

    def may_see(self, record: LayerRecord, uid: int) -> bool:
        return record.saved.saved_by == uid or self.is_shared(record) or self.is_admin(uid)

    def may_remove(self, record: LayerRecord, uid: int) -> bool:
        return record.saved.saved_by == uid or self.is_admin(uid)

    def is_shared(self, record: LayerRecord) -> bool:
        """Return whether everyone may use it."""
        return self.is_admin(record.saved.saved_by)

    def describe(self, record: LayerRecord) -> PreparedLayer:
        copied = partial(Copied, taken_at=record.saved_at, git=False)
        beside = record.environment_copied
        return PreparedLayer(
            id=record.saved.id,
            name=record.saved.name,
            mirror=str(record.mirror),
            commit=record.commit,
            history=record.history,
            instance=record.instance,
            saved_by=record.saved.saved_by,
            written_by=record.saved.written_by,
            shared=self.is_shared(record),
            copied=copied(**record.copied),
            environment=str(record.environment) if record.environment else None,
            environment_copied=copied(**beside) if beside else None,
            checkouts=self.holders(record),
        )

    def choose(
        self,
        name: str | None,
        place: tuple[str, str, str],
        uid: int,
        environment: EnvironmentName | None,
    ) -> SavedLayer | None:
        """Return the layer for a checkout with this environment: the uid's own of the name, or a
        shared one; without a name, the shared one that was saved for the environment.
        """
        wanted = name or (environment and layer_name(environment.digest))
        matching = [
            r for r in self._records.values() if r.saved.name == wanted and r.place == place
        ]
        own = (record for record in matching if name and record.saved.saved_by == uid)
        record = next(own, next(filter(self.is_shared, matching), None))
        if record is None and name:
            mirror, commit, history = place
            raise errors.NotFoundError(
                f"cannot find layer {shown(name)}: you have no layer of that name for"
                f" {mirror}@{commit[:12]} with history {history}",
                hint="see `mirrord layer list`; `mirrord layer save ID NAME` makes one",
                kind="layer",
            )
        if record is None:
            return None
        if not record.saved.environment_layers or environment == record.environment:
            return record.saved
        if environment is None:  # its changes of the tree alone
            return record.saved._replace(environment_layers=())
        raise errors.InvalidRequestError(
            f"cannot use layer {shown(record.saved.name)} with environment {environment}: it was"
            f" saved with {record.environment}",
            hint=f"use environment {record.environment}, or none",
        )

    def holders(self, record: LayerRecord) -> int:
        """Return how many checkouts use it, now or in a snapshot."""
        identity = record.saved.id
        return sum(
            any(base.saved and base.saved.id == identity for base in lease.bases)
            for lease in self.leases
        )

    @contextmanager
    def held(self, saved: SavedLayer) -> Iterator[None]:
        """Keep the layers while a checkout is made."""
        with ExitStack() as stack:
            for layer in (*saved.layers, *saved.environment_layers):
                stack.enter_context(self.layers.held(layer))
            yield

    async def save(
        self, lease: Lease, name: str, uid: int, job: PatchJob, changed: ChangedPaths
    ) -> LayerRecord:
        """Save the changes in a checkout; the caller holds its lock.

        Raises ConflictError, LimitReachedError, AccessError, and what a fork raises.
        """
        self._must_be_possible(lease, name, uid)
        before = lease.base.saved
        with ExitStack() as stack:
            new, taken, tree = await self._copy_tree(stack, lease, job, changed)
            identity = LayerId(new.name)
            layers = (identity, *(before.layers if before else ()))
            environment_layers, beside = before.environment_layers if before else (), None
            if lease.base.environment is not None:
                extra = stack.enter_context(self.layers.making())
                what = CopyRule(self.limits(), of_environment=True, git=False)
                backend = self.lifecycle.backend_of(lease)
                beside = await backend.copy_layer(lease, extra, None, what)
                if beside.files:
                    environment_layers = (LayerId(extra.name), *environment_layers)
            record = LayerRecord(
                saved=SavedLayer(
                    identity,
                    name,
                    uid,
                    tree,
                    layers,
                    environment_layers,
                    lease.terms.owner_uid,
                    before,
                ),
                mirror=lease.mirror,
                commit=lease.base.commit,
                history=lease.history,
                instance=lease.base.instance,
                saved_at=taken.taken_at,
                copied=_counts(taken),
                environment=lease.base.environment,
                environment_copied=_counts(beside) if beside else None,
            )
            try:
                await anyio.to_thread.run_sync(self._write, record)
                self._must_be_possible(lease, name, uid)  # others may have saved meanwhile
            except BaseException:
                self._path(record).unlink(missing_ok=True)
                raise
            self._add(record)
        return record

    async def _copy_tree(
        self, stack: ExitStack, lease: Lease, job: PatchJob, changed: ChangedPaths
    ) -> tuple[Path, Taken, str]:
        """Copy the tree, and write git's tree of the same moment: between two equal copies."""
        backend, what = self.lifecycle.backend_of(lease), CopyRule(self.limits(), git=False)
        made: tuple[Path, Taken, str] | None = None
        for _ in range(_ROUNDS):
            new = stack.enter_context(self.layers.making())
            taken = await backend.copy_layer(lease, new, made[0] if made else None, what)
            if made and taken.is_same:
                return made
            repository = new.with_suffix(".git")
            tree = await self.workers.run(
                write_repository,
                job,
                changed,
                lease.base.plain_tree,
                repository,
                timeout=what.limits.timeout,
            )
            made = new, taken, tree
        raise errors.CheckoutBusyError(
            f"cannot save checkout {lease.id}: it changed during each of {_ROUNDS} attempts",
            hint="stop the processes that write in it, then try again",
        )

    def get(self, layer: str, uid: int) -> LayerRecord:
        """Return the record of an id, if a uid may see it."""
        record = self._records.get(LayerId(layer))
        if record is None or not self.may_see(record, uid):
            raise errors.NotFoundError(
                f"cannot find layer {shown(layer)}: you have no such layer",
                hint="see `mirrord layer list`",
                kind="layer",
            )
        return record

    def remove(self, layer: str, uid: int) -> LayerRecord:
        """Remove a layer that no checkout needs; raises ConflictError."""
        record = self.get(layer, uid)
        name = record.saved.name
        if not self.may_remove(record, uid):
            raise errors.AccessError(
                f"cannot remove layer {name}: uid {record.saved.saved_by} saved it",
                hint="only that user and administrators may",
            )
        if count := self.holders(record):
            raise errors.ConflictError(
                f"cannot remove layer {name}: {count} checkouts have it",
                hint="release or reset them first",
                checkouts=count,
            )
        # first: a record whose layers are gone would be taken for damaged
        self._path(record).unlink(missing_ok=True)
        del self._records[record.saved.id]
        self.leases.layers.subtract(record.layers)
        self.layers.drop_unused(record.layers)
        if record.environment and record.saved.environment_layers:
            self.environments.drop(record.environment.digest)
        return record

    def retire(self, saved: SavedLayer) -> None:
        """Remove a layer; while checkouts have it, only let no other choose it."""
        record = self._records[saved.id]
        retired = replace(record, saved=saved._replace(name=f"{saved.name}{_RETIRED}"))
        self._records[saved.id] = retired
        self._write_record(retired)
        for record in self.all():
            if record.saved.name.endswith(_RETIRED) and not self.holders(record):
                self.remove(record.saved.id, record.saved.saved_by)

    def remove_of(self, digest: str) -> None:
        """Remove the layers that the build of an environment saved; raises ConflictError."""
        name = layer_name(digest)
        for record in self.all():
            if record.saved.name.removesuffix(_RETIRED) == name and self.is_shared(record):
                self.remove(record.saved.id, record.saved.saved_by)

    def _add(self, record: LayerRecord) -> None:
        self._records[record.saved.id] = record
        self.leases.layers.update(record.layers)
        if record.environment and record.saved.environment_layers:
            self.environments.hold(record.environment.digest)

    def _must_be_possible(self, lease: Lease, name: str, uid: int) -> None:
        if lease.terms.view is not View.AGENT:
            raise errors.AccessError(
                f"cannot save checkout {lease.id}: it has the grader's view",
                hint="a layer is for agents; save a checkout with the agent's view",
            )
        place = lease.mirror.key, lease.base.commit, lease.history
        own = [record for record in self._records.values() if record.saved.saved_by == uid]
        if any(record.saved.name == name and record.place == place for record in own):
            raise errors.ConflictError(
                f"cannot save layer {name}: you have one of this name for {lease.base.commit[:12]}",
                hint="a layer never changes: choose another name, or remove that one",
            )
        if len(own) >= LAYERS_LIMIT and not self.is_admin(uid):
            raise errors.LimitReachedError(
                f"cannot save layer {name}: you have {LAYERS_LIMIT}",
                hint="remove some; see `mirrord layer list`",
                max=LAYERS_LIMIT,
            )
        if lease.base.saved and len(lease.base.saved.layers) >= _STACK_LIMIT:
            raise errors.LimitReachedError(
                f"cannot save layer {name}: {_STACK_LIMIT} layers are below it",
                hint="save from a checkout without a layer",
                max=_STACK_LIMIT,
            )

    def paths_of(self, record: LayerRecord) -> tuple[Path, ...]:
        """Return the directories that were made for a layer; there may be no `.git`."""
        return self._path(record).with_suffix(".git"), *map(self.layers.path, record.own_layers)

    def _path(self, record: LayerRecord) -> Path:
        return self.layers.path(record.saved.id).with_suffix(".json")

    def _write(self, record: LayerRecord) -> None:
        """Flush a layer, and then write its record."""
        path = self._path(record)
        with full_disk_named(f"layer {record.saved.name}"):
            if record.copied["files"] > _SYNCED_EACH:
                os.sync()
            else:
                for layer in record.layers:
                    sync_tree(self.layers.path(layer))
                if exists(repository := path.with_suffix(".git")):
                    sync_tree(repository)
            self._write_record(record)

    def _write_record(self, record: LayerRecord) -> None:
        path = self._path(record)
        new = path.with_suffix(".new")
        with full_disk_named(f"layer {record.saved.name}"):
            try:
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with opened(fd):
                    write_all(fd, to_json(record))
                    os.fsync(fd)
                new.rename(path)
            except OSError:
                with suppress(OSError):
                    new.unlink()
                raise
            # the flush of a file says nothing about its name
            sync_directory(path.parent)


def _counts(taken: Taken) -> dict[str, Any]:
    return {"files": taken.files, "size_bytes": taken.size_bytes, "left_out": taken.left_out}


def _read(path: Path) -> LayerRecord:
    """Return the record in a file. Raises OSError, or ValueError if it is damaged.

    A record is removed before its layers are, so one whose layers are gone is damaged, too.
    """
    content = read_plain(path)
    try:
        record = LayerRecord(**from_json(LayerRecord, json.loads(content)))
    except (ValueError, KeyError, TypeError, AttributeError, errors.UsageError) as error:
        raise ValueError("it is damaged") from error
    if record.saved.id != path.stem:
        raise ValueError("it is the record of another layer")
    for layer in record.layers:
        if not is_dir(path.with_name(layer)):
            raise ValueError(f"its layer {layer} is gone")
    return record
