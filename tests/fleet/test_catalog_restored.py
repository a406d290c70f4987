"""A PostgreSQL restored from a backup below daemons that go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from daemon_fleet import Fleet, become_like, checkout, done, eventually, refs, rows
from gitrepos import Upstream, git

from mirrord.bundles.merging import RECORDS
from mirrord.fleet.generations import list_published, read_manifest
from mirrord.fleet.objects import ObjectStore
from mirrord.model import MirrorName

pytestmark = pytest.mark.slow


def newest(fleet: Fleet) -> dict[str, tuple[int, int]]:
    query = "SELECT mirror_key, epoch, number FROM generations"
    found = fleet.server.execute_in(fleet.catalog, query)
    return {str(key): (int(str(epoch)), int(str(number))) for key, epoch, number in found}


def records(fleet: Fleet) -> str:
    """What the newest generation in the store says of pins and datasets.

    Read from the daemons that have it by now: one of them made it, the others follow.
    """
    store, name = ObjectStore(fleet.store), MirrorName("owner", "name")
    manifest = read_manifest(store, name, list_published(store, name)[-1])
    document = f"{manifest.refs[f'{RECORDS}owner__name']}:mirror.json"
    mirrors = (node.state_dir / "mirrors/owner__name" for node in fleet.nodes)
    return "".join(git(it, "show", document, check=False) for it in mirrors if it.exists())


def test_daemons_tell_a_restored_catalog_what_it_does_not_know(
    fleet: Fleet, upstream: Upstream, make_upstream: Callable[..., Upstream]
) -> None:
    """Generations, pins with their reasons, a dataset, a mirror; and they go on from there."""
    make_upstream("owner+second").history(2)
    a, b = fleet.make(), fleet.make()
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    assert checkout(b, mirror="owner/name", commit="main")
    fleet.server.dump(fleet.catalog)

    commit = upstream.commit({"new": "line\n"})
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    pin = {"mirror": "owner/name", "commit": commit, "reason": "paper"}
    assert b.request("POST", "/v1/pins", pin)[0] == 201
    done(a, "POST", "/v1/datasets?name=later&filename=d.jsonl", rows(commit))
    done(b, "POST", "/v1/mirrors", {"repo": "owner/second"})
    eventually(lambda: '"paper"' in records(fleet) and '"later"' in records(fleet))
    # else nobody can tell it: it is published a moment after it was added
    eventually(lambda: "owner__second" in newest(fleet))
    become_like(a, b)
    before = newest(fleet)
    pins = sorted((it["owner"], it["reason"]) for it in a.json("GET", "/v1/pins"))
    pids = [a.pid, b.pid]

    fleet.server.restore(fleet.catalog)
    for node in (a, b):
        eventually(lambda: "catalog.went_back" in node.log)  # noqa: B023
        eventually(lambda: len(node.json("GET", "/v1/mirrors")) == 2)  # noqa: B023
        eventually(lambda: node.get("/v1/instances/i-0")[0] == 200)  # noqa: B023
        assert (node.state_dir / "mirrors/owner__name").is_dir()
    assert (b.state_dir / "mirrors/owner__second").is_dir()
    eventually(lambda: all(newest(fleet).get(key, (0, 0)) >= it for key, it in before.items()))
    eventually(lambda: len(a.json("GET", "/v1/pins")) == len(pins))
    assert sorted((it["owner"], it["reason"]) for it in a.json("GET", "/v1/pins")) == pins
    become_like(a, b)
    assert f"refs/mirrord/pins/person/0/{commit}" in refs(a)

    later = upstream.commit({"after": "the backup\n"})
    done(b, "POST", "/v1/mirrors/owner__name/sync")
    eventually(lambda: later in refs(a))
    become_like(a, b)
    assert newest(fleet)["owner__name"] > before["owner__name"]
    assert checkout(a, instance="i-0")
    assert [a.pid, b.pid] == pids


def test_a_daemon_that_starts_tells_it_too(fleet: Fleet, upstream: Upstream) -> None:
    a, b = fleet.make(), fleet.make()
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    fleet.server.dump(fleet.catalog)
    commit = upstream.commit({"new": "line\n"})
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    pin = {"mirror": "owner/name", "commit": commit, "reason": "paper"}
    assert a.request("POST", "/v1/pins", pin)[0] == 201
    eventually(lambda: '"paper"' in records(fleet))
    before = newest(fleet)["owner__name"]
    a.stop()
    b.stop()
    fleet.server.restore(fleet.catalog)
    assert newest(fleet)["owner__name"] < before
    b.start()
    a.start()
    eventually(lambda: newest(fleet)["owner__name"] >= before)
    eventually(lambda: [it["reason"] for it in b.json("GET", "/v1/pins")] == ["paper"])
    later = upstream.commit({"after": "the backup\n"})
    done(b, "POST", "/v1/mirrors/owner__name/sync")
    eventually(lambda: later in refs(a))
    become_like(a, b)
    assert newest(fleet)["owner__name"] > before
