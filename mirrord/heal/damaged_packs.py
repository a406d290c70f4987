"""Damaged packs, read in a worker: which may have an object, and what can be read of one."""

import shutil
import struct
from collections.abc import Collection
from pathlib import Path

from ..audit.damage import unreadable
from ..audit.defects import TIMEOUT
from ..audit.reading import OBJECT_ID
from ..audit.stand_in import make_repository
from ..errors import CorruptObjectError
from ..git.command import GitResult, run_git_sync
from ..git.packs import PackIndex
from ..presence import is_dir


def may_hold(pack: Path, oids: Collection[str]) -> bool:
    """True if the index of a pack has one of `oids`, or is no good."""
    if is_dir(pack):
        return False
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        return True
    return any(bytes.fromhex(oid) in index for oid in oids)


def salvage(pack: Path, into: Path) -> set[str]:
    """Make `into` a repository of what can be read of `pack`; return the bad objects in it.

    With an index, a copy of the pack gets a right header and trailer, so that git opens it; fsck
    names the bad objects, which are then made unreadable. Without an index, git unpacks the pack
    from its start.
    """
    make_repository(into)

    def git(doing: str, *args: str, stdin: Path | None = None) -> GitResult:
        # negative where a signal ended git: index-pack (2.39) aborts on some damaged packs
        any_status = range(-64, 256)
        return run_git_sync(
            *args, git_dir=into, stdin=stdin, ok=any_status, timeout=TIMEOUT, doing=doing
        )

    if git("index a pack again", "index-pack", "--stdin", stdin=pack).status == 0:
        return set()  # only the index was damaged
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        # -r goes on after a damaged object
        git("unpack a damaged pack", "unpack-objects", "-r", "-q", stdin=pack)
        return set()
    copy = into / "objects/pack" / pack.name
    shutil.copyfile(pack, copy)
    shutil.copyfile(index.path, copy.with_suffix(".idx"))
    # git refuses a pack whose header or trailer do not fit its index, and dies where an object
    # would begin after the end
    end, last = pack.stat().st_size - len(index.pack_checksum), max(index.offsets(), default=0)
    with copy.open("r+b") as file:
        file.write(struct.pack(">4sII", b"PACK", 2, index.count))
        file.truncate(file.seek(end if last < end else last + 4096))
        file.write(index.pack_checksum)
    fsck = ("fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs")
    # among them objects whose packed bytes changed and still unpack to the same content
    named = OBJECT_ID.findall(git("look for intact objects", *fsck).stderr)
    bad = unreadable(into, sorted(set(named)))
    # Break bad objects that are no deltas, or deltas would build on them instead of a good copy. A
    # damaged index may give a bad object the offset of a good one; that offset stays.
    ids = {bytes.fromhex(oid) for oid in bad}
    offsets = list(zip(index, index.offsets(), strict=True))
    good = {offset for oid, offset in offsets if oid not in ids}
    with copy.open("r+b") as file:
        for offset in {offset for oid, offset in offsets if oid in ids} - good:
            file.seek(offset)
            # gitformat-pack: 1 to 4 are whole objects, 6 and 7 deltas, and 0 is invalid
            if 1 <= int.from_bytes(file.read(1)) >> 4 & 7 <= 4:  # not a delta
                file.seek(offset)
                file.write(b"\0")
    return bad
