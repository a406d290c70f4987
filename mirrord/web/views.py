"""The facts of each page, read from the engine and reduced to what strangers may know.

Everybody who reaches the port is a stranger. Pages show public ids of instances and base commits,
the host and path of upstreams, and the mirrors and datasets that work is about. They show no text
of errors, upstreams, builds and rows, because that quotes commits, commands and paths.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..audit.readiness import READY, MirrorAudit, newest_audits, unservable_commits
from ..catalog import MirrorRow, Servable
from ..engine.engine import Engine
from ..errors import MirrordError, NotFoundError
from ..model import parse_dataset_name
from ..protocol import Finding
from ..units import counted

Facts = dict[str, Any]
Values = Mapping[str, str]

# the rest is a page further
PAGE_ROWS = 100
LISTED = 200
# from git's shortest abbreviation on
_COMMIT = re.compile(r"[0-9a-f]{7,}", re.IGNORECASE)
_WHY = {
    Servable.READY: "can be checked out and graded",
    Servable.PARTLY: "can be checked out; another commit of the row cannot be served",
    Servable.NO_BRANCH: "the mirror lacks the branch that the instance starts from",
    Servable.UNPINNED: "upstream lacks the base commit, or its mirror was not synced",
    Servable.LOST: "the last audit could not serve the base commit",
}
TONES = {
    **dict.fromkeys(map(str, Servable), "bad"),
    str(Servable.READY): "good",
    str(Servable.PARTLY): "warn",
    **dict.fromkeys(("failed", "conflict", "refused", "invalid"), "bad"),
    **dict.fromkeys(("untried", "unknown", "duplicate", "empty", "building"), "other"),
    "prepared": "good",
}


def public_upstream(url: str) -> str:
    """Return the host and path of an upstream, without user and query; hide paths on this host."""
    scheme, separator, _ = url.partition("://")
    if separator and scheme.lower() != "file":
        parts = urlsplit(url)
        return f"{parts.hostname or ''}{parts.path}"
    # as scp writes it: user@host:path
    host, colon, path = url.rpartition("@")[2].partition(":")
    if separator or not colon or url.startswith("/"):
        return "a path on this host"
    return f"{host}/{path.lstrip('/')}"


def public_environment(key: str) -> str:
    """Return an environment's name without commits: some datasets name images after the answer."""
    return _COMMIT.sub("…", key)


class Slice(NamedTuple):
    """One page of a list; `number` counts from 1."""

    rows: Sequence[Any]
    number: int
    last: int
    total: int

    @classmethod
    def of(cls, rows: Sequence[Any], values: Values) -> Slice:
        number, last = _page(values, len(rows))
        begin = (number - 1) * PAGE_ROWS
        return cls(rows[begin : begin + PAGE_ROWS], number, last, len(rows))


