"""Finding the few bad ones among many by trying halves.

One damaged ref upstream makes a fetch of everything fail; trying halves finds it in about 2 log2(n) attempts and takes the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ..errors import MirrordError

T = TypeVar("T")


async def isolate(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Awaitable[None]],
    *,
    blames_items: Callable[[MirrordError], bool],
    budget: int,
    hopeless: int,
) -> list[tuple[T, MirrordError]]:
    """Call `attempt` on `items`, on failure on its halves, down to single items; answers those that failed, each with its error.

    An error that does not blame the items is raised. What is left is given the last error untried after `budget` failures, or
    when `hopeless` single items failed before anything succeeded.
    """
    failed: list[tuple[T, MirrordError]] = []
    waiting: list[Sequence[T]] = [items] if items else []
    failures = successes = 0
    while waiting:
        some = waiting.pop()
        try:
            await attempt(some)
            successes += 1
        except MirrordError as error:
            if not blames_items(error):
                raise
            failures += 1
            if len(some) == 1 or failures > budget or (not successes and len(failed) >= hopeless):
                failed.extend((item, error) for item in some)
                continue
            middle = 1 if failures == 1 else len(some) // 2  # the first item is the likeliest, and makes the rest cheaper
            waiting += [some[middle:], some[:middle]]
    return failed
