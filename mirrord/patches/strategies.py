"""Applies a patch to a tree in memory, by a fixed order of strategies; all of it or nothing.

Plain patches are parsed and fitted here. Others go to one `git apply` with an index of the paths
that the patch names, and only their objects. A refusal always quotes git. Writes only a scratch
repository. Sync; runs in workers.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGABRT

from ..errors import InvalidPatchError, MirrordError, PatchConflictError
from ..git.command import run_git_sync
from ..git.modes import DIRECTORY, SUBMODULE, SYMLINK
from ..git.objects.repository import Objects
from ..git.objects.scratch import ScratchRepository
from ..git.objects.trees import TreeEntry
from ..host.files import shown_path
from ..host.trash import remove_tree
from ..model import (
    NAME_LIMIT_BYTES,
    TREE_DEPTH_LIMIT,
    TREE_PATH_LIMIT_BYTES,
    ApplyStrategy,
    FoundStrategy,
)
from ..trees.manifest import blob_id
from ..trees.reader import parents
from .fit import UNTRACKED, Change, File, Patched, Results, Splice, Tree, find_obstacle, fit
from .lfs import PointedTree, names_pointers, with_objects
from .misfits import with_hunk
from .parse import (
    LIMIT_BYTES,
    Hunk,
    NeedsGitError,
    has_nul_in_name,
    named_paths,
    parse,
    split_binary,
)
from .pointers import move
from .repairs import has_crlf_headers, recount, squeeze_blanks, strip_blanks, to_crlf, to_lf, unwrap
from .splicing import MisfitError, splice, splice_fuzzily

# what is written is read at once and removed: a flush of each of 20 files took 100 ms
_UNFLUSHED = ("-c", "core.fsync=none", "-c", "core.compression=0")
_LINK_LIMIT_BYTES = 4095  # PATH_MAX, with its NUL

_REFUSALS = (InvalidPatchError, PatchConflictError)


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of a patch. `old` of a change is the entry before the patch; `notes` say which
    submodules it moves without their files, and which objects of LFS it names without having them.
    """

    changes: list[Change]
    strategy: FoundStrategy
    notes: list[str]


def apply_patch(
    tree: Tree,
    patch: bytes,
    *,
    scratch: Path,
    reverse: bool = False,
    strategy: ApplyStrategy = ApplyStrategy.EXACT,
    base: Tree | None = None,
    submodules: Objects | None = None,
) -> Applied:
    """Apply a patch to a tree in memory.

    `scratch` is a directory for git, made if needed and removed. `base` is the tree of the base
    commit, if it differs. `submodules` has the commits to which the patch may move submodules.
    Raises PatchConflictError, InvalidPatchError with the message of a plain `git apply`, whatever
    the strategy, and the hunk that fits nowhere.
    """
    if not patch.endswith(b"\n"):  # common in datasets; git calls it corrupt
        patch += b"\n"
    moved = move(tree, submodules, patch, reverse=reverse)
    if moved.rest != patch and not named_paths(moved.rest):
        return Applied(_changes(tree, moved.results), FoundStrategy.EXACT, moved.notes)
    patch, after = moved.rest, Patched(tree, moved.results) if moved.results else tree
    pointed: list[PointedTree] = []
    if names_pointers(patch):
        pointed = [PointedTree(it, patch) for it in (after, base) if it is not None]
        after, base = pointed[0], pointed[1] if base else None
    attempt = _Application(after, reverse, scratch, base)
    is_tolerant = strategy is ApplyStrategy.TOLERANT
    try:
        fitted, results = FoundStrategy.EXACT, attempt.exactly(patch)
    except _REFUSALS as error:
        applied = attempt.tolerantly(patch) if is_tolerant else None
        if applied is None:
            raise with_hunk(
                error, after, patch, reverse=reverse, is_tolerant=is_tolerant
            ) from error
        fitted, results = applied
    results = with_objects(results, pointed, moved.notes) if pointed else results
    return Applied(_changes(tree, moved.results | results), fitted, moved.notes)


