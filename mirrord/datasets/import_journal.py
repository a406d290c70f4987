"""The private directory of one import in the quarantine: its normalised rows, and on record which pins are not its own.

Owns `quarantine/dataset-*`. The record is what tells a killed import from a lost catalog: both leave pins in a mirror that no
dataset records. It is flushed before the first pin is made, another before the first is removed, and gone with the directory; so
what it lists is left alone at a start, and other pins of its dataset are those of work that never ended.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import structlog

from ..catalog import PinRow
from ..host.files import sync_directory
from ..mirrors.quarantine import SPOOL_PREFIX, Quarantine
from ..mirrors.transaction import write_durably

_RECORD = "pins-before.json"

Before = frozenset[tuple[str, str]]
"""Mirror key and commit of each pin."""

log = structlog.get_logger()


class Spools:
    """The directories of the imports that are going on, or were when the daemon died."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine

    @asynccontextmanager
    async def directory(self) -> AsyncIterator[Path]:
        """A new one, removed at the end. Not in the watched directory, where its files would be imported."""
        async with self._quarantine.directory(SPOOL_PREFIX.rstrip("-")) as made:
            yield made

    def begun(self) -> Mapping[str, Before]:
        """The owners of pins whose work never ended, each with the pins that are to stay by all its records."""
        found: dict[str, Before] = {}
        for owner, pins in filter(
            None, map(_read, self._quarantine.root.glob(f"{SPOOL_PREFIX}*/{_RECORD}"))
        ):
            found[owner] = found.get(owner, pins) & pins
        return found

    async def clear(self) -> None:
        """Remove what a killed daemon left. Its imports must have been undone."""
        for path in await anyio.to_thread.run_sync(
            lambda: list(self._quarantine.root.glob(f"{SPOOL_PREFIX}*"))
        ):
            await self._quarantine.remove(path)


def record(directory: Path, owner: str, before: Before) -> None:
    """Put on record, durably, which pins an owner has."""
    write_durably(
        directory / _RECORD, json.dumps({"owner": owner, "pins": sorted(before)}).encode()
    )
    sync_directory(directory.parent)


def place_of(row: PinRow) -> tuple[str, str]:
    return row.mirror.key, str(row.commit)


def _read(path: Path) -> tuple[str, Before] | None:
    """None where it cannot be read: then the pins stay."""
    try:
        facts = json.loads(path.read_bytes())
        return facts["owner"], frozenset((key, commit) for key, commit in facts["pins"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("import.unreadable", path=str(path), error=str(error))
        return None
