"""Objects whose content does not match their ids, and the packs that hold them."""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..git.fsck import RULES, Blemish, Severity, read_complaint
from ..git.packs import packs_in
from ..presence import exists
from .defects import TIMEOUT, BadFile, FileKind
from .reading import OBJECT_ID, read_objects, run_git


class Fsck(NamedTuple):
    """The result of an fsck; `named` are the objects in its complaints about damage."""

    is_sound: bool
    named: set[str]
    blemishes: list[Blemish]


class Damage(NamedTuple):
    """Objects whose content does not match their ids, and damaged packs with the reason."""

    objects: set[str]
    packs: dict[str, str]


def run_fsck(git_dir: Path) -> Fsck:
    """Hash every object and walk from every ref; again if packs were removed during the first.

    `rev-list --verify-objects` does not do: git 2.39 hashes neither trees nor most commits in it,
    and ends with status 0 after a mismatch.
    """
    packs = git_dir / "objects/pack"
    # a mirror has no reflogs (core.logAllRefUpdates), and objects without a ref are no damage
    command = ("fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs")
    for _ in range(2):
        before = set(packs_in(packs, ".pack"))
        # each kind of fault is a bit of the status
        done = run_git(git_dir, "fsck", *command, ok=range(256))
        output = f"{done.stderr}\n{done.stdout.decode('utf-8', 'replace')}".splitlines()
        blemishes = [blemish for line in output if (blemish := read_complaint(line))]
        said = (line for line in output if line and not line.startswith("notice: "))
        complaints = [line for line in said if not read_complaint(line)]
        # status 1 is a bad object and 4 a bad pack; both may stand for harmless complaints
        is_sound = not done.status & ~(1 | 4) and not complaints
        if is_sound or before <= set(packs_in(packs, ".pack")):
            break
    grave = [blemish for blemish in blemishes if RULES.get(blemish.rule) is not Severity.IGNORED]
    return Fsck(is_sound, set(OBJECT_ID.findall("\n".join(complaints))), grave)


def find_damage(git_dir: Path, bad_files: Collection[BadFile], named: Collection[str]) -> Damage:
    """Find the damage behind the objects that an fsck named, and behind bad checksums of files.

    Verifies each pack, and reads each suspected object again: git may have a good copy of it.
    """
    packs: dict[str, str] = {}
    for index in packs_in(git_dir / "objects/pack", ".idx"):
        pack = index.with_suffix(".pack")
        try:  # not by `git verify-pack`, which when killed leaves this command running
            run_git_sync(
                "index-pack", "--verify", str(pack),
                git_dir=git_dir, timeout=TIMEOUT, doing=f"verify {index.name}",
            )  # fmt: skip
        except (CorruptObjectError, GitFailedError) as error:
            if exists(index):
                packs[pack.name] = error.message
    loose = {bad.object_id for bad in bad_files if bad.kind is FileKind.LOOSE}
    return Damage(unreadable(git_dir, sorted(loose | set(named))), packs)


def unreadable(git_dir: Path, oids: Collection[str]) -> set[str]:
    """Return those of `oids` that are missing, or whose content does not match."""
    listed = list(oids)
    bad: set[str] = set()
    for start in range(0, len(listed), 1000):  # their bytes are in memory together
        for entry in read_objects(git_dir, listed[start : start + 1000], doing="read objects"):
            header = f"{entry.kind} {len(entry.data)}\0".encode()
            digest = hashlib.sha1(header + entry.data, usedforsecurity=False)
            if not entry.exists or digest.hexdigest() != entry.name:
                bad.add(entry.name)
    return bad
