"""PgBouncer in front of a test's PostgreSQL, at a free loopback port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import postgresql
import psycopg
import pytest

PROGRAM = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin")
_CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={server} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
admin_users = postgres
pool_mode = {mode}
default_pool_size = {size}
logfile = {home}/log
pidfile = {home}/pid
"""


class Pooler:
    """Of some mode, with at most `size` connections to the server for each database."""

    def __init__(self, server: postgresql.Server, mode: str, size: int, home: Path) -> None:
        self.home = home
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        text = _CONFIGURATION.format(
            server=server.port, port=self.port, mode=mode, size=size, home=home
        )
        (home / "pgbouncer.ini").write_text(text)

    def start(self) -> None:
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [PROGRAM, "-q", f"{self.home}/pgbouncer.ini"], user="postgres", group="postgres"
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                self.show("VERSION")
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.home / "log").read_text()
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """At once, whatever its clients do."""
        self._process.terminate()
        self._process.wait()

    def show(self, what: str) -> list[dict[str, object]]:
        """What its administrator is shown, such as CLIENTS or SERVERS, by column."""
        place = f"postgresql://postgres@127.0.0.1:{self.port}/pgbouncer"
        with psycopg.connect(place, autocommit=True) as connection:
            done = connection.execute(f"SHOW {what}".encode(), prepare=False)
            names = [column.name for column in done.description or ()]
            return [dict(zip(names, row, strict=True)) for row in done]

    def url(self, direct: str) -> str:
        """The URL of a database of the server, through this."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{direct.rpartition('/')[2]}"


@contextmanager
def pooling(server: postgresql.Server, mode: str, size: int) -> Iterator[Pooler]:
    if PROGRAM is None:
        pytest.skip("needs Debian's pgbouncer")
    home = Path(tempfile.mkdtemp(prefix="mirrord-pooler-", dir="/tmp"))
    shutil.chown(home, "postgres", "postgres")
    try:
        made = Pooler(server, mode, size, home)
        made.start()
        try:
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(home)
