"""The layers of overlay templates: recorded, built and proven.

A layer is `trees/<tree>` (a keyframe: a whole tree) or `trees/<tree>@<base tree>` (a delta: what
differs from another layer's tree), with `layer.json`, `files` and `index` for overlayfs, and the
private manifest. A delta's `files` hold the changed files, and a whiteout (character device 0/0)
for each name to hide. A layer is built under a temporary name, and proven by content before anybody
gets it. Sync; runs in workers.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from ...errors import ProofFailedError
from ...git.objects.repository import CommitInfo, Objects, open_objects, read_commit
from ...git.objects.trees import TreeChange, changes
from ...host.files import full_disk_named, open_directory, opened, shown_path
from ...host.processes import ActingAs, boot_id
from ..files import tree as worktree
from ..files.dotgit import index_bytes
from ..files.manifest import Entries, Manifest
from ..files.reader import TreeReader, iter_files, parents
from ..files.scan import hash_tree, prove_files, tree_id
from ..files.tree import Blobs
from ..files.writer import TreeWriter

DEPTH_MAX = 16
PER_DEPTH = 2
RECORD = "layer.json"
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Layer:
    """`base` is the tree that a delta lies on; `depth` counts layers down to the keyframe, itself
    included. `time` is the commit's. `size_bytes` are the layer's own, `shared_bytes` those of the
    shared files that it was the first to have, `whole_bytes` those of its keyframe.
    """

    tree: str
    base: str | None
    commit: str
    time: int
    depth: int
    size_bytes: int
    shared_bytes: int
    whole_bytes: int
    removed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.tree}@{self.base}" if self.base else self.tree

    @property
    def whiteouts(self) -> list[bytes]:
        """The paths that a delta hides; recorded as latin-1 text, which holds any bytes."""
        return [path.encode("latin-1") for path in self.removed]


def chain_of(layer: Layer, layers: Mapping[str, Layer]) -> list[Layer]:
    """The layer and those below it, top first; KeyError where one is gone."""
    chain = [layer]
    while (base := chain[-1].base) is not None:
        chain.append(layers[base])
    return chain


def blobs_path(trees: Path) -> Path:
    """The files that layers share."""
    return trees.parent / "blobs"


def write_record(directory: Path, layer: Layer) -> None:
    """Write `layer.json`, with the boot in which the layer was proven.

    Nothing is flushed, so a power failure may tear a layer: after a boot it is proven again.
    """
    temporary = directory / f"{RECORD}.new"
    temporary.write_text(json.dumps({**asdict(layer), "boot": boot_id()}), encoding="utf-8")
    temporary.rename(directory / RECORD)


def read_record(directory: Path) -> tuple[Layer, bool] | None:
    """The layer of a directory, and whether it was proven in this boot; None without a record."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        proven = record.pop("boot") == boot_id()
        layer = Layer(**{**record, "removed": tuple(record["removed"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (layer, proven) if layer.name == directory.name else None


# -- a stack of layers as one tree, and its proof --------------------------------------------------


def read_manifest(trees: Path, chain: Sequence[Layer]) -> Manifest:
    """The manifest of the tree that a chain of layers, top first, shows when mounted.

    Do not change it: it is kept for the next call.
    """
    # tells a layer from one that was built again in its place
    found = ((trees / layer.name / "manifest").stat() for layer in chain)
    return _read_manifest(trees, tuple(chain), tuple((s.st_ino, s.st_mtime_ns) for s in found))


@lru_cache(maxsize=4)
def _read_manifest(
    trees: Path, chain: tuple[Layer, ...], written: tuple[tuple[int, int], ...]
) -> Manifest:
    manifest = Manifest.load(trees / chain[0].name / "manifest")
    if len(chain) == 1:
        return manifest
    return _laid_on(_read_manifest(trees, chain[1:], written[1:]), manifest, chain[0].whiteouts)


def _laid_on(below: Manifest, delta: Manifest, removed: Sequence[bytes]) -> Manifest:
    """The manifest of a delta over that of its base, without the `removed` paths of that."""
    files, gone = below.files, set(removed)
    if gone:
        inside = tuple(path + b"/" for path in gone)
        files = Entries(
            {
                path: entry
                for path, entry in files.items()
                if path not in gone and not path.startswith(inside)
            }
        )
    return Manifest(delta.commit, delta.tree, delta.recorded_ns, files | delta.files)


def verify_layer(trees: Path, chain: Sequence[Layer]) -> None:
    """Read the top layer of a chain and compare it with its record; raises ProofFailedError."""
    layer, directory = chain[0], trees / chain[0].name
    try:
        manifest = Manifest.load(directory / "manifest")
        below = read_manifest(trees, chain[1:]) if layer.base else None
        whole = prove_files_of(directory, manifest, layer.tree, below, layer.whiteouts)
        above = directory / "index"
        index = above / ".git" / "index"
        is_alone = set(above.rglob("*")) == {index.parent, index}
        if not is_alone or index.read_bytes() != index_bytes(whole):
            raise _unproven("the index", "its bytes changed")
    except OSError as error:
        raise _unproven(f"template layer {layer.name}", f"{error}") from error


def prove_files_of(
    layer: Path, manifest: Manifest, tree: str, below: Manifest | None, removed: Sequence[bytes]
) -> Manifest:
    """Prove that a layer's directory has what its manifest says and nothing else, and that it shows
    `tree` on what is `below`; answers the manifest of both. Raises ProofFailedError.
    """
    files, expected = layer / "files", set(manifest.files)
    if below is None:
        whole, found_tree = manifest, hash_tree(files, manifest)
    else:
        whole = _laid_on(below, manifest, removed)
        found_tree = tree_id(whole)
        directories = [path for path, entry in manifest.files.items() if entry.is_directory]
        whiteouts = [path for path in removed if path not in expected]
        prove_files(files, manifest.owner, manifest.files, expected.difference(directories))
        with opened(open_directory(files)) as root, TreeReader(root, ActingAs(None)) as reader:
            for path in directories:
                found = reader.find_stat(path)
                if found is None or found.st_mode != stat.S_IFDIR | 0o755:
                    raise _unproven(shown_path(path), "it is no directory")
            for path in whiteouts:  # overlayfs: a character device 0/0
                found = reader.find_stat(path)
                if found is None or not stat.S_ISCHR(found.st_mode) or found.st_rdev != 0:
                    raise _unproven(shown_path(path), "its whiteout is missing")
        expected.update(whiteouts)
        expected.update({parent for path in expected for parent in parents(path)})
    if found_tree != tree:
        raise _unproven(f"tree {tree}", f"what was written hashes to {found_tree}")
    for name in os.listdir(os.fsencode(files)):
        for path in iter_files(files, name):
            if path not in expected:
                raise _unproven(shown_path(path), "it does not belong there")
    return whole


def _unproven(subject: str, fact: str) -> ProofFailedError:
    return ProofFailedError(f"cannot prove {subject}: {fact}", hint="it will be built again")


# -- building --------------------------------------------------------------------------------------


def build_layer(
    git_dir: Path, commit: str, trees: Path, temporary: Path, known: Sequence[Layer]
) -> Layer:
    """Build and prove the layer of a commit's tree in the directory `temporary`: on one of the
    `known` layers that are still in `trees` when the difference is small, else whole.

    Raises CommitUnservableError, TreeTooLargeError, CorruptObjectError, ProofFailedError,
    DiskFullError.
    """
    with open_objects(git_dir) as objects, full_disk_named(f"a template of {commit[:12]}"):
        info = read_commit(objects, commit)
        temporary.mkdir(mode=0o700)
        there = [layer for layer in known if (trees / layer.name).is_dir()]
        shared = Blobs(blobs_path(trees))
        base = _choose_base(objects, info, there, shared)
        below, removed = None, list[bytes]()
        if base is None:
            manifest = worktree.materialise(git_dir, info.commit, temporary / "files")
        else:
            below = read_manifest(trees, chain_of(base, {layer.tree: layer for layer in known}))
            steps = list(changes(objects, base.tree, info.tree))
            hidden, removed = _gone(steps)
            manifest = _write_delta(
                objects, info, temporary / "files", shared, below, steps, hidden
            )
        whole = prove_files_of(temporary, manifest, info.tree, below, removed)
        manifest.save(temporary / "manifest")
        own_bytes, shared_bytes = _weigh(temporary)
        index, above = index_bytes(whole), temporary / "index"
        (above / ".git").mkdir(parents=True)
        (above / ".git" / "index").write_bytes(index)
        for path, mode in ((above, 0o755), (above / ".git", 0o755), (above / ".git/index", 0o644)):
            path.chmod(mode)
        layer = Layer(
            tree=info.tree,
            base=base.tree if base else None,
            commit=info.commit,
            time=info.time,
            depth=base.depth + 1 if base else 1,
            size_bytes=own_bytes + len(index),
            shared_bytes=shared_bytes if base else 0,
            whole_bytes=base.whole_bytes if base else own_bytes,
            removed=tuple(path.decode("latin-1") for path in removed),
        )
        write_record(temporary, layer)
        return layer


def _choose_base(
    objects: Objects, info: CommitInfo, known: Sequence[Layer], shared: Blobs
) -> Layer | None:
    """The layer that costs least to build on, of the few nearest in time of each depth; None where
    a whole tree is better.

    A delta on a whole tree may be at most half of it, and a fifth less with each layer that it lies
    on: there is room below for near trees, and wide steps start high. One more layer to look names
    up in costs as much as 64 KiB.
    """
    best: tuple[int, Layer] | None = None
    seen: Counter[int] = Counter()
    for layer in sorted(known, key=lambda layer: abs(layer.time - info.time)):
        if layer.depth >= DEPTH_MAX or seen[layer.depth] >= PER_DEPTH:
            continue
        seen[layer.depth] += 1
        penalty = layer.depth * 64 * 1024
        limit = int(layer.whole_bytes / (2 * 1.2 ** (layer.depth - 1)))
        if best is not None:
            limit = min(limit, best[0] - penalty - 1)
        cost = _find_cost(objects, layer.tree, info.tree, limit, shared)
        if cost is not None:
            best = cost + penalty, layer
    return best[1] if best else None


def _find_cost(objects: Objects, old: str, new: str, limit: int, shared: Blobs) -> int | None:
    """The disk space of the files of a delta that no layer has, and a block for each name; None
    over `limit`.

    A directory takes a block. Another link to a shared file takes none, but about the time in which
    one is written; whiteouts are few.
    """
    total = 0
    for entry in (step.new for step in changes(objects, old, new) if step.new):
        total += _BLOCK_BYTES
        is_file = not entry.is_tree and not entry.is_submodule
        if is_file and not shared.has(entry.oid, executable=entry.is_executable):
            total += objects.blob_size(entry.oid)
        if total > limit:
            return None
    return total


def _gone(steps: Sequence[TreeChange]) -> tuple[list[bytes], list[bytes]]:
    """The paths that a delta hides by whiteouts, and the top-most paths that its tree lacks.

    Only a name that vanishes from a directory of both trees needs a whiteout: below a file that
    replaces a directory overlayfs looks no further.
    """
    kept, replaced = {b""}, []
    for step in steps:
        if step.old and step.new and step.old.is_tree:
            if step.new.is_tree or step.new.is_submodule:
                kept.add(step.path)
            else:
                replaced.append(step.path)
    hidden = [s.path for s in steps if s.new is None and s.path.rpartition(b"/")[0] in kept]
    return hidden, sorted({*hidden, *replaced})


def _write_delta(
    objects: Objects,
    info: CommitInfo,
    files: Path,
    shared: Blobs,
    below: Manifest,
    steps: Sequence[TreeChange],
    hidden: Sequence[bytes],
) -> Manifest:
    """Write changed files, directories and whiteouts into the new directory `files`."""
    new = [step.new for step in steps if step.new]
    kept = below.files.copy()
    for path in {step.path for step in steps if step.old}:
        del kept[path]
    after = worktree.conversions_for(
        objects, kept | {entry.path: worktree.unrecorded(entry) for entry in new}
    )
    if any(worktree.is_attributes(step.path) for step in steps):
        new += worktree.reconverted(objects, below, after, kept)
    entries = {b"": worktree.root_entry(info.tree)}
    entries |= {e.path: worktree.unrecorded(e) for e in new if e.is_tree or e.is_submodule}
    files.mkdir(mode=0o755)
    with (
        opened(open_directory(files)) as root,
        TreeWriter(root, ActingAs(None), mtime_ns=worktree.mtime_for(info.time)) as writer,
    ):

        def make_directories(paths: Iterable[bytes]) -> None:
            above = {each for path in paths for each in parents(path)}
            for directory in sorted(above - writer.touched):
                writer.make_directory(directory)

        writer.make_directory(b"")
        make_directories(
            [*(entry.path for entry in new), *(path + b"/" for path in filter(None, entries))]
        )
        plain = [entry for entry in new if entry.path not in entries]
        entries |= worktree.share_entries(objects, after, plain, writer, shared)
        manifest = worktree.recorded(info, entries, writer)
        make_directories(hidden)
        for path in hidden:
            writer.write_whiteout(path)
    return manifest


def _weigh(layer: Path) -> tuple[int, int]:
    """A layer's own bytes on disk, and those of files that it is the first to share."""
    own = shared = 0
    for above, directories, names in os.walk(layer):
        for name in (*directories, *names):
            found = os.lstat(os.path.join(above, name))
            if not stat.S_ISREG(found.st_mode) or found.st_nlink == 1:
                own += found.st_blocks * 512
            elif found.st_nlink == 2:  # ours, and that among the shared files
                shared += found.st_blocks * 512
    return own, shared
