"""Patches onto a tree: by a fixed order of strategies, all of a patch or nothing.

Plain patches are read and fitted here; what is not plain goes to one `git apply`, which sees an
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

from ...errors import InvalidPatchError, MirrordError, PatchConflictError, PathOutsideCheckoutError
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
from .fit import (
    DIRECTORY,
    UNTRACKED,
    Change,
    File,
    MisfitError,
    Patched,
    Results,
    Splice,
    Tree,
    find_obstacle,
    fit,
    splice,
    splice_fuzzily,
)
from .parse import LIMIT_BYTES, SUBMODULE, SYMLINK, Hunk, NeedsGitError, named_paths, parse

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
        except (MisfitError, NeedsGitError):
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
        counted, bare = recount(patch), unwrap(patch)
        whole = unwrap(to_lf(patch))
        yield FoundStrategy.COUNTS, counted, splice
        yield FoundStrategy.PROSE, bare, splice
        yield FoundStrategy.CRLF, whole, splice
        yield FoundStrategy.CRLF, whole, _splice_line_ends
        yield FoundStrategy.BLANKS, whole, partial(splice, key=strip_blanks)
        yield FoundStrategy.FUZZ, whole, splice_fuzzily

    def _attempt(self, patch: bytes, how: Splice) -> Results | None:
        try:
            return fit(self.tree, parse(patch), reverse=self.reverse, splice=how)
        except MisfitError:
            return None
        except NeedsGitError:
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
            results: Results = dict.fromkeys(before)
            for path, mode, oid in repository.read_index():
                data = oid.encode() if mode == SUBMODULE else repository.read_blob(oid)
                results[path] = File(mode, data)
            return results
        finally:
            remove_tree(self.scratch)


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


def is_within_limits(path: bytes) -> bool:
    parts = path.split(b"/")
    is_long = len(path) > TREE_PATH_LIMIT_BYTES or max(map(len, parts)) > NAME_LIMIT_BYTES
    return len(parts) <= TREE_DEPTH_LIMIT and not is_long


def must_fit(files: Mapping[bytes, File], error: type[MirrordError]) -> None:
    """git takes names of any length and links to anything; a file system does not."""
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


# -- what people and models do to patches, undone --------------------------------------------------
#
# A line of a hunk begins with a blank, a sign or a backslash, or is empty; anything else ends it.
# Nothing is made up: a line is kept as it is, or left out.

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_FILE = re.compile(rb"(?m)^(?:diff --git |--- )")
_INDENTED = re.compile(rb"(?m)^([ \t]+)(?:diff --git |--- )")
_EXTENDED = re.compile(
    rb"(?:old|new) mode |(?:new|deleted) file mode |(?:copy|rename) "
    rb"|(?:dis)?similarity index |index |--- |\+\+\+ "
)
_NEEDS_GIT = re.compile(rb"(?:old|new) mode |(?:new|deleted) file mode |(?:copy|rename) ")
_BINARY = b"GIT binary patch"
_SIGNATURE = re.compile(rb"\d+\.\d+")  # below `-- ` at the end of a mail
_LF_ENDED = re.compile(rb"(?<!\r)\n")


def recount(patch: bytes) -> bytes:
    """Write each hunk's counts anew, from all lines that may be its."""
    return _rewritten(patch, trusts_counts=False, keeps_prose=True)


def unwrap(patch: bytes) -> bytes:
    """Leave out what is no part of a patch, and its indentation; right counts are believed."""
    if not _FILE.search(patch) and (indented := _INDENTED.search(patch)):
        patch = re.sub(rb"(?m)^" + indented[1], b"", patch)
    return _rewritten(patch, trusts_counts=True, keeps_prose=False)


def to_lf(patch: bytes) -> bytes:
    return patch.replace(b"\r\n", b"\n")


def has_crlf_headers(patch: bytes) -> bool:
    """Whether all of a patch has CRLF, and not only a file in it: as GNU patch tells it."""
    return bool(re.search(rb"(?m)^(?:\+\+\+ |@@ -).*\r$", patch))


