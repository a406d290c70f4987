"""Metrics: requests are counted as they are answered, gauges are read from the engine when asked.

The registry is its own, so that two daemons in one process (a test) do not add up.
"""

from functools import lru_cache

import anyio.to_thread
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import Engine

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)


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
    "start_time_seconds": "When the daemon started, in seconds since 1970.",
}
"""Names and help of the gauges that `Engine.figures` reads."""


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        requests = Counter(
            "mirrord_requests",
            "Requests answered.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        seconds = Histogram(
            "mirrord_request_seconds",
            "Time to an answer.",
            ("endpoint",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        ProcessCollector(namespace="mirrord", registry=self._registry)
        self._requests = lru_cache(maxsize=1024)(requests.labels)
        self._seconds = lru_cache(maxsize=256)(seconds.labels)

    def observe(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests(endpoint, status).inc()
        self._seconds(endpoint).observe(seconds)

    async def text(self, engine: Engine) -> bytes:
        """All metrics in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(_Figures(await engine.figures(), dict(engine.events.counts)))
        return await anyio.to_thread.run_sync(
            lambda: generate_latest(self._registry) + generate_latest(registry)
        )


class _Figures(Collector):
    def __init__(self, figures: dict[str, float], events: dict[str, int]) -> None:
        self._figures, self._events = figures, events

    def collect(self) -> list[Metric]:
        events = CounterMetricFamily(
            "mirrord_events",
            "Events by name: syncs, checkouts, resets, imports, failures.",
            labels=["name"],
        )
        for name, count in sorted(self._events.items()):
            events.add_metric([name], count)
        gauges = [
            GaugeMetricFamily(f"mirrord_{name}", text, self._figures[name])
            for name, text in GAUGES.items()
        ]
        return [*gauges, events]
