"""What a mirror has and a base commit does not lead to: the content that must not be found.

Kept refs and objects that no ref reaches count. The mirror is trusted; git looks into its store
through a directory of ours, so that a partial clone fetches nothing.
"""

import os
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..errors import CommitNotFoundError, CorruptObjectError, GitFailedError
from ..git.command import lines_of, run_git_sync
from ..git.process import UNTRUSTING
from ..model import CommitId
from .repository import TIMEOUT, borrow, locate

TRIVIAL_BYTES = 64
"""Shorter files say nothing: a coding line, one import, a line feed."""
_WALK = ("rev-list", "--objects", "--missing=allow-any")


class Place(NamedTuple):
    """The first commit with an object, and its path there; None where no ref leads to it."""

    commit: str | None = None
    name: str | None = None


class Future:
    """The objects of the bare repository `mirror` outside the closure of `base`.

    `scratch` is an empty directory. Raises CommitNotFoundError where the mirror lacks the base.
    """

    def __init__(self, mirror: Path, base: CommitId, scratch: Path) -> None:
        self.mirror, self.base = mirror, base
        self._scratch = borrow(scratch, locate(mirror))
        kind, _ = self._look_up([base]).get(bytes.fromhex(base), ("missing", 0))
        if kind != "commit":
            raise CommitNotFoundError(
                f"cannot compare with {base}: {mirror} has no such commit",
                hint="sync that mirror, or name another one",
            )

    @cached_property
    def closure(self) -> set[bytes]:
        """The raw ids of everything that the base commit leads to."""
        return read_closure(self.mirror, self.base, self._scratch)[0]

    @cached_property
    def past(self) -> set[bytes]:
        """The commits among them."""
        listed = run_git_sync("rev-list", self.base, git_dir=self.mirror, doing="list the past")
        return {bytes.fromhex(line) for line in listed.lines}

    @cached_property
    def names(self) -> set[str]:
        """The paths of the base commit and of the mirror's HEAD."""
        listings = (
            run_git_sync(
                "ls-tree", "-r", "-z", "--name-only", tip, git_dir=self.mirror, ok=(0, 128)
            )
            for tip in (self.base, "HEAD")
        )
        return {path for each in listings for path in os.fsdecode(each.stdout).split("\0")}

    def outside(self, ids: Iterable[bytes]) -> dict[bytes, str]:
        """The type of each of `ids` that is one of the objects. Trivial blobs never are."""
        found = {
            oid: kind
            for oid, (kind, size) in self._look_up(oid.hex() for oid in ids).items()
            if kind != "blob" or size >= TRIVIAL_BYTES
        }
        return {oid: kind for oid, kind in found.items() if oid not in self.closure}

    def _look_up(self, names: Iterable[str]) -> dict[bytes, tuple[str, int]]:
        """Type and size of those objects that the mirror has."""
        listed = run_git_sync(
            "cat-file", "--buffer", "--batch-check=%(objectname) %(objecttype) %(objectsize)",
            git_dir=self._scratch, stdin=lines_of(names), timeout=TIMEOUT, doing="look up objects",
        )  # fmt: skip
        rows = (line.split() for line in listed.lines)
        return {bytes.fromhex(row[0]): (row[1], int(row[2])) for row in rows if len(row) == 3}

    def places(self, ids: Collection[bytes]) -> dict[bytes, Place]:
        """Where each of `ids` comes up first, from the oldest commit on."""
        wanted, commit = {oid.hex().encode() for oid in ids}, None
        found = dict[bytes, Place]()
        listing = self._scratch / "listing"
        # --in-commit-order: an object follows the first commit that has it; commits have no name
        order = ("--in-commit-order", "--reverse", "--all", "--not", self.base)
        run_git_sync(
            *_WALK, *order,
            git_dir=self.mirror, stdout_path=listing, timeout=TIMEOUT, doing="walk the mirror",
        )  # fmt: skip
        with listing.open("rb") as lines:
            for line in lines:
                oid = line[:40]
                if line[40:] == b"\n":
                    commit = oid.decode()
                elif oid in wanted:
                    name = line[41:-1].decode("utf-8", "surrogateescape")
                    found.setdefault(bytes.fromhex(oid.decode()), Place(commit, name))
        return found


def read_closure(git_dir: Path, tip: str, scratch: Path) -> tuple[set[bytes], bool]:
    """Every object that `tip` leads to, and whether none is missing. `scratch` is a directory."""
    listing, complete = scratch / "closure", False
    walk = (*UNTRUSTING, "rev-list", "--objects", "--no-object-names")
    for options in ((), ("--missing=allow-any",)):
        try:
            run_git_sync(
                *walk, *options, tip,
                git_dir=git_dir, stdout_path=listing, timeout=TIMEOUT, doing=f"walk {tip}",
            )  # fmt: skip
        except (CorruptObjectError, GitFailedError):
            continue
        complete = not options
        break
    with listing.open("rb") as file:
        return {bytes.fromhex(line[:40].decode()) for line in file}, complete
