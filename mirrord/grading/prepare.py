"""The preparation of a grade: an agent's tree or a model's patch becomes a layer on the base.

One worker call. Only content is taken over: the paths, blobs and modes that git would record. What
the rules drop is left out, paths of the test patch are restored to the base, and its result comes
on top. Files are written as a checkout of the base commit would, so the agent's attributes do not
affect the tests. A crash leaves a layer without a lease.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cachetools import LRUCache

from .. import errors
from ..checkouts.backend import ChangedPaths
from ..git.modes import REGULAR
from ..git.objects.repository import Objects, open_objects
from ..git.objects.text import Conversions
from ..git.objects.trees import BaseTree, TreeEntry
from ..git.objects.trees import changes as tree_changes
from ..host.files import entries_in, open_beneath, open_directory, opened
from ..host.processes import ActingAs
from ..model import ApplyStrategy, DiffFormat, FoundStrategy
from ..patches.diff import Diff, collect, must_be_short, print_diff
from ..patches.fit import BaseFiles, Change
from ..patches.strategies import Applied, apply_patch
from ..patches.worktree import PatchJob, Worktree, open_worktree
from ..protocol import Steering
from ..quoting import decode_name
from ..templates.store import CONFIG, Filtering
from ..trees.conversions import conversions_for
from ..trees.layer import LayerFile, write_layer
from ..trees.manifest import blob_id
from ..trees.reader import TreeReader, parents
from .context import Context, InstanceTests, imports_of
from .rules import Rule, RuleBook
from .sifting import Drop, Policies, cut, finding, iter_findings, sift


@dataclass(frozen=True, slots=True)
class GradeJob:
    """A grade to prepare: the tree of a mirror, the new `layer`, the tests and the rules.

    `below` are prepared layers, which have files of that tree and others. `rules` are those besides
    the built-in ones. A change is relative to the tree `layered`, if given: that of prepared layers
    which are judged as part of the change, because somebody else wrote them; `left` says so.
    `restored` are other files of tests, which are as the base commit has them.
    """

    mirror: Path
    tree: str
    below: tuple[Path, ...]
    layer: Path
    test_patch: bytes | None
    rules: tuple[Rule, ...]
    policies: Policies
    file_bytes: int
    drops: tuple[Drop, ...] = ()
    layered: str | None = None
    left: tuple[Steering, ...] = ()
    restored: tuple[bytes, ...] = ()

    @property
    def scratch(self) -> Path:
        """A private directory for git, beside the layer; a start removes what is left of it."""
        return self.layer.with_name(f".scratch-{self.layer.name}")


class DiffOrder(NamedTuple):
    """A diff to be printed with a grade; its `spool` is used for a moment only."""

    form: DiffFormat
    spool: Path


class AgentTree(NamedTuple):
    """The change is the difference in a checkout; `changed` lists the paths that may differ.

    With `order` it is also printed, from the same reading of the tree.
    """

    job: PatchJob
    changed: ChangedPaths
    order: DiffOrder | None = None


class ModelPatch(NamedTuple):
    """The change is a patch for the base commit; a long one is in a file."""

    patch: bytes | Path
    strategy: ApplyStrategy = ApplyStrategy.TOLERANT


class Prepared(NamedTuple):
    """A prepared grade. `files` and `size_bytes` are its layer's; `tests` may be None. `kept` are
    the paths of the change that are in it, `new_tests` the files of tests. `notes` say which
    submodules the patches move without their files.
    """

    changed: int
    dropped: list[str]
    steering: list[Steering]
    tests: list[str] | None
    strategy: FoundStrategy | None
    tests_strategy: FoundStrategy | None
    files: int
    size_bytes: int
    kept: list[bytes]
    new_tests: list[bytes]
    notes: list[str]
    diff: Diff | None = None


def prepare(job: GradeJob, source: AgentTree | ModelPatch) -> Prepared:
    """Write the layer of a grade.

    Raises SteeringRefusedError, and what a diff of the tree or the patch raises.
    """
    with ExitStack() as stack:
        objects = stack.enter_context(open_objects(job.mirror))
        base = BaseTree(objects, job.tree)
        tree, changed, printed = None, list[bytes](), None
        strategy, notes = None, list[str]()
        if isinstance(source, AgentTree):
            same = objects if source.job.mirror == job.mirror else None
            tree = stack.enter_context(open_worktree(source.job, same))
            changed = source.changed()
            left_out: list[bytes] = []
            changes = collect(tree, changed, left_out)
            if source.order:
                printed = print_diff(source.job, tree, changes, left_out, *source.order)
                must_be_short(printed.content)
        else:
            changes = []
            if applied := _applied(job, objects, source):
                changes, strategy, notes = applied.changes, applied.strategy, applied.notes
        if job.layered:
            changes = list(_with_layers(objects, base, job.layered, changes))
        tests = _tests_of(job, objects)
        by_path = {change.path: change for change in changes}
        context = Context(
            base, objects.read_base_blob, by_path, tests or InstanceTests(), job.file_bytes
        )
        book = book_of(job.rules)
        left = [*job.left, *(find_leftovers(tree, changed, context, book) if tree else ())]
        sifted = sift(context, book, job.policies, left, job.drops)
        written = [*sifted.changes, *context.tests.changes]
        files = _files(written, _conversions(objects, base, written))
        write_layer(job.layer, partial(_names_in, base, job.below), files)
    return Prepared(
        changed=len(changes),
        dropped=[decode_name(path) for path in sifted.dropped],
        steering=sifted.steering,
        tests=[decode_name(change.path) for change in tests.changes] if tests else None,
        strategy=strategy,
        tests_strategy=context.tests.strategy,
        files=len(written),
        size_bytes=sum(len(change.data) for change in written),
        kept=[change.path for change in sifted.changes],
        new_tests=[change.path for change in context.tests.changes if change.mode is not None],
        notes=list(dict.fromkeys([*notes, *context.tests.notes])),
        diff=printed,
    )


def _names_in(base: BaseTree, below: Sequence[Path], directory: bytes) -> set[bytes]:
    """Return the names in a directory: those that git tracks, and those of the layers below."""
    names = set(base.names_in(directory))
    for layer in below:
        with (
            suppress(OSError),
            opened(open_directory(layer)) as top,
            opened(open_beneath(top, directory or b".")) as child,
        ):
            names |= {name for name, kind in entries_in(child) if kind}  # else a whiteout
    return names


# the same rules for all instances, and those for the runners of some recipes
book_of = lru_cache(maxsize=16)(RuleBook)


def _applied(job: GradeJob, objects: Objects, source: ModelPatch) -> Applied | None:
    """Apply a patch to the base; None for an empty one."""
    patch = source.patch.read_bytes() if isinstance(source.patch, Path) else source.patch
    if not patch.strip():
        return None
    base = BaseFiles(objects, job.layered or job.tree)
    how = source.strategy
    return apply_patch(base, patch, scratch=job.scratch, strategy=how, submodules=objects)


def _with_layers(
    objects: Objects, base: BaseTree, layered: str, changes: Iterable[Change]
) -> Iterator[Change]:
    """Iterate over what layers and changes on top of them do to the base."""
    made: dict[bytes, tuple[int | None, bytes]] = {}
    over = BaseTree(objects, layered)
    for differing in tree_changes(objects, base.oid, layered):
        entry = over.find(differing.path)
        if entry is None:
            made[differing.path] = None, b""
        elif not entry.is_tree:
            made[differing.path] = entry.mode, _content(objects, entry)
    made |= {change.path: (change.mode, change.data) for change in changes}
    for path, (mode, data) in sorted(made.items()):
        old = base.find(path)
        if old is not None and old.is_tree:
            old = None
        before = (old.mode, _content(objects, old)) if old else (None, b"")
        if (mode, data) != before:
            yield Change(path, mode, data, old)


def _content(objects: Objects, entry: TreeEntry) -> bytes:
    return b"" if entry.is_submodule else objects.read_blob(entry.oid)


# By mirror, tree, digest of the patch and restored files: many changes have the same. A worker
# serves a few instances at a time, and a parsed test patch may have megabytes.
_tests_cache: LRUCache[Any, InstanceTests] = LRUCache(16)


def _tests_of(job: GradeJob, objects: Objects) -> InstanceTests | None:
    if job.test_patch is None:
        return None
    key = job.mirror, job.tree, hashlib.sha256(job.test_patch).digest(), job.restored
    if (tests := _tests_cache.get(key)) is not None:
        return tests
    base = BaseFiles(objects, job.tree)
    tolerant = ApplyStrategy.TOLERANT  # eight public sets have rows that git refuses
    try:
        applied = apply_patch(
            base, job.test_patch, scratch=job.scratch, strategy=tolerant, submodules=objects
        )
    except (errors.ConflictError, errors.UsageError) as error:
        raise errors.PatchConflictError(
            f"cannot apply the tests of the instance: {error.message}",
            hint="its test patch does not fit its base commit; try `mirrord rehearse`",
        ) from error
    changes = [*applied.changes, *_restored(objects, job, applied.changes)]
    old = (change.old for change in changes)
    before = set[str]().union(*(imports_of(_content(objects, e)) for e in old if e))
    after = set[str]().union(*(imports_of(change.data) for change in changes))
    imports = frozenset(before), frozenset(after - before)
    tests = _tests_cache[key] = InstanceTests(
        changes, *imports, applied.strategy, tuple(applied.notes)
    )
    return tests


def _restored(objects: Objects, job: GradeJob, changes: Iterable[Change]) -> Iterator[Change]:
    """Iterate over the restored files that the test patch does not change."""
    base, changed = BaseTree(objects, job.tree), {change.path for change in changes}
    for path in job.restored:
        entry = base.find(path)
        if path not in changed and entry and not entry.is_tree and not entry.is_submodule:
            yield Change(path, entry.mode, objects.read_blob(entry.oid), entry)


def _conversions(objects: Objects, base: BaseTree, changes: Iterable[Change]) -> Conversions:
    """Return the base commit's conversions, by its attribute files on the way to the changes."""
    directories = {b"", *(above for change in changes for above in parents(change.path))}
    places = (above + b"/.gitattributes" if above else b".gitattributes" for above in directories)
    return conversions_for(objects, filter(None, map(base.find, places)))


