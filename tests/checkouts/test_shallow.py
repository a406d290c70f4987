"""Commits of a shallow upstream: imported, and shown with history squashed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import daemon
from gitrepos import Upstream, git

from mirrord import Backend, Client, History
from mirrord.errors import CommitUnservableError
from mirrord.seal.verify import verify_seal

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_a_row_whose_base_commit_lacks_its_parents_is_served_squashed(
    make_upstream: Callable[..., Upstream], tmp_path: Path
) -> None:
    upstream = make_upstream("source")
    commits = [upstream.commit({"a": f"{number}\n"}) for number in range(3)]
    path = tmp_path / "upstreams/o/n"
    git(tmp_path, "clone", "--quiet", "--bare", "--depth=2", upstream.url, str(path))
    rows = tmp_path / "rows.json"
    rows.write_text(
        json.dumps(
            [
                {"instance_id": f"i{number}", "repo": "o/n", "base_commit": base}
                for number, base in enumerate([commits[1], commits[2], "main"])
            ]
        )
    )
    url = f"file://{path.parents[1]}/{{owner}}/{{name}}"
    config = f'[checkouts]\nprewarm = false\n[upstream]\nurl = "{url}"\n'
    with daemon(config) as running, Client(running.socket) as client:
        for added in (["i0", "i1", "i2"], []):
            with rows.open("rb") as opened:
                operation = client.import_dataset(opened, source=rows.name)
                result = client.wait(operation).result or {}
            assert (result["change"]["added"], result["dataset"]["unpinned_count"]) == (added, 0)
        client.wait(client.start_audit())
        assert client.list_audits()[0].findings == []
        for name, content in (("i0", "1\n"), ("i1", "2\n"), ("i2", "2\n"), ("o/n@main", "2\n")):
            for backend in Backend:
                with pytest.raises(CommitUnservableError) as raised:
                    client.checkout(name, history=History.SEALED, backend=backend)
                assert "upstream is shallow" in raised.value.message
                assert "squashed" in (raised.value.hint or "")
                checkout = client.checkout(name, backend=backend)
                assert checkout.history is History.SQUASHED
                assert (checkout.path / "a").read_text() == content
                assert git(checkout.path, "rev-list", "--count", "--all", "HEAD") == "1"
                assert git(checkout.path, "status", "--porcelain") == ""
                git(checkout.path, "fsck", "--full", "--strict")
                mirror = running.state_dir / "mirrors/o__n"
                base = commits[1 if content == "1\n" else 2]
                for named in (checkout.commit, base):  # the one in its place, and upstream's
                    assert verify_seal(checkout.path, named, mirror).sealed
                assert not verify_seal(checkout.path, commits[0], mirror).sealed
                (checkout.path / "a").write_text("changed\n")
                assert "+changed" in checkout.diff().decode()
                checkout.release()
