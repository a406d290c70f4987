"""Which tags of a mirror a sealed checkout may show: those that point at its base commit or an ancestor.

Membership is asked of the closure packs themselves, so a tag cannot bring in a commit that is not there. A tag object is not part
of a commit's closure, and may be younger than the commit it names: an annotated tag becomes a ref to its commit, which is what
`git describe --tags` and the tools that ask for versions read. A damaged tag is left out: it is no reason to refuse the checkout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from ...git.batch import object_info
from ...git.command import Git
from ...git.packs import PackIndex

_PEELED_MAX = 100_000
_INDEXES_MAX = 10_000
_RACY_NS = 1_000_000_000

_Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """A ref and the commit that its tag leads to."""

    ref: bytes
    commit: str


class Tags:
    """Reads the tags of mirrors, and remembers them until a file that holds them changes; where a tag object leads never does."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._peeled: dict[str, str | None] = {}
        self._listed: dict[Path, tuple[_Stamp, tuple[Tag, ...]]] = {}
        self._within: dict[Path, tuple[tuple[Tag, ...], frozenset[Tag]]] = {}

    async def list(self, mirror: Path) -> tuple[Tag, ...]:
        """All tags of `mirror` that lead to a commit, sorted by name."""
        stamp = await anyio.to_thread.run_sync(_stamp, mirror)
        if stamp and (known := self._listed.get(mirror)) and known[0] == stamp:
            return known[1]
        found = await self._read(mirror)
        if stamp:
            self._listed[mirror] = stamp, found
        return found

    async def within(self, tags: tuple[Tag, ...], indexes: Sequence[Path]) -> set[Tag]:
        """Of all tags of a mirror, as `list` has them, those whose commit is in one of the packs with these `indexes`."""
        found = set[Tag]()
        for index in indexes:
            known = self._within.get(index)
            if known is None or known[0] is not tags:
                known = tags, await anyio.to_thread.run_sync(_tags_in, tags, index)
                self._keep(index, known)
            found |= known[1]
        return found

    def _keep(self, index: Path, known: tuple[tuple[Tag, ...], frozenset[Tag]]) -> None:
        if len(self._within) >= _INDEXES_MAX:
            self._within.clear()
        self._within[index] = known

    async def _read(self, mirror: Path) -> tuple[Tag, ...]:
        listed = await self._git.run(
            "for-each-ref",
            "--format=%(objectname) %(refname)",
            "refs/tags",
            git_dir=mirror,
            doing="list tags",
        )
        direct = {
            ref: oid.decode()
            for oid, _, ref in (line.partition(b" ") for line in listed.stdout.splitlines())
        }
        if unknown := set(direct.values()) - self._peeled.keys():
            if len(self._peeled) > _PEELED_MAX:
                self._peeled.clear()
            self._peeled |= await _peeled_commits(self._git, mirror, sorted(unknown))
        found = ((ref, self._peeled.get(oid)) for ref, oid in direct.items())
        return tuple(sorted(Tag(ref, commit) for ref, commit in found if commit))


def _stamp(mirror: Path) -> _Stamp | None:
    """What changes with any tag: a packed one changes packed-refs, a loose one the directory that it is renamed into.

    None where something changed so lately that the next change might bear the same time, as git has it with its index.
    """
    places = [mirror / "packed-refs", *(Path(root) for root, _, _ in os.walk(mirror / "refs/tags"))]
    stats = [(place, place.stat()) for place in places if place.exists()]
    if any(time.time_ns() - found.st_mtime_ns < _RACY_NS for _, found in stats):
        return None
    return tuple((str(place), found.st_ino, found.st_mtime_ns) for place, found in stats)


def _tags_in(tags: Sequence[Tag], index: Path) -> frozenset[Tag]:
    pack = PackIndex(index, mapped=True)
    return frozenset(tag for tag in tags if bytes.fromhex(tag.commit) in pack)


def packed_refs(tags: Collection[Tag]) -> bytes:
    """The packed-refs file of a sealed checkout."""
    lines = [tag.commit.encode() + b" " + tag.ref + b"\n" for tag in sorted(tags)]
    return b"# pack-refs with: peeled fully-peeled sorted \n" + b"".join(lines)


async def _peeled_commits(git: Git, mirror: Path, oids: Sequence[str]) -> dict[str, str | None]:
    """The commit that each object leads to, None for a tag of something else; nothing for one whose objects are missing."""
    asked = [f"{oid}^{{}}" for oid in oids]
    found = await object_info(git, mirror, asked, bisect=True, doing="look at tags")
    return {
        oid: each.oid if each.kind == "commit" else None
        for oid, each in zip(oids, found, strict=True)
        if each.kind != "damaged"
    }
