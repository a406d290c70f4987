"""What a start cannot read is set aside and told: nothing that an agent made is removed because of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout_parts import ROOT_PEER, USER, USER_PEER, Service, run_as, running_service
from gitrepos import Upstream

from mirrord.errors import AccessError, DiskFailedError
from mirrord.model import Backend
from mirrord.protocol import Checkout, MakeSnapshot, StartCheckout

pytestmark = pytest.mark.root

BACKENDS = [Backend.POOL, Backend.OVERLAY]


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        yield running


def checkout_on(service: Service, backend: Backend) -> Checkout:
    request = StartCheckout(instance="psf__requests@v2", backend=backend)
    made = service.call(service.checkouts.checkout, request, USER_PEER)
    run_as(USER, "echo mine >mine", Path(made.path), service)
    service.call(service.checkouts.snapshot, made.id, MakeSnapshot(name="first"), USER_PEER)
    return made


def no_file_can_be_opened(path: Path) -> None:
    """A directory in its place: EISDIR stands for the disk's EIO."""
    path.rename(path.with_name("whole"))
    path.mkdir()


INJURIES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "empty": lambda path: path.write_bytes(b""),
    "garbled": lambda path: path.write_bytes(os.urandom(300)),
    "no lease": lambda path: path.write_text("[1]"),
    "of another": lambda path: path.write_text(path.read_text().replace('"id": "', '"id": "x')),
    "unreadable": no_file_can_be_opened,
    "bad mirror": lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"mirror": "?"})),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lease_that_cannot_be_read_keeps_its_checkout(service: Service, backend: Backend) -> None:
    """However it is damaged: tree, mount, layers stay; it is told; repaired, it is as it was; only an administrator gives it up."""
    made = {what: checkout_on(service, backend) for what in INJURIES}
    layers = {path.name for path in (service.state / "templates/.layers").iterdir()}
    whole = {}
    for what, injure in INJURIES.items():
        lease = service.state / "leases" / made[what].id / "lease.json"
        whole[lease] = lease.read_bytes()
        injure(lease)
    service.restart()
    service.call(service.trash.settle)
    problems = service.checkouts.leases.problems()
    assert not service.call(service.checkouts.list, USER_PEER)
    for what, checkout in made.items():
        assert (Path(checkout.path) / "mine").read_text() == "mine\n", what
        assert any(checkout.id in problem for problem in problems), what
        with pytest.raises(DiskFailedError):
            service.call(service.checkouts.get, checkout.id, USER_PEER)
    assert {path.name for path in (service.state / "templates/.layers").iterdir()} >= layers
    service.call(service.templates.collect, ())
    assert (Path(made["empty"].path) / "README").read_text() == "2\n" * 5
    with pytest.raises(AccessError):
        service.call(service.checkouts.release, made["empty"].id, USER_PEER)
    service.call(service.checkouts.release, made.pop("empty").id, ROOT_PEER)
    for checkout in made.values():
        lease = service.state / "leases" / checkout.id / "lease.json"
        if lease.is_dir():
            lease.rmdir()
        lease.write_bytes(whole[lease])
    service.restart()
    assert service.checkouts.leases.problems() == []
    for checkout in made.values():
        assert service.diff(checkout).startswith(b"diff --git a/mine")
        service.call(service.checkouts.release, checkout.id, USER_PEER)
    service.restart()
    assert not [*(service.state / "leases").glob("[!.]*")]


def test_a_tree_that_cannot_be_shown_is_kept_until_it_can(service: Service) -> None:
    """Its mirror is unreadable when an overlay must be mounted again, as after a reboot; the next start mounts it."""
    made = checkout_on(service, Backend.OVERLAY)
    service.call(service.close)
    subprocess.run(["umount", made.path], check=True)
    hidden = service.state / "templates" / "psf__requests"
    packs = service.mirror / "objects/pack"
    for path in (hidden, packs):
        path.rename(path.with_name(f"{path.name}-hidden"))
    service.call(service.open)
    assert [made.id in problem for problem in service.checkouts.leases.problems()] == [True]
    with pytest.raises(DiskFailedError):
        service.call(service.checkouts.diff, made.id, USER_PEER)
    service.call(service.close)
    for path in (hidden, packs):
        subprocess.run(["rm", "-rf", path], check=True)  # what the start made
        path.with_name(f"{path.name}-hidden").rename(path)
    service.call(service.open)
    assert (Path(made.path) / "mine").read_text() == "mine\n"
    service.call(service.checkouts.release, made.id, USER_PEER)
