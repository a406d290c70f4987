"""The journal of an import or removal, in `quarantine/dataset-*`: the pins of its dataset before.

It tells a killed import from a lost catalog: both leave pins in a mirror that no dataset records.
It is on disk before the first pin is made or removed, and goes with its directory. So a start keeps
the pins that a journal lists, and removes other pins of its dataset.
"""

from __future__ import annotations

import json
from pathlib import Path

import structlog

from ..catalog import PinRow
from ..host.files import sync_directory
from ..mirrors.quarantine import SPOOL_PREFIX
from ..mirrors.transaction import write_durably

_FILE = "pins-before.json"

PinKeys = frozenset[tuple[str, str]]
"""Mirror key and commit of each pin."""

log = structlog.get_logger()


def pin_key(row: PinRow) -> tuple[str, str]:
    return row.mirror.key, str(row.commit)


def write_journal(directory: Path, owner: str, before: PinKeys) -> None:
    """Record durably which pins an owner has."""
    content = json.dumps({"owner": owner, "pins": sorted(before)}).encode()
    write_durably(directory / _FILE, content)
    sync_directory(directory.parent)


def read_journals(quarantine: Path) -> dict[str, PinKeys]:
    """The owners of pins whose work was killed, each with the pins that all its journals list."""
    found: dict[str, PinKeys] = {}
    for path in quarantine.glob(f"{SPOOL_PREFIX}*/{_FILE}"):
        try:
            facts = json.loads(path.read_bytes())
            owner, pins = facts["owner"], frozenset((key, commit) for key, commit in facts["pins"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("journal.unreadable", path=str(path), error=str(error))  # its pins stay
            continue
        found[owner] = found.get(owner, pins) & pins
    return found
