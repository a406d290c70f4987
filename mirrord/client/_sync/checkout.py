# @generated from ../_async/checkout.py by tests/support/unasync.py: edit that file, then run it.
"""The handle of a checkout, and the renewal of all leases that one client holds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast
from weakref import WeakValueDictionary

from ... import model, protocol
from ...errors import CheckoutNotFoundError, MirrordError
from ..http import seconds_of
from ..primitives_sync import Worker

if TYPE_CHECKING:
    from .client import Client

_LEAST_SECONDS = 0.05

log = logging.getLogger("mirrord")


T = TypeVar("T")


class _OfLease(Generic[T]):
    """A member of the lease, as it was at the last answer."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, handle: Checkout, _owner: object = None) -> T:
        return cast("T", getattr(handle.lease, self._name))


class Checkout:
    """A leased working tree. Leaving the `with` block releases it.

    The daemon releases it at `expires_at`. The client renews it as long as this handle exists,
    unless it was taken without `auto_renew`.
    """

    def __init__(self, client: Client, lease: protocol.Checkout, ttl: float | None) -> None:
        self._client = client
        self._ttl = ttl
        self.lease = lease

    id = _OfLease[str]()
    mirror = _OfLease[str]()
    commit = _OfLease[str]()
    """The base commit."""
    tree = _OfLease[str]()
    """The verified hash of the base commit's tree."""
    instance = _OfLease[str | None]()
    layer = _OfLease[str | None]()
    """The prepared layer that it starts with: `reset` goes back to it, `diff` is without it."""
    environment = _OfLease[str | None]()
    """KEY@DIGEST of the environment, whose prefix is `directory / "environment"`."""
    history = _OfLease[model.History]()
    view = _OfLease[model.View]()
    backend = _OfLease[model.Backend]()
    created_at = _OfLease[datetime]()
    expires_at = _OfLease[datetime]()
    parent = _OfLease[str | None]()
    """The id of the checkout that this one was forked from, or grades."""

    @property
    def path(self) -> Path:
        """The tree. It stays at this path through resets."""
        return Path(self.lease.path)

    @property
    def directory(self) -> Path:
        """Holds tree and environment; mounted elsewhere with `rslave`, it follows every reset."""
        return Path(self.lease.directory)

    def reset(
        self,
        instance: str | None = None,
        *,
        commit: str | None = None,
        dataset: str | None = None,
        to: str | None = None,
        layer: str | None = None,
        environment: str | None = None,
    ) -> protocol.Proof:
        """Reset the tree, move it to another instance or commit of the same mirror, or back `to` a
        snapshot, by its name.

        The environment is made new with it, and stays the same one unless another is named; so
        does the layer at the same commit. Returns the proof that the tree and its .git equal the
        template's, or the snapshot's.
        """
        choice = {"commit": commit, "dataset": dataset, "to": to, "layer": layer}
        answer = self._client.reset_checkout(self.id, instance, environment=environment, **choice)
        self.lease = answer
        return answer.proof

    def fork(
        self,
        ttl: timedelta | float | str | None = None,
        snapshot: str | None = None,
        *,
        auto_renew: bool = True,
    ) -> Checkout:
        """Lease another tree with the same content, or with that of a snapshot.

        It has this one's owner, history, view and backend. What was copied is in its `lease`.
        """
        return self._client.fork_checkout(
            self.id, snapshot=snapshot, ttl=ttl, auto_renew=auto_renew
        )

    def snapshot(self, name: str | None = None) -> protocol.Snapshot:
        """Keep the content under a name, by default a new one; `reset(to=name)` goes back to it."""
        return self._client.make_snapshot(self.id, name)

    def snapshots(self) -> list[protocol.Snapshot]:
        """Those of this checkout, oldest first."""
        return self._client.list_snapshots(self.id)

    def remove_snapshot(self, name: str) -> None:
        """Forget a snapshot; forks of it stay as they are."""
        self._client.remove_snapshot(self.id, name)

    def save(self, name: str) -> protocol.PreparedLayer:
        """Keep what was changed, in the environment too, as a prepared layer: other checkouts of
        this commit start with it by `layer=name`. A layer never changes.
        """
        return self._client.save_layer(self.id, name)

    def diff(self, *, format: model.DiffFormat = model.DiffFormat.PATCH) -> bytes:  # noqa: A002
        """The changes since the base commit and the prepared layer, as a patch that git accepts.

        Or as `git diff` prints them with `--stat` or `--name-status`.
        """
        return self._client.diff_checkout(self.id, format=format)

    def apply(
        self,
        patch: bytes | str,
        *,
        reverse: bool = False,
        strategy: model.ApplyStrategy = model.ApplyStrategy.EXACT,
    ) -> model.FoundStrategy:
        """Apply a patch; `@test_patch` and `@patch` of the instance need the grader view.

        Returns what made it fit: with `strategy="tolerant"` that may be another than `exact`.
        """
        answer = self._client.apply_patch(self.id, patch, reverse=reverse, strategy=strategy)
        self.lease = answer
        return answer.strategy

    def restore(self, commit: str, *paths: str) -> list[str]:
        """Bring files of a pinned commit into the tree (grader view); returns their paths."""
        return self._client.restore_paths(self.id, commit, *paths)

    def receipt(self) -> protocol.Receipt:
        """What this is now, and how that was proven; keep its `canonical()` bytes."""
        return self._client.get_receipt(self.id)

    def grade(
        self,
        *,
        policy: model.Policy | str | Mapping[str, str] | None = None,
        backend: model.Backend | None = None,
        ttl: timedelta | float | str | None = None,
        owner: int | None = None,
        bind: model.Bind = model.Bind.LEASE,
        auto_renew: bool = True,
    ) -> Grade:
        """Lease a grader's tree with what was changed here, and the instance's tests."""
        how: dict[str, Any] = {"policy": policy, "backend": backend, "ttl": ttl, "owner": owner}
        return self._client.grade_checkout(self.id, **how, bind=bind, auto_renew=auto_renew)

    def attach(
        self,
        path: Path | str,
        *,
        environment: Path | str | None = None,
        pid: int | None = None,
    ) -> None:
        """Make the tree visible at the directory `path` of this process's mount namespace, and the
        environment at another.

        There they follow every reset, and go with the namespace. Needs CAP_SYS_ADMIN in it, as
        after `unshare --user --map-root-user --mount`. With `pid`, for root, in the namespace of
        that process, at the paths that it sees.
        """
        if environment is not None:
            target = model.Target.ENVIRONMENT
            self._client.attach_checkout(self.id, environment, target=target, pid=pid)
        self._client.attach_checkout(self.id, path, pid=pid)

    def renew(self, ttl: timedelta | float | str | None = None) -> datetime:
        """Move the deadline to `ttl` from now, by default the last one given; returns it."""
        self._ttl = self._ttl if ttl is None else seconds_of(ttl)
        self.lease = self._client.renew_checkout(self.id, self._ttl)
        return self.lease.expires_at

    def release(self) -> None:
        """Release the checkout; does nothing when it is released or expired."""
        try:
            self._client.release_checkout(self.id)
        except CheckoutNotFoundError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _at: object) -> None:
        try:
            self.release()
        except MirrordError as failure:
            if error is None:
                raise
            error.add_note(f"mirrord could not release checkout {self.id}: {failure.message}")

    def __repr__(self) -> str:
        base = f"{self.mirror}@{self.commit[:12]}"
        return f"<{type(self).__name__} {self.id} {base} at {self.lease.path}>"


