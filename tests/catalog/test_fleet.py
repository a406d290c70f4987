"""Claims, generations, nodes and changes of a fleet, on SQLite and on a real PostgreSQL."""

# ruff: noqa: F811 - fixtures

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from catalog.test_catalog import NOW, commit, place, server  # noqa: F401
from sqlalchemy import update
from waiting import BOUND_S

from mirrord.catalog import (
    Claim,
    Generation,
    MirrorRow,
    PinRow,
    changes,
    claims,
    clock,
    fleet,
    mirrors,
    schema,
)
from mirrord.catalog.database import Database, prepare
from mirrord.model import MirrorName

pytestmark = pytest.mark.slow

TTL = timedelta(seconds=20)
BRIEF = timedelta(milliseconds=1)
HOUR = timedelta(hours=1)
NOTHING = timedelta()


@pytest.fixture
def database(place: str | Path) -> Iterator[Database]:
    with closing(Database(place, timedelta(seconds=10))) as found:
        prepare(found)
        yield found


def enrol(database: Database, *names: str, host: str = "") -> None:
    with database.write() as connection:
        for name in names:
            row = MirrorRow(MirrorName("o", name), f"https://example.com/o/{name}", NOW)
            mirrors.put_mirror(connection, row)
        claims.enrol(connection, {f"mirror/o__{name}": host for name in names})


def claim(
    database: Database, node: str, key: str, ttl: timedelta = TTL, limit: int | None = None
) -> Claim | None:
    with database.write() as connection:
        return claims.claim(connection, node, key, ttl, limit)


def claim_due(
    database: Database, node: str, *here: str, most: int = 100, patience: timedelta = NOTHING
) -> list[str]:
    with database.write() as connection:
        keys = [key if "/" in key else f"mirror/{key}" for key in here]
        found = claims.claim_due(connection, node, TTL, most=most, local=keys, grace=patience)
    return sorted(each.key.removeprefix("mirror/o__") for each in found)


def publish(database: Database, node: str, new: tuple[int, int], before: Generation | None) -> bool:
    with database.write() as connection:
        generation = Generation(*new, f"{new[0]:064x}")
        return fleet.publish_generation(connection, node, "o__a", generation, before)


# -- claims ----------------------------------------------------------------------------------------


def test_one_node_has_a_claim_until_it_expires_and_each_taking_is_an_epoch(
    database: Database,
) -> None:
    first = claim(database, "n1", "store/gc", BRIEF)
    assert first == Claim("store/gc", 1)
    time.sleep(0.02)
    second = claim(database, "n2", "store/gc")
    assert second == Claim("store/gc", 2)
    assert claim(database, "n1", "store/gc") is None
    with database.write() as connection:
        claims.release(connection, "n1", [first])  # no longer theirs: nothing happens
    assert claim(database, "n1", "store/gc") is None
    with database.write() as connection:
        claims.release(connection, "n2", [second])
    assert claim(database, "n1", "store/gc") == Claim("store/gc", 3)


def test_a_claim_that_expired_is_prolonged_while_nobody_took_it(database: Database) -> None:
    claim(database, "n1", "a", BRIEF)
    claim(database, "n1", "b", BRIEF)
    time.sleep(0.02)
    claim(database, "n2", "b")
    claim(database, "n1", "c", BRIEF)
    with database.write() as connection:
        assert claims.renew(connection, "n1", TTL, ["a", "b"]) == {Claim("a", 1)}
    assert claim(database, "n2", "a") is None
    with database.read() as connection:
        held = {each.key: (each.node, each.epoch) for each in claims.list_claims(connection)}
        assert held == {"a": ("n1", 1), "b": ("n2", 2)}
        holder = claims.find_holder(connection, "a")
        assert holder is not None
        assert 0 < holder.left_s <= 20
        assert claims.find_holder(connection, "c") is None


