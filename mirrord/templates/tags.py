"""The tags that a store may show: those of its base commit and its ancestors.

A tag is shown if a closure pack has its commit, so it never adds a commit. A tag object is not
part of a commit's closure and may be younger: an annotated tag becomes a ref to its commit, which
`git describe --tags` and version tools read. Damaged tags are left out.
"""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
from cachetools import LRUCache

from ..git.batch import object_info
from ..git.command import Git
from ..git.packs import PackIndex
from ..presence import exists, walk

# tags in memory; beyond it all are read again
_PEELED_MAX = 100_000

_INDEXES_MAX = 10_000  # of one mirror


_Stamp = tuple[tuple[str, int, int], ...]


class Tag(NamedTuple):
    """A ref and the commit that its tag leads to."""

    ref: bytes
    commit: str


class Tags:
    """The tags of mirrors, remembered until a file that holds them changes."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._peeled: dict[str, str | None] = {}  # the commit of a tag object never changes
        self._listed: dict[Path, tuple[_Stamp, tuple[Tag, ...]]] = {}
        # by mirror: its tags, and which of them each pack has
        self._within: dict[Path, tuple[tuple[Tag, ...], LRUCache[Path, frozenset[Tag]]]] = {}

    async def list(self, mirror: Path) -> tuple[Tag, ...]:
        """Return all tags of `mirror` that point at a commit, sorted by name.

        As long as they stay as they are, this is one and the same object.
        """
        stamp, cached = await anyio.to_thread.run_sync(_stamp, mirror), self._listed.get(mirror)
        if stamp and cached and cached[0] == stamp:
            return cached[1]
        listed = await self._git.run(
            "for-each-ref", "--format=%(objectname) %(refname)", "refs/tags",
            git_dir=mirror,
            doing="list tags",
        )  # fmt: skip
        rows = (line.partition(b" ") for line in listed.stdout.splitlines())
        direct = {ref: oid.decode() for oid, _, ref in rows}
        if unknown := sorted(set(direct.values()) - self._peeled.keys()):
            if len(self._peeled) > _PEELED_MAX:
                self._peeled.clear()
            names = [f"{oid}^{{}}" for oid in unknown]
            peeled = await object_info(self._git, mirror, names, doing="read tags", bisect=True)
            self._peeled |= {
                oid: info.oid if info.kind == "commit" else None
                for oid, info in zip(unknown, peeled, strict=True)
                if info.kind != "damaged"  # may be healed
            }
        tags = ((ref, self._peeled.get(oid)) for ref, oid in direct.items())
        result = tuple(sorted(Tag(ref, commit) for ref, commit in tags if commit))
        if cached and cached[1] == result:
            result = cached[1]
        if stamp:
            self._listed[mirror] = stamp, result
        return result

    async def within(
        self, mirror: Path, tags: tuple[Tag, ...], indexes: Sequence[Path]
    ) -> set[Tag]:
        """Return those of `tags`, from `list`, whose commit is in a pack of `indexes`."""
        of, by_index = self._within.get(mirror, ((), None))
        if by_index is None or of is not tags:
            by_index = LRUCache(_INDEXES_MAX)
            self._within[mirror] = tags, by_index
        shown = set[Tag]()
        for index in indexes:
            if (within := by_index.get(index)) is None:
                within = await anyio.to_thread.run_sync(_tags_in, tags, index)
                by_index[index] = within
            shown |= within
        return shown

    def forget(self, mirror: Path) -> None:
        """Forget the tags of a mirror that was removed."""
        self._listed.pop(mirror, None)
        self._within.pop(mirror, None)


def packed_refs(tags: Collection[Tag]) -> bytes:
    """Return the packed-refs file of a sealed checkout."""
    lines = [tag.commit.encode() + b" " + tag.ref + b"\n" for tag in sorted(tags)]
    # git peels none of them then: no ref of a store names a tag object
    return b"# pack-refs with: peeled fully-peeled sorted \n" + b"".join(lines)


# a file changed this lately may change again without another mtime: it is not remembered
_RACY_NS = 1_000_000_000


def _stamp(mirror: Path) -> _Stamp | None:
    """Return the stats that change with any tag: of packed-refs, and of directories of loose tags.

    None where one is so recent that the next change may get the same mtime ("racy" in git).
    """
    places = [mirror / "packed-refs", *(Path(root) for root, _, _ in walk(mirror / "refs/tags"))]
    stats = [(place, place.stat()) for place in places if exists(place)]
    if any(time.time_ns() - st.st_mtime_ns < _RACY_NS for _, st in stats):
        return None
    return tuple((str(place), st.st_ino, st.st_mtime_ns) for place, st in stats)


def _tags_in(tags: Sequence[Tag], index: Path) -> frozenset[Tag]:
    pack = PackIndex(index, mapped=True)
    return frozenset(tag for tag in tags if bytes.fromhex(tag.commit) in pack)
