"""What the doctor tries on file systems, and what it knows by name."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.disks import run, unmount

from mirrord.config import AccessSettings, CheckoutSettings, Settings
from mirrord.doctor import disk
from mirrord.host.mount_tables import find_mount, mounts_below
from mirrord.host.mounts import may_mount

Mounted = Callable[..., Settings]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """Makes a file system in an image with these words of mkfs, and mounts it."""

    def mount(*make: str, options: str = "loop") -> Settings:
        image = tmp_path / "image"
        run("truncate", "-s", "40M", image)
        run(*make, image)
        (tmp_path / "state").mkdir()
        try:
            run("mount", "-o", options, image, tmp_path / "state")
        except subprocess.CalledProcessError:
            pytest.skip("this machine cannot mount it")
        return Settings(state_dir=tmp_path / "state")

    yield mount
    unmount(tmp_path)


_EXT4 = ("mkfs.ext4", "-q", "-F")


@pytest.mark.root
@pytest.mark.parametrize(("words", "verdict"), [((), "ok"), (("-O", "^has_journal"), "warn")])
def test_an_ext4_without_a_journal_is_told_with_what_to_do(
    mounted: Mounted, words: tuple[str, ...], verdict: str
) -> None:
    found, fact, remedy = disk.journal(mounted(*_EXT4, *words))
    assert found == verdict
    if verdict == "warn":
        assert "1.2 ms instead of 0.03" in fact
        assert "tune2fs -O has_journal /dev/loop" in remedy


@pytest.mark.root
def test_mount_options_that_cost_are_told(mounted: Mounted) -> None:
    settings = mounted(*_EXT4, options="loop,sync,noexec")
    found, fact, remedy = disk.options(settings)
    assert (found, "noexec, sync" in fact, "programs in a tree" in remedy) == ("warn", True, True)
    run("mount", "-o", "remount,ro", settings.state_dir)
    assert disk.options(settings)[0] == "fail"


@pytest.mark.root
def test_what_does_not_work_is_found_by_trying(mounted: Mounted) -> None:
    """An ext4 with inodes of 128 bytes is an ext4 by name, and knows whole seconds only."""
    settings = mounted(*_EXT4, "-I", "128")
    assert disk.file_system(settings)[0] == "ok"
    found, fact, _ = disk.abilities(settings)
    assert (found, fact) == ("warn", "not working: times in nanoseconds")
    assert [path.name for path in settings.state_dir.iterdir()] == ["lost+found"]


def test_a_local_file_system_can_all(tmp_path: Path) -> None:
    found, fact, _ = disk.abilities(Settings(state_dir=tmp_path / "absent"))
    assert (found, fact) == ("ok", "all 12 trials succeeded")
    assert list(tmp_path.iterdir()) == []


def test_one_that_does_not_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre and some NFS."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("mirrord.doctor.disk.fcntl.flock", refuse)
    found, fact, remedy = disk.abilities(Settings(state_dir=tmp_path))
    assert (found, fact) == ("fail", "not working: locks")
    assert "ext4" in remedy


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nfs4", "depend on its server"),
        ("lustre", "Unix sockets hang"),
        ("fuse.sshfs", "depend on its server"),
        ("9p", "depend on its server"),
        ("overlay", "removed with its container"),
        ("tmpfs", "empties it"),
    ],
)
def test_what_no_trial_shows_is_known_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    found = find_mount(tmp_path)._replace(kind=kind)
    monkeypatch.setattr("mirrord.doctor.disk.find_mount", lambda _: found)
    verdict, fact, _ = disk.file_system(Settings(state_dir=tmp_path))
    assert (verdict, words in fact) == ("warn", True)


@pytest.mark.parametrize(
    ("options", "bound", "verdict", "words"),
    [
        ({"rw", "usrquota"}, 0, "ok", "the kernel enforces"),
        ({"rw", "prjquota"}, 1 << 30, "ok", "checks usage every minute"),
        ({"rw", "noquota"}, 0, "warn", "no limit"),
    ],
)
def test_what_bounds_the_disk_of_a_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: set[str], bound: int, verdict: str, words: str,
) -> None:  # fmt: skip
    found = find_mount(tmp_path)._replace(options=frozenset(options))
    monkeypatch.setattr("mirrord.doctor.disk.find_mount", lambda _: found)
    access = AccessSettings(bytes_per_user=bound)
    answer = disk.quotas(Settings(state_dir=tmp_path, access=access))
    assert (answer[0], words in answer[1]) == (verdict, True)


def test_little_space_is_held_against_the_bounds(tmp_path: Path) -> None:
    def look(reserve: int, cache: int) -> str:
        bounds = CheckoutSettings(disk_reserve=reserve, template_bytes=cache)
        return disk.space(Settings(state_dir=tmp_path, checkouts=bounds))[0]

    assert look(0, 1 << 20) == "ok"
    assert look(0, 1 << 60) == "warn"


def test_a_checkouts_cost_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    """How much it is depends on what else runs."""
    verdict, fact, _ = disk.speed(Settings(state_dir=tmp_path))
    assert verdict in {"ok", "warn"}
    assert "making a directory" in fact
    assert "normal: up to 0.1" in fact
    assert ("an overlay" in fact) == may_mount()
    assert list(tmp_path.iterdir()) == []
    assert mounts_below(str(tmp_path)) == []