@dataclass(frozen=True, slots=True)
class _Application:
    tree: Tree
    reverse: bool
    scratch: Path
    base: Tree | None

    def exactly(self, patch: bytes) -> Results:
        """Fit text here and binary files by git; all by git where one of them says no."""
        text, binary = split_binary(patch)
        with suppress(MisfitError, NeedsGitError, *(_REFUSALS if binary else ())):
            # 0.05 ms for one file, for which git takes 3.8 with its process
            results = fit(self.tree, parse(text), reverse=self.reverse, splice=splice)
            others = self._by_git(binary) if binary else {}
            if not (_touched(results) & others.keys() or _touched(others) & results.keys()):
                return results | others
        return self._by_git(patch)

    def tolerantly(self, patch: bytes) -> tuple[FoundStrategy, Results] | None:
        """Return the first strategy whose tree is that of SWE-bench's commands, and its results.

        Where those refuse the patch, the first strategy that fits.
        """
        if self._has_diverged(patch):
            with suppress(*_REFUSALS):
                return FoundStrategy.THREE_WAY, self._by_git(patch, "--3way")
        if len(patch) > LIMIT_BYTES:
            return None
        swebench = self._as_swebench(patch)
        wanted = None if swebench is None else _differences(self.tree, swebench)
        for name, text, how in self._attempts(patch):
            results = self._attempt(text, how)
            if results is not None and wanted in (None, _differences(self.tree, results)):
                return name, results
        return None if swebench is None else (FoundStrategy.FUZZ, swebench)

    def _has_diverged(self, patch: bytes) -> bool:
        """Return whether a file of the patch differs from the base commit, which it may be for."""
        base, tree = self.base, self.tree
        if base is None or self.reverse:
            return False
        return any(base.read(path) != tree.read(path) for path in named_paths(patch))

    def _attempts(self, patch: bytes) -> Iterator[tuple[FoundStrategy, bytes, Splice]]:
        counted, bare = recount(patch), unwrap(patch)
        whole = unwrap(to_lf(patch))
        yield FoundStrategy.COUNTS, counted, splice
        yield FoundStrategy.PROSE, bare, splice
        yield FoundStrategy.CRLF, whole, splice
        yield FoundStrategy.CRLF, whole, _splice_line_ends
        yield FoundStrategy.BLANKS, whole, partial(splice, key=strip_blanks)
        yield FoundStrategy.BLANKS, whole, partial(splice, key=squeeze_blanks)
        yield FoundStrategy.FUZZ, whole, splice_fuzzily

    def _attempt(self, patch: bytes, how: Splice) -> Results | None:
        try:
            return fit(self.tree, parse(patch), reverse=self.reverse, splice=how)
        except MisfitError:
            return None
        except NeedsGitError:
            if how is splice:  # a binary patch, for example
                with suppress(*_REFUSALS):
                    return self._by_git(patch)
            return None

    def _as_swebench(self, patch: bytes) -> Results | None:
        """Return the result of SWE-bench's commands, if the last one succeeds.

        It is `patch --batch --forward --fuzz=5 -p1` on what `git apply --reject` left; a hunk that
        both apply is there twice.
        """
        rejecting = partial(splice, rejects=True)
        try:
            left = fit(
                self.tree, parse(patch), reverse=self.reverse, splice=rejecting, rejects=True
            )
        except NeedsGitError:
            left = {}
        text = to_lf(patch) if has_crlf_headers(patch) else patch
        try:
            patches = parse(text, as_patch=True)
            tree = Patched(self.tree, left)
            then = fit(tree, patches, reverse=self.reverse, splice=splice_fuzzily)
        except (MisfitError, NeedsGitError):
            return None
        return left | then

    def _by_git(self, patch: bytes, *options: str) -> Results:
        """Run `git apply` on the paths that the patch names; raises its refusal."""
        if has_nul_in_name(patch):
            fact = "cannot read the patch: a path in it has a NUL"
            raise InvalidPatchError(fact, hint="make it with `git diff --binary`")
        # left by a call that was killed
        remove_tree(self.scratch)
        self.scratch.mkdir(mode=0o700)
        try:
            repository = ScratchRepository(self.scratch / "git")
            named = named_paths(patch)
            # git's index has no files below a submodule, but a patch of a diff may
            directories = {above for path in named for above in parents(path)}
            before = {
                path: file
                for path in named
                if (file := self.tree.read(path))
                and file.mode not in (DIRECTORY, UNTRACKED)
                and not (file.mode == SUBMODULE and path in directories)
            }
            entries = [
                TreeEntry(path, file.mode, _stored(repository, file))
                for path, file in before.items()
            ]
            repository.write_index(entries)
            # by the blobs that the index lines name, if it has them
            base = self.base if "--3way" in options else None
            for path in before if base else ():
                if base and (old := base.read(path)) and old.mode != DIRECTORY:
                    _stored(repository, old)
            done = run_git_sync(
                # warnings about blanks would be quoted as reasons of a refusal
                *_UNFLUSHED, "apply", "--cached", "--whitespace=nowarn", *options,
                *(("--reverse",) if self.reverse else ()), "-", doing="apply a patch",
                git_dir=repository.git_dir, work_tree=self.scratch, stdin=patch,
                # git 2.39 aborts on some patches: a refusal like the others
                ok=(0, 1, 128, -SIGABRT),
            )  # fmt: skip
            if done.status:
                raise _refusal(done.stderr)
            results: Results = dict.fromkeys(before)
            for path, mode, oid in repository.read_index():
                data = oid.encode() if mode == SUBMODULE else repository.read_blob(oid)
                results[path] = File(mode, data)
            return results
        finally:
            remove_tree(self.scratch)


