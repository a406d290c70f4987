"""Receipts of checkouts on both backends: git and sha256sum are the oracle for what they state."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkout_parts import NAME, ROOT_PEER, USER, USER_PEER, Service, running_service
from gitrepos import ENV, Upstream
from waiting import until

from mirrord.errors import AccessError, CheckoutNotFoundError, MirrordError
from mirrord.host.peers import Peer
from mirrord.model import Backend, History, View, utc_now
from mirrord.protocol import (
    Checkout,
    Closure,
    ForkCheckout,
    MakeSnapshot,
    Mismatch,
    Receipt,
    ReceiptReport,
    ResetCheckout,
    StartCheckout,
    StartGrade,
)

pytestmark = pytest.mark.root

OTHER_PEER = Peer(uid=USER + 1, gid=USER + 1, pid=1)


@pytest.fixture(scope="module")
def running(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    running.change("access", commits="any")
    for checkout in running.call(running.checkouts.list, ROOT_PEER):
        running.call(running.checkouts.release, checkout.id, ROOT_PEER)


@pytest.fixture(params=[Backend.POOL, Backend.OVERLAY])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


def start(service: Service, peer: Peer = USER_PEER, **request: Any) -> Checkout:
    wanted = StartCheckout(**{"instance": "psf__requests@v2", **request})
    return service.call(service.checkouts.checkout, wanted, peer)


def issue(service: Service, checkout: Checkout, peer: Peer = USER_PEER) -> Receipt:
    return service.call(service.checkouts.receipt, checkout.id, peer)


def verify(service: Service, receipt: Receipt, peer: Peer = USER_PEER) -> ReceiptReport:
    return service.call(service.checkouts.verify_receipt, receipt, None, peer)


def counted_by_git(repository: Path, *tips: str) -> Closure:
    """As docs/seals.md tells a stranger to."""
    walk = f"git rev-list --objects {' '.join(tips)} | cut -c1-40 | sort -u"
    options: dict[str, Any] = {"shell": True, "cwd": repository, "env": {**ENV, "LC_ALL": "C"}}
    lines = subprocess.check_output(f"{walk} | wc -l", **options)
    digest = subprocess.check_output(f"{walk} | sha256sum", **options)
    return Closure(objects=int(lines), sha256=digest.split()[0].decode())


def test_a_receipt_waits_for_no_writer_of_the_catalog(service: Service) -> None:
    """Its record is written when that one ends, and proves the receipt before."""
    checkout, catalog = start(service), service.checkouts.mirrors.catalog

    async def issue_beside_an_import() -> tuple[Receipt, ReceiptReport, bool]:
        async with catalog._writing():
            receipt = await service.checkouts.receipt(checkout.id, USER_PEER)
            told = await service.checkouts.verify_receipt(receipt, None, USER_PEER)
            is_written = receipt in [row.receipt for row in await catalog.list_receipts()]
        return receipt, told, is_written

    receipt, told, was_written = service.call(issue_beside_an_import)
    assert (told.proven_by, was_written) == (["record"], False)
    until(lambda: receipt in [row.receipt for row in service.call(catalog.list_receipts)])
    assert not service.checkouts.receipts.records._unwritten


def test_a_receipt_says_what_the_checkout_is(
    service: Service, backend: Backend, rich: Upstream
) -> None:
    """Closure, tree and diff are those that git and sha256sum find in a plain clone."""
    before = utc_now()
    checkout = start(service, backend=backend)
    (Path(checkout.path) / "README").write_text("changed\n")
    receipt = issue(service, checkout)
    assert receipt.closure == counted_by_git(rich.path, "v2")
    assert receipt.tree == rich.git("rev-parse", "v2^{tree}")
    assert (receipt.commit, receipt.head) == (checkout.commit, checkout.commit)
    assert (receipt.checkout, receipt.mirror) == (checkout.id, str(NAME))
    assert receipt.upstream == rich.url
    patch = service.diff(checkout)
    assert receipt.diff.bytes == len(patch)
    assert receipt.diff.sha256 == hashlib.sha256(patch).hexdigest()
    assert receipt.resets == 0
    assert receipt.clean is not None
    assert receipt.clean.at == checkout.created_at
    assert receipt.seal is not None
    assert receipt.seal.at <= receipt.issued_at
    assert (receipt.template is None) == (backend is Backend.POOL)
    assert before <= receipt.issued_at <= utc_now()


def test_a_receipt_counts_resets(service: Service, backend: Backend) -> None:
    """Also over a restart; the last one is when the tree was clean."""
    checkout = start(service, backend=backend)
    for commit in (None, "v1"):
        service.call(service.checkouts.reset, checkout.id, ResetCheckout(commit=commit), USER_PEER)
    between = issue(service, checkout)
    service.restart()
    receipt = issue(service, checkout)
    assert receipt.resets == 2
    assert receipt.clean is not None
    assert receipt.clean.at > checkout.created_at
    assert receipt.diff.bytes == 0
    assert (receipt.clean, receipt.closure) == (between.clean, between.closure)


def test_a_fork_names_its_parent_and_was_never_clean(service: Service, backend: Backend) -> None:
    """Nor is a checkout after a roll-back; a reset to the commit makes both clean."""
    checkout = start(service, backend=backend)
    (Path(checkout.path) / "README").write_text("changed\n")
    fork = service.call(service.checkouts.fork, checkout.id, ForkCheckout(), USER_PEER)
    receipt, original = issue(service, fork), issue(service, checkout)
    assert receipt.parent == checkout.id
    assert (receipt.clean, receipt.resets) == (None, 0)
    assert (receipt.diff, receipt.closure) == (original.diff, original.closure)
    service.call(service.checkouts.snapshot, checkout.id, MakeSnapshot(name="s"), USER_PEER)
    service.call(service.checkouts.reset, checkout.id, ResetCheckout(to="s"), USER_PEER)
    rolled_back = issue(service, checkout)
    assert (rolled_back.clean, rolled_back.resets) == (None, 1)
    assert rolled_back.diff == original.diff
    for each in (fork, checkout):
        service.call(service.checkouts.reset, each.id, ResetCheckout(), USER_PEER)
        assert issue(service, each).clean is not None


def test_a_grade_says_what_it_was_made_of(service: Service, backend: Backend) -> None:
    """Until a reset takes that away; the agent's receipt has nothing of it."""
    checkout = start(service, backend=backend)
    (Path(checkout.path) / "conftest.py").write_text("import os\n")
    (Path(checkout.path) / "README").write_text("changed\n")
    wanted = StartGrade(policy="report,runner=drop", backend=backend)
    grade = service.call(service.grading.grade, checkout.id, wanted, ROOT_PEER)
    service.restart()
    receipt = issue(service, grade, ROOT_PEER)
    assert (receipt.parent, receipt.view) == (checkout.id, View.GRADER)
    assert receipt.clean is None
    assert receipt.grade is not None
    assert (receipt.grade.policy, receipt.grade.strategy) == ("report,runner=drop", None)
    assert (receipt.grade.dropped, receipt.grade.dropped_count) == (["conftest.py"], 1)
    assert verify(service, receipt, ROOT_PEER).holds
    assert issue(service, checkout).grade is None
    service.call(service.checkouts.reset, grade.id, ResetCheckout(), ROOT_PEER)
    clean = issue(service, grade, ROOT_PEER)
    assert clean.grade is None
    assert clean.clean is not None
    service.call(service.checkouts.reset, grade.id, ResetCheckout(to="graded"), ROOT_PEER)
    assert issue(service, grade, ROOT_PEER).grade == receipt.grade


