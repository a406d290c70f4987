"""The service: requests, rights, limits, deadlines, concurrency, restarts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from checkout_parts import NAME, ROOT_PEER, USER, USER_PEER, Service, as_user, running_service
from gitrepos import Upstream

from mirrord.checkouts.lease import resetting
from mirrord.errors import (
    AccessError,
    CheckoutBusyError,
    CheckoutNotFoundError,
    CommitNotFoundError,
    InstanceNotFoundError,
    InvalidRequestError,
    MirrordError,
    MirrorNotFoundError,
    TooManyCheckoutsError,
)
from mirrord.host.peers import Peer
from mirrord.model import Backend, CheckoutId, History, View, utc_now
from mirrord.protocol import Checkout, RenewCheckout, ResetAnswer, ResetCheckout, StartCheckout

pytestmark = pytest.mark.root

OTHER_PEER = Peer(uid=USER + 1, gid=USER + 1, pid=1)


@pytest.fixture(scope="module")
def running(rich: Upstream) -> Iterator[Service]:
    with running_service(rich) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    running.now_shift = timedelta()
    running.change(max=1024)
    running.change("access", admins=(), commits="any")
    running.access.refresh()
    for checkout in running.call(running.checkouts.list, ROOT_PEER):
        running.call(running.checkouts.release, checkout.id, ROOT_PEER)


def start(service: Service, peer: Peer = USER_PEER, **request: Any) -> Checkout:
    wanted = StartCheckout(**(request or {"instance": "psf__requests@v2"}))
    return service.call(service.checkouts.checkout, wanted, peer)


def reset(service: Service, checkout: Checkout, peer: Peer = USER_PEER, **onto: str) -> ResetAnswer:
    return service.call(service.checkouts.reset, checkout.id, ResetCheckout(**onto), peer)


@pytest.mark.parametrize(
    "request_",
    [
        {"instance": "psf__requests@v2"},
        {"instance": "PSF/Requests@v3~1"},
        {"mirror": "psf/requests", "commit": "v2"},
        {"mirror": "psf__requests", "commit": "main~1"},
    ],
)
def test_every_name_of_a_commit_answers_with_the_full_one(
    service: Service, rich: Upstream, request_: dict[str, Any]
) -> None:
    """Branches, tags and ancestors; the answer has the mirror's own spelling."""
    checkout = start(service, **request_)
    assert checkout.commit == rich.git("rev-parse", "v2")
    assert checkout.tree == rich.git("rev-parse", "v2^{tree}")
    assert checkout.mirror == str(NAME)
    assert (checkout.history, checkout.owner_uid) == (History.SEALED, USER)
    assert as_user(Path(checkout.path), "rev-parse", "HEAD") == checkout.commit


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"instance": "no-such"}, InstanceNotFoundError),
        ({"instance": "psf__requests@"}, InstanceNotFoundError),
        ({"instance": "no__mirror@main"}, MirrorNotFoundError),
        ({"instance": "../..@main"}, MirrorNotFoundError),
        ({"instance": "psf__requests@nowhere"}, CommitNotFoundError),
        ({"instance": "psf__requests@" + "0" * 39 + "1"}, CommitNotFoundError),
        ({"mirror": "psf__requests"}, InvalidRequestError),
        ({"instance": "x", "mirror": "psf__requests", "commit": "v2"}, InvalidRequestError),
        ({"instance": "psf__requests@v2", "history": History.LINKED}, AccessError),
        ({"instance": "psf__requests@v2", "view": View.GRADER}, AccessError),
    ],
)
def test_a_bad_request_makes_nothing(
    service: Service, request_: dict[str, Any], error: type[MirrordError]
) -> None:
    """Each has its class, and no directory is left."""
    with pytest.raises(error):
        start(service, **request_)
    assert service.call(service.checkouts.list, ROOT_PEER) == []


