"""One daemon per state directory: a lock that the kernel drops however its holder ends.

The file names the holder for whom it refuses; it proves nothing by itself, and is never removed,
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
from typing import Any, Self

from ..errors import AlreadyRunningError, ResourceError
from ..model import utc_now


class StateLock:
    """Holds `state_dir/daemon.lock` from construction to `close`. Raises AlreadyRunningError."""

    def __init__(self, state_dir: Path) -> None:
        path, flags = state_dir / "daemon.lock", os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
                self._fd = os.open(path, os.O_RDONLY | flags)  # enough to lock it and to serve
        except OSError as error:
            raise ResourceError(
                f"cannot lock state directory {state_dir}: {error.strerror}", hint="check its owner"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            facts = self._read_holder()
            os.close(self._fd)
            holder = "a daemon that is just starting"
            if facts:
                holder = "process {pid} of uid {uid}, started {started_at}".format(**facts)
            raise AlreadyRunningError(
                f"cannot start a daemon on {state_dir}: {holder} holds it",
                hint="stop that one first, or give this one another state_dir",
                state_dir=str(state_dir),
                **facts,
            ) from error
        started_at = utc_now().isoformat(timespec="seconds")
        facts = {"pid": os.getpid(), "uid": os.geteuid(), "started_at": started_at}
        with suppress(OSError):  # on a full disk the lock is held all the same
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(facts).encode() + b"\n", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def _read_holder(self) -> dict[str, Any]:
        """Empty where the holder has not written it yet."""
        try:
            facts = json.loads(os.pread(self._fd, 4096, 0))
            started_at = datetime.fromisoformat(facts["started_at"]).isoformat(timespec="seconds")
            return {"pid": int(facts["pid"]), "uid": int(facts["uid"]), "started_at": started_at}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
