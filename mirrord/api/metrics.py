"""Metrics for Prometheus: a table of metrics, and their values, read from the engine on request.

The number of label values is limited: only the mirrors with the oldest sync or audit and the users
with most checkouts have their own. Metrics contain times, not ages: `time() - …` is an age.
"""

import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from heapq import nsmallest
from operator import itemgetter
from typing import Any, NamedTuple

import anyio.to_thread
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..catalog import MirrorRow
from ..engine.activity import BUCKETS_S, Traffic
from ..engine.engine import Engine
from ..errors import CatalogUnavailableError

# a label's values are time series: thousands of mirrors would be as many in Prometheus
MIRRORS_SHOWN = 50


class Description(NamedTuple):
    kind: str
    text: str
    labels: tuple[str, ...] = ()


_TABLE = """
gauge build_info; version, python; Constant 1, with the version of the daemon.
gauge up; ; 1 when the daemon can serve, 0 when it is degraded.
gauge warnings; ; Warnings of the health report, such as a refused file or configuration.
gauge start_time_seconds; ; When the daemon started, in seconds since 1970.
counter requests; endpoint, status; Requests answered.
counter refusals; code; Requests and connections refused for now, by error code.
gauge connections; ; Open connections.
gauge checkouts; ; Checkouts held.
gauge checkouts_max; ; The configured limit of checkouts.
gauge owner_checkouts; uid; Checkouts of the users who hold most, and of all others together.
counter proofs_failed; ; Resets whose proof failed: the checkout was discarded.
gauge workers; state; Worker processes, busy and idle.
gauge queue_length; queue; Length of a queue: operations, worker calls, removals.
gauge operations_running; ; Running operations.
counter operations; kind, outcome; Operations that ended, by kind: done, failed, cancelled.
counter events; name; Events by name: syncs, checkouts, resets, imports, failures.
counter cache_hits; cache; Requests answered from a cache.
counter cache_misses; cache; Requests that waited for an entry to be built.
counter cache_evictions; cache; Entries evicted from a cache.
gauge cache_bytes; cache; Bytes of a cache, measured every few minutes.
gauge cache_limit_bytes; cache; The configured limit of a cache.
counter damaged; kind; Damaged parts of templates that were found and discarded.
gauge mirrors; ; Mirrors in the catalog.
gauge mirrors_failed; ; Mirrors whose last sync failed.
gauge mirrors_bytes; ; Bytes of all mirrors.
gauge mirror_synced_timestamp_seconds; mirror; Last successful sync, of the mirrors with \
the oldest; if there is none, when the mirror was added.
gauge mirror_audited_timestamp_seconds; mirror; Last audit, of the mirrors with the oldest; \
if there is none, when the mirror was added or the daemon started.
gauge sync_interval_seconds; ; The configured interval of syncs; 0 means never.
gauge audit_interval_seconds; ; The configured interval of audits; 0 means never.
gauge commits_unservable; ; Recorded commits that cannot be served, by the last audits.
gauge audit_findings; ; Findings of the last audit that are neither healed nor accepted.
gauge datasets; ; Datasets in the catalog.
gauge instances; ; Instances of all datasets.
gauge environments; ; Environments that are ready.
gauge disk_free_bytes; ; Free bytes of the file system that holds the state directory.
gauge disk_reserve_bytes; ; Free bytes below which new work is refused.
gauge disk_size_bytes; ; Size of the file system that holds the state directory.
"""


def _described() -> dict[str, Description]:
    metrics = {}
    for line in _TABLE.strip().splitlines():
        head, labels, text = line.split("; ", 2)
        kind, name = head.split()
        metrics[name] = Description(kind, text, tuple(filter(None, labels.split(", "))))
    return metrics


# By name without prefix. The histogram of requests and metrics of the process are not in it.
METRICS = _described()

# values by label value or by a tuple of label values, or one value
Values = Mapping[Any, float] | float


async def answer(engine: Engine, accept: str = "", *, uid: int | None = None) -> tuple[bytes, str]:
    """Return all metrics and their media type: OpenMetrics if accepted, else Prometheus' text.

    With `uid`, checkouts of that owner only.
    """
    try:
        listed = await engine.catalog.list_mirrors(), await engine.catalog.count_rows()
    except CatalogUnavailableError:  # unknown is no zero: these series are absent
        listed = None
    encode, media_type = choose_encoder(accept)
    registry = CollectorRegistry()
    ProcessCollector(namespace="mirrord", registry=registry)
    values = (
        _current_values(engine, uid)
        | _values_since_start(engine)
        | (_catalog_values(engine, *listed) if listed else {})
    )
    families = [_family(name, *METRICS[name], values[name]) for name in METRICS if name in values]
    registry.register(_Families([*families, _request_times(engine.traffic)]))
    return await anyio.to_thread.run_sync(encode, registry), media_type


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


