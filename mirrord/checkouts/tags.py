"""Which tags of a mirror a sealed checkout may show: those that point at its base commit or an ancestor.

Membership is asked of the closure packs themselves, so a tag cannot bring in a commit that is not there. A tag object is not part
of a commit's closure, and may be younger than the commit it names: an annotated tag becomes a ref to its commit, which is what
`git describe --tags` and the tools that ask for versions read. A damaged tag is left out: it is no reason to refuse the checkout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import Git
from ..git.packs import PackIndex

_PEELED_MAX = 100_000


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """A ref and the commit that its tag leads to."""

    ref: bytes
    commit: str


class Tags:
    """Reads the tags of mirrors, and remembers where each tag object leads: that never changes."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._peeled: dict[str, str | None] = {}

    async def list(self, mirror: Path) -> list[Tag]:
        """All tags of `mirror` that lead to a commit, sorted by name."""
        listed = await self._git.run(
            "for-each-ref", "--format=%(objectname) %(refname)", "refs/tags", git_dir=mirror, doing="list tags"
        )
        direct = {ref: oid.decode() for oid, _, ref in (line.partition(b" ") for line in listed.stdout.splitlines())}
        if unknown := set(direct.values()) - self._peeled.keys():
            if len(self._peeled) > _PEELED_MAX:
                self._peeled.clear()
            self._peeled |= await _peeled_commits(self._git, mirror, sorted(unknown))
        found = ((ref, self._peeled.get(oid)) for ref, oid in direct.items())
        return sorted(Tag(ref, commit) for ref, commit in found if commit)


def tags_within(tags: Sequence[Tag], indexes: Sequence[PackIndex]) -> list[Tag]:
    """The tags whose commit is in one of `indexes`."""
    return [tag for tag in tags if any(bytes.fromhex(tag.commit) in index for index in indexes)]


def packed_refs(tags: Sequence[Tag]) -> bytes:
    """The packed-refs file of a sealed checkout."""
    lines = [tag.commit.encode() + b" " + tag.ref + b"\n" for tag in sorted(tags)]
    return b"# pack-refs with: peeled fully-peeled sorted \n" + b"".join(lines)


async def _peeled_commits(git: Git, mirror: Path, oids: Sequence[str]) -> dict[str, str | None]:
    """The commit that each object leads to, None for a tag of something else; nothing for one whose objects are missing."""
    asked = "".join(f"{oid}^{{}}\n" for oid in oids).encode()
    try:
        done = await git.run(
            "cat-file", "--batch-check=%(objectname) %(objecttype)", git_dir=mirror, stdin=asked, doing="look at tags"
        )
    except (CorruptObjectError, GitFailedError):
        halves = (oids[: len(oids) // 2], oids[len(oids) // 2 :]) if len(oids) > 1 else ()
        found = [await _peeled_commits(git, mirror, half) for half in halves]
        return {oid: commit for half in found for oid, commit in half.items()}
    shown = (line.split() for line in done.lines)
    return {oid: words[0] if words[1] == "commit" else None for oid, words in zip(oids, shown, strict=True)}
