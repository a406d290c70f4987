"""What is measured: one table, counted where requests are served, read from the engine when somebody asks.

A registry of its own, so that two daemons in one process (a test) do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

from ..engine import Engine, Figures

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    120.0,
)


@dataclass(frozen=True, slots=True)
class Gauge:
    """One figure read from the engine when it is asked for."""

    name: str
    help: str
    read: Callable[[Figures], float]


GAUGES = (
    Gauge(
        "mirrord_up",
        "1 when the daemon can serve, 0 when it is degraded.",
        lambda f: float(not f.degraded),
    ),
    Gauge("mirrord_mirrors", "Mirrors in the catalog.", lambda f: f.mirrors),
    Gauge("mirrord_mirrors_failed", "Mirrors whose last sync failed.", lambda f: f.mirrors_failed),
    Gauge("mirrord_mirrors_bytes", "Bytes of all mirrors.", lambda f: f.mirror_bytes),
    Gauge("mirrord_datasets", "Datasets in the catalog.", lambda f: f.datasets),
    Gauge(
        "mirrord_commits_unservable",
        "Recorded commits that the last audit could not serve.",
        lambda f: f.unservable,
    ),
    Gauge("mirrord_checkouts", "Checkouts held.", lambda f: f.checkouts),
    Gauge("mirrord_checkouts_max", "The configured limit of checkouts.", lambda f: f.checkouts_max),
    Gauge("mirrord_operations_running", "Operations that run.", lambda f: f.operations_running),
    Gauge(
        "mirrord_disk_free_bytes",
        "Free bytes of the file system that holds the state directory.",
        lambda f: f.disk_free_bytes,
    ),
    Gauge(
        "mirrord_start_time_seconds",
        "When the daemon started, in seconds since 1970.",
        lambda f: f.started_at.timestamp(),
    ),
)

EVENTS = ("mirrord_events", "Events by name: syncs, checkouts, resets, imports, failures.")


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("endpoint", "status")
        self._requests = Counter(
            "mirrord_requests", "Requests answered.", labels, registry=self._registry
        )
        self._seconds = Histogram(
            "mirrord_request_seconds",
            "Time to an answer.",
            ("endpoint",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        ProcessCollector(namespace="mirrord", registry=self._registry)
        self._count = lru_cache(maxsize=1024)(self._requests.labels)
        self._timer = lru_cache(maxsize=256)(self._seconds.labels)

    def observe_request(self, endpoint: str, status: int, seconds: float) -> None:
        self._count(endpoint, status).inc()
        self._timer(endpoint).observe(seconds)

    async def text(self, engine: Engine) -> bytes:
        """All metrics in Prometheus' text format."""
        figures = await engine.figures()
        return await anyio.to_thread.run_sync(self._render, figures)

    def _render(self, figures: Figures) -> bytes:
        registry = CollectorRegistry()
        registry.register(_Snapshot(figures))
        return generate_latest(self._registry) + generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> list[Metric]:
        gauges: list[Metric] = [
            GaugeMetricFamily(g.name, g.help, value=g.read(self._figures)) for g in GAUGES
        ]
        events = CounterMetricFamily(*EVENTS, labels=["name"])
        for name, count in sorted(self._figures.events.items()):
            events.add_metric([name], count)
        return [*gauges, events]
