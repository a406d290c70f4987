"""The contract of a backend, kept by every method of `pool` and `overlay.py`.

- **Cancel.** The caller may be cancelled at any await. What `create` had begun stays in the two
  directories of the lease, where `take_down` finds it. A `reset` that ends early leaves the lease
  and its tree as they were, or the lease RESETTING.
- **Crash.** After a kill -9 at any moment, `adopt` (with lease.json) or `take_down` (without) is
  enough; a backend keeps nothing in memory that it cannot find again.
- **Disk full.** ENOSPC and EDQUOT raise DiskFullError; the caller removes a half-made checkout.
  Templates and other checkouts are unharmed.
- **Hostile owner.** The tree's owner may change it, names, types and modes included, while a method
  runs. Nothing outside the tree is read, written, followed or run because of that. A proof holds
  for the moment at which it was made.
- **Locks.** The caller never runs two methods on one lease at a time; on different leases it does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..changes.pieces import CopyRule, Taken
from ..model import Backend, Target
from ..protocol import Proof

if TYPE_CHECKING:  # workers load this module, and need neither leases nor settings
    from ..host.mount_tables import Visible
    from .lease import Directories, Lease
    from .leases import Leases

# lists the paths that may differ; picklable, because it runs in a worker
ChangedPaths = Callable[[], list[bytes]]


class CheckoutBackend(Protocol):
    @property
    def name(self) -> Backend: ...

    async def open(self) -> None:
        """Get ready; called once, before any other method."""

    async def close(self) -> None:
        """Stop background work. Checkouts stay: leases outlive the daemon."""

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        """Make what `lease.base` says: a clean tree of the commit with `.git`, owned by the owner;
        on it the layers of `saved` and `layer`; beside it the environment.

        The lease's directories exist, the public one empty; the caller publishes the lease
        afterwards. Returns the verified hash of the tree, and seconds per step. Raises
        CommitNotFoundError, CommitUnservableError, DiskFullError, BackendUnavailableError.
        """
        ...

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Bring tree and `.git` to the state of the lease `to`, and save `to` in `leases`.

        `to.tree_path` stays the same path. Nothing that the owner wrote is trusted. After a crash
        the saved lease is the old one, `to`, or RESETTING to it, which the next reset or start
        completes. Raises ProofFailedError if the tree is not proven clean; the caller then removes
        the checkout.
        """
        ...

    async def adopt(self, lease: Lease) -> None:
        """Take over a lease of an earlier daemon. Raises MirrordError or OSError where its tree
        cannot be shown; removes nothing of its owner's.
        """
        ...

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        """Unmount a checkout, so that its directories can be removed. Idempotent.

        The directories may be half-made. They were renamed to `.trash-<id>`; paths in `lease` still
        have the old name. `lease` is None if it was lost. A process whose working directory is
        inside must not prevent this. Returns True if nothing is left; otherwise the caller removes
        both directories in the background.
        """
        ...

    def released(self, lease: Lease) -> None:
        """Note that a lease ended, perhaps half-made or RESETTING; `take_down` follows. Returns at
        once.
        """
        ...

    async def template_proven_at(self, lease: Lease) -> datetime | None:
        """Return when the last part of the template was proven; None without a template."""
        ...

    async def copy_layer(
        self, lease: Lease, directory: Path, earlier: Path | None, what: CopyRule
    ) -> Taken:
        """Copy the checkout's changes over its commit and `saved` to a new layer.

        The layer is made at `directory`; files that are unchanged since the copy `earlier` are
        linked from there. The checkout is not changed. Raises TooLargeError, OwnerDeniedError,
        DiskFullError, and CheckoutBusyError if it never stops changing; the caller then removes
        the directory.
        """
        ...

    def visible_to(self, pid: int) -> Visible:
        """Return what a process sees of the checkouts in its mount namespace. May block."""
        ...

    def clone(self, lease: Lease, target: Target) -> int:
        """Return the descriptor of a detached mount of `target`; the caller closes it.

        Attached in any mount namespace it follows resets, and set-id bits and devices have no
        effect in it. Raises BackendUnavailableError.
        """
        ...

    def changed_paths(self, lease: Lease) -> ChangedPaths:
        """Return a function that lists every path that may differ from `lease.base.clean_tree`.

        It runs in a worker, in the call that uses the paths. An extra directory stands for all in
        it, and a directory that became something else for all that was in it. Paths are relative to
        the tree, without its own `.git`. Unchanged paths may be among them.
        """
        ...
