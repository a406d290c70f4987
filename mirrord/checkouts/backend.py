"""The contract of a backend: `pool.py` and `overlay.py` keep it, for every method.

- **Cancel.** The caller may be cancelled at any await. What `create` had begun stays below the two
  directories of the lease, where `take_down` finds it. A `reset` that ends early leaves the lease
  and its tree as they were, or the lease RESETTING.
- **Crash.** After a kill -9 at any moment, `adopt` (with lease.json) or `take_down` (without) is
  enough; a backend keeps nothing in memory that it cannot find again.
- **Disk full.** ENOSPC and EDQUOT raise DiskFullError; the caller removes a half-made checkout.
  Templates and other checkouts are unharmed.
- **Hostile owner.** The tree's owner may change it, names, types and modes included, while a method
  runs. Nothing outside the tree is read, written, followed or run because of that. A proof speaks
  of the moment it was made.
- **Locks.** The caller never runs two methods on one lease at a time; on different leases it does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import ProofFailedError
from ..model import Backend, Target
from ..protocol import Proof

if TYPE_CHECKING:  # workers load this module, and need neither leases nor settings
    from .leases import Directories, Lease, Leases

DIFF_TIMEOUT = timedelta(seconds=60)
"""For work on one checkout, whose client may have made its tree so that git takes for ever."""


ChangedPaths = Callable[[], list[bytes]]
"""Can be pickled."""


class CopyRule(NamedTuple):
    """What is copied of a checkout. Without `git` nothing of any `.git` is; else of the tree's own
    what records work, and all others whole.
    """

    of_environment: bool = False
    git: bool = True


class Taken(NamedTuple):
    """What was copied of a checkout, as it was at `taken_at`.

    `left_out` counts what is not in the copy, by kind: pipes, sockets, devices, and files of its
    `.git`. `git` says whether the rest of that is; else the base's own stands there. `is_same` says
    that an earlier copy is the same, and none was made.
    """

    taken_at: datetime
    files: int
    size_bytes: int
    left_out: dict[str, int]
    git: bool
    is_same: bool

    def plus(self, other: Taken) -> Taken:
        """This with the counts of what was copied beside it."""
        left_out = {
            kind: self.left_out.get(kind, 0) + other.left_out.get(kind, 0)
            for kind in self.left_out | other.left_out
        }
        files, size = self.files + other.files, self.size_bytes + other.size_bytes
        return self._replace(files=files, size_bytes=size, left_out=left_out)


class CheckoutBackend(Protocol):
    @property
    def name(self) -> Backend: ...

    async def open(self) -> None:
        """Get ready; called once, before any other method."""

    async def close(self) -> None:
        """Stop background work. Checkouts stay: leases outlive the daemon."""

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        """Make `lease.tree_path` a clean tree at `lease.commit`, with `.git`, owned by the owner,
        and on it what `lease.saved` and `lease.layer` have; `lease.environment` beside it.

        The lease's directories exist, the public one empty; the caller makes the lease stand
        afterwards. Answers the verified hash of the tree, and seconds per step. Raises
        CommitNotFoundError, CommitUnservableError, DiskFullError, BackendUnavailableError.
        """
        ...

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Bring tree and `.git` to what the lease `to` says, its layer included, and make it stand
        in `leases`.

        `to.tree_path` stays the same path. Nothing that the owner wrote is trusted. After a crash
        the lease stands as it was, as `to`, or RESETTING to it: nobody works on half a tree, and
        the next reset, or a start, completes it. Raises ProofFailedError where clean cannot be
        proven; the caller then removes the checkout.
        """
        ...

    async def adopt(self, lease: Lease) -> bool:
        """Take over a lease of an earlier daemon. False where its tree is lost."""
        ...

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        """Undo what keeps a checkout's directories from being removed. Idempotent; takes half-made
        ones.

        They were renamed to `.trash-<id>`: paths in `lease` still have the old name. `lease` is
        None when nobody knows it. A process that sits inside must not prevent it. True where
        nothing is left to remove; otherwise the caller removes both directories in the background.
        """
        ...

    async def template_proven_at(self, lease: Lease) -> datetime | None:
        """When the last part of the template below the tree was proven; None without a template."""
        ...

    async def copy_layer(
        self, lease: Lease, directory: Path, earlier: Path | None, what: CopyRule
    ) -> Taken:
        """Copy what a checkout has over `lease.commit` and `lease.saved` into the new layer
        `directory`; what did not change since the layer `earlier` was copied of it is shared with
        that.

        The checkout is not changed. Raises ForkTooLargeError, CheckoutBusyError where it is
        written to all the time, OwnerDeniedError, DiskFullError; the caller removes the directory.
        """
        ...

    def clone(self, lease: Lease, target: Target) -> int:
        """A descriptor of a mount of the checkout's `target`, attached nowhere; the caller closes
        it.

        Attached in any mount namespace, it shows what the checkout shows there, resets included,
        without set-id bits and devices. Raises BackendUnavailableError.
        """
        ...

    def changed_paths(self, lease: Lease) -> ChangedPaths:
        """What lists every path that may differ from `lease.base_tree`, by the lease's layer or
        since.

        It runs in a worker, in the call that uses the paths. An extra directory stands for all in
        it, and one that is none any more for all that was in it. Paths are relative to the tree,
        without its own `.git`. May list unchanged paths.
        """
        ...


def must_prove(proof: Proof, *, head: str, tree: str) -> Proof:
    """The proof, if it is one for `head` and `tree`; raises ProofFailedError with both hashes."""
    for what, wanted, seen in (("HEAD", head, proof.head), ("tree", tree, proof.tree)):
        if wanted != seen:
            raise ProofFailedError(
                f"cannot prove the checkout clean: {what} is {seen}, not {wanted}",
                hint="the checkout was removed; ask for another",
                wanted=wanted,
                seen=seen,
            )
    return proof
