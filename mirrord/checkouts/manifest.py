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
from pathlib import Path

from ..errors import ProofFailedError
from ..host.files import exchange
from ..host.processes import boot_id
from .records import Entry, Records

_MAGIC = b"mirrord manifest 5\n"
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
    def owner_uid(self) -> int:
        return self.files[b""].uid

    @property
    def owner_gid(self) -> int:
        return self.files[b""].gid

    @property
    def racy_from_ns(self) -> int:
        """A ctime from here on proves nothing."""
        has_fractions = any(seen[4] % 10**9 for _, seen in self.files.iter_seen())
        return self.recorded_ns - (0 if has_fractions else _COARSE_RACY_NS)

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
            file.write(self.to_bytes())
            file.truncate()
        exchange(spare, path)

    def to_bytes(self) -> bytes:
        parts = [self.files.to_bytes(), Records(self.control).to_bytes()]
        header = {"commit": self.commit, "tree": self.tree, "recorded_ns": self.recorded_ns, "index": self.index}
        sections = {"boot": boot_id(), "sections": [len(part) for part in parts]}
        body = b"".join([_MAGIC, json.dumps(header | sections).encode(), b"\n", *parts])
        return body + hashlib.sha1(body).digest()

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
        body, checksum = data[:-20], data[-20:]
        if not body.startswith(_MAGIC) or hashlib.sha1(body).digest() != checksum:
            raise ProofFailedError(f"cannot read manifest {name}: it is damaged", hint="release the checkout and ask for another")
        header_end = body.index(b"\n", len(_MAGIC))
        header = json.loads(body[len(_MAGIC) : header_end])
        files_length, _ = header.pop("sections")
        if header.pop("boot") != boot_id():
            header["recorded_ns"] = 0
        files = body[header_end + 1 : header_end + 1 + files_length]
        control = body[header_end + 1 + files_length :]
        return cls(**header, files=Records.from_bytes(files), control=Records.from_bytes(control).decoded())