def test_due_mirrors_are_claimed_once_and_due_again_after_their_time(database: Database) -> None:
    enrol(database, "a", "b", "c")
    assert claim_due(database, "n1", "o__a", "o__b", "o__c", most=2) == ["a", "b"]
    assert claim_due(database, "n2", "o__a", "o__b", "o__c") == ["c"]
    with database.write() as connection:
        claims.release(connection, "n1", [Claim("mirror/o__a", 1)], HOUR)
        claims.release(connection, "n1", [Claim("mirror/o__b", 1)], NOTHING, has_failed=True)
    assert claim_due(database, "n2", "o__a", "o__b", "o__c") == ["b"]
    with database.write() as connection:
        assert claims.count_failures(connection, "mirror/o__b") == 1
        claims.hasten(connection, NOTHING)
    assert claim_due(database, "n2", "o__a", "o__b", "o__c") == ["a"]


def test_what_is_not_on_the_disk_is_left_to_others_for_a_while(database: Database) -> None:
    enrol(database, "a", "b")
    with database.write() as connection:  # due now, not for 50 years
        claims.release(connection, "n2", [])
        connection.execute(update(schema.claims).values(due_ms=clock.clock_ms()))
    assert claim_due(database, "n1", "o__b", patience=HOUR) == ["b"]
    assert claim_due(database, "n1", "o__b", patience=HOUR) == []
    assert claim_due(database, "n1") == ["a"]


def test_a_repair_waits_for_who_has_the_mirror_and_is_done_once(database: Database) -> None:
    with database.write() as connection:
        claims.enrol(connection, {"repair/o__a": ""})
        claims.enrol(connection, {"repair/o__a": ""})
    assert claim_due(database, "n1", "o__a") == []
    assert claim_due(database, "n2", "repair/o__a") == ["repair/o__a"]
    with database.write() as connection:
        claims.finish(connection, Claim("repair/o__a", 0))  # of an earlier claim
        assert claims.find_holder(connection, "repair/o__a")
        claims.finish(connection, Claim("repair/o__a", 1))
    assert claim_due(database, "n2", "repair/o__a") == []


def test_a_removed_mirror_is_not_due_and_its_epochs_go_on_when_it_is_back(
    database: Database,
) -> None:
    enrol(database, "a")
    assert claim_due(database, "n1", "o__a") == ["a"]
    with database.write() as connection:
        claims.release(connection, "n1", [Claim("mirror/o__a", 1)])
        mirrors.delete_mirror(connection, "o__a")
    assert claim_due(database, "n1", "o__a") == []
    enrol(database, "a")
    assert claim(database, "n1", "mirror/o__a") == Claim("mirror/o__a", 2)


def test_what_is_due_of_a_host_is_of_one_node_and_requests_have_one_place_beside_it(
    database: Database,
) -> None:
    enrol(database, "a", "b", "c", "d", "e", host="example.com")
    enrol(database, "x", host="other.org")
    assert claim_due(database, "n1", most=2) == ["a", "b"]
    assert claim_due(database, "n2") == ["x"]
    assert claim(database, "n2", "mirror/o__c", limit=1) is None  # the batch needs the one
    assert claim(database, "n2", "mirror/o__c", limit=4)
    assert claim(database, "n3", "mirror/o__d", limit=4) is None
    assert claim_due(database, "n1") == ["d", "e"]  # the same node goes on


def test_requests_of_all_nodes_together_keep_the_limit_of_a_host(database: Database) -> None:
    enrol(database, "a", "b", "c", "d", host="example.com")
    assert claim(database, "n1", "mirror/o__a", limit=2)
    assert claim(database, "n2", "mirror/o__b", limit=2)
    assert claim(database, "n3", "mirror/o__c", limit=2) is None
    assert claim_due(database, "n3") == []  # a batch would come on top
    with database.write() as connection:
        claims.release(connection, "n1", [Claim("mirror/o__a", 1)], HOUR)
    assert claim(database, "n3", "mirror/o__c", limit=2)


