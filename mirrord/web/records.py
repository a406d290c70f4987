"""The facts of the pages of audits, reports and receipts, as reduced as those of `views`."""

from collections import Counter

from ..engine.engine import Engine
from ..errors import NotFoundError
from ..model import MirrorName, ReportKind
from .views import (
    LISTED,
    TONES,
    Facts,
    Slice,
    Values,
    group_findings,
    public_environment,
    public_subject,
    public_upstream,
)


async def show_audits(engine: Engine, values: Values) -> Facts:
    return {"slice": Slice.of(await engine.audits.list_audits(50), values)}


async def show_audit(engine: Engine, values: Values, identity: str) -> Facts:
    audit = await engine.catalog.find_audit(identity)
    if audit is None:
        raise NotFoundError("cannot find the audit")
    ids = await engine.catalog.list_public_ids(audit.affected)
    return {
        "audit": audit,
        "judged": sum(audit.counts.values()),
        "groups": Slice.of(group_findings(audit.findings), values),
        # an id that no dataset has any more could reveal a commit
        "affected": sorted(ids.values())[:LISTED],
    }


async def show_reports(engine: Engine, values: Values) -> Facts:
    reports = await engine.catalog.list_reports()
    names = {dataset.name for dataset in await engine.catalog.summarise_datasets()}
    rows = [(report, report.dataset if report.dataset in names else "") for report in reports]
    return {"slice": Slice.of(rows, values), "tones": TONES}


async def show_report(engine: Engine, values: Values, identity: str) -> Facts:
    report = await engine.catalog.find_report(identity)
    if report is None:
        raise NotFoundError("cannot find the report")
    # an agent must not learn the result of its prediction
    faults = report.faults if report.kind is ReportKind.REHEARSAL else {}
    ids = await engine.catalog.list_public_ids(faults)
    named = (
        (public_subject(engine, name, set()), counts) for name, counts in report.mirrors.items()
    )
    names = {dataset.name for dataset in await engine.catalog.summarise_datasets()}
    return {
        "report": report,
        "dataset": report.dataset if report.dataset in names else "",
        "mirrors": sorted((name, counts) for name, counts in named if name),
        "steps": Counter(faults.values()).most_common(),
        # an id that no dataset has any more could reveal a commit
        "faults": Slice.of(
            sorted((ids[fault], step) for fault, step in faults.items() if fault in ids), values
        ),
        "tones": TONES,
    }


async def show_receipts(engine: Engine, values: Values) -> Facts:
    receipts = await engine.catalog.list_receipts()
    return {"slice": Slice.of(receipts, values), "node": engine.catalog.node}


async def show_receipt(engine: Engine, values: Values, identity: str) -> Facts:
    row = await engine.catalog.find_receipt(identity)
    if row is None:
        raise NotFoundError("cannot find the receipt")
    receipt, key = row.receipt, MirrorName.parse(row.receipt.mirror).key
    return {
        "row": row,
        "receipt": receipt,
        "node": engine.catalog.node,
        "upstream": public_upstream(receipt.upstream) if receipt.upstream else "",
        # other commits are hidden, and everything that would identify one
        "is_base": await engine.catalog.find_base_commit(key, receipt.commit) is not None,
        "environment": public_environment(receipt.environment or ""),
    }