def _family(name: str, kind: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    metric: Metric
    metric = family = _FAMILIES[kind](f"mirrord_{name}", text, labels=labels)
    rows = values.items() if isinstance(values, Mapping) else [((), values)]
    for key, value in rows:
        family.add_metric((key,) if isinstance(key, str) else key, value)
    return metric


def _current_values(engine: Engine, uid: int | None) -> dict[str, Values]:
    activity, settings = engine.activity(uid), engine.settings()
    others = {"other" if row.uid is None else str(row.uid): row for row in activity.owners}
    caches = {cache.name: cache for cache in activity.caches}
    return {
        "build_info": {(activity.version, platform.python_version()): 1},
        "up": activity.status == "ok",
        "warnings": sum(reason.startswith("warning: ") for reason in activity.reasons),
        "start_time_seconds": activity.started_at.timestamp(),
        "connections": activity.connections,
        "checkouts": activity.checkouts,
        "checkouts_max": activity.checkouts_max,
        "owner_checkouts": {uid: row.checkouts for uid, row in others.items() if row.checkouts},
        "workers": {
            "busy": activity.workers_busy,
            "idle": activity.workers - activity.workers_busy,
        },
        "queue_length": activity.queues,
        "operations_running": activity.operations_running,
        "cache_bytes": {
            name: cache.size_bytes for name, cache in caches.items() if cache.size_bytes is not None
        },
        "cache_limit_bytes": {
            name: cache.limit_bytes
            for name, cache in caches.items()
            if cache.limit_bytes is not None
        },
        "cache_hits": {name: cache.hits for name, cache in caches.items()},
        "cache_misses": {name: cache.misses for name, cache in caches.items()},
        "cache_evictions": {name: cache.evictions for name, cache in caches.items()},
        "sync_interval_seconds": settings.sync.interval.total_seconds(),
        "audit_interval_seconds": settings.audit.interval.total_seconds(),
        "disk_free_bytes": activity.disk_free_bytes,
        "disk_reserve_bytes": activity.disk_reserve_bytes,
        "disk_size_bytes": activity.disk_bytes,
    }


def _values_since_start(engine: Engine) -> dict[str, Values]:
    traffic, events = engine.traffic, engine.events.counts
    return {
        "requests": {(name, str(status)): n for (name, status), n in traffic.answers.items()},
        "refusals": dict(traffic.refusals),
        "proofs_failed": events["proof.failed"],
        "operations": dict(engine.operations.ended),
        "events": dict(events),
        "damaged": {kind: events[f"{kind}.damaged"] for kind in ("template", "closure", "store")},
    }


def _catalog_values(
    engine: Engine, mirrors: Sequence[MirrorRow], rows: tuple[int, int]
) -> dict[str, Values]:
    judged, last, started = engine.audits.judgements, engine.audits.last, engine.started_at
    synced = [(row.synced_at or row.added_at, str(row.name)) for row in mirrors]
    judged_rows = [(row, judged.get(row.name.key)) for row in mirrors]
    audited = [
        (it.at if it else max(started, row.added_at), str(row.name)) for row, it in judged_rows
    ]
    datasets, instances = rows
    return {
        "mirrors": len(mirrors),
        "mirrors_failed": sum(row.error is not None for row in mirrors),
        "mirrors_bytes": sum(row.size_bytes or 0 for row in mirrors),
        "mirror_synced_timestamp_seconds": _oldest(synced),
        "mirror_audited_timestamp_seconds": _oldest(audited),
        "commits_unservable": sum(it.unservable for _, it in judged_rows if it),
        "audit_findings": last.open_count if last else 0,
        "datasets": datasets,
        "instances": instances,
        "environments": sum(record.is_ready for record in engine.environment_store.list()),
    }


def _oldest(times: list[tuple[datetime, str]]) -> dict[str, float]:
    return {
        name: time.timestamp() for time, name in nsmallest(MIRRORS_SHOWN, times, key=itemgetter(0))
    }


_BOUNDS = (*map(floatToGoString, BUCKETS_S), "+Inf")


def _request_times(traffic: Traffic) -> Metric:
    times = HistogramMetricFamily(
        "mirrord_request_duration_seconds", "Response time.", labels=["endpoint"]
    )
    for endpoint, answered in traffic.since_start().items():
        below, bounds = 0, []
        for bound, count in zip(_BOUNDS, answered.buckets, strict=True):
            below += count
            bounds.append((bound, float(below)))
        times.add_metric([endpoint], bounds, traffic.sums_s[endpoint])
    return times
