"""Bringing the catalog's schema to the newest revision.

A fresh database is made from the tables directly and stamped; an older one is migrated by alembic, which is loaded only then and
in a worker process, because the daemon must stay small. Each way is one transaction: a crash leaves the old schema or the new.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import structlog
from sqlalchemy import insert, inspect, select

from ..errors import CatalogTooNewError, CorruptCatalogError
from .database import Database
from .schema import HEAD, metadata, version

MIGRATIONS = Path(__file__).parent / "migrations"
_CHECKED_BYTES = 32 * 1024**2
"""Up to this size a SQLite file is checked whole at the start: 20 ms at most."""

log = structlog.get_logger()


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
