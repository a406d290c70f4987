"""Metrics: requests are counted as they are answered, gauges are read from the engine when asked.

The registry is its own, so that two daemons in one process (a test) do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

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

from ..engine import Engine, Figures

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)


class Gauge(NamedTuple):
    name: str
    help: str
    read: Callable[[Figures], float]


GAUGES = (
    Gauge("up", "1 when the daemon can serve, 0 when it is degraded.", lambda f: not f.degraded),
    Gauge("mirrors", "Mirrors in the catalog.", lambda f: f.mirrors),
    Gauge("mirrors_failed", "Mirrors whose last sync failed.", lambda f: f.mirrors_failed),
    Gauge("mirrors_bytes", "Bytes of all mirrors.", lambda f: f.mirror_bytes),
    Gauge("datasets", "Datasets in the catalog.", lambda f: f.datasets),
    Gauge(
        "commits_unservable",
        "Recorded commits that the last audit could not serve.",
        lambda f: f.unservable,
    ),
    Gauge("checkouts", "Checkouts held.", lambda f: f.checkouts),
    Gauge("checkouts_max", "The configured limit of checkouts.", lambda f: f.checkouts_max),
    Gauge("operations_running", "Operations that run.", lambda f: f.operations_running),
    Gauge(
        "disk_free_bytes",
        "Free bytes of the file system that holds the state directory.",
        lambda f: f.disk_free_bytes,
    ),
    Gauge(
        "start_time_seconds",
        "When the daemon started, in seconds since 1970.",
        lambda f: f.started_at.timestamp(),
    ),
)


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
        registry.register(_Snapshot(await engine.figures()))
        return await anyio.to_thread.run_sync(
            lambda: generate_latest(self._registry) + generate_latest(registry)
        )


class _Snapshot(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> list[Metric]:
        events = CounterMetricFamily(
            "mirrord_events",
            "Events by name: syncs, checkouts, resets, imports, failures.",
            labels=["name"],
        )
        for name, count in sorted(self._figures.events.items()):
            events.add_metric([name], count)
        gauges = [
            GaugeMetricFamily(f"mirrord_{gauge.name}", gauge.help, gauge.read(self._figures))
            for gauge in GAUGES
        ]
        return [*gauges, events]
