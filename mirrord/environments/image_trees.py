"""Prepares images for commits, and imports the images of rows.

What an image's repository has besides the commit becomes a prepared layer.

The layer is made when the first checkout of the commit with the image is asked for. Its files are
links to the image's, and git's tree of it is what diffs are relative to (`checkouts/prepared.py`).
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from .. import protocol
from ..catalog import InstanceRow
from ..checkouts.prepared import layer_name
from ..checkouts.service import Checkouts
from ..datasets.service import Datasets
from ..errors import (
    EnvironmentFailedError,
    InstanceNotFoundError,
    IntegrityError,
    NotFoundError,
    TooLargeError,
    UpstreamError,
)
from ..host.files import read_plain
from ..host.peers import own_process
from ..mirrors.service import Mirrors
from ..model import CommitId, EnvironmentName, History, MirrorName, shown
from ..protocol import Progress, ProgressSink, RootLeak
from ..templates.environments import EnvironmentRecord, EnvironmentStore
from ..workers.coalesce import Coalescer, SharedWork
from .builder import build_owner
from .building import own_peer
from .images import Images, key_of_image
from .preparations import Preparations
from .specs import image_of, image_recipe_of, template_of
from .tree_layers import Order, Written, write_tree_layer

_TIMEOUT = timedelta(hours=1)
_FINDINGS = 200  # recorded with the environment


@dataclass(kw_only=True, eq=False, repr=False)
class ImageTrees:
    """The layers of images' repositories. Belongs to one event loop."""

    store: EnvironmentStore
    checkouts: Checkouts
    mirrors: Mirrors
    preparations: Preparations
    _running: Coalescer[None] = field(default_factory=Coalescer)
    _empty: set[tuple[str, str]] = field(default_factory=set)

    async def close(self) -> None:
        """Cancel what runs."""
        await self._running.close()

    async def ensure(
        self, name: EnvironmentName, mirror: MirrorName, commit: CommitId, history: History
    ) -> None:
        """Make the layer of an image for a commit unless it is there, or would be empty.

        Raises EnvironmentFailedError, and what a checkout raises.
        """
        key = f"{mirror}@{commit}"
        if (name.digest, key) in self._empty:
            return
        place = mirror.key, commit, history
        if self.checkouts.prepared.choose(None, place, own_peer().uid, name):
            return
        if self.preparations.read(name.digest).get(key, {}).get("changed") == 0:
            self._empty.add((name.digest, key))
            return

        async def run(_: SharedWork[None]) -> None:
            await self._prepare(name, mirror, commit, history)

        await self._running.join(f"{name.digest} {key} {history}", run)

    async def _prepare(
        self, name: EnvironmentName, mirror: MirrorName, commit: CommitId, history: History
    ) -> None:
        key, began = f"{mirror}@{commit}", time.perf_counter()
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
                await self.checkouts.save(checkout.id, saved, own_peer())
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
        order = Order(
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


@dataclass(kw_only=True, eq=False, repr=False)
class RowImages:
    """The images that rows of datasets name. Belongs to one event loop.

    `templates` is a file with the template of each dataset whose images were asked for.
    """

    templates: Path
    images: Images
    checkouts: Checkouts
    datasets: Datasets

    def __post_init__(self) -> None:
        self._by_dataset: dict[str, str] = {}
        with suppress(FileNotFoundError, ValueError):
            self._by_dataset = dict(json.loads(read_plain(self.templates)))

    def find(self, row: InstanceRow) -> EnvironmentRecord | None:
        """Return the environment of a row's image, if it was imported."""
        template = self._by_dataset.get(row.dataset)
        source = image_of(row, template) if template else None
        return self._ready(source) if source else None

    def _ready(self, source: str) -> EnvironmentRecord | None:
        key = key_of_image(protocol.ImportImage(source=source))
        records = self.images.store.iter_records(key)
        return next((r for r in records if r.is_ready and r.facts.get("source") == source), None)

    async def plan(self, request: protocol.BuildEnvironments) -> list[InstanceRow] | None:
        """Return the rows whose images are asked for; None if the request is about recipes.

        Raises InstanceNotFoundError, DatasetNotFoundError, InvalidRequestError.
        """
        names = request.names
        if not names and request.images:
            names = await self.datasets.list_instance_ids(request.dataset)
        rows = []
        for name in names:
            row = await self.datasets.find_instance(name, request.dataset)
            if row is not None:
                rows.append(row)
            elif request.images:
                fact = f"cannot import the image of {shown(name)}: no dataset has it"
                raise InstanceNotFoundError(fact, hint="see `mirrord dataset list`")
        if not request.images:
            is_every = rows and len(rows) == len(names) and all(map(self.find, rows))
            return rows if is_every else None
        for dataset in {row.dataset for row in rows}:
            of = await self.datasets.get(dataset)
            self._by_dataset[dataset] = template_of(request.image_name, of.format)
        await anyio.to_thread.run_sync(self._write, json.dumps(self._by_dataset))
        return rows

    def _write(self, text: str) -> None:
        self.templates.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self.templates.with_suffix(".new")
        new.write_text(text)
        new.rename(self.templates)

    async def build(
        self, rows: list[InstanceRow], prepares: bool, progress: ProgressSink
    ) -> protocol.BuildReport:
        """Import the images of rows that are not here, one after the other; with `prepares` also
        make their layers. Failures are reported, not raised; a repeated build continues.
        """
        report = protocol.BuildReport(ready=[])
        by_source: dict[str, list[InstanceRow]] = {}
        for row in rows:
            if source := image_of(row, self._by_dataset[row.dataset]):
                by_source.setdefault(source, []).append(row)
            else:
                detail = f"cannot import the image of {row.public_id}: its row names none"
                report.failed.append(protocol.FailedBuild(key=row.public_id, detail=detail))
        for done, (source, sharing) in enumerate(by_source.items()):
            total = len(by_source)

            def step(inner: Progress, done: int = done, total: int = total) -> None:
                progress(Progress(done=done, total=total, unit="images", note=inner.note))

            if (name := await self._import(source, report, step)) and prepares:
                await self._prepare(name, sharing, report, step)
        if len(rows) == 1 and report.ready:
            tests = image_recipe_of(rows[0], report.ready[0].partition("@")[0])
            return replace(report, tests=tests)
        return report

    async def _import(
        self, source: str, report: protocol.BuildReport, progress: ProgressSink
    ) -> str | None:
        if record := self._ready(source):
            report.ready.append(record.name)
            return record.name
        request = protocol.ImportImage(source=source)
        try:
            made = await self.images.add(request, None, progress)
        except UpstreamError as error:
            failed = protocol.FailedBuild(key=key_of_image(request), detail=error.message)
            made = protocol.BuildReport(ready=[], failed=[failed])
        report.ready.extend(made.ready)
        report.failed.extend(made.failed)
        return made.ready[0] if made.ready else None

    async def _prepare(
        self, name: str, rows: list[InstanceRow], report: protocol.BuildReport,
        progress: ProgressSink,
    ) -> None:  # fmt: skip
        """Make a checkout of each base commit, which makes its layer."""
        for base, row in {row.base_commit: row for row in rows}.items():
            progress(Progress(done=0, note=f"{name} for {str(base)[:12]}"))
            request = protocol.StartCheckout(
                instance=row.id, dataset=row.dataset, environment=name, owner=build_owner()[0]
            )
            try:
                checkout = await self.checkouts.checkout(request, own_peer(), own_process())
                await self.checkouts.release(checkout.id, own_peer())
            except (IntegrityError, NotFoundError) as error:
                failed = protocol.FailedBuild(key=row.public_id, detail=error.message)
                report.failed.append(failed)
            else:
                report.prepared.append(str(base))
