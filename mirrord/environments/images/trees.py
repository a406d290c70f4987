"""Prepares images for commits: what an image's repository has besides the commit becomes a layer.

The layer is made when the first checkout of the commit with the image is asked for. Its files are
links to the image's, and git's tree of it is what diffs are relative to (`checkouts/prepared.py`).
When the mirror has got objects since, the layer is judged again, and one that has content of them
is replaced.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio

from ... import protocol
from ...checkouts.prepared import layer_name
from ...checkouts.service import Checkouts
from ...errors import EnvironmentFailedError, TooLargeError
from ...host.peers import own_process
from ...mirrors.service import Mirrors
from ...model import CommitId, EnvironmentName, History, LayerId, MirrorName
from ...protocol import RootLeak
from ...templates.environments import EnvironmentStore
from ...workers.coalesce import Coalescer, SharedWork
from ..builder import build_owner
from ..building import own_peer
from ..preparations import Preparations
from .tree_layers import TAKEN_OUT, TreeOrder, Written, write_tree_layer

_TIMEOUT = timedelta(hours=1)
_FINDINGS = 200  # recorded with the environment


class LayerJudge(Protocol):
    """Compares prepared layers with what the mirror has (`environments/leaks.py`)."""

    def mark(self, mirror: MirrorName) -> int: ...
    def is_judged(self, digest: str, layer: Path, mirror: MirrorName) -> bool: ...
    async def judge_layer(
        self, digest: str, layer: Path, mirror: MirrorName, commit: CommitId
    ) -> Sequence[RootLeak]: ...
    async def note_judged(self, digest: str, layer: Path, mark: int) -> None: ...


@dataclass(kw_only=True, eq=False, repr=False)
class ImageTrees:
    """The layers of images' repositories. Belongs to one event loop."""

    store: EnvironmentStore
    checkouts: Checkouts
    mirrors: Mirrors
    preparations: Preparations
    leaks: "LayerJudge"
    _running: Coalescer[None] = field(default_factory=Coalescer)
    _empty: set[tuple[str, str]] = field(default_factory=set)

    async def close(self) -> None:
        """Cancel what runs."""
        await self._running.close()

    async def ensure(
        self, name: EnvironmentName, mirror: MirrorName, commit: CommitId, history: History
    ) -> None:
        """Make the layer of an image for a commit unless it is there, or would be empty; make it
        again if the mirror has learnt since that it has something of the future.

        Raises EnvironmentFailedError, and what a checkout raises.
        """
        key = f"{mirror}@{commit}"
        if (name.digest, key) in self._empty:
            return
        place = mirror.key, commit, history
        saved = self.checkouts.prepared.choose(None, place, own_peer().uid, name)
        if saved:
            layer = self.checkouts.layers.path(saved.id)
            if self.leaks.is_judged(name.digest, layer, mirror):
                return
        elif self.preparations.read(name.digest).get(key, {}).get("changed") == 0:
            self._empty.add((name.digest, key))
            return

        async def run(_: SharedWork[None]) -> None:
            if saved:
                leaks = await self.leaks.judge_layer(name.digest, layer, mirror, commit)
                if not any(leak.kind in TAKEN_OUT for leak in leaks):
                    return
                self.checkouts.prepared.retire(saved)
            await self._prepare(name, mirror, commit, history)

        await self._running.join(f"{name.digest} {key} {history}", run)

    async def _prepare(
        self, name: EnvironmentName, mirror: MirrorName, commit: CommitId, history: History
    ) -> None:
        key, began = f"{mirror}@{commit}", time.perf_counter()
        mark = self.leaks.mark(mirror)
        request = protocol.StartCheckout(
            mirror=str(mirror), commit=commit, owner=build_owner()[0], history=history,
            # longer than the writing of the layer, which has to end first
            ttl=_TIMEOUT.total_seconds() * 2,
        )  # fmt: skip
        checkout = await self.checkouts.checkout(request, own_peer(), own_process())
        try:
            write = partial(self._write, name, mirror, commit)
            written = await self.checkouts.show_layer(checkout.id, write, own_peer())
            preparation: dict[str, Any] = {"changed": written.changed}
            preparation["findings"] = [leak.to_json() for leak in written.findings[:_FINDINGS]]
            if written.changed:
                saved = protocol.SaveLayer(name=layer_name(name.digest))
                layer = await self.checkouts.save(checkout.id, saved, own_peer())
                path = self.checkouts.layers.path(LayerId(layer.id))
                await self.leaks.note_judged(name.digest, path, mark)
        except TooLargeError as error:
            self.preparations.write(name.digest, key, {"error": error.message})
            raise EnvironmentFailedError(
                f"cannot prepare image {name} for {mirror}@{commit[:12]}: {error.message}",
                hint=error.hint,
                key=name.key,
                digest=name.digest,
            ) from error
        finally:
            with anyio.CancelScope(shield=True):
                await self.checkouts.release(checkout.id, own_peer())
        self.preparations.write(name.digest, key, preparation)
        fields = {"key": name.key, "digest": name.digest, "mirror": str(mirror), "commit": commit}
        duration_s = round(time.perf_counter() - began, 3)
        self.mirrors.events.publish("environment.prepared", **fields, duration_s=duration_s)

    async def _write(
        self, name: EnvironmentName, mirror: MirrorName, commit: CommitId,
        checkout: Path, layer: Path,
    ) -> Written:  # fmt: skip
        record = self.store.record(name.digest)
        assert record is not None  # it is held
        tree = record.facts["image"]["tree"]
        order = TreeOrder(
            stack=tuple(self.store.layers / digest for digest in record.facts["stack"]), tree=tree,
            checkout=checkout, mirror=self.mirrors.path(mirror), commit=commit, layer=layer,
        )  # fmt: skip
        written = await self.mirrors.workers.run(write_tree_layer, order, timeout=_TIMEOUT)
        if written.head == commit:
            return written
        fact = f"the image's HEAD is {written.head}" if written.head else "its HEAD is unknown"
        fact += f", not the base commit {commit}"
        if written.kept_back:
            fact += f"; {written.kept_back} paths that differ are as the base commit has them"
        other = RootLeak(kind="other-head", path=tree, detail=fact, hidden=True)
        return written._replace(findings=[other, *written.findings])