def run_at_once(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_nodes_that_claim_at_once_never_share_a_mirror(
    place: str | Path,
    database: Database,
) -> None:
    names = [f"r{number:03}" for number in range(60)]
    enrol(database, *names)
    taken: list[str] = []

    def work(number: int) -> None:
        with closing(Database(place)) as mine:
            while found := claim_due(mine, f"n{number}", most=7):
                taken.extend(found)

    run_at_once(4, work)
    assert sorted(taken) == names


def test_nodes_that_claim_at_once_keep_the_hosts_apart(
    place: str | Path,
    database: Database,
) -> None:
    for host in ("a", "b", "c"):
        enrol(database, *(f"{host}{number}" for number in range(9)), host=host)
    owners: dict[str, set[int]] = {}

    def work(number: int) -> None:
        with closing(Database(place)) as mine:
            for _ in range(8):
                for name in claim_due(mine, f"n{number}", most=2):
                    owners.setdefault(name[0], set()).add(number)

    run_at_once(4, work)
    assert {host: len(nodes) for host, nodes in owners.items()} == {"a": 1, "b": 1, "c": 1}


# -- generations -----------------------------------------------------------------------------------


def test_a_generation_is_published_by_the_holder_of_its_epoch_on_the_one_before(
    database: Database,
) -> None:
    enrol(database, "a")
    assert not publish(database, "n1", (1, 1), None)  # without a claim
    claim(database, "n1", "mirror/o__a")
    assert not publish(database, "n2", (1, 1), None)
    assert not publish(database, "n1", (2, 1), None)
    assert publish(database, "n1", (1, 1), None)
    first = Generation(1, 1, f"{1:064x}")
    assert not publish(database, "n1", (1, 2), None)  # built on nothing
    assert publish(database, "n1", (1, 2), first)
    assert not publish(database, "n1", (1, 3), first)  # built on an older one
    with database.read() as connection:
        found = fleet.list_generations(connection)
        assert found == {"o__a": Generation(1, 2, f"{1:064x}")}
        assert fleet.list_generations(connection, ["o__b"]) == {}


def test_a_generation_of_the_store_is_adopted_and_later_ones_come_after_it(
    database: Database,
) -> None:
    """A claim with a lower epoch is lost; a newer generation stays."""

    def adopt(epoch: int, number: int) -> Generation | None:
        with database.write() as connection:
            found = Generation(epoch, number, f"{epoch:064x}")
            fleet.adopt_generation(connection, "n2", "o__a", found)
        with database.read() as connection:
            return fleet.list_generations(connection).get("o__a")

    enrol(database, "a")
    claim(database, "n1", "mirror/o__a")
    seventh = Generation(7, 3, f"{7:064x}")
    assert adopt(7, 3) == seventh
    assert not publish(database, "n1", (1, 1), None)
    with database.write() as connection:
        assert claims.renew(connection, "n1", TTL, ["mirror/o__a"]) == set()
    assert claim(database, "n1", "mirror/o__a") == Claim("mirror/o__a", 8)
    assert (adopt(7, 3), adopt(7, 2), adopt(6, 9)) == (seventh, seventh, seventh)
    assert publish(database, "n1", (8, 4), seventh)  # it kept its claim
    assert adopt(7, 9) == Generation(8, 4, f"{8:064x}")


def test_a_holder_that_slept_past_its_lease_publishes_nothing(database: Database) -> None:
    enrol(database, "a")
    claim(database, "n1", "mirror/o__a", BRIEF)
    time.sleep(0.02)
    claim(database, "n2", "mirror/o__a")
    assert not publish(database, "n1", (1, 1), None)
    assert publish(database, "n2", (2, 1), None)


def test_a_publication_and_a_takeover_at_once_are_one_after_the_other(
    place: str | Path,
    database: Database,
) -> None:
    """In any order, nothing of the old epoch is published after the new one began."""
    enrol(database, "a")
    claim(database, "n1", "mirror/o__a", BRIEF)
    time.sleep(0.02)
    entered, go_on = threading.Event(), threading.Event()
    seen: list[object] = []

    def publisher() -> None:
        with closing(Database(place)) as mine, mine.write() as connection:
            new = Generation(1, 1, "0" * 64)
            seen.append(fleet.publish_generation(connection, "n1", "o__a", new, None))
            entered.set()
            go_on.wait(BOUND_S)

    def taker() -> None:
        entered.wait(BOUND_S)
        threading.Timer(0.2, go_on.set).start()
        with closing(Database(place)) as mine:
            seen.append(claim(mine, "n2", "mirror/o__a"))  # waits for the publication
            with mine.read() as connection:
                seen.append(fleet.list_generations(connection))

    run_at_once(2, lambda number: (publisher, taker)[number]())
    assert seen == [True, Claim("mirror/o__a", 2), {"o__a": Generation(1, 1, "0" * 64)}]


# -- changes, nodes, templates, a fresh database ---------------------------------------------------


def test_others_learn_what_changed_since_they_looked(database: Database) -> None:
    def changed(since: int) -> tuple[int, list[str]]:
        with database.read() as connection:
            return changes.list_changes(connection, since)

    if database.is_sqlite:
        enrol(database, "a")
        assert changed(0) == (0, [])  # of one daemon there are no others
        return
    begin, _ = changed(0)
    enrol(database, "a")
    after, topics = changed(begin)
    assert topics == ["mirrors"]
    with database.write() as connection:
        mirrors.put_pins(connection, [PinRow(MirrorName("o", "a"), commit(1), "person/0", "", NOW)])
    claim(database, "n1", "mirror/o__a")
    publish(database, "n1", (1, 1), None)
    newest, topics = changed(after)
    assert topics == ["pins/o__a", "mirror/o__a"]
    assert changed(newest) == (newest, [])


def test_no_change_is_missed_when_transactions_end_in_another_order(
    place: str | Path,
    database: Database,
) -> None:
    """A reader that has seen a version has seen all before it."""
    if database.is_sqlite:
        pytest.skip("has one writer")
    seen: set[str] = set()
    done = threading.Event()

    def reader() -> None:
        version, is_last = 0, False
        while not is_last:
            is_last = done.is_set()
            with database.read() as connection:
                version, topics = changes.list_changes(connection, version)
            seen.update(topics)

    def writer(number: int) -> None:
        with closing(Database(place)) as mine:
            for turn in range(25):
                with mine.write() as connection:
                    changes.note_changes(connection, f"t{number}-{turn}")

    follower = threading.Thread(target=reader)
    follower.start()
    run_at_once(4, writer)
    done.set()
    follower.join()
    assert len(seen) == 100


def test_nodes_are_listed_with_their_age_and_forgotten(database: Database) -> None:
    with database.write() as connection:
        fleet.put_node(connection, "n1", "host1", "1.0", {"mirrors": 3})
        fleet.put_node(connection, "n1", "host1", "1.1", {"mirrors": 4})
        fleet.put_node(connection, "n2", "host2", "1.1", {})
        claims.claim(connection, "n1", "a", TTL)
    with database.read() as connection:
        found = {node.id: node for node in fleet.list_nodes(connection)}
    assert {node.id: (node.name, node.version, node.document) for node in found.values()} == {
        "n1": ("host1", "1.1", {"mirrors": 4}), "n2": ("host2", "1.1", {}),
    }  # fmt: skip
    assert all(0 <= node.age_s < 60 for node in found.values())
    with database.write() as connection:
        fleet.delete_node(connection, "n1")
        assert [node.id for node in fleet.list_nodes(connection)] == ["n2"]
        assert claims.list_claims(connection) == []


def test_unchanged_mirrors_are_recorded_in_one_statement(database: Database) -> None:
    enrol(database, "a", "b", "c")
    with database.write() as connection:
        mirrors.update_mirror(connection, "o__a", error={"code": "x"})
        mirrors.record_unchanged(connection, ["o__a", "o__b"], NOW)
        rows = {row.name.name: row for row in mirrors.list_mirrors(connection)}
    assert (rows["a"].synced_at, rows["a"].attempted_at, rows["a"].error) == (NOW, NOW, None)
    assert rows["b"].synced_at == NOW
    assert rows["c"].synced_at is None


def test_daemons_that_find_an_empty_database_at_once_make_one_catalog(
    place: str | Path,
) -> None:
    if isinstance(place, Path):
        pytest.skip("has one daemon")

    def work(_: int) -> None:
        with closing(Database(place)) as mine:
            assert prepare(mine) is False

    run_at_once(4, work)
