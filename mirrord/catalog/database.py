"""Connections to the catalog's database, and its failures as our errors.

Owns the engine: SQLite in WAL mode (a reader never waits, a crash loses nothing that was committed), or PostgreSQL by URL. Where
the disk has no room for the files that WAL needs beside the database, it does without, until it has. Never holds a query. A read
is one snapshot, a write is one transaction that takes SQLite's write lock when it begins, because a deferred one cannot wait for
the lock once it has read (SQLITE_BUSY_SNAPSHOT).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import structlog
from sqlalchemy import Connection, Engine, Table, create_engine, event, insert, inspect, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from ..errors import (
    CatalogTooNewError,
    CorruptCatalogError,
    DiskFailedError,
    DiskFullError,
    InvalidUrlError,
    ResourceError,
)
from ..host.files import is_read_only
from .schema import HEAD, metadata, version

MIGRATIONS = Path(__file__).parent / "migrations"

BUSY_TIMEOUT_S = 60
"""How long a writer waits for another: the longest write is a dataset of some 100,000 rows."""

_CHECKED_BYTES = 32 * 1024**2
"""Up to this size a SQLite file is checked whole at the start: 20 ms at most."""
_SHRINK_PATIENCE_MS = 1000
_INDEX_PAGE_BYTES, _INDEX_BYTES = 4096, 32768
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_NO_ROOM = {
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_FULL,
}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_PG_DISK_FULL = "53100"
_DAMAGED_HINT = (
    "stop the daemon, move the file away and start again: mirrors and pins are read back from the mirrors, datasets need a new"
    " import; `sqlite3 FILE .recover` may save more"
)

log = structlog.get_logger()


class Way(Enum):
    """How a SQLite file is opened; each way needs less of the disk than the one before."""

    SHARED = auto()
    ALONE = auto()
    """The index of the WAL is in memory: no `-shm` file, one connection at a time, and no other process."""
    FROZEN = auto()
    """Not even a WAL. Only where none was left, because what is in one would not be seen; nothing can be written."""


_WAL = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "foreign_keys = ON",
    "journal_size_limit = 67108864",
)
_UNWRITABLE = {Way.SHARED: {sqlite3.SQLITE_FULL}, Way.ALONE: _NO_ROOM, Way.FROZEN: _NO_ROOM}
_PRAGMAS = {
    Way.SHARED: _WAL,
    Way.ALONE: ("locking_mode = EXCLUSIVE", *_WAL),
    Way.FROZEN: ("foreign_keys = ON",),
}


class Database:
    """A pool of connections. Sync and safe to use from several threads."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self._engine, self.way = (
            _open_sqlite(url, Way) if self.is_sqlite else (_make_engine(url), Way.SHARED)
        )

    @classmethod
    def at(cls, place: str | Path) -> Database:
        """A URL, or the path of a SQLite file, which is made private to its owner. Raises InvalidUrlError."""
        url = parse_place(place)
        if url.get_backend_name() == "sqlite":
            _create_private(url)
        return cls(url)

    @property
    def label(self) -> str:
        """What messages call it: never the password."""
        return (
            str(self.url.database)
            if self.is_sqlite
            else self.url.render_as_string(hide_password=True)
        )

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._translated(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        with self._translated(), self._engine.connect() as connection:
            connection = connection.execution_options(mirrord_begin="BEGIN IMMEDIATE")
            with connection.begin():
                yield connection

    def shrink(self) -> None:
        """Give back the disk that a large write took: SQLite's WAL keeps its size until it is truncated. Not while somebody
        reads what was before; the next large write does it then."""
        if self.is_sqlite and self.way is not Way.FROZEN:
            with suppress(DBAPIError), self._engine.connect() as connection:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {_SHRINK_PATIENCE_MS}")
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def widen(self) -> None:
        """Open it anew, in the first way that there is room for. Nobody may be using it."""
        self._engine.dispose()
        self._engine, self.way = _open_sqlite(self.url, Way)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            self._raise(error)

    def _raise(self, error: DBAPIError) -> NoReturn:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        fact = str(error.orig).strip().partition("\n")[0]
        if code == sqlite3.SQLITE_READONLY and is_read_only(Path(self.label).parent):
            self.way = Way.FROZEN  # it was opened for reading only, and has to be opened anew
            raise DiskFailedError(
                f"cannot write the catalog {self.label}: its file system is read-only",
                hint="see the kernel's log; what is there is served meanwhile",
            ) from error
        if code in _UNWRITABLE[self.way] or getattr(error.orig, "sqlstate", None) == _PG_DISK_FULL:
            raise DiskFullError(
                f"cannot write the catalog {self.label}: {fact}",
                hint="make room; nothing was changed",
            ) from error
        if code in _DAMAGED:
            raise CorruptCatalogError(
                f"cannot read the catalog {self.label}: {fact}", hint=_DAMAGED_HINT
            ) from error
        if code in _LOCKED:
            hint = "another program holds a lock on it; try again, or see who with `fuser`"
            raise ResourceError(
                f"cannot write the catalog {self.label}: {fact}", hint=hint
            ) from error
        if code or isinstance(error.orig, OSError) or not _is_mistake(error):
            hint = "check that the database is up, its disk has room, and this user may write it"
            raise ResourceError(
                f"cannot use the catalog {self.label}: {fact}", hint=hint
            ) from error
        raise error


def _is_mistake(error: DBAPIError) -> bool:
    """Whether the statement is wrong, which is a bug of ours, rather than the database."""
    return type(error).__name__ in {
        "ProgrammingError",
        "IntegrityError",
        "DataError",
        "NotSupportedError",
    }


def parse_place(place: str | Path) -> URL:
    """A database URL, or the path of a SQLite file."""
    if isinstance(place, Path) or "://" not in place:
        return URL.create("sqlite", database=str(place))
    try:
        url = make_url(place)
        url.get_dialect()
    except (ArgumentError, NoSuchModuleError) as error:
        raise InvalidUrlError(
            "cannot use the catalog's URL: it names no database that is known here",
            hint="write postgresql+psycopg://user@host/name, or the path of a SQLite file",
        ) from error
    return url


def _create_private(url: URL) -> None:
    """SQLite gives its -wal and -shm files the mode of the database file."""
    path = Path(str(url.database))
    if path.exists():
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        hint = "the state directory must exist and be writable by the daemon's user"
        raise ResourceError(
            f"cannot open the catalog {path}: {error.strerror}", hint=hint
        ) from error


def _make_engine(url: URL) -> Engine:
    return create_engine(url, pool_size=4, pool_pre_ping=True, isolation_level="REPEATABLE READ")


def _open_sqlite(url: URL, ways: Iterable[Way]) -> tuple[Engine, Way]:
    """The first way that works; the last one's engine where none does, for whoever uses it to see why."""
    for way in ways:
        engine = _make_sqlite_engine(url, way)
        if way is Way.SHARED and not _has_room_for_index(Path(str(url.database)).parent):
            log.warning(
                "catalog.degraded",
                catalog=url.database,
                way=way.name.lower(),
                reason="no space left on device",
            )
            continue
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("SELECT 1 FROM sqlite_master")
        except DBAPIError as error:
            code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
            if code not in _NO_ROOM or way is Way.FROZEN:
                return engine, way
            engine.dispose()
            log.warning(
                "catalog.degraded",
                catalog=url.database,
                way=way.name.lower(),
                reason=str(error.orig),
            )
        else:
            return engine, way
        if way is Way.ALONE and Path(f"{url.database}-wal").exists():
            break
    return engine, way


def _has_room_for_index(directory: Path) -> bool:
    """SQLite 3.40 writes one byte of each 4 KB of the `-shm` file before it maps them. Smaller blocks leave holes there: a write
    to one on a full disk is a SIGBUS, which ends the process."""
    disk = os.statvfs(directory)
    return disk.f_bsize >= _INDEX_PAGE_BYTES or disk.f_bavail * disk.f_frsize >= 2 * _INDEX_BYTES


def _make_sqlite_engine(url: URL, way: Way) -> Engine:
    arguments: dict[str, Any] = {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}
    if way is Way.FROZEN:
        url = url.set(
            database=f"file:{quote(str(url.database))}",
            query={"immutable": "1", "mode": "ro", "uri": "true"},
        )
    size = 4 if way is Way.SHARED else 1
    engine = create_engine(
        url, pool_size=size, max_overflow=10 if size > 1 else 0, connect_args=arguments
    )
    event.listen(engine, "connect", partial(_prepare_sqlite, _PRAGMAS[way]))
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(
    pragmas: Sequence[str], connection: sqlite3.Connection, _record: object
) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself: it does so too late, and not for DDL
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("mirrord_begin", "BEGIN"))


