"""Two views, no third door: what answers a task reaches no member, agent or stranger by any way.

Every secret field of a row holds a canary. A daemon imports such rows of many formats, then every
route of the API, every event, file, process and mount that an ordinary uid can see is searched.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import canaries
import pytest
from anyone import BARE_PYTHON, ask_as, python
from canaries import Canaries
from daemons import Daemon, daemon
from dataset_rows import DATA
from gitrepos import git
from ports import free_port
from secretrows import AUTHORS, Author, Task
from waiting import until
from web_daemon import ask, page, walk

from mirrord import Client
from mirrord.api.table import ENDPOINTS
from mirrord.cli.main import run
from mirrord.doctor.support import Scrubber
from mirrord.errors import AccessError
from mirrord.model import History, ReportKind, View
from mirrord.protocol import AddReport, Instance

pytestmark = pytest.mark.root

GROUP = 1  # daemon, on every Debian
MEMBER, AGENT, STRANGER, GRADER = 34551, 34552, 34553, 34554
_QUOTING = {"operation.finished", "dataset.refused", "dataset.mirror_failed", "closure.packed"}
"""Log lines that quote rows and name commits, for administrators."""


@dataclass
class World:
    daemon: Daemon
    author: Author
    secrets: Canaries
    tasks: list[Task]
    named: str
    port: int
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
            input=json.dumps([self.secrets.forms, [str(root) for root in roots]]),
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


# -- the world ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("views")
    root.chmod(0o700)
    secrets = Canaries()
    author = Author(root, secrets)
    tasks = [write(author) for write in AUTHORS]
    with daemon(start=False, environment={"PATH": str(root / "bin")}) as made:
        port = free_port()
        made.write_config(
            f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[access]\ngroup = "daemon"\n'
            f'[web]\nlisten = "127.0.0.1:{port}"\n'
        )
        _record_commands(root / "bin", made.root / "commands")
        made.start()
        made.log_path.chmod(0o600)
        with Client(made.socket) as client:
            for task in tasks:
                _import(client, root, task.dataset, [task.row])
            _import_broken(client, root, made, author)
            yield _use(World(made, author, secrets, tasks, "", port, {}, {}, {}), client)
            for held in client.list_checkouts():
                client.release_checkout(held.id)


def _record_commands(directory: Path, log: Path) -> None:
    """A git that records its arguments, which all users can read in /proc."""
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
    until(lambda: any("watched" in text for text in client.health().reasons))


def _use(world: World, client: Client) -> World:
    """Use everything that leaves traces once."""
    for task in world.tasks:
        row = client.get_instance(task.id, view=View.GRADER)
        task.public = getattr(row, "public_id", None) or row.id
        grader = client.checkout(task.id, view=View.GRADER, owner=GRADER)
        for named, patch in (("@patch", row.patch), ("@test_patch", row.test_patch)):
            if patch:
                grader.apply(named)
        if task.secret:
            grader.restore(task.secret, "NEWS")
        grader.receipt()
        grader.reset()
    for task in world.tasks:
        client.checkout(task.id, owner=AGENT).receipt()
    first = world.tasks[0]
    world.named = next(task.fix.gold for task in world.tasks if task.secret == task.fix.gold)
    with client.checkout(f"o/r@{world.named}", view=View.GRADER) as held:
        assert client.verify_receipt(held.receipt()).holds  # by a git of its own
    client.wait(client.start_audit())
    faults = {task.id: "@patch" for task in world.tasks} | {
        world.secrets.plant("forgotten"): "seal"
    }
    client.add_report(
        AddReport(
            kind=ReportKind.REHEARSAL, dataset=world.secrets.plant("dataset"), total=9,
            results={"failed": 9}, mirrors={world.secrets.plant("mirror"): {"failed": 9}}, faults=faults,
        )
    )  # fmt: skip
    world.theirs = client.checkout(first.id, owner=AGENT).lease.to_json()
    asked = [
        ("POST", "checkouts", {"instance": task.id, "backend": backend})
        for backend in ("pool", "overlay")
        for task in world.tasks
    ]
    made = [json.loads(text) for _, text in world.ask(MEMBER, *asked)]
    world.mine = made[-1]
    for task, mine in zip(2 * world.tasks, made, strict=True):
        client.get_checkout(mine["id"])
        client.grade_checkout(mine["id"], owner=GRADER)
        world.ask(
            MEMBER,
            ("POST", f"checkouts/{mine['id']}/reset", {"instance": task.id}),
            ("POST", f"checkouts/{mine['id']}/snapshots", {"name": "s"}),
            ("POST", f"checkouts/{mine['id']}/fork", {}),
            ("POST", f"checkouts/{mine['id']}/reset", {"to": "s"}),
        )
    world.graded = client.grade(
        first.id, str(first.fix.patch).encode(), owner=GRADER
    ).lease.to_json()
    until(lambda: all(each.state != "running" for each in client.list_operations()))
    return world


# -- the doors ----------------------------------------------------------------------------------------


def requests(world: World) -> dict[tuple[str, str], list[tuple[str, object]]]:
    """Requests for each route that an agent might try."""
    ids = [identity for task in world.tasks for identity in (task.id, task.public)]
    commits = [task.secret for task in world.tasks if task.secret]
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
        ("GET", "/v1/activity"): [("activity", None), ("activity?history=true", None)],
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
        ("POST", "/v1/mirrors/{name}/url"): [("mirrors/o__r/url", {"url": "file:///nowhere"})],
        ("POST", "/v1/credentials/check"): [("credentials/check", {"url": "file:///nowhere"})],
        ("GET", "/v1/mirrors/{name}/bundle"): [("mirrors/o__r/bundle", None)],
        ("POST", "/v1/bundles"): [("bundles", {})],
        ("POST", "/v1/restores"): [("restores", {})],
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
        ("POST", "/v1/datasets/{name}/prepare"): [
            (f"datasets/{task.dataset}/prepare", {"instances": [identity]})
            for task in world.tasks
            for identity in (*ids, "absent")
        ],
        ("GET", "/v1/datasets/{name}/diff"): [("datasets/swe-bench/diff?to=swe-gym", None)],
        ("GET", "/v1/datasets/{name}/export"): [("datasets/swe-bench/export", None)],
        ("DELETE", "/v1/datasets/{name}"): [("datasets/swe-bench", None)],
        ("GET", "/v1/instances"): [("instances", None), ("instances?dataset=swe-bench", None)],
        ("GET", "/v1/instances/{id}"): [
            (f"instances/{identity}{query}", None)
            for identity in (*ids, "absent")
            for query in ("", "?view=grader", "?dataset=swe-bench", "?view=x")
        ],
        ("GET", "/v1/environments"): [("environments", None)],
        ("POST", "/v1/environments"): [("environments", {"names": [name]}) for name in ids],
        ("POST", "/v1/environments/recipes"): [("environments/recipes", {})],
        ("POST", "/v1/environments/images"): [("environments/images?source=dir:x", {})],
        ("GET", "/v1/environments/{key}"): [("environments/k", None)],
        ("GET", "/v1/environments/{key}/log"): [("environments/k/log", None)],
        ("DELETE", "/v1/environments/{key}"): [("environments/k", None)],
        ("GET", "/v1/audits"): [("audits", None)],
        ("POST", "/v1/audits"): [("audits", {"level": "quick"})],
        ("GET", "/v1/audits/{id}"): [("audits/x", None)],
        ("GET", "/v1/reports"): [("reports", None)],
        ("POST", "/v1/reports"): [("reports", {"kind": "grading", "total": 1})],
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
        ("POST", "/v1/checkouts/{id}/layers"): each("checkouts/ID/layers", {"name": "n"}),
        ("GET", "/v1/layers"): [("layers", None), ("layers?mirror=o/r", None)],
        ("DELETE", "/v1/layers/{id}"): [("layers/absent", None)],
        ("POST", "/v1/checkouts/{id}/renew"): each("checkouts/ID/renew", {}),
        ("POST", "/v1/checkouts/{id}/attach"): each("checkouts/ID/attach", {}),
        ("GET", "/v1/checkouts/{id}/diff"): each("checkouts/ID/diff", None),
        ("GET", "/v1/checkouts/{id}/seal"): each("checkouts/ID/seal", None),
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
        ("POST", "/v1/turns"): [
            *(
                ("turns", {"turns": [{"checkout": identity, "diff": "patch", "grade": {}}]})
                for identity in held
            ),
            *(
                ("turns", {"checkouts": [{"instance": identity, **more}]})
                for identity in ids
                for more in ({}, {"view": "grader"})
            ),
        ],
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
    """Answers may repeat the request, but nothing else of a row."""
    asked = [
        (method, path, body) for (method, _), each in requests(world).items() for path, body in each
    ]
    leaks = set()
    for request, (status, text) in zip(asked, world.ask(uid, *asked), strict=True):
        assert status < 500, (request, text)
        for task in world.tasks:
            for word in (task.id, task.secret):
                if word and word in json.dumps(request):
                    text = text.replace(word, "")
        leaks |= {(*request[:2], name) for name in world.secrets.found_in(text)}
    assert sorted(leaks) == []


def test_no_page_tells_a_secret(world: World) -> None:
    """Everybody who reaches the port of the page is a stranger, possibly an agent."""
    pages = walk(world.port)
    names = {f"/datasets/{task.dataset}" for task in world.tasks} | {"/mirrors/o__r", "/checkouts"}
    assert names <= set(pages)
    assert {"/audits/", "/reports/", "/receipts/"} <= {
        path[: path.rfind("/") + 1] for path in pages
    }
    told = {path: world.secrets.found_in(text) for path, text in pages.items()}
    assert {path: names for path, names in told.items() if names} == {}
    receipts = [
        page(world.port, path) for path in re.findall(r"/receipts/[0-9a-f]{64}", pages["/receipts"])
    ]
    assert len(receipts) >= 2 * len(world.tasks)
    assert not world.secrets.found_in("".join(receipts))
    assert {"a grader's checkout" in text for text in receipts} == {True, False}
    for task in world.tasks:
        if task.id != task.public:  # nobody finds a commit by trying its digits one by one
            asked = re.findall(r"[0-9a-f]{7}", task.id.lower())[0]
            status, _, body = ask(world.port, f"/datasets/{task.dataset}?find={asked}")
            assert (status, b"No instance matches" in body) == (200, True)


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
    """Except those of imports, and of a commit that an administrator named by id."""
    lines = [line for line in world.daemon.log_lines if line["event"] not in _QUOTING]
    lines = [line for line in lines if line.get("commit") != world.named]
    assert {"checkout.made", "checkout.graded", "checkout.restored"} <= {x["event"] for x in lines}
    found = {(line["event"], *world.secrets.found_in(json.dumps(line))) for line in lines}
    assert {each for each in found if len(each) > 1} == set()


def test_exec_covers_a_telling_id_in_its_arguments(world: World) -> None:
    """All users of the host can read them."""
    task = next(task for task in world.tasks if task.id != task.public)
    words = ["--socket", str(world.daemon.socket), "exec", task.id, "--owner", str(AGENT), "--"]
    with subprocess.Popen(
        [*python(), "-m", "mirrord", *words, "sh", "-c", "echo begun; cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
    ) as child:  # fmt: skip
        assert child.stdin and child.stdout and child.stdout.readline() == b"begun\n"
        arguments = Path(f"/proc/{child.pid}/cmdline").read_text().replace("\0", " ")
        child.stdin.close()
    assert f" exec {'*' * len(task.id)} --owner" in arguments
    assert world.secrets.found_in(arguments) == set()


def test_real_rows_tell_nothing(tmp_path: Path) -> None:
    """Of every format at hand; their repositories are not, and refusals tell nothing either."""
    files = [DATA / "swe-bench/requests-flask.jsonl", *sorted(DATA.glob("formats/[!m]*"))]
    if not files[0].exists():
        pytest.skip(f"no dataset files in {DATA}")
    rows, asked, typed = list[Instance](), list[tuple[str, str, object]](), list[str]()
    text = f'[upstream]\nurl = "file://{tmp_path}/{{owner}}/{{name}}"\n[access]\ngroup = "daemon"\n'
    with daemon(text) as running, Client(running.socket) as client:
        for number, file in enumerate(files):
            client.wait(client.import_dataset(file, name=f"d{number}"))
            for name in client.list_instances(f"d{number}")[:8]:
                row = client.get_instance(name.id, view=View.GRADER, dataset=f"d{number}")
                rows.append(row)
                public, typed = str(row.public_id), [*typed, name.id]
                asked += [("GET", f"instances/{each}", None) for each in (name.id, public)]
                asked += [("POST", "checkouts", {"instance": each}) for each in (name.id, public)]
        asked += [("GET", path, None) for path in ("status", "datasets", "mirrors", "health")]
        asked += [("GET", "events?follow=false&after=0", None), ("GET", "/metrics", None)]
        answers = ask_as(MEMBER, running.socket, *asked, groups=[GROUP])
    assert len(rows) > 20
    secrets, leaks = Canaries(), {}
    for row in rows:
        _plant_row(secrets, row, {each.base_commit for each in rows})
    for request, (status, answer) in zip(asked, answers, strict=True):
        for word in typed:
            answer = answer.replace(word, "") if word in json.dumps(request) else answer
        if found := secrets.found_in(answer):
            leaks[request[:2]] = status, found
    assert leaks == {}


def _plant_row(secrets: Canaries, row: Instance, bases: set[str | None]) -> None:
    for name in ("patch", "test_patch"):
        changed = re.findall(r"(?m)^[+-](?![+-])[ \t]*(.{12,})$", getattr(row, name) or "")
        if changed:
            secrets.plant_text(f"{row.id}: {name}", max(changed, key=len))
    for test in (*(row.fail_to_pass or ())[:3], *(row.pass_to_pass or ())[:3]):
        secrets.plant_text(f"{row.id}: {test}", test)
    for each in row.commits or ():
        if each.commit not in bases:
            secrets.plant_commit(f"{row.id}: {each.role}", each.commit)


# -- the grader ---------------------------------------------------------------------------------------


def test_the_grader_view_has_the_whole_row(world: World) -> None:
    """By either id. The agent view has the public id and the base commit only."""
    with Client(world.daemon.socket) as client:
        for task in world.tasks:
            row = client.get_instance(task.public, view=View.GRADER)
            assert (row.id, row.public_id) == (task.id, task.public)
            assert (row.patch, row.test_patch) == (task.fix.patch, task.fix.test_patch)
            assert (row.fail_to_pass, row.pass_to_pass) == (task.fix.failing, task.fix.passing)
            recorded = {each.commit for each in row.commits or []}
            assert recorded == {str(row.base_commit), task.secret or str(row.base_commit)}
            agents = client.get_instance(task.id)
            assert (agents.id, agents.public_id) == (task.public, None)
            assert [each.commit for each in agents.commits or []] == [row.base_commit]


def test_the_grader_restores_files_of_recorded_commits_without_their_objects(world: World) -> None:
    """By id and by role."""
    with Client(world.daemon.socket) as client:
        for task, secret in ((each, each.secret) for each in world.tasks if each.secret):
            row = client.get_instance(task.id, view=View.GRADER)
            roles = {each.commit: each.role for each in row.commits or []}
            with client.checkout(task.id, view=View.GRADER) as grader:
                tree = Path(grader.path)
                wanted = git(world.author.upstream.path, "show", f"{secret}:NEWS")
                for name in (secret, roles[secret]):
                    assert grader.restore(name, "NEWS") == ["NEWS"]
                    assert (tree / "NEWS").read_text() == wanted
                    grader.reset()
                objects = git(tree, "cat-file", "--batch-all-objects", "--batch-check")
                assert secret not in objects
                assert git(world.author.upstream.path, "rev-parse", f"{secret}:NEWS") not in objects


def test_the_fix_goes_on_and_off(world: World) -> None:
    """`@patch` is the fix in either direction of the dataset's patch."""
    with Client(world.daemon.socket) as client:
        for task in filter(lambda task: task.fix.patch, world.tasks):
            with client.checkout(task.id, view=View.GRADER) as grader:
                source = Path(grader.path, "src/mod0.py")
                before = source.read_text()
                grader.apply("@patch")
                assert source.read_text() == task.fix.source != before
                if task.fix.test_patch:
                    grader.apply("@test_patch")
                    grader.apply("@test_patch", reverse=True)
                grader.apply("@patch", reverse=True)
                assert source.read_text() == before
                assert grader.diff() == b""