def _files(changes: Iterable[Change], conversions: Conversions) -> Iterator[LayerFile]:
    """Iterate over changes with the bytes that a checkout has."""
    for change in changes:
        data = change.data
        is_file = change.mode is not None and stat.S_ISREG(change.mode)
        if is_file and (conversion := conversions.find(change.path)):
            data = conversion.smudge(data, blob_id(data).hex())
        yield change.path, change.mode, data


# -- leftovers: files of an agent's tree that are in no change -------------------------------------
#
# Ignored files, special files and `.git` do not reach a grade. Those that would steer tests in the
# agent's own tree are reported, because they show the attempt. They are read as the tree's owner,
# up to a bound; what the owner may not read is skipped.

LOOKED_AT = 5_000
_LEFT_NAMED = 3  # findings of one rule: an ignored directory may hold thousands
_CONFIG_BYTES = 64 * 1024
# settings by which git runs a program, or reads files or URLs that the tree does not show
_SETTINGS = re.compile(
    rb"^[ \t]*(?:\[[ \t]*(?:filter|include|includeif|alias|diff|merge|url|credential)\b"
    rb"|(?:hookspath|fsmonitor|attributesfile|excludesfile|sshcommand|worktree|gitproxy|pager"
    rb"|editor|external|program)[ \t]*=)",
    re.MULTILINE | re.IGNORECASE,
)


