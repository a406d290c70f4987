"""Which objects of a mirror are damaged: `git fsck` hashes each once and walks from every ref.

When it complains, packs are verified one by one, and each suspect is read again by itself; git may
have a good copy of it elsewhere. `rev-list --verify-objects` is no use: git 2.39 hashes neither
trees nor most commits in it, and ends with status 0 after a mismatch. Reads only, in a worker.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import read_objects_sync
from ..git.command import run_git_sync
from ..git.environment import UNTRUSTING
from .object_files import TIMEOUT, BadFile, FileKind

OBJECT_ID = re.compile(r"\b[0-9a-f]{40}\b")
# What real histories have: wrong authors and dates, odd modes. "broken links" has no such name.
_HARMLESS = re.compile(
    r"notice: |(?:error|warning) in (?:commit|tree|tag|blob) [0-9a-f]{40}: [a-z][A-Za-z]+: "
)


class Fsck(NamedTuple):
    """`named` are the objects in complaints."""

    is_sound: bool
    named: set[str]


class Damage(NamedTuple):
    """Objects that are not what their ids say, and damaged packs with the reason."""

    objects: set[str]
    packs: dict[str, str]


def run_fsck(git_dir: Path) -> Fsck:
    """Hash every object and walk from every ref; twice where packs went away meanwhile."""
    pack_directory = git_dir / "objects/pack"
    before = set(pack_directory.glob("pack-*.pack"))
    result = _fsck_once(git_dir)
    was_repacked = not before <= set(pack_directory.glob("pack-*.pack"))
    return _fsck_once(git_dir) if was_repacked and not result.is_sound else result


def _fsck_once(git_dir: Path) -> Fsck:
    done = run_git_sync(
        *UNTRUSTING, "fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs",
        git_dir=git_dir, ok=range(256), timeout=TIMEOUT, doing="fsck",
    )  # fmt: skip
    said = f"{done.stderr}\n{done.stdout.decode('utf-8', 'replace')}".splitlines()
    complaints = [line for line in said if line and not _HARMLESS.match(line)]
    is_sound = not done.status & ~(1 | 4) and not complaints  # an object, and the pack with it
    return Fsck(is_sound, set(OBJECT_ID.findall("\n".join(complaints))))


def find_damage(git_dir: Path, bad_files: Collection[BadFile], named: Collection[str]) -> Damage:
    """The damage behind an fsck that `named` objects, and behind bad checksums of files."""
    packs: dict[str, str] = {}
    for index in sorted((git_dir / "objects/pack").glob("pack-*.idx")):
        pack = index.with_suffix(".pack")
        try:  # the command below `git verify-pack`, which would leave it behind when it is killed
            run_git_sync(
                "index-pack", "--verify", str(pack),
                git_dir=git_dir, timeout=TIMEOUT, doing=f"verify {index.name}",
            )  # fmt: skip
        except (CorruptObjectError, GitFailedError) as error:
            if index.exists():
                packs[pack.name] = error.message
    loose = {
        bad.path.removeprefix("objects/").replace("/", "")
        for bad in bad_files
        if bad.kind is FileKind.LOOSE
    }
    return Damage(unreadable(git_dir, sorted(loose | set(named))), packs)


def unreadable(git_dir: Path, oids: Collection[str]) -> set[str]:
    """Those of `oids` that git cannot read as what they are named; missing ones among them."""
    listed = list(oids)
    bad: set[str] = set()
    for at in range(0, len(listed), 1000):  # their bytes are in memory together
        for found in read_objects_sync(
            git_dir, listed[at : at + 1000],
            options=UNTRUSTING, timeout=TIMEOUT, bisect=True, doing="read objects",
        ):  # fmt: skip
            header = f"{found.kind} {len(found.data)}\0".encode()
            digest = hashlib.sha1(header + found.data, usedforsecurity=False)
            if not found.exists or digest.hexdigest() != found.name:
                bad.add(found.name)
    return bad
