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


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """A ref and the commit that its tag leads to."""

    ref: bytes
    commit: str


async def tags_within(git: Git, mirror: Path, indexes: Sequence[PackIndex]) -> list[Tag]:
    """The tags of `mirror` whose commit is in one of `indexes`, sorted by name."""
    listed = await git.run("for-each-ref", "--format=%(objectname) %(refname)", "refs/tags", git_dir=mirror, doing="list tags")
    direct = {ref: oid.decode() for oid, _, ref in (line.partition(b" ") for line in listed.stdout.splitlines())}
    peeled = await _peeled_commits(git, mirror, sorted(set(direct.values())))
    inside = {oid: commit for oid, commit in peeled.items() if any(bytes.fromhex(commit) in index for index in indexes)}
    return sorted(Tag(ref, inside[oid]) for ref, oid in direct.items() if oid in inside)


def packed_refs(tags: Sequence[Tag]) -> bytes:
    """The packed-refs file of a sealed checkout."""
    lines = [tag.commit.encode() + b" " + tag.ref + b"\n" for tag in sorted(tags)]
    return b"# pack-refs with: peeled fully-peeled sorted \n" + b"".join(lines)


async def _peeled_commits(git: Git, mirror: Path, oids: Sequence[str]) -> dict[str, str]:
    """The commit that each object leads to; nothing for a tag of something else, or one whose objects are missing."""
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
    return {oid: words[0] for oid, words in zip(oids, shown, strict=True) if words[1] == "commit"}