def find_leftovers(
    tree: Worktree, changed: Iterable[bytes], context: Context, book: RuleBook
) -> list[Steering]:
    """Return the findings outside of the change; `changed` are all paths that may differ."""
    with tree.owner:
        in_git = [*_in_git_directory(tree.reader, tree.owner, book)]
        files = list(islice(_iter_files(tree, changed), LOOKED_AT))
    seen: dict[tuple[str, str], Steering] = {}
    for path, mode in files:  # as the daemon's user, because the owner may not read the mirror
        for left in _judged(path, mode, context, book):
            seen[left.rule, left.path] = left
    return [*in_git, *cut(seen.values(), _LEFT_NAMED)]


def _iter_files(tree: Worktree, changed: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Iterate over files at and below each changed path, with `st_mode`."""
    for top in changed:
        if mode := tree.modes.get(top):
            yield top, mode
            continue
        with suppress(PermissionError, errors.CheckoutBusyError, errors.TooLargeError):
            for path, kind in tree.reader.iter_below(top, lambda _path, _error: None):
                if kind == stat.S_IFDIR:
                    continue
                if mode := tree.modes.get(path):
                    yield path, mode
                elif st := tree.reader.find_stat(path):
                    yield path, st.st_mode


def _judged(path: bytes, mode: int, context: Context, book: RuleBook) -> Iterator[Steering]:
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        yield finding(book.named("special-file"), path, "left", "a pipe, socket or device")
        return
    if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
        yield finding(book.named("special-file"), path, "left", "set-id bits")
    parts = path.split(b"/")
    if b".git" in parts:
        nested = b"/".join(parts[: parts.index(b".git") + 1])
        yield finding(book.named("git-directory"), nested, "left", "a repository in the tree")
    elif path not in context.changes and context.base.find(path) is None:
        for rule, detail in iter_findings(book, Change(path, REGULAR, b"", None), context):
            yield finding(rule, path, "left", detail or "ignored")


def _in_git_directory(reader: TreeReader, owner: ActingAs, book: RuleBook) -> Iterator[Steering]:
    """Find settings in `.git` that git would obey, run by anyone in the agent's tree."""
    rule = book.named("git-directory")
    st = reader.find_stat(b".git")
    if st is None or not stat.S_ISDIR(st.st_mode):
        yield finding(rule, b".git", "left", "replaced" if st else "removed")
        return
    with suppress(OSError, errors.CheckoutBusyError, errors.TooLargeError):
        hooks = reader.find_stat(b".git/hooks")
        for name in reader.names_in(b".git/hooks") if hooks and stat.S_ISDIR(hooks.st_mode) else ():
            # `git init` copies samples, which git does not run
            if not name.endswith(b".sample"):
                yield finding(rule, b".git/hooks/" + name, "left", "a hook")
    for path in (b".git/info/attributes", b".git/info/exclude"):
        lines = _read(reader, owner, path).splitlines()
        if any(line.strip() and not line.startswith(b"#") for line in lines):
            yield finding(rule, path, "left", "has rules")
    config = _read(reader, owner, b".git/config")
    for filtering in Filtering:
        config = config.replace(filtering.config, b"")
    if config != CONFIG and (setting := _SETTINGS.search(config)):
        key = setting[0].decode(errors="replace").strip(" \t[=")
        yield finding(rule, b".git/config", "left", f"sets {key}")


def _read(reader: TreeReader, owner: ActingAs, path: bytes) -> bytes:
    """Return the beginning of a file; empty if it cannot be read."""
    with suppress(OSError, errors.CheckoutBusyError):
        directory, name = reader.locate(path)
        with opened(owner.open_regular(directory, name)) as file:
            return os.pread(file, _CONFIG_BYTES, 0)
    return b""
