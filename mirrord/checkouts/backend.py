"""The contract of a backend, in prose: `pool/backend.py` and `overlay/backend.py` keep it, `service.py` relies on it.

For every method:

- **Cancel.** The caller may be cancelled at any await. What `create` had begun stays below the two directories of the
  lease and nowhere else, so that `destroy` finds it. A `reset` that ends early
  leaves the lease and its tree as they were, or the lease RESETTING.
- **Crash.** After a kill -9 at any moment, `adopt` (lease.json is there) or `destroy` (it is not) is enough to go on; a backend
  keeps nothing in memory that it cannot find again.
- **Disk full.** ENOSPC and EDQUOT raise DiskFullError; the caller destroys a half-made checkout. Templates and other checkouts
  are unharmed.
- **Hostile owner.** The tree belongs to somebody who may change it, names, types and modes included, while a method runs. Nothing
  is read, written, followed or run outside the tree because of that. A proof speaks of the moment it was made.
- **Locks.** The caller never runs two methods on one lease at a time. Different leases may run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..errors import ProofFailedError
from ..model import Backend, CommitId
from ..protocol import Proof
from .leases import Directories, Lease, Leases


@dataclass(frozen=True, slots=True)
class Target:
    """What a reset goes to: a commit of the lease's mirror and its tree."""

    commit: CommitId
    tree: str


@dataclass(frozen=True, slots=True)
class Made:
    """`tree` is the hash that was verified; `timings` are seconds per step."""

    tree: str
    timings: dict[str, float] = field(default_factory=dict)


class CheckoutBackend(Protocol):
    @property
    def name(self) -> Backend: ...

    async def open(self) -> None:
        """Get ready; called once, before any other method."""

    async def close(self) -> None:
        """Checkouts stay as they are: leases outlive the daemon."""

    async def create(self, lease: Lease) -> Made:
        """Make `lease.tree_path` a clean, verified tree at `lease.commit`, with its `.git`, owned by `lease.owner_uid`.

        The lease's directories exist, the public one empty; the lease stands when the caller says so
        afterwards. Raises CommitNotFoundError, CommitUnservableError, DiskFullError, BackendUnavailableError.
        """
        ...

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Bring tree and `.git` to what the lease `to` says, whatever was done to them, and make it stand in `leases`.

        `to.tree_path` stays the same path. Nothing that the owner wrote is trusted. After a crash the lease stands as it was, as
        `to`, or RESETTING to it: nobody works on half a tree, and the next reset, or a start, brings it to where it was going.
        Raises ProofFailedError where clean cannot be proven; the caller then destroys.
        """
        ...

    async def adopt(self, lease: Lease) -> bool:
        """Take over a lease of an earlier daemon, as its owner left it. False where its tree cannot be had any more."""
        ...

    async def destroy(self, directories: Directories, lease: Lease | None) -> None:
        """Remove a checkout's directories with all that is in them. Idempotent; takes half-made ones.

        They were renamed to `.trash-<id>`: paths in `lease` still have the old name. `lease` is None
        when nobody knows it. A process that sits inside must not prevent it. Takes time in proportion
        to what the owner wrote; runs in the background.
        """

    async def changed_paths(self, lease: Lease) -> list[bytes]:
        """Every path that may differ from `lease.commit`: changed, missing, or extra; an extra directory stands for all in it.

        Paths are relative to the tree; its own `.git` is left out. May name unchanged paths, never leaves out a changed one.
        """
        ...


_HINT = "the checkout was destroyed; ask for another"


def require(proof: Proof, *, head: str, tree: str) -> Proof:
    """The proof, where it is one for `head` and `tree`; raises ProofFailedError with both hashes."""
    for what, wanted, seen in (("HEAD", head, proof.head), ("tree", tree, proof.tree)):
        if wanted != seen:
            raise ProofFailedError(
                f"cannot prove the checkout clean: {what} is {seen}, not {wanted}",
                hint=_HINT,
                wanted=wanted,
                seen=seen,
            )
    return proof


def unsettled(rounds: int, paths: list[bytes]) -> ProofFailedError:
    """The error for a tree that is dirty again as soon as it was cleaned."""
    names = [path.decode(errors="backslashreplace") for path in paths[:10]]
    return ProofFailedError(
        f"cannot prove the checkout clean: something still writes to it after {rounds} rounds",
        hint="end the processes that run in the checkout before the reset; it was destroyed, ask for another",
        paths=names,
    )