def _page(values: Values, count: int) -> tuple[int, int]:
    """Return the requested page number, limited to existing pages, and the last number."""
    last = max(1, -(-count // PAGE_ROWS))
    text = values.get("page", "1")
    # isdecimal() takes digits of other scripts, and int() refuses 4,301 of them by an error
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else 1
    return min(max(number, 1), last), last


class MirrorLine(NamedTuple):
    """A row of the list of mirrors. `rank` sorts problems first."""

    rank: int
    row: MirrorRow
    health: str
    tone: str
    pins: int
    audit: MirrorAudit | None

    @property
    def name(self) -> str:
        return str(self.row.name)


async def mirror_lines(engine: Engine) -> list[MirrorLine]:
    rows, pins = await engine.catalog.list_mirrors(), await engine.catalog.count_pins()
    audits = await newest_audits(engine.audits)
    lines = [_mirror_line(row, pins.get(row.name.key, 0), audits) for row in rows]
    return sorted(lines, key=lambda line: (line.rank, line.row.name.key))


def _mirror_line(row: MirrorRow, pins: int, audits: Mapping[str, MirrorAudit]) -> MirrorLine:
    audit = audits.get(row.name.key)
    if row.error:
        rank, tone, health = 0, "bad", str(row.error.get("code", "failed"))
    elif audit and audit.open_count:
        rank, tone, health = 1, "bad", counted(audit.open_count, "finding")
    elif row.ref_faults:
        rank, tone, health = 2, "warn", f"{counted(len(row.ref_faults), 'ref')} not taken"
    elif row.synced_at is None:
        rank, tone, health = 3, "other", "never synced"
    else:
        rank, tone, health = 4, "good", "ok"
    return MirrorLine(rank, row, health, tone, pins, audit)


async def show_mirrors(engine: Engine, values: Values) -> Facts:
    lines = await mirror_lines(engine)
    # as the keys of mirrors are written: owner__name
    find = values.get("find", "").lower().replace("/", "__")
    chosen = [line for line in lines if find in line.row.name.key]
    problems = sum(line.rank < 3 for line in lines)
    if values.get("show") == "problems":
        chosen = [line for line in chosen if line.rank < 3]
    return {"slice": Slice.of(chosen, values), "total": len(lines), "problems": problems}


async def show_mirror(engine: Engine, values: Values, name: str) -> Facts:
    row = await engine.mirrors.get(name)
    audits = await newest_audits(engine.audits)
    pins = (await engine.catalog.count_pins()).get(row.name.key, 0)
    counts = await engine.catalog.count_servable(unservable_commits(audits))
    line = _mirror_line(row, pins, audits)
    return {
        "line": line,
        "upstream": public_upstream(row.url),
        "datasets": readiness(group for group in counts if group[1].lower() == row.name.key),
        "findings_": group_findings(line.audit.findings) if line.audit else [],
        "checkouts": sum(lease.mirror.key == row.name.key for lease in engine.checkouts.leases),
    }


class DatasetReadiness(NamedTuple):
    """The number of a dataset's instances in each state."""

    name: str
    states: Counter[Servable]

    @property
    def total(self) -> int:
        return self.states.total()

    @property
    def ready(self) -> int:
        return sum(self.states[state] for state in READY)


def readiness(counts: Iterable[tuple[str, str, Servable, int]]) -> list[DatasetReadiness]:
    by_dataset: dict[str, Counter[Servable]] = {}
    for name, _, state, count in counts:
        by_dataset.setdefault(name, Counter())[state] += count
    return [DatasetReadiness(name, states) for name, states in by_dataset.items()]


async def show_datasets(engine: Engine, values: Values) -> Facts:
    unservable = unservable_commits(await newest_audits(engine.audits))
    counts = await engine.catalog.count_servable(unservable)
    ready = {dataset.name: dataset for dataset in readiness(counts)}
    rows = [
        (dataset, ready.get(dataset.name, DatasetReadiness(dataset.name, Counter())))
        for dataset in await engine.catalog.summarise_datasets()
    ]
    return {"slice": Slice.of(rows, values), "why": _WHY}


async def show_dataset(engine: Engine, values: Values, name: str) -> Facts:
    dataset, unservable = (
        parse_dataset_name(name),
        unservable_commits(await newest_audits(engine.audits)),
    )
    datasets = {row.name: row for row in await engine.catalog.summarise_datasets()}
    if dataset not in datasets:
        raise NotFoundError(f"cannot show dataset {dataset}: no dataset has that name")
    counts = await engine.catalog.count_servable(unservable, dataset)
    ready = next(iter(readiness(counts)), DatasetReadiness(dataset, Counter()))
    asked = values.get("state", "")
    state = Servable(asked) if asked in set(Servable) else None
    find = partial(
        engine.catalog.list_servable, dataset, unservable, state=state, limit=PAGE_ROWS,
        mirror=values.get("mirror") or None, containing=values.get("find", "")[:200],
    )  # fmt: skip
    count, rows = await find()
    number, last = _page(values, count)
    if number > 1:
        _, rows = await find(offset=(number - 1) * PAGE_ROWS)
    reasons = sorted(
        (group for group in counts if group[2] is not Servable.READY),
        key=lambda group: (group[2] is Servable.PARTLY, -group[3]),
    )
    return {
        "dataset": datasets[dataset], "ready": ready, "reasons": reasons, "why": _WHY,
        "slice": Slice(rows, number, last, count), "states": list(Servable),
        "mirrors": sorted({group[1] for group in counts}), "tones": TONES,
    }  # fmt: skip


async def show_checkouts(engine: Engine, values: Values) -> Facts:
    leases = sorted(engine.checkouts.leases, key=lambda lease: lease.terms.created_at)
    by_owner = Counter(lease.terms.owner_uid for lease in leases)
    uid = next((uid for uid in by_owner if str(uid) == values.get("owner")), None)
    if uid is not None:
        leases = [lease for lease in leases if lease.terms.owner_uid == uid]
    return {
        "slice": Slice.of(leases, values),
        "uid": uid,
        "owners": by_owner.most_common(50),
        "total": by_owner.total(),
        "max": engine.settings().checkouts.max,
    }


async def show_environments(engine: Engine, values: Values) -> Facts:
    environments = engine.environments.list()
    environments.sort(key=lambda environment: (environment.state == "ready", environment.key))
    rows = [(public_environment(environment.name), environment) for environment in environments]
    states = Counter(environment.state for environment in environments)
    total = sum(environment.size_bytes - environment.shared_bytes for environment in environments)
    return {"slice": Slice.of(rows, values), "states": states, "bytes": total, "tones": TONES}


async def show_fleet(engine: Engine, values: Values) -> Facts:
    """Raises NotFoundError if there is no store."""
    if engine.fleet is None:
        raise NotFoundError("cannot show a fleet: this daemon has no store")
    fleet = await engine.fleet.status()
    named = {node.holder: node.name for node in fleet.nodes}
    claims = [(claim, named.get(claim.holder, "–")) for claim in fleet.claims]
    return {"fleet": fleet, "slice": Slice.of(fleet.nodes, values), "claims": claims}


class FindingGroup(NamedTuple):
    """Findings of one kind in one mirror, with the number of affected instances."""

    mirror: str
    kind: str
    accepted: bool
    findings: int
    instances: int


def group_findings(findings: Iterable[Finding]) -> list[FindingGroup]:
    groups: dict[tuple[str, str, bool], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.mirror, str(finding.kind), finding.accepted), []).append(finding)
    return [
        FindingGroup(*key, len(some), len({one for finding in some for one in finding.instances}))
        for key, some in sorted(groups.items(), key=lambda item: (item[0][2], item[0]))
    ]


def public_subject(engine: Engine, subject: str, datasets: set[str]) -> str:
    if subject in datasets or subject == "everything recorded":
        return subject
    names = []
    for name in subject.split(", "):
        try:
            names.append(str(engine.mirrors.get_name(name)))
        except MirrordError:
            return ""
    return ", ".join(names)
