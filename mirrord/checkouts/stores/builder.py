"""The `.git` of a sealed or squashed checkout, built from nothing but what it may hold.

Owns `templates/<mirror>/gits/<history>-<commit>/.git`: a detached HEAD, a configuration of a few lines, the tags that point at
ancestors, closure packs as hard links; no remote, no alternates, no reflog, no hook, no index (whoever writes the tree writes
that). What stores have alike is on disk once (`shared_files.py`). Built in a temporary directory and renamed; the JSON beside
it is written last; a directory without it does not exist.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import structlog

from ...errors import InvalidRequestError
from ...git.command import Git
from ...git.workers import Workers
from ...host.trash import Trash, new_trash
from ...mirrors.coalesce import Coalescer
from ...model import CommitId, History, MirrorName, Resolved
from ..deferred import Deferred
from .closures import Closures, Commits, Recorded, nothing_recorded
from .packer import Graphs, Packer, PackFile, together
from .store import (
    CONFIG,
    GRAPH,
    SealedStore,
    building,
    let_go,
    link_or_copy,
    load,
    publish,
    read_records,
    remove_all,
    remove_leftovers,
    remove_unused,
    save,
    write_shared,
)
from .tags import Tag, Tags, packed_refs

_SQUASHED = """tree {tree}
author mirrord <mirrord@localhost> {time} +0000
committer mirrord <mirrord@localhost> {time} +0000

base of this task

