"""The private record of a tree as the daemon left it, and of the control files below its `.git`.

Owns the form of that record and its file. It lies outside the checkout, so that its user can neither read nor forge it; what
is on disk is compared with it by `scan.py`. Never touches the tree itself. A torn file is noticed by its checksum and refused:
the checkout it belongs to is then made again. What was recorded before another boot is read, whatever its stat: trees are not
flushed, and a file system may bring a file back in its old size without its old bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from ...errors import ProofFailedError
from ...host.files import exchange
from ...host.processes import boot_id
from .records import Entry, Records

_MAGIC = b"mirrord manifest 5\n"
_CHECKSUM_BYTES = 20
_COARSE_RACY_NS = 2 * 10**9  # ext4 with inodes of 128 bytes keeps whole seconds
_CLOCK_REALTIME_COARSE = 5  # linux/time.h


def clock_ns() -> int:
    """The time by the clock that Linux stamps ctimes with, which stands still between its ticks: what is changed after this call
    has a ctime that is not before it (from Linux 6.13 on it may be finer, and is then later).
    """
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def blob_id(data: bytes) -> bytes:
    """git's id of a blob, as bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).digest()


@dataclass(frozen=True)
class Manifest:
    """`files` holds every path of the tree, directories and the root (`b""`) included; `control` every path from `.git` down.

    `recorded_ns` is a time by `clock_ns` before everything was looked at: a file whose ctime is not older was perhaps changed
    afterwards in the same tick of the clock, so a scan reads it. `index` is the checksum of the index that was written
    from `files`.
    """

    commit: str
    tree: str
    recorded_ns: int
    files: Records
    control: dict[bytes, Entry] = field(default_factory=dict)
    index: str = ""

    @property
    def owner(self) -> tuple[int, int]:
        """uid and gid of all files."""
        top = self.files[b""]
        return top.uid, top.gid

    @property
    def owner_uid(self) -> int:
        return self.owner[0]

    @property
    def racy_from_ns(self) -> int:
        """A ctime from here on proves nothing."""
        return self.recorded_ns - self.slack_ns

    @property
    def slack_ns(self) -> int:
        """By how much a ctime may be older than the clock was when it was stamped."""
        has_fractions = any(seen[4] % 10**9 for _, seen in self.files.iter_seen())
        return 0 if has_fractions else _COARSE_RACY_NS

    def settled(self, at_ns: int) -> Manifest:
        """The same after all was looked at from `at_ns` on: fewer files are racy."""
        return replace(self, recorded_ns=at_ns)

    def save(self, path: Path) -> None:
        """Replace the file at `path`; private to the daemon. It is there whole or not at all.

        The former file stays beside it, to be written over the next time: a disk that must free its blocks, or that is to
        have the new ones before a rename (ext4), holds up whoever waits.
        """
        spare = path.with_name(f"{path.name}.spare")
        fd = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.writelines(self._pieces())
            file.truncate()
        try:
            exchange(spare, path)
        except OSError:  # there was none yet, or the file system cannot
            spare.rename(path)

    def to_bytes(self) -> bytes:
        return b"".join(self._pieces())

    def _pieces(self) -> list[bytes | memoryview]:
        sections = [self.files.pieces(), Records(self.control).pieces()]
        header = {
            "commit": self.commit,
            "tree": self.tree,
            "recorded_ns": self.recorded_ns,
            "index": self.index,
        }
        header |= {"boot": boot_id(), "sections": [sum(map(len, section)) for section in sections]}
        pieces = [_MAGIC, json.dumps(header).encode(), b"\n", *chain(*sections)]
        digest = hashlib.sha1()
        for piece in pieces:
            digest.update(piece)
        return [*pieces, digest.digest()]

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a saved manifest; raises ProofFailedError where it is not whole, FileNotFoundError where there is none."""
        return cls.from_bytes(path.read_bytes(), path.name)

    @staticmethod
    def is_current(path: Path) -> bool:
        """Whether there is a manifest in the form that this version writes; says nothing of what is in it."""
        try:
            with path.open("rb") as file:
                return file.read(len(_MAGIC)) == _MAGIC
        except OSError:
            return False

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> Manifest:
        body = memoryview(data)[:-_CHECKSUM_BYTES]
        if not data.startswith(_MAGIC) or hashlib.sha1(body).digest() != data[-_CHECKSUM_BYTES:]:
            raise ProofFailedError(
                f"cannot read manifest {name}: it is damaged",
                hint="release the checkout and ask for another",
            )
        header_end = data.index(b"\n", len(_MAGIC))
        header = json.loads(data[len(_MAGIC) : header_end])
        files_end = header_end + 1 + header.pop("sections")[0]
        if header.pop("boot") != boot_id():
            header["recorded_ns"] = 0
        files, control = (
            Records.from_bytes(body[header_end + 1 : files_end]),
            Records.from_bytes(body[files_end:]),
        )
        return cls(**header, files=files, control=control.decoded())
