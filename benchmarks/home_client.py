"""Holds a checkout where its mount is seen, and times each work that it is told on stdin."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

from rivals import dirty
from rollouts import make_change

from mirrord import Checkout, Client
from mirrord.model import Backend


def main(mirror: str, commit: str) -> None:
    with (
        Client() as client,
        client.checkout(mirror=mirror, commit=commit, backend=Backend.OVERLAY) as held,
    ):
        changes = itertools.cycle([make_change(held.path, 3, 0, number) for number in (0, 1)])

        def checkout() -> float:
            return briefly(
                lambda: client.checkout(mirror=mirror, commit=commit, backend=Backend.OVERLAY)
            )

        def reset() -> float:
            dirty(held.path)
            return timed(held.reset)

        def diff() -> float:
            next(changes).write(held.path)
            return timed(held.diff)

        def fork() -> float:
            next(changes).write(held.path)
            return briefly(held.fork)

        works = {"checkout": checkout, "reset": reset, "diff": diff, "fork": fork}
        for line in sys.stdin:
            work = line.strip()
            print(held.id if work == "id" else works[work](), flush=True)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def briefly(take: Callable[[], Checkout]) -> float:
    """The seconds that it takes to get a checkout, which is released afterwards."""
    began = time.perf_counter()
    checkout = take()
    took = time.perf_counter() - began
    checkout.release()
    return took


if __name__ == "__main__":
    main(*sys.argv[1:])
