"""A catalog on a file system that copies on write: no mapped file, because a full disk would end the daemon by SIGBUS."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from faults.disks import run, unmount

from mirrord.catalog import database
from mirrord.catalog.database import Database, prepare
from mirrord.host.mount_tables import copies_on_write

_WORK = """
import sys
from contextlib import closing
from pathlib import Path
from mirrord.catalog.database import Database, prepare
from mirrord.errors import DiskFullError
place = Path(sys.argv[1])
with closing(Database(place)) as catalog:
    prepare(catalog)
    with (place.parent / "ballast").open("wb", 0) as ballast:
        for size in (1 << 20, 4096, 512):
            try:
                while ballast.write(bytes(size)):
                    pass
            except OSError:
                continue
    for turn in range(3):
        with catalog.read() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM mirrors").scalar()
        try:
            with catalog.write() as connection:
                connection.exec_driver_sql(f"CREATE TABLE t{turn} AS SELECT randomblob(99999) AS b")
        except DiskFullError:
            print("full")
    with closing(Database(place, is_second=True)) as second, second.read() as connection:
        print(connection.exec_driver_sql("SELECT count(*) FROM mirrors").scalar())
"""


def test_it_has_a_rollback_journal_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was used elsewhere before keeps its rows."""
    place = tmp_path / "catalog.sqlite3"
    with closing(Database(place)) as before:
        prepare(before)
        with before.write() as connection:
            connection.exec_driver_sql("CREATE TABLE kept AS SELECT 7 AS n")
    assert not copies_on_write(Path("/dev/shm"))
    monkeypatch.setattr(database, "copies_on_write", lambda _: True)
    with closing(Database(place)) as first, closing(Database(place, is_second=True)) as second:
        with first.write() as connection:
            connection.exec_driver_sql("INSERT INTO kept VALUES (8)")
        with second.read() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "truncate"
            assert connection.exec_driver_sql("SELECT sum(n) FROM kept").scalar() == 15
    assert not [*tmp_path.glob("*-wal"), *tmp_path.glob("*-shm")]


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    if not shutil.which("mkfs.btrfs"):
        pytest.skip("this machine has no btrfs-progs")
    image, place = tmp_path / "image", tmp_path / "disk"
    run("truncate", "-s", "120M", image)
    run("mkfs.btrfs", "-q", "-f", image)
    place.mkdir()
    if subprocess.run(["mount", "-o", "loop", image, place], check=False).returncode:
        pytest.skip("this machine has no loop devices, or no btrfs")
    try:
        yield place
    finally:
        unmount(place)


@pytest.mark.root
def test_a_full_btrfs_kills_nobody(btrfs: Path) -> None:
    """A process of its own, because it would kill this one."""
    assert copies_on_write(btrfs)
    command = [sys.executable, "-c", _WORK, str(btrfs / "catalog.sqlite3")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-4:]) == (0, ["full"] * 3 + ["0"]), done.stderr
