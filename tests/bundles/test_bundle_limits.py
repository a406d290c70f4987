"""What a bundle may cost: memory, disk, and a client that goes away in the middle."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import zlib
from pathlib import Path

import anyio
import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import until

from mirrord import Client
from mirrord.bundles.bundle_file import header_bytes, unbundle
from mirrord.errors import DiskFullError, InvalidBundleError
from mirrord.git.command import Git
from mirrord.host.processes import memory_limit_bytes
from mirrord.mirrors.repository import Repository
from mirrord.model import MirrorName

pytestmark = pytest.mark.slow

CONFIG = "[checkouts]\nprewarm = false\n"
_COPY = 0xFFFFFF


def _object_head(kind: int, size: int) -> bytes:
    first, size = (kind << 4) | (size & 15), size >> 4
    out = []
    while size:
        out.append(first | 0x80)
        first, size = size & 0x7F, size >> 7
    return bytes([*out, first])


def _varint(size: int) -> bytes:
    out = []
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size])


def _bomb(times: int) -> tuple[str, bytes]:
    """A pack of some kilobytes: 16 MiB of nothing, and a delta that copies them `times` over."""
    base = bytes(_COPY)
    oid = hashlib.sha1(b"blob %d\0" % len(base) + base).digest()
    copies = (b"\xf0" + _COPY.to_bytes(3, "little")) * times
    delta = _varint(_COPY) + _varint(_COPY * times) + copies
    objects = (
        _object_head(3, len(base))
        + zlib.compress(base)
        + _object_head(7, len(delta))
        + oid
        + zlib.compress(delta)
    )
    pack = b"PACK" + struct.pack(">II", 2, 2) + objects
    return oid.hex(), pack + hashlib.sha1(pack).digest()


def test_a_pack_bomb_ends_within_its_memory(tmp_path: Path) -> None:
    """A few kilobytes that unpack to more than git may allocate are refused; a small one of the
    kind is taken.
    """
    repository = Repository(
        Git(home=tmp_path / "home"), MirrorName("a", "b"), tmp_path / "repository"
    )

    async def take(times: int) -> None:
        oid, pack = _bomb(times)
        file = tmp_path / "bomb.bundle"
        file.write_bytes(header_bytes([], {"refs/tags/bomb": oid}) + pack)
        await unbundle(repository, file)

    async def body() -> None:
        await repository.create()
        await take(2)
        with pytest.raises(InvalidBundleError):
            await take(memory_limit_bytes() // _COPY + 8)

    anyio.run(body)


def _mirror(running: Daemon, upstream: Upstream) -> None:
    with Client(running.socket) as client:
        client.wait(client.add_mirror("demo/project", upstream.url))


def test_a_client_that_hangs_up_ends_the_bundle(tmp_path: Path) -> None:
    """git ends, quarantine is empty, and the next download gets the whole file."""
    upstream = Upstream(tmp_path / "upstream")
    upstream.commit({"large": os.urandom(30_000_000)})
    with daemon(CONFIG) as running:
        _mirror(running, upstream)
        with running.connect() as connection:
            connection.sendall(b"GET /v1/mirrors/demo__project/bundle HTTP/1.1\r\nhost: m\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        until(lambda: not any((running.state_dir / "quarantine").iterdir()))
        until(lambda: not _packing(running))
        with Client(running.socket) as client:
            made = client.create_bundle("demo/project", tmp_path / "file")
        assert made.size_bytes > 30_000_000


def _packing(running: Daemon) -> list[str]:
    listing = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(running.pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in listing.stdout.splitlines() if "pack-objects" in line]


@pytest.mark.root
@pytest.mark.parametrize("room_mib", [12, 44], ids=["while it is sent", "while it is indexed"])
def test_a_full_disk_refuses_a_bundle_and_harms_nothing(tmp_path: Path, room_mib: int) -> None:
    """An error that says so, no mirror, nothing left; and with space the same file is taken."""
    upstream = Upstream(tmp_path / "upstream")
    upstream.commit({"large": os.urandom(30_000_000)})
    file = tmp_path / "file.bundle"
    upstream.git("bundle", "create", "--quiet", str(file), "main", "HEAD")
    with daemon(CONFIG, start=False) as running:
        running.state_dir.mkdir()
        tmpfs = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={room_mib}m,mode=711",
            "tmpfs",
            str(running.state_dir),
        ]
        subprocess.run(tmpfs, check=True)
        try:
            running.start()
            with Client(running.socket) as client:
                with pytest.raises(DiskFullError):
                    client.wait(client.import_bundle(file, mirror="demo/project"))
                assert client.list_mirrors() == []
                until(lambda: not any((running.state_dir / "quarantine").iterdir()))
                subprocess.run(
                    ["mount", "-o", "remount,size=200m", str(running.state_dir)], check=True
                )
                client.wait(client.import_bundle(file, mirror="demo/project"))
                assert client.get_mirror("demo/project").ref_count == 1
            running.stop()
        finally:
            subprocess.run(["umount", "--lazy", str(running.state_dir)], check=True)
