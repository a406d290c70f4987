"""The environments on disk: found by key, held while a checkout shows one, removed.

An environment is the directory `templates/.environments/<digest>` with `files` (the prefix, as it
is seen at its fixed path), `environment.json` (what it is and how it was built) and `log`. `digest`
is that of its recipe. A failed build is the same without `files`. Both appear by one rename, and
`files` never changes: a crash leaves `.building-…`, which the next start removes. Files of equal
content and mode are hard links of one in `.files`. All belong to the daemon's user.
"""

import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import EnvironmentInUseError, EnvironmentNotFoundError
from ..host.trash import TRASH_PREFIX, Trash, new_trash
from ..model import ENVIRONMENT_KEY, shown
from .leases import EnvironmentName

DIRECTORY = ".environments"
"""Below `templates`, which the mounter shows to other owners as theirs."""
RECORD = "environment.json"
_BUILDING = ".building-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(rf"({ENVIRONMENT_KEY.pattern})(?:@([0-9a-f]{{4,64}}))?")


class EnvironmentRecord(NamedTuple):
    """What `environment.json` says; `facts` are its members, `at` when it was built."""

    key: str
    digest: str
    is_ready: bool
    at: float
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """KEY@DIGEST, shortened: what requests may name an environment by."""
        return str(EnvironmentName(self.key, self.digest))


class EnvironmentStore:
    """The environments below `templates`; `held` counts by digest. Belongs to the event loop."""

    def __init__(self, state_dir: Path, trash: Trash) -> None:
        self.root = state_dir / "templates" / DIRECTORY
        self.shared = self.root / ".files"
        self._trash = trash
        self._records: dict[str, EnvironmentRecord] = {}
        self.held: Counter[str] = Counter()

    def open(self) -> None:
        """Read what is on disk; remove what is not whole."""
        with suppress(FileNotFoundError):
            for path in sorted(self.root.iterdir()):
                if path.name.startswith((_BUILDING, TRASH_PREFIX)):
                    self._trash.remove(path)
                elif record := _read(path):
                    self._records[record.digest] = record
                elif path != self.shared:
                    self._trash.discard(path)

    def find(self, name: str) -> EnvironmentRecord | None:
        """The environment of a name: KEY (the one built last), or KEY@DIGEST, of which the
        beginning will do.
        """
        ready = [record for record in self.records(name) if record.is_ready]
        return max(ready, key=lambda record: record.at, default=None)

    def get(self, name: str) -> EnvironmentRecord:
        """As `find`; raises EnvironmentNotFoundError."""
        if (found := self.find(name)) is None:
            raise not_found(name)
        return found

    def list(self) -> list[EnvironmentRecord]:
        """All, failed builds too, by key."""
        return sorted(self._records.values(), key=lambda record: (record.key, record.at))

    def records(self, name: str) -> Iterator[EnvironmentRecord]:
        """Those, failed builds too, that a name may mean."""
        if match := _NAME.fullmatch(name):
            key, prefix = match.groups("")
            for record in self._records.values():
                if record.key == key and record.digest.startswith(prefix):
                    yield record

    def record(self, digest: str) -> EnvironmentRecord | None:
        return self._records.get(digest)

    def directory(self, digest: str) -> Path:
        """The prefix of an environment."""
        return self.root / digest / "files"

    # -- in use ------------------------------------------------------------------------------------

    def hold(self, digest: str, n: int = 1) -> None:
        """Keep an environment for a checkout, with `n` -1 for one less. Call with no await since it
        was found.
        """
        self.held[digest] += n
        with suppress(FileNotFoundError):
            os.utime(self.root / digest)

    def drop(self, digest: str) -> None:
        """Undo one `hold`."""
        self.hold(digest, -1)

    def used_at(self, digest: str) -> float:
        """When it was held or dropped last, or else built."""
        with suppress(FileNotFoundError):
            return (self.root / digest).stat().st_mtime
        return 0.0

    # -- changes -----------------------------------------------------------------------------------

    def new_path(self) -> Path:
        """A path to build an environment at."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        return self.root / f"{_BUILDING}{secrets.token_hex(8)}"

    def add(self, built: Path, digest: str) -> EnvironmentRecord:
        """Publish what was built, in place of a failed build."""
        if record := _read(built):
            self._retire(digest)
            built.rename(self.root / digest)
            self._records[digest] = record
            return record
        raise FileNotFoundError(built / RECORD)

    def remove(self, digest: str) -> None:
        """Remove an environment; EnvironmentInUseError while a checkout holds it."""
        if self.held[digest]:
            record = self._records[digest]
            raise EnvironmentInUseError(
                f"cannot remove environment {record.name}: a checkout or a prepared layer uses it",
                hint="release its checkouts; see `mirrord layers`",
            )
        self._records.pop(digest, None)
        self._retire(digest)

    def _retire(self, digest: str) -> None:
        gone = new_trash(self.root)
        with suppress(FileNotFoundError):
            (self.root / digest).rename(gone)
            self._trash.add(gone)


def not_found(name: str) -> EnvironmentNotFoundError:
    return EnvironmentNotFoundError(
        f"cannot find environment {shown(name)}: none of that name is built",
        hint="see `mirrord environment list`; `mirrord environment build` builds one",
    )


def _read(path: Path) -> EnvironmentRecord | None:
    """The record of a directory; None where it is not whole."""
    try:
        facts = json.loads((path / RECORD).read_bytes())
        is_ready = facts["state"] == "ready"
        record = EnvironmentRecord(facts["key"], facts["digest"], is_ready, facts["at"], facts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_named = path.name.startswith(_BUILDING) or path.name == record.digest
    if not (is_named and _DIGEST.fullmatch(record.digest)):
        return None
    return record if not is_ready or (path / "files").is_dir() else None
