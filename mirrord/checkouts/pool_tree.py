"""A pooled tree: made, made clean, moved to another commit by what differs. Runs in workers.

The manifest beside the tree always describes an earlier clean state, and is replaced last: a killed
call can be made again. Where the manifest or the tree's top is unusable, a new tree is written.
"""

import os
import stat
import time
from collections.abc import Iterator, MutableMapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckoutBusyError, DiskFullError, ProofFailedError
from ..host.files import full_disk_named, open_directory, opened
from ..host.processes import ActingAs, Owner
from ..host.trash import TrashDirectory, remove_tree
from ..protocol import Proof
from .backend import CopyRule, Taken, must_prove
from .copying import HIDDEN, Piece, Pieces, Where, copy_layer, hidden_by
from .files import dotgit
from .files.manifest import DIRECTORY, Entry, Manifest, clock_ns
from .files.reader import TreeReader, open_top, parents
from .files.scan import ScanResult, examine, hash_tree, is_control, prove_directories, scan
from .files.tree import materialise, move, must_fit_from, repair
from .leases import Directories
from .snapshots import lay, with_layers

_ROUNDS = 3


class PoolPaths(NamedTuple):
    """`store` is the sealed `.git`; None links to the mirror. The caller removes `trash`, where
    everything goes that is taken away. `below` are prepared layers, the lowest first, that are laid
    on the clean tree, which is what the manifest describes; `layer` is laid on that.
    """

    directory: Path
    private: Path
    mirror: Path
    store: Path | None
    head: str
    owner: tuple[int, int]
    trash: Path
    layer: Path | None = None
    below: tuple[Path, ...] = ()

    @property
    def tree(self) -> Path:
        return self.directory / "tree"

    @property
    def manifest(self) -> Path:
        return self.private / "manifest"

    @property
    def base_manifest(self) -> Path:
        return base_manifest(self.private, has_layers=bool(self.below))


def base_manifest(private: Path, *, has_layers: bool) -> Path:
    """The record that changes are relative to: of the clean tree, or with layers laid on it."""
    return private / ("manifest-laid" if has_layers else "manifest")


def make(
    paths: PoolPaths, commit: str, tree: str, warm: Directories | None
) -> tuple[str, dict[str, float]]:
    """Make the checkout, of the kept tree in `warm` if there is one; answers the verified tree and
    seconds per step.
    """
    timings: dict[str, float] = {}
    with full_disk_named(f"checkout {paths.directory.name}"):
        if warm is not None:
            # FileNotFoundError: it is gone. CheckoutBusyError: it was mounted in since its release.
            with suppress(FileNotFoundError, CheckoutBusyError):
                with _timed(timings, "take"):
                    _take(warm, paths)
                with _timed(timings, "reset"):
                    return make_clean(paths, commit, tree).tree, timings
        with closing(TrashDirectory(paths.trash)) as trash:
            with _timed(timings, "tree"):
                manifest = _write_tree(paths, commit, tree, trash)
            with _timed(timings, "git"):
                store = dotgit.read_store(paths.store) if paths.store else None
                manifest = _bring(paths, store, commit, manifest, ScanResult(), trash)
        manifest.save(paths.manifest)
        _lay(paths, manifest)
    return manifest.tree, timings


def make_clean(paths: PoolPaths, commit: str, tree: str) -> Proof:
    """Bring the tree to `commit`, whatever was done to it, and prove it."""
    with full_disk_named(f"checkout {paths.directory.name}"):
        store = dotgit.read_store(paths.store) if paths.store else None
        before = _find_manifest(paths)
        if before and before.commit != commit:
            must_fit_from(paths.mirror, before, tree)
        found = scan(paths.tree, before) if before else ScanResult()
        try:
            with closing(TrashDirectory(paths.trash)) as trash, full_disk_named("the tree"):
                manifest = before or _write_tree(paths, commit, tree, trash)
                after = _bring(paths, store, commit, manifest, found, trash)
        except DiskFullError:  # once more, without keeping the removed files until the end
            remove_tree(paths.trash)
            trash = TrashDirectory(paths.trash, has_room=False)
            manifest = before or _write_tree(paths, commit, tree, trash)
            after = _bring(paths, store, commit, manifest, found, trash)
        if after is not before:
            after.save(paths.manifest)
        _lay(paths, after)
    method = "written anew, read back"
    if before:
        method = "stat against the private manifest, content where stat proves nothing"
        if before.commit != commit:
            method += ", moved by the tree difference"
    restored = [path for path in (*found.modified, *found.missing) if path and not is_control(path)]
    proof = Proof(
        head=paths.head,
        tree=after.tree,
        index=after.index,
        control_files=sum(not entry.is_directory for entry in after.control.values()),
        files_checked=found.looked_at,
        files_restored=len(restored),
        files_removed=sum(not is_control(path) for path in found.extra),
        refs=store.refs if store else [],
        packs=store.pack_names if store else [],
        method=method,
    )
    return must_prove(proof, head=paths.head, tree=tree)


