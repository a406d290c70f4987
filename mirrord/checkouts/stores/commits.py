"""What is known of the commits that templates are made of: tree, time and nearest ancestors, read once by a worker.

Owns the memory of those asked for lately. What a full id names never changes, so nothing here goes out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from ...errors import CommitNotFoundError, CommitUnservableError, CorruptObjectError
from ...git.workers import Workers
from ...model import CommitId, MirrorName, Resolved

# Named, not imported: it loads libgit2, which only workers do.
_RESOLVE = "mirrord.git.objects:resolve"
_TIMEOUT = timedelta(seconds=30)
_KEPT = 64


class Commits:
    """Belongs to one event loop."""

    def __init__(self, workers: Workers, mirrors_path: Callable[[MirrorName], Path]) -> None:
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._known: dict[tuple[str, CommitId], Resolved] = {}

    def learn(self, name: MirrorName, found: Resolved) -> None:
        """Keep what was found out anyhow, so that nobody asks again."""
        self._known.pop((name.key, found.commit), None)
        self._known[name.key, found.commit] = found
        if len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    async def get(self, name: MirrorName, commit: CommitId) -> Resolved:
        """Of bytes that were hashed when they were read; raises CommitNotFoundError, CommitUnservableError."""
        found = self._known.get((name.key, commit)) or await self._read(name, commit)
        self.learn(name, found)
        return found

    async def _read(self, name: MirrorName, commit: CommitId) -> Resolved:
        try:
            found: Resolved = await self._workers.call(
                _RESOLVE, self._mirrors_path(name), commit, timeout=_TIMEOUT
            )
        except CommitNotFoundError as error:
            raise CommitNotFoundError(
                f"cannot find commit {commit}: {name} does not have it",
                hint="sync the mirror, or pin the commit so that it is fetched",
                commit=commit,
                mirror=str(name),
            ) from error
        except CorruptObjectError as error:
            raise CommitUnservableError(
                f"cannot serve commit {commit}: its object is damaged",
                hint="audit and heal the mirror",
                commit=commit,
            ) from error
        return found
