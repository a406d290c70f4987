"""`du` and `gc` of a real daemon: what they count, what goes, what stays, beside checkouts and crashes."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from anyone import NOBODY, ask_as
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from waiting import until

from mirrord import Client
from mirrord.errors import MirrordError
from mirrord.model import Backend

pytestmark = pytest.mark.root

MEMBER, GROUP = 34501, 1


class World(NamedTuple):
    """A daemon with one mirror of six commits, each of 40 files that no other has."""

    daemon: Daemon
    commits: list[str]

    def usage(self, **query: Any) -> dict[str, Any]:
        with Client(self.daemon.socket) as client:
            found: dict[str, Any] = client.usage(**query).to_json()
            return found

    def gc(self, **body: Any) -> dict[str, Any]:
        status, _, answer = self.daemon.request("POST", "/v1/gc", body)
        assert status == 200, answer
        found: dict[str, Any] = json.loads(answer)
        return found

    def names(self, kind: str) -> dict[str, dict[str, Any]]:
        return {r["name"]: r for r in self.usage(verbose=True)["rows"] if r["kind"] == kind}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("storage")
    upstream = Upstream(root / "o" / "r")
    commits = [
        upstream.commit({f"{number}/{n}": os.urandom(9000).hex() for n in range(40)})
        for number in range(6)
    ]
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[access]\ngroup = "daemon"\n'
    rows = [
        {"instance_id": f"o__r-{n}", "repo": "o/r", "base_commit": commit, "patch": "p" * 5000,
         "test_patch": "", "problem_statement": ""}
        for n, commit in enumerate(commits)
    ]  # fmt: skip
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with daemon(f"{text}[checkouts]\nprewarm = false\n") as running:
        with Client(running.socket) as client:
            client.wait(client.import_dataset(root / "rows.jsonl", name="d"))
        yield World(running, commits)


@pytest.fixture
def world(made: World) -> Iterator[World]:
    yield made
    with Client(made.daemon.socket) as client:
        for held in client.list_checkouts():
            client.release_checkout(held.id)
        client.gc()


def disk(path: Path) -> int:
    out = subprocess.run(["du", "-s", "--block-size=1", path], capture_output=True, check=True)
    return int(out.stdout.split()[0])


def test_du_counts_what_is_there(world: World) -> None:
    """As `du` does, within the small files of records; every part of it is named."""
    state = world.daemon.state_dir
    with (
        Client(world.daemon.socket) as client,
        client.checkout("o__r-0") as one,
        client.checkout("o__r-1", backend=Backend.POOL),
    ):
        (Path(one.path) / "big").write_bytes(os.urandom(10**6))
        one.snapshot("kept")
        found = world.usage(verbose=True)
        totals = {each["kind"]: each for each in found["totals"]}
        assert totals["mirrors"]["size_bytes"] == disk(state / "mirrors/o__r")
        assert totals["templates"]["size_bytes"] == pytest.approx(
            disk(state / "templates") - 10**6, rel=0.2
        )
        assert totals["snapshots"]["size_bytes"] >= 10**6
        assert totals["datasets"]["size_bytes"] >= 30_000
        assert totals["checkouts"]["count"] == totals["checkouts"]["used"] == 2
        rows = world.names("checkouts")
        assert 10**6 < rows[one.id]["size_bytes"] < 2 * 10**6
        assert world.names("mirrors")["o__r"]["checkouts"] == 2
        assert found["size_bytes"] == sum(each["size_bytes"] for each in found["totals"])
        assert world.usage()["rows"] == []


def test_layers_are_counted_and_stay_through_a_gc(world: World) -> None:
    """Until they are removed, which frees their space."""
    with Client(world.daemon.socket) as client:
        with client.checkout("o__r-0") as held:
            (held.path / "built").write_bytes(os.urandom(10**6))
            kept = held.save("tools")
        with client.checkout("o__r-0", layer="tools", backend=Backend.POOL) as held:
            name = f"tools o__r@{world.commits[0]}"
            row = world.names("layers")[name]
            assert (row["checkouts"], row["reclaimable_bytes"]) == (1, 0)
            assert row["size_bytes"] >= 2 * 10**6  # the file, and what git records of it
            assert world.names("snapshots") == {}
        world.gc()
        assert world.names("layers")[name]["checkouts"] == 0
        client.remove_layer(kept.id)
        assert world.names("layers") == {}


def test_a_gc_drops_what_is_unused_and_no_more(world: World) -> None:
    """A dry run says the same and changes nothing; held templates, mirrors and rows stay."""
    state = world.daemon.state_dir
    with Client(world.daemon.socket) as client:
        held = [client.checkout("o__r-0"), client.checkout("o__r-1", backend=Backend.POOL)]
        for number in (2, 3):
            client.checkout(f"o__r-{number}").release()
        client.checkout("o__r-4", backend=Backend.POOL).release()
        until(lambda: "warm-trees" in {each.kind for each in client.usage().totals})
        until(lambda: "trash" not in {each.kind for each in client.usage().totals})
        before = disk(state)
        foretold = world.gc(dry_run=True)
        assert disk(state) == before
        dropped = world.gc()
        assert {**dropped, "dry_run": True} == foretold
        assert {each["kind"] for each in dropped["dropped"]} == {"templates", "warm-trees"}
        assert before - disk(state) == pytest.approx(dropped["freed_bytes"], rel=0.2)
        assert world.gc()["dropped"] == []
        kept = {name.partition("@")[2] for name in world.names("templates")}
        assert kept == {*world.commits[:2]}
        for checkout in held:
            checkout.reset()
            assert git(Path(checkout.path), "status", "--porcelain") == ""
        for number in (2, 4):
            with client.checkout(f"o__r-{number}") as again:
                assert git(Path(again.path), "rev-parse", "HEAD") == world.commits[number]


def test_checkouts_that_arrive_during_a_gc_work(world: World) -> None:
    """On both backends; the gc runs all the time."""
    failures: list[object] = []
    over = threading.Event()

    def work(number: int) -> None:
        backend = (Backend.OVERLAY, Backend.POOL)[number % 2]
        try:
            with Client(world.daemon.socket) as client:
                for turn in range(4):
                    at = (number + turn) % len(world.commits)
                    with client.checkout(f"o__r-{at}", backend=backend) as checkout:
                        (Path(checkout.path) / "new").write_text("x")
                        head = git(Path(checkout.path), "rev-parse", "HEAD")
                        assert head == world.commits[at]
                        checkout.reset(f"o__r-{(at + 1) % len(world.commits)}")
                        assert git(Path(checkout.path), "status", "--porcelain") == ""
        except (MirrordError, AssertionError, OSError, subprocess.SubprocessError) as error:
            failures.append(error)

    def collect() -> None:
        while not over.is_set():
            world.gc()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    collector = threading.Thread(target=collect)
    for thread in (*threads, collector):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    collector.join()
    crashes = [line["exception"] for line in world.daemon.log_lines if "exception" in line]
    assert (failures, crashes) == ([], [])


def test_a_crash_in_the_middle_of_a_gc_leaves_nothing_broken(world: World) -> None:
    """The next start removes the trash, and a checkout works; the held one did all the time."""
    with Client(world.daemon.socket) as client:
        held = client.checkout("o__r-0", auto_renew=False)
        for number in range(1, 6):
            client.checkout(f"o__r-{number}").release()
    thread = threading.Thread(target=_ask_for_gc, args=(world.daemon,))
    thread.start()
    while thread.is_alive() and not list(world.daemon.state_dir.glob("templates/*/*/.trash-*")):
        pass
    world.daemon.kill()
    thread.join()
    assert git(Path(held.path), "status", "--porcelain") == ""
    world.daemon.start()
    with Client(world.daemon.socket) as client:
        for number in range(6):
            with client.checkout(f"o__r-{number}") as checkout:
                assert git(Path(checkout.path), "fsck", "--strict") == ""
        client.reset_checkout(held.id)
        world.gc()
        assert "trash" not in {each.kind for each in client.usage().totals}


def _ask_for_gc(running: Daemon) -> None:
    try:
        running.request("POST", "/v1/gc", {})
    except OSError:
        pass


def test_a_member_sees_what_the_own_checkouts_take(world: World) -> None:
    """Nothing of others, of mirrors or templates; a stranger sees nothing; neither may collect."""
    with Client(world.daemon.socket) as client, client.checkout("o__r-0"):
        body = {"instance": "o__r-1"}
        asked: list[tuple[str, str, object]] = []
        asked += [
            ("POST", "checkouts", body),
            ("GET", "usage?verbose=true", None),
            ("POST", "gc", {}),
        ]
        (_, made), (status, usage), (refused, _) = ask_as(
            MEMBER, world.daemon.socket, *asked, groups=[GROUP]
        )
        own = json.loads(made)["id"]
        found = json.loads(usage)
        assert (status, refused) == (200, 403)
        assert [each["kind"] for each in found["totals"]] == ["checkouts"]
        assert [each["name"] for each in found["rows"]] == [own]
        assert found["size_bytes"] == found["rows"][0]["size_bytes"]
        answers = ask_as(NOBODY, world.daemon.socket, asked[1], asked[2])
        assert [status for status, _ in answers] == [403, 403]
