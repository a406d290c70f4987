"""Connect to the catalog's database, translate its errors, migrate its schema.

SQLite in WAL mode (a reader never waits, a crash loses nothing committed), or PostgreSQL by URL. A
read is one snapshot, a write one transaction. On PostgreSQL other daemons write at the same time:
each statement sees what is committed, and writes that must not interleave take a `lock` first.
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from enum import Enum, auto
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event, inspect, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from .. import errors
from ..host.room import write_fault
from ..jsontext import dumps
from ..places import how_to_get
from ..presence import exists, matching
from ..telemetry import log, masked
from .schema import HEAD, metadata, version

MIGRATIONS = Path(__file__).parent / "migrations"


# WAL needs two files beside the database: `-wal` with new pages and `-shm` with their index. On a
# full disk SQLite cannot create them and opens nothing, not even for reading, and a daemon without
# its catalog cannot start. So each mode needs less disk than the one before, and each write tries
# SHARED again first.
class Mode(Enum):
    """How a SQLite file is opened."""

    SHARED = auto()
    # WAL with its index in memory: no `-shm`, one connection at a time, no other process
    ALONE = auto()
    # Read-only without WAL. Only if there is no `-wal` file, because it would not be read.
    FROZEN = auto()


# FULL: with NORMAL a power cut loses the last commits of a WAL. SQLite enforces no foreign key
# unless told to by each connection, and without a limit a WAL keeps the size of its largest import.
_WAL = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "foreign_keys = ON",
    "journal_size_limit = 67108864",
)
_PRAGMAS = {
    Mode.SHARED: _WAL,
    # before WAL is used: a first access in the normal mode would create `-shm`
    Mode.ALONE: ("locking_mode = EXCLUSIVE", *_WAL),
    Mode.FROZEN: ("foreign_keys = ON",),
}
_BUSY_TIMEOUT_S = 60  # the longest write is a dataset of some 100,000 rows
# of each connection, instead of the driver's 128. A list of ids is another statement for each of
# its lengths, of 3 to 113 KiB: a daemon held 452 of them, 40 KiB each, after some imports
_CACHED_STATEMENTS = 16
_NO_ROOM = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
_NO_ROOM |= {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL}
_FAILED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR}
_MISTAKES = {"ProgrammingError", "IntegrityError", "DataError", "NotSupportedError"}
_CONFLICTS = {"40001", "40P01"}  # of PostgreSQL: serialization failure, deadlock
_BULK_TIMEOUT = timedelta(minutes=10)  # of one statement of an import or a migration
_DAMAGED_HINT = (
    "stop the daemon, move the file away and start again: mirrors and pins are read back from the"
    " mirrors, datasets have to be imported again; `sqlite3 FILE .recover` may save more"
)


class Database:
    """A pool of connections to a URL, or to a SQLite file with mode 0600.

    Blocking and thread-safe. `statement_timeout` is for PostgreSQL. With `is_second` the daemon has
    it open, too, and it is opened in mode SHARED or not at all. Raises InvalidUrlError,
    ResourceError, DiskFullError.
    """

    def __init__(
        self,
        place: str | Path,
        statement_timeout: timedelta = _BULK_TIMEOUT,
        *,
        is_second: bool = False,
    ) -> None:
        self.url = _parse_place(place)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.mode = Mode.SHARED
        if self.is_sqlite:
            path = Path(str(self.url.database))
            if not exists(path):  # SQLite gives its -wal and -shm files the mode of this one
                try:
                    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
                except OSError as error:
                    raise errors.ResourceError(
                        f"cannot open the catalog {path}: {error.strerror}",
                        hint="the state directory must exist and be writable by the daemon's user",
                    ) from error
            # in another mode the two would wait for each other's locks, a minute for each statement
            modes = (Mode.SHARED,) if is_second else tuple(Mode)
            self._engine, self.mode = _open_sqlite(self.url, modes)
        else:
            self._engine = _load_postgresql().open_engine(self.url, statement_timeout)

    @property
    def label(self) -> str:
        """The database in messages: without user, password and parameters."""
        if self.is_sqlite:
            return str(self.url.database)
        url = self.url
        return str(URL.create(url.drivername, None, None, url.host, url.port, url.database))

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._translated(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        options: dict[str, Any] = {"isolation_level": "READ COMMITTED"}
        if self.is_sqlite:
            # a deferred transaction that has read cannot wait for the write lock
            # (SQLITE_BUSY_SNAPSHOT)
            options = {"mirrord_begin": "BEGIN IMMEDIATE"}
        with self._translated(), self._engine.connect() as connection:
            connection = connection.execution_options(**options)
            with connection.begin():
                yield connection

    def shrink(self) -> None:
        """Truncate SQLite's WAL, which otherwise keeps its size. A reader can prevent it."""
        if self.is_sqlite and self.mode is not Mode.FROZEN:
            with suppress(DBAPIError), self._engine.connect() as connection:
                # it waits for readers, and nobody needs it: not for `_BUSY_TIMEOUT_S`
                connection.exec_driver_sql("PRAGMA busy_timeout = 1000")
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def reopen(self) -> None:
        """Open it in the first mode that has room. Must not be in use."""
        self._engine.dispose()
        self._engine, self.mode = _open_sqlite(self.url, tuple(Mode))

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise failures as MirrordErrors; an invalid statement, which is a bug, unchanged."""
        try:
            yield
        except PoolTimeoutError as error:
            raise self._unavailable("all connections are waiting for the server") from error
        except DBAPIError as error:
            code, kind = _sqlite_code(error), type(error).__name__
            fact = masked(str(error.orig).strip().partition("\n")[0])
            cannot_write = f"cannot write the catalog {self.label}"
            state = getattr(error.orig, "sqlstate", None)  # PostgreSQL's
            if state in _CONFLICTS:
                hint = "try again: another daemon of the fleet changed the same rows"
                raise errors.CatalogConflictError(f"{cannot_write}: {fact}", hint=hint) from error
            # disk_full
            if state == "53100":
                hint = "free space where PostgreSQL runs; nothing was changed, and it is retried"
                message = f"{cannot_write}: {fact}"
                raise errors.CatalogFullError(message, hint=hint, retry_after_s=10) from error
            if code in _FAILED and (fault := write_fault(Path(self.label).parent)):
                if code == sqlite3.SQLITE_READONLY:
                    self.mode = Mode.FROZEN  # opened so by SQLite; the next write reopens it
                hint = "check dmesg; the daemon still serves from its caches"
                message = f"{cannot_write}: its file system {fault}"
                raise errors.DiskFailedError(message, hint=hint) from error
            if code in ({sqlite3.SQLITE_FULL} if self.mode is Mode.SHARED else _NO_ROOM):
                hint = "free some space; nothing was changed"
                raise errors.DiskFullError(f"{cannot_write}: {fact}", hint=hint) from error
            if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
                message = f"cannot read the catalog {self.label}: {fact}"
                raise errors.CorruptCatalogError(message, hint=_DAMAGED_HINT) from error
            if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                hint = "another program holds a lock on it; try again, or find it with `fuser`"
                raise errors.ResourceError(f"{cannot_write}: {fact}", hint=hint) from error
            if not self.is_sqlite and kind not in _MISTAKES:
                raise self._unavailable(fact) from error
            if code or isinstance(error.orig, OSError) or kind not in _MISTAKES:
                hint = "check that its disk has room, and that this user may write it"
                message = f"cannot use the catalog {self.label}: {fact}"
                raise errors.ResourceError(message, hint=hint) from error
            raise

    def _unavailable(self, fact: str) -> errors.CatalogUnavailableError:
        return errors.CatalogUnavailableError(
            f"cannot use the catalog {self.label}: {fact}",
            hint="check that PostgreSQL is up, has room, and lets this user in; the daemon serves"
            " what it knows and retries every 2 s",
            retry_after_s=2,
        )


def lock(connection: Connection, name: str) -> None:
    """Exclude other transactions of the fleet that lock this name, until this one ends.

    Works through a transaction pooler. SQLite has only one writer and needs no lock.
    """
    if connection.dialect.name == "postgresql":
        query = sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
        connection.execute(query, {"name": f"mirrord/{name}"})


def insert_of(connection: Connection, table: sa.Table) -> Any:
    """Return the dialect's INSERT, which has ON CONFLICT."""
    # the dialect that is not in use costs 3 MB and 40 ms at start
    return import_module(f"sqlalchemy.dialects.{connection.dialect.name}").insert(table)


