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
from pathlib import Path
from typing import NamedTuple

from ..errors import ProofFailedError

DIRECTORY = 0o040000
SYMLINK = 0o120000
SUBMODULE = 0o160000

_MAGIC = b"mirrord manifest 1\n"
_FIXED = struct.Struct(">II20s20sQQQQII")
_RACY_NS = 50_000_000
NO_OBJECT = bytes(20)


class Entry(NamedTuple):
    """One path. `mode` is git's (with the type bits), `permissions` those of the file; `oid` is what git's tree names (a blob, a
    tree, or a submodule's commit; zero for control files), `content` the blob id of the bytes on disk, which differs from `oid`
    where a file was converted (line ends, encoding); for a symlink the bytes are its target. Zero for directories.
    """

    mode: int
    permissions: int
    oid: bytes
    content: bytes
    size: int
    ino: int
    mtime_ns: int
    ctime_ns: int
    uid: int
    gid: int

    @property
    def is_directory(self) -> bool:
        """A directory on disk: a tree, or a submodule, which is an empty directory."""
        return self.mode in (DIRECTORY, SUBMODULE)

    @property
    def is_symlink(self) -> bool:
        return self.mode == SYMLINK

    def with_stat(self, found: os.stat_result) -> Entry:
        """The same object with the stat data of the file that now holds it."""
        return Entry(
            self.mode,
            stat.S_IMODE(found.st_mode),
            self.oid,
            self.content,
            found.st_size,
            found.st_ino,
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_uid,
            found.st_gid,
        )


@dataclass(frozen=True)
class Manifest:
    """`files` holds every path of the tree, directories and the root (`b""`) included; `control` every path from `.git` down.

    `recorded_ns` is the time after which nobody but the daemon can have written: a file whose ctime is that young was perhaps
    changed in the same tick of the clock, so a scan reads it.
    """

    commit: str
    tree: str
    recorded_ns: int
    files: dict[bytes, Entry]
    control: dict[bytes, Entry] = field(default_factory=dict)

    @property
    def owner_uid(self) -> int:
        return self.files[b""].uid

    @property
    def owner_gid(self) -> int:
        return self.files[b""].gid

    def is_racy(self, entry: Entry) -> bool:
        return entry.ctime_ns + _RACY_NS > self.recorded_ns

    def settled(self, at_ns: int) -> Manifest:
        """The same after a scan that began at `at_ns` and found no difference: fewer files are racy."""
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
        header = {"commit": self.commit, "tree": self.tree, "recorded_ns": self.recorded_ns, "sections": [len(p) for p in parts]}
        body = b"".join([_MAGIC, json.dumps(header).encode(), b"\n", *parts])
        return body + hashlib.sha1(body).digest()

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a saved manifest; raises ProofFailedError where it is not whole, FileNotFoundError where there is none."""
        return cls.from_bytes(path.read_bytes(), path.name)

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
