"""Patches onto a tree: by a fixed order of strategies, all of a patch or nothing.

Plain patches are read and spliced here; what is not plain goes to one `git apply`, which sees an
index of the paths that the patch names and no object but theirs. A refusal is always git's word.
Writes nothing but a scratch repository. Sync; runs in workers.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGABRT

from ...errors import (
    InvalidPatchError,
    MirrordError,
    PatchConflictError,
    PathOutsideCheckoutError,
)
from ...git.command import run_git_sync
from ...git.objects.trees import ScratchRepository, TreeEntry
from ...host.files import shown_path
from ...host.trash import remove_tree
from ...model import (
    NAME_LIMIT_BYTES,
    TREE_DEPTH_LIMIT,
    TREE_PATH_LIMIT_BYTES,
    ApplyStrategy,
    FoundStrategy,
)
from ..files.manifest import blob_id
from . import repair
from .base import Change
from .fit import DIRECTORY, UNTRACKED, File, Patched, Results, Splice, Tree, find_obstacle, fit
from .names import NotPlainError
from .parse import LIMIT_BYTES, SUBMODULE, SYMLINK, Hunk, named_paths, parse
from .splice import MisfitError, splice, splice_fuzzily

_TIMEOUT = timedelta(minutes=4)
_LINK_LIMIT_BYTES = 4095  # PATH_MAX, with its NUL
_OUTSIDE = re.compile(r"invalid path|beyond a symbolic link|outside repository")
_INVALID = re.compile(
    r"corrupt (?:binary )?patch|No valid patches|unrecognized (?:input|binary patch)"
    r"|fragment without header|header lacks filename|without full index line"
    r"|inconsistent (?:new |old )?(?:filename|mode)|bad git-diff|invalid mode on line"
)

_REFUSALS = (InvalidPatchError, PatchConflictError, PathOutsideCheckoutError)


@dataclass(frozen=True, slots=True)
class Applied:
    """What a patch makes of a tree. `old` of a change is what the path had in that tree."""

    changes: list[Change]
    strategy: FoundStrategy


def apply_patch(
    tree: Tree,
    patch: bytes,
    *,
    scratch: Path,
    reverse: bool = False,
    strategy: ApplyStrategy = ApplyStrategy.EXACT,
    base: Tree | None = None,
) -> Applied:
    """Apply a patch to a tree in memory.

    `scratch` becomes a directory for git, where it is needed, and is removed. `base` is the tree of
    the base commit, where that is another. Raises PatchConflictError, InvalidPatchError,
    PathOutsideCheckoutError: with what `git apply` says, also where the strategy is tolerant.
    """
    if not patch.endswith(b"\n"):  # as in datasets; git calls it corrupt
        patch += b"\n"
    work = _Work(tree, reverse, scratch, base)
    try:
        return Applied(_changes(tree, work.exactly(patch)), FoundStrategy.EXACT)
    except _REFUSALS:
        found = work.tolerantly(patch) if strategy is ApplyStrategy.TOLERANT else None
        if found is None:
            raise
    return Applied(_changes(tree, found[1]), found[0])


@dataclass(frozen=True, slots=True)
class _Work:
    tree: Tree
    reverse: bool
    scratch: Path
    base: Tree | None

    def exactly(self, patch: bytes) -> Results:
        try:
            return fit(self.tree, parse(patch), reverse=self.reverse, splice=splice)
        except (MisfitError, NotPlainError):
            return self._by_git(patch)

    def tolerantly(self, patch: bytes) -> tuple[FoundStrategy, Results] | None:
        """The first strategy whose tree is the one that the field's graders would have.

        Where those refuse the patch, the first that takes it.
        """
        if self._has_diverged(patch):
            with suppress(*_REFUSALS):
                return FoundStrategy.THREE_WAY, self._by_git(patch, "--3way")
        if len(patch) > LIMIT_BYTES:
            return None
        official = self._as_graders(patch)
        wanted = None if official is None else _differences(self.tree, official)
        for name, text, how in self._attempts(patch):
            results = self._attempt(text, how)
            if results is not None and wanted in (None, _differences(self.tree, results)):
                return name, results
        return None if official is None else (FoundStrategy.FUZZ, official)

    def _has_diverged(self, patch: bytes) -> bool:
        """Whether a file of the patch is another than in the base commit, from which it may be."""
        base, tree = self.base, self.tree
        if base is None or self.reverse:
            return False
        return any(base.read(path) != tree.read(path) for path in named_paths(patch))

    def _attempts(self, patch: bytes) -> Iterator[tuple[FoundStrategy, bytes, Splice]]:
        counted, bare = repair.recount(patch), repair.unwrap(patch)
        whole = repair.unwrap(repair.to_lf(patch))
        yield FoundStrategy.COUNTS, counted, splice
        yield FoundStrategy.PROSE, bare, splice
        yield FoundStrategy.CRLF, whole, splice
        yield FoundStrategy.CRLF, whole, _splice_line_ends
        yield FoundStrategy.BLANKS, whole, _splice_blanks
        yield FoundStrategy.FUZZ, whole, splice_fuzzily

    def _attempt(self, patch: bytes, how: Splice) -> Results | None:
        try:
            return fit(self.tree, parse(patch), reverse=self.reverse, splice=how)
        except MisfitError:
            return None
        except NotPlainError:
            if how is splice:  # binary, say
                with suppress(*_REFUSALS):
                    return self._by_git(patch)
            return None

    def _as_graders(self, patch: bytes) -> Results | None:
        """What SWE-bench's chain of commands leaves, where its last one succeeds.

        That is `patch --batch --forward --fuzz=5 -p1` on what `git apply --reject` left. Not all of
        it is sane: a hunk that both take is there twice.
        """
        rejecting = partial(splice, rejects=True)
        try:
            left = fit(
                self.tree, parse(patch), reverse=self.reverse, splice=rejecting, rejects=True
            )
        except NotPlainError:
            left = {}
        text = repair.to_lf(patch) if repair.has_crlf_headers(patch) else patch
        try:
            patches = parse(text, as_patch=True)
            tree = Patched(self.tree, left)
            then = fit(tree, patches, reverse=self.reverse, splice=splice_fuzzily)
        except (MisfitError, NotPlainError):
            return None
        return left | then

    def _by_git(self, patch: bytes, *options: str) -> Results:
        """What `git apply` makes of the paths that the patch names; raises what it says."""
        remove_tree(self.scratch)
        self.scratch.mkdir(mode=0o700)
        try:
            repository = ScratchRepository(self.scratch / "git")
            before = {
                path: file
                for path in named_paths(patch)
                if (file := self.tree.read(path)) and file.mode not in (DIRECTORY, UNTRACKED)
            }
            entries = [
                TreeEntry(path, file.mode, _stored(repository, file))
                for path, file in before.items()
            ]
            repository.write_index(entries)
            for path in before if self.base else ():
                if self.base and (old := self.base.read(path)) and old.mode != DIRECTORY:
                    _stored(repository, old)
            done = run_git_sync(
                "apply", "--cached", "--whitespace=nowarn", *options,
                *(("--reverse",) if self.reverse else ()), "-",
                git_dir=repository.git_dir, work_tree=self.scratch, stdin=patch,
                ok=(0, 1, 128, -SIGABRT), timeout=_TIMEOUT,
            )  # fmt: skip
            if done.status:
                raise _refusal(done.stderr)
            after = {
                entry.path: File(entry.mode, _loaded(repository, entry))
                for entry in repository.read_index()
            }
            return {**dict.fromkeys(before), **after}
        finally:
            remove_tree(self.scratch)


def _stored(repository: ScratchRepository, file: File) -> str:
    return file.data.decode() if file.mode == SUBMODULE else repository.write_blob(file.data)


def _loaded(repository: ScratchRepository, entry: TreeEntry) -> bytes:
    return entry.oid.encode() if entry.is_submodule else repository.read_blob(entry.oid)


def _splice_blanks(data: bytes, hunks: list[Hunk]) -> bytes:
    return splice(data, hunks, repair.strip_blanks)


def _splice_line_ends(data: bytes, hunks: list[Hunk]) -> bytes:
    if b"\r\n" in data:
        hunks = [hunk.with_lines(repair.to_crlf) for hunk in hunks]
    return splice(data, hunks)


def _differences(tree: Tree, results: Results) -> Results:
    return {path: file for path, file in results.items() if file != tree.read(path)}


def _changes(tree: Tree, results: Results) -> list[Change]:
    """The results that differ from the tree, in the order of their paths."""
    differ = _differences(tree, results)
    must_fit({path: file for path, file in differ.items() if file}, InvalidPatchError)
    if (taken := find_obstacle(tree, differ)) is not None:
        raise PatchConflictError(
            f"cannot apply the patch: {shown_path(taken)} already exists in the checkout",
            hint="nothing was changed; remove it first",
        )
    changes = []
    for path, file in sorted(differ.items()):
        old = tree.read(path)
        entry = TreeEntry(path, old.mode, _oid(old)) if old and old.mode != DIRECTORY else None
        data = file.data if file and file.mode != SUBMODULE else b""
        changes.append(Change(path, file.mode if file else None, data, entry))
    return changes


def _oid(file: File) -> str:
    return file.data.decode() if file.mode == SUBMODULE else blob_id(file.data).hex()


def must_fit(files: Mapping[bytes, File], error: type[MirrordError]) -> None:
    """git takes names of any length and links to anything; a file system does not."""
    for path, file in files.items():
        parts = path.split(b"/")
        if (
            len(path) > TREE_PATH_LIMIT_BYTES
            or len(parts) > TREE_DEPTH_LIMIT
            or max(map(len, parts)) > NAME_LIMIT_BYTES
        ):
            raise error(
                f"cannot write {shown_path(path[:100])}: a path may have {TREE_PATH_LIMIT_BYTES}"
                f" bytes, {TREE_DEPTH_LIMIT} directories, {NAME_LIMIT_BYTES} bytes in each name",
                hint="nothing was changed",
            )
        is_possible = 0 < len(file.data) <= _LINK_LIMIT_BYTES and b"\0" not in file.data
        if file.mode == SYMLINK and not is_possible:
            raise error(
                f"cannot write {shown_path(path)}: a link needs a target of 1 to"
                f" {_LINK_LIMIT_BYTES} bytes without NUL",
                hint="nothing was changed",
            )


def _refusal(stderr: str) -> MirrordError:
    lines = [line for line in stderr.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ").removeprefix("fatal: ") for line in lines]
    reason = "; ".join(reasons[:5]) or "git does not say why"
    if _OUTSIDE.search(stderr):
        return PathOutsideCheckoutError(
            f"cannot apply the patch: {reason}", hint="a patch may only name files of the checkout"
        )
    if _INVALID.search(stderr):
        return InvalidPatchError(
            f"cannot read the patch: {reason}",
            hint="make it with `git diff --binary`",
            reasons=reasons[:50],
        )
    return PatchConflictError(
        f"cannot apply the patch: {reason}",
        hint="nothing was changed; see `mirrord diff` for what the checkout has",
        reasons=reasons[:50],
    )
