"""Diff, apply and restore for leases, by calls of workers.

Only a checkout with the grader view may name the instance's own patches and other commits. A call
uses a private directory, which it removes at its end, or the next call.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio

from .. import model
from ..catalog import InstanceRow
from ..datasets.service import Datasets
from ..errors import (
    AccessError,
    CheckoutBusyError,
    CommitNotFoundError,
    InvalidRequestError,
    MirrordError,
)
from ..mirrors.service import Mirrors
from ..patches.apply import apply, recover, restore
from ..patches.diff import Diff, diff
from ..patches.journal import has_journal
from ..patches.worktree import PatchJob
from ..protocol import RestorePaths
from ..quoting import decode_name, encode_name
from ..telemetry import log
from ..workers.pool import Workers
from .backend import ChangedPaths
from .lease import Lease


class DiffAnswer(NamedTuple):
    """A diff, a long one as a file; `made_by` is `libgit2` or `git; reason=…`; `notes` say
    what it does not record.
    """

    content: bytes | Path
    made_by: str
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(made: Diff, spool: Path) -> "DiffAnswer":
        """Return the answer of a worker; a long one is in `spool`."""
        made_by = f"git; reason={made.reason}" if made.reason else "libgit2"
        return DiffAnswer(spool if made.content is None else made.content, made_by, made.notes)


@dataclass(eq=False, repr=False)
class Patches:
    """Diff, apply and restore; the caller holds the lock of the lease."""

    workers: Workers
    mirrors: Mirrors
    instances: Datasets
    objects_of: Callable[[Lease], Path]
    timeout: Callable[[], timedelta]

    async def diff(
        self, lease: Lease, changed: ChangedPaths, form: model.DiffFormat = model.DiffFormat.PATCH
    ) -> DiffAnswer:
        """Return the changes from the base commit to the tree."""
        began = time.perf_counter()
        async with self.spool() as spool:
            made = await self.workers.run(
                diff, self.job(lease), changed, form, spool, timeout=self.timeout()
            )
        answer = DiffAnswer.of(made, spool)
        duration_s = round(time.perf_counter() - began, 6)
        fields = {"files": made.files, "made_by": answer.made_by, "duration_s": duration_s}
        log.debug("checkout.diffed", checkout=lease.id, **fields)
        return answer

    @asynccontextmanager
    async def spool(self) -> AsyncIterator[Path]:
        """Yield a path for a long diff; what fails leaves no file there."""
        quarantine = self.mirrors.quarantine
        spool = quarantine.root / f"diff-{secrets.token_hex(8)}"
        try:
            yield spool
        except BaseException:
            with anyio.CancelScope(shield=True):
                await quarantine.remove(spool)
            raise

    async def apply(
        self, lease: Lease, patch: bytes | Path, *, reverse: bool, strategy: model.ApplyStrategy
    ) -> tuple[list[str], model.FoundStrategy, list[str]]:
        """Apply a patch; returns the paths that it wrote or removed, the strategy that fitted, and
        notes on submodules.

        Raises PatchConflictError, InvalidPatchError, and changes nothing.
        """
        async with self._completed(lease):
            paths, applied_by, notes = await self.workers.run(
                apply, self.job(lease), patch, reverse, strategy, timeout=self.timeout()
            )
        return [decode_name(path) for path in paths], applied_by, notes

    async def restore(self, lease: Lease, request: RestorePaths) -> list[str]:
        """Write files of a pinned commit into the checkout, without any of its objects.

        Raises AccessError outside the grader view, CommitNotFoundError for a commit that is not
        pinned, PathNotFoundError.
        """
        _must_grade(lease, "restore files of another commit")
        commit = await self._find_commit(lease, request.commit)
        if not any(pin.commit == commit for pin in await self.mirrors.list_pins(lease.mirror)):
            raise CommitNotFoundError(
                f"cannot restore from commit {commit}: it is not pinned in {lease.mirror}",
                hint=f"run `mirrord pin add {lease.mirror} {commit}`",
            )
        wanted = [encode_name(path) for path in request.paths]
        async with self._completed(lease):
            paths = await self.workers.run(
                restore, self.job(lease), commit, wanted, timeout=self.timeout()
            )
        return [decode_name(path) for path in paths]

    async def complete(self, lease: Lease) -> None:
        """Undo or finish an apply or restore that was killed or failed half-way.

        Raises CheckoutBusyError where that fails too.
        """
        if not has_journal(lease.private):
            return
        try:
            await self.workers.run(recover, self.job(lease), timeout=self.timeout())
        except (MirrordError, OSError) as error:
            fact = error.message if isinstance(error, MirrordError) else str(error)
            log.warning("change.unfinished", checkout=lease.id, error=fact)
            raise CheckoutBusyError(
                f"cannot work on checkout {lease.id}: what an apply or a restore changed before it"
                f" failed cannot be put back: {fact}",
                hint="remove the cause and try again, or reset the checkout",
            ) from error
        log.info("change.recovered", checkout=lease.id)

    @asynccontextmanager
    async def _completed(self, lease: Lease) -> AsyncIterator[None]:
        """Recover at once where the worker was killed, or could not undo or finish."""
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True), suppress(CheckoutBusyError):
                await self.complete(lease)

    async def _find_commit(self, lease: Lease, text: str) -> model.CommitId:
        """Return a commit by its id, or by its role in the lease's instance."""
        if text not in set(model.CommitRole):
            return model.parse_commit(text)
        row = await self.find_row(lease)
        commits = [commit for commit, role in row.commits if role == text] if row else []
        if len(commits) != 1:
            fact = f"{len(commits) or 'no'} commits of this role" if row else "no instance"
            raise CommitNotFoundError(
                f"cannot restore from the {text} commit: the checkout has {fact}",
                hint=f"name one by its id: {', '.join(commits)}" if commits else None,
            )
        return commits[0]

    async def find_row(self, lease: Lease) -> InstanceRow | None:
        if lease.base.instance is None:
            return None
        return await self.instances.find_instance(lease.base.instance, lease.base.dataset)

    async def named_patch(self, lease: Lease, named: str) -> tuple[bytes, model.Direction]:
        """Return `@patch` or `@test_patch` of the lease's instance, and its direction."""
        _must_grade(lease, "apply the instance's own patch")
        row = await self.find_row(lease)
        patches = {"@patch": row.patch, "@test_patch": row.test_patch} if row else {}
        if row and (patch := patches.get(named)):
            direction = row.direction if named == "@patch" else model.Direction.FORWARD
            return patch.encode(errors="surrogateescape"), direction
        fact, hint = "the checkout has no instance", "send the patch itself"
        if row and named in patches:
            fact = f"instance {row.id} has none"
        elif row:
            fact, hint = "no such name", "the names are @patch and @test_patch"
        raise InvalidRequestError(f"cannot apply {model.shown(named)}: {fact}", hint=hint)

    def job(self, lease: Lease) -> PatchJob:
        """Return a lease's checkout for the functions of this package."""
        return PatchJob(
            root=lease.tree_path,
            mirror=self.objects_of(lease),
            commit=lease.base.commit,
            tree=lease.base.clean_tree,
            owner=lease.owner,
            scratch=lease.private / ".scratch",
            is_sealed=lease.terms.view is not model.View.GRADER,
        )


def _must_grade(lease: Lease, what: str) -> None:
    if lease.terms.view is not model.View.GRADER:
        raise AccessError(
            f"cannot {what}: the checkout has the agent view",
            hint="make a checkout with --view grader",
        )
