"""What environments have of the future, for each commit that they are used at.

`[environments] leaks` decides: `report` scans after the answer of a first checkout; `hide` and
`refuse` scan before it. `hide` puts a layer with whiteouts, the cover, over the environment's.
Scans are kept with the environment, in `scans`; when the mirror has got objects since, one is
repeated, without reading the layers and the commit's closure again.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from cachetools import LRUCache

from .. import errors, protocol
from ..errors import full_disk_named
from ..host.files import read_plain
from ..host.trash import remove_tree
from ..jobs.operations import Deferred, together
from ..jsontext import loads
from ..mirrors.service import Mirrors
from ..model import CommitId, EnvironmentName, MirrorName
from ..presence import exists, matching
from ..protocol import RootLeak
from ..seal.layers import LayerScan, ScannedLayer, as_paths, read_layer, scan_layers
from ..templates.environments import EnvironmentStore
from ..workers.coalesce import Coalescer, SharedWork
from .images.layers import make_cover

# a million files are hashed in minutes
_TIMEOUT = timedelta(hours=1)
_KEPT = 200  # of the findings of a scan, as of a built environment
_CACHED = 10_000


@dataclass(kw_only=True, eq=False, repr=False)
class Leaks:
    """Judges environments by the setting. Belongs to one event loop."""

    store: EnvironmentStore
    mirrors: Mirrors
    _cache: LRUCache[Path, dict[str, Any]] = field(default_factory=lambda: LRUCache(_CACHED))
    _scans: Coalescer[dict[str, Any]] = field(default_factory=Coalescer)
    _listings: Coalescer[None] = field(default_factory=Coalescer)
    _deferred: Deferred = field(default_factory=Deferred)

    async def close(self) -> None:
        """Cancel the running scans."""
        await self._deferred.close()
        await self._scans.close()
        await self._listings.close()

    async def cover_of(
        self, environment: EnvironmentName, mirror: MirrorName, commit: CommitId
    ) -> str | None:
        """Return the layer that hides the environment's leaks, if any; the caller holds it.

        Raises EnvironmentLeaksError.
        """
        policy = self.mirrors.settings().environments.leaks
        if policy == "report":
            # an environment of a recipe was scanned when it was built
            if self.store.find_image(environment.digest) and not self._is_new(
                self._find(environment.digest, mirror, commit), mirror
            ):
                work = partial(self._scan_later, environment, mirror, commit)
                self._deferred.begin(("scan", (environment.digest, mirror.key, commit)), work)
            return None
        result = self._find(environment.digest, mirror, commit)
        if not self._is_new(result, mirror):
            result = await self._scanned(environment, mirror, commit)
        assert result is not None
        if result["count"] and policy == "refuse":
            raise errors.EnvironmentLeaksError(
                f"cannot show environment {environment} at {commit}: {result['count']:,} of its"
                " files have, or may have, what came after that commit",
                hint="`mirrord environment show` lists them; [environments] leaks decides",
            )
        return str(result["cover"]) if result["cover"] else None

    def list(self, digest: str) -> list[protocol.EnvironmentScan]:
        """Return the scans of an environment."""
        scans = []
        for path in sorted(matching(self._directory(digest), "*@*.json")):
            mirror, _, commit = path.stem.rpartition("@")
            if result := self._read(path):
                scans.append(
                    protocol.EnvironmentScan(
                        mirror=mirror, commit=commit, count=result["count"],
                        at=datetime.fromtimestamp(result["at"], UTC), notes=result["notes"],
                        findings=result["findings"],
                    )
                )  # fmt: skip
        return scans

    def is_judged(self, digest: str, layer: Path, mirror: MirrorName) -> bool:
        """Return whether a prepared layer was judged by what the mirror has now."""
        return self._is_new(self._cached(self._directory(digest) / f"{layer.name}.json"), mirror)

    async def judge_layer(
        self, digest: str, layer: Path, mirror: MirrorName, commit: CommitId
    ) -> Sequence[RootLeak]:
        """Return what a prepared layer of an environment has of the future, as known now."""
        path = self._directory(digest) / f"{layer.name}.json"
        scanned = ScannedLayer(layer, path.with_suffix(".list"))
        scan, mark = await self._compared([scanned], path, mirror, commit)
        await self._keep(path, _facts_of(scan, mark, None))
        return scan.leaks

    async def note_judged(self, digest: str, layer: Path, mark: int) -> None:
        """Note that nothing of a prepared layer is of the future, as known at a mark."""
        result = _facts_of(LayerScan([], [], None), mark, None)
        await self._keep(self._directory(digest) / f"{layer.name}.json", result)

    # -- what is known -----------------------------------------------------------------------------

    def _directory(self, digest: str) -> Path:
        return self.store.root / digest / "scans"

    def _find(self, digest: str, mirror: MirrorName, commit: CommitId) -> dict[str, Any] | None:
        return self._cached(self._directory(digest) / f"{mirror.key}@{commit}.json")

    def _cached(self, path: Path) -> dict[str, Any] | None:
        if path not in self._cache and (read := self._read(path)) is not None:
            self._cache[path] = _short(read)
        return self._cache.get(path)

    def _read(self, path: Path) -> dict[str, Any] | None:
        with suppress(FileNotFoundError, ValueError):
            return dict(loads(read_plain(path)))
        return None

    def _is_new(self, result: dict[str, Any] | None, mirror: MirrorName) -> bool:
        """Return whether the mirror has got no pack since a scan."""
        return result is not None and result["mark"] == self.mark(mirror)

    def mark(self, mirror: MirrorName) -> int:
        """Return what changes when a mirror gets objects."""
        # every fetch lands as a pack (fetch.unpackLimit=1), which changes the directory
        return (self.mirrors.path(mirror) / "objects/pack").stat().st_mtime_ns

    # -- scans -------------------------------------------------------------------------------------

    async def _scan_later(
        self, environment: EnvironmentName, mirror: MirrorName, commit: CommitId
    ) -> None:
        if self.store.record(environment.digest) is None:
            return
        self.store.hold(environment.digest)
        try:
            await self._scanned(environment, mirror, commit)
        finally:
            self.store.drop(environment.digest)

    async def _scanned(
        self, environment: EnvironmentName, mirror: MirrorName, commit: CommitId
    ) -> dict[str, Any]:
        async def run(work: SharedWork[dict[str, Any]]) -> dict[str, Any]:
            return await self._scan(environment, mirror, commit)

        return await self._scans.join(f"{environment.digest} {mirror.key}@{commit}", run)

    async def _scan(
        self, environment: EnvironmentName, mirror: MirrorName, commit: CommitId
    ) -> dict[str, Any]:
        workers, digest = self.mirrors.workers, environment.digest
        layers = [*self._layers(digest)]
        path = self._directory(digest) / f"{mirror.key}@{commit}.json"
        scan, mark = await self._compared(layers, path, mirror, commit)
        paths = [layer.path for layer in layers]
        cover = await workers.run(
            _make_cover, self.store.root / digest, as_paths(scan.leaks), paths, timeout=_TIMEOUT
        )
        result = _facts_of(scan, mark, cover)
        await self._keep(path, result)
        if scan.leaks:
            named = {"key": environment.key, "digest": digest, "count": len(scan.leaks)}
            self.mirrors.events.publish(
                "environment.leaks", **named, mirror=str(mirror), commit=commit
            )
        return result

    async def _compared(
        self, layers: Sequence[ScannedLayer], path: Path, mirror: MirrorName, commit: CommitId
    ) -> tuple[LayerScan, int]:
        """Return a scan of layers, of which `path` has an earlier one, and the mirror's mark."""
        await together(self._listed(layer) for layer in layers)
        # before the scan: for a pack that comes meanwhile it is repeated
        mark, git_dir = self.mark(mirror), self.mirrors.path(mirror)
        before = await anyio.to_thread.run_sync(self._read, path)
        encoded = before["inside"] if before else None
        inside = None if encoded is None else base64.b64decode(encoded)
        scan = await self.mirrors.workers.run(
            scan_layers, layers, git_dir, commit, inside, timeout=_TIMEOUT
        )
        return scan, mark

    async def _keep(self, path: Path, result: dict[str, Any]) -> None:
        await anyio.to_thread.run_sync(_write, path, result)
        self._cache[path] = _short(result)

    def _layers(self, digest: str) -> Iterator[ScannedLayer]:
        for path in self.store.lowers(digest):
            yield ScannedLayer(path, path.with_name(f"{path.name}.list"))

    async def _listed(self, layer: ScannedLayer) -> None:
        async def run(_: SharedWork[None]) -> None:
            with full_disk_named("the scan of an environment"):
                await self.mirrors.workers.run(read_layer, layer, timeout=_TIMEOUT)

        if not exists(layer.listed):
            await self._listings.join(str(layer.listed), run)


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """Return what decides about a checkout, to be kept in memory."""
    return {name: result[name] for name in ("mark", "count", "cover")}


def _facts_of(scan: LayerScan, mark: int, cover: str | None) -> dict[str, Any]:
    return {
        "mark": mark, "at": time.time(), "count": len(scan.leaks), "cover": cover,
        "findings": [leak.to_json() for leak in scan.leaks[:_KEPT]], "notes": scan.notes[:_KEPT],
        "inside": None if scan.inside is None else base64.b64encode(scan.inside).decode(),
    }  # fmt: skip


def _write(path: Path, result: dict[str, Any]) -> None:
    with full_disk_named("the scan of an environment"):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(result))
        new.rename(path)


def _make_cover(above: Path, paths: Sequence[str], below: Sequence[Path]) -> str | None:
    """Make the layer that hides paths, unless it is there; return its name. In a worker."""
    if not paths:
        return None
    digest = hashlib.sha256("\0".join(paths).encode(errors="surrogateescape")).hexdigest()
    # the pid, because another worker may make the same cover
    name, new = f"cover-{digest[:16]}", above / f".building-cover-{os.getpid()}"
    if not exists(above / name):
        remove_tree(new)
        make_cover(new, paths, below)
        new.rename(above / name)
    return name
