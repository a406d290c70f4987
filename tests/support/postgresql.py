"""A PostgreSQL server of its own for tests, at a free loopback port, without fsync; it can be stopped and started."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from ports import free_port

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


class Server:
    """`home` belongs to the user postgres, whom every connection may be without a password."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.is_up = True
        self.port = free_port()
        self._databases = 0
        self._run("initdb", "-D", f"{home}/data", "-A", "trust", "--no-sync")

    def start(self) -> None:
        options = (
            f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.home}"
            " -c fsync=off -c timezone=Asia/Tokyo -c max_connections=200"
        )
        self._run(
            "pg_ctl",
            "-D",
            f"{self.home}/data",
            "-w",
            "-l",
            f"{self.home}/log",
            "-o",
            options,
            "start",
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", f"{self.home}/data", "-w", "-m", "immediate", "stop")

    @property
    def pids(self) -> list[int]:
        """The server's processes, the first one first."""
        first = int((self.home / "data/postmaster.pid").read_text().splitlines()[0])
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        return [first, *map(int, children)]

    def pause(self) -> None:
        """It answers nothing, and closes nothing."""
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    def create(self, form: str = "") -> str:
        """A new database, of a form such as an encoding; answers its URL."""
        self._databases += 1
        name = f"catalog{self._databases}"
        self.execute(f"CREATE DATABASE {name} {form}")
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """As the administrator, in the database postgres; answers the rows of the last one."""
        url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in statements:
                done = connection.execute(statement.encode())
            return done.fetchall() if done.description else []

    def record(self, url: str) -> None:
        """Write what is asked in a database of `create` to the log, from new connections on."""
        name = url.rpartition("/")[2]
        self.execute(f"ALTER DATABASE {name} SET log_statement = 'all'")

    def statements(self) -> list[str]:
        """What was asked since `record`, without the ends of transactions."""
        lines = (self.home / "log").read_text(errors="replace").splitlines()
        asked = (
            line.partition("LOG:  ")[2].partition(": ")[2] for line in lines if "LOG:  " in line
        )
        ends = ("BEGIN", "COMMIT", "ROLLBACK", "SELECT 1")
        words = ("SELECT", "INSERT", "UPDATE", "DELETE")
        return [it for it in asked if it.startswith(words) and not it.startswith(ends)]

    def execute_in(self, url: str, statement: str) -> list[tuple[object, ...]]:
        """In a database of `create`; answers the rows."""
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            done = connection.execute(statement.encode())
            return done.fetchall() if done.description else []

    def dump(self, url: str) -> None:
        """Back a database up, as operators do."""
        self._run("pg_dump", "-Fc", "-f", f"{self.home}/dump", *self._place(url))

    def restore(self, url: str) -> None:
        """Have it as it was then, while others use it."""
        how = ("--clean", "--if-exists", "--single-transaction")
        self._run("pg_restore", *how, *self._place(url), f"{self.home}/dump")

    def _place(self, url: str) -> tuple[str, ...]:
        name = url.rpartition("/")[2]
        return ("-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", name)

    def _run(self, program: str, *args: str) -> None:
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "PGTZ": "Asia/Tokyo"}
        subprocess.run(
            [str(PROGRAMS[-1] / program), *args],
            user="postgres",
            group="postgres",
            cwd=self.home,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )


@contextmanager
def running(place: Path | None = None) -> Iterator[Server]:
    """One in an empty directory, which is removed with it. Skips where there is no PostgreSQL, or
    nobody may become its user.
    """
    if not PROGRAMS or os.geteuid() != 0:
        pytest.skip("needs PostgreSQL's initdb and root, to become the user postgres")
    user = pwd.getpwnam("postgres")
    # its socket's path is short
    home = Path(tempfile.mkdtemp(prefix="mirrord-pg-", dir=place or "/tmp"))
    os.chown(home, user.pw_uid, user.pw_gid)
    try:
        server = Server(home)
        server.start()
        try:
            yield server
        finally:
            if (home / "data/postmaster.pid").exists():
                server.stop()
    finally:
        shutil.rmtree(home)
