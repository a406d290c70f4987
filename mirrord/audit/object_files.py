"""Find damaged files in a mirror's object store, by their own content alone.

Anything but a plain file or directory is found first and never opened: git fails at it, and a named
pipe blocks its reader for ever. Packs, indexes, reverse indexes, bitmaps, multi-pack indexes and
commit-graphs end with the checksum of the bytes before it. Reads only, in a worker.
"""

import errno
import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git import packs
from ..git.command import run_git_sync
from ..host.files import NOT_PLAIN, open_plain, read_plain
from ..model import AuditLevel, FindingKind
from ..presence import exists, matching
from .defects import CHECKSUM_MISMATCH, TIMEOUT, BadFile, Defect, FileKind
from .layout import LOOSE_NAME, find_strange, no_file, sorted_entries


def find_bad_files(git_dir: Path, level: AuditLevel) -> list[BadFile]:
    """Find bad files below `objects/`, and planted ones.

    `quick` reads both ends of packs, `closure` hashes small files, `content` hashes all files.
    """

    def find() -> set[BadFile]:
        objects = git_dir / "objects"
        strange = set(find_strange(git_dir))
        unopened = {git_dir / bad.path for bad in strange}
        if objects not in unopened:
            strange.update(_packs(objects / "pack", level, unopened))
            if level is not AuditLevel.QUICK:
                strange.update(_derived(objects, unopened), _loose(objects, level, unopened))
        return strange

    strange = find()
    # bad files are read twice, because files come and go while the mirror is packed
    return sorted(strange & find()) if strange else []


def _unreadable(error: OSError) -> str:
    """Explain why a file cannot be read; raise an error that is not the file's."""
    # others, such as EMFILE and ENOMEM, are of this process and say nothing about the file
    if error.errno not in {errno.EIO, errno.EACCES, errno.EPERM, NOT_PLAIN}:
        raise error
    return f"it cannot be read: {error.strerror}"


def _failing(is_sound: Callable[..., bool], *args: object, reason: str) -> str | None:
    """Return `reason` for a bad file, or why it is unreadable; None for a good or a deleted one."""
    try:
        return None if is_sound(*args) else reason
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return _unreadable(error)


def _ends_with_checksum(file: Path) -> bool:
    return file.stat().st_size > packs.ID_BYTES and packs.pack_is_whole(file)


def _packs(directory: Path, level: AuditLevel, unopened: Collection[Path]) -> Iterator[BadFile]:
    for stem in sorted({file.with_suffix("") for file in packs.packs_in(directory)}):
        pack, index = Path(f"{stem}.pack"), Path(f"{stem}.idx")
        if pack in unopened or index in unopened:
            continue
        try:
            yield from _pair(pack, index, level)
        except FileNotFoundError:
            # git (2.39) removes a pack before its index, and a big one takes a while
            ends = time.monotonic() + 2
            while (is_half := exists(pack) != exists(index)) and time.monotonic() < ends:
                time.sleep(0.1)
            if is_half and exists(index):
                reason = "it is missing, but its index exists"
                yield BadFile(f"objects/pack/{pack.name}", FileKind.PACK, reason)
            elif is_half:
                reason = "it is missing, but its pack exists"
                yield BadFile(f"objects/pack/{index.name}", FileKind.INDEX, reason)
        except OSError as error:
            yield BadFile(f"objects/pack/{pack.name}", FileKind.PACK, _unreadable(error))


def _pair(pack: Path, index: Path, level: AuditLevel) -> Iterator[BadFile]:
    pack_path, index_path = f"objects/pack/{pack.name}", f"objects/pack/{index.name}"
    try:
        parsed = packs.PackIndex(index)
        is_sound = level is AuditLevel.QUICK or _ends_with_checksum(index)
        reason = None if is_sound else CHECKSUM_MISMATCH
    except CorruptObjectError as error:
        reason = error.message.partition(": ")[2]
    if reason:
        yield BadFile(index_path, FileKind.INDEX, reason)
        if not _ends_with_checksum(pack):
            yield BadFile(pack_path, FileKind.PACK, CHECKSUM_MISMATCH)
        return
    # both ends: git does not open a pack whose trailer differs from that in its index
    with open_plain(pack) as file:
        fits = file.read(12) == struct.pack(">4sII", b"PACK", 2, parsed.count)
    fits = fits and packs.pack_trailer(pack) == parsed.pack_checksum
    reason = CHECKSUM_MISMATCH if fits else "its checksum differs from that in its index"
    if (level is AuditLevel.CONTENT or not fits) and not _ends_with_checksum(pack):
        yield BadFile(pack_path, FileKind.PACK, reason)
    elif not fits:
        yield BadFile(index_path, FileKind.INDEX, reason)
    elif pack.stem != f"pack-{parsed.pack_checksum.hex()}":
        # git names a pack after its checksum, and a multi-pack index refers to that name
        yield BadFile(pack_path, FileKind.PACK, "its checksum differs from that in its name")


