"""Proofs that are kept: the commits of a mirror whose closures were found whole.

A proof holds while every file that held objects then is still the same, by size, inode and time:
new files damage nothing. Bytes that change without a trace are for audits, which believe no proof
and end it with a finding. Work under the mirror's lock writes it.
"""

import json
import os
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from anyio import to_thread

from ..git.command import lines_of
from ..host.files import read_plain
from ..model import CommitId
from ..presence import exists
from .repository import Repository, read_refs_of

PROOF = "mirrord-proof"
_ID_BYTES = 20
# git reads each exclusion before it begins; the newest exclude what the others do
_MOST_TIPS = 1_000
_COMMIT = re.compile(rb"(?m)^\d+ ([0-9a-f]{40})$")
_Files = dict[str, list[int]]


class _Proof(NamedTuple):
    """`commits` are ids in binary, sorted; `tips` are those of them that walks began at."""

    files: _Files
    tips: list[str]
    commits: bytes

    def has(self, commit: str) -> bool:
        ids, wanted = self.commits, bytes.fromhex(commit)
        numbers = range(len(ids) // _ID_BYTES)
        at = bisect_left(numbers, wanted, key=lambda number: _id_at(ids, number))
        return at < len(numbers) and _id_at(ids, at) == wanted


def _id_at(ids: bytes, number: int) -> bytes:
    return ids[number * _ID_BYTES : (number + 1) * _ID_BYTES]


def find_proven(git_dir: Path, commits: Collection[CommitId]) -> set[CommitId]:
    """Return the commits of which a proof holds; starts no git."""
    if not commits or not exists(git_dir / PROOF):
        return set()
    proof = _read(git_dir, _list_files(git_dir))
    return {commit for commit in commits if proof.has(commit)} if proof else set()


def are_proven(wanted: Iterable[tuple[Path, Mapping[str, CommitId]]]) -> list[bool]:
    """Return, of each mirror, whether it has these refs and a proof of their commits."""

    def is_proven(git_dir: Path, refs: Mapping[str, CommitId]) -> bool:
        try:
            has_refs = refs.items() <= (read_refs_of(git_dir) or {}).items()
            return has_refs and find_proven(git_dir, refs.values()) == {*refs.values()}
        except OSError:
            return False

    return [is_proven(git_dir, refs) for git_dir, refs in wanted]


def end_proof(git_dir: Path) -> None:
    """Let everything be walked again."""
    with suppress(OSError):  # where nothing can be removed, nothing can be pinned either
        (git_dir / PROOF).unlink()


async def prove(repository: Repository, commits: Sequence[CommitId]) -> None:
    """Prove that all that `commits` reach is present, and keep the proof.

    Walks what no earlier proof has; of ids that are no commits, nothing is kept. Raises
    CorruptObjectError or GitFailedError.
    """
    # before the walk: a file that goes during it ends the proof
    files, old = await to_thread.run_sync(_look, repository.path)
    reached, rest = list[bytes](), b""
    async with repository.git.stream(
        # commits come first, with a time before the id; a commit-graph would hide a deleted one
        "-c", "core.commitGraph=false", "rev-list", "--objects", "--no-object-names", "--timestamp",
        "--stdin",
        git_dir=repository.path,
        stdin=lines_of([*commits, *(f"^{tip}" for tip in (old.tips if old else ()))]),
        doing=f"verify the closure in mirror {repository.name}",
    ) as pieces:  # fmt: skip
        async for piece in pieces:
            whole, _, rest = (rest + piece).rpartition(b"\n")
            if b" " in whole:
                reached += _COMMIT.findall(whole)
    await to_thread.run_sync(_extend, repository.path, files, old, commits, reached)


# 60 MB in memory while a proof is extended; a mirror with more is walked each time
_MOST_COMMITS = 500_000


def _extend(
    git_dir: Path, files: _Files, old: _Proof | None, commits: Sequence[str], reached: list[bytes]
) -> None:
    ids = {bytes.fromhex(oid.decode()) for oid in reached}
    if old:
        ids.update(_id_at(old.commits, n) for n in range(len(old.commits) // _ID_BYTES))
    if not files or len(ids) > _MOST_COMMITS:
        return
    walked = (commit for commit in commits if bytes.fromhex(commit) in ids)
    tips = [*(old.tips if old else ()), *walked][-_MOST_TIPS:]
    head = json.dumps({"files": files, "tips": tips}).encode() + b"\n"
    new = git_dir / f"{PROOF}.new"
    with suppress(OSError):  # without it the next import walks again
        new.write_bytes(head + b"".join(sorted(ids)))
        new.replace(git_dir / PROOF)


def _look(git_dir: Path) -> tuple[_Files, _Proof | None]:
    files = _list_files(git_dir)
    return files, _read(git_dir, files)


def _read(git_dir: Path, files: _Files) -> _Proof | None:
    """Read the proof, if it holds with these files."""
    try:
        head, _, commits = read_plain(git_dir / PROOF).partition(b"\n")
        document = json.loads(head)
        proof = _Proof(document["files"], document["tips"], commits)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # not flushed: a power cut may have left a part
    is_whole = len(commits) % _ID_BYTES == 0 and all(map(proof.has, proof.tips))
    is_same = all(files.get(path) == facts for path, facts in proof.files.items())
    return proof if is_whole and is_same else None


def _list_files(git_dir: Path) -> _Files:
    """Return size, inode and time of each file that holds objects, and of what hides history."""
    files: _Files = {}
    with os.scandir(git_dir / "objects") as directories:
        names = [each.name for each in directories if re.fullmatch("pack|[0-9a-f]{2}", each.name)]
    for name in names:
        # maintenance, which a look without the lock may meet, removes directories that it emptied
        with suppress(FileNotFoundError), os.scandir(git_dir / "objects" / name) as entries:
            for entry in entries:
                if name != "pack" or entry.name.endswith((".pack", ".idx")):
                    with suppress(FileNotFoundError):
                        files[f"{name}/{entry.name}"] = _facts_of(entry.stat())
    # a walk ends at them; without them it would go on
    for path in ("shallow", "info/grafts", "objects/info/alternates"):
        with suppress(FileNotFoundError, NotADirectoryError):
            files[path] = _facts_of((git_dir / path).stat())
    return files


def _facts_of(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_ino, status.st_mtime_ns]
