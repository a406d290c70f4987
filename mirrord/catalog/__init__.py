"""The database of mirrors, pins, datasets, instances, recorded commits and audits."""

from __future__ import annotations

from .catalog import Catalog
from .datasets import EVERY
from .rows import DatasetHead, InstanceRow, MirrorRow, PinRow, RecordedRow
from .spool import spooled

__all__ = ["EVERY", "Catalog", "DatasetHead", "InstanceRow", "MirrorRow", "PinRow", "RecordedRow", "spooled"]
