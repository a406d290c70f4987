"""Many rounds on one mirror that lives in this process: parts of them that can go side by side, and the place each lives in."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from .plan import Part, Plan
from .report import Row

ROUNDS, _PARTS = 1000, 8

Rounds = Callable[[int, Collection[int]], Iterator[Row]]
"""Of a seed and the numbers of the rounds."""


class Resident(Protocol):
    async def open(self) -> None: ...

    async def furnish(self) -> None: ...

    async def close(self) -> None: ...


R = TypeVar("R", bound=Resident)


def parts_of(kind: str, rounds: Rounds) -> list[Part]:
    """All rounds, in parts that can go side by side."""
    share = ROUNDS // _PARTS
    numbers = [range(n * share, (n + 1) * share) for n in range(_PARTS)]
    return [
        Part(f"{kind} {some[0]} to {some[-1]}", partial(_some_of, rounds, some)) for some in numbers
    ]


def _some_of(rounds: Rounds, numbers: range, plan: Plan) -> Iterator[Row]:
    yield from rounds(plan.seed, numbers[: plan.some(len(numbers))])


@contextmanager
def living(make: Callable[[Path], R]) -> Iterator[tuple[R, BlockingPortal]]:
    """One that is open and furnished, with the event loop it lives on; gone at the end."""
    root = Path(tempfile.mkdtemp(prefix="mr-"))
    try:
        with start_blocking_portal() as portal:
            resident = make(root)
            portal.call(resident.open)
            try:
                portal.call(resident.furnish)
                yield resident, portal
            finally:
                portal.call(resident.close)
    finally:
        shutil.rmtree(root, ignore_errors=True)