# -- how much of the past -------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["swe-smith", "swe-minisandbox"])
def test_agents_see_no_more_of_the_past_than_a_dataset_allows(world: World, dataset: str) -> None:
    """By the instance or its base commit, in a checkout or a reset, in the agent view."""
    bugged = next(task for task in world.tasks if task.dataset == dataset)
    with Client(world.daemon.socket) as client:
        base = client.get_instance(bugged.id).base_commit
        built = [line for line in world.daemon.log_lines if line["event"] == "store.built"]
        ahead = [line for line in built if line["commit"] == base and "operation" in line]
        assert {line["history"] for line in ahead} <= {"squashed"}
        name = f"swesmith/{world.author.bugs.path.name}@"
        for ask in (MEMBER, 0):
            for identity in (bugged.id, f"{name}{base}"):
                asked = [
                    ("POST", "checkouts", {"instance": identity, "history": history})
                    for history in (None, "squashed", "sealed")
                ]
                made = [(code, json.loads(text)) for code, text in world.ask(ask, *asked)]
                assert [code for code, _ in made] == [201, 201, 403]
                assert {each["history"] for _, each in made[:2]} == {"squashed"}
                assert "its dataset allows squashed" in made[2][1]["detail"]
                assert "use history squashed" in made[2][1]["hint"]
        sealed = client.checkout(f"{name}{bugged.fix.gold}")
        with pytest.raises(AccessError, match="allows squashed"):
            sealed.reset(bugged.id)
        sealed.release()
        with client.checkout(bugged.id, view=View.GRADER, history=History.SEALED) as grader:
            assert git(Path(grader.path), "rev-parse", "HEAD~1") == bugged.fix.gold


def test_a_support_bundle_tells_nothing(world: World, tmp_path: Path) -> None:
    """Even if root makes it on a daemon that was asked everything."""
    file = tmp_path / "bundle.tar.gz"
    assert run(["doctor", "--report", str(file), "--config", str(world.daemon.config)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        parts = {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]
    for part in ("status", "activity", "events", "operations", "metrics", "doctor"):
        assert any(f"/{part}." in name for name in parts), part
    leaks = {name: world.secrets.found_in(content) for name, content in parts.items()}
    assert not any(leaks.values()), leaks
    assert b"dataset.imported" in parts["mirrord-support/events.jsonl"]
    assert world.secrets.found_in(world.daemon.log)  # there is something to leave out
    scrubber = Scrubber()
    journal = [scrubber.log_line(line) for line in world.daemon.log.splitlines()]
    assert len(journal) > 50
    assert world.secrets.found_in(json.dumps(journal)) == set()
