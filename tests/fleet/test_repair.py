"""What the store has lost comes back from a daemon that has it, by nobody's hand."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fleetlab import Fleet, become_like, checkout, done, eventually, refs
from gitrepos import Upstream

pytestmark = pytest.mark.slow


def packs(fleet: Fleet) -> set[Path]:
    return {*fleet.store_path.rglob("*.pack")}


def test_a_pack_whose_bytes_became_others_is_published_again(
    fleet: Fleet, upstream: Upstream
) -> None:
    """Found by a follower, which cannot repair it; its length is what it was."""
    a, b = fleet.make(), fleet.make()
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    assert checkout(b, mirror="owner/name", commit="main")
    before = packs(fleet)
    os.kill(b.pid, signal.SIGSTOP)
    commit = upstream.commit({"new": "line\n"})
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    damaged = [*packs(fleet)]  # also the pack that b has already: all are published again
    assert len(damaged) > len(before)
    for path in damaged:
        path.write_bytes(bytes(path.stat().st_size))
    os.kill(b.pid, signal.SIGCONT)
    become_like(a, b)
    assert commit in refs(b)
    c = fleet.make()
    assert checkout(c, mirror="owner/name", commit=commit)
    assert (
        fleet.server.execute_in(fleet.catalog, "SELECT key FROM claims WHERE key LIKE 'rep%'") == []
    )


def test_a_pack_that_is_gone_is_found_by_the_collection(fleet: Fleet, upstream: Upstream) -> None:
    a, b = fleet.make(), fleet.make()
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    collected = "SELECT 1 FROM claims WHERE key = 'store/collect' AND due_ms > 0 AND node IS NULL"
    eventually(lambda: fleet.server.execute_in(fleet.catalog, collected))
    for path in packs(fleet):
        path.unlink()
    due = "UPDATE claims SET due_ms = 0 WHERE key = 'store/collect' RETURNING key"
    fleet.server.execute_in(fleet.catalog, due)
    eventually(lambda: packs(fleet))
    upstream.path.rename(upstream.path.with_name("gone"))
    assert eventually(lambda: checkout(b, mirror="owner/name", commit="main"))
    become_like(a, b)
