"""The private record of a tree as the daemon left it, and of the control files below its `.git`.

Owns the form of that record and its file. It lies outside the checkout, so that its user can neither read nor forge it; what
is on disk is compared with it by `scan.py`. Never touches the tree itself. A torn file is noticed by its checksum and refused:
the checkout it belongs to is then made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ..errors import ProofFailedError

DIRECTORY = 0o040000
SYMLINK = 0o120000
SUBMODULE = 0o160000

_MAGIC = b"mirrord manifest 2\n"
_FIXED = struct.Struct(">I20s20sIQQQQII")
_RACY_NS = 50_000_000
_COARSE_RACY_NS = 2 * 10**9  # ext4 with inodes of 128 bytes keeps whole seconds
NO_OBJECT = bytes(20)


look = attrgetter("st_mode", "st_size", "st_ino", "st_mtime_ns", "st_ctime_ns", "st_uid", "st_gid")
"""The part of a stat that an `Entry` keeps: `entry[3:]` is equal to it where nothing changed."""


def blob_id(data: bytes) -> bytes:
    """git's id of a blob, as bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).digest()


class Entry(NamedTuple):
    """One path. `mode` is git's (with the type bits); `oid` is what git's tree names (a blob, a tree, or a submodule's commit;
    zero for control files), `content` the blob id of the bytes on disk, which differs from `oid` where a file was converted (line
    ends, encoding); for a symlink the bytes are its target. Zero for directories. The rest is what lstat said, as `look` has it.
    """

    mode: int
    oid: bytes
    content: bytes
    st_mode: int
    size: int
    ino: int
    mtime_ns: int
    ctime_ns: int
    uid: int
    gid: int

    @property
    def permissions(self) -> int:
        return stat.S_IMODE(self.st_mode)

    @property
    def is_directory(self) -> bool:
        """A directory on disk: a tree, or a submodule, which is an empty directory."""
        return self.mode in (DIRECTORY, SUBMODULE)

    @property
    def is_symlink(self) -> bool:
        return self.mode == SYMLINK

    def with_stat(self, found: os.stat_result) -> Entry:
        """The same object with the stat data of the file that now holds it."""
        return Entry(self.mode, self.oid, self.content, *look(found))


@dataclass(frozen=True)
class Manifest:
    """`files` holds every path of the tree, directories and the root (`b""`) included; `control` every path from `.git` down.

    `recorded_ns` is a time before everything was looked at: a file whose ctime is not older was perhaps changed afterwards in the
    same tick of the clock, so a scan reads it. `index` is the checksum of the index that was written from `files`.
    """

    commit: str
    tree: str
    recorded_ns: int
    files: dict[bytes, Entry]
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
        has_fractions = any(entry.ctime_ns % 10**9 for entry in self.files.values())
        return self.recorded_ns - (_RACY_NS if has_fractions else _COARSE_RACY_NS) + 1

    def settled(self, at_ns: int) -> Manifest:
        """The same after a scan that began at `at_ns`: fewer files are racy."""
        return replace(self, recorded_ns=at_ns)

    def save(self, path: Path) -> None:
        """Replace the file at `path`; private to the daemon. It is there whole or not at all."""
        temporary = path.with_name(f"{path.name}.new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(self.to_bytes())
        temporary.rename(path)

    def to_bytes(self) -> bytes:
        parts = [_pack(self.files), _pack(self.control)]
        header = {"commit": self.commit, "tree": self.tree, "recorded_ns": self.recorded_ns, "index": self.index}
        sections = {"sections": [len(part) for part in parts]}
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
        files = body[header_end + 1 : header_end + 1 + files_length]
        control = body[header_end + 1 + files_length :]
        return cls(**header, files=_unpack(files), control=_unpack(control))


def _pack(entries: dict[bytes, Entry]) -> bytes:
    """A count, the fixed parts, and the paths, each ended by NUL, which no path can hold."""
    pack = _FIXED.pack
    fixed = b"".join([pack(*entry) for entry in entries.values()])
    return b"".join([struct.pack(">I", len(entries)), fixed, *(path + b"\0" for path in entries)])


def _unpack(data: bytes) -> dict[bytes, Entry]:
    (count,) = struct.unpack_from(">I", data)
    end = 4 + count * _FIXED.size
    paths = data[end:].split(b"\0")[:count]
    return dict(zip(paths, map(Entry._make, _FIXED.iter_unpack(data[4:end])), strict=True))