def test_only_its_owner_and_administrators_see_a_checkout(service: Service) -> None:
    """Others get the same answer as for one that does not exist, whatever they ask."""
    checkout = start(service)
    calls: list[tuple[Any, ...]] = [
        (service.checkouts.get,), (service.checkouts.release,), (service.checkouts.diff,),
    ]  # fmt: skip
    for (method,) in calls:
        with pytest.raises(CheckoutNotFoundError):
            service.call(method, checkout.id, OTHER_PEER)
    with pytest.raises(CheckoutNotFoundError):
        reset(service, checkout, OTHER_PEER)
    assert service.call(service.checkouts.list, OTHER_PEER) == []
    assert service.call(service.checkouts.get, checkout.path, ROOT_PEER).id == checkout.id


def test_the_limit_of_checkouts_holds(service: Service) -> None:
    """One more than `max` is refused, and possible again after a release."""
    service.change(max=1)
    checkout = start(service)
    with pytest.raises(TooManyCheckoutsError):
        start(service)
    service.call(service.checkouts.release, checkout.id, USER_PEER)
    assert start(service).id != checkout.id


def test_the_limit_of_checkouts_holds_for_those_that_come_at_once(service: Service) -> None:
    """A checkout that is being made has its place already."""
    service.change(max=2)
    refused: list[TooManyCheckoutsError] = []

    async def one() -> None:
        try:
            await service.checkouts.checkout(StartCheckout(instance="psf__requests@v2"), USER_PEER)
        except TooManyCheckoutsError as error:
            refused.append(error)

    async def all_of_them() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(one)

    service.call(all_of_them)
    assert (len(service.checkouts.leases), len(refused)) == (2, 4)


