"""The disk of each user: what counts, for which user, and what is refused over the bound."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
from checkout_parts import ROOT_PEER, USER, USER_PEER, Service, running_service
from gitrepos import Upstream

from mirrord import errors
from mirrord.checkouts.requests import quotas
from mirrord.host.peers import Peer
from mirrord.model import Backend
from mirrord.protocol import (
    Checkout,
    ForkCheckout,
    MakeSnapshot,
    ResetCheckout,
    SaveLayer,
    StartCheckout,
)

pytestmark = pytest.mark.root

MIB = 1 << 20
OTHER = Peer(uid=34567, gid=USER, pid=1)


@pytest.fixture(scope="module")
def running(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    running.change("access", bytes_per_user=8 * MIB)
    yield running
    for lease in running.checkouts.leases:
        running.call(running.checkouts.release, lease.id, ROOT_PEER)
    for layer in running.call(running.checkouts.list_layers, None, ROOT_PEER):
        running.call(running.checkouts.remove_layer, layer.id, ROOT_PEER)
    running.call(running.checkouts.quotas.weigh)


def start(
    service: Service, peer: Peer = USER_PEER, backend: Backend = Backend.OVERLAY, **more: object
) -> Checkout:
    request = StartCheckout(mirror="psf/requests", commit="v1", backend=backend, **more)  # type: ignore[arg-type]
    return service.call(service.checkouts.checkout, request, peer)


def write(checkout: Checkout, mib: int, name: str = "big") -> None:
    with open(f"{checkout.path}/{name}", "wb") as file:
        file.write(os.urandom(MIB) * mib)
        os.fsync(file.fileno())  # blocks are counted once they are on the disk
        os.fchown(file.fileno(), USER, USER)


def weighed(service: Service) -> dict[int, int]:
    """MiB by user."""
    service.call(service.checkouts.quotas.weigh)
    return {uid: size // MIB for uid, size in service.checkouts.quotas.used.items()}


def events(service: Service) -> list[tuple[str, int]]:
    kept = [each for each in service.events._ring if each.name.startswith("quota.")]
    return [(each.name, each.fields["owner_uid"]) for each in kept]


@pytest.mark.parametrize("backend", [Backend.OVERLAY, Backend.POOL])
def test_what_an_agent_writes_is_weighed(service: Service, backend: Backend) -> None:
    """It counts for the checkout's owner, not its taker, until it is reset."""
    mine, given = start(service, backend=backend), start(service, ROOT_PEER, owner=USER)
    others = start(service, OTHER, backend)
    write(mine, 3)
    write(given, 2)
    write(others, 1)
    assert weighed(service) == {USER: 5, OTHER.uid: 1}
    service.call(service.checkouts.reset, mine.id, ResetCheckout(), USER_PEER)
    service.call(service.trash.settle)
    assert weighed(service) == {USER: 2, OTHER.uid: 1}


def test_over_the_bound_nothing_new_is_made(service: Service) -> None:
    """Existing checkouts work, others and administrators are not affected, and freed space counts at once."""
    checkouts = service.checkouts
    held = start(service)
    write(held, 9)
    start(service)  # not weighed yet
    before = len(events(service))
    assert weighed(service)[USER] == 9
    with pytest.raises(errors.QuotaExceededError, match=r"has 9 MiB .* limit is 8 MiB") as refused:
        start(service)
    assert refused.value.facts["uid"] == USER
    for work, request in (
        (checkouts.fork, ForkCheckout()),
        (checkouts.snapshot, MakeSnapshot()),
        (checkouts.save, SaveLayer(name="l")),
    ):
        with pytest.raises(errors.QuotaExceededError):
            service.call(work, held.id, request, USER_PEER)
    start(service, OTHER)
    start(service, ROOT_PEER, owner=USER)
    assert b"big" in service.diff(held)
    service.call(checkouts.reset, held.id, ResetCheckout(), USER_PEER)
    service.call(service.trash.settle)
    checkouts.quotas._weighed_at = 0.0  # as if the last refusal was a while ago
    start(service)
    assert events(service)[before:] == [("quota.exceeded", USER), ("quota.recovered", USER)]


def test_snapshots_and_layers_count_before_they_are_weighed(service: Service) -> None:
    """The disk of 128 layers is bounded, not their number alone."""
    held = start(service)
    write(held, 3)
    weighed(service)
    service.call(service.checkouts.save, held.id, SaveLayer(name="a"), USER_PEER)
    service.call(service.checkouts.snapshot, held.id, MakeSnapshot(), USER_PEER)
    assert service.checkouts.quotas.used[USER] >= 9 * MIB
    with pytest.raises(errors.QuotaExceededError):
        service.call(service.checkouts.save, held.id, SaveLayer(name="b"), USER_PEER)
    assert weighed(service)[USER] >= 9
    service.call(service.checkouts.release, held.id, USER_PEER)
    service.call(service.trash.settle)
    assert weighed(service)[USER] == 6  # the layer stays, and the object of its file


def test_without_a_bound_nothing_is_refused(service: Service) -> None:
    service.change("access", bytes_per_user=0)
    write(start(service), 9)
    weighed(service)
    start(service)


def test_what_was_not_reached_in_time_weighs_what_it_did(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that takes longer to walk through hides nothing."""
    held = start(service)
    write(held, 9)
    weighed(service)
    monkeypatch.setattr(quotas, "_WEIGHING_TIME", timedelta())
    assert weighed(service)[USER] == 9


@pytest.mark.parametrize("backend", [Backend.OVERLAY, Backend.POOL])
def test_a_checkout_that_comes_near_the_limits_of_a_copy_is_named(
    service: Service, backend: Backend
) -> None:
    """Once as an event, in health while it is so, and before a fork of it is refused."""
    service.change("checkouts", copy_bytes=10 * MIB)
    checkouts, held = service.checkouts, start(service, backend=backend)
    write(held, 3)
    service.call(checkouts.quotas.weigh)
    assert checkouts.quotas.warnings() == []
    write(held, 6, "more")
    for _ in range(2):
        service.call(checkouts.quotas.weigh)
        [warning] = checkouts.quotas.warnings()
        assert held.id in warning and "with 10 MiB" in warning
    named = [each.fields for each in service.events._ring if each.name == "checkout.large"]
    assert [each["owner_uid"] for each in named if each["checkout"] == held.id] == [USER]
    service.change("access", bytes_per_user=0)
    fork = service.call(checkouts.fork, held.id, ForkCheckout(), USER_PEER)
    service.call(checkouts.release, fork.id, USER_PEER)
    write(held, 2, "most")
    with pytest.raises(errors.TooLargeError, match=r"11 MiB; the limit is .* 10 MiB") as refused:
        service.call(checkouts.fork, held.id, ForkCheckout(), USER_PEER)
    assert "checkouts.copy_bytes" in str(refused.value.hint)
    service.call(checkouts.reset, held.id, ResetCheckout(), USER_PEER)
    service.call(service.trash.settle)
    service.call(checkouts.quotas.weigh)
    assert checkouts.quotas.warnings() == []