def changed_paths(tree: Path, manifest_path: Path) -> list[bytes]:
    """The paths that may differ from the clean state; all, where the tree's top was replaced."""
    manifest = Manifest.load(manifest_path)
    if not has_top(tree, manifest.owner):
        return sorted(filter(None, manifest.files))
    changed = {path for path in scan(tree, manifest).in_tree() if path}
    directories = [at for at in changed if at in manifest.files and manifest.files[at].is_directory]
    if directories:
        # one that is another user's now counts as changed, with what it had: look for what is new
        with (
            opened(open_top(tree)) as root,
            ActingAs(manifest.owner) as owner,
            TreeReader(root, owner) as reader,
        ):
            for directory in sorted(directories):
                found = reader.find_stat(directory)
                if found is not None and stat.S_ISDIR(found.st_mode):
                    with suppress(PermissionError, FileNotFoundError):
                        inside = (directory + b"/" + name for name in reader.names_in(directory))
                        changed |= {path for path in inside if path not in manifest.files}
    return sorted(changed)


def _bring(
    paths: PoolPaths,
    store: dotgit.DotGit | None,
    commit: str,
    before: Manifest,
    found: ScanResult,
    trash: TrashDirectory,
) -> Manifest:
    """Undo the changes that were found and move on; look again at everything that was touched, and
    so on until nothing differs. Answers `before` itself where there was nothing to do or record.
    """
    manifest, settled_ns = _with_proven(before, found), max(before.recorded_ns, found.began_ns)
    for turn in range(_ROUNDS):
        begun = manifest
        if found.in_tree():
            manifest = repair(paths.mirror, manifest, found, paths.tree, trash)
        if manifest.commit != commit:
            old = manifest.files
            manifest = move(paths.mirror, manifest, commit, paths.tree, trash)
            new = {path: manifest.files[path] for path in manifest.files.recorded_since(old)}
            directories = [path for path, entry in new.items() if entry.mode == DIRECTORY]
            prove_directories(
                manifest,
                [each for each in directories if each not in old or old[each].oid != new[each].oid],
            )
        if store is None:
            index = dotgit.index_bytes(manifest)
            manifest = dotgit.link_worktree(paths.directory, paths.mirror, manifest, index, trash)
        elif manifest is begun and dotgit.has_index(manifest, found):
            manifest = dotgit.write_store(paths.tree, manifest, found, store, None, trash)
        else:
            index = dotgit.index_bytes(manifest)
            manifest = dotgit.write_store(paths.tree, manifest, found, store, index, trash)
        control = [
            path for path, entry in manifest.control.items() if begun.control.get(path) is not entry
        ]
        touched = manifest.files.recorded_since(begun.files) + control
        left = examine(paths.tree, manifest, touched)
        if turn == 0 and found.youngest_ns < found.began_ns - before.slack_ns:
            settled_ns = left.began_ns  # a change since the scan read its files would show
        if left.is_empty:
            if manifest is before and not found.unsettled:
                return manifest
            return manifest.settled(settled_ns)
        found, manifest = left, _with_proven(manifest, left)
    dirty = [*found.modified, *found.missing, *found.extra][:10]
    raise ProofFailedError(
        f"cannot prove the checkout clean: something still writes to it after {_ROUNDS} rounds",
        hint="end the processes that run in the checkout before the reset; it was removed,"
        " ask for another",
        paths=[path.decode(errors="backslashreplace") for path in dirty],
    )


def _with_proven(manifest: Manifest, found: ScanResult) -> Manifest:
    """The record with the stat of the directories that only look changed."""
    if not found.proven:
        return manifest
    files, control = manifest.files.copy(), dict(manifest.control)
    for path, seen in found.proven.items():
        where: MutableMapping[bytes, Entry] = control if is_control(path) else files
        where[path] = where[path].with_stat(seen)
    return replace(manifest, files=files, control=control)


def _lay(paths: PoolPaths, clean: Manifest) -> None:
    """Lay the layers of a checkout on its clean tree, and record what the lower ones made of it."""
    with closing(TrashDirectory(paths.trash)) as trash:
        for layer in paths.below:
            lay(layer, paths.tree, paths.owner, trash)
        if paths.below:
            with_layers(clean, paths.below, paths.tree).save(paths.base_manifest)
        if paths.layer is not None:
            lay(paths.layer, paths.tree, paths.owner, trash)


