"""A disk that failed a write: each overlay checkout that it touched is told, and a reset cures it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkout_parts import USER_PEER, Service, running_service
from gitrepos import Upstream

from mirrord.engine.sync_errors import SyncErrors
from mirrord.model import Backend
from mirrord.protocol import ResetCheckout, StartCheckout

pytestmark = pytest.mark.root


def run(*words: object, check: bool = True) -> int:
    return subprocess.run([str(word) for word in words], check=check, capture_output=True).returncode  # fmt: skip


@pytest.fixture
def thin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small tmpfs with a sparse ext4 in it, at `disk`: when the tmpfs is full, writes of the disk fail."""
    thin = tmp_path_factory.mktemp("thin")
    run("mount", "-t", "tmpfs", "-o", "size=120M", "tmpfs", thin)
    image, disk = thin / "image", thin / "disk"
    disk.mkdir()
    run("truncate", "-s", "400M", image)
    run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", image)
    run("mount", "-o", "loop,errors=continue", image, disk)
    try:
        yield thin
    finally:
        run("umount", "--lazy", disk)
        run("umount", "--lazy", thin)


def fsync_fails(tree: str) -> bool:
    script = "import os,sys; f=open(sys.argv[1],'wb'); f.write(b'x'*65536); f.flush(); os.fsync(f.fileno())"
    return run(sys.executable, "-c", script, f"{tree}/db", check=False) != 0


def fail_a_write(thin: Path, tree: str) -> None:
    with open(thin / "ballast", "wb") as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(65536))
            ballast.flush()
    Path(tree, "big").write_bytes(b"y" * 20_000_000)
    assert run("sync", "-f", thin / "disk", check=False)
    run("mount", "-o", "remount,size=600M", thin)
    (thin / "ballast").unlink()


def test_a_disk_error_is_told_for_each_checkout_that_it_touched(
    thin: Path, rich: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a pool tree, nor for a checkout made later."""
    monkeypatch.setattr(tempfile, "tempdir", str(thin / "disk"))
    with running_service(rich, with_overlay=True) as service:
        sync_errors = SyncErrors(service.checkouts.leases)
        overlays = [start(service, Backend.OVERLAY) for _ in range(2)]
        start(service, Backend.POOL)
        assert sync_errors.problems() == []
        fail_a_write(thin, overlays[0].path)
        later = start(service, Backend.OVERLAY)
        sync_errors._next_at = 0.0
        problems = sync_errors.problems()
        assert [fsync_fails(each.path) for each in (*overlays, later)] == [True, True, False]
        assert len(problems) == 2
        assert all(each.id in "".join(problems) for each in overlays)
        for each in overlays:
            service.call(service.checkouts.reset, each.id, ResetCheckout(), USER_PEER)
            assert not fsync_fails(each.path)
        sync_errors._next_at = 0.0
        assert sync_errors.problems() == []


def start(service: Service, backend: Backend) -> Any:
    request = StartCheckout(instance="psf__requests@v2", backend=backend)
    return service.call(service.checkouts.checkout, request, USER_PEER)
