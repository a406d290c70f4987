"""The command line and the Python client against a real daemon: the main job, as a user would type it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import anyio
import pytest
from anyone import NOBODY
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from typed import typed
from waiting import BOUND_S, until

from mirrord import AsyncClient, Client, Sandbox, doctor
from mirrord.cli import support
from mirrord.cli.main import run
from mirrord.errors import InstanceAmbiguousError, InvalidDatasetError, NotFoundError
from mirrord.model import DiffFormat, View

pytestmark = pytest.mark.slow


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class World(NamedTuple):
    """One daemon with one dataset of two instances, imported through the command line."""

    daemon: Daemon
    upstream: Upstream
    commits: list[str]
    file: Path
    imported: Ran

    def run(self, *words: str | Path, stdin: str | None = None, cwd: Path | None = None) -> Ran:
        return _run(self.daemon, *words, stdin=stdin, cwd=cwd)


def _run(
    running: Daemon, *words: str | Path, stdin: str | None = None, cwd: Path | None = None
) -> Ran:
    done = typed("--socket", running.socket, *words, stdin=stdin or "", cwd=cwd)
    return Ran(done.returncode, done.stdout, done.stderr)


def _spawn(running: Daemon, *words: str | Path) -> Ran:
    """As a process of its own."""
    command = [sys.executable, "-m", "mirrord", "--socket", str(running.socket), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return Ran(done.returncode, done.stdout, done.stderr)


def _write_dataset(file: Path, upstream: Upstream, commits: list[str]) -> None:
    """The third commit fixes the second; the row's test patch adds a file."""
    head = "diff --git a/tests/test_x.py b/tests/test_x.py\nnew file mode 100644\n--- /dev/null\n+++ b/tests/test_x.py\n"
    test_patch = f"{head}@@ -0,0 +1 @@\n+assert True\n"
    rows = [
        {
            "repo": "demo/project",
            "instance_id": f"demo__project-{n}",
            "base_commit": commits[n],
            "patch": upstream.git("diff", commits[n], commits[n + 1]) + "\n",
            "test_patch": test_patch,
            "problem_statement": "it is wrong",
            "version": "1",
            "FAIL_TO_PASS": '["tests/test_x.py"]',
            "PASS_TO_PASS": "[]",
            "environment_setup_commit": commits[0],
        }
        for n in (1, 2)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"repo": "demo/project"}\n')


