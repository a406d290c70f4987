"""Which tags of a mirror a sealed checkout may show: those that point at its base commit or an ancestor.

Membership is asked of the closure packs themselves, so a tag cannot bring in a commit that is not there. A tag whose objects are
damaged is left out: it is no reason to refuse the checkout.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import Git
from ..git.packs import PackIndex

_POINTS_AT = re.compile(rb"object ([0-9a-f]{40})\ntype (commit|tag)\n")


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """`objects` are the tag objects on the way from the ref to `commit`, outermost first; none for a lightweight tag."""

    ref: bytes
    commit: str
    objects: tuple[str, ...] = ()


async def tags_within(git: Git, mirror: Path, indexes: Sequence[PackIndex]) -> list[Tag]:
    """The tags of `mirror` whose commit is in one of `indexes`, sorted by name."""
    listed = await git.run("for-each-ref", "--format=%(objectname) %(refname)", "refs/tags", git_dir=mirror, doing="list tags")
    direct = {ref: oid.decode() for oid, _, ref in (line.partition(b" ") for line in listed.stdout.splitlines())}
    peeled = await _peeled_commits(git, mirror, sorted(set(direct.values())))
    inside = {oid: commit for oid, commit in peeled.items() if any(bytes.fromhex(commit) in index for index in indexes)}
    chains = await _chains(git, mirror, {oid for oid, commit in inside.items() if oid != commit})
    tags = [
        Tag(ref, inside[oid], chains.get(oid, ()))
        for ref, oid in direct.items()
        if oid in inside and (oid == inside[oid] or oid in chains)
    ]
    return sorted(tags)


def packed_refs(tags: Sequence[Tag]) -> bytes:
    """The packed-refs file of a sealed checkout."""
    lines = [b"# pack-refs with: peeled fully-peeled sorted \n"]
    for tag in sorted(tags):
        target = tag.objects[0] if tag.objects else tag.commit
        lines.append(target.encode() + b" " + tag.ref + b"\n")
        if tag.objects:
            lines.append(b"^" + tag.commit.encode() + b"\n")
    return b"".join(lines)


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


async def _chains(git: Git, mirror: Path, oids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """For each tag object the tag objects on the way to its commit, itself first; damaged ones are left out."""
    targets: dict[str, tuple[str, bytes]] = {}
    pending = set(oids)
    while pending:
        found = await _targets(git, mirror, pending)
        targets |= found
        pending = {target for target, kind in found.values() if kind == b"tag"} - targets.keys()
    chains = {oid: _follow(oid, targets) for oid in oids}
    return {oid: chain for oid, chain in chains.items() if chain}


def _follow(oid: str, targets: dict[str, tuple[str, bytes]]) -> tuple[str, ...]:
    chain: list[str] = []
    kind = b"tag"
    while kind == b"tag":
        if oid not in targets:
            return ()
        chain.append(oid)
        oid, kind = targets[oid]
    return tuple(chain)


async def _targets(git: Git, mirror: Path, oids: Collection[str]) -> dict[str, tuple[str, bytes]]:
    """Where each readable tag object points: id and type."""
    if not oids:
        return {}
    asked = "".join(f"{oid}\n" for oid in sorted(oids)).encode()
    try:
        done = await git.run("cat-file", "--batch", git_dir=mirror, stdin=asked, doing="read tags")
    except (CorruptObjectError, GitFailedError):
        if len(oids) == 1:
            return {}
        one_by_one = [await _targets(git, mirror, (oid,)) for oid in sorted(oids)]
        return {oid: target for found in one_by_one for oid, target in found.items()}
    return parse_targets(done.stdout)


def parse_targets(output: bytes) -> dict[str, tuple[str, bytes]]:
    targets: dict[str, tuple[str, bytes]] = {}
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        words = output[at:end].split()
        at = end + 1
        if len(words) != 3:
            continue
        body = output[at : at + int(words[2])]
        at += len(body) + 1
        if words[1] == b"tag" and (found := _POINTS_AT.match(body)):
            targets[words[0].decode()] = (found[1].decode(), found[2])
    return targets
