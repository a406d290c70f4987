"""Exponential back-off."""

from __future__ import annotations

from datetime import timedelta

from mirrord.units import Backoff

SECOND = timedelta(seconds=1)


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(SECOND, 5 * SECOND)
    assert [backoff.next() / SECOND for _ in range(5)] == [1, 2, 4, 5, 5]


def test_a_success_resets_the_pause() -> None:
    backoff = Backoff(SECOND, 60 * SECOND)
    backoff.next(), backoff.next()
    backoff.reset()
    assert backoff.next() == SECOND


def test_a_spread_varies_the_pause_by_that_share() -> None:
    chances = iter([0.0, 0.5, 1.0])
    backoff = Backoff(SECOND, SECOND, spread=0.2, chance=lambda: next(chances))
    assert [backoff.next() / SECOND for _ in range(3)] == [0.8, 1.0, 1.2]