def to_crlf(line: bytes) -> bytes:
    return _LF_ENDED.sub(b"\r\n", line)


def strip_blanks(line: bytes) -> bytes:
    """A line without the blanks at its end; its newline, or none, stays."""
    return line[:-1].rstrip(b" \t") + b"\n" if line.endswith(b"\n") else line.rstrip(b" \t")


def _rewritten(patch: bytes, *, trusts_counts: bool, keeps_prose: bool) -> bytes:
    lines = patch.removesuffix(b"\n").split(b"\n")
    done: list[bytes] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if header := _HUNK.match(line):
            body = _body(lines, at + 1)
            counted = _counted(body, header) if trusts_counts else None
            done += _hunk(header, counted or _trimmed(body))
            at += 1 + len(counted or body)
        elif line.startswith(b"diff --git "):
            end = at + 1
            while end < len(lines) and _EXTENDED.match(lines[end]):
                end += 1
            done += lines[at:end] if keeps_prose else _needed(lines[at:end])
            at = end
        elif line == _BINARY:
            end = at
            while end < len(lines) and not lines[end].startswith(b"diff --git "):
                end += 1
            done += lines[at:end]
            at = end
        else:
            if keeps_prose or _is_file(lines, at) or (at and _is_file(lines, at - 1)):
                done.append(line)
            at += 1
    return b"\n".join([*done, b""])


def _is_file(lines: list[bytes], at: int) -> bool:
    """Whether a traditional header begins here."""
    starts = (b"--- ", b"+++ ", b"@@ -")
    return all(
        line.startswith(start) for line, start in zip(lines[at : at + 3], starts, strict=False)
    )


def _needed(header: list[bytes]) -> list[bytes]:
    """A git header without what only says that it is one: `--- /dev/null` says more."""
    names = [line for line in header if line.startswith((b"--- ", b"+++ "))]
    return [b"", *names] if names and not any(map(_NEEDS_GIT.match, header)) else header


def _body(lines: list[bytes], at: int) -> list[bytes]:
    """The lines from `at` on that may be of a hunk."""
    end = at
    while end < len(lines) and lines[end][:1] in (b" ", b"+", b"-", b"\\", b"", b"\r"):
        is_signature = lines[end] == b"-- " and _SIGNATURE.match(b"".join(lines[end + 1 : end + 2]))
        if is_signature or (lines[end].startswith(b"--- ") and _is_file(lines, end)):
            break
        end += 1
    return lines[at:end]


def _counted(body: list[bytes], header: re.Match[bytes]) -> list[bytes] | None:
    """As many lines as the header says; None where it is wrong."""
    old, new = (int(header[at]) if header[at] else 1 for at in (2, 4))
    for at, line in enumerate(body):
        if old <= 0 and new <= 0 and not line.startswith(b"\\"):
            return body[:at] if old == new == 0 else None
        old -= not line.startswith((b"+", b"\\"))
        new -= not line.startswith((b"-", b"\\"))
    return body if old == new == 0 else None


def _trimmed(body: list[bytes]) -> list[bytes]:
    """Without the empty lines at its end, which are as likely between two hunks."""
    while body and body[-1] in (b"", b"\r"):
        body = body[:-1]
    return body


def _hunk(header: re.Match[bytes], body: list[bytes]) -> list[bytes]:
    """A hunk with the right counts; nothing where it changes nothing."""
    signs = [line[:1] for line in body]
    if b"+" not in signs and b"-" not in signs:
        return []
    old = sum(sign not in (b"+", b"\\") for sign in signs)
    new = sum(sign not in (b"-", b"\\") for sign in signs)
    numbers = int(header[1]), old, int(header[3]), new
    body = [b" \r" if line == b"\r" else line for line in body]
    return [b"@@ -%d,%d +%d,%d @@" % numbers + header[5], *body]
