"""The messages of the socket, one class each, shared by the daemon and the client. No I/O, nothing of either end.

Times are aware UTC, durations are seconds, sizes are bytes. Others import from here; the modules are for reading.
"""

from __future__ import annotations

from .audits import Audit, AuditPart, AuditSummary, Finding, Repair, StartAudit, StartHeal
from .checkouts import (
    Checkout,
    Proof,
    RenewCheckout,
    ResetAnswer,
    ResetCheckout,
    RestoreAnswer,
    RestorePaths,
    SealLeak,
    SealReport,
    StartCheckout,
)
from .datasets import (
    Dataset,
    DatasetChange,
    DatasetSummary,
    FormatInfo,
    Instance,
    InstanceName,
    RecordedCommit,
    RowFault,
    UnpinnedCommit,
)
from .messages import API, Answer, Bounds, MalformedError, Message, Problem, Repo, Request, to_bytes, to_json
from .mirrors import AddMirror, AddPin, BundleFile, Mirror, Pin, RefChange, RefDiff, RefFault, RefRecord, RestoreRefs, SyncMirror
from .operations import RESULTS, BundleImported, DatasetImported, Operation, Prewarmed, Progress, Synced
from .service import Configuration, Event, Health, JobState, ReloadAnswer, Status

__all__ = [
    "API",
    "RESULTS",
    "AddMirror",
    "AddPin",
    "Answer",
    "Audit",
    "AuditPart",
    "AuditSummary",
    "Bounds",
    "BundleFile",
    "BundleImported",
    "Checkout",
    "Configuration",
    "Dataset",
    "DatasetChange",
    "DatasetImported",
    "DatasetSummary",
    "Event",
    "Finding",
    "FormatInfo",
    "Health",
    "Instance",
    "InstanceName",
    "JobState",
    "MalformedError",
    "Message",
    "Mirror",
    "Operation",
    "Pin",
    "Prewarmed",
    "Problem",
    "Progress",
    "Proof",
    "RecordedCommit",
    "RefChange",
    "RefDiff",
    "RefFault",
    "RefRecord",
    "ReloadAnswer",
    "RenewCheckout",
    "Repair",
    "Repo",
    "Request",
    "ResetAnswer",
    "ResetCheckout",
    "RestoreAnswer",
    "RestorePaths",
    "RestoreRefs",
    "RowFault",
    "SealLeak",
    "SealReport",
    "StartAudit",
    "StartCheckout",
    "StartHeal",
    "Status",
    "SyncMirror",
    "Synced",
    "UnpinnedCommit",
    "to_bytes",
    "to_json",
]
