"""The head of a bundle file: what it holds, and what it builds on. The pack behind it is git's business.

Reads files that anybody may have written: within bounds, and every name and id is checked. Starts no git.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...errors import InvalidBundleError
from ...model import shown
from ..repository import Refs

_VERSIONS = {b"# v2 git bundle\n": 2, b"# v3 git bundle\n": 3}
_PLAIN = b"@object-format=sha1\n"
_MAX_LINE = 8192
_MAX_LINES = 10_000_000
_PREREQUISITE = re.compile(r"-([0-9a-f]{40})(?: .*)?")
_REF = re.compile(r"([0-9a-f]{40}) (\S.*)")


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """`refs` may hold `HEAD`. `prerequisites` are commits that must be there already; `pack_at` is where the pack begins."""

    prerequisites: tuple[str, ...]
    refs: Refs
    pack_at: int


def header_bytes(prerequisites: Iterable[str], refs: Refs) -> bytes:
    """The head of a bundle as git writes it; the pack follows."""
    lines = [
        "# v2 git bundle",
        *(f"-{oid} " for oid in sorted(prerequisites)),
        *(f"{oid} {ref}" for ref, oid in sorted(refs.items())),
    ]
    return "".join(f"{line}\n" for line in [*lines, ""]).encode("utf-8", "surrogateescape")


def read_header(path: Path) -> BundleHeader:
    """Read the head of a bundle file; raises InvalidBundleError."""
    with path.open("rb") as file:
        version = _VERSIONS.get(file.readline(_MAX_LINE))
        if version is None:
            raise _refused("it does not begin like a git bundle")
        prerequisites: list[str] = []
        refs: Refs = {}
        for line in _lines(file, version):
            if found := _PREREQUISITE.fullmatch(line):
                prerequisites.append(found[1])
            elif found := _REF.fullmatch(line):
                refs[found[2]] = found[1]
            else:
                raise _refused(f"{shown(line)} is no line of a bundle's head")
        if not refs:
            raise _refused("it holds no refs")
        return BundleHeader(tuple(prerequisites), refs, file.tell())


def _lines(file: BinaryIO, version: int) -> Iterator[str]:
    """The lines up to the empty one that ends the head."""
    for _ in range(_MAX_LINES):
        raw = file.readline(_MAX_LINE)
        if raw == b"\n":
            return
        if not raw.endswith(b"\n"):
            raise _refused("it ends in the middle of its head")
        if version == 3 and raw.startswith(b"@"):
            if raw != _PLAIN:
                raise _refused(
                    f"it needs {shown(raw.decode('utf-8', 'replace').strip())}, which mirrors do not have"
                )
            continue
        yield raw[:-1].decode("utf-8", "surrogateescape")
    raise _refused("it holds too many refs")


def _refused(fact: str) -> InvalidBundleError:
    return InvalidBundleError(
        f"cannot read the bundle: {fact}",
        hint="make it with `mirrord bundle create`, or with `git bundle create` of git 2.x",
    )
