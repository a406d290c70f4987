"""The last step of a heal, and the only one that changes the mirror: proven objects in, bad files out, names right again.

Objects come first, so that no moment has less than the moment before. Every file that goes is in the evidence before something
else has its name; every change is one rename. A crash between any two leaves a mirror that the next heal goes on with. Sync
functions, for a thread; the caller holds the mirror's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..audit.object_files import BadFile, FileKind
from ..audit.ref_files import read_packed
from ..audit.stand_in import packed_refs
from ..errors import ConflictError
from ..host.files import full_disk_named, sync_directory
from ..mirrors.quarantine import DAMAGED
from ..mirrors.repository import CONFIGURATION
from ..mirrors.transaction import write_durably
from ..model import MirrorName, utc_now
from .ref_plan import RefPlan

_FAMILY = (".idx", ".pack", ".rev", ".bitmap")  # git finds a pack by its index
_PACKS = {FileKind.PACK, FileKind.INDEX}
_OBJECTS = {FileKind.LOOSE, FileKind.DERIVED}

Step = Callable[[str], None]


def no_step(_name: str) -> None:
    """Nothing happens at a step, but in tests."""


@dataclass(frozen=True, slots=True)
class Implant:
    """What is to be done to the mirror at `git_dir`. `work` has the new packs in `objects/pack`; `step` is called before each
    change.
    """

    name: MirrorName
    git_dir: Path
    quarantine: Path
    work: Path
    bad_files: Collection[BadFile]
    plan: RefPlan
    step: Step

    def perform(self) -> Path | None:
        """Do it; answers where the evidence is."""
        with full_disk_named(f"mirror {self.name}"):
            self.step("evidence")
            evidence = (
                Evidence.begin(self.quarantine, self.name, self.git_dir, self.bad_files)
                if self.bad_files
                else None
            )
            for bad in self.bad_files:
                if evidence and bad.kind is FileKind.LAYOUT:
                    self.step("take what is in the way")
                    evidence.move(bad.path)
            for directory in ("objects/pack", "refs"):
                (self.git_dir / directory).mkdir(parents=True, exist_ok=True)
            fresh = self._put_packs(evidence)
            if evidence:
                self._take_objects(evidence, fresh)
            self._write_names(evidence)
        return evidence.path if evidence else None

    # -- objects ------------------------------------------------------------------------------------------------------

    def _put_packs(self, evidence: Evidence | None) -> set[str]:
        """Move the new packs in, the index last; answers their paths in the mirror."""
        files = sorted(
            (self.work / "objects/pack").glob("pack-*"),
            key=lambda file: (file.suffix == ".idx", file.name),
        )
        for file in files:
            self.step(f"put {file.suffix}")
            self._put(file, f"objects/pack/{file.name}", evidence)
        sync_directory(self.git_dir / "objects/pack")
        return {f"objects/pack/{file.name}" for file in files}

    def _put(self, file: Path, relative: str, evidence: Evidence | None) -> None:
        """A file that has the name already has the same content, unless it is a bad one."""
        target = self.git_dir / relative
        is_bad = any(relative in _files_of(bad) for bad in self.bad_files)
        if target.exists() and not is_bad:
            return
        if evidence:
            evidence.keep(relative)
        file.rename(target)

    def _take_objects(self, evidence: Evidence, fresh: Collection[str]) -> None:
        """Out with what is bad. A multi-pack index goes before the packs that it names."""
        bad_files = sorted(self.bad_files, key=lambda bad: bad.kind is not FileKind.DERIVED)
        gone = [
            relative for bad in bad_files for relative in _files_of(bad) if relative not in fresh
        ]
        for relative in dict.fromkeys(gone):
            self.step(f"take {Path(relative).suffix}")
            evidence.move(relative)

    # -- names --------------------------------------------------------------------------------------------------------

    def _write_names(self, evidence: Evidence | None) -> None:
        paths = {bad.path for bad in self.bad_files}
        if "config" in paths:
            self._replace("config", CONFIGURATION.encode(), evidence)
        if "HEAD" in paths:
            self._replace(
                "HEAD", f"ref: {self.plan.head or 'refs/heads/main'}\n".encode(), evidence
            )
        if "packed-refs" in paths or self.plan.restore or self.plan.drop:
            self._write_packed_refs(evidence)
        for bad in self.bad_files:
            if evidence and bad.kind in {FileKind.REF, FileKind.PLANTED}:
                self.step("take ref")
                evidence.move(bad.path)

    def _write_packed_refs(self, evidence: Evidence | None) -> None:
        """Under git's own lock, as git does: a linked checkout may be moving a ref."""
        lock = self.git_dir / "packed-refs.lock"
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError as error:
            raise ConflictError(
                f"cannot restore refs of mirror {self.name}: somebody else is packing them",
                hint="try again later",
            ) from error
        try:
            packed = read_packed(self.git_dir)
            staying = {ref: oid for ref, oid in packed.items() if ref not in self.plan.drop}
            self._replace("packed-refs", packed_refs({**staying, **self.plan.restore}), evidence)
        finally:
            lock.unlink(missing_ok=True)

    def _replace(self, relative: str, content: bytes, evidence: Evidence | None) -> None:
        new = self.work / "new"
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.step(f"write {relative}")
        if evidence:
            evidence.keep(relative)
        new.rename(self.git_dir / relative)
        sync_directory(self.git_dir)


def _files_of(bad: BadFile) -> Iterator[str]:
    """The files that go with a bad one: of a pack or its index, the pack with all that belongs to it."""
    if bad.kind in _PACKS:
        yield from (bad.path.rpartition(".")[0] + suffix for suffix in _FAMILY)
    elif bad.kind is FileKind.LAYOUT:
        return
    elif bad.kind in _OBJECTS or bad.path.startswith("objects/"):
        yield bad.path


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
