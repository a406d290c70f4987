"""One daemon per state directory: an exclusive lock that the kernel drops when its holder ends, however it ends.

The file says who holds the lock, for the one who is refused; it is never a proof of anything by itself and is never removed,
because a lock on a removed file excludes nobody.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import AlreadyRunningError, ResourceError
from ..model import utc_now


class StateLock:
    """Holds `state_dir/daemon.lock` from construction until `close`. Raises AlreadyRunningError with the holder's facts."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "daemon.lock"
        try:
            self._fd = _open(self._path)
        except OSError as error:
            raise ResourceError(
                f"cannot lock state directory {state_dir}: {error.strerror}", hint="check its owner"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = self._holder()
            os.close(self._fd)
            raise _refusal(state_dir, holder) from error
        self._write_holder()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def _write_holder(self) -> None:
        """A full disk holds nobody up: the lock is held all the same."""
        facts = {
            "pid": os.getpid(),
            "uid": os.geteuid(),
            "started_at": utc_now().isoformat(timespec="seconds"),
        }
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(facts).encode() + b"\n", 0)

    def _holder(self) -> dict[str, Any]:
        """Empty where the holder has not written it yet."""
        try:
            facts = json.loads(os.pread(self._fd, 4096, 0))
            return {
                "pid": int(facts["pid"]),
                "uid": int(facts["uid"]),
                "started_at": _checked_time(facts["started_at"]),
            }
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def _open(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | flags)  # it can be locked, and what is there be served


def _checked_time(text: str) -> str:
    return datetime.fromisoformat(text).isoformat(timespec="seconds")


def _refusal(state_dir: Path, holder: dict[str, Any]) -> AlreadyRunningError:
    who = (
        "process {pid} of uid {uid}, started {started_at}".format(**holder)
        if holder
        else "a daemon that is just starting"
    )
    return AlreadyRunningError(
        f"cannot start a daemon on {state_dir}: {who} holds it",
        hint="stop that one first, or give this one another state_dir",
        state_dir=str(state_dir),
        **holder,
    )