@pytest.mark.parametrize("history", History)
def test_a_receipt_holds_against_its_mirror(
    service: Service, rich: Upstream, history: History
) -> None:
    """Of every history. A linked checkout has no closure of its own, a squashed one the tree's."""
    peer = ROOT_PEER if history is History.LINKED else USER_PEER
    receipt = issue(service, start(service, peer, history=history), peer)
    found = verify(service, receipt, peer)
    assert found.holds
    assert found.mismatches == []
    assert {"mirror", "commit", "tree", "head"} <= set(found.checked)
    if history is History.LINKED:
        assert (receipt.closure, receipt.seal) == (None, None)
    elif history is History.SQUASHED:
        alone = counted_by_git(rich.path, "v2^{tree}")
        assert receipt.closure is not None
        assert receipt.closure.objects == alone.objects + 1
        assert receipt.head != receipt.commit


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("tree", "e" * 40),
        ("head", "e" * 40),
        ("commit", "e" * 40),
        ("mirror", "no__mirror"),
        ("closure.objects", 1),
        ("closure.sha256", "0" * 64),
    ],
)
def test_what_does_not_hold_is_named(
    service: Service, rich: Upstream, member: str, value: Any
) -> None:
    """The one member, with what it states and what there is."""
    receipt = issue(service, start(service))
    name, _, part = member.partition(".")
    forged = replace(getattr(receipt, name), **{part: value}) if part else value
    report = verify(service, replace(receipt, **{name: forged}))
    assert not report.holds
    missing = member in {"commit", "mirror"}
    assert receipt.closure is not None
    real = getattr(receipt.closure, part) if part else getattr(receipt, member)
    found = None if missing else str(real)
    assert report.mismatches == [Mismatch(member=member, stated=str(value), found=found)]


