"""`mirrord mirror restore --from-store` on a machine that lost everything, with a real daemon."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from mirror_parts import Builder, House
from typed import typed
from waiting import until

from mirrord.bundles.service import Bundles
from mirrord.catalog import Generation
from mirrord.fleet.exchange import Exchange
from mirrord.fleet.generations import list_published, manifest_key, pack_key, read_manifest
from mirrord.fleet.objects import ObjectStore
from mirrord.model import MirrorName

pytestmark = [pytest.mark.slow, pytest.mark.root]

NAMES = [MirrorName("o", "one"), MirrorName("o", "two")]


class Lost:
    """What a daemon published before its machine was lost: two mirrors, pins, one dataset."""

    def __init__(self, store: ObjectStore, state: dict[str, Any]) -> None:
        self.store, self.state = store, state

    @property
    def config(self) -> str:
        """Of a new machine, whose upstreams are gone."""
        return f'[upstream]\nurl = "file:///nonexistent/{{name}}"\n[store]\nurl = "{self.store.shown}"\n'

    def packs(self, name: MirrorName) -> list[str]:
        newest = list_published(self.store, name)[-1]
        return [pack_key(name, pack) for pack in read_manifest(self.store, name, newest).packs]


def done(running: Daemon, path: str, body: Any) -> Any:
    started = running.json("POST", path, body)
    until(lambda: running.json("GET", f"/v1/operations/{started['id']}")["state"] != "running")
    ended = running.json("GET", f"/v1/operations/{started['id']}")
    assert ended["state"] == "done", ended
    return ended["result"]


def state_of(running: Daemon) -> dict[str, Any]:
    """Equal wherever it is restored; times of imports are not."""
    dataset = running.json("GET", "/v1/datasets/d")
    mirrors = running.json("GET", "/v1/mirrors")
    logs = [running.json("GET", f"/v1/mirrors/{name}/refs/log") for name in NAMES]
    pins = running.json("GET", "/v1/pins")
    return {
        "dataset": {name: dataset[name] for name in ("digest", "instance_count", "commit_count")},
        "mirrors": [(it["name"], it["url"], it["default_branch"]) for it in mirrors],
        "refs": [git(running.state_dir / f"mirrors/{name}", "for-each-ref") for name in NAMES],
        "history": [[record["id"] for record in log] for log in logs],
        "pins": sorted((it["mirror"], it["commit"], it["owner"], it["reason"]) for it in pins),
    }


async def publish(store: ObjectStore, it: House) -> None:
    for name in NAMES:
        if list_published(store, name):
            continue  # the daemon published it by itself
        repository, row = it.mirrors.repository(name), await it.mirrors.get(str(name))

        async def accept(_: Generation) -> bool:
            return True

        await Exchange(store, it.mirrors.quarantine).publish(
            repository, await repository.all_refs(), await repository.head(), url=row.url, epoch=4,
            previous=None, accept=accept,
            record=partial(Bundles(it.mirrors).write_records, row, repository),
        )  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """In a store that no test may change."""
    root, rows, bases = tmp_path_factory.mktemp("published"), [], []
    for name in NAMES:
        upstream = Upstream(root / "upstreams" / name.repo.partition("/")[2])
        commits = upstream.history(4)
        upstream.git("tag", "-a", "-m", "one", "v1")
        bases.append(commits[1])
        rows += [
            {"instance_id": f"{name}-{n}", "repo": name.repo, "base_commit": commit}
            for n, commit in enumerate(commits[:2])
        ]
    template = f"file://{root}/upstreams/{{name}}"
    store = ObjectStore(f"file://{root}/store")
    with daemon(f'[upstream]\nurl = "{template}"\n') as made:
        body = "".join(json.dumps(row) + "\n" for row in rows).encode()
        done(made, "/v1/datasets?name=d", body)
        pin = {"mirror": "o/one", "commit": bases[0], "reason": "paper"}
        assert made.request("POST", "/v1/pins", pin)[0] == 201
        state = state_of(made)
        made.stop()
        Builder(made.root, template).run(partial(publish, store))
    return Lost(store, state)


@pytest.fixture
def lost(published: Lost, tmp_path: Path) -> Lost:
    place = shutil.copytree(published.store.shown.removeprefix("file://"), tmp_path / "store")
    return Lost(ObjectStore(f"file://{place}"), published.state)


def run(running: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("--socket", running.socket, *words)


def test_a_new_machine_serves_what_the_lost_one_had(lost: Lost) -> None:
    """Refs, their history, pins with reasons, rows, URLs; without any upstream. Twice is harmless."""
    with daemon(lost.config) as new:
        ended = run(new, "mirror", "restore", "--from-store")
        assert ended.returncode == 0, ended.stderr
        assert state_of(new) == lost.state
        assert "created mirror o__one: 2 created, 0 kept, 3 pins" in ended.stdout
        assert "4 recorded commits in 2 mirrors at level closure: 4 ok" in ended.stdout
        audit = ended.stdout.split()[-1]
        assert new.json("GET", f"/v1/audits/{audit}")["open_count"] == 0
        taken = new.request("POST", "/v1/checkouts", {"instance": "o__two-1"})
        assert taken[0] == 201
        assert (Path(json.loads(taken[2])["path"]) / "README").is_file()
        again = run(new, "mirror", "restore", "--from-store", "o/two", "--json")
        assert again.returncode == 0
        result = json.loads(again.stdout)
        assert [it["mirror"] for it in result["mirrors"]] == ["o__two"]
        assert (result["mirrors"][0]["created"], result["failed"]) == (False, [])
        assert result["audit"]["counts"] == {"ok": 2}
        assert state_of(new) == lost.state


def test_a_heal_brings_a_mirror_back_that_was_deleted(lost: Lost) -> None:
    """Without an upstream, while the daemon runs."""
    with daemon(lost.config) as new:
        assert run(new, "mirror", "restore", "--from-store").returncode == 0
        # by a rename: a daemon that writes there keeps a removal from ending
        (new.state_dir / "mirrors/o__one").rename(new.root / "gone")
        healed = run(new, "heal", "o/one")
        assert healed.returncode == 0, healed.stdout
        assert state_of(new) == lost.state


def test_a_mirror_that_is_damaged_in_the_store_is_named_and_costs_no_other(lost: Lost) -> None:
    file = Path(lost.store.shown.removeprefix("file://")) / lost.packs(NAMES[0])[0]
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with daemon(lost.config) as new:
        ended = run(new, "mirror", "restore", "--from-store", "--json")
        assert ended.returncode == 8
        assert "o__one" in ended.stderr
        result = json.loads(ended.stdout)
        assert [it["mirror"] for it in result["mirrors"]] == ["o__two"]
        failed = result["failed"][0]
        assert (failed["mirror"], failed["error"]["code"]) == ("o__one", "integrity")
        assert [it["name"] for it in new.json("GET", "/v1/mirrors")] == ["o__two"]
        assert new.request("POST", "/v1/checkouts", {"instance": "o__two-0"})[0] == 201
        file.write_bytes(content)
        assert run(new, "mirror", "restore", "--from-store").returncode == 0
        assert state_of(new) == lost.state


@pytest.mark.parametrize("damage", ["manifest", "pack"])
def test_an_older_generation_is_restored_where_the_newest_is_damaged(
    lost: Lost, damage: str
) -> None:
    """Both are named, the exit status is that of damage, and the next generation is newer."""
    root, name = Path(lost.store.shown.removeprefix("file://")), NAMES[0]
    kept = {*lost.packs(name)}
    with daemon(lost.config) as old:
        assert run(old, "mirror", "restore", "--from-store").returncode == 0
        head = json.loads(run(old, "mirror", "show", "o/one", "--json").stdout)["name"]
        assert head == "o__one"
        commit = git(old.state_dir / "mirrors/o__one", "rev-parse", "HEAD~2")
        pin = {"mirror": "o/one", "commit": commit, "reason": "later"}
        assert old.request("POST", "/v1/pins", pin)[0] == 201
        until(lambda: len(list_published(lost.store, name)) > 1)
    older, newest = list_published(lost.store, name)[-2:]
    key = manifest_key(name, newest)
    if damage == "pack":
        (key,) = {*lost.packs(name)} - kept
    (root / key).write_bytes(b"")
    with daemon(lost.config) as new:
        ended = run(new, "mirror", "restore", "--from-store", "--json")
        assert ended.returncode == 8
        named = [f"{it.epoch}-{it.number}" for it in (newest, older)]
        assert (
            f"cannot restore generation {named[0]} of mirror o__one, restored {named[1]} instead"
            in ended.stderr
        )
        result = json.loads(ended.stdout)
        assert [it["mirror"] for it in result["mirrors"]] == ["o__one", "o__two"]
        assert result["audit"]["open_count"] == 0
        assert state_of(new) == lost.state
        assert new.request("POST", "/v1/pins", pin)[0] == 201
        until(lambda: list_published(lost.store, name)[-1] > newest)


def test_what_the_store_does_not_have_is_told(lost: Lost) -> None:
    with daemon(lost.config) as new:
        ended = run(new, "mirror", "restore", "--from-store", "o/three", "o/one")
        assert ended.returncode == 4
        assert "cannot restore mirror o__three: the store has nothing of that name" in ended.stderr
        assert [it["name"] for it in new.json("GET", "/v1/mirrors")] == ["o__one"]
    with daemon() as none:
        ended = run(none, "mirror", "restore", "--from-store")
        assert ended.returncode == 2
        assert "no store is configured" in ended.stderr
        assert "[store] url" in ended.stderr


def test_a_store_that_cannot_be_reached_ends_the_restoration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with daemon('[store]\nurl = "s3://bucket/prefix"\n') as new:
        ended = run(new, "mirror", "restore", "--from-store")
        assert ended.returncode == 7
        assert "cannot list mirrors/ in store s3://bucket/prefix" in ended.stderr


def test_a_killed_restoration_is_finished_by_the_next(lost: Lost) -> None:
    """Killed at a few moments of its way."""
    with daemon(lost.config) as new:
        killed = 0
        for delay_s in (0.1, 0.4, 0.8):
            started = new.json("POST", "/v1/restores", {})
            time.sleep(delay_s)
            ended = new.json("GET", f"/v1/operations/{started['id']}")
            killed += ended["state"] == "running"
            new.kill()
            new.start()
        assert killed
        result = done(new, "/v1/restores", {})
        assert (result["failed"], result["audit"]["open_count"]) == ([], 0)
        assert state_of(new) == lost.state
