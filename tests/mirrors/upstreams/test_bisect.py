"""Groups of items are tried until the bad ones stand alone."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from mirrord.errors import GitFailedError, MirrordError, UpstreamAuthError
from mirrord.mirrors.upstreams.upstream import find_bad


@pytest.mark.parametrize("bad", [set(), {0}, {99}, {3, 50, 51}])
def test_the_bad_ones_are_found_and_the_rest_is_taken(bad: set[int]) -> None:
    """In far fewer attempts than there are items."""
    taken: list[int] = []
    attempts = 0

    async def attempt(some: Sequence[int]) -> None:
        nonlocal attempts
        attempts += 1
        if bad & set(some):
            raise GitFailedError("cannot take them")
        taken.extend(some)

    async def main() -> dict[int, MirrordError]:
        return await find_bad(
            range(100),
            attempt,
            is_item_error=lambda _: True,
            max_failures=100,
            max_first_failures=8,
        )

    assert anyio.run(main).keys() == bad
    assert sorted(taken) == sorted(set(range(100)) - bad)
    assert attempts <= 2 + 18 * len(bad)


def test_what_shares_a_cause_is_left_out_at_once() -> None:
    """A step for each cause, however many items it stops."""
    attempts: list[int] = []

    async def blame(error: MirrordError, group: Sequence[int]) -> set[int]:
        """An error names a number; whatever is divided by five with that remainder fails."""
        return {item for item in range(100) if item % 5 == error.facts["remainder"]}

    async def attempt(some: Sequence[int]) -> None:
        attempts.append(len(some))
        if found := {item % 5 for item in some} & {1, 3}:
            raise GitFailedError("cannot take them", remainder=min(found))

    async def main() -> dict[int, MirrordError]:
        return await find_bad(
            range(100),
            attempt,
            is_item_error=lambda _: True,
            max_failures=100,
            max_first_failures=8,
            blame=blame,
            sort=lambda group: group,
        )

    assert anyio.run(main).keys() == {item for item in range(100) if item % 5 in {1, 3}}
    assert attempts == [100, 80, 60]


def test_when_nothing_works_the_search_ends_early() -> None:
    attempts = 0

    async def attempt(some: Sequence[int]) -> None:
        nonlocal attempts
        attempts += 1
        raise GitFailedError("cannot take them")

    async def main() -> dict[int, MirrordError]:
        return await find_bad(
            range(1000),
            attempt,
            is_item_error=lambda _: True,
            max_failures=400,
            max_first_failures=8,
        )

    assert len(anyio.run(main)) == 1000
    assert attempts < 60


def test_an_error_that_blames_nobody_is_raised() -> None:
    async def attempt(_: Sequence[int]) -> None:
        raise UpstreamAuthError("cannot enter")

    async def main() -> None:
        await find_bad(
            [1, 2],
            attempt,
            is_item_error=lambda error: not isinstance(error, UpstreamAuthError),
            max_failures=9,
            max_first_failures=9,
        )

    with pytest.raises(UpstreamAuthError):
        anyio.run(main)
