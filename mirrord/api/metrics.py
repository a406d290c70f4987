"""Metrics in Prometheus' text format, read from the engine when asked."""

from collections.abc import Mapping

import anyio.to_thread
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..engine import Engine
from ..traffic import BUCKETS_S, Traffic

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (*map(floatToGoString, BUCKETS_S), "+Inf")

GAUGES = {
    "up": "1 when the daemon can serve, 0 when it is degraded.",
    "mirrors": "Mirrors in the catalog.",
    "mirrors_failed": "Mirrors whose last sync failed.",
    "mirrors_bytes": "Bytes of all mirrors.",
    "datasets": "Datasets in the catalog.",
    "environments": "Environments that are ready.",
    "commits_unservable": "Recorded commits that the last audit could not serve.",
    "checkouts": "Checkouts held.",
    "checkouts_max": "The configured limit of checkouts.",
    "operations_running": "Operations that run.",
    "disk_free_bytes": "Free bytes of the file system that holds the state directory.",
    "disk_reserve_bytes": "Bytes of it that new work leaves free; below, it is refused.",
    "start_time_seconds": "When the daemon started, in seconds since 1970.",
}
"""Names and help of the gauges that `Engine.figures` reads."""


async def text(engine: Engine) -> bytes:
    """All metrics."""
    registry = CollectorRegistry()
    ProcessCollector(namespace="mirrord", registry=registry)
    figures = _Figures(await engine.figures(), engine.events.counts, engine.traffic)
    registry.register(figures)
    return await anyio.to_thread.run_sync(generate_latest, registry)


class _Figures(Collector):
    """Read on the event loop, rendered in a thread."""

    def __init__(
        self, figures: dict[str, float], counts: Mapping[str, int], traffic: Traffic
    ) -> None:
        events = CounterMetricFamily(
            "mirrord_events",
            "Events by name: syncs, checkouts, resets, imports, failures.",
            labels=["name"],
        )
        for name, count in sorted(counts.items()):
            events.add_metric([name], count)
        gauges = [
            GaugeMetricFamily(f"mirrord_{name}", text, figures[name])
            for name, text in GAUGES.items()
        ]
        self._families = [*gauges, events, *_requests(traffic)]

    def collect(self) -> list[Metric]:
        return self._families


def _requests(traffic: Traffic) -> list[Metric]:
    answers = CounterMetricFamily(
        "mirrord_requests", "Requests answered.", labels=("endpoint", "status")
    )
    for (endpoint, status), count in sorted(traffic.answers.items()):
        answers.add_metric((endpoint, str(status)), count)
    times = HistogramMetricFamily(
        "mirrord_request_duration_seconds", "Time to an answer.", labels=["endpoint"]
    )
    for endpoint, buckets in sorted(traffic.buckets.items()):
        below, bounds = 0, []
        for bound, count in zip(_BOUNDS, buckets, strict=True):
            below += count
            bounds.append((bound, float(below)))
        times.add_metric([endpoint], bounds, traffic.sums_s[endpoint])
    return [answers, times]