def _touched(results: Results) -> set[bytes]:
    return {path for result in results for path in (result, *parents(result))}


def _stored(repository: ScratchRepository, file: File) -> str:
    return file.data.decode() if file.mode == SUBMODULE else repository.write_blob(file.data)


def _splice_line_ends(data: bytes, hunks: list[Hunk]) -> bytes:
    if b"\r\n" in data:
        hunks = [hunk.with_lines(to_crlf) for hunk in hunks]
    return splice(data, hunks)


def _differences(tree: Tree, results: Results) -> Results:
    return {path: file for path, file in results.items() if file != tree.read(path)}


def _changes(tree: Tree, results: Results) -> list[Change]:
    differ = _differences(tree, results)
    must_fit({path: file for path, file in differ.items() if file}, InvalidPatchError)
    if (obstacle := find_obstacle(tree, differ)) is not None:
        raise PatchConflictError(
            f"cannot apply the patch: {shown_path(obstacle)} already exists in the checkout",
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


def is_within_limits(path: bytes) -> bool:
    parts = path.split(b"/")
    is_long = len(path) > TREE_PATH_LIMIT_BYTES or max(map(len, parts)) > NAME_LIMIT_BYTES
    return len(parts) <= TREE_DEPTH_LIMIT and not is_long


def must_fit(files: Mapping[bytes, File], error: type[MirrordError]) -> None:
    """Refuse names and link targets that a file system does not allow, though git does."""
    for path, file in files.items():
        if not is_within_limits(path):
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


# messages of `git apply`: for paths that lead out of the tree, then for a patch it cannot read
_OUTSIDE = re.compile(r"invalid path|beyond a symbolic link|outside repository")
_INVALID = re.compile(
    r"corrupt (?:binary )?patch|No valid patches|unrecognized (?:input|binary patch)"
    r"|fragment without header|header lacks filename|without full index line"
    r"|inconsistent (?:new |old )?(?:filename|mode)|bad git-diff|invalid mode on line"
)


def _refusal(stderr: str) -> MirrordError:
    lines = [line for line in stderr.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ").removeprefix("fatal: ") for line in lines]
    reason = "; ".join(reasons[:5]) or "git gave no reason"
    if _OUTSIDE.search(stderr):
        return InvalidPatchError(
            f"cannot apply the patch: {reason}", hint="a patch may only name files in the checkout"
        )
    if _INVALID.search(stderr):
        return InvalidPatchError(
            f"cannot read the patch: {reason}",
            hint="make it with `git diff --binary`",
            reasons=reasons[:50],
        )
    return PatchConflictError(
        f"cannot apply the patch: {reason}",
        hint="nothing was changed; `mirrord diff` shows what the checkout has",
        reasons=reasons[:50],
    )
