"""Faults while mirrord works, a part of `make faults`: nothing is lost, nothing half is served, nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from faults.calls import fail_at
from faults.crowd import everything_at_once
from faults.damages import rounds
from faults.full import fill_up
from faults.kills import NOT_HIT, kill_at, kill_child
from faults.lab import Lab, laboratory
from faults.operations import OPERATIONS
from faults.power import cut_power

pytestmark = [pytest.mark.root, pytest.mark.slow]

_STEPS = (
    ("first clone", "`mirrors/o__first*` in place"),
    ("sync", "`mirrors/o__r/objects/pack/pack-*.pack` in place"),
    ("sync", "`mirrors/o__r/refs/mirrord/history.lock` renamed away"),
    ("unpin", "`mirrors/o__r/mirrord-transaction.new` made"),
    ("import", "`quarantine/dataset-*/rows.jsonl` made"),
    ("import", "`mirrors/o__r/mirrord-transaction` in place"),
    ("bundle import (new mirror)", "`mirrors/o__bundled` in place"),
    ("migration of the catalog", "`catalog.sqlite3-wal` made"),
    ("maintenance", "`mirrors/o__r/packed-refs.new` made"),
    ("template build", "`templates/o__r/trees/.building-*` made"),
    ("checkout (pool)", "`leases/*/lease.json` in place"),
    ("reset (overlay)", "`leases/*/resetting.json` in place"),
    ("reset (overlay)", "`leases/*/layer` in place"),
    ("grade (overlay)", "`templates/.layers/*` made"),
    ("save", "`templates/.layers/*.json` in place"),
    ("reset (environment)", "`leases/*/environment` in place"),
    ("release (overlay)", "`leases/.trash-*` in place"),
)
_CHILDREN = (("sync", "git fetch"), ("maintenance", "git repack"), ("template build", "worker"))
_BY_NAME = {kind.name: kind for kind in OPERATIONS}


@pytest.fixture(scope="module")
def labs() -> Iterator[_Labs]:
    with ExitStack() as stack:
        yield _Labs(stack)


class _Labs(list[Lab]):
    """At most one lab at a time; the test that did not end well leaves none."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self.stack = stack


@pytest.fixture
def lab(labs: _Labs, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The same lab goes from fault to fault; after one that it did not survive there is a new one."""
    if not labs:
        labs.append(labs.stack.enter_context(laboratory()))
    failed_before = request.session.testsfailed
    yield labs[0]
    if request.session.testsfailed > failed_before:
        labs.clear()
        labs.stack.close()


@pytest.mark.parametrize(("name", "step"), _STEPS)
def test_a_kill_at_a_step_loses_nothing_and_leaves_nothing(lab: Lab, name: str, step: str) -> None:
    """The old state or the new one, and the same operation works again."""
    assert kill_at(lab, _BY_NAME[name], step).did != NOT_HIT


@pytest.mark.parametrize(("name", "victim"), _CHILDREN)
def test_a_killed_child_costs_one_operation_and_not_the_daemon(
    lab: Lab, name: str, victim: str
) -> None:
    """It is answered with one of our errors, or done all the same."""
    assert kill_child(lab, _BY_NAME[name], victim, random.Random(1)).did != NOT_HIT


@pytest.mark.parametrize(
    ("name", "call", "number"), [("unpin", "unlink", 4), ("checkout (pool)", "rename", 1)]
)
def test_what_a_failing_disk_leaves_goes_while_the_daemon_lives(
    lab: Lab, name: str, call: str, number: int
) -> None:
    """A lock of which git only warns, and at which every later git would stop; a checkout that cannot be renamed away."""
    assert fail_at(lab, _BY_NAME[name], call, number, "EIO").times == 1


def test_everything_at_once_is_right_and_loses_nothing(lab: Lab) -> None:
    """Syncs, maintenance, audits, imports, pins and checkouts of one mirror."""
    assert everything_at_once(lab, seed=1, duration_s=4).lost == "nothing"


def test_a_full_disk_ends_new_work_and_harms_nothing_old() -> None:
    """With an error that says so; with room again it works."""
    assert {row.lost for row in fill_up(_BY_NAME["sync"], (8 << 10,))} == {"nothing"}


def test_a_power_cut_loses_no_pin(tmp_path: Path) -> None:
    """What was answered as pinned is there and whole after the file system ended at once."""
    assert [row.lost for row in cut_power(tmp_path, random.Random(1), cuts=1)] == ["nothing"]


def test_any_damage_is_repaired_with_any_donor_that_can() -> None:
    """One thing in the mirror and what happens to it, and who is there to help, by chance; `make faults` does a thousand."""
    assert {row.lost for row in rounds(seed=1, numbers=(1, 2, 9, 14, 15, 375))} == {"nothing"}
