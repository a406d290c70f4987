"""Proving again, by content, what checkouts of one mirror are made from: layers, sealed stores and their packs.

What is damaged goes out of use, so that the next checkout builds it again; what a checkout holds stays until it lets go. Never
touches a mirror or a checkout.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from ...git.packfile import pack_is_whole
from ...git.workers import Workers
from ...host.processes import lower_priority
from ...jobs.events import Events
from ...model import CommitId, History, MirrorName
from ..stores.builder import StoreBuilder
from ..stores.store import is_as_built, read_records
from .registry import MirrorTemplates, TemplateRegistry

_TIMEOUT = timedelta(hours=1)
_REBUILT = "it is out of use, and the next checkout builds it again"
_HELD = "a checkout holds it: release that, and scrub again"


class Scrub:
    """Looks at one shelf after the other."""

    def __init__(
        self, *, shelves: TemplateRegistry, gitdirs: StoreBuilder, workers: Workers, events: Events
    ) -> None:
        self._shelves = shelves
        self._gitdirs = gitdirs
        self._workers = workers
        self._events = events

    async def perform(self, name: MirrorName) -> dict[str, str]:
        """What was damaged, with what became of it."""
        shelf = self._shelves.get(name)
        found = await self._layers(shelf) | await self._packs(name, shelf)
        found |= await self._stores(name, shelf)
        await self._shelves.sweep()
        return found

    async def _layers(self, shelf: MirrorTemplates) -> dict[str, str]:
        found = {}
        for tree in list(shelf.layers):
            if tree not in shelf.layers or await self._shelves.is_sound(shelf, tree):
                continue
            self._events.publish("template.damaged", mirror=shelf.directory.name, tree=tree)
            async with self._shelves.lock(shelf):
                await self._shelves.retire(shelf, tree)
            found[f"template {tree}"] = f"its files are not what they were; {_REBUILT}"
        return found

    async def _packs(self, name: MirrorName, shelf: MirrorTemplates) -> dict[str, str]:
        found = {}
        for path in await self._workers.call(find_bad_packs, shelf.directory, timeout=_TIMEOUT):
            self._events.publish("closure.damaged", mirror=str(name), pack=path.name)
            is_gone = await self._drop(name, path.relative_to(shelf.directory).parts)
            found[f"closure pack {path.name}"] = (
                f"its bytes are not what they were; {_REBUILT if is_gone else _HELD}"
            )
        return found

    async def _stores(self, name: MirrorName, shelf: MirrorTemplates) -> dict[str, str]:
        found = {}
        for path in await self._workers.call(
            find_bad_stores, shelf.directory, name, timeout=_TIMEOUT
        ):
            self._events.publish("store.damaged", mirror=str(name), store=path.name)
            is_gone = await self._drop(name, path.relative_to(shelf.directory).parts)
            found[f"sealed store {path.name}"] = (
                f"its files are not what they were; {_REBUILT if is_gone else _HELD}"
            )
        return found

    async def _drop(self, name: MirrorName, parts: tuple[str, ...]) -> bool:
        """Take the directory out of use that has a bad pack: a layer of closures, or the sealed store of one commit."""
        shelf = self._shelves.get(name)
        place = shelf.directory / parts[0] / parts[1]
        if place in self._shelves.holds:
            return False
        if parts[0] == "gits":
            history, _, commit = parts[1].partition("-")
            if gitdir := self._gitdirs.find(name, CommitId(commit), History(history)):
                await self._gitdirs.drop(gitdir)
                return True
        await self._gitdirs.discard(place)  # gone already where the index was bad, too
        return True


def find_bad_packs(directory: Path) -> list[Path]:
    """Packs and indexes of one mirror's sealed stores whose bytes have another checksum than they end with. Runs in a worker.

    A file of many links is read once, and named where each lies.
    """
    with ThreadPoolExecutor(1, initializer=lower_priority) as thread:
        return thread.submit(_find_bad_packs, directory).result()


def _find_bad_packs(directory: Path) -> list[Path]:
    sound: dict[int, bool] = {}
    bad = []
    for pattern in ("packs/*/pack-*", "gits/*/.git/objects/pack/pack-*"):
        for file in sorted(directory.glob(pattern)):
            try:
                inode = file.stat().st_ino
                if inode not in sound:
                    sound[inode] = pack_is_whole(file)
            except FileNotFoundError:
                continue
            if not sound[inode]:
                bad.append(file)
    return bad + [pack for layer in directory.glob("packs/[!.]*") for pack in _halves(layer)]


def _halves(layer: Path) -> list[Path]:
    """Packs of a layer that is on record, which or whose index is not there."""
    if not (layer / "layer.json").exists():
        return []
    stems = {file.with_suffix("") for file in layer.glob("pack-*")} or {layer / "pack"}
    pairs = [(stem.with_suffix(".pack"), stem.with_suffix(".idx")) for stem in sorted(stems)]
    return [pack for pack, index in pairs if not (pack.exists() and index.exists())]


def find_bad_stores(directory: Path, name: MirrorName) -> list[Path]:
    """Sealed stores of one mirror with other control files than they were built with, or without one of their packs.

    Looked at twice: one may be built again meanwhile.
    """
    found = _altered(directory, name)
    return sorted(found & _altered(directory, name)) if found else []


def _altered(directory: Path, name: MirrorName) -> set[Path]:
    records = read_records(directory / "gits", name)
    return {
        path for path, (gitdir, _) in records.items() if path.exists() and not is_as_built(gitdir)
    }