def _derived(objects: Path, unopened: Collection[Path]) -> Iterator[BadFile]:
    pack, info = objects / "pack", objects / "info"
    of_packs = packs.packs_in(pack, ".rev", ".mtimes", ".bitmap")
    chain = info / "commit-graphs/commit-graph-chain"
    files: dict[Path, Callable[[Path], bool]] = {
        **dict.fromkeys(of_packs, _belongs_to_its_pack),
        **dict.fromkeys(matching(pack, "multi-pack-index-*"), _ends_with_checksum),
        **dict.fromkeys(matching(info / "commit-graphs", "*.graph"), _ends_with_checksum),
        info / "commit-graph": _ends_with_checksum,
        pack / "multi-pack-index": _names_its_packs,
        chain: _names_its_graphs,
    }
    for file, is_sound in sorted(files.items()):
        if file in unopened or file.with_suffix(".idx") in unopened:
            continue
        if reason := no_file(file) or _failing(is_sound, file, reason=CHECKSUM_MISMATCH):
            yield BadFile(f"objects/{file.relative_to(objects)}", FileKind.DERIVED, reason)


def _belongs_to_its_pack(file: Path) -> bool:
    """True for a .rev, .mtimes or .bitmap with the checksum of its pack."""
    if not _ends_with_checksum(file):
        return False
    try:
        index = packs.PackIndex(file.with_suffix(".idx"))
    except (CorruptObjectError, FileNotFoundError):  # the index has a finding of its own
        return True
    data = read_plain(file)
    if file.suffix == ".bitmap":  # after signature, version, flags and count
        return data[12 : 12 + packs.ID_BYTES] == index.pack_checksum
    if file.suffix == ".rev":
        return data == packs.reverse_index(index)
    # .mtimes ends with the checksum of its pack and its own (gitformat-pack)
    return data[-2 * packs.ID_BYTES : -packs.ID_BYTES] == index.pack_checksum


def _names_its_packs(file: Path) -> bool:
    """True for a multi-pack index whose packs, in its chunk PNAM, all exist."""
    if not _ends_with_checksum(file):
        return False
    data = read_plain(file)
    try:  # the count is at 6; from 12 on, a row for each chunk, and one for the end
        rows = [struct.unpack_from(">4sQ", data, 12 + 12 * n) for n in range(data[6] + 1)]
    except (struct.error, IndexError):
        return False
    names = [
        name
        for (chunk, start), (_, end) in pairwise(rows)
        if chunk == b"PNAM"
        for name in data[start:end].rstrip(b"\0").split(b"\0")
    ]
    return bool(names) and all(exists(file.parent / os.fsdecode(name)) for name in names)


def _names_its_graphs(chain: Path) -> bool:
    text = read_plain(chain).decode("ascii", "replace")
    if not re.fullmatch(r"([0-9a-f]{40}\n)+", text):
        return False
    graphs = [chain.parent / f"graph-{name}.graph" for name in text.split()]
    return all(exists(graph) and _ends_with_checksum(graph) for graph in graphs)


def find_lying(git_dir: Path) -> dict[str, Defect]:
    """Find commit-graphs and a multi-pack index with a right checksum and wrong content."""

    def identity(path: str) -> tuple[object, ...] | None:
        """Stay equal while the file and the set of packs do."""
        try:
            st = (git_dir / path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        names = [file.name for file in packs.packs_in(git_dir / "objects/pack", ".pack")]
        return st.st_ino, st.st_mtime_ns, st.st_size, *names

    lying = {}
    for path, command in (
        ("objects/info/commit-graph", "commit-graph"),
        ("objects/info/commit-graphs/commit-graph-chain", "commit-graph"),
        ("objects/pack/multi-pack-index", "multi-pack-index"),
    ):
        for _ in range(3):  # maintenance may replace a file while git verifies it
            if (before := identity(path)) is None:
                break
            try:
                run_git_sync(
                    command, "verify", "--no-progress",
                    git_dir=git_dir, timeout=TIMEOUT, doing=f"verify the {command}",
                )  # fmt: skip
                break
            except (CorruptObjectError, GitFailedError) as error:
                if before == identity(path):
                    fact = f"it contradicts the objects: {error.message.partition(': ')[2]}"
                    name = path.removeprefix("objects/pack/")
                    lying[name] = Defect(FindingKind.DERIVED, fact)
                    break
    return lying


def _loose(objects: Path, level: AuditLevel, unopened: Collection[Path]) -> Iterator[BadFile]:
    def is_sound(file: Path, oid: str) -> bool:
        if level is AuditLevel.CONTENT:
            return packs.loose_digest(file) == oid
        with open_plain(file) as stream:  # does a zlib stream begin there?
            head = stream.read(2)
        # RFC 1950: method 8 is deflate, and the two bytes are a multiple of 31
        return len(head) == 2 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0

    for directory in sorted(matching(objects, "[0-9a-f][0-9a-f]")):
        for file in map(Path, sorted_entries(directory)):
            if not LOOSE_NAME.fullmatch(file.name) or file in unopened:
                continue
            oid = directory.name + file.name
            if reason := _failing(is_sound, file, oid, reason="its bytes do not hash to its name"):
                yield BadFile(f"objects/{directory.name}/{file.name}", FileKind.LOOSE, reason)
