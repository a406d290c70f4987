"""The database of mirrors, pins, datasets, instances, recorded commits and audits."""

from .catalog import Catalog
from .datasets import EVERY, Servable
from .mirrors import MirrorFigures
from .schema import DatasetHead, InstanceRow, JudgementRow, MirrorRow, PinRow, RecordedRow
from .spool import digest_of, roles_of, spooled, unspooled

__all__ = [
    "EVERY",
    "Catalog",
    "DatasetHead",
    "InstanceRow",
    "JudgementRow",
    "MirrorFigures",
    "MirrorRow",
    "PinRow",
    "RecordedRow",
    "Servable",
    "digest_of",
    "roles_of",
    "spooled",
    "unspooled",
]
