"""What a mirror has outside of a base commit's closure; kept refs and unreachable objects count.

The mirror is trusted. git reads its store through a directory of ours, so that a partial clone
fetches nothing.
"""

import os
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..errors import CommitNotFoundError
from ..git.command import lines_of, run_git_sync
from ..model import CommitId
from ..quoting import decode_name
from .repository import TIMEOUT, TRIVIAL_BYTES, borrow, locate, read_closure

# what a mirror lacks is passed over, and all else of its future is compared
_WALK = ("rev-list", "--objects", "--missing=allow-any")


class FirstSeen(NamedTuple):
    """The first commit with an object, and its path there; None if no ref leads to it."""

    commit: str | None = None
    name: str | None = None


class Future:
    """The objects of the bare repository `mirror` outside the closure of `base`.

    `scratch` is an empty directory. Raises CommitNotFoundError if the mirror lacks the base.
    """

    def __init__(self, mirror: Path, base: CommitId, scratch: Path) -> None:
        self.mirror, self.base = mirror, base
        self._scratch = borrow(scratch, locate(mirror))
        kind, _ = self.look_up([base]).get(bytes.fromhex(base), ("missing", 0))
        if kind != "commit":
            raise CommitNotFoundError(
                f"cannot compare with {base}: {mirror} has no such commit",
                hint="sync that mirror, or name another one",
            )

    @cached_property
    def closure(self) -> set[bytes]:
        """The raw ids of the base commit's closure."""
        return read_closure(self.mirror, self.base, self._scratch)[0]

    @cached_property
    def past(self) -> set[bytes]:
        """The commits of the closure."""
        listed = run_git_sync("rev-list", self.base, git_dir=self.mirror, doing="list the past")
        return {bytes.fromhex(line) for line in listed.lines}

    @cached_property
    def names(self) -> set[str]:
        """The paths of the base commit and of the mirror's HEAD."""
        # 128: HEAD may name a branch that does not exist
        listings = (
            run_git_sync(
                "ls-tree", "-r", "-z", "--name-only", tip, git_dir=self.mirror, ok=(0, 128)
            )
            for tip in (self.base, "HEAD")
        )
        return {path for listing in listings for path in os.fsdecode(listing.stdout).split("\0")}

    def outside(self, ids: Iterable[bytes]) -> dict[bytes, str]:
        """Return the type of each of `ids` that is outside the closure. Ignores trivial blobs."""
        objects = self.candidates(ids)
        return {oid: kind for oid, kind in objects.items() if oid not in self.closure}

    def candidates(self, ids: Iterable[bytes]) -> dict[bytes, str]:
        """Return the type of each of `ids` that the mirror has, without trivial blobs."""
        return {
            oid: kind
            for oid, (kind, size) in self.look_up(oid.hex() for oid in ids).items()
            if kind != "blob" or size >= TRIVIAL_BYTES
        }

    def look_up(self, names: Iterable[str]) -> dict[bytes, tuple[str, int]]:
        listed = run_git_sync(
            "cat-file", "--buffer", "--batch-check=%(objectname) %(objecttype) %(objectsize)",
            git_dir=self._scratch, stdin=lines_of(names), timeout=TIMEOUT, doing="look up objects",
        )  # fmt: skip
        rows = (line.split() for line in listed.lines)
        return {bytes.fromhex(row[0]): (row[1], int(row[2])) for row in rows if len(row) == 3}

    def places(self, ids: Collection[bytes]) -> dict[bytes, FirstSeen]:
        """Find where each of `ids` appears first, from the oldest commit on."""
        wanted, commit = {oid.hex().encode() for oid in ids}, None
        places = dict[bytes, FirstSeen]()
        listing = self._scratch / "listing"
        # --in-commit-order lists an object after the first commit that has it; commits have no name
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
                    name = decode_name(line[41:-1])
                    places.setdefault(bytes.fromhex(oid.decode()), FirstSeen(commit, name))
        return places
