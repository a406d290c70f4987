"""Two views, no third door: what answers a task reaches no member, agent or stranger by any way.

Every secret field of a row holds a canary. A daemon imports such rows of many formats, then every
route of the API, every event, file, process and mount that an ordinary uid can see is searched.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import canaries
import pytest
from anyone import BARE_PYTHON, ask_as
from canaries import Canaries
from daemons import Daemon, daemon
from gitrepos import Upstream, git

from mirrord import Client
from mirrord.api.table import ENDPOINTS
from mirrord.model import CommitId, View

pytestmark = pytest.mark.root

GROUP = 1  # daemon, on every Debian
MEMBER, AGENT, STRANGER, GRADER = 34551, 34552, 34553, 34554
_QUOTING = {"operation.finished", "dataset.refused", "dataset.mirror_failed"}
"""Lines of the log that quote rows and commits: of imports, for administrators."""


@dataclass
class World:
    daemon: Daemon
    upstream: Upstream
    secrets: Canaries
    tasks: list[Task]
    mine: dict[str, Any]
    theirs: dict[str, Any]
    graded: dict[str, Any]

    def ask(self, uid: int, *requests: tuple[str, str, object]) -> list[tuple[int, str]]:
        groups = [GROUP] if uid == MEMBER else []
        return ask_as(uid, self.daemon.socket, *requests, groups=groups)

    def search(self, uid: int, *roots: Path | str) -> dict[str, Any]:
        """What this uid finds in files below these places."""
        source = Path(canaries.__file__).read_text()
        done = subprocess.run(
            [BARE_PYTHON, "-c", source],
            input=json.dumps([self.secrets.patterns, [str(root) for root in roots]]),
            user=uid,
            group=uid,
            extra_groups=[GROUP] if uid == MEMBER else [],
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


# -- rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fix:
    """A gold commit on a branch of its own, beside the base commit, and what rows say of it.

    `NEWS` is in this commit alone; `source` is what the patch makes of `src/mod0.py`.
    """

    kind: str
    gold: str
    source: str
    patch: str
    test_patch: str
    failing: list[str]
    passing: list[str]


@dataclass
class Task:
    """A row. `secret` is a commit that it records besides the base, `public` the id members see."""

    fix: Fix
    row: dict[str, Any]
    secret: str
    public: str = ""

    @property
    def id(self) -> str:
        return str(self.row["instance_id"])

    @property
    def dataset(self) -> str:
        return self.fix.kind


class Author:
    """Writes an upstream, and rows of each format with a canary in each field that is a secret."""

    def __init__(self, upstream: Upstream, base: str, later: str, secrets: Canaries) -> None:
        self.upstream, self.base, self.later, self.secrets = upstream, base, later, secrets

    def fix(self, kind: str) -> Fix:
        git, plant = self.upstream.git, self.secrets.plant
        git("checkout", "--quiet", "-b", f"fix-{kind}", self.base)
        source = f"value = '{plant(f'{kind}: patch')}'\n"
        test = f"assert '{plant(f'{kind}: test patch')}'\n"
        gold = self.upstream.commit(
            {
                "src/mod0.py": source,
                f"tests/test_{kind}.py": test,
                "NEWS": plant(f"{kind}: content of the gold commit"),
            },
            plant(f"{kind}: message of the gold commit"),
        )
        git("checkout", "--quiet", "main")
        self.secrets.plant_commit(f"{kind}: gold commit", gold)
        patch, test_patch = (
            git("diff", self.base, gold, "--", place) + "\n" for place in ("src", "tests")
        )
        failing, passing = (
            [f"tests/test_{kind}.py::{plant(f'{kind}: {name}')}"]
            for name in ("fail to pass", "pass to pass")
        )
        return Fix(kind, gold, source, patch, test_patch, failing, passing)

    def extras(self, kind: str, *names: str) -> dict[str, str]:
        names = (*names, "problem_statement", "hints_text", "unknown_column")
        return {name: self.secrets.plant(f"{kind}: {name}") for name in names}

    def shared(self, fix: Fix, identity: str, *extras: str) -> dict[str, Any]:
        """The columns that most formats have."""
        return {
            "instance_id": identity,
            "repo": "o/r",
            "base_commit": self.base,
            "patch": fix.patch,
            "test_patch": fix.test_patch,
            "FAIL_TO_PASS": fix.failing,
            "PASS_TO_PASS": fix.passing,
            "created_at": "2021-01-01T00:00:00Z",
            **self.extras(fix.kind, *extras),
        }

    def classic(self, kind: str = "swe-bench") -> Task:
        fix = self.fix(kind)
        row = self.shared(fix, f"o__r-{kind}") | {"environment_setup_commit": self.later}
        row |= {name: json.dumps(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        return Task(fix, row, self.later)

    def rebench(self) -> Task:
        """Whose id ends in the commit that its environment is set up at."""
        fix = self.fix("swe-rebench")
        row = self.shared(fix, f"o__r-{self.later[:12]}", "install_config")
        row |= {"environment_setup_commit": self.later, "FAIL_TO_FAIL": fix.failing}
        return Task(fix, row, self.later)


AUTHORS: tuple[Callable[[Author], Task], ...] = (Author.classic, Author.rebench)


# -- the world ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("views")
    root.chmod(0o700)
    secrets = Canaries()
    upstream = Upstream(root / "o" / "r")
    commits = upstream.history(3)
    later = upstream.commit({"NEWS": secrets.plant("content after the base commit")})
    secrets.plant_commit("environment setup commit", later)
    author = Author(upstream, commits[1], later, secrets)
    tasks = [write(author) for write in AUTHORS]
    with daemon(start=False, environment={"PATH": str(root / "bin")}) as made:
        made.write_config(
            f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[access]\ngroup = "daemon"\n'
        )
        _record_commands(root / "bin", made.root / "commands")
        made.start()
        made.log_path.chmod(0o600)
        with Client(made.socket) as client:
            for task in tasks:
                _import(client, root, task.dataset, [task.row])
            _import_broken(client, root, made, author)
            yield _use(World(made, upstream, secrets, tasks, {}, {}, {}), client)
            for held in client.list_checkouts():
                client.release_checkout(held.id)


def _record_commands(directory: Path, log: Path) -> None:
    """Every git of the daemon writes its arguments down first: all users can read those in /proc."""
    directory.mkdir()
    directory.parent.chmod(0o711)
    (directory / "git").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "git $*" >>{log}\nPATH=/usr/bin:/bin exec git "$@"\n'
    )
    (directory / "git").chmod(0o755)
    for name in ("setpriv", "prlimit", "nice", "ionice", "env"):
        (directory / name).symlink_to(f"/usr/bin/{name}")


def _import(client: Client, root: Path, name: str, rows: list[dict[str, Any]]) -> None:
    file = root / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    client.wait(client.import_dataset(file, name=name))


def _import_broken(client: Client, root: Path, running: Daemon, author: Author) -> None:
    """Rows with faults that quote them, and a commit that nobody has; a file of only such rows."""
    good = author.classic("broken").row
    lost = hashlib.sha1(b"a commit that upstream lost").hexdigest()
    author.secrets.plant_commit("broken: lost commit", lost)
    gold = author.fix("faulty").gold
    faulty = [
        {**good, "instance_id": f"o__r-{gold} ", "base_commit": gold},
        {**good, "instance_id": f"o__r-{gold}", "base_commit": gold[:12]},
        {**good, "instance_id": "o__r-3", "patch": [author.secrets.plant("faulty: patch")]},
        {**good, "instance_id": "o__r-4", "repo": author.secrets.plant("faulty: repo")},
    ]
    lacking = {**good, "instance_id": f"o__r-{lost}", "environment_setup_commit": lost}
    _import(client, root, "broken", [{**good, "instance_id": "o__r-2"}, lacking, *faulty])
    watched = running.state_dir / "datasets"
    (watched / "watched.jsonl").write_text("".join(json.dumps(row) + "\n" for row in faulty))
    deadline = time.monotonic() + 30
    while not any("watched" in text for text in client.health().reasons):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _use(world: World, client: Client) -> World:
    """Do everything once that leaves traces, as harnesses and operators do."""
    for task in world.tasks:
        row = client.get_instance(task.id, view=View.GRADER)
        task.public = getattr(row, "public_id", None) or row.id
        grader = client.checkout(task.id, view=View.GRADER, owner=GRADER)
        grader.apply("@patch")
        grader.apply("@test_patch")
        grader.restore(task.secret, "NEWS")
        grader.receipt()
        grader.reset()
    first = world.tasks[0]
    client.wait(client.start_audit())
    world.theirs = client.checkout(first.id, owner=AGENT).lease.to_json()
    asked = [("POST", "checkouts", {"instance": task.id}) for task in world.tasks]
    made = [json.loads(text) for _, text in world.ask(MEMBER, *asked)]
    world.mine = made[-1]
    for task, mine in zip(world.tasks, made, strict=True):
        client.get_checkout(mine["id"])
        client.grade_checkout(mine["id"], owner=GRADER)
        world.ask(
            MEMBER,
            ("POST", f"checkouts/{mine['id']}/reset", {"instance": task.id}),
            ("POST", f"checkouts/{mine['id']}/snapshots", {"name": "s"}),
            ("POST", f"checkouts/{mine['id']}/fork", {}),
            ("POST", f"checkouts/{mine['id']}/reset", {"to": "s"}),
        )
    world.graded = client.grade(first.id, first.fix.patch.encode(), owner=GRADER).lease.to_json()
    deadline = time.monotonic() + 30
    while any(each.state == "running" for each in client.list_operations()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return world


# -- the doors ----------------------------------------------------------------------------------------


def requests(world: World) -> dict[tuple[str, str], list[tuple[str, object]]]:
    """What is asked of each route: everything that an agent might try."""
    ids = [identity for task in world.tasks for identity in (task.id, task.public)]
    commits = [task.secret for task in world.tasks]
    mine, held = world.mine, [world.mine["id"], world.theirs["id"], world.graded["id"]]
    spare = json.loads(world.ask(MEMBER, ("POST", "checkouts", {"instance": ids[0]}))[0][1])["id"]
    base = world.tasks[0].row["base_commit"]
    receipts = world.ask(MEMBER, ("GET", f"checkouts/{mine['id']}/receipt", None))
    receipt = json.loads(receipts[0][1])

    def each(path: str, *bodies: object) -> list[tuple[str, object]]:
        return [(path.replace("ID", identity), body) for identity in held for body in bodies]

    return {
        ("GET", "/v1/health"): [("health", None)],
        ("GET", "/v1/status"): [("status", None)],
        ("GET", "/v1/config"): [("config", None)],
        ("POST", "/v1/reload"): [("reload", {})],
        ("GET", "/v1/usage"): [("usage", None), ("usage?verbose=true", None)],
        ("POST", "/v1/gc"): [("gc", {}), ("gc", {"dry_run": True})],
        ("GET", "/v1/mirrors"): [("mirrors", None)],
        ("POST", "/v1/mirrors"): [("mirrors", {"repo": "o/r"}), ("mirrors", {"repo": 1})],
        ("GET", "/v1/mirrors/{name}"): [("mirrors/o__r", None), ("mirrors/o%2Fr", None)],
        ("DELETE", "/v1/mirrors/{name}"): [("mirrors/o__r", None)],
        ("POST", "/v1/mirrors/{name}/sync"): [("mirrors/o__r/sync", {})],
        ("GET", "/v1/mirrors/{name}/refs/log"): [("mirrors/o__r/refs/log", None)],
        ("GET", "/v1/mirrors/{name}/refs/diff"): [("mirrors/o__r/refs/diff?a=1&b=2", None)],
        ("POST", "/v1/mirrors/{name}/refs/restore"): [("mirrors/o__r/refs/restore", {"at": "1"})],
        ("GET", "/v1/mirrors/{name}/bundle"): [("mirrors/o__r/bundle", None)],
        ("POST", "/v1/bundles"): [("bundles", {})],
        ("GET", "/v1/pins"): [("pins", None), ("pins?mirror=o/r", None)],
        ("POST", "/v1/pins"): [("pins", {"mirror": "o/r", "commit": base})],
        ("DELETE", "/v1/pins/{name}/{commit}"): [(f"pins/o__r/{base}", None)],
        ("GET", "/v1/datasets"): [("datasets", None)],
        ("POST", "/v1/datasets"): [("datasets?name=x", {})],
        ("GET", "/v1/datasets/formats"): [("datasets/formats", None)],
        ("GET", "/v1/datasets/{name}"): [
            (f"datasets/{name}", None)
            for name in (*(task.dataset for task in world.tasks), "broken", "absent")
        ],
        ("DELETE", "/v1/datasets/{name}"): [("datasets/swe-bench", None)],
        ("GET", "/v1/instances"): [("instances", None), ("instances?dataset=swe-bench", None)],
        ("GET", "/v1/instances/{id}"): [
            (f"instances/{identity}{query}", None)
            for identity in (*ids, "absent")
            for query in ("", "?view=grader", "?dataset=swe-bench", "?view=x")
        ],
        ("GET", "/v1/audits"): [("audits", None)],
        ("POST", "/v1/audits"): [("audits", {"level": "quick"})],
        ("GET", "/v1/audits/{id}"): [("audits/x", None)],
        ("POST", "/v1/heals"): [("heals", {})],
        ("POST", "/v1/mirrors/{name}/heal"): [("mirrors/o__r/heal", {})],
        ("GET", "/v1/checkouts"): [("checkouts", None)],
        ("POST", "/v1/checkouts"): [
            ("checkouts", {"instance": identity, **more})
            for identity in (*ids, *(f"o/r@{commit}" for commit in commits), f"o/r@{base}")
            for more in ({}, {"view": "grader"}, {"history": "sealed"}, {"dataset": "swe-bench"})
        ],
        ("GET", "/v1/checkouts/{id}"): each("checkouts/ID", None),
        ("POST", "/v1/checkouts/{id}/reset"): each(
            "checkouts/ID/reset", {}, *({"instance": identity} for identity in ids),
            *({"commit": commit} for commit in commits), {"to": "s"}, {"to": "graded"},
        ),
        ("POST", "/v1/checkouts/{id}/fork"): each("checkouts/ID/fork", {}, {"snapshot": "s"}),
        ("GET", "/v1/checkouts/{id}/snapshots"): each("checkouts/ID/snapshots", None),
        ("POST", "/v1/checkouts/{id}/snapshots"): each("checkouts/ID/snapshots", {}),
        ("DELETE", "/v1/checkouts/{id}/snapshots/{name}"): each("checkouts/ID/snapshots/s1", None),
        ("POST", "/v1/checkouts/{id}/renew"): each("checkouts/ID/renew", {}),
        ("GET", "/v1/checkouts/{id}/diff"): each("checkouts/ID/diff", None),
        ("GET", "/v1/checkouts/{id}/receipt"): each("checkouts/ID/receipt", None),
        ("POST", "/v1/checkouts/{id}/apply"): each("checkouts/ID/apply?named=@patch", None)
        + each("checkouts/ID/apply?named=@test_patch&reverse=true", None),
        ("POST", "/v1/checkouts/{id}/restore"): [
            request
            for commit in (*commits, "gold", base)
            for request in each("checkouts/ID/restore", {"commit": commit, "paths": ["NEWS"]})
        ],
        ("POST", "/v1/checkouts/{id}/grade"): each("checkouts/ID/grade", {}),
        ("POST", "/v1/grades"): [(f"grades?instance={identity}", {}) for identity in ids],
        ("POST", "/v1/receipts/verify"): [
            ("receipts/verify", {**receipt, **more})
            for identity in ids
            for more in ({"instance": identity}, {"instance": identity, "commit": "9" * 40})
        ],
        ("GET", "/v1/operations"): [("operations", None)],
        ("GET", "/v1/operations/{id}"): [("operations/x", None)],
        ("DELETE", "/v1/operations/{id}"): [("operations/x", None)],
        ("GET", "/v1/events"): [("events?follow=false&after=0", None)],
        ("GET", "/v1/openapi.json"): [("openapi.json", None)],
        ("GET", "/metrics"): [("/metrics", None)],
        ("DELETE", "/v1/checkouts/{id}"): [
            (f"checkouts/{identity}", None) for identity in (spare, world.graded["id"], "a" * 16)
        ],
    }  # fmt: skip


def test_every_route_is_walked(world: World) -> None:
    """A new route fails here until `requests` says how an agent would try it."""
    assert set(requests(world)) == {(each.method, each.path) for each in ENDPOINTS}


@pytest.mark.parametrize("uid", [STRANGER, AGENT, MEMBER], ids=["stranger", "agent", "member"])
def test_no_answer_tells_a_secret(world: World, uid: int) -> None:
    """What the request itself says may come back; nothing else of a row does."""
    asked = [
        (method, path, body) for (method, _), each in requests(world).items() for path, body in each
    ]
    leaks = set()
    for request, (status, text) in zip(asked, world.ask(uid, *asked), strict=True):
        assert status < 500, (request, text)
        for task in world.tasks:
            for word in (task.id, task.secret):
                if word in json.dumps(request):
                    text = text.replace(word, "")
        leaks |= {(*request[:2], name) for name in world.secrets.found_in(text)}
    assert sorted(leaks) == []


@pytest.mark.parametrize("uid", [STRANGER, AGENT, MEMBER], ids=["stranger", "agent", "member"])
def test_no_file_tells_a_secret(world: World, uid: int) -> None:
    """State, socket, arguments of processes, mounts, and each checkout by its path."""
    paths = [each["path"] for each in world.daemon.json("GET", "/v1/checkouts")]
    proc = [f"/proc/self/{name}" for name in ("mountinfo", "mounts")]
    processes = Path("/proc").glob("[0-9]*/cmdline")
    result = world.search(uid, world.daemon.root, *paths, *proc, *processes)
    expected = {"/proc/self/mountinfo", str(world.daemon.root / "commands")}
    if uid == MEMBER:
        expected.add(f"objects of {world.mine['path']}")
    assert expected <= set(result["read"])
    assert result["found"] == {}


def test_no_line_of_the_log_tells_a_secret(world: World) -> None:
    """But for those of imports: the log may be kept where more people read it than the journal."""
    lines = [line for line in world.daemon.log_lines if line["event"] not in _QUOTING]
    assert {"checkout.made", "checkout.graded", "checkout.restored"} <= {x["event"] for x in lines}
    found = {(line["event"], *world.secrets.found_in(json.dumps(line))) for line in lines}
    assert {each for each in found if len(each) > 1} == set()


# -- the grader ---------------------------------------------------------------------------------------


def test_the_grader_view_has_the_whole_row(world: World) -> None:
    """By either id. The agent view has the public id, and the base commit alone."""
    with Client(world.daemon.socket) as client:
        for task in world.tasks:
            row = client.get_instance(task.public, view=View.GRADER)
            assert (row.id, row.public_id) == (task.id, task.public)
            assert (row.patch, row.test_patch) == (task.fix.patch, task.fix.test_patch)
            assert (row.fail_to_pass, row.pass_to_pass) == (task.fix.failing, task.fix.passing)
            assert task.secret in {each.commit for each in row.commits or []}
            agents = client.get_instance(task.id)
            assert (agents.id, agents.public_id) == (task.public, None)
            assert [each.commit for each in agents.commits or []] == [row.base_commit]


def test_the_grader_restores_files_of_recorded_commits_without_their_objects(world: World) -> None:
    """By id and by role."""
    with Client(world.daemon.socket) as client:
        for task in world.tasks:
            row = client.get_instance(task.id, view=View.GRADER)
            roles = {each.commit: each.role for each in row.commits or []}
            with client.checkout(task.id, view=View.GRADER) as grader:
                tree = Path(grader.path)
                wanted = git(world.upstream.path, "show", f"{task.secret}:NEWS")
                for name in (task.secret, roles[CommitId(task.secret)]):
                    assert grader.restore(name, "NEWS") == ["NEWS"]
                    assert (tree / "NEWS").read_text() == wanted
                    grader.reset()
                objects = git(tree, "cat-file", "--batch-all-objects", "--batch-check")
                assert task.secret not in objects
                assert git(world.upstream.path, "rev-parse", f"{task.secret}:NEWS") not in objects


def test_the_fix_goes_on_and_off(world: World) -> None:
    """`@patch` is the fix whichever way the dataset's patch goes."""
    with Client(world.daemon.socket) as client:
        for task in world.tasks:
            with client.checkout(task.id, view=View.GRADER) as grader:
                source = Path(grader.path, "src/mod0.py")
                before = source.read_text()
                grader.apply("@patch")
                assert source.read_text() == task.fix.source != before
                grader.apply("@test_patch")
                grader.apply("@test_patch", reverse=True)
                grader.apply("@patch", reverse=True)
                assert source.read_text() == before
                assert grader.diff() == b""