def test_a_lease_that_is_renewed_while_others_expire_is_kept(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking the first away waits for the disk; a client that renews the second in that time keeps
    it.
    """
    leases = [start(service, instance="psf__requests@v1", ttl=60) for _ in range(2)]
    keep_up = service.trash.keep_up

    async def renew_the_other() -> None:
        for lease in await service.checkouts.list(USER_PEER):
            await service.checkouts.renew(lease.id, RenewCheckout(ttl=60), USER_PEER)
        await keep_up()

    monkeypatch.setattr(service.trash, "keep_up", renew_the_other)
    service.now_shift = timedelta(seconds=70)
    assert service.call(service.checkouts.expire) == 1
    assert {lease.id for lease in service.call(service.checkouts.list, USER_PEER)} < {
        lease.id for lease in leases
    }
    assert len(service.checkouts.leases) == 1


def test_an_expired_lease_is_released_and_a_renewed_one_is_not(service: Service) -> None:
    """Renewing counts from now."""
    short, renewed = (
        start(service, instance="psf__requests@v1", ttl=60),
        start(service, instance="psf__requests@v1", ttl=60),
    )
    service.now_shift = timedelta(seconds=50)
    service.call(service.checkouts.renew, renewed.id, RenewCheckout(ttl=60), USER_PEER)
    service.now_shift = timedelta(seconds=70)
    assert service.call(service.checkouts.expire) == 1
    assert [checkout.id for checkout in service.call(service.checkouts.list, USER_PEER)] == [
        renewed.id
    ]
    assert not Path(short.path).exists()


def test_a_step_of_the_wall_clock_ends_no_lease_and_delays_no_end(service: Service) -> None:
    """Each keeps the time it had left, on disk too; one that a request works on gets it afterwards."""
    expiry, leases = service.checkouts.leasing.expiry, service.checkouts.leases
    made = [start(service, instance="psf__requests@v1", ttl=60) for _ in range(2)]
    held, busy = (CheckoutId(checkout.id) for checkout in made)
    count = 0

    async def step(to: timedelta) -> None:
        nonlocal count
        async with service.checkouts.lifecycle.locked(busy):
            by, service.now_shift = to - service.now_shift, to
            expiry.follow(by)
            assert await service.checkouts.expire() == 0
            await service.checkouts.renew(held, RenewCheckout(ttl=60), USER_PEER)
        count += await service.checkouts.expire()

    for hours in (3, 8766, -5, 0):
        service.call(partial(step, timedelta(hours=hours)))
        now = utc_now() + service.now_shift
        for checkout in (held, busy):
            file = leases.directories(checkout).private / "lease.json"
            on_disk = datetime.fromisoformat(json.loads(file.read_text())["terms"]["expires_at"])
            assert timedelta(seconds=20) < on_disk - now <= timedelta(seconds=60)
    assert count == 0
    service.now_shift += timedelta(seconds=61)
    assert service.call(service.checkouts.expire) == 2


def test_a_lease_from_before_the_clock_was_set_keeps_at_most_what_it_had(service: Service) -> None:
    """A machine without a clock of its own boots in 1970, and NTP corrects that later."""
    made = start(service, instance="psf__requests@v1", ttl=60)
    lease = service.checkouts.leases.get(made.id)
    step = timedelta(days=20_000)
    moved = lease.shifted(step, lease.terms.created_at + timedelta(days=1))
    assert moved.terms.expires_at - lease.terms.created_at == timedelta(days=1, seconds=60)
    assert moved.terms.created_at <= lease.terms.created_at + timedelta(days=1)


def test_many_clients_at_once_lose_nothing(service: Service) -> None:
    """64 checkouts and resets at the same time: all different, all clean."""

    async def one(made: list[Checkout]) -> None:
        checkout = await service.checkouts.checkout(
            StartCheckout(instance="psf__requests@v2"), USER_PEER
        )
        made.append(
            await service.checkouts.reset(checkout.id, ResetCheckout(commit="v1"), USER_PEER)
        )

    async def all_of_them() -> list[Checkout]:
        made: list[Checkout] = []
        async with anyio.create_task_group() as group:
            for _ in range(64):
                group.start_soon(one, made)
        return made

    made = service.call(all_of_them)
    assert len({checkout.id for checkout in made}) == 64
    assert as_user(Path(made[0].path), "status", "--porcelain", "--ignored") == ""


def test_work_on_one_checkout_runs_one_after_the_other(service: Service) -> None:
    """Resets, diffs and a release at once: each ends well, or finds the checkout gone."""
    checkout = start(service)

    async def attempt(ended: list[str], method: Any, *args: Any) -> None:
        try:
            await method(checkout.id, *args)
            ended.append("done")
        except CheckoutNotFoundError:
            ended.append("gone")

    async def all_of_them() -> list[str]:
        ended: list[str] = []
        async with anyio.create_task_group() as group:
            for commit in ("v1", "v3", "v2"):
                group.start_soon(
                    attempt, ended, service.checkouts.reset, ResetCheckout(commit=commit), USER_PEER
                )
                group.start_soon(attempt, ended, service.checkouts.diff, USER_PEER)
            group.start_soon(attempt, ended, service.checkouts.release, USER_PEER)
        return ended

    ended = service.call(all_of_them)
    assert len(ended) == 7
    assert not Path(checkout.path).exists()


def test_a_failed_reset_leaves_the_checkout_where_it_was(service: Service) -> None:
    """A commit that does not exist changes nothing."""
    checkout = start(service)
    (Path(checkout.path) / "mine").write_text("work")
    with pytest.raises(CommitNotFoundError):
        reset(service, checkout, commit="nowhere")
    assert service.call(service.checkouts.get, checkout.id, USER_PEER).commit == checkout.commit
    assert (Path(checkout.path) / "mine").exists()


def test_a_reset_of_a_tree_with_a_mount_in_it_is_refused_untouched(service: Service) -> None:
    """A foreign mount is not emptied, and the lease is unchanged."""
    checkout = start(service, instance="psf__requests@v2", backend=Backend.POOL)
    tree = Path(checkout.path)
    (tree / "mine").mkdir()
    (tree / "work").write_text("work")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tree / "mine"], check=True)
    with pytest.raises(CheckoutBusyError, match="mounted"):
        reset(service, checkout, commit="v1")
    subprocess.run(["umount", tree / "mine"], check=True)
    assert (tree / "work").read_text() == "work"
    assert b"+work" in service.diff(checkout)
    assert reset(service, checkout, commit="v1").commit != checkout.commit
    assert as_user(tree, "status", "--porcelain", "--ignored") == ""


def test_a_tree_that_a_reset_left_half_way_is_not_used(service: Service) -> None:
    """The pool cannot undo one: the checkout must be reset again, which a restart does."""
    checkout = start(service, instance="psf__requests@v2", backend=Backend.POOL)
    (Path(checkout.path) / "half").write_text("done")

    async def leave_half_way() -> None:
        leases = service.checkouts.leases
        leases.save(resetting(leases.get(checkout.id)))

    service.call(leave_half_way)
    with pytest.raises(CheckoutBusyError, match="half-way"):
        service.diff(checkout)
    service.restart()
    service.call(
        service.checkouts.renew, checkout.id, RenewCheckout(), USER_PEER
    )  # waits for the lock
    assert service.diff(checkout) == b""


def test_a_restart_adopts_leases_and_removes_rubbish(service: Service) -> None:
    """The owner's work is untouched; half-made and released directories go; a reset that was
    interrupted is made again.
    """
    kept, interrupted = start(service), start(service)
    (Path(kept.path) / "mine").write_text("work")
    (Path(interrupted.path) / "mine").write_text("work")
    for kind, name in (
        ("checkouts", "a" * 16),
        ("leases", "a" * 16),
        ("checkouts", "b" * 16),
        ("leases", "c" * 16),
    ):
        (service.state / kind / name / "tree").mkdir(parents=True)
    lease_file = service.state / "leases" / interrupted.id / "lease.json"
    lease_file.rename(lease_file.with_name("resetting.json"))
    service.restart()
    found = service.call(service.checkouts.list, USER_PEER)
    assert {checkout.id for checkout in found} == {kept.id, interrupted.id}
    assert as_user(Path(kept.path), "status", "--porcelain") == "?? mine"
    service.call(
        service.checkouts.renew, interrupted.id, RenewCheckout(), USER_PEER
    )  # waits for the lock
    assert as_user(Path(interrupted.path), "status", "--porcelain", "--ignored") == ""
    assert service.diff(kept).startswith(b"diff --git a/mine")
    service.call(service.checkouts.close)
    for kind in ("checkouts", "leases"):
        names = {
            path.name
            for path in (service.state / kind).iterdir()
            if not path.name.startswith(".warm-")
        }
        assert names == {kept.id, interrupted.id}
    service.restart()


def test_a_checkout_whose_proof_fails_is_destroyed_and_counted(service: Service) -> None:
    """Something that writes faster than it is cleaned: no client gets that tree."""
    checkout = start(service)
    lease_file = service.state / "leases" / checkout.id / "lease.json"
    forged = lease_file.read_text().replace(checkout.tree, "e" * 40)
    lease_file.write_text(forged)
    service.restart()
    with pytest.raises(MirrordError) as caught:
        reset(service, checkout)
    assert caught.value.code == "proof-failed"
    assert service.events.counts["proof.failed"] == 1
    with pytest.raises(CheckoutNotFoundError):
        service.call(service.checkouts.get, checkout.id, USER_PEER)


def test_the_grader_view_and_linked_history_are_for_administrators(service: Service) -> None:
    """Root, here; and its linked checkout shows all of the mirror."""
    checkout = start(
        service, ROOT_PEER, instance="psf__requests@v1", history=History.LINKED, view=View.GRADER
    )
    assert as_user(Path(checkout.path), "rev-parse", "--verify", "v3", uid=os.getuid())


def test_only_the_user_of_the_daemon_links_a_checkout_to_a_mirror(service: Service) -> None:
    """An administrator with another uid may ask for all else, but could not read the mirror."""
    service.change("access", admins=(USER,))
    service.access.refresh()
    with pytest.raises(AccessError, match="only the daemon's own user can read mirrors"):
        start(service, instance="psf__requests@v1", history=History.LINKED)
    assert start(service, instance="psf__requests@v1", view=View.GRADER).view is View.GRADER
