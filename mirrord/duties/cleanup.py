"""What failed operations left, tried again while the daemon runs: what a start would mend must not wait for one.

Each part knows what it owes and does nothing where that is nothing. While something stays owed, as on a disk that is still full,
the turns between two tries double. Owns only that patience.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

_LONGEST = 32


class Cleanup:
    """`parts` are called in order; each answers whether it owes nothing any more."""

    def __init__(self, parts: Sequence[Callable[[], Awaitable[bool]]]) -> None:
        self._parts = parts
        self._pause = 0
        self._left = 0

    async def take_turn(self) -> None:
        """Try everything that is owed, unless the last try was just now and in vain."""
        if self._left > 0:
            self._left -= 1
            return
        answers = [await part() for part in self._parts]
        self._pause = 0 if all(answers) else min(2 * self._pause + 1, _LONGEST)
        self._left = self._pause
