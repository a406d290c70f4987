"""Specific to PostgreSQL: the password, and outages of the server."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from catalog.test_catalog import instance, mirror, put
from daemons import daemon
from postgresql import Server, running

import mirrord.catalog
from mirrord import config
from mirrord.catalog import Catalog
from mirrord.catalog.database import Database, read_revision
from mirrord.catalog.schema import HEAD
from mirrord.errors import CatalogUnavailableError, InvalidConfigError
from mirrord.workers.pool import Workers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as found:
        yield found


def test_a_database_without_an_encoding_is_read_as_utf_8(server: Server) -> None:
    """As initdb makes it where LANG is not set, which is so in containers."""
    url = server.create("ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    with closing(Database(url, timedelta(seconds=10))) as database, database.read() as connection:
        assert connection.exec_driver_sql("SELECT 'ä'").scalar_one() == "ä"


# -- the password ----------------------------------------------------------------------------------


@pytest.fixture
def secretive(server: Server) -> Iterator[str]:
    """The URL of a database whose user has the password `s3 cret`; without it."""
    url = server.create()
    rules = server.home / "data/pg_hba.conf"
    before = rules.read_text()
    rules.write_text("host all secretive 127.0.0.1/32 scram-sha-256\n" + before)
    server.execute(
        "DROP ROLE IF EXISTS secretive", "CREATE ROLE secretive LOGIN SUPERUSER PASSWORD 's3 cret'",
        "SELECT pg_reload_conf()",
    )  # fmt: skip
    yield url.replace("//postgres@", "//secretive@")
    rules.write_text(before)
    server.execute("SELECT pg_reload_conf()")


def open_for_a_moment(url: str) -> None:
    with closing(Database(url, timedelta(seconds=10))) as database, database.read() as connection:
        connection.exec_driver_sql("SELECT 1")


def test_a_password_comes_from_the_url_a_file_or_a_credential(
    secretive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CatalogUnavailableError, match="no password supplied"):
        open_for_a_moment(secretive)
    open_for_a_moment(secretive.replace("secretive@", "secretive:s3%20cret@"))
    open_for_a_moment(f"{secretive}?password=s3%20cret")
    file = tmp_path / "pgpass"
    file.write_text("*:*:*:secretive:s3 cret\n")
    file.chmod(0o600)
    open_for_a_moment(f"{secretive}?passfile={file}")
    with monkeypatch.context() as patch:
        patch.setenv("PGPASSFILE", str(file))
        open_for_a_moment(secretive)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "mirrord.catalog").write_text("s3 cret\n")
    open_for_a_moment(secretive)
    (tmp_path / "mirrord.catalog").write_text("wrong\n")
    with pytest.raises(CatalogUnavailableError, match="password authentication failed"):
        open_for_a_moment(secretive)


@pytest.mark.parametrize("form", ["user:s3cret@{}", "user@{}?password=s3cret"])
def test_no_password_is_in_errors_labels_and_settings(form: str) -> None:
    url = f"postgresql+psycopg://{form.format('127.0.0.1:1/none')}"
    database = Database(url)
    assert "s3cret" not in database.label
    with pytest.raises(CatalogUnavailableError) as caught, database.read():
        pass
    assert "s3cret" not in f"{caught.value.problem()}"
    settings = config.Settings.model_validate({"catalog": {"url": url}})
    from mirrord.telemetry import masked

    assert "s3cret" not in masked(settings.model_dump_json())


@pytest.mark.parametrize(
    "url",
    [
        "mysql://s3cret@host/name",
        "postgresql://user:s3/cret@host/name",
        "postgresql://user:s3@cret@host/name",
        "postgresql+psycopg2://s3cret@host/name",
        "/var/lib/s3cret",
        "postgresql://s3cret",
    ],
)
def test_another_url_is_refused_and_not_shown(url: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'[catalog]\nurl = "{url}"\n')
    with pytest.raises(InvalidConfigError, match=r"catalog\.url") as caught:
        config.load(file)
    assert "s3" not in caught.value.message


def test_a_daemon_shows_no_password(secretive: str, tmp_path: Path) -> None:
    """Settings, status, log and support bundles do not contain it."""
    url = secretive.replace("secretive@", "secretive:s3%20cret@")
    with daemon(f'[catalog]\nurl = "{url}"\n') as one:
        paths = ("/v1/status", "/v1/config", "/v1/health", "/v1/activity")
        shown = b"".join(one.get(path)[2] for path in paths)
        bundle = tmp_path / "bundle.tar.gz"
        command = [sys.executable, "-m", "mirrord", "doctor", "--report", str(bundle)]
        places = ["--config", str(one.config), "--socket", str(one.socket)]
        subprocess.run([*command, *places], check=True, capture_output=True, cwd=tmp_path)
        unpack = ["tar", "-xzOf", str(bundle)]
        shown += subprocess.run(unpack, check=True, capture_output=True).stdout
        shown += one.log.encode()
    assert b"postgresql" in shown
    assert b"s3%20cret" not in shown
    assert b"s3 cret" not in shown


# -- loss ------------------------------------------------------------------------------------------


def using(url: str, work: Callable[[Catalog], Any]) -> None:
    async def main() -> None:
        workers = Workers(size=1)
        catalog = await Catalog.open(url, workers)
        try:
            await work(catalog)
        finally:
            await catalog.close()
            await workers.close()

    anyio.run(main)


def test_a_server_that_stops_costs_each_request_seconds_and_is_found_again(
    server: Server, tmp_path: Path
) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        assert catalog.outages() == []
        await anyio.to_thread.run_sync(server.stop)
        try:
            for _ in range(20):
                with pytest.raises(CatalogUnavailableError) as caught:
                    await catalog.list_mirrors()
                assert caught.value.hint
            with pytest.raises(CatalogUnavailableError):
                await put(catalog, tmp_path, [instance("a")])
            assert catalog.outages()
        finally:
            await anyio.to_thread.run_sync(server.start)
        await until_found(catalog)
        assert catalog.outages() == []
        assert (await put(catalog, tmp_path, [instance("a")])).added == ["a"]

    using(server.create(), work)


async def until_found(catalog: Catalog) -> None:
    with anyio.fail_after(30):
        while True:
            try:
                assert await catalog.list_mirrors() == [mirror()]
                return
            except CatalogUnavailableError:
                await anyio.sleep(0.1)


def test_a_server_that_is_silent_is_given_up_and_found_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrord.catalog, "_STATEMENT_TIMEOUT", timedelta(seconds=1))

    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        server.pause()
        try:
            with anyio.fail_after(20), pytest.raises(CatalogUnavailableError):
                await catalog.list_mirrors()
            begun = time.monotonic()
            for _ in range(50):  # at once, by the one that waited
                with pytest.raises(CatalogUnavailableError):
                    await catalog.list_mirrors()
                if time.monotonic() > begun + 1:
                    break
        finally:
            server.go_on()
        await until_found(catalog)

    using(server.create(), work)


def test_connections_that_a_restart_closed_cost_no_request(server: Server) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
        await anyio.to_thread.run_sync(server.execute, query)
        assert await catalog.list_mirrors() == [mirror()]

    using(server.create(), work)


def test_a_write_that_meets_another_is_done_again(server: Server) -> None:
    """Two rows locked in opposite orders: PostgreSQL ends one side of the deadlock."""
    url = server.create()
    met = threading.Barrier(2)
    runs: list[int] = []

    async def work(catalog: Catalog) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(2):
                tasks.start_soon(catalog._run, catalog._database.write, partial(cross, number))

    def cross(number: int, connection: Any) -> None:
        runs.append(number)
        for each in (number, 1 - number):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({each})")
            if len(runs) <= 2 and each == number:
                met.wait(10)

    using(url, work)
    assert sorted(runs[:2]) == [0, 1]
    assert len(runs) == 3


def test_imports_of_one_dataset_at_once_are_one_after_the_other(
    server: Server, tmp_path: Path
) -> None:
    url = server.create()

    async def work(catalog: Catalog) -> None:
        other = await Catalog.open(url)
        async with anyio.create_task_group() as tasks:
            for turn in range(3):
                for number, each in enumerate((catalog, other)):
                    rows = [instance(f"{turn}-{number}-{row}") for row in range(50)]
                    place = tmp_path / f"{turn}-{number}"
                    place.mkdir()
                    tasks.start_soon(put, each, place, rows)
                await anyio.sleep(0.05)
        assert len(await other.list_instance_ids()) == 50
        await other.close()

    using(url, work)


def test_the_doctor_reads_the_revision(server: Server) -> None:
    url = server.create()
    assert read_revision(url) is None
    using(url, Catalog.list_mirrors)
    assert read_revision(url) == HEAD
