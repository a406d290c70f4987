"""What is in a repository, read without mirrord: every object with what it names, hashed here."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gitrepos import ENV, git

_NAMED = {
    "commit": re.compile(rb"^(?:tree|parent) ([0-9a-f]{40})$", re.MULTILINE),
    "tag": re.compile(rb"^object ([0-9a-f]{40})$", re.MULTILINE),
}
_GITLINK = b"160000"


def objects_in(repository: Path) -> set[str]:
    """Every object that git lists, sound or not."""
    return set(
        git(
            repository,
            "cat-file",
            "--batch-all-objects",
            "--unordered",
            "--batch-check=%(objectname)",
        ).split()
    )


def links_of(repository: Path) -> dict[str, frozenset[str]]:
    """Every object that a ref reaches, with those that it names."""
    reached = git(repository, "rev-list", "--objects", "--no-object-names", "--all").split()
    return {oid: frozenset(_named(kind, body)) for oid, kind, body in _read(repository, reached)}


def readable(repository: Path, oids: Iterable[str]) -> set[str]:
    """Those that git gives as what they are named; one at which git ends is not."""
    pending = sorted(oids)
    good: set[str] = set()
    while pending:
        seen = 0
        for oid, kind, body in _read(repository, pending):
            seen = pending.index(oid) + 1
            if (
                hashlib.sha1(
                    b"%s %d\0%s" % (kind.encode(), len(body), body), usedforsecurity=False
                ).hexdigest()
                == oid
            ):
                good.add(oid)
        pending = [] if seen == len(pending) else pending[seen + 1 :] if seen else pending[1:]
    return good


def _read(repository: Path, oids: Iterable[str]) -> Iterator[tuple[str, str, bytes]]:
    """As many as git gives before it ends; what it calls missing is left out."""
    asked = "".join(f"{oid}\n" for oid in oids).encode()
    command = ["git", "-c", "core.commitGraph=false", "cat-file", "--batch"]
    output = subprocess.run(
        command, cwd=repository, input=asked, env=ENV, capture_output=True, check=False
    ).stdout
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        words = output[at:end].decode().split()
        at = end + 1
        if len(words) == 3:
            size = int(words[2])
            if at + size > len(output):
                return
            yield words[0], words[1], output[at : at + size]
            at += size + 1


def _named(kind: str, body: bytes) -> Iterator[str]:
    if kind == "tree":
        at = 0
        while at < len(body):
            end = body.index(b"\0", at)
            if not body[at:end].startswith(_GITLINK):
                yield body[end + 1 : end + 21].hex()
            at = end + 21
    elif kind in _NAMED:
        header = body.partition(b"\n\n")[0]
        yield from (oid.decode() for oid in _NAMED[kind].findall(header))


class Bundled(NamedTuple):
    """The objects that a bundle holds, and those that its deltas build on without holding them."""

    own: set[str]
    bases: set[str]


def objects_of_bundle(bundle: Path, lender: Path) -> Bundled:
    """What `git index-pack` finds in it beside the objects of `lender`."""
    pack = bundle.read_bytes().partition(b"\n\n")[2]
    count = int.from_bytes(pack[8:12], "big")
    with tempfile.TemporaryDirectory() as directory:
        git(Path(directory), "init", "-q", "--bare", ".")
        (Path(directory) / "objects/info/alternates").write_text(f"{lender / 'objects'}\n")
        git(Path(directory), "index-pack", "--stdin", "--fix-thin", stdin=pack)
        (index,) = Path(directory).glob("objects/pack/*.idx")
        listed = sorted(
            (int(line.split()[0]), line.split()[1])
            for line in git(Path(directory), "show-index", stdin=index.read_bytes()).splitlines()
        )
    return Bundled({oid for _, oid in listed[:count]}, {oid for _, oid in listed[count:]})