def upsert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, or replace what stands under the same primary key."""
    if not rows:
        return
    dialect = import_module(
        f"sqlalchemy.dialects.{connection.dialect.name}"
    )  # the other one costs 3 MB and 40 ms of a start
    statement = dialect.insert(table)
    keys = [column.name for column in table.primary_key]
    values = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(
        statement.on_conflict_do_update(index_elements=keys, set_=values), list(rows)
    )


# -- the schema -----------------------------------------------------------------------------------


def prepare(database: Database) -> bool:
    """Make a fresh catalog, or look at the one there is; answers whether it must be migrated."""
    _check_file(database)
    with (
        database.read() as connection
    ):  # a full disk lets nobody write, and there is mostly nothing to write
        if version.name in inspect(connection).get_table_names():
            return _is_old(database, connection.execute(select(version.c.version_num)).scalar())
    with database.write() as connection:
        there = set(inspect(connection).get_table_names())
        if foreign := there & set(metadata.tables):
            raise CorruptCatalogError(
                f"cannot use the catalog {database.label}: it has tables ({', '.join(sorted(foreign))}) but no schema version",
                hint="it is not a catalog of mirrord, or a broken copy of one; name another database",
            )
        metadata.create_all(connection)
        version.create(connection)
        connection.execute(insert(version).values(version_num=HEAD))
    log.info("catalog.created", catalog=database.label, revision=HEAD)
    return False


def _is_old(database: Database, revision: str | None) -> bool:
    if revision == HEAD:
        return False
    known = {path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py")}
    if revision not in known:
        raise CatalogTooNewError(
            f"cannot use the catalog {database.label}: its schema {revision} is not known to this version, which knows {HEAD}",
            hint="a newer mirrord wrote it: install that one, or restore the catalog from before the upgrade",
        )
    return True


def _check_file(database: Database) -> None:
    """Find a damaged page now rather than in the middle of a request."""
    if not database.is_sqlite or Path(str(database.url.database)).stat().st_size > _CHECKED_BYTES:
        return
    with database.read() as connection:
        verdict = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar())
    if verdict != "ok":
        raise CorruptCatalogError(
            f"cannot use the catalog {database.label}: {verdict.partition(chr(10))[0]}",
            hint="stop the daemon, move the file away and start again; `sqlite3 FILE .recover` may save its datasets",
        )


def migrate(place: str) -> None:
    """Run all migrations that are missing. Call it in a worker: it loads alembic."""
    config = import_module("alembic.config").Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    database = Database.at(place)
    try:
        with database.write() as connection:
            config.attributes["connection"] = connection
            import_module("alembic.command").upgrade(config, "head")
    finally:
        database.close()
