"""The facts of the overview and of the activity of the daemon, as reduced as those of `views`."""

from collections import Counter
from collections.abc import Sequence

from ..audit.readiness import unservable_commits
from ..engine.engine import Engine
from ..model import utc_now
from ..protocol import Activity, Operation
from .figures import Chart, Point, chart, seconds, size
from .views import Facts, Values, mirror_lines, public_subject, readiness


async def show_overview(engine: Engine, values: Values) -> Facts:
    await engine.current_health()
    activity = engine.activity(history=True)
    lines = await mirror_lines(engine)
    unservable = unservable_commits({line.row.name.key: line.audit for line in lines if line.audit})
    newest = await engine.audits.list_audits(1)
    synced = [line.row.synced_at for line in lines if line.row.synced_at]
    return {
        "activity": activity,
        "mirrors": Counter(line.tone for line in lines),
        "mirror_count": len(lines),
        "mirror_bytes": sum(line.row.size_bytes or 0 for line in lines),
        "problems": [line for line in lines if line.rank < 3][:5],
        "oldest_sync": min(synced, default=None),
        "datasets": readiness(await engine.catalog.count_servable(unservable)),
        "environments": Counter(environment.state for environment in engine.environments.list()),
        "audit": newest[0] if newest else None,
        "audited": len(newest[0].mirrors) if newest else 0,
        "charts": _charts(activity),
        "work": await _work(engine, activity.operations),
    }


def _charts(activity: Activity) -> list[Chart]:
    now, past = utc_now(), activity.history

    def points(name: str) -> list[Point]:
        return [Point(point.at, getattr(point, name)) for point in past]

    used = [Point(point.at, activity.disk_bytes - point.disk_free_bytes) for point in past]
    return [
        chart(
            "Response time",
            {"median": points("p50_s"), "99 of 100": points("p99_s")}, now, seconds, log=True,
        ),
        chart("Requests a second", {"requests": points("per_second")}, now, _plain, most=1),
        chart("Checkouts", {"held": points("checkouts")}, now, _plain, most=4),
        chart("Disk", {"in use": used}, now, size, most=activity.disk_bytes),
    ]  # fmt: skip


def _plain(value: float) -> str:
    return f"{value:.3g}"


async def _work(engine: Engine, operations: Sequence[Operation]) -> list[tuple[Operation, str]]:
    """Return running work with its subject; that is empty unless it is a mirror or a dataset."""
    datasets = {dataset.name for dataset in await engine.catalog.summarise_datasets()}
    return [
        (operation, public_subject(engine, operation.subject, datasets)) for operation in operations
    ]


async def show_activity(engine: Engine, values: Values) -> Facts:
    activity = engine.activity(history=True)
    work = await _work(engine, activity.operations)
    return {"activity": activity, "charts": _charts(activity), "work": work}
