"""Images that rows of datasets name: imported, and prepared for the rows' base commits.

A row that names only an image gets a mirror of the repository in it; the HEAD that the image has is
its base commit (`datasets/unwrapping.py`).
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread

from ... import protocol
from ...catalog import InstanceRow
from ...checkouts.service import Checkouts
from ...datasets.service import Datasets
from ...errors import (
    InstanceNotFoundError,
    IntegrityError,
    InvalidImageError,
    InvalidRequestError,
    MirrordError,
    NotFoundError,
    StoppingError,
    UpstreamError,
)
from ...host.files import read_plain
from ...host.peers import own_process
from ...jobs.operations import together
from ...mirrors.upstreams.upstream import image_upstream
from ...model import FROM_IMAGE, shown
from ...protocol import Progress, ProgressSink
from ...templates.environments import EnvironmentRecord
from ..builder import build_owner
from ..building import own_peer
from ..specs import image_of, image_recipe_of, template_of
from .importing import Images, key_of_image
from .upstreams import find_repository, write_upstream


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
        self, rows: list[InstanceRow], prepares: bool, jobs: int, progress: ProgressSink
    ) -> protocol.BuildReport:
        """Import the images of rows that are not here, `jobs` at a time; with `prepares` also make
        their layers. Failures are reported, not raised; a repeated build continues.
        """
        report = protocol.BuildReport(ready=[])
        by_source: dict[str, list[InstanceRow]] = {}
        for row in rows:
            if source := image_of(row, self._by_dataset[row.dataset]):
                by_source.setdefault(source, []).append(row)
            else:
                detail = f"cannot import the image of {row.public_id}: its row names none"
                report.failed.append(protocol.FailedBuild(key=row.public_id, detail=detail))
        turns, done = anyio.Semaphore(jobs), 0

        def step(inner: Progress) -> None:
            total = len(by_source)
            progress(Progress(done=done, total=total, unit="images", note=inner.note))

        async def one(source: str, sharing: list[InstanceRow]) -> None:
            nonlocal done
            async with turns:
                if name := await self._import(source, report, step):
                    named = [row for row in sharing if row.mirror.owner == FROM_IMAGE]
                    mirrored = await self._mirror(name, named, report) if named else []
                    others = [row for row in sharing if row.mirror.owner != FROM_IMAGE]
                    if prepares:
                        await self._prepare(name, [*others, *mirrored], report, step)
            done += 1

        await together(one(source, sharing) for source, sharing in by_source.items())
        report.ready.sort()
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
        except (InvalidRequestError, UpstreamError) as error:
            failed = protocol.FailedBuild(key=key_of_image(request), detail=error.message)
            made = protocol.BuildReport(ready=[], failed=[failed])
        report.ready.extend(made.ready)
        report.failed.extend(made.failed)
        return made.ready[0] if made.ready else None

    async def _mirror(
        self, name: str, rows: list[InstanceRow], report: protocol.BuildReport
    ) -> list[InstanceRow]:
        """Make or follow the mirror of an image's repository; return the rows as they are then."""
        mirrors, mirror = self.images.mirrors, rows[0].mirror
        (record,) = self.images.store.iter_records(name)
        self.images.store.hold(record.digest)
        try:
            tree = find_repository(record.facts["image"])
            stack = [self.images.store.layers / layer for layer in record.facts["stack"]]
            place = image_upstream(mirrors.settings(), mirror)
            await anyio.to_thread.run_sync(lambda: place.parent.mkdir(0o700, True, True))
            # links its objects: a few packs, or some 100,000 loose ones
            await mirrors.workers.run(write_upstream, stack, tree, place)
            await mirrors.add(mirror.repo)
            synced = await mirrors.sync(mirror)
            await self.datasets.repin(mirror)
            placed = [await self.datasets.find_instance(row.id, row.dataset) for row in rows]
            if not all(row and row.base_commit for row in placed):
                faults = "; ".join(fault.reason for fault in synced.faults[:1])
                raise InvalidImageError(
                    f"cannot use the repository at {tree}: {faults or 'its HEAD is not here'}"
                )
        except StoppingError:
            raise
        except MirrordError as error:
            detail = f"{error.message} (image {name})"
            report.failed.extend(
                protocol.FailedBuild(key=row.public_id, detail=detail) for row in rows
            )
            return []
        finally:
            self.images.store.drop(record.digest)
        return [row for row in placed if row]

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
