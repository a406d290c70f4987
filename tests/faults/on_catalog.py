"""The migration of the catalog as an operation: the next release starts on one that this one left.

The daemon waits, stopped, before its first step, so that whoever strikes is there from the beginning: all of a start is struck, not
the migration alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from next_release import NEXT, next_release

from mirrord.catalog.schema import HEAD

from .lab import Lab, Refused
from .operation import AFTER, BEFORE, Operation

_STOPPED = ("sh", "-c", 'kill -STOP $$; exec "$@"', "sh")
_FILES = ("catalog.sqlite3", "catalog.sqlite3-wal", "catalog.sqlite3-shm")
_START_S = 30.0
_BUG = 1
_NOTED = {("mirrors", "error"), ("mirrors", "history"), ("instances", f"note_{NEXT}")}
"""What a start notes of a git that failed, and what only the newer schema has."""
_REPLACED = {"judgements"}
"""What each audit writes anew, also that of the judge."""

Rows = dict[str, list[tuple[object, ...]]]


class Migration(Operation):
    name = "migration of the catalog"
    may_end_daemon = True

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        lab.daemon.stop()
        lab.daemon.upgrade(next_release())
        with _copied(lab.state) as catalog:
            self._rows = _read(catalog)[1]
        self._left = ""
        lab.daemon.start(wait=False, prefix=_STOPPED)
        _wait_until_stopped(lab.daemon.pid)

    def run(self) -> None:
        daemon = self.lab.daemon
        os.kill(daemon.pid, signal.SIGCONT)
        try:
            daemon.wait_until_healthy(_START_S)
        except AssertionError as error:
            status = daemon.process.poll() if daemon.process else None
            if status is None or status <= _BUG:
                raise
            raise Refused({"code": f"exit-status-{status}", "detail": str(error)[-300:]}) from error

    def look(self) -> None:
        """The whole old schema or the whole new one, and every row."""
        self._left = {HEAD: BEFORE, NEXT: AFTER}[self._revision()]

    def outcome(self) -> str:
        """A start that goes well has migrated it."""
        revision = self._revision()
        assert revision == NEXT, f"started on a catalog of revision {revision}"
        return self._left or AFTER

    def _revision(self) -> str:
        with _copied(self.lab.state) as catalog:
            revision, rows = _read(catalog)
        lost = {table for table, before in self._rows.items() if not {*before} <= {*rows[table]}}
        assert not lost, f"rows were lost: {lost}"
        return revision

    def settle(self) -> None:
        self._left = ""
        assert self.outcome() == AFTER


def _tables(connection: sqlite3.Connection) -> list[str]:
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    ours = (name for (name,) in found if not name.startswith(("sqlite_", "alembic_")))
    return sorted({*ours} - _REPLACED)


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]


def _read(catalog: Path) -> tuple[str, Rows]:
    with closing(sqlite3.connect(catalog)) as connection:
        [[verdict]] = connection.execute("PRAGMA integrity_check").fetchall()
        assert verdict == "ok", verdict
        [[revision]] = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        return revision, {table: _rows_of(connection, table) for table in _tables(connection)}


def _rows_of(connection: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    names = [name for name in _columns(connection, table) if (table, name) not in _NOTED]
    return connection.execute(f"SELECT {', '.join(map(json.dumps, names))} FROM {table}").fetchall()


@contextmanager
def _copied(state: Path) -> Iterator[Path]:
    """To look at it changes nothing. Copied again where a checkpoint came between the files."""
    place = state.parent / "looked-at"
    try:
        before = None
        while before != (before := _stamps(state)):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for name in before:
                shutil.copyfile(state / name, place / name)
        yield place / _FILES[0]
    finally:
        shutil.rmtree(place)


def _stamps(state: Path) -> dict[str, tuple[int, int]]:
    stats = {name: (state / name).stat() for name in _FILES if (state / name).exists()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + _START_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "the daemon does not wait"
        time.sleep(0.002)
