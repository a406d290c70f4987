"""All that mirrord does that writes, in one table: every fault is tried on each of these."""

from __future__ import annotations

from .on_audits import ClosureAudit, ContentAudit, QuickAudit
from .on_bundles import BundleCreation, BundleImport, BundleOfMore
from .on_catalog import Migration
from .on_checkouts import (
    Checkout,
    EnvironmentReset,
    Fork,
    Grade,
    PoolCheckout,
    PoolFork,
    PoolRelease,
    PoolReset,
    PoolRollBack,
    PoolTree,
    Release,
    Reset,
    RollBack,
    Save,
    Snapshot,
    WarmCheckout,
)
from .on_datasets import DatasetRemoval, Import
from .on_mirrors import FirstClone, Heal, Maintenance, MirrorRemoval, Pin, Sync, Unpin
from .operation import Operation

OPERATIONS: tuple[type[Operation], ...] = (
    FirstClone, Sync, Pin, Unpin, Import, DatasetRemoval, Maintenance, Heal, BundleCreation, BundleImport, BundleOfMore,
    QuickAudit, ClosureAudit, ContentAudit, Migration,
    Checkout, WarmCheckout, PoolCheckout, PoolTree, Reset, PoolReset, Release, PoolRelease,
    Fork, PoolFork, Grade, Snapshot, RollBack, PoolRollBack, Save, EnvironmentReset, MirrorRemoval,
)  # fmt: skip
