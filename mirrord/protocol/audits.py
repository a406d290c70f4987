"""Audits, findings and repairs."""

from datetime import datetime

from .. import model
from .codec import Answer, Repo, Request


class StartAudit(Request):
    """Without mirrors and dataset it audits everything recorded."""

    mirrors: list[Repo] = []
    dataset: str | None = None
    level: model.AuditLevel | None = None
    heal: bool | None = None


class StartHeal(Request):
    mirrors: list[Repo] = []


class Finding(Answer):
    """A recorded commit that cannot be served, or a fault of its mirror (`commit` is then empty).

    `subject` is the commit, file or ref; `accepted` says that the configuration accepts it. Where
    the commit's `roles` lack `base`, its instances can be checked out all the same.
    """

    mirror: str
    kind: model.FindingKind
    subject: str = ""
    accepted: bool = False
    commit: str = ""
    roles: list[model.CommitRole] = []
    state: model.CommitState
    reach: model.Reach | None = None
    instances: list[str] = []
    objects: list[str] = []
    detail: str = ""


class Repair(Answer):
    """The repair of one mirror by a heal.

    `objects` counts received objects by donor; `files` are the bad files that it moved to
    `kept_in`; `refs` are the restored refs. `unhealed` are the first of the needed objects that no
    donor had; `refusals` are the donors that failed, with the reason; `history` says what became of
    a lost ref history; `error` says why the heal ended early.
    """

    mirror: str
    objects: dict[str, int] = {}
    files: list[str] = []
    kept_in: str | None = None
    refs: list[str] = []
    unhealed: list[str] = []
    unhealed_count: int = 0
    refusals: dict[str, str] = {}
    history: str = ""
    error: str | None = None


class AuditPart(Answer):
    """One mirror in an audit."""

    mirror: str
    counts: dict[model.CommitState, int]
    reach: dict[model.Reach, int] = {}
    findings: list[Finding]
    affected: list[str] = []
    healed: int = 0
    repair: Repair | None = None


class Audit(Answer):
    """`counts` and `reach` count recorded commits; `affected` are instances that cannot be served.

    `healed` counts commits that a heal made servable again. `left` are mirrors that the audit did
    not reach before an interruption, or could not judge; nothing else in it covers them.
    `open_count` counts the findings that are neither healed nor accepted; `affected` leaves out
    accepted ones.
    """

    id: str
    level: model.AuditLevel
    mirrors: list[str]
    left: list[str] = []
    dataset: str | None = None
    started_at: datetime
    finished_at: datetime
    counts: dict[model.CommitState, int]
    reach: dict[model.Reach, int] = {}
    findings: list[Finding]
    open_count: int
    affected: list[str] = []
    healed: int = 0
    repairs: list[Repair] = []


class AuditSummary(Answer):
    id: str
    level: model.AuditLevel
    finished_at: datetime
    counts: dict[model.CommitState, int]
    affected_count: int
    finding_count: int
    open_count: int
    left_count: int = 0
