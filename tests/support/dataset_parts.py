"""A dataset service with everything below it, for tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gitrepos import git

from mirrord.catalog import Catalog
from mirrord.config import Settings
from mirrord.datasets.service import DatasetFile, Datasets
from mirrord.git.command import Git
from mirrord.host.trash import Trash
from mirrord.jobs.events import Events
from mirrord.mirrors.service import Mirrors
from mirrord.model import MirrorName
from mirrord.workers.pool import Workers

NAME = MirrorName("owner", "name")


@dataclass
class House:
    datasets: Datasets
    mirrors: Mirrors
    catalog: Catalog
    events: Events
    root: Path

    async def take(
        self, rows: list[dict[str, Any]] | bytes, name: str | None = "lite", **options: Any
    ) -> dict[str, Any]:
        """Import rows; answers the dataset with its `change` beside."""
        path = self.root / "upload"
        path.write_bytes(
            rows
            if isinstance(rows, bytes)
            else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        )
        file = DatasetFile(path, "lite.jsonl", name)
        answer = (await self.datasets.import_file(file, **options)).to_json()
        return {**answer.pop("dataset"), **answer}

    def refs(self, name: MirrorName = NAME) -> set[str]:
        """The pins of a mirror as refs, without their prefix."""
        listed = git(
            self.mirrors.path(name), "for-each-ref", "--format=%(refname)", "refs/mirrord/pins/"
        ).splitlines()
        return {ref.removeprefix("refs/mirrord/pins/") for ref in listed}


@asynccontextmanager
async def parts_on(root: Path, workers: Workers) -> AsyncIterator[House]:
    """Everything that an import needs, on the state directory below `root`."""
    state, events = root / "state", Events()
    template = f"file://{root}/upstreams/{{owner}}+{{name}}"
    settings = Settings.model_validate(
        {"state_dir": state, "upstream": {"url": template, "timeout": "30s"}}
    )
    catalog = await Catalog.open(state / "catalog.sqlite3", workers)
    parts: dict[str, Any] = {
        "settings": lambda: settings,
        "workers": workers,
        "catalog": catalog,
        "events": events,
    }
    mirrors = Mirrors(git=Git(home=root / "home"), trash=Trash(), **parts)
    datasets = Datasets(mirrors)
    try:
        await mirrors.open()
        await datasets.open()
        yield House(datasets, mirrors, catalog, events, root)
    finally:
        await mirrors.close()
        await catalog.close()


@asynccontextmanager
async def standing_house(root: Path) -> AsyncIterator[House]:
    """The same in a process of its own, which a test kills."""
    workers = Workers(size=1)
    try:
        async with parts_on(root, workers) as house:
            yield house
    finally:
        await workers.close()