def upsert(connection: Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, or replace those with the same primary key."""
    if not rows:
        return
    statement = insert_of(connection, table)
    keys = [column.name for column in table.primary_key]
    values = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    update = statement.on_conflict_do_update(index_elements=keys, set_=values)
    connection.execute(update, list(rows))


# -- opening --------------------------------------------------------------------------------------


def _parse_place(place: str | Path) -> URL:
    if isinstance(place, Path) or "://" not in place:
        return URL.create("sqlite", database=str(place))
    try:
        url = make_url(place)
        # SQLAlchemy takes this name for psycopg2
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        url.get_dialect()
    except (ArgumentError, NoSuchModuleError) as error:
        raise errors.InvalidUrlError(
            "cannot use the catalog's URL: it is of no supported database",
            hint="write postgresql+psycopg://user@host/name, or the path of a SQLite file",
        ) from error
    return url


def _load_postgresql() -> ModuleType:
    """Import the module late: psycopg takes 12 MB."""
    try:
        from . import postgresql  # noqa: PLC0415
    except ImportError as error:
        raise errors.ResourceError(
            f"cannot use PostgreSQL: {error}", hint=how_to_get("fleet")
        ) from error
    return postgresql


def no_room(label: str) -> errors.DiskFullError:
    """Return the error where only a mode other than SHARED has room."""
    return errors.DiskFullError(
        f"cannot write the catalog {label}: the disk has no room beside it",
        hint="free some space; nothing was changed",
    )


def _open_sqlite(url: URL, modes: Sequence[Mode]) -> tuple[Engine, Mode]:
    """Open it in the first mode that works; if none does, the first query raises the error.

    Raises DiskFullError if SHARED is the only mode and the disk has no room for it.
    """
    # SQLite 3.40 writes one byte of each 4 KB of `-shm` before it maps the file. With smaller
    # blocks the file has holes, and a write to one on a full disk kills the process with SIGBUS.
    disk = os.statvfs(Path(str(url.database)).parent)
    # `-shm` grows by 32 KiB
    has_room = disk.f_bsize >= 4096 or disk.f_bavail * disk.f_frsize >= 2 * 32768
    if not has_room and len(modes) == 1:
        raise no_room(str(url.database))
    for mode in modes:
        engine = _make_sqlite_engine(url, mode)
        if mode is Mode.SHARED and not has_room:
            reason = "no space left on device"
        else:
            try:
                with engine.connect() as connection:
                    connection.exec_driver_sql("SELECT 1 FROM sqlite_master")
                return engine, mode
            except DBAPIError as error:
                if _sqlite_code(error) not in _NO_ROOM or mode is modes[-1]:
                    return engine, mode
                reason = str(error.orig)
                engine.dispose()
        log.warning("catalog.degraded", catalog=url.database, mode=mode.name.lower(), reason=reason)
        if mode is Mode.ALONE and exists(f"{url.database}-wal"):
            break
    return engine, mode


def _make_sqlite_engine(url: URL, mode: Mode) -> Engine:
    if mode is Mode.FROZEN:
        # else SQLite wants a `-shm` even to read a database that was left in WAL mode
        query = {"immutable": "1", "mode": "ro", "uri": "true"}
        url = url.set(database=f"file:{quote(str(url.database))}", query=query)
    engine = sa.create_engine(
        url,
        pool_size=4 if mode is Mode.SHARED else 1,
        max_overflow=10 if mode is Mode.SHARED else 0,
        # the pool hands a connection from thread to thread, never to two at a time
        connect_args={
            "timeout": _BUSY_TIMEOUT_S,
            "check_same_thread": False,
            "cached_statements": _CACHED_STATEMENTS,
        },
        json_serializer=dumps,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        # the driver's implicit transactions begin too late, and not at all for DDL
        connection.isolation_level = None
        for pragma in _PRAGMAS[mode]:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("mirrord_begin", "BEGIN"))

    return engine


def _sqlite_code(error: DBAPIError) -> int:
    """Return the primary result code, without the upper bits of an extended one."""
    return int(getattr(error.orig, "sqlite_errorcode", 0)) & 0xFF


# -- the schema -----------------------------------------------------------------------------------


def prepare(database: Database) -> bool:
    """Create a new catalog, or check the existing one. Return whether it must be migrated.

    Raises CorruptCatalogError, ConflictError.
    """
    size = Path(str(database.url.database)).stat().st_size if database.is_sqlite else None
    if size is not None and size <= 32 * 1024**2:  # takes up to 20 ms
        with database.read() as connection:
            verdict = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar())
        if verdict != "ok":
            raise errors.CorruptCatalogError(
                f"cannot use the catalog {database.label}: {verdict.partition(chr(10))[0]}",
                hint=_DAMAGED_HINT,
            )
    with database.read() as connection:  # a start with a current schema works on a full disk
        if revision := _read_revision(connection):
            return _is_old(database, revision)
    with database.write() as connection:
        lock(connection, "schema")
        if revision := _read_revision(connection):  # just created by another daemon of the fleet
            return _is_old(database, revision)
        if foreign := set(inspect(connection).get_table_names()) & set(metadata.tables):
            raise errors.CorruptCatalogError(
                f"cannot use the catalog {database.label}: it has tables"
                f" ({', '.join(sorted(foreign))}) but no schema version",
                hint="it is not mirrord's catalog, or a broken copy of one; name another database",
            )
        metadata.create_all(connection, checkfirst=False)
        version.create(connection)
        connection.execute(sa.insert(version).values(version_num=HEAD))
    log.info("catalog.created", catalog=database.label, revision=HEAD)
    return False


def _is_old(database: Database, revision: str) -> bool:
    """Return whether the schema must be migrated. Raises ConflictError."""
    if revision == HEAD:
        return False
    scripts = matching(MIGRATIONS / "versions", "[0-9]*.py")
    if revision not in {path.name.partition("_")[0] for path in scripts}:
        raise errors.ConflictError(
            f"cannot use the catalog {database.label}: this mirrord does not know its schema"
            f" {revision}, only {HEAD} and older",
            hint="a newer mirrord wrote it: install that one, or " + _downgrade_hint(database),
        )
    return True


def _read_revision(connection: Connection) -> str | None:
    if version.name not in inspect(connection).get_table_names():
        return None
    return str(connection.execute(select(version.c.version_num)).scalar())


def read_revision(place: str) -> str | None:
    """Return the revision of a catalog's schema, None for an empty database. Raises as Database."""
    with (
        closing(Database(place, timedelta(seconds=5))) as database,
        database.read() as connection,
    ):
        return _read_revision(connection)


def migrate(place: str, to: str = HEAD) -> None:
    """Back up a SQLite file, then run all missing migrations in one transaction.

    Loads alembic: call it in a worker, so that the daemon stays small. Raises ResourceError.
    """
    config = import_module("alembic.config").Config()
    # alembic's configuration is an INI file that interpolates %
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with closing(Database(place, is_second=True)) as database:
        backup = _back_up(database) if database.is_sqlite else None
        with database.write() as connection:
            lock(connection, "schema")
            config.attributes["connection"] = connection
            import_module("alembic.command").upgrade(config, to)
    log.info("catalog.migrated", catalog=database.label, revision=to, backup=backup and str(backup))


def _back_up(database: Database) -> Path | None:
    """Copy a catalog beside itself, named by its revision. The last two copies are kept."""
    with database.read() as connection:
        if (revision := _read_revision(connection)) is None:
            return None
    path = Path(database.label)
    backup = path.with_name(f"{path.stem}-{revision}{path.suffix}")
    staged = backup.with_suffix(".new")
    try:
        staged.unlink(missing_ok=True)
        # SQLite would make it readable by all, and it has the answers of data sets
        staged.touch(mode=0o600)
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(staged)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file without `-wal` and `-shm`
        staged.rename(backup)
        for old in _backups(path)[:-2]:
            old.unlink()
    except (OSError, sqlite3.Error) as error:
        with suppress(OSError):
            staged.unlink()
        raise errors.ResourceError(
            f"cannot back up the catalog {path} before its migration: {error}",
            hint="free space beside it; nothing was changed",
        ) from error
    return backup


def _backups(path: Path) -> list[Path]:
    """Return the copies that migrations made, by revision."""
    return sorted(matching(path.parent, f"{path.stem}-[0-9][0-9][0-9][0-9]{path.suffix}"))


def _downgrade_hint(database: Database) -> str:
    path = Path(database.label)
    usable = [backup for backup in _backups(path) if backup.stem[-4:] <= HEAD]
    if not database.is_sqlite or not usable:
        return "restore a copy of the catalog from before the upgrade"
    return (
        f"go back to the catalog from before the upgrade: remove {path}* and move {usable[-1]} to"
        f" {path}; what was recorded since then has to be imported again"
    )
