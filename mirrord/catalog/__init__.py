"""The database of mirrors, pins, datasets, instances, recorded commits and audits."""

from __future__ import annotations

from .catalog import Catalog
from .rows import DatasetHead, InstanceRow, MirrorRow, PinRow, RecordedRow
from .spool import spooled

__all__ = ["Catalog", "DatasetHead", "InstanceRow", "MirrorRow", "PinRow", "RecordedRow", "spooled"]
