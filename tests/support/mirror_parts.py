"""Mirrors with everything below them, for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from mirrord.catalog import Catalog
from mirrord.config import Settings
from mirrord.git.command import Git
from mirrord.host.trash import Trash
from mirrord.jobs.events import Events
from mirrord.mirrors.service import Mirrors
from mirrord.model import MirrorName
from mirrord.workers.pool import Workers

NAME = MirrorName("owner", "name")


@dataclass
class House:
    """A `Mirrors` with everything below it, and the settings it reads."""

    mirrors: Mirrors
    catalog: Catalog
    events: Events


class Builder:
    def __init__(self, root: Path, template: str) -> None:
        self.root = root
        self.values: dict[str, object] = {
            "state_dir": root / "state",
            "upstream": {"url": template, "timeout": "30s"},
        }

    def run(self, body: Callable[[House], Awaitable[None]]) -> None:
        async def main() -> None:
            settings = Settings.model_validate(self.values)
            settings.state_dir.mkdir(exist_ok=True)
            workers = Workers(size=1)
            catalog = await Catalog.open(settings.state_dir / "catalog.sqlite3")
            events = Events()
            mirrors = Mirrors(
                settings=lambda: settings,
                git=Git(home=self.root / "home"),
                workers=workers,
                catalog=catalog,
                events=events,
                trash=Trash(),
            )
            try:
                await mirrors.open()
                await body(House(mirrors, catalog, events))
            finally:
                await mirrors.close()
                await workers.close()
                await catalog.close()

        anyio.run(main)

    def synced(self) -> Builder:
        """With one synced mirror."""

        async def prepare(it: House) -> None:
            await it.mirrors.add("owner/name")
            await it.mirrors.sync(NAME)

        self.run(prepare)
        return self
