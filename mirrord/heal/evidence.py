"""Bad files are kept, with a record: `quarantine/damaged/<mirror>/<time>-<id>/record.json` beside the files, at their old paths.

Owns that directory, from which nothing is ever removed but by a person. The record is written before the first file moves, so
a crash leaves files in one place or the other, never in none. Everything that goes in here was a rename or a hard link away.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..audit.files import BadFile
from ..host.files import sync_directory
from ..mirrors.quarantine import DAMAGED
from ..mirrors.transaction import write_durably
from ..model import MirrorName, utc_now

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one heal took out of one mirror."""

    git_dir: Path
    path: Path

    @classmethod
    def begin(
        cls, quarantine: Path, name: MirrorName, git_dir: Path, bad_files: Collection[BadFile]
    ) -> Evidence:
        """Write the record of what is about to be moved."""
        now = utc_now()
        path = quarantine / DAMAGED / str(name) / f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        path.mkdir(parents=True, mode=0o700)
        files = [_described(git_dir, bad) for bad in sorted(bad_files)]
        record = {"mirror": str(name), "at": now.isoformat(), "files": files}
        write_durably(path / "record.json", json.dumps(record, indent=1).encode())
        for directory in (path.parent, path.parent.parent, quarantine):
            sync_directory(directory)
        return cls(git_dir, path)

    def move(self, relative: str) -> None:
        """Move a file of the mirror in here; one that is not there is fine."""
        source = self.git_dir / relative
        if os.path.lexists(source):
            target = self._place(relative)
            source.rename(target)
            sync_directory(target.parent)
            sync_directory(source.parent)

    def keep(self, relative: str) -> None:
        """Keep the file as it is now, while it stays in its place until something better is renamed over it."""
        source = self.git_dir / relative
        if source.exists() and not (self.path / relative).exists():
            target = self._place(relative)
            os.link(source, target)
            sync_directory(target.parent)

    def _place(self, relative: str) -> Path:
        target = self.path / relative
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return target


def packs_taken(quarantine: Path, name: MirrorName) -> list[Path]:
    """The packs that heals took out of a mirror, the latest first, with their indexes beside them."""
    return sorted(
        (quarantine / DAMAGED / str(name)).glob("*/objects/pack/pack-*.pack"), reverse=True
    )


def _described(git_dir: Path, bad: BadFile) -> dict[str, Any]:
    file = git_dir / bad.path
    facts = asdict(bad) | {"kind": str(bad.kind)}
    if file.is_symlink() or not file.is_file():
        return facts | {"size_bytes": None, "sha256": None}
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return facts | {"size_bytes": file.stat().st_size, "sha256": digest.hexdigest()}