def test_a_linked_checkout_has_no_closure_of_its_own(service: Service) -> None:
    """A receipt of a sealed one that was edited says more than the mirror can."""
    edited = replace(issue(service, start(service)), history=History.LINKED)
    found = [each.member for each in verify(service, edited, ROOT_PEER).mismatches]
    assert found == ["closure.objects", "closure.sha256"]


def test_an_instance_is_held_against_its_base_commit(service: Service, rich: Upstream) -> None:
    """Where a dataset here has it."""
    row = {"instance_id": "psf__requests-1", "repo": "psf/requests", "version": "1"}
    row |= {"base_commit": rich.git("rev-parse", "v1"), "patch": "", "test_patch": ""}
    row |= {"problem_statement": "", "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}
    service.import_instances([row])
    receipt = issue(service, start(service, instance="psf__requests-1"))
    assert (receipt.instance, receipt.dataset) == ("psf__requests-1", "lab")
    assert "instance" in verify(service, receipt).checked
    other = replace(issue(service, start(service)), instance="psf__requests-1")
    report = verify(service, other)
    assert [each.member for each in report.mismatches] == ["instance"]
    assert "instance" not in verify(service, replace(receipt, instance="unknown")).checked


def test_a_secret_of_the_upstream_is_in_no_receipt(service: Service) -> None:
    """A URL with user information is shown without it, one that may hold a token not at all."""
    checkout = start(service)
    row = service.call(service.mirrors.get, str(NAME))
    for url, shown in (
        ("https://me:hunter2@example.com/x.git", "https://example.com/x.git"),
        ("https://example.com/x.git?token=hunter2hunter2", None),
    ):
        service.call(service.catalog.put_mirror, replace(row, url=url))
        receipt = issue(service, checkout)
        assert receipt.upstream == shown
        assert b"hunter2" not in receipt.canonical()
    service.call(service.catalog.put_mirror, row)


def test_receipts_answer_to_those_who_may_see_the_checkout(service: Service) -> None:
    """And a verification finds no commit that its peer may not check out."""
    checkout = start(service)
    with pytest.raises(CheckoutNotFoundError):
        issue(service, checkout, OTHER_PEER)
    receipt = issue(service, checkout)
    service.change("access", commits="recorded")
    with pytest.raises(AccessError):
        verify(service, receipt)
    assert verify(service, receipt, ROOT_PEER).holds


def test_a_damaged_mirror_verifies_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error, and no verdict."""
    receipt = issue(service, start(service))
    monkeypatch.setattr("mirrord.checkouts.receipts.WALK", ("rev-list", "--no-such-option"))
    with pytest.raises(MirrordError):
        verify(service, receipt)
    assert not list((service.state / "quarantine").glob("receipt-*"))


def test_the_receipt_of_a_graders_checkout_says_so(service: Service) -> None:
    """It has the same members."""
    checkout = start(service, ROOT_PEER, view=View.GRADER)
    assert issue(service, checkout, ROOT_PEER).view is View.GRADER


def test_a_receipt_does_not_wait_behind_builds_and_audits(service: Service) -> None:
    """All turns of long work are taken; the closure of the store is counted all the same."""
    checkout, checkouts = start(service), service.checkouts

    async def issued() -> Receipt:
        async with AsyncExitStack() as stack:
            long = service.workers._long
            for _ in range(long._background):
                await stack.enter_async_context(long.turn())
            checkouts.receipts._sealed.clear()
            return await checkouts.receipt(checkout.id, USER_PEER)

    assert service.call(issued).closure == issue(service, checkout).closure


def test_a_crowd_of_receipts_reads_its_store_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes one call of a worker besides, and waits for its turn with all calls of its user."""
    checkouts, run = service.checkouts, service.workers.run
    crowd = [start(service) for _ in range(8)]
    called = Counter[str]()

    async def counted(function: Any, *arguments: Any, **options: Any) -> Any:
        called[function.__name__] += 1
        return await run(function, *arguments, **options)

    async def issue_at_once() -> list[Receipt]:
        return await asyncio.gather(*(checkouts.receipt(one.id, USER_PEER) for one in crowd))

    checkouts.receipts._sealed.clear()
    monkeypatch.setattr(service.workers, "run", counted)
    receipts = service.call(issue_at_once)
    assert called == {"read_store": 1, "diff": 8}
    later = issue(service, crowd[0])
    assert all((it.closure, it.seal) == (later.closure, later.seal) for it in receipts)
    assert called == {"read_store": 1, "diff": 9}


def test_what_a_worker_does_for_a_receipt_loads_no_catalog() -> None:
    """Each new worker would load it, for most of a second of processor time."""
    loaded = "import sys, mirrord.checkouts.closures; print(*sys.modules)"
    names = subprocess.check_output([sys.executable, "-c", loaded], text=True).split()
    assert "mirrord.git.packs" in names
    assert not {"sqlalchemy", "pydantic", "mirrord.catalog"} & set(names)
