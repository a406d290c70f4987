"""The layers of overlay templates: recorded, built and proven.

A layer is `trees/<tree>` (a keyframe: a whole tree) or `trees/<tree>@<base tree>` (a delta: the
difference from another layer's tree), with `layer.json`, `files` and `index` for overlayfs, and the
private manifest. A layer is built under a temporary name, and proven by content before use. Sync;
runs in workers.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import ProofFailedError, full_disk_named
from ..git.objects.repository import CommitInfo, Objects, open_objects, read_commit
from ..git.objects.trees import TreeChange, changes
from ..host.files import open_directory, opened, read_plain, shown_path
from ..host.processes import ActingAs, boot_id
from ..presence import is_dir, iter_below
from ..quoting import decode_name, encode_name
from ..trees.conversions import conversions_for, is_attributes, reconverted
from ..trees.dotgit import index_bytes
from ..trees.manifest import Entries, Manifest, without
from ..trees.reader import TreeReader, parents
from ..trees.scan import hash_tree, prove_files, tree_id
from ..trees.sharing import SharedFiles
from ..trees.sources import unrecorded
from ..trees.tree import materialise, mtime_for, recorded, root_entry, share_entries
from ..trees.writer import TreeWriter

# a read of an overlay looks a name up in each layer; with two more on top a stack has 18
DEPTH_MAX = 16
RECORD = "layer.json"


@dataclass(frozen=True, slots=True)
class Layer:
    """The record of a layer.

    `base` is the tree below a delta; `depth` counts layers down to the keyframe, both included.
    `time` is the commit's. `size_bytes` are the layer's own, `shared_bytes` those of the shared
    files that it had first, `whole_bytes` those of its keyframe.
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
        """The paths that a delta hides; recorded as latin-1, which can hold any bytes."""
        return [encode_name(path) for path in self.removed]


def chain_of(layer: Layer, layers: Mapping[str, Layer]) -> list[Layer]:
    """Return the layer and those below it, top first; KeyError where one is gone."""
    chain = [layer]
    while (base := chain[-1].base) is not None:
        chain.append(layers[base])
    return chain


def blobs_path(trees: Path) -> Path:
    """Return the directory of the files that layers share."""
    return trees.parent / "blobs"


def write_record(directory: Path, layer: Layer) -> None:
    """Write `layer.json`, with the boot in which the layer was proven.

    Nothing is flushed, so a power failure can tear a layer: it is proven again after each boot.
    """
    temporary = directory / f"{RECORD}.new"
    temporary.write_text(json.dumps({**asdict(layer), "boot": boot_id()}), encoding="utf-8")
    temporary.rename(directory / RECORD)


def read_record(directory: Path) -> tuple[Layer, bool] | None:
    """Return the layer of a directory and whether this boot proved it; None if it is torn.

    Raises OSError where it cannot be read.
    """
    try:
        record = json.loads(read_plain(directory / RECORD))
        proven = record.pop("boot") == boot_id()
        layer = Layer(**{**record, "removed": tuple(record["removed"])})
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None
    return (layer, proven) if layer.name == directory.name else None


def proven_at(directory: Path) -> float:
    """Return when a layer was last proven, which writes its record; 0 where it is gone."""
    try:
        return (directory / RECORD).stat().st_mtime
    except FileNotFoundError:
        return 0.0


# -- a stack of layers as one tree, and its proof --------------------------------------------------


def read_manifest(trees: Path, chain: Sequence[Layer]) -> Manifest:
    """Return the manifest of the tree that a chain of layers, top first, shows when mounted.

    Do not change it: it is kept for the next call.
    """
    # distinguishes a layer from one that was built again in its place
    stats = ((trees / layer.name / "manifest").stat() for layer in chain)
    return _read_manifest(trees, tuple(chain), tuple((s.st_ino, s.st_mtime_ns) for s in stats))