@pytest.fixture
def upstream_of_two(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("demo+project")
    made.history(2)
    return made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Made once: these tests read, or take their own checkout."""
    root = tmp_path_factory.mktemp("world")
    upstream = Upstream(root / "demo" / "project")
    commits = upstream.history(5)
    _write_dataset(root / "rows.jsonl", upstream, commits)
    with daemon(f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n') as running:
        imported = _run(
            running, "dataset", "import", root / "rows.jsonl", "--name", "demo", "--json"
        )
        yield World(running, upstream, commits, root / "rows.jsonl", imported)


@pytest.fixture
def tree(world: World) -> Iterator[Path]:
    """A checkout of the first instance, released at the end."""
    taken = world.run("checkout", "demo__project-1")
    assert taken.status == 0, taken.err
    yield Path(taken.out.rstrip("\n"))
    world.run("release", taken.out.rstrip("\n"))


def test_an_import_tells_what_it_took_and_what_it_could_not(world: World) -> None:
    """The bad row by file and line."""
    assert world.imported.status == 0, world.imported.err
    dataset = world.imported.json["result"]["dataset"]
    assert (dataset["instance_count"], dataset["unpinned"]) == (2, [])
    assert [fault["line"] for fault in dataset["faults"]] == [3]
    again = world.run("dataset", "import", world.file, "--name", "demo")
    assert "0 added, 0 changed, 0 removed, 2 unchanged" in again.out
    assert "rows.jsonl:3" in again.err


def test_a_stream_that_fails_imports_nothing(world: World) -> None:
    """Nor one that its client leaves; a whole one from a task's thread is a dataset."""
    line = world.file.read_bytes().splitlines(keepends=True)[0]

    def broken() -> Iterator[bytes]:
        yield line
        raise RuntimeError("the source failed")

    with Client(world.daemon.socket) as client:
        with pytest.raises(RuntimeError, match="the source failed"):
            client.import_dataset(broken(), source="broken", name="broken")
        with pytest.raises(InvalidDatasetError):
            client.wait(client.import_dataset(iter([b""]), name="empty"))

        async def stream() -> None:
            async with AsyncClient(world.daemon.socket) as other:
                await other.wait(await other.import_dataset([line[:9], line[9:]], name="pieces"))

        anyio.run(stream)
        names = {dataset.name for dataset in client.list_datasets()}
        assert ("broken" in names, "empty" in names, "pieces" in names) == (False, False, True)
        client.remove_dataset("pieces")


def test_an_import_of_a_commit_that_nobody_has_ends_with_eight(
    world: World, tmp_path: Path
) -> None:
    """Recorded, but it cannot be served: told by mirror, commit and instance. Removing the dataset leaves nothing of it."""
    row = json.loads(world.file.read_text().splitlines()[0])
    (tmp_path / "gone.jsonl").write_text(
        json.dumps({**row, "instance_id": "demo__project-9", "base_commit": "c" * 40}) + "\n"
    )
    ran = world.run("dataset", "import", tmp_path / "gone.jsonl")
    assert ran.status == 8
    assert f"cannot pin {'c' * 40} of demo__project-9" in ran.err
    assert world.run("audit", "--dataset", "gone").status == 8
    assert world.run("checkout", "demo__project-9").status == 8
    assert world.run("dataset", "remove", "gone").status == 0
    assert world.run("audit").status == 0


def test_sources_that_are_not_one_file_are_streamed(world: World, tmp_path: Path) -> None:
    """Shards, standard input, a folder of tasks: named by the user or after the folder, faults with their place."""
    rows = [json.loads(line) for line in world.file.read_text().splitlines()[:2]]
    words: list[str | Path] = ["dataset", "import", "-", world.file]
    stdin = json.dumps({**rows[0], "instance_id": "piped"})
    assert world.run(*words, stdin=stdin).status == 2
    assert world.run(*words[:3], stdin=stdin).status == 2
    both = world.run(*words, "--name", "both", "--json", stdin=stdin)
    dataset = both.json["result"]["dataset"]
    assert (dataset["source"], dataset["instance_count"]) == ("standard input, rows.jsonl", 3)
    assert [(f["file"], f["line"]) for f in dataset["faults"]] == [("rows.jsonl", 3)]
    for row in rows:
        folder = tmp_path / "repo/tasks" / row["instance_id"]
        folder.mkdir(parents=True)
        (folder / "task.yaml").write_text(
            "".join(f"{key}: {row[key]}\n" for key in ("repo", "base_commit", "version"))
        )
        (folder / "gold.patch").write_text(row["patch"])
        (folder / "test.patch").write_text(row["test_patch"])
        (folder / "tests.json").write_text('{"FAIL_TO_PASS": ["t"], "PASS_TO_PASS": []}')
    (folder / "gold.patch").unlink()
    ran = world.run("dataset", "import", tmp_path / "repo")
    assert ran.out.startswith("repo: 1 instance"), ran.err
    assert f"tasks/{rows[1]['instance_id']}:1: row: gold.patch is missing" in ran.err
    for name in ("both", "repo"):
        assert world.run("dataset", "remove", name).status == 0


def test_a_dataset_goes_out_as_lines_and_comes_back(world: World, tmp_path: Path) -> None:
    """A dry run says what would change and changes nothing; an import of the export is equal."""
    out = tmp_path / "out.jsonl"
    out.write_text(world.run("dataset", "export", "demo").out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["instance_id"] for row in rows] == ["demo__project-1", "demo__project-2"]
    more = [rows[0], {**rows[1], "base_commit": world.commits[0]}, {**rows[1], "instance_id": "x"}]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    dry = ("dataset", "import", tmp_path / "more.jsonl", "--name", "demo", "--dry-run")
    ran = world.run(*dry)
    assert ran.out.splitlines()[0] == "+ x"
    assert "~ demo__project-2: base_commit" in ran.out
    assert f"to {world.commits[0][:12]})" in ran.out
    found = world.run(*dry, "--json").json
    assert (found["kind"], found["result"]["new_mirrors"]) == ("dataset.compare", [])
    assert world.run("dataset", "export", "demo").out == out.read_text()
    assert world.run("dataset", "import", out, "--name", "copy").status == 0
    assert world.run("dataset", "diff", "demo", "copy").out.splitlines() == [
        "0 added, 0 removed, 0 changed, 0 of them moved to another commit, 2 unchanged"
    ]
    shown = [world.run("dataset", "show", name, "--json").json for name in ("demo", "copy")]
    assert shown[0]["digest"] == shown[1]["digest"]
    assert world.run("dataset", "remove", "copy").status == 0
    assert world.run("dataset", "diff", "demo", "copy").status == 4


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["status"], "demo__project"),
        (["mirror", "list"], "demo__project  ready"),
        (["mirror", "show", "Demo/Project"], "default branch  main"),
        (["mirror", "sync"], "demo__project"),
        (["mirror", "add", "demo/project"], "demo__project"),
        (["dataset", "list"], "demo"),
        (["dataset", "show", "demo"], "rows.jsonl:3"),
        (["dataset", "show", "demo", "--all"], "demo__project-2"),
        (["dataset", "formats"], "jsonl"),
        (["dataset", "diff", "demo", "demo"], "2 unchanged"),
        (["instance", "show", "demo__project-1"], "fail to pass"),
        (["instance", "show", "demo__project-1", "--view", "grader"], "fail to pass"),
        (["du", "--verbose"], "demo__project"),
        (["gc", "--dry-run"], "would free"),
        (["pin", "list", "demo/project"], "dataset/demo"),
        (["ref", "log", "demo/project"], "RECORD"),
        (["audit"], "at level closure"),
        (["heal"], "at level"),
        (["events"], "dataset.imported"),
        (["checkouts"], "INSTANCE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_verb_shows_what_the_daemon_holds(world: World, words: list[str], shown: str) -> None:
    """As a table, and as JSON."""
    ran = world.run(*words)
    assert ran.status == 0, ran.err
    assert shown in ran.out or words == ["dataset", "formats"]
    plain = world.run(*words, "--json")
    assert plain.status == 0
    assert (
        [json.loads(line) for line in plain.out.splitlines()]
        if words == ["events"]
        else plain.json is not None
    )


def test_the_life_of_a_checkout(world: World, tree: Path, tmp_path: Path) -> None:
    """Made, changed, taken out as a patch, reset, patched again."""
    assert git(tree, "rev-parse", "HEAD^{tree}") == git(
        world.upstream.path, "rev-parse", f"{world.commits[1]}^{{tree}}"
    )
    (tree / "README").write_text("changed\n")
    (tree / "new.bin").write_bytes(b"\0\1")
    patch = world.run("diff", ".", cwd=tree)
    assert patch.status == 0
    assert "GIT binary patch" in patch.out
    (tmp_path / "p").write_text(patch.out)
    assert world.run("reset", tree).out == f"{tree}\n"
    assert (tree / "README").read_text() == "number 1\n"
    assert world.run("apply", tree, tmp_path / "p").status == 0
    assert (tree / "new.bin").read_bytes() == b"\0\1"
    assert world.run("apply", tree, "-", "--reverse", stdin=patch.out).status == 0
    assert not (tree / "new.bin").exists()
    assert world.run("apply", tree, "-", "--reverse", stdin=patch.out).status == 5
    readme = patch.out[patch.out.index("diff --git a/README") :]
    readme = readme.partition("diff --git a/new.bin")[0].replace("\n", "\r\n")
    assert world.run("apply", tree, "-", stdin=readme).status == 5
    taken = world.run("apply", tree, "-", "--strategy", "tolerant", stdin=readme)
    assert (taken.status, taken.err) == (0, "applied by strategy crlf\n")
    assert (tree / "README").read_text() == "changed\n"
    assert world.run("verify-seal", tree, "--base", world.commits[1]).status == 0
    theirs = world.run("checkout", "demo__project-1", "--owner", str(NOBODY)).out.strip()
    released = world.run("release", "--all")
    assert (released.status, tree.exists(), Path(theirs).exists()) == (0, False, True)
    assert released.err == "released 1 checkout; those of other users stay: 1\n"
    assert world.run("release", theirs).status == 0


def test_a_file_of_any_columns_is_imported_by_a_mapping(world: World, tmp_path: Path) -> None:
    lost = "e" * 40
    mine = {"key": "mine-1", "at": {"url": "https://github.com/demo/project"}, "fixed_by": lost}
    rows, mapping = tmp_path / "mine.jsonl", tmp_path / "mapping.toml"
    rows.write_text(json.dumps(mine | {"start": world.commits[0]}) + "\n")
    mapping.write_text(
        'instance_id = "key"\nrepo = "at.url"\nbase_commit = "start"\ngold_commits = "fixed_by"\n'
    )
    told = world.run("dataset", "import", rows)
    assert (told.status, "no known format" in told.err, "--mapping" in told.err) == (2, True, True)
    ran = world.run("dataset", "import", rows, "--mapping", mapping)
    assert (ran.status, ran.out.splitlines()[0]) == (
        8,
        "mine: 1 instance of format mapping, 2 commits in 1 mirror",
    )
    assert f"cannot pin {lost} of mine-1 (gold; checkouts do not need it): " in ran.err
    path = world.run("checkout", "mine-1")
    assert path.status == 0, path.err
    assert world.run("release", path.out.strip()).status == 0
    refused = world.run("dataset", "import", rows, "--mapping", mapping, "--format", "generic")
    assert (refused.status, "both a format and a mapping" in refused.err) == (2, True)
    mapping.write_text('repoo = "x"\n')
    refused = world.run("dataset", "import", rows, "--mapping", mapping)
    assert (refused.status, "did you mean repo?" in refused.err) == (2, True)
    assert world.run("dataset", "import", rows, "--mapping", tmp_path / "none").status == 2
    assert world.run("dataset", "remove", "mine").status == 0


def test_an_id_of_two_datasets_is_checked_out_by_the_name_of_its_dataset(
    world: World, tmp_path: Path
) -> None:
    """Without it the answer names both; the checkout remembers whose it is, over resets and for the grader."""
    row = json.loads(world.file.read_text().splitlines()[0])
    other = {
        **row,
        "base_commit": world.commits[3],
        "patch": "",
        "test_patch": row["test_patch"].replace("test_x", "test_y"),
    }
    (tmp_path / "other.jsonl").write_text(json.dumps(other) + "\n")
    imported = world.run("dataset", "import", tmp_path / "other.jsonl", "--json")
    try:
        assert imported.status == 0, imported.err
        assert imported.json["result"]["ambiguous"] == [
            {"id": "demo__project-1", "datasets": ["other", "demo"], "differs": "commit"}
        ]
        told = world.run("dataset", "import", tmp_path / "other.jsonl").err
        assert "demo__project-1: demo records another commit; check it out with" in told
        refused = world.run("checkout", "demo__project-1", "--json")
        assert (
            refused.status,
            "--dataset" in refused.err,
            '"demo"' in refused.err + refused.out,
        ) == (5, True, True)
        assert world.run("checkout", "demo__project-2", "--dataset", "other").status == 4
        with Client(world.daemon.socket) as client:
            with client.checkout("demo__project-1", dataset="other", view=View.GRADER) as checkout:
                assert checkout.commit == world.commits[3]
                checkout.reset()
                checkout.apply("@test_patch")
                assert (Path(checkout.path) / "tests/test_y.py").exists()
                checkout.reset("demo__project-1", dataset="demo")
                assert checkout.commit == world.commits[1]
                checkout.apply("@test_patch")
                assert (Path(checkout.path) / "tests/test_x.py").exists()
                with pytest.raises(InstanceAmbiguousError):
                    checkout.reset("demo__project-1")
                again = world.run(
                    "reset", checkout.id, "demo__project-1", "--dataset", "other", "--json"
                )
                assert again.json["commit"] == world.commits[3]
            assert (
                client.get_instance("demo__project-1", dataset="demo").base_commit
                == world.commits[1]
            )
            with pytest.raises(InstanceAmbiguousError) as ambiguous:
                client.get_instance("demo__project-1")
            assert ambiguous.value.facts["datasets"] == ["demo", "other"]
        assert world.run("rehearse", "--dataset", "other").status in {0, 8}
    finally:
        assert world.run("dataset", "remove", "other").status == 0
    taken = world.run("checkout", "demo__project-1", "--json")
    assert taken.json["commit"] == world.commits[1]
    world.run("release", taken.json["id"])


def test_a_diff_is_listed_as_git_lists_it(world: World, tree: Path) -> None:
    """--stat and --name-status, as text and as JSON; not both."""
    (tree / "README").unlink()
    (tree / "new").write_text("1\n")
    assert world.run("diff", tree, "--name-status").out == "D\tREADME\nA\tnew\n"
    stat = world.run("diff", tree, "--stat").out
    assert " new    | 1 +\n 2 files changed, 1 insertion(+), " in stat
    assert world.run("diff", tree, "--stat", "--json").json == {"stat": stat, "encoding": "utf-8"}
    assert world.run("diff", tree, "--stat", "--name-status").status == 2
    with Client(world.daemon.socket) as client:
        listed = client.diff_checkout(tree.parent.name, format=DiffFormat.STAT)
        assert listed.decode() == stat
    path = f"/v1/checkouts/{tree.parent.name}/diff"
    status, headers, _ = world.daemon.get(f"{path}?format=stat")
    assert (status, headers["x-mirrord-diff-by"]) == (200, "git; reason=stat")
    assert world.daemon.get(f"{path}?format=nonsense")[0] == 400


@pytest.mark.parametrize(
    ("content", "encoding"), [(b"ol\xc3\xa9\n", "utf-8"), (b"\xff\xfe latin \xe9\n", "base64")]
)
def test_a_diff_in_json_keeps_each_byte(
    world: World, tree: Path, tmp_path: Path, content: bytes, encoding: str
) -> None:
    """A patch need not be text: one that is not UTF-8 is in base64, and applies again."""
    (tree / "README").write_bytes(content)
    answer = world.run("diff", tree, "--json").json
    assert answer["encoding"] == encoding
    patch = base64.b64decode(answer["patch"]) if encoding == "base64" else answer["patch"].encode()
    assert b"+" + content in patch
    with Client(world.daemon.socket) as client:
        assert patch == client.diff_checkout(tree.parent.name)
    (tmp_path / "p").write_bytes(patch)
    assert world.run("reset", tree).status == 0
    assert world.run("apply", tree, tmp_path / "p").status == 0
    assert (tree / "README").read_bytes() == content


def test_a_reset_goes_on_to_another_instance_or_commit(world: World, tree: Path) -> None:
    """Of the same mirror; the path stays."""
    answer = world.run("reset", tree, "demo__project-2", "--json").json
    assert (answer["commit"], answer["path"], answer["proof"]["head"]) == (
        world.commits[2],
        str(tree),
        world.commits[2],
    )
    assert world.run("reset", tree, world.commits[0], "--json").json["commit"] == world.commits[0]
    assert world.run("renew", tree, "--ttl", "5m").status == 0


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["checkout", "no-such-instance"], 4),
        (["checkout", "demo__project@no-such-branch"], 4),
        (["mirror", "show", "no/such"], 4),
        (["mirror", "show", "nonsense"], 4),
        (["mirror", "sync", "a/b/c?d#e"], 4),
        (["mirror", "remove", "demo/project"], 5),
        (["mirror", "add", "demo/none"], 6),
        (["mirror", "add", "../etc"], 2),
        (["dataset", "show", "none"], 4),
        (["reset", "a" * 16], 4),
        (["release", "nonsense"], 4),
        (["release", "/etc"], 4),
        (["pin", "add", "demo/project", "c" * 40], 4),
        (["pin", "add", "demo/project", "abc"], 2),
        (["audit", "no/such"], 4),
        (["dataset", "import", "/no/such/file"], 2),
        (["exec", "demo__project-1", "--diff", "-", "--", "true"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_ends_with_its_status(
    world: World, words: list[str], status: int
) -> None:
    """A sentence that begins with cannot, and nothing on stdout but what was answered."""
    ran = world.run(*words)
    assert ran.status == status, ran
    assert "cannot" in ran.err


def test_a_bug_of_the_daemon_and_a_limit_end_with_one_and_seven(upstream_of_two: Upstream) -> None:
    """The two that no verb alone provokes: the catalog holds what nobody wrote, and all checkouts are held."""
    text = f'[upstream]\nurl = "file://{upstream_of_two.path.parent}/{{owner}}+{{name}}"\n[checkouts]\nmax = 1\n'
    with daemon(text) as running:
        assert _spawn(running, "mirror", "add", "demo/project").status == 0
        with closing(sqlite3.connect(running.state_dir / "catalog.sqlite3")) as connection:
            spoil = "UPDATE mirrors SET ref_faults = '[{}]'"
            connection.execute(f"CREATE TRIGGER spoil AFTER UPDATE ON mirrors BEGIN {spoil}; END")
            connection.execute(spoil)
            connection.commit()
        ran = _spawn(running, "mirror", "show", "demo/project", "--json")
        assert (ran.status, json.loads(ran.err)["code"], ran.out) == (1, "internal", "")
        assert _spawn(running, "checkout", "demo/project@main").status == 0
        ran = _spawn(running, "checkout", "demo/project@main", "--json")
        assert (ran.status, json.loads(ran.err)["code"], ran.out) == (7, "too-many-checkouts", "")


def test_pins_have_an_owner_and_a_way_out(world: World) -> None:
    """A person's own."""
    assert (
        world.run("pin", "add", "demo/project", world.commits[4], "--reason", "a paper").status == 0
    )
    assert "a paper" in world.run("pin", "list", "demo__project").out
    assert world.run("pin", "remove", "demo/project", world.commits[4]).status == 0
    assert world.run("pin", "remove", "demo/project", world.commits[4]).status == 4


def test_exec_leaves_the_patch_and_no_checkout(world: World, tmp_path: Path) -> None:
    """And the command's own exit status."""
    ran = _spawn(
        world.daemon,
        "exec",
        "demo__project-1",
        "--diff",
        tmp_path / "p",
        "--",
        "sh",
        "-c",
        "echo more >> README; pwd; echo $MIRRORD_CHECKOUT; exit 7",
    )
    assert ran.status == 7
    assert "+more" in (tmp_path / "p").read_text()
    directory, held = ran.out.split()
    assert directory == "/testbed"
    assert held not in world.run("checkouts").out


def test_exec_shows_the_tree_where_it_is_asked_to(world: World) -> None:
    """Writable, at /testbed too; a path that a sandbox needs is refused before a checkout."""
    shell = "sh", "-c", "pwd; echo more >>README; cmp README /testbed/README && echo same"
    for path in ("/app", "/workspace/project", "/home/user/project"):
        ran = _spawn(world.daemon, "exec", "demo__project-1", "--workdir", path, "--", *shell)
        assert (ran.status, ran.out.split()) == (0, [path, "same"]), ran
    for path in ("app", "/", "/usr/local/src", "/opt", "/home/testbed", "/tmp", "/proc/1"):
        ran = _spawn(world.daemon, "exec", "demo__project-1", "--workdir", path, "--", "true")
        assert (ran.status, "cannot use workdir" in ran.err) == (2, True), ran
    ran = _spawn(
        world.daemon, "exec", "demo__project-1", "--workdir", "/a", "--keep-access", "--", "true"
    )
    assert (ran.status, "cannot use --workdir" in ran.err) == (2, True), ran


def test_a_row_names_its_workdir(world: World, tmp_path: Path) -> None:
    """It comes with the checkout; a reset to another instance has that one's."""
    row = {"repo": "demo/project", "base_commit": world.commits[2]}
    rows = [{"instance_id": "wd-1", "workdir": "/app", **row}]
    rows += [{"instance_id": "wd-2", **row}, {"instance_id": "wd-3", "workdir": "/usr", **row}]
    rows += [{"instance_id": "wd-4", "workdir": "/testbed/..//srv/", **row}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert world.run("dataset", "import", tmp_path / "rows.json").status == 0
    facts = json.loads(world.run("dataset", "show", "rows", "--json").out)
    assert any("workdir '/usr'" in rule for rule in facts["rules"]), facts["rules"]
    found = {}
    for each in ("wd-1", "wd-2", "wd-3", "wd-4"):
        ran = _spawn(world.daemon, "exec", each, "--", "sh", "-c", "pwd; test -e README")
        assert ran.status == 0, ran
        found[each] = ran.out.strip()
    assert found == {"wd-1": "/app", "wd-2": "/testbed", "wd-3": "/testbed", "wd-4": "/srv"}
    with Client(world.daemon.socket) as client, client.checkout("wd-1") as checkout:
        with Sandbox(checkout, frozen=["README"]) as sandbox:
            assert (sandbox.workdir, sandbox.exec("pwd").stdout) == ("/app", b"/app\n")
            assert sandbox.exec("echo x >/app/README").exit_code, "frozen at every place"
            sandbox.reset("wd-2")
            assert (sandbox.workdir, sandbox.exec("pwd").stdout) == ("/testbed", b"/testbed\n")
        with Sandbox(checkout, workdir="/b") as sandbox:
            assert sandbox.exec("pwd").stdout == b"/b\n"
    assert world.run("dataset", "remove", "rows").status == 0


def test_a_killed_exec_gives_its_checkout_back(world: World) -> None:
    """Also where its whole process group was killed, long before the deadline; and the command is gone too."""
    command = [
        sys.executable,
        "-m",
        "mirrord",
        "--socket",
        str(world.daemon.socket),
        "exec",
        "demo__project-1",
        "--",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [*command, "sh", "-c", "echo $MIRRORD_CHECKOUT; exec sleep 1000"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    held = process.stdout.readline().strip()
    assert held in world.run("checkouts").out
    os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout.read() == ""
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    until(lambda: held not in world.run("checkouts").out)


def test_a_squashed_checkout_is_judged_by_the_mirror_of_its_lease(
    world: World, tmp_path: Path
) -> None:
    """Nobody has to name it; what somebody else wrote beside a repository is not believed."""
    taken = world.run("checkout", "demo__project-1", "--history", "squashed")
    tree = Path(taken.out.rstrip("\n"))
    assert world.run("verify-seal", tree, "--base", world.commits[1]).status == 0
    assert world.run("verify-seal", tree, "--base", world.commits[2]).status == 8
    forged = tmp_path / "checkouts" / tree.parent.name
    for part in (
        Path("checkouts", forged.name),
        Path("leases", forged.name),
        Path("mirrors", "demo__project"),
    ):
        shutil.copytree(world.daemon.state_dir / part, tmp_path / part, symlinks=True)
    assert world.run("verify-seal", forged / "tree", "--base", world.commits[1]).status == 0
    (tmp_path / "leases").chmod(0o777)
    assert world.run("verify-seal", forged / "tree", "--base", world.commits[1]).status == 8
    world.run("release", tree)


def test_the_example_of_the_design_works(world: World) -> None:
    """Word for word, but for the agent."""
    with Client(world.daemon.socket) as mirrord, mirrord.checkout("demo__project-1") as checkout:
        (checkout.path / "README").write_text("agent\n")
        assert b"+agent" in checkout.diff()
        proof = checkout.reset()
        assert proof.tree == checkout.tree
        assert (checkout.path / "README").read_text() == "number 1\n"
    assert not checkout.path.exists()


def test_a_session_forks_and_goes_back_from_the_command_line(world: World) -> None:
    """Each prints what a script needs next: a path or a name."""
    tree = Path(world.run("checkout", "demo__project-1").out.strip())
    (tree / "README").write_text("one\n")
    assert world.run("snapshot", "create", tree, "first").out == "first\n"
    (tree / "README").write_text("two\n")
    assert world.run("snapshot", "create", tree).out == "s1\n"
    assert [each["name"] for each in world.run("snapshot", "list", tree, "--json").json] == [
        "first",
        "s1",
    ]
    assert world.run("snapshot", "list", tree).out.splitlines()[1].split()[0] == "first"
    fork = Path(world.run("fork", tree, "--ttl", "5m").out.strip())
    old = world.run("fork", tree, "--from", "first", "--json").json
    assert (fork / "README").read_text() == "two\n"
    assert (Path(old["path"]) / "README").read_text() == "one\n"
    assert (old["parent"], old["snapshot"]) == (tree.parent.name, "first")
    assert world.run("reset", tree, "--to", "first", "--json").json["proof"]["snapshot"] == "first"
    assert (tree / "README").read_text() == "one\n"
    assert world.run("snapshot", "create", tree, "first").status == 5
    assert world.run("snapshot", "create", tree, "not/a name").status == 2
    assert world.run("snapshot", "remove", tree).status == 2
    assert world.run("snapshot", "remove", tree, "s1").status == 0
    assert world.run("snapshot", "remove", tree, "s1").status == 4
    assert world.run("reset", tree, "--to", "s1").status == 4
    assert world.run("reset", tree, "demo__project-2", "--to", "first").status == 2
    world.run("release", tree, fork, old["id"])


def test_a_session_saves_a_layer_and_starts_with_it(world: World) -> None:
    """What it holds is in no patch; who has it is listed, and it goes when nobody does."""
    tree = Path(world.run("checkout", "demo__project-1").out.strip())
    (tree / "README").write_text("installed\n")
    assert world.run("layer", "save", tree, "tools").out == "tools\n"
    assert world.run("layer", "save", tree, "tools").status == 5
    assert world.run("layer", "save", tree, "not/a name").status == 2
    on_it = world.run("checkout", "demo__project-1", "--layer", "tools", "--json").json
    assert on_it["layer"] == "tools"
    assert (Path(on_it["path"]) / "README").read_text() == "installed\n"
    assert world.run("diff", on_it["id"]).out == ""
    (Path(on_it["path"]) / "README").write_text("changed\n")
    assert world.run("reset", on_it["id"]).out.strip() == on_it["path"]
    assert (Path(on_it["path"]) / "README").read_text() == "installed\n"
    assert world.run("reset", tree, "--layer", "tools", "--json").json["layer"] == "tools"
    assert world.run("receipt", tree, "--json").json["layer"]["name"] == "tools"
    assert world.run("layer", "list").out.splitlines()[1].split()[1] == "tools"
    [layer] = world.run("layer", "list", on_it["mirror"], "--json").json
    assert (layer["checkouts"], layer["shared"]) == (2, True)
    assert world.run("layer", "remove", layer["id"]).status == 5
    graded = world.run(
        "grade", "demo__project-1", "--patch", "-", "--layer", "tools", "--json",
        stdin="--- a/README\n+++ b/README\n@@ -1 +1 @@\n-installed\n+graded\n",
    ).json  # fmt: skip
    assert (Path(graded["path"]) / "README").read_text() == "graded\n"
    world.run("release", tree, on_it["id"], graded["id"])
    assert world.run("layer", "remove", layer["id"]).status == 0
    assert world.run("checkout", "demo__project-1", "--layer", "tools").status == 4
    assert world.run("checkout", "demo__project-1", "--environment", "absent").status == 4
    assert world.run("layer", "list", "--json").json == []


def test_both_clients_fork_and_go_back(world: World) -> None:
    """The answer says when and what was copied; a fork's handle renews and releases it."""
    with Client(world.daemon.socket) as client, client.checkout("demo__project-1") as checkout:
        (checkout.path / "work").write_text("one\n")
        kept = checkout.snapshot("kept")
        (checkout.path / "work").write_text("two\n")
        with checkout.fork(snapshot="kept") as old, checkout.fork(60.0) as fork:
            assert (old.path / "work").read_text() + (
                fork.path / "work"
            ).read_text() == "one\ntwo\n"
            assert fork.parent == checkout.id
            assert checkout.created_at <= kept.copied.taken_at <= fork.created_at
            assert fork.diff() == checkout.diff()
            names = {event.name for event in client.events(after="0", follow=False)}
        assert {"checkout.forked", "snapshot.made"} <= names
        assert checkout.reset(to="kept").snapshot == "kept"
        checkout.remove_snapshot("kept")
        assert checkout.snapshots() == []
        identity = checkout.id
        (checkout.path / "work").write_text("three\n")

        async def elsewhere() -> None:
            async with AsyncClient(world.daemon.socket) as other:
                held = await other.open_checkout(identity)
                await held.snapshot("there")
                async with held.fork() as fork, held.fork(snapshot="there") as same:
                    assert await fork.diff() == await same.diff() != b""
                await held.reset(to="there")
                assert [each.name for each in await held.snapshots()] == ["there"]

        anyio.run(elsewhere)


def test_a_grader_applies_patches_and_restores_files(world: World) -> None:
    """What the instance holds, and files of pinned commits."""
    with (
        Client(world.daemon.socket) as client,
        client.checkout("demo__project-1", view=View.GRADER) as checkout,
    ):
        checkout.apply("@test_patch")
        assert (checkout.path / "tests/test_x.py").read_text() == "assert True\n"
        checkout.apply("@patch")
        assert (checkout.path / "README").read_text() == "number 2\n"
        assert checkout.restore(world.commits[0], "README") == ["README"]
        assert (checkout.path / "README").read_text() == "number 0\n"


def test_many_clients_share_one_connection_pool(world: World) -> None:
    """Sixteen checkouts at once, each with its own path."""

    async def scene() -> set[Path]:
        paths: set[Path] = set()

        async def one(client: AsyncClient) -> None:
            async with client.checkout("demo__project-1") as checkout:
                paths.add(checkout.path)

        async with AsyncClient(world.daemon.socket) as client, anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(one, client)
        return paths

    assert len(anyio.run(scene)) == 16


def test_events_are_followed_while_work_happens(world: World) -> None:
    """A sync is heard of by who listens."""
    with Client(world.daemon.socket) as client:
        stream = client.events(after="0")
        names = [next(stream).name for _ in range(3)]
        stream.close()
    assert all("." in name for name in names)


def test_a_terminal_sees_progress_and_the_answer_stays_clean(world: World) -> None:
    """The bar is drawn on stderr."""
    ours, theirs = os.openpty()
    words = [
        "--socket",
        str(world.daemon.socket),
        "dataset",
        "import",
        str(world.file),
        "--name",
        "demo",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"}
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [sys.executable, "-m", "mirrord", *words],
            stdout=subprocess.PIPE,
            stderr=theirs,
            check=True,
            env=environment,
        )
        os.close(theirs)
        drawn = terminal.read(4096)
    assert b"sending rows.jsonl" in drawn
    assert done.stdout.startswith(b"demo: 2 instances")


def test_serve_detaches_when_it_serves_and_says_why_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the process to stop and its log, which `doctor --report` finds by the daemon that
    answers; a second one is refused.
    """
    with daemon(start=False) as made:
        words = [sys.executable, "-m", "mirrord", "--config", str(made.config), "--json"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

        def serve() -> subprocess.CompletedProcess[str]:
            command = [*words, "serve", "--detach"]
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )

        first = serve()
        answer = json.loads(first.stdout)
        try:
            made.wait_until_healthy()
            again = serve()
            assert (again.returncode, "one answers at" in again.stderr) == (5, True)
            other, report = tmp_path / "other.toml", tmp_path / "report.tar.gz"
            other.write_text(f'state_dir = "{tmp_path}"\nsocket = "{made.socket}"\n')
            monkeypatch.setitem(doctor._CHECKS, "its speed", lambda _: ("ok", "not measured", ""))
            # not by PATH, as test_support does: what of this process starts git would keep it
            monkeypatch.setattr(support, "read_journal", _without_a_journal)
            assert run(["doctor", "--report", str(report), "--config", str(other)]) == 0
            monkeypatch.undo()
            with tarfile.open(report) as archive:
                log = archive.extractfile("mirrord-support/journal.jsonl")
                assert log is not None and b"daemon.started" in log.read()
        finally:
            os.kill(answer["pid"], signal.SIGTERM)
        until(lambda: "stopped" in Path(answer["log"]).read_text())
        made.write_config("[sync]\nconcurrency = 0\n")
        words.remove("--json")
        bad = serve()
        assert (bad.returncode, bad.stdout) == (2, "")
        assert "sync.concurrency" in bad.stderr


def _without_a_journal(_: object) -> NoReturn:
    raise NotFoundError("cannot read the journal: it is not here")


def test_serve_becomes_the_daemon() -> None:
    """The same process: a service manager signals it directly."""
    with daemon(start=False) as made:
        made.process = subprocess.Popen(
            [sys.executable, "-m", "mirrord", "serve", "--config", str(made.config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        printed = made.process.stdout
        made.wait_until_healthy()
        assert _run(made, "status", "--json").json["pid"] == made.pid
        second = _spawn(made, "serve", "--config", made.config)
        assert (second.status, second.out) == (5, "")
        assert str(made.pid) in second.err
        assert made.stop() == 0
        assert printed is not None
        assert printed.read() == b""
        printed.close()


def test_serve_loads_nothing_from_where_it_was_started(tmp_path: Path) -> None:
    """Which may be a checkout, or any directory that others write in."""
    (tmp_path / "mirrord").mkdir()
    (tmp_path / "mirrord/__init__.py").write_text("raise SystemExit(77)")
    with daemon(start=False) as made:
        command = "import sys; from mirrord.cli.main import main; sys.exit(main())"
        made.process = subprocess.Popen(
            [sys.executable, "-P", "-c", command, "serve", "--config", str(made.config)],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        made.wait_until_healthy()


def test_following_events_on_the_command_line_ends_with_ctrl_c(world: World) -> None:
    """One line each, as they come."""
    command = [
        sys.executable,
        "-m",
        "mirrord",
        "--socket",
        str(world.daemon.socket),
        "events",
        "--follow",
        "--json",
        "--after",
        "0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["id"] == 1
        follower.send_signal(signal.SIGINT)
        assert follower.wait(BOUND_S) == 130
        assert follower.stderr is not None
        assert follower.stderr.read() == b""
