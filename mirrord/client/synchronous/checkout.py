# Generated from ../asynchronous/checkout.py by tests/support/unasync.py: edit that file, then run it.
"""The handle of one checkout: what a client holds while it works in the tree, and what ends the lease when it leaves."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ... import protocol
from ...errors import CheckoutNotFoundError, MirrordError
from ...model import Backend, History, View
from ..answers import seconds_of

if TYPE_CHECKING:
    from .client import Client


class Checkout:
    """A leased working tree. Leaving the `with` block releases it; so does the daemon at `expires_at`, unless it was renewed.

    Its client renews it while this handle is there, unless it was asked for without `auto_renew`.
    """

    def __init__(self, client: Client, lease: protocol.Checkout, ttl: float | None) -> None:
        self._client = client
        self._ttl = ttl
        self.lease = lease

    @property
    def id(self) -> str:
        return self.lease.id

    @property
    def path(self) -> Path:
        """The tree. It stays at this path through resets."""
        return Path(self.lease.path)

    @property
    def directory(self) -> Path:
        """Holds the tree and nothing else; mounted elsewhere with `rslave`, it follows every reset."""
        return Path(self.lease.directory)

    @property
    def mirror(self) -> str:
        return self.lease.mirror

    @property
    def commit(self) -> str:
        """The base commit it is at."""
        return self.lease.commit

    @property
    def tree(self) -> str:
        """The verified hash of the base commit's tree."""
        return self.lease.tree

    @property
    def instance(self) -> str | None:
        return self.lease.instance

    @property
    def history(self) -> History:
        return self.lease.history

    @property
    def view(self) -> View:
        return self.lease.view

    @property
    def backend(self) -> Backend:
        return self.lease.backend

    @property
    def created_at(self) -> datetime:
        return self.lease.created_at

    @property
    def expires_at(self) -> datetime:
        return self.lease.expires_at

    def reset(
        self, instance: str | None = None, *, commit: str | None = None, dataset: str | None = None
    ) -> protocol.Proof:
        """Bring the tree back to clean, or on to another instance or commit of the same mirror; answers the proof."""
        answer = self._client.reset_checkout(self.id, instance, commit=commit, dataset=dataset)
        self.lease = answer
        return answer.proof

    def diff(self) -> bytes:
        """What changed since the base commit, as a patch that git accepts."""
        return self._client.diff_checkout(self.id)

    def apply(self, patch: bytes | str, *, reverse: bool = False) -> None:
        """Apply a patch; `@test_patch` and `@patch` are the instance's own and need the grader view."""
        self.lease = self._client.apply_patch(self.id, patch, reverse=reverse)

    def restore(self, commit: str, *paths: str) -> list[str]:
        """Bring files of a pinned commit into the tree (grader view); answers the paths written."""
        return self._client.restore_paths(self.id, commit, *paths)

    def renew(self, ttl: timedelta | float | str | None = None) -> datetime:
        """Move the deadline to `ttl` from now, by default to what was asked for last; answers it."""
        self._ttl = self._ttl if ttl is None else seconds_of(ttl)
        self.lease = self._client.renew_checkout(self.id, self._ttl)
        return self.lease.expires_at

    def release(self) -> None:
        """Give the tree back. Once released, or expired, doing it again is nothing."""
        try:
            self._client.release_checkout(self.id)
        except CheckoutNotFoundError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except MirrordError as failure:
            if error is None:
                raise
            error.add_note(
                f"and then mirrord could not release checkout {self.id}: {failure.message}"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.mirror}@{self.commit[:12]} at {self.lease.path}>"