# a neighbour's layer, and then its index, need the same ones
@lru_cache(maxsize=4)
def _read_manifest(
    trees: Path, chain: tuple[Layer, ...], written: tuple[tuple[int, int], ...]
) -> Manifest:
    manifest = Manifest.load(trees / chain[0].name / "manifest")
    if len(chain) == 1:
        return manifest
    return _laid_on(_read_manifest(trees, chain[1:], written[1:]), manifest, chain[0].whiteouts)


def _laid_on(below: Manifest, delta: Manifest, removed: Sequence[bytes]) -> Manifest:
    """Return the manifest of a delta over its base's, without the `removed` paths of the base."""
    files = Entries(without(below.files, removed)) if removed else below.files
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
        is_alone = set(iter_below(above)) == {index.parent, index}
        if not is_alone or read_plain(index) != index_bytes(whole):
            raise _unproven("the index", "its bytes changed")
    except OSError as error:
        raise _unproven(f"template layer {layer.name}", f"{error}") from error


def prove_files_of(
    layer: Path, manifest: Manifest, tree: str, below: Manifest | None, removed: Sequence[bytes]
) -> Manifest:
    """Prove that a layer's directory has exactly the files of its manifest, and shows `tree` over
    the one `below`. Returns the manifest of both; raises ProofFailedError.
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
                st = reader.find_stat(path)
                if st is None or st.st_mode != stat.S_IFDIR | 0o755:
                    raise _unproven(shown_path(path), "it is not a directory")
            for path in whiteouts:  # overlayfs: a character device 0/0
                st = reader.find_stat(path)
                if st is None or not stat.S_ISCHR(st.st_mode) or st.st_rdev != 0:
                    raise _unproven(shown_path(path), "its whiteout is missing")
        expected.update(whiteouts)
        expected.update({parent for path in expected for parent in parents(path)})
    if found_tree != tree:
        raise _unproven(f"tree {tree}", f"what was written hashes to {found_tree}")
    with opened(open_directory(files)) as root, TreeReader(root, ActingAs(None)) as reader:
        for path, _ in reader.iter_below(b""):
            if path not in expected:
                raise _unproven(shown_path(path), "it is not in the manifest")
    return whole


def _unproven(subject: str, fact: str) -> ProofFailedError:
    return ProofFailedError(
        f"cannot prove {subject}: {fact}", hint="the next checkout builds it again"
    )


# -- building --------------------------------------------------------------------------------------


def build_layer(
    git_dir: Path, commit: str, trees: Path, temporary: Path, candidates: Sequence[Sequence[Layer]]
) -> Layer:
    """Build and prove the layer of a commit's tree in the new directory `temporary`.

    It becomes a delta on one of the `candidates`, chains in `trees` with the nearest first, where
    the difference is small, else a keyframe. Raises CommitUnservableError, TooLargeError,
    CorruptObjectError, ProofFailedError, DiskFullError.
    """
    with open_objects(git_dir) as objects, full_disk_named(f"a template of {commit[:12]}"):
        info = read_commit(objects, commit)
        temporary.mkdir(mode=0o700)
        shared = SharedFiles(blobs_path(trees))
        on_disk = [chain for chain in candidates if is_dir(trees / chain[0].name)]
        chain = _choose_base(objects, info.tree, on_disk, shared)
        base = chain[0] if chain else None
        below, removed = None, list[bytes]()
        if base is None:
            manifest = materialise(git_dir, info.commit, temporary / "files")
        else:
            below = read_manifest(trees, chain)
            steps = list(changes(objects, base.tree, info.tree))
            hidden, removed = _find_hidden(steps)
            manifest = _write_delta(
                objects, info, temporary / "files", shared, below, steps, hidden
            )
        whole = prove_files_of(temporary, manifest, info.tree, below, removed)
        manifest.save(temporary / "manifest")
        own_bytes, shared_bytes = _weigh(temporary)
        index, above = index_bytes(whole), temporary / "index"
        (above / ".git").mkdir(parents=True)
        (above / ".git" / "index").write_bytes(index)
        # a checkout shows them, so the umask must not count
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
            removed=tuple(decode_name(path) for path in removed),
        )
        write_record(temporary, layer)
        return layer


def _choose_base(
    objects: Objects, tree: str, candidates: Sequence[Sequence[Layer]], shared: SharedFiles
) -> Sequence[Layer]:
    """Return the chain that costs least to build on; empty where a whole tree is better.

    A delta on a keyframe may cost at most half of it, and a fifth less for each layer below: that
    keeps depth for near trees. Each layer, where names are looked up, counts as 64 KiB.
    """
    best: tuple[float, Sequence[Layer]] = math.inf, ()
    for chain in candidates:
        layer = chain[0]
        if layer.depth >= DEPTH_MAX:
            continue
        # overlayfs looks each name up in every layer
        penalty = layer.depth * 64 * 1024
        limit = min(layer.whole_bytes / (2 * 1.2 ** (layer.depth - 1)), best[0] - penalty - 1)
        cost = _find_cost(objects, layer.tree, tree, limit, shared)
        if cost is not None:
            best = cost + penalty, chain
    return best[1]


# what a name costs on ext4 at least, whatever the length of its file
_BLOCK_BYTES = 4096


def _find_cost(
    objects: Objects, old: str, new: str, limit: float, shared: SharedFiles
) -> int | None:
    """Return the bytes of a delta's files that no layer has, and a block for each name; None over
    `limit`.

    A directory takes a block. A link takes none, but about as long as writing one. Whiteouts are
    few.
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


