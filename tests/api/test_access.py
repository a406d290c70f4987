"""Access of real uids: recorded commits, owners, visible facts, number and duration of checkouts."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from accounts import accounts
from anyone import NOBODY, ask_as, python
from daemons import Daemon, daemon
from gitrepos import Upstream, git

from mirrord import Client

pytestmark = pytest.mark.root

GROUP = 1  # daemon, on every Debian
MEMBER, AGENT, OTHER = 34501, 34502, 34503
_ACCESS = '[access]\ngroup = "daemon"\n'


class World(NamedTuple):
    """A daemon whose dataset records commits 1 and 2 of five, and the last one as a gold commit."""

    daemon: Daemon
    upstream: Upstream
    commits: list[str]
    hidden: str

    @property
    def mirror(self) -> Path:
        return self.daemon.state_dir / "mirrors" / "o__r"

    def configure(self, *lines: str) -> None:
        """Set these lines of `[access]`, or of the sections that they begin, and take them up."""
        text = f'[upstream]\nurl = "file://{self.upstream.path.parent.parent}/{{owner}}/{{name}}"\n'
        self.daemon.write_config(text + _ACCESS + "".join(f"{line}\n" for line in lines))
        assert self.daemon.request("POST", "/v1/reload")[0] == 200

    def ask(self, uid: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """One request as `uid`; MEMBER is in the group."""
        groups = [GROUP] if uid == MEMBER else []
        ((status, text),) = ask_as(uid, self.daemon.socket, (method, path, body), groups=groups)
        return status, json.loads(text) if text else None

    def checkout(self, uid: int, instance: str = "o__r-1", **request: object) -> tuple[int, Any]:
        return self.ask(uid, "POST", "checkouts", {"instance": instance, **request})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("access")
    upstream = Upstream(root / "o" / "r")
    commits = upstream.history(5)
    upstream.git("tag", "v4", commits[4])
    upstream.git("checkout", "--quiet", "-b", "gone")
    hidden = upstream.commit({"README": "the fix\n"})
    upstream.git("checkout", "--quiet", "main")
    rows = [
        {"instance_id": f"o__r-{n}", "repo": "o/r", "base_commit": commits[n], "patch": "", "test_patch": "",
         "problem_statement": "", "environment_setup_commit": commits[3]}
        for n in (1, 2)
    ]  # fmt: skip
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with daemon(f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n{_ACCESS}') as running:
        with Client(running.socket) as client:
            client.wait(client.import_dataset(root / "rows.jsonl", name="d"))
            upstream.git("branch", "--delete", "--force", "gone")
            client.wait(client.sync_mirror("o/r"))
        yield World(running, upstream, commits, hidden)


@pytest.fixture
def world(made: World) -> Iterator[World]:
    made.configure()
    yield made
    for held in made.daemon.json("GET", "/v1/checkouts"):
        made.daemon.request("DELETE", f"/v1/checkouts/{held['id']}")


def kept_tip(world: World) -> str:
    """A private ref of the mirror to a commit that upstream deleted."""
    return git(
        world.mirror, "for-each-ref", "--format=%(refname)", "refs/mirrord/kept"
    ).splitlines()[0]


# -- which commits ----------------------------------------------------------------------------------------------------


def test_a_member_names_instances_and_their_base_commits(world: World) -> None:
    """By instance, by full id in either case, by abbreviated id; also in a reset."""
    base = world.commits[1]
    asked = ("o__r-1", f"o/r@{base}", f"o__r@{base.upper()}", f"o/r@{base[:9]}")
    answers = [world.checkout(MEMBER, name) for name in asked]
    assert [(status, answer["commit"]) for status, answer in answers] == [(201, base)] * len(asked)
    held = answers[0][1]["id"]
    for onto in ({"instance": "o__r-2"}, {"commit": base}, {"commit": world.commits[2]}, {}):
        assert world.ask(MEMBER, "POST", f"checkouts/{held}/reset", onto)[0] == 200


def test_a_member_is_refused_all_other_commits_in_the_same_words(world: World) -> None:
    """Neither a checkout nor a reset reveals whether a commit, branch, tag or ref exists."""
    held = world.checkout(MEMBER)[1]["id"]
    secret = [
        "main", "v4", "HEAD", world.commits[4], world.commits[3], world.commits[4][:10], f"{world.commits[1]}~1", world.hidden,
        "refs/heads/main", "refs/mirrord/history", "mirrord/history", kept_tip(world),
    ]  # fmt: skip
    absent = [
        "nowhere",
        "v5",
        "ORIG_HEAD",
        "9" * 40,
        "8" * 40,
        "9" * 10,
        f"{'9' * 40}~1",
        "refs/heads/x",
        "refs/mirrord/x",
    ]
    shapes = set()
    for name in (*secret, *absent):
        asked = [
            world.checkout(MEMBER, f"o/r@{name}"),
            world.ask(MEMBER, "POST", "checkouts", {"mirror": "o/r", "commit": name}),
            world.ask(MEMBER, "POST", f"checkouts/{held}/reset", {"commit": name}),
            world.ask(MEMBER, "POST", f"checkouts/{held}/reset", {"instance": f"o__r@{name}"}),
        ]
        for status, answer in asked:
            shapes.add(
                (
                    status,
                    answer["code"],
                    answer["detail"].replace(ascii(name), "NAME"),
                    answer["hint"],
                )
            )
    assert len(shapes) == 1, shapes
    ((status, code, _, hint),) = shapes
    assert (status, code) == (403, "not-allowed")
    assert 'commits = "recorded"' in hint


def test_a_base_commit_is_one_until_its_dataset_is_removed(world: World, tmp_path: Path) -> None:
    """The cache of recorded commits follows imports and removals."""
    late = world.commits[4]
    assert world.checkout(MEMBER, f"o/r@{late}")[0] == 403
    row = {
        "instance_id": "late",
        "repo": "o/r",
        "base_commit": late,
        "patch": "",
        "test_patch": "",
        "problem_statement": "",
    }
    (tmp_path / "late.jsonl").write_text(json.dumps(row) + "\n")
    with Client(world.daemon.socket) as client:
        client.wait(client.import_dataset(tmp_path / "late.jsonl", name="late"))
        assert [world.checkout(MEMBER, f"o/r@{late}")[0] for _ in range(2)] == [201, 201]
        client.remove_dataset("late")
    assert world.checkout(MEMBER, f"o/r@{late}")[0] == 403


def test_with_any_a_member_names_what_upstream_shows(world: World) -> None:
    """Branches, tags and commits that they reach, but not our own refs or commits that only those reach."""
    world.configure('commits = "any"')
    public = [
        "main",
        "v4",
        "HEAD",
        "refs/heads/main~1",
        world.commits[4],
        world.commits[3][:10],
        world.commits[1],
    ]
    for name in (*public, *public):
        status, answer = world.checkout(MEMBER, f"o/r@{name}")
        assert (status, answer["commit"]) == (201, git(world.mirror, "rev-parse", name)), name
    private = [
        "refs/mirrord/history",
        "mirrord/history",
        kept_tip(world),
        "refs/mirrord/x",
        "refs/replace/x",
        "main@{0}",
    ]
    assert [world.checkout(MEMBER, f"o/r@{name}")[1]["code"] for name in private] == [
        "not-allowed"
    ] * len(private)
    unseen = [world.hidden, world.hidden[:12], "9" * 40, "main^{/number}", "nowhere"]
    assert git(world.mirror, "cat-file", "-t", world.hidden) == "commit"
    words = {
        world.checkout(MEMBER, f"o/r@{name}")[1]["detail"].replace(ascii(name), "NAME")
        for name in unseen
    }
    assert words == {
        "cannot resolve commit NAME: no branch or tag of o__r has that name or reaches that id"
    }
    assert world.checkout(MEMBER, f"o/r@{world.commits[1]}^{{/number}}")[0] == 404


def test_an_administrator_names_everything(world: World) -> None:
    """Including private refs and deleted tips, for root."""
    for name in ("main", world.hidden, "refs/mirrord/history"):
        status, _, body = world.daemon.request("POST", "/v1/checkouts", {"instance": f"o/r@{name}"})
        assert status == 201, body


def test_a_member_neither_pins_nor_restores(world: World) -> None:
    """A pin would fetch and keep any commit of upstream."""
    held = world.checkout(MEMBER)[1]["id"]
    asked = [
        ("GET", "pins", None), ("POST", "pins", {"mirror": "o/r", "commit": world.commits[4]}),
        ("DELETE", f"pins/o__r/{world.commits[4]}", None),
        ("POST", f"checkouts/{held}/restore", {"commit": world.commits[3], "paths": ["README"]}),
        ("POST", "checkouts", {"instance": "o__r-1", "view": "grader"}),
    ]  # fmt: skip
    assert [world.ask(MEMBER, *request)[0] for request in asked] == [403] * len(asked)


def test_nothing_a_member_may_read_names_a_later_commit_or_anothers_checkout(world: World) -> None:
    """Calls every GET endpoint of members, after errors that name commits, with a checkout of another uid."""
    assert world.daemon.stop() == 0
    world.daemon.start()  # with the events of this test alone
    others = world.daemon.json("POST", "/v1/checkouts", {"instance": "o__r-2", "owner": OTHER})[
        "id"
    ]
    mine = world.checkout(MEMBER)[1]["id"]
    catalog = world.daemon.state_dir / "catalog.sqlite3"
    fault = json.dumps([{"ref": "refs/heads/x", "commit": world.commits[4], "reason": "damaged"}])
    error = json.dumps(
        {
            "type": "about:blank",
            "title": "t",
            "status": 502,
            "code": "c",
            "detail": f"lost {world.commits[4]}",
        }
    )
    with closing(sqlite3.connect(catalog)) as connection, connection:
        connection.execute("UPDATE mirrors SET ref_faults = ?, error = ?", (fault, error))
    assert world.commits[4] in world.daemon.get("/v1/mirrors")[2].decode()
    paths = ["status", "mirrors", "mirrors/o__r", "datasets", "datasets/d", "datasets/formats", "instances/o__r-1", "checkouts",
             f"checkouts/{mine}", "operations", "events?follow=false&after=0", "openapi.json", "/metrics"]  # fmt: skip
    secrets = [*world.commits[3:], world.hidden, others, str(OTHER)]
    for path in paths:
        ((status, text),) = ask_as(MEMBER, world.daemon.socket, ("GET", path, None), groups=[GROUP])
        assert status == 200, (path, text)
        assert [secret for secret in secrets if secret in text] == [], path
    assert world.ask(MEMBER, "GET", f"checkouts/{others}")[0] == 404


# -- owners -----------------------------------------------------------------------------------------------------------


def test_root_hands_a_checkout_to_a_uid_that_may_use_it_and_nothing_else(world: World) -> None:
    """An owner may use, reset, renew and release its own checkout, but neither make nor move one."""
    taken = world.daemon.json("POST", "/v1/checkouts", {"instance": "o__r-1", "owner": AGENT})
    assert (taken["owner_uid"], taken["taken_by"]) == (AGENT, os.getuid())
    tree = Path(taken["path"])
    assert tree.stat().st_uid == AGENT
    subprocess.run(
        ["sh", "-c", "echo mine > README"],
        cwd=tree,
        user=AGENT,
        group=AGENT,
        extra_groups=[],
        check=True,
    )
    mine = f"checkouts/{taken['id']}"
    ((_, patch),) = ask_as(AGENT, world.daemon.socket, ("GET", f"{mine}/diff", None))
    assert "+mine" in patch
    assert [held["id"] for held in world.ask(AGENT, "GET", "checkouts")[1]] == [taken["id"]]
    assert world.ask(AGENT, "POST", f"{mine}/renew", {"ttl": "1h"})[0] == 200
    refused = [
        ("POST", f"{mine}/reset", {"instance": "o__r-2"}), ("POST", f"{mine}/reset", {"commit": world.commits[1]}),
        ("POST", "checkouts", {"instance": "o__r-1"}), ("GET", "instances/o__r-1", None), ("GET", "mirrors", None),
        ("POST", f"{mine}/restore", {"commit": world.commits[3], "paths": ["README"]}), ("GET", "events?follow=false", None),
    ]  # fmt: skip
    assert [world.ask(AGENT, *request)[0] for request in refused] == [403] * len(refused)
    assert [world.ask(OTHER, method, mine)[0] for method in ("GET", "DELETE")] == [403, 403]
    assert [world.ask(MEMBER, method, mine)[0] for method in ("GET", "DELETE")] == [404, 404]
    assert world.ask(AGENT, "POST", f"{mine}/reset", {})[0] == 200
    assert (tree / "README").read_text() == "number 1\n"
    assert world.ask(AGENT, "DELETE", mine)[0] == 204
    assert world.ask(AGENT, "GET", "checkouts")[0] == 403


def test_the_command_line_works_for_owner_and_asker(world: World) -> None:
    """`checkout --owner` by name or uid; both users may use the path with `diff`, `reset` and `release`."""

    def run(uid: int, *words: str) -> str:
        command = [*python(), "-m", "mirrord", "--socket", str(world.daemon.socket), *words]
        done = subprocess.run(
            command,
            user=uid,
            group=uid,
            extra_groups=[],
            cwd="/",
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    assert Path(run(0, "checkout", "o__r-1", "--owner", "nobody")).stat().st_uid == NOBODY
    tree = run(0, "checkout", "o__r-1", "--owner", str(AGENT))
    script = "echo mine > README"
    subprocess.run(
        ["sh", "-c", script], cwd=tree, user=AGENT, group=AGENT, extra_groups=[], check=True
    )
    assert "+mine" in run(AGENT, "diff", tree)
    assert "+mine" in run(0, "diff", tree)
    assert [run(uid, "reset", tree) for uid in (AGENT, 0)] == [tree, tree]
    assert tree in run(AGENT, "checkouts")
    run(AGENT, "release", tree)
    assert tree not in run(0, "checkouts")


def test_a_graders_checkout_may_be_owned_by_a_plain_uid(world: World) -> None:
    """Tests run as that uid; only the administrator may apply patches and restore commits."""
    taken = world.daemon.json(
        "POST", "/v1/checkouts", {"instance": "o__r-1", "owner": AGENT, "view": "grader"}
    )
    mine = f"checkouts/{taken['id']}"
    assert world.ask(AGENT, "POST", f"{mine}/apply?named=@patch")[0] == 403
    assert (
        world.ask(
            AGENT, "POST", f"{mine}/restore", {"commit": world.commits[3], "paths": ["README"]}
        )[0]
        == 403
    )
    restore = {"commit": world.commits[3], "paths": ["README"]}
    assert world.daemon.request("POST", f"/v1/{mine}/restore", restore)[0] == 200
    assert (Path(taken["path"]) / "README").read_text() == "number 3\n"


@pytest.fixture
def subids() -> Iterator[None]:
    """Write ranges for MEMBER, by uid, to the files that the daemon reads."""
    with accounts(subuid=f"{MEMBER}:200000:10\n{MEMBER}:300000:10", subgid=f"{MEMBER}:400000:15"):
        yield


def test_a_member_asks_for_its_subordinate_uids_and_for_no_others(
    world: World, subids: None
) -> None:
    """The gid is at the same offset of /etc/subgid, or else the member's own."""
    world.configure('owners = "none"')
    assert world.checkout(MEMBER, owner=200003)[0] == 403
    world.configure()
    status, taken = world.checkout(MEMBER, owner=200003)
    assert (status, taken["owner_uid"], taken["taken_by"]) == (201, 200003, MEMBER)
    assert (Path(taken["path"]).stat().st_uid, Path(taken["path"]).stat().st_gid) == (
        200003,
        400003,
    )
    for owner, gid in ((300004, 400014), (300005, MEMBER)):
        assert Path(world.checkout(MEMBER, owner=owner)[1]["path"]).stat().st_gid == gid
    refused = [0, 1, OTHER, 199999, 200010, os.getuid()]
    assert [world.checkout(MEMBER, owner=owner)[0] for owner in refused] == [403] * len(refused)
    assert [world.checkout(MEMBER, owner=owner)[0] for owner in (-1, 2**32 - 1, "root", 1.5)] == [
        400
    ] * 4
    assert world.ask(200003, "GET", f"checkouts/{taken['id']}")[0] == 200
    assert world.checkout(200003)[0] == 403
    assert world.ask(MEMBER, "DELETE", f"checkouts/{taken['id']}")[0] == 204


