"""Leases: complete ones, trash, and paths that name a checkout."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from checkout_parts import passable_directory, terms_of

from mirrord.checkouts.lease import Base, Directories, Graded, Lease, LeaseState
from mirrord.checkouts.leases import Leases
from mirrord.errors import CheckoutNotFoundError, DiskFullError
from mirrord.host.trash import TRASH_PREFIX
from mirrord.model import (
    Backend,
    CommitId,
    History,
    MirrorName,
    new_checkout_id,
    new_layer_id,
    utc_now,
)


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    opened = Leases(tmp_path)
    opened.open()
    return opened


def new_lease(leases: Leases) -> Lease:
    checkout = new_checkout_id()
    lease = Lease(
        id=checkout,
        directories=leases.directories(checkout),
        mirror=MirrorName("psf", "requests"),
        history=History.SEALED,
        backend=Backend.POOL,
        base=Base(commit=CommitId("a" * 40), tree="b" * 40, instance="psf__requests-1"),
        terms=terms_of(12345),
    )
    leases.begin(lease)
    leases.put(lease)
    return lease


def moved(lease: Lease) -> Lease:
    """The lease at another commit."""
    return replace(lease, base=replace(lease.base, commit=CommitId("c" * 40)))


def half_made(leases: Leases) -> Directories:
    directories = leases.directories(new_checkout_id())
    directories.private.mkdir()
    directories.public.mkdir()
    return directories


def again(leases: Leases, tmp_path: Path) -> tuple[list[Lease], list[Directories]]:
    return Leases(tmp_path).open()


def test_a_saved_lease_is_read_back_whole(leases: Leases, tmp_path: Path) -> None:
    """After a restart it is equal in every field."""
    lease = new_lease(leases)
    assert again(leases, tmp_path) == ([lease], [])
    graded = Graded(new_layer_id(), "drop,tests=report", "fuzz", ("conftest.py",), 1)
    for changed in (replace(lease, resets=2, reset_at=utc_now()), replace(lease, graded=graded)):
        leases.save(changed)
        assert again(leases, tmp_path) == ([changed], [])


def test_a_lease_of_a_version_that_counted_no_resets_is_read(
    leases: Leases, tmp_path: Path
) -> None:
    """An upgrade takes no work away."""
    lease = new_lease(leases)
    file = lease.private / "lease.json"
    facts = json.loads(file.read_text())
    del facts["resets"], facts["reset_at"]
    file.write_text(json.dumps(facts))
    assert again(leases, tmp_path) == ([lease], [])


def test_a_directory_without_a_lease_is_trash(leases: Leases, tmp_path: Path) -> None:
    """Half-made, released and foreign directories are no leases."""
    standing, released, closed = new_lease(leases), new_lease(leases), new_lease(leases)
    begun, gone = half_made(leases), leases.release(released)
    (closed.private / "lease.json").unlink()
    closed.private.rmdir()
    found, rubbish = again(leases, tmp_path)
    assert found == [standing]
    assert set(rubbish) == {begun, gone, closed.directories}
    assert {gone.public.name, gone.private.name} == {f"{TRASH_PREFIX}{released.id}"}


def test_a_lease_that_cannot_be_read_is_set_aside(leases: Leases, tmp_path: Path) -> None:
    """A torn one, one of another checkout, and one whose public directory is gone."""
    lease, torn, alone, other = (new_lease(leases) for _ in range(4))
    (torn.private / "lease.json").write_text('{"id": ')
    (other.private / "lease.json").write_bytes((lease.private / "lease.json").read_bytes())
    alone.directory.rmdir()
    read = Leases(tmp_path)
    assert read.open() == ([lease], [])
    assert {*read.aside} == {torn.id, other.id, alone.id}
    assert not read.knows_all
    read.drop_aside(torn.id)
    assert not (tmp_path / "leases" / torn.id).exists()


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
    """Some file systems would else bring an empty file back after a power cut, and with it lose
    work that is hours old.
    """
    lease = new_lease(leases)
    leases.save(lease)
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    renewed = lease.until(lease.terms.expires_at + timedelta(hours=1))
    leases.prepare(renewed)
    assert again(leases, tmp_path)[0] == [lease]
    leases.put(renewed)
    assert flushed == [f"{lease.private}/lease.json.new"]
    assert again(leases, tmp_path)[0] == [renewed]


def test_an_ended_lease_is_not_found(leases: Leases) -> None:
    """At once, before its files are gone."""
    lease = new_lease(leases)
    gone = leases.release(lease)
    assert gone.public.exists()
    assert gone.private.exists()
    assert not lease.directory.exists()
    with pytest.raises(CheckoutNotFoundError):
        leases.get(lease.id)


def test_a_lease_file_is_private(leases: Leases) -> None:
    """It is in a directory that only the daemon enters."""
    lease = new_lease(leases)
    assert lease.private.stat().st_mode & 0o777 == 0o700
    assert (lease.private / "lease.json").stat().st_mode & 0o777 == 0o600
    assert lease.state is LeaseState.LIVE


def test_a_reset_is_in_the_name_of_the_file(leases: Leases, tmp_path: Path) -> None:
    """An unchanged lease is the same file under another name. Another is written whole before the
    old one goes.
    """
    lease = new_lease(leases)
    file = lease.private / "lease.json"
    inode = file.stat().st_ino
    leases.save(replace(lease, state=LeaseState.RESETTING))
    assert (lease.private / "resetting.json").stat().st_ino == inode
    leases.save(lease)
    assert file.stat().st_ino == inode
    going = replace(moved(lease), state=LeaseState.RESETTING)
    leases.save(going)
    assert again(leases, tmp_path) == ([going], [])
    assert [path.name for path in lease.private.iterdir()] == ["resetting.json"]


def test_a_reset_that_had_not_begun_leaves_the_lease_as_it_was(
    leases: Leases, tmp_path: Path
) -> None:
    """Killed between the two files, the tree was not touched."""
    lease = new_lease(leases)
    whole = (lease.private / "lease.json").read_bytes()
    leases.save(replace(moved(lease), state=LeaseState.RESETTING))
    (lease.private / "lease.json").write_bytes(whole)
    assert again(leases, tmp_path) == ([lease], [])


def who_may(directory: Path, what: str) -> list[int]:
    """Return which of owner, another user and the user `nobody` succeed with a command."""
    uids = (12345, 23456, 65534)
    return [
        uid
        for uid in uids
        if subprocess.run(
            what,
            shell=True,
            cwd="/",
            user=uid,
            group=12345,
            extra_groups=[],
            env={"D": str(directory)},
            capture_output=True,
        ).returncode
        == 0
    ]


@pytest.mark.root
def test_a_checkouts_directory_is_for_its_owner_alone() -> None:
    """Another uid of the same group can neither enter nor list nor look below it; the owner can
    pass, not list or write.
    """
    with passable_directory() as state:
        leases = Leases(state)
        leases.open()
        lease = new_lease(leases)
        (lease.tree_path / "src").mkdir(parents=True)
        assert who_may(lease.directory, 'cd "$D/tree" && ls') == [12345]
        assert who_may(lease.directory, 'stat "$D/tree/src"') == [12345]
        for refused in (
            'ls "$D"',
            'touch "$D/x"',
            'mv "$D/tree" "$D/t"',
            'chmod 777 "$D"',
            'setfacl -b "$D"',
        ):
            assert who_may(lease.directory, refused) == []


def test_a_lease_that_cannot_be_ended_is_kept(leases: Leases, tmp_path: Path) -> None:
    """The release fails, and it is still listed."""
    lease = new_lease(leases)
    (tmp_path / "leases" / f"{TRASH_PREFIX}{lease.id}" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        leases.release(lease)
    assert leases.get(lease.id) == lease


def test_a_change_that_cannot_be_written_leaves_nothing(leases: Leases) -> None:
    """No half file, and the lease as it was."""
    lease = new_lease(leases)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(DiskFullError, match="too large"):
            leases.save(moved(lease))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in lease.private.iterdir()] == ["lease.json"]
    assert leases.get(lease.id) == lease


def test_a_change_that_cannot_be_put_in_place_leaves_nothing(leases: Leases) -> None:
    """The file is written, and cannot get its name."""
    lease = new_lease(leases)
    (lease.private / LeaseState.RESETTING).mkdir()
    with pytest.raises(IsADirectoryError):
        leases.save(replace(moved(lease), state=LeaseState.RESETTING))
    assert sorted(path.name for path in lease.private.iterdir()) == ["lease.json", "resetting.json"]
    assert leases.get(lease.id) == lease
