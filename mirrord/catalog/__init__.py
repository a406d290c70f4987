"""The database of mirrors, pins, datasets, instances, recorded commits and audits."""

from .catalog import Catalog
from .datasets import EVERY
from .schema import DatasetHead, InstanceRow, JudgementRow, MirrorRow, PinRow, RecordedRow
from .spool import spooled, unspooled

__all__ = [
    "EVERY",
    "Catalog",
    "DatasetHead",
    "InstanceRow",
    "JudgementRow",
    "MirrorRow",
    "PinRow",
    "RecordedRow",
    "spooled",
    "unspooled",
]
