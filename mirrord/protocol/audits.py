"""What can be served: audits, their findings, and what a heal repaired."""

from __future__ import annotations

from datetime import datetime

from ..model import AuditLevel, CommitState, FindingKind, Reach
from .messages import Answer, Repo, Request


class StartAudit(Request):
    """No mirrors and no dataset: everything that is recorded."""

    mirrors: list[Repo] = []
    dataset: str | None = None
    level: AuditLevel | None = None
    heal: bool | None = None


class StartHeal(Request):
    mirrors: list[Repo] = []


class Finding(Answer):
    """One recorded commit that cannot be served, or something wrong with its mirror (`commit` is then empty).

    `subject` is the commit, file or ref; `accepted` says that the configuration accepts it.
    """

    mirror: str
    kind: FindingKind
    subject: str = ""
    accepted: bool = False
    commit: str = ""
    state: CommitState
    reach: Reach | None = None
    instances: list[str] = []
    objects: list[str] = []
    detail: str = ""


class Repair(Answer):
    """What a heal did to one mirror.

    `objects` counts what came by donor, `files` are the bad files that it took out, which are kept below `kept_in`, `refs` those
    it restored. `unhealed` are the first of the needed objects that no donor had; `refusals` are the donors that failed, with
    the reason; `history` says what became of a lost ref history; `error` says why it ended early.
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
    counts: dict[CommitState, int]
    reach: dict[Reach, int] = {}
    findings: list[Finding]
    affected: list[str] = []
    healed: int = 0
    repair: Repair | None = None


class Audit(Answer):
    """`counts` and `reach` count recorded commits; `affected` are the instances that cannot be served.

    `healed` counts the commits that were not in order before, and are now. `left` are mirrors it did not come to, because it was
    interrupted, or could not judge; nothing else in it speaks of them. `open_count` counts the
    findings that are neither healed nor accepted, `affected` leaves out what is accepted.
    """

    id: str
    level: AuditLevel
    mirrors: list[str]
    left: list[str] = []
    dataset: str | None = None
    started_at: datetime
    finished_at: datetime
    counts: dict[CommitState, int]
    reach: dict[Reach, int] = {}
    findings: list[Finding]
    open_count: int
    affected: list[str] = []
    healed: int = 0
    repairs: list[Repair] = []


class AuditSummary(Answer):
    id: str
    level: AuditLevel
    finished_at: datetime
    counts: dict[CommitState, int]
    affected_count: int
    finding_count: int
    open_count: int
    left_count: int = 0
