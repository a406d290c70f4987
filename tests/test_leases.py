"""Leases: what stands, what is rubbish, and that a path names its checkout."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from mirrord.checkouts.leases import GONE, Lease, Leases, LeaseState
from mirrord.errors import CheckoutNotFoundError
from mirrord.model import Backend, CommitId, History, MirrorName, View, utc_now


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    opened = Leases(tmp_path / "checkouts")
    opened.open()
    return opened


def new_lease(leases: Leases) -> Lease:
    checkout, directory = leases.new_directory()
    now = utc_now()
    lease = Lease(
        id=checkout, directory=directory, mirror=MirrorName("psf", "requests"), commit=CommitId("a" * 40), tree="b" * 40,
        instance="psf__requests-1", history=History.SEALED, view=View.AGENT, backend=Backend.POOL, owner_uid=12345,
        owner_gid=12345, taken_by=12345, created_at=now, expires_at=now + timedelta(hours=1),
    )  # fmt: skip
    leases.save(lease)
    return lease


def again(leases: Leases, tmp_path: Path) -> tuple[list[Lease], list[Path]]:
    return Leases(tmp_path / "checkouts").open()


def test_a_saved_lease_is_read_back_whole(leases: Leases, tmp_path: Path) -> None:
    """After a restart it is equal in every field."""
    lease = new_lease(leases)
    assert again(leases, tmp_path) == ([lease], [])


def test_what_has_no_whole_lease_file_is_rubbish(leases: Leases, tmp_path: Path) -> None:
    """Half-made, torn, released and foreign directories are all told apart from leases."""
    standing, torn, released = new_lease(leases), new_lease(leases), new_lease(leases)
    _, half_made = leases.new_directory()
    (torn.directory / "lease.json").write_text('{"id": ')
    gone = leases.drop(released)
    found, rubbish = again(leases, tmp_path)
    assert found == [standing]
    assert set(rubbish) == {torn.directory, half_made, gone}
    assert gone.name == f"{GONE}{released.id}"


def test_a_copied_lease_file_makes_no_lease(leases: Leases, tmp_path: Path) -> None:
    """The directory's name and the id inside must agree."""
    lease = new_lease(leases)
    _, other = leases.new_directory()
    (other / "lease.json").write_bytes((lease.directory / "lease.json").read_bytes())
    assert again(leases, tmp_path) == ([lease], [other])


def test_a_path_into_a_checkout_names_it(leases: Leases) -> None:
    """The tree, a file in it, and the id all find the lease; other paths do not."""
    lease = new_lease(leases)
    for text in (lease.id, str(lease.tree_path), f"{lease.tree_path}/src/x.py"):
        assert leases.get(text) is lease
    for text in ("/etc/passwd", "../../etc", "nonsense", "", "\0"):
        with pytest.raises(CheckoutNotFoundError):
            leases.get(text)


def test_a_renewal_is_on_the_disk_before_it_replaces_the_lease(
    leases: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems would else bring an empty file back after a power cut, and with it lose work that is hours old."""
    lease = new_lease(leases)
    leases.save(lease)
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    renewed = replace(lease, expires_at=lease.expires_at + timedelta(hours=1))
    leases.prepare(renewed)
    assert again(leases, tmp_path)[0] == [lease]
    leases.put(renewed)
    assert flushed == [f"{lease.directory}/lease.json.new"]
    assert again(leases, tmp_path)[0] == [renewed]


def test_an_ended_lease_is_not_found(leases: Leases) -> None:
    """At once, before its files are gone."""
    lease = new_lease(leases)
    assert leases.drop(lease).exists()
    with pytest.raises(CheckoutNotFoundError):
        leases.get(lease.id)


def test_a_lease_file_is_private(leases: Leases) -> None:
    """Others may pass through the directory, not look into it or at the lease."""
    lease = new_lease(leases)
    assert lease.directory.stat().st_mode & 0o777 == 0o711
    assert (lease.directory / "lease.json").stat().st_mode & 0o777 == 0o600
    assert lease.state is LeaseState.LIVE


def test_a_reset_is_in_the_name_of_the_file(leases: Leases, tmp_path: Path) -> None:
    """To where it is: the same file under another name. To elsewhere: written whole before the old one goes."""
    lease = new_lease(leases)
    file = lease.directory / "lease.json"
    inode = file.stat().st_ino
    leases.save(replace(lease, state=LeaseState.RESETTING))
    assert (lease.directory / "resetting.json").stat().st_ino == inode
    leases.save(lease)
    assert file.stat().st_ino == inode
    going = replace(lease, commit=CommitId("c" * 40), state=LeaseState.RESETTING)
    leases.save(going)
    assert again(leases, tmp_path) == ([going], [])
    assert [path.name for path in lease.directory.iterdir()] == ["resetting.json"]


def test_a_reset_that_had_not_begun_leaves_the_lease_as_it_was(leases: Leases, tmp_path: Path) -> None:
    """Killed between the two files, the tree was not touched."""
    lease = new_lease(leases)
    whole = (lease.directory / "lease.json").read_bytes()
    leases.save(replace(lease, commit=CommitId("c" * 40), state=LeaseState.RESETTING))
    (lease.directory / "lease.json").write_bytes(whole)
    assert again(leases, tmp_path) == ([lease], [])


@pytest.mark.parametrize("commit", ["a" * 40, "c" * 40])
def test_a_lease_moves_into_what_was_made_for_it(leases: Leases, tmp_path: Path, commit: str) -> None:
    """In one step, whether it says the same or not; what it had before is no lease."""
    lease = new_lease(leases)
    (lease.directory / "old").touch()
    fresh = lease.directory.with_name(".next-x")
    fresh.mkdir(mode=0o700)
    (fresh / "new").touch()
    moved = replace(lease, commit=CommitId(commit))
    leases.move_in(moved, str(fresh))
    assert leases.find(lease.id) == moved
    assert sorted(os.listdir(lease.directory)) == ["lease.json", "new"]
    assert lease.directory.stat().st_mode & 0o777 == 0o711
    assert again(leases, tmp_path) == ([moved], [fresh])


def test_a_lease_that_cannot_be_ended_stands(leases: Leases, tmp_path: Path) -> None:
    """Whoever released it is told, and it is still listed."""
    lease = new_lease(leases)
    (tmp_path / "checkouts" / f"{GONE}{lease.id}" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        leases.drop(lease)
    assert leases.get(lease.id) == lease


def test_a_change_that_cannot_be_written_leaves_nothing(leases: Leases) -> None:
    """No half file, and the lease as it was."""
    lease = new_lease(leases)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            leases.save(replace(lease, commit=CommitId("c" * 40)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in lease.directory.iterdir()] == ["lease.json"]
    assert leases.get(lease.id) == lease
