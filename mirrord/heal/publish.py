"""The last step of a heal, the only one that changes the mirror.

Objects first, so that no moment has less than the moment before. Every file that goes is in the
quarantine before another one has its name, and every change is one rename: a crash between any two
leaves a mirror for the next heal. Functions for a thread; the caller holds the mirror's lock.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

from ..audit.examine import packed_refs
from ..audit.object_files import BadFile, FileKind
from ..audit.refs import read_packed
from ..errors import ConflictError
from ..host.files import full_disk_named, sync_directory
from ..mirrors.quarantine import DAMAGED
from ..mirrors.repository import CONFIGURATION
from ..mirrors.transaction import write_durably
from ..model import MirrorName, utc_now
from .ref_plan import RefPlan

Step = Callable[[str], None]
"""Called before each change of a mirror; tests stop there."""


class DamagedFiles:
    """`quarantine/damaged/<mirror>/<time>-<id>/`: files of one heal at their old paths.

    Nothing is ever removed from there but by a person. `record.json` is written before the first
    file moves, so a crash leaves each file in one place or the other.
    """

    def __init__(
        self, quarantine: Path, name: MirrorName, git_dir: Path, bad_files: Collection[BadFile]
    ) -> None:
        now = utc_now()
        own = quarantine / DAMAGED / str(name)
        self.path = own / f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self._git_dir = git_dir
        if not bad_files:
            return
        self.path.mkdir(parents=True, mode=0o700)
        files = []
        for bad in sorted(bad_files):
            file = git_dir / bad.path
            facts = bad._asdict() | {"kind": str(bad.kind), "size_bytes": None, "sha256": None}
            if file.is_file() and not file.is_symlink():
                with file.open("rb") as stream:
                    facts["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
                facts["size_bytes"] = file.stat().st_size
            files.append(facts)
        record = {"mirror": str(name), "at": now.isoformat(), "files": files}
        write_durably(self.path / "record.json", json.dumps(record, indent=1).encode())
        for directory in (own, own.parent, quarantine):
            sync_directory(directory)

    def move(self, relative: str) -> None:
        """Move a file of the mirror in here; one that is gone is fine."""
        source = self._git_dir / relative
        if os.path.lexists(source):
            target = self._place(relative)
            source.rename(target)
            sync_directory(target.parent)
            sync_directory(source.parent)

    def link(self, relative: str) -> None:
        """Keep a file, which stays in its place until something better is renamed over it."""
        source = self._git_dir / relative
        if source.exists() and not (self.path / relative).exists():
            target = self._place(relative)
            os.link(source, target)
            sync_directory(target.parent)

    def _place(self, relative: str) -> Path:
        target = self.path / relative
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return target


def publish(
    name: MirrorName,
    git_dir: Path,
    quarantine: Path,
    work: Path,
    bad_files: Collection[BadFile],
    plan: RefPlan,
    step: Step,
) -> Path | None:
    """Change the mirror at `git_dir`; answers where the bad files are.

    `work` has the new packs in `objects/pack`.
    """
    with full_disk_named(f"mirror {name}"):
        step("evidence")
        damaged = DamagedFiles(quarantine, name, git_dir, bad_files)
        for bad in bad_files:
            if bad.kind is FileKind.LAYOUT:
                step("take what is in the way")
                damaged.move(bad.path)
        for directory in ("objects/pack", "refs"):
            (git_dir / directory).mkdir(parents=True, exist_ok=True)
        going: dict[str, None] = {}
        # a multi-pack index goes before the packs that it names
        for bad in sorted(bad_files, key=lambda bad: bad.kind is not FileKind.DERIVED):
            if bad.kind in {FileKind.PACK, FileKind.INDEX}:  # with everything of that pack
                stem = bad.path.rpartition(".")[0]  # git finds a pack by its index
                going |= dict.fromkeys(stem + end for end in (".idx", ".pack", ".rev", ".bitmap"))
            elif bad.kind is not FileKind.LAYOUT and bad.path.startswith("objects/"):
                going[bad.path] = None
        packs = list((work / "objects/pack").glob("pack-*"))
        for file in sorted(packs, key=lambda file: (file.suffix == ".idx", file.name)):
            path = f"objects/pack/{file.name}"
            step(f"put {file.suffix}")
            if path in going or not (git_dir / path).exists():  # else it is the same
                damaged.link(path)
                file.rename(git_dir / path)
        sync_directory(git_dir / "objects/pack")
        new = {f"objects/pack/{file.name}" for file in packs}
        for path in going:
            if path not in new:
                step(f"take {Path(path).suffix}")
                damaged.move(path)
        _write_refs(name, git_dir, work / "new", damaged, bad_files, plan, step)
    return damaged.path if bad_files else None


def _write_refs(
    name: MirrorName,
    git_dir: Path,
    new: Path,
    damaged: DamagedFiles,
    bad_files: Collection[BadFile],
    plan: RefPlan,
    step: Step,
) -> None:
    def replace(path: str, content: bytes) -> None:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        step(f"write {path}")
        damaged.link(path)
        new.rename(git_dir / path)
        sync_directory(git_dir)

    paths = {bad.path for bad in bad_files}
    if "config" in paths:
        replace("config", CONFIGURATION.encode())
    if "HEAD" in paths:
        replace("HEAD", f"ref: {plan.head or 'refs/heads/main'}\n".encode())
    if "packed-refs" in paths or plan.restore or plan.drop:
        lock = git_dir / "packed-refs.lock"  # git's own: it may be moving a ref
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError as error:
            fact = f"cannot restore refs of mirror {name}: git is packing them"
            raise ConflictError(fact, hint="try again later") from error
        try:
            packed = read_packed(git_dir)
            staying = {ref: oid for ref, oid in packed.items() if ref not in plan.drop}
            replace("packed-refs", packed_refs({**staying, **plan.restore}))
        finally:
            lock.unlink(missing_ok=True)
    for bad in bad_files:
        if bad.kind in {FileKind.REF, FileKind.PLANTED}:
            step("take ref")
            damaged.move(bad.path)