def _find_hidden(steps: Sequence[TreeChange]) -> tuple[list[bytes], list[bytes]]:
    """Return the paths that need a whiteout, and the top-most paths that the new tree lacks.

    Only a name removed from a directory of both trees needs a whiteout: overlayfs does not look
    below a file that replaces a directory.
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
    shared: SharedFiles,
    below: Manifest,
    steps: Sequence[TreeChange],
    hidden: Sequence[bytes],
) -> Manifest:
    """Write changed files, directories and whiteouts into the new directory `files`."""
    new = [step.new for step in steps if step.new]
    kept = below.files.copy()
    for path in {step.path for step in steps if step.old}:
        del kept[path]
    after = conversions_for(objects, kept | {entry.path: unrecorded(entry) for entry in new})
    if any(is_attributes(step.path) for step in steps):
        new += reconverted(objects, below, after, kept)
    entries = {b"": root_entry(info.tree)}
    entries |= {e.path: unrecorded(e) for e in new if e.is_tree or e.is_submodule}
    files.mkdir(mode=0o755)
    with (
        opened(open_directory(files)) as root,
        TreeWriter(root, ActingAs(None), mtime_ns=mtime_for(info.time)) as writer,
    ):

        def make_directories(paths: Iterable[bytes]) -> None:
            above = {parent for path in paths for parent in parents(path)}
            for directory in sorted(above - writer.touched):
                writer.make_directory(directory)

        writer.make_directory(b"")
        make_directories(
            [*(entry.path for entry in new), *(path + b"/" for path in filter(None, entries))]
        )
        plain = [entry for entry in new if entry.path not in entries]
        entries |= share_entries(objects, after, plain, writer, shared)
        manifest = recorded(info, entries, writer)
        make_directories(hidden)
        for path in hidden:
            writer.write_whiteout(path)
    return manifest


def _weigh(layer: Path) -> tuple[int, int]:
    """Return a layer's own bytes on disk, and those of the shared files that it had first."""
    own = shared = 0
    # by descriptors: whole paths would leave less of PATH_MAX to those of the tree
    for _, directories, names, above in os.fwalk(layer):
        for name in (*directories, *names):
            st = os.lstat(name, dir_fd=above)
            if not stat.S_ISREG(st.st_mode) or st.st_nlink == 1:
                own += st.st_blocks * 512
            elif st.st_nlink == 2:  # the layer's own, and the one among the shared files
                shared += st.st_blocks * 512
    return own, shared
