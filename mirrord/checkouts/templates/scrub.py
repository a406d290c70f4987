"""Prove by content again what the checkouts of a mirror are made from: layers, stores and packs.

Damaged parts go out of use, so that the next checkout builds them again; a part that a checkout
holds stays until its release. Never touches a mirror or a checkout.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from ...git.packs import pack_is_whole
from ...git.workers import Workers
from ...host.processes import lower_priority
from ...jobs.events import Events
from ...model import CommitId, History, MirrorName
from ..stores.builder import StoreBuilder
from ..stores.store import is_as_built, read_records
from .registry import TemplateRegistry

_TIMEOUT = timedelta(hours=1)
_REBUILT = "it is out of use, and the next checkout builds it again"
_HELD = "a checkout holds it: release that, and scrub again"


async def scrub(
    name: MirrorName,
    registry: TemplateRegistry,
    gitdirs: StoreBuilder,
    workers: Workers,
    events: Events,
) -> dict[str, str]:
    """Scrub one mirror's templates; answers the damaged parts, with what became of them."""
    templates = registry.get(name)
    directory = templates.directory
    found = {}
    for tree in list(templates.layers):
        if tree not in templates.layers or await registry.is_sound(templates, tree):
            continue
        events.publish("template.damaged", mirror=directory.name, tree=tree)
        async with registry.lock(templates):
            registry.retire(templates, tree)
        found[f"template {tree}"] = f"checksum mismatch; {_REBUILT}"

    async def discard(bad: Path) -> str:
        """Discard the closure layer or the store that a bad file is in."""
        kind, stem, *_ = bad.relative_to(directory).parts
        place = directory / kind / stem
        if place in registry.held:
            return _HELD
        history, _, commit = stem.partition("-")
        if kind == "gits" and (store := gitdirs.find(name, CommitId(commit), History(history))):
            await gitdirs.remove(gitdirs.discard(store))
        else:
            await gitdirs.remove(place)  # may be gone: the index was bad, too
        return _REBUILT

    for pack in await workers.run(find_bad_packs, directory, timeout=_TIMEOUT):
        events.publish("closure.damaged", mirror=str(name), pack=pack.name)
        found[f"closure pack {pack.name}"] = f"checksum mismatch; {await discard(pack)}"
    for path in await workers.run(find_bad_stores, directory, name, timeout=_TIMEOUT):
        events.publish("store.damaged", mirror=str(name), store=path.name)
        found[f"sealed store {path.name}"] = f"checksum mismatch; {await discard(path)}"
    await registry.sweep()
    return found


def find_bad_packs(directory: Path) -> list[Path]:
    """Packs and indexes of one mirror's stores with another checksum than they end with, or without
    their other half. Runs in a worker. A file of many links is read once, and named at each.
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
    for record in directory.glob("packs/[!.]*/layer.json"):
        layer = record.parent
        stems = {file.with_suffix("") for file in layer.glob("pack-*")} or {layer / "pack"}
        packs = [stem.with_suffix(".pack") for stem in sorted(stems)]
        bad += [p for p in packs if not (p.exists() and p.with_suffix(".idx").exists())]
    return bad


def find_bad_stores(directory: Path, name: MirrorName) -> list[Path]:
    """Stores of one mirror with changed control files or without one of their packs.

    Looked at twice, because one may be built again meanwhile. Runs in a worker.
    """

    def altered() -> set[Path]:
        records = read_records(directory / "gits", name)
        return {path for path, (at, _) in records.items() if path.exists() and not is_as_built(at)}

    found = altered()
    return sorted(found & altered()) if found else []
