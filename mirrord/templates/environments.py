"""Environments on disk: adopted from builds, found by key, kept while in use, removed.

An environment is the directory `templates/.environments/<digest>` with `files` (the prefix, which
checkouts show at a fixed path), `environment.json` (what it is and how it was built) and `log`; the
digest is that of its recipe. A failed build has no `files`. Each appears by one rename, and `files`
never changes. Files of equal content and mode are hard links of one in `.files`.
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

from ..errors import ConflictError, NotFoundError, full_disk_named
from ..host.files import read_plain
from ..host.trash import TRASH_PREFIX, Trash, new_trash
from ..jsontext import loads
from ..model import ENVIRONMENT_KEY, EnvironmentName, shown
from ..presence import is_dir
from ..telemetry import log

# below `templates`, which the mounter shows to each owner as its own
DIRECTORY = ".environments"
RECORD = "environment.json"
_BUILDING = ".building-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(rf"({ENVIRONMENT_KEY.pattern})(?:@([0-9a-f]{{4,64}}))?")


class EnvironmentRecord(NamedTuple):
    """The content of `environment.json`: `facts` are its members, `at` is when it was built."""

    key: str
    digest: str
    is_ready: bool
    at: float
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """KEY@DIGEST, with a shortened digest; requests may use it."""
        return str(EnvironmentName(self.key, self.digest))


class EnvironmentStore:
    """The environments of a state directory; `held` counts their uses by digest.

    Belongs to one event loop.
    """

    def __init__(self, state_dir: Path, trash: Trash) -> None:
        self.root = state_dir / "templates" / DIRECTORY
        self.shared, self.layers = self.root / ".files", self.root / ".layers"
        self._trash = trash
        self._records: dict[str, EnvironmentRecord] = {}
        self.held: Counter[str] = Counter()

    def open(self) -> None:
        """Read what is on disk; remove what is incomplete, and keep what cannot be read."""
        self.sweep_layers(unfinished=True)
        with suppress(FileNotFoundError):
            for path in sorted(self.root.iterdir()):
                if path.name.startswith((_BUILDING, TRASH_PREFIX)):
                    self._trash.remove(path)
                elif path not in (self.shared, self.layers):
                    self._open(path)

    def _open(self, path: Path) -> None:
        try:
            record = _read(path)
        except OSError as error:  # a checkout may show it
            log.warning("environment.unreadable", path=str(path), error=str(error))
            return
        if record:
            self._records[record.digest] = record
        else:
            self._trash.discard(path)

    def find(self, name: str) -> EnvironmentRecord | None:
        """Return the ready environment of a name: KEY, of which the newest, or KEY@DIGEST, with a
        prefix of the digest.
        """
        ready = [record for record in self.iter_records(name) if record.is_ready]
        return max(ready, key=lambda record: record.at, default=None)

    def get(self, name: str) -> EnvironmentRecord:
        """Return the ready environment of a name. Raises NotFoundError."""
        if (record := self.find(name)) is None:
            raise not_found(name)
        return record

    def list(self) -> list[EnvironmentRecord]:
        """Return all environments, failed builds included, by key."""
        return sorted(self._records.values(), key=lambda record: (record.key, record.at))

    def iter_records(self, name: str) -> Iterator[EnvironmentRecord]:
        """Iterate over the environments that a name may mean, failed builds included."""
        if match := _NAME.fullmatch(name):
            key, prefix = match.groups("")
            for record in self._records.values():
                if record.key == key and record.digest.startswith(prefix):
                    yield record

    def record(self, digest: str) -> EnvironmentRecord | None:
        return self._records.get(digest)

    def directory(self, digest: str) -> Path:
        """Return the prefix of an environment."""
        return self.root / digest / "files"

    def lowers(self, digest: str, cover: str | None = None) -> tuple[Path, ...]:
        """Return the layers of an environment, the top first: its prefix, or an image's.

        `cover` is a layer of whiteouts over them (`environments/leaks.py`).
        """
        record = self._records.get(digest)
        stack = record.facts.get("stack", []) if record else []
        covers = (self.root / digest / cover,) if cover else ()
        return (*covers, self.directory(digest), *(self.layers / name for name in stack))

    def find_image(self, digest: str) -> str | None:
        """Return what commands in an image start with, as JSON; None for other environments."""
        record = self._records.get(digest)
        return json.dumps(record.facts["image"]) if record and "image" in record.facts else None

    # -- layers of images --------------------------------------------------------------------------

    def read_layer(self, name: str) -> dict[str, Any] | None:
        """Return what is known of a layer; None if it is not here."""
        with suppress(FileNotFoundError, ValueError):
            content = loads(read_plain(self.layers / f"{name}.json"))
            return dict(content) if is_dir(self.layers / name) else None
        return None

    def add_layer(self, made: Path, name: str, content: dict[str, Any]) -> None:
        """Publish a layer, which appears with the second rename."""
        with full_disk_named("a layer of an image"):
            new = self.layers / f".building-{name}.json"
            new.write_text(json.dumps(content))
            new.rename(self.layers / f"{name}.json")
        made.rename(self.layers / name)

    def sweep_layers(self, *, unfinished: bool = False) -> None:
        """Remove the layers that no image has; those `unfinished` instead, where nothing makes
        them.
        """
        used = {name for record in self._records.values() for name in record.facts.get("stack", [])}
        with suppress(FileNotFoundError):
            for path in sorted(self.layers.iterdir()):
                is_building = path.name.startswith((_BUILDING, TRASH_PREFIX))
                if is_building if unfinished else not is_building and path.stem not in used:
                    gone = new_trash(self.layers)
                    path.rename(gone)
                    self._trash.add(gone) if not unfinished else self._trash.remove(gone)

    # -- in use ------------------------------------------------------------------------------------

    def hold(self, digest: str, n: int = 1) -> None:
        """Count a use of an environment, with `n` -1 one less. Do not await between `find` and
        this.
        """
        self.held[digest] += n
        with suppress(FileNotFoundError):
            # the mtime is what `used_at` reads, also in the next daemon
            os.utime(self.root / digest)

    def drop(self, digest: str) -> None:
        """Undo one `hold`."""
        self.hold(digest, -1)

    def used_at(self, digest: str) -> float:
        """Return when a use of it last began or ended, or else when it was built."""
        with suppress(FileNotFoundError):
            return (self.root / digest).stat().st_mtime
        return 0.0

    # -- changes -----------------------------------------------------------------------------------

    def new_path(self) -> Path:
        """Return a path to build an environment at."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        return self.root / f"{_BUILDING}{secrets.token_hex(8)}"

    def add(self, built: Path, digest: str) -> EnvironmentRecord:
        """Publish what was built, replacing a failed build."""
        if record := _read(built):
            self._discard(digest)
            built.rename(self.root / digest)
            self._records[digest] = record
            return record
        raise FileNotFoundError(built / RECORD)

    def remove(self, digest: str) -> None:
        """Remove an environment. Raises ConflictError."""
        if self.held[digest]:
            record = self._records[digest]
            raise ConflictError(
                f"cannot remove environment {record.name}: a checkout or a prepared layer uses it",
                hint="release its checkouts; see `mirrord layer list`",
            )
        self._records.pop(digest, None)
        self._discard(digest)

    def _discard(self, digest: str) -> None:
        gone = new_trash(self.root)
        with suppress(FileNotFoundError):
            (self.root / digest).rename(gone)
            self._trash.add(gone)


def not_found(name: str) -> NotFoundError:
    return NotFoundError(
        f"cannot find environment {shown(name)}: no environment of that name is built",
        hint="see `mirrord environment list`; `mirrord environment build` builds one",
        kind="environment",
    )


def _read(path: Path) -> EnvironmentRecord | None:
    """Return the record in a directory; None if it is incomplete. Raises OSError."""
    try:
        content = loads(read_plain(path / RECORD))
        is_ready = content["state"] == "ready"
        record = EnvironmentRecord(
            content["key"], content["digest"], is_ready, content["at"], content
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    is_named = path.name.startswith(_BUILDING) or path.name == record.digest
    if not (is_named and _DIGEST.fullmatch(record.digest)):
        return None
    return record if not is_ready or is_dir(path / "files") else None