def test_a_restart_keeps_owner_and_asker_apart(world: World) -> None:
    """The lease's file has both."""
    taken = world.daemon.json("POST", "/v1/checkouts", {"instance": "o__r-1", "owner": AGENT})
    world.daemon.kill()
    world.daemon.start()
    found = world.daemon.json("GET", f"/v1/checkouts/{taken['id']}")
    assert (found["owner_uid"], found["taken_by"]) == (AGENT, os.getuid())
    assert world.ask(AGENT, "DELETE", f"checkouts/{taken['id']}")[0] == 204


# -- how many, and for how long -----------------------------------------------------------------------------------------


def test_one_uid_has_so_many_checkouts(world: World, subids: None) -> None:
    """Taken and owned checkouts count; root is admitted, also for that uid."""
    world.configure("max_per_user = 3")
    held = [world.checkout(MEMBER, owner=owner)[1]["id"] for owner in (MEMBER, 200001, 200001)]
    status, answer = world.checkout(MEMBER)
    assert (status, answer["code"], answer["max"], answer["uid"]) == (
        503,
        "too-many-checkouts",
        3,
        MEMBER,
    )
    for owner in (MEMBER, os.getuid()):
        assert (
            world.daemon.request("POST", "/v1/checkouts", {"instance": "o__r-1", "owner": owner})[0]
            == 201
        )
    assert world.ask(MEMBER, "DELETE", f"checkouts/{held[1]}")[0] == 204
    assert world.checkout(MEMBER)[0] == 503  # root's gift counts
    assert world.ask(MEMBER, "DELETE", f"checkouts/{held[0]}")[0] == 204
    assert world.checkout(MEMBER)[0] == 201


