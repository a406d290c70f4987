"""Connect to PostgreSQL with short timeouts. Loaded only if the catalog is in PostgreSQL.

The password comes from the URL, from its `passfile`, from PGPASSFILE, or from systemd's credential
`mirrord.catalog`, which is read for each connection, so it can be changed.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.engine import URL

from ..jsontext import dumps
from .schema import instances

CREDENTIAL = "mirrord.catalog"
# A server that does not answer is a missing resource: the daemon serves warm checkouts without
# the catalog, and asks again.
_CONNECT_S = 5
# as many connections as the catalog has threads
_POOL = 4

# in schema.py it would load SQLAlchemy's PostgreSQL dialect for SQLite too: 40 ms at start
_unresolved = next(index for index in instances.indexes if index.name == "unresolved_instances")
_unresolved.dialect_kwargs["postgresql_where"] = text("base_commit = ''")


def open_engine(url: URL, statement_timeout: timedelta) -> Engine:
    """Make a pool. `statement_timeout` bounds each wait, also for a stopped or unreachable server.

    Works through transaction poolers such as PgBouncer: no prepared statements, no session state.
    """
    timeout_s = statement_timeout.total_seconds()

    class Connection(psycopg.Connection[Any]):
        # the server enforces its own statement_timeout only while it runs and is reachable
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return super().wait(gen, interval, timeout or timeout_s)
            except psycopg.OperationalError as error:
                if self.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                    self.pgconn.finish()  # a late answer must not be read as that of another query
                    fact = f"no answer within {timeout_s:.0f} s"
                    raise psycopg.OperationalError(fact) from error
                raise

    # pre_ping: a connection that a restart of the server closed must cost no request.
    # REPEATABLE READ: a read is one snapshot; writes ask for READ COMMITTED.
    engine = create_engine(
        url, pool_size=_POOL, max_overflow=0, pool_timeout=_CONNECT_S, pool_pre_ping=True,
        isolation_level="REPEATABLE READ", json_serializer=dumps,
    )  # fmt: skip

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, _args: Any, given: dict[str, Any]) -> Connection:
        # psycopg hands out bytes for text of a SQL_ASCII database, which initdb without LANG makes
        usual = {"connect_timeout": _CONNECT_S, "application_name": "mirrord", "client_encoding":
                 "utf8", "tcp_user_timeout": int(timeout_s * 1000)}  # fmt: skip
        options: dict[str, Any] = usual | given
        if "password" not in options and "passfile" not in options and (password := _credential()):
            options["password"] = password
        return Connection.connect(prepare_threshold=None, **options)

    return engine


def _credential() -> str | None:
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        return None
    try:
        return (Path(directory) / CREDENTIAL).read_text(encoding="utf-8").rstrip("\r\n")
    except FileNotFoundError:
        return None
