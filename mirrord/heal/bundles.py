"""Bundles as donors: the files in `bundles/` of the state directory, which a person or a job of the host puts there, and one that
a request lends for its own time.

A file is opened only when a heal misses something, and nothing of it is trusted: git hashes every object anew, and only what is
missing is taken. Never changes a file. Owns the repositories it makes of them, below the heal's own directory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from ..audit.view import borrow_from, make_repository
from ..errors import MirrordError
from ..git.command import Git
from ..mirrors.bundles.header import BundleHeader, read_header
from ..mirrors.bundles.merge import Contents, sort_refs
from ..mirrors.bundles.packing import index_bundle
from ..mirrors.quarantine import Quarantine
from ..mirrors.repository import Repository
from ..model import MirrorName
from ..protocol import ProgressSink

LENT = "the bundle that was sent"


@dataclass(frozen=True, slots=True)
class BundleFile:
    """A bundle whose head could be read."""

    number: int
    name: str
    path: Path
    header: BundleHeader
    contents: Contents
    is_lent: bool

    def is_of(self, name: MirrorName) -> bool:
        """Whether it was made of the mirror, and not only of a relative."""
        return (
            self.contents.mirror is not None
            and MirrorName.parse(self.contents.mirror).key == name.key
        )


@dataclass(frozen=True, slots=True)
class Shelf:
    """The bundles there are for one heal. `view` is what the mirror has that is good: incremental bundles build on it."""

    git: Git
    quarantine: Quarantine
    directory: Path
    lent: Collection[Path]
    name: MirrorName
    work: Path
    view: Path

    async def look(self) -> tuple[list[BundleFile], dict[str, str]]:
        """The bundles, those that build on nothing first, and why others cannot be read."""
        return await anyio.to_thread.run_sync(self._look)

    def _look(self) -> tuple[list[BundleFile], dict[str, str]]:
        found: list[BundleFile] = []
        refused: dict[str, str] = {}
        for number, (path, name) in enumerate(self._files()):
            try:
                header = read_header(path)
                found.append(
                    BundleFile(
                        number, name, path, header, sort_refs(header.refs), path in self.lent
                    )
                )
            except MirrordError as error:
                refused[name] = error.message
            except OSError as error:
                refused[name] = f"cannot read the bundle: {error.strerror}"
        return sorted(
            found, key=lambda file: (len(file.header.prerequisites) > 0, file.number)
        ), refused

    def _files(self) -> list[tuple[Path, str]]:
        lying = sorted(self.directory.iterdir()) if self.directory.is_dir() else []
        dropped = [path for path in lying if path.is_file() and not path.name.startswith(".")]
        return [
            *((path, LENT) for path in self.lent),
            *((path, f"bundle {_readable(path.name)}") for path in dropped),
        ]

    @asynccontextmanager
    async def open(self, file: BundleFile, progress: ProgressSink | None) -> AsyncIterator[Path]:
        """A repository with the objects of the bundle and of the view, made once for a heal."""
        into = self.work / f"bundle-{file.number}"
        if not into.exists():
            await self._index(file, into, progress)
        yield into

    async def _index(self, file: BundleFile, into: Path, progress: ProgressSink | None) -> None:
        """It has its name when it is whole: one that cannot be opened yet may build on what the next donor gives."""
        async with self.quarantine.directory("donor") as directory:
            building = directory / "repository"
            make_repository(building)
            borrow_from(building, self.view)
            repository = Repository(self.git, self.name, building)
            await index_bundle(
                repository, file.path, file.header, progress=progress, doing="open the bundle"
            )
            building.rename(into)


def _readable(name: str) -> str:
    """A file name need not be text."""
    return name.encode("utf-8", "replace").decode()
