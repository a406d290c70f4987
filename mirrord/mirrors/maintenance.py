"""Maintenance of a mirror: packs, commit-graph, refs, and files that killed gits left.

Never drops an object that a ref reaches; git refuses to repack when one is missing. Unreachable
objects go to a cruft pack and expire thirty days after they were last written, so an object that
was fetched by id and is not pinned yet is safe.
"""

import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import anyio
from anyio import to_thread

from ..errors import MirrordError
from ..git.command import low_priority
from ..git.packs import PackIndex, packs_in
from ..presence import exists, lexists, matching, walk
from ..protocol import ProgressSink
from ..telemetry import log
from .quarantine import held_files
from .repository import Repository


async def maintain(repository: Repository, progress: ProgressSink | None = None) -> None:
    """Pack objects and refs. The caller holds the mirror's lock.

    A full repack is made every thirty days. Otherwise packs are merged in a geometric series, whose
    cost depends on what is new.
    """
    stamp, deadline = repository.path / "mirrord-repacked", timedelta(hours=6)

    def needs_full() -> bool:
        packs = len(packs_in(repository.objects / "pack", ".pack"))
        age = time.time() - stamp.stat().st_mtime if exists(stamp) else math.inf
        return packs > 1 and (packs > 20 or age > timedelta(days=30).total_seconds())

    await to_thread.run_sync(remove_stale_files, repository.path, timedelta(hours=1))
    try:
        await repository.pack_refs()
        full = await to_thread.run_sync(needs_full)
        how = ("--cruft", "--cruft-expiration=30.days.ago") if full else ("--geometric=2",)
        with low_priority():
            await repository.run(
                "repack", "-d", "--write-midx", "--no-write-bitmap-index", *how,
                timeout=deadline, progress=progress, doing=f"pack mirror {repository.name}",
            )  # fmt: skip
            # a full repack may expire commits, which a layer below would still name
            split = "--split=replace" if full else "--split"
            await repository.run(
                "commit-graph", "write", "--reachable", "--changed-paths", split,
                timeout=deadline, doing=f"write the commit-graph of mirror {repository.name}",
            )  # fmt: skip
    finally:
        with anyio.CancelScope(shield=True):
            # a git that succeeds may leave files too, because it only warns
            await to_thread.run_sync(remove_stale_files, repository.path, timedelta())
            await repair_incomplete_packs(repository)
    if full:
        await to_thread.run_sync(stamp.touch)


async def repair_incomplete_packs(repository: Repository) -> None:
    """Index a pack without an index; remove an index without a pack, if its objects are elsewhere.

    git ignores a pack without an index, and removes the pack before the index. So a killed repack
    leaves an index alone; where its objects are not elsewhere, the pack is lost, and the audit
    reports it. The caller holds the mirror's lock, or the daemon starts.
    """
    mirror, directory = str(repository.name), repository.objects / "pack"
    packs, indexes = await to_thread.run_sync(packs_and_indexes, directory)
    for stem in sorted(packs - indexes):
        pack = Path(f"{stem}.pack")
        try:
            await repository.run("index-pack", str(pack), doing=f"index {pack.name}")
            log.info("pack.indexed", mirror=mirror, pack=pack.name)
        except MirrordError as error:  # damaged: the audit reports it
            log.warning("pack.refused", mirror=mirror, pack=pack.name, detail=error.message)
    for stem in sorted(indexes - packs):
        try:
            ids = await to_thread.run_sync(lambda path: list(PackIndex(path)), Path(f"{stem}.idx"))
            lost = await repository.absent(oid.hex() for oid in ids)
        except (MirrordError, OSError) as error:
            log.warning("pack.lost", mirror=mirror, pack=stem.name, detail=str(error))
            continue
        if lost:
            log.warning("pack.lost", mirror=mirror, pack=stem.name, objects=len(lost))
            continue
        for file in await to_thread.run_sync(matching, directory, f"{stem.name}.*"):
            file.unlink(missing_ok=True)
            log.info("stale_file.removed", path=str(file.relative_to(repository.path.parent)))


def packs_and_indexes(directory: Path) -> tuple[set[Path], set[Path]]:
    """Return the packs and the indexes in a directory, without their suffixes."""
    packs, indexes = (
        {it.with_suffix("") for it in packs_in(directory, end)} for end in (".pack", ".idx")
    )
    return packs, indexes


# -- stale files ------------------------------------------------------------------------------

_STALE = re.compile(
    r"tmp_(pack|idx|rev|obj|midx|graph|bitmap)_\w+|.*\.lock|gc\.pid|mirrord-(transaction|proof)\.new"
    r"|packed-refs\.new"  # while it exists, git (2.39) deletes and packs no ref
    r"|(refs|packs)_\w{6}"  # of update-server-info, which repack runs
)
# a finished pack of `git repack`, which renames all of them at its end and holds none open
_OF_PROCESS = re.compile(r"\.tmp-(\d+)-pack-.*")
_REUSED_S = 3600.0  # by then the number may be another process's


# of the whole mirror; those of single refs are cleared where a transaction fails
_LOCKS = (
    "packed-refs.lock", "packed-refs.new", "HEAD.lock", "config.lock",
    "objects/pack/multi-pack-index.lock", "objects/info/commit-graphs/commit-graph-chain.lock",
)  # fmt: skip


async def remove_stale_locks(path: Path) -> None:
    """Remove what would stop each git that changes the mirror; the caller has just locked it.

    Only a few names are looked up, so that a look costs little where nothing is in the way.
    """
    if any(lexists(path / name) for name in _LOCKS):
        await to_thread.run_sync(remove_stale_files, path, timedelta())


def remove_stale_files(path: Path, age: timedelta) -> int:
    """Remove locks and temporary files that are at least `age` old; return their count.

    Those that a process holds stay. `age` may be zero where no git of this daemon can be running:
    at a start, or under the mirror's lock. A file whose name has the number of its git is kept
    while that runs. Locks of linked worktrees belong to their owners and stay.
    """
    now, candidates = time.time(), list[Path]()
    for file, git_pid in iter_temporary_files(path):
        if git_pid and not _is_running_git(git_pid):
            candidates.append(file)
            continue
        oldest = now - (_REUSED_S if git_pid else age.total_seconds())
        with suppress(FileNotFoundError):
            if file.lstat().st_mtime <= oldest:
                candidates.append(file)
    held = held_files(path) if candidates else set()
    stale = [file for file in candidates if file not in held]
    for file in stale:
        file.unlink(missing_ok=True)
        log.info("stale_file.removed", path=str(file.relative_to(path.parent)))
    return len(stale)


def iter_temporary_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Iterate over locks and temporary files, each with the process number in its name, or ''."""
    for directory, below, files in walk(path):
        if directory == str(path) and "worktrees" in below:
            below.remove("worktrees")
        for name in files:
            if match := _OF_PROCESS.fullmatch(name):
                yield Path(directory, name), match[1]
            elif _STALE.fullmatch(name):
                yield Path(directory, name), ""


def _is_running_git(pid: str) -> bool:
    try:
        # the name stands in brackets, and may have brackets and blanks of its own
        name, state = Path("/proc", pid, "stat").read_text().partition("(")[2].rsplit(") ", 1)
    except OSError:
        return False
    # a container without an init does not reap dead processes
    return name.startswith("git") and state[0] not in "ZX"


def size_bytes(path: Path) -> int:
    """Return the disk usage of a directory; hard links count once."""
    sizes: dict[int, int] = {}
    for directory, _, files in walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                stat = os.lstat(os.path.join(directory, name))
                # the unit of st_blocks on Linux, whatever the blocks of the file system are
                sizes[stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())