The history before this commit is not part of the checkout.
"""
_SHARED = ("config", "packed-refs")
_DIRECTORIES = ("", "info", "objects", "objects/pack", "refs")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Contents:
    head: CommitId
    tree: str
    packs: tuple[PackFile, ...]
    tags: tuple[Tag, ...]
    graph: Path | None = None


class StoreBuilder:
    """The sealed stores of all mirrors, below `state_dir/templates`."""

    def __init__(
        self,
        *,
        state_dir: Path,
        git: Git,
        workers: Workers,
        mirrors_path: Callable[[MirrorName], Path],
        trash: Trash,
        recorded: Recorded = nothing_recorded,
    ) -> None:
        self.commits = Commits(workers, mirrors_path)
        self._store = state_dir / "templates"
        self._git = git
        self._packer = Packer(git, workers)
        self._tags = Tags(git)
        self._trash = trash
        self._afterwards = Deferred()
        self._graphs = Graphs(git, self._trash, self._afterwards)
        self._mirrors_path = mirrors_path
        self._closures = Closures(
            store=self._store,
            git=git,
            workers=workers,
            packer=self._packer,
            commits=self.commits,
            trash=self._trash,
            afterwards=self._afterwards,
            mirrors_path=mirrors_path,
            recorded=recorded,
        )
        self._found: dict[tuple[str, CommitId, History], SealedStore] = {}
        self._flights: Coalescer[SealedStore] = Coalescer()
        self._stores: dict[str, dict[Path, tuple[SealedStore, float]]] = {}
        self._read: set[str] = set()
        self._building: Counter[str] = Counter()

    async def open(self) -> None:
        """Remove what a killed build left."""
        await anyio.to_thread.run_sync(self._remove_leftovers)

    async def close(self) -> None:
        """Cancel what is being built, and what is written in the background."""
        await self._flights.close()
        await self._afterwards.close()

    def find(self, name: MirrorName, commit: CommitId, history: History) -> SealedStore | None:
        """The finished store, when there is one on disk."""
        key = (name.key, commit, history)
        found = self._found.get(key) or load(self._path(name, commit, history), name)
        if found is None or not found.git.exists():
            self._found.pop(key, None)
            return None
        self._found[key] = found
        self._stores.setdefault(name.key, {})[found.path] = found, time.time()
        return found

    async def ensure(self, name: MirrorName, commit: CommitId, history: History) -> SealedStore:
        """The store, built when there is none; once, however many ask, and as long as one of them waits.

        Raises CommitNotFoundError, CommitUnservableError, DiskFullError; InvalidRequestError for the linked history.
        """
        if history is History.LINKED:
            raise InvalidRequestError(
                "cannot seal a linked checkout: it shows all of its mirror",
                hint="ask for sealed or squashed",
            )
        return self.find(name, commit, history) or await self._flights.join(
            f"{name.key} {commit} {history}", lambda _: self._build(name, commit, history)
        )

    async def oldest_first(self, name: MirrorName, commits: Collection[CommitId]) -> list[CommitId]:
        """The order in which stores share most; commits that the mirror lacks come last."""
        done = await self._git.run(
            *("rev-list", "--no-walk", "--reverse", "--ignore-missing", "--stdin"),
            git_dir=self._mirrors_path(name),
            stdin="".join(f"{commit}\n" for commit in sorted(commits)).encode(),
            doing="order commits",
        )
        found = [CommitId(line) for line in done.lines]
        return [*found, *sorted(set(commits).difference(found))]

    # -- what is there ------------------------------------------------------------------------------------------------

    async def stores(self, name: MirrorName) -> list[tuple[SealedStore, float]]:
        """What is recorded of a mirror's stores, each with the time when it was asked for last."""
        if name.key not in self._read:
            found = await anyio.to_thread.run_sync(read_records, self._directory(name), name)
            self._stores[name.key] = found | self._stores.get(name.key, {})
            self._read.add(name.key)
        return list(self._stores[name.key].values())

    async def drop(self, gitdir: SealedStore) -> None:
        """Remove one store that nobody uses; its packs stay."""
        await self.remove(self.retire(gitdir))

    async def remove(self, retired: Path) -> None:
        """Delete what `retire` answered."""
        await anyio.to_thread.run_sync(_remove, retired, self._trash)

    def retire(self, gitdir: SealedStore) -> Path:
        """Take one store out of use at once; answers what to delete. Frees no block itself, which may wait for the disk."""
        gone = new_trash(gitdir.path.parent)
        try:
            gitdir.path.rename(gone)  # at once, so that nobody mounts half of it
            gitdir.record.rename(gone / gitdir.record.name)
        except FileNotFoundError:
            gitdir.record.unlink(missing_ok=True)
        self._found.pop((gitdir.mirror.key, gitdir.commit, gitdir.history), None)
        self._stores.get(gitdir.mirror.key, {}).pop(gitdir.path, None)
        return gone

    async def discard(self, place: Path) -> None:
        """Remove one store, or one layer of closures, that is worth nothing; gone already is fine."""
        await anyio.to_thread.run_sync(remove_all, [place], self._trash)

    async def drop_unneeded_packs(self, name: MirrorName) -> None:
        """Remove the closure packs that no store has; not while one is being built, which has not linked its own yet."""
        await self.stores(name)

        def needed() -> set[str] | None:
            if self._building[name.key]:
                return None
            return {pack for gitdir, _ in self._stores[name.key].values() for pack in gitdir.packs}

        await self._closures.keep_only(name, needed)

    async def forget(self, name: MirrorName) -> None:
        """Remove every store and pack of a mirror that was removed."""
        self._found = {key: gitdir for key, gitdir in self._found.items() if key[0] != name.key}
        self._stores.pop(name.key, None)
        self._read.discard(name.key)
        self._closures.forget(name)
        for directory in (self._directory(name), self._closures.directory(name)):
            await anyio.to_thread.run_sync(_clear, directory, self._trash)

    def _path(self, name: MirrorName, commit: CommitId, history: History) -> Path:
        return self._directory(name) / f"{history}-{commit}"

    def _directory(self, name: MirrorName) -> Path:
        return self._store / str(name) / "gits"

    def _remove_leftovers(self) -> None:
        for directory in (*self._store.glob("*/gits"), *self._store.glob("*/packs")):
            if removed := remove_leftovers(directory, self._trash) + remove_unused(
                directory, self._trash
            ):
                log.info("leftovers.removed", directory=str(directory), count=removed)

    # -- building -----------------------------------------------------------------------------------------------------

    async def _build(self, name: MirrorName, commit: CommitId, history: History) -> SealedStore:
        self._building[name.key] += 1
        try:
            return await self._build_new(name, commit, history)
        finally:
            self._building[name.key] -= 1

    async def _build_new(self, name: MirrorName, commit: CommitId, history: History) -> SealedStore:
        directory = self._directory(name)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with building(directory, self._trash) as temporary:
            scratch = temporary / "scratch"
            contents = await self._contents(name, commit, history, scratch)
            control = await anyio.to_thread.run_sync(
                _write, directory, temporary / ".git", contents
            )
            if history is History.SQUASHED:
                await anyio.to_thread.run_sync(shutil.rmtree, scratch)
            target = self._path(name, commit, history)
            publish(temporary, target)
        gitdir = _describe(target, name, commit, history, contents)
        save(gitdir, control)
        self._found[name.key, commit, history] = gitdir
        self._stores.setdefault(name.key, {})[gitdir.path] = gitdir, time.time()
        log.info(
            "store.built",
            mirror=str(name),
            commit=commit,
            history=str(history),
            packs=len(gitdir.packs),
            tags=gitdir.tag_count,
        )
        return gitdir

    async def _contents(
        self, name: MirrorName, commit: CommitId, history: History, scratch: Path
    ) -> _Contents:
        if history is History.SQUASHED:
            return await self._squashed(name, await self.commits.get(name, commit), scratch)
        mirror = self._mirrors_path(name)
        found, packs, tags = await together(
            self.commits.get(name, commit),
            self._closures.ensure(name, commit),
            self._tags.list(mirror),
        )
        shown = await self._tags.within(tags, [pack.index for pack in packs])
        return _Contents(commit, found.tree, packs, tuple(shown), self._graphs.find(packs))

    async def _squashed(self, name: MirrorName, found: Resolved, scratch: Path) -> _Contents:
        body = _SQUASHED.format(tree=found.tree, time=found.time).encode()
        head = CommitId(_object_id(b"commit", body))
        objects = scratch / "objects"
        _write_loose(objects, head, b"commit", body)
        mirror = self._mirrors_path(name)
        pack = await self._packer.pack_range(mirror, head, None, into=scratch, extra=objects)
        return _Contents(head, found.tree, (pack,), ())