class Grade(Checkout):
    """A checkout for the grader: the base commit, the agent's change, the instance's tests.

    `report` is the daemon's whole answer.
    """

    def __init__(self, client: Client, report: protocol.Grade, ttl: float | None) -> None:
        super().__init__(client, report, ttl)
        self.report = report

    @property
    def steering(self) -> list[protocol.Steering]:
        """What of the agent's could steer the tests, by rule, and what was done about it."""
        return self.report.steering

    @property
    def dropped(self) -> list[str]:
        """Paths of the agent's change that this tree does not have."""
        return self.report.dropped

    @property
    def strategy(self) -> model.FoundStrategy | None:
        """How the patch applied; None for the grade of a checkout."""
        return self.report.strategy


class Renewal:
    """Renews the leases of a client at a third of what is left, with one worker for all.

    Handles are held weakly: a lease whose handle is gone ends at its deadline. A failed renewal is
    logged and tried again until then. The lock is for threads, and is never held over a wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[str, Checkout] = WeakValueDictionary()
        self._due: dict[str, float] = {}
        self._worker: Worker | None = None

    def hold(self, checkout: Checkout) -> None:
        """Renew it from now on."""
        with self._lock:
            self._held[checkout.id] = checkout
            self._due[checkout.id] = _next_turn(checkout.expires_at)
            if self._worker is None or not self._worker.is_running:
                self._worker = Worker(self._work)
            else:
                self._worker.ring()

    def move(self, checkout: str, expires_at: datetime) -> None:
        """Follow a lease with a new deadline."""
        with self._lock:
            if checkout in self._due:
                self._due[checkout] = _next_turn(expires_at)
                if self._worker is not None:
                    self._worker.ring()

    def drop(self, checkout: str) -> None:
        with self._lock:
            if self._due.pop(checkout, None) is not None and self._worker is not None:
                self._worker.ring()

    def stop(self) -> None:
        """Renew no lease from now on."""
        with self._lock:
            self._due.clear()
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _work(self, worker: Worker) -> None:
        while True:
            for identity, due in list(self._due.items()):
                if due <= time.monotonic():
                    self._renew(identity)
            with self._lock:
                if not self._due:
                    self._worker = None
                    return
                pause = min(self._due.values()) - time.monotonic()
            worker.wait(max(pause, 0))

    def _renew(self, identity: str) -> None:
        checkout = self._held.get(identity)
        if checkout is None:
            self.drop(identity)
            return
        try:
            checkout.renew()
        except MirrordError as error:
            if identity not in self._due:
                return  # released meanwhile
            message = "cannot renew checkout %s, which expires at %s: %s"
            log.warning(message, identity, checkout.expires_at, error)
            if isinstance(error, CheckoutNotFoundError) or checkout.expires_at <= model.utc_now():
                self.drop(identity)
            self.move(identity, checkout.expires_at)


def _next_turn(expires_at: datetime) -> float:
    left = (expires_at - model.utc_now()).total_seconds()
    return time.monotonic() + max(left / 3, _LEAST_SECONDS)
