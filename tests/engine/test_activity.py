"""Rates and latencies come from snapshots of the one histogram."""

from __future__ import annotations

import pytest

from mirrord.engine.activity import BUCKETS_S, SNAPSHOT_S, WINDOW_S, Traffic, quantile, summed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_latest_minute_forgets_what_came_before() -> None:
    """The counts since the start remain."""
    clock = Clock()
    traffic = Traffic(clock)
    traffic.observe("health", 200, 0.001)
    for _ in range(round(WINDOW_S / SNAPSHOT_S) + 1):
        clock.now += SNAPSHOT_S
        traffic.snapshot()
    assert traffic.latest() == (WINDOW_S, {})
    traffic.observe("health", 503, 4.0)
    seconds, answered = traffic.latest()
    assert (seconds, answered["health"].total, answered["health"].failed) == (WINDOW_S, 1, 1)
    assert traffic.answers == {("health", 200): 1, ("health", 503): 1}
    assert traffic.since_start()["health"].total == 2


def test_a_young_daemon_has_a_shorter_window() -> None:
    """Its rates use the elapsed time, not a whole minute."""
    clock = Clock()
    traffic = Traffic(clock)
    clock.now += 2
    traffic.observe("health", 200, 0.001)
    assert traffic.latest()[0] == 2


def test_a_quantile_lies_in_the_bucket_that_holds_it() -> None:
    """Interpolated linearly, as by Prometheus; longer times are the last bound."""
    traffic = Traffic()
    for _ in range(99):
        traffic.observe("health", 200, 0.002)
    traffic.observe("health", 200, 1000.0)
    traffic.observe("other", 200, 0.002)
    answered = traffic.latest()[1]
    buckets = answered["health"].buckets
    assert quantile(buckets, 0.5) == pytest.approx(0.001 + 0.0015 * 50 / 99)
    assert quantile(buckets, 1.0) == BUCKETS_S[-1]
    assert summed(answered.values()).total == 101
    assert quantile(summed([]).buckets, 0.5) is None