# -- on disk ----------------------------------------------------------------------------------------------------------


def _write(stores: Path, git: Path, contents: _Contents) -> tuple[bytes, ...]:
    """Answers the bytes of HEAD and of what is shared."""
    for directory in _DIRECTORIES:
        os.mkdir(f"{git}/{directory}", 0o755)
    for pack in contents.packs:
        for source in (pack.path, pack.index):
            link_or_copy(source, git / "objects/pack" / source.name)
    if contents.graph:
        (git / GRAPH).parent.mkdir(mode=0o755)
        link_or_copy(contents.graph, git / GRAPH)
    head, *shared = control = f"{contents.head}\n".encode(), CONFIG, packed_refs(contents.tags)
    (git / "HEAD").write_bytes(head)
    for name, content in zip(_SHARED, shared, strict=True):
        write_shared(stores, git / name, content)
    return control


def _remove(store: Path, trash: Trash) -> None:
    for name in _SHARED:
        let_go(store.parent, store / ".git" / name)
    trash.remove(store)


def _clear(directory: Path, trash: Trash) -> None:
    """Remove all that is in it, and it, unless something stays."""
    remove_all(directory.glob("*"), trash)
    with suppress(OSError):
        directory.rmdir()


def _describe(
    target: Path, name: MirrorName, commit: CommitId, history: History, contents: _Contents
) -> SealedStore:
    return SealedStore(
        path=target,
        mirror=name,
        commit=commit,
        history=history,
        head=contents.head,
        tree=contents.tree,
        packs=tuple(pack.path.name for pack in contents.packs),
        pack_sizes=tuple(pack.size_bytes for pack in contents.packs),
        tag_count=len(contents.tags),
    )


def _object_id(kind: bytes, body: bytes) -> str:
    return hashlib.sha1(b"%s %d\0%s" % (kind, len(body), body), usedforsecurity=False).hexdigest()


def _write_loose(objects: Path, oid: str, kind: bytes, body: bytes) -> None:
    file = objects / oid[:2] / oid[2:]
    file.parent.mkdir(parents=True)
    file.write_bytes(zlib.compress(b"%s %d\0%s" % (kind, len(body), body)))