def _write_tree(paths: PoolPaths, commit: str, tree: str, trash: TrashDirectory) -> Manifest:
    """Write the whole tree into a new directory, and read it back."""
    with opened(open_directory(paths.directory)) as above:
        trash.discard(above, b"tree")
    manifest = materialise(paths.mirror, commit, paths.tree, owner=paths.owner)
    written_ns = clock_ns()
    seen = hash_tree(paths.tree, manifest)
    if seen != tree:
        raise ProofFailedError(
            f"cannot prove tree {tree}: what was written is {seen}",
            hint="audit the mirror",
            wanted=tree,
            seen=seen,
        )
    return manifest.settled(written_ns)


def _find_manifest(paths: PoolPaths) -> Manifest | None:
    """The manifest, if it and the top of the tree can be used."""
    if not has_top(paths.tree, paths.owner):
        return None
    try:
        manifest = Manifest.load(paths.manifest)
    except (FileNotFoundError, ProofFailedError):
        return None
    return manifest if manifest.owner == paths.owner else None


def has_top(tree: Path, owner: Owner) -> bool:
    """Whether the tree's top is a directory of its owner's, not a link or anything else."""
    try:
        with opened(open_top(tree)) as top:
            found = os.fstat(top)
    except OSError:
        return False
    return (found.st_uid, found.st_gid) == owner


def _take(warm: Directories, paths: PoolPaths) -> None:
    """Move a kept tree and its manifest into a new checkout."""
    try:
        (warm.private / "manifest").rename(paths.manifest)
        (warm.public / "tree").rename(paths.tree)
    finally:
        for directory in warm:
            with suppress(OSError, CheckoutBusyError):
                remove_tree(directory)


@contextmanager
def _timed(timings: dict[str, float], step: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        timings[step] = round(time.perf_counter() - began, 6)


# -- copied for a fork or a snapshot ---------------------------------------------------------------


def copy_checkout(paths: PoolPaths, directory: Path, earlier: Path | None, what: CopyRule) -> Taken:
    """Write into the new `directory` what a checkout has over its clean state; `earlier` and `what`
    are as for `copy_layer`.

    Of a linked one without its `.git`, which is a part of the mirror.
    """
    if not has_top(paths.tree, paths.owner):
        raise CheckoutBusyError(
            "cannot copy the checkout: its top directory was replaced", hint="reset the checkout"
        )
    manifest, acting = Manifest.load(paths.base_manifest), ActingAs(paths.owner)
    is_linked = paths.store is None

    def survey() -> Pieces:
        found = scan(paths.tree, manifest)
        pieces: Pieces = {}
        with acting:
            _add_known(reader, manifest, {*found.modified, *found.missing} - {b""}, pieces)
            for path in found.extra:
                _add_whole(reader, path, pieces)
            for above in {above for path in pieces for above in parents(path)} - pieces.keys():
                if (seen := reader.find_stat(above)) is not None:
                    pieces[above] = Piece.of(Where.CLIENT, seen)
        if is_linked:
            return {path: piece for path, piece in pieces.items() if not is_control(path)}
        return pieces

    with opened(open_top(paths.tree)) as root, TreeReader(root, acting) as reader:
        taken = copy_layer(directory, survey, reader, acting, what, earlier=earlier)
    return taken._replace(git=taken.git and not is_linked)


def _add_known(
    reader: TreeReader, manifest: Manifest, differing: set[bytes], pieces: Pieces
) -> None:
    """Add what became of paths that the manifest has; all that is lost below one with it."""
    entries = manifest.files | manifest.control
    lost = set[bytes]()
    for path in sorted(differing):
        if path.rpartition(b"/")[0] in lost:
            lost.add(path)
            continue
        seen = reader.find_stat(path)
        if seen is None:
            pieces[path] = HIDDEN
        elif stat.S_IFMT(seen.st_mode) in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            pieces[path] = Piece.of(Where.CLIENT, seen)
        else:
            pieces[path] = hidden_by(seen)
        if seen is None or not stat.S_ISDIR(seen.st_mode):
            lost.add(path)
            continue
        for name in reader.names_in(path):
            if path + b"/" + name not in entries:
                _add_whole(reader, path + b"/" + name, pieces)


def _add_whole(reader: TreeReader, path: bytes, pieces: Pieces) -> None:
    for below, seen in reader.iter_stats_below(path):
        pieces[below] = Piece.of(Where.CLIENT, seen)