def test_one_uid_asks_so_often_a_second(world: World) -> None:
    """The refusal has a time to retry, and the client does; root is not refused."""
    world.configure("rate_per_user = 2")
    asked = [("GET", "checkouts", None)] * 40
    answers = ask_as(MEMBER, world.daemon.socket, *asked, groups=[GROUP])
    refused = [json.loads(text) for status, text in answers if status == 429]
    assert {answer["code"] for answer in refused} == {"too-many-requests"}
    assert all(0 < answer["retry_after"] <= 0.5 for answer in refused)
    assert {world.daemon.request("GET", "/v1/checkouts")[0] for _ in range(12)} == {200}
    patient = "import sys; from mirrord import Client; client = Client(sys.argv[1]);"
    patient += "print([client.list_checkouts() for _ in range(4)])"
    command = [*python(), "-c", patient, str(world.daemon.socket)]
    done = subprocess.run(
        command, user=MEMBER, group=MEMBER, extra_groups=[GROUP], check=True, capture_output=True
    )
    assert done.stdout == b"[[], [], [], []]\n"


def test_root_gets_in_where_members_hold_all_there_are(world: World) -> None:
    """For administrators, `checkouts.max` counts administrators' checkouts only."""
    world.configure("[checkouts]", "max = 2")
    assert [world.checkout(MEMBER)[0] for _ in range(3)] == [201, 201, 503]
    root = [
        world.daemon.request("POST", "/v1/checkouts", {"instance": "o__r-1"})[0] for _ in range(3)
    ]
    assert root == [201, 201, 503]


def test_a_member_holds_no_checkout_longer_than_the_longest(world: World) -> None:
    """Neither a new lease nor a renewal; the refusal names the limit. The default ttl is reduced to it; root is exempt."""
    world.configure('ttl_max = "1h"')
    status, answer = world.checkout(MEMBER, ttl="366d")
    assert (status, answer["code"], answer["max_s"]) == (400, "invalid-request", 3600)
    assert "1h is the longest" in answer["detail"]
    held = world.checkout(MEMBER, ttl="1h")[1]
    default = world.checkout(MEMBER)[1]
    assert (
        world.ask(MEMBER, "POST", f"checkouts/{held['id']}/renew", {"ttl": 3601})[1]["code"]
        == "invalid-request"
    )
    for lease in (held, default, world.ask(MEMBER, "POST", f"checkouts/{held['id']}/renew", {})[1]):
        assert (
            lease["expires_at"]
            <= world.daemon.json("POST", f"/v1/checkouts/{held['id']}/renew", {"ttl": "61m"})[
                "expires_at"
            ]
        )
    assert (
        world.daemon.request("POST", "/v1/checkouts", {"instance": "o__r-1", "ttl": "300d"})[0]
        == 201
    )
