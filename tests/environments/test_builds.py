"""Environments are built once, in a box, from recipes; failures are findings; nothing is half ready."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest
from daemons import Daemon
from gitrepos import Upstream
from procsearch import command as search
from python_packages import building, recipe, source_distribution, wheel
from sandbox_here import needs_sandbox
from waiting import until

from mirrord import Client
from mirrord.environments.builder import build_owner
from mirrord.errors import NotFoundError
from mirrord.protocol import BuildReport, Operation

pytestmark = [pytest.mark.slow, needs_sandbox]


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[Daemon, Path]]:
    with building() as made:
        yield made


def import_recipes(running: Daemon, text: str) -> None:
    file = running.root / "recipes.toml"
    file.write_text(text)
    with Client(running.socket) as client:
        client.import_recipes(file)


def build(running: Daemon, *names: str, again: bool = False) -> BuildReport:
    with Client(running.socket) as client:
        return report(client.wait(client.build_environments(*names, again=again)))


def report(ended: Operation) -> BuildReport:
    assert ended.result is not None
    return BuildReport.from_json(ended.result)


def builds(running: Daemon, key: str) -> int:
    """How many were begun."""
    return sum(
        line.get("event") == "environment.started" and line["key"] == key
        for line in running.log_lines
    )


def test_an_environment_is_built_once(house: tuple[Daemon, Path]) -> None:
    running, _ = house
    import_recipes(running, recipe("once", "tiny==1.0"))
    first = build(running, "once")
    assert (first.failed, build(running, "once").ready) == ([], first.ready)
    assert builds(running, "once") == 1
    with Client(running.socket) as client:
        found = client.get_environment("once")
        log = b"".join(client.environment_log("once")).decode()
        assert found.name in [each.name for each in client.list_environments()]
    assert (found.state, found.name, found.dropped) == ("ready", first.ready[0], {})
    assert found.recipe is not None
    assert found.recipe.packages == ["tiny==1.0"]
    assert "tiny==1.0" in log
    prefix = running.state_dir / "templates/.environments" / found.digest / "files"
    packages = prefix / "lib/python3.11/site-packages"
    assert (packages / "tiny/__init__.py").read_text() == "x = 1\n"
    assert list((packages / "tiny/__pycache__").iterdir())
    assert {path.lstat().st_uid for path in prefix.rglob("*")} == {os.geteuid()}
    assert "/opt/miniconda3/envs/testbed" in (prefix / "bin/activate").read_text()


def test_environments_share_what_they_have_in_common(house: tuple[Daemon, Path]) -> None:
    running, packages = house
    wheel(packages, "large", "1.0", {"large.py": f'TEXT = "{"x" * 500_000}"\n'})
    wheel(packages, "other", "1.0", {"other.py": "y = 2\n"})
    import_recipes(running, recipe("a", "large") + recipe("b", "large", "other"))
    bytecode = running.state_dir / "environments/cache/none/bytecode"
    build(running, "a")
    compiled = {*bytecode.iterdir()}
    build(running, "b")
    assert len({*bytecode.iterdir()} - compiled) == 1  # of other.py; that of large.py is there
    with Client(running.socket) as client:
        a, b = client.get_environment("a"), client.get_environment("b")
        rows = {
            row.name: row for row in client.usage(verbose=True).rows if row.kind == "environments"
        }
    assert b.shared_bytes > 500_000
    assert rows[b.name].shared_bytes > 500_000
    assert a.manifest != b.manifest


def test_a_failed_build_is_a_finding_that_waits_for_a_change(house: tuple[Daemon, Path]) -> None:
    running, packages = house
    import_recipes(running, recipe("absent", "absent-package"))
    for _ in range(2):
        failed = build(running, "absent")
        assert not failed.ready
        assert "installing packages: status" in failed.failed[0].detail
    assert "nothing has changed" in failed.failed[0].detail
    assert builds(running, "absent") == 1
    with Client(running.socket) as client:
        found = client.get_environment("absent")
        assert found.state == "failed"
        assert any("absent-package" in line for line in found.tail)
    wheel(packages, "absent_package", "1.0", {"absent_package.py": ""})
    assert build(running, "absent", again=True).ready == [found.name]
    assert builds(running, "absent") == 2


PREFIX = "/opt/miniconda3/envs/testbed"
HOSTILE = {
    "deep": f"import os; os.chdir('{PREFIX}')\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')",
    "sparse": f"open('{PREFIX}/hole', 'wb').truncate(15 << 40)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_build_that_makes_too_much_is_a_finding(house: tuple[Daemon, Path], name: str) -> None:
    """It says which limit was met; nothing of it is kept."""
    running, packages = house
    source_distribution(packages, name, HOSTILE[name])
    import_recipes(running, recipe(name, name))
    failed = build(running, name)
    limit = {"deep": "400 nested directories", "sparse": "20480 MiB"}[name]
    assert f"cannot keep what was built: it has more than {limit}" in failed.failed[0].detail
    with Client(running.socket) as client:
        digest = client.get_environment(name).digest
    assert not (running.state_dir / "templates/.environments" / digest / "files").exists()
    until(lambda: not list((running.state_dir / "environments/builds").iterdir()))


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(10000)
    os._exit(0)
"""


def test_a_process_that_outlives_its_command_does_not_stall_a_build(
    house: tuple[Daemon, Path],
) -> None:
    """It holds the output that uv reads."""
    running, packages = house
    source_distribution(packages, "stalling", DAEMON)
    import_recipes(running, recipe("stalling", "stalling"))
    assert build(running, "stalling").failed == []
    with Client(running.socket) as client:
        log = b"".join(client.environment_log("stalling")).decode()
    assert "which outlived its command" in log


def test_an_unknown_version_of_python_fails_clearly(house: tuple[Daemon, Path]) -> None:
    running, _ = house
    import_recipes(running, recipe("old").replace("3.11", "3.2"))
    assert "fetching Python 3.2" in build(running, "old").failed[0].detail


def test_two_requests_share_one_build(house: tuple[Daemon, Path]) -> None:
    running, _ = house
    import_recipes(running, recipe("shared", "tiny"))
    with Client(running.socket) as client:
        both = [client.build_environments("shared") for _ in range(2)]
        reports = [report(client.wait(each)) for each in both]
    assert reports[0] == reports[1]
    assert builds(running, "shared") == 1


def test_a_removed_environment_frees_its_files_and_its_recipe(house: tuple[Daemon, Path]) -> None:
    running, packages = house
    wheel(packages, "gone", "1.0", {"gone.py": f'TEXT = "{"y" * 100_000}"\n'})
    import_recipes(running, recipe("gone", "gone"))
    build(running, "gone")
    shared = running.state_dir / "templates/.environments/.files"

    def large() -> list[Path]:
        return [
            path
            for path in shared.rglob("*")
            if path.is_file() and b"y" * 1000 in path.read_bytes()
        ]

    assert large()
    with Client(running.socket) as client:
        client.remove_environment("gone")
        with pytest.raises(NotFoundError, match="no environment of that name is built"):
            client.build_environments("gone")
    assert not large()


@dataclass
class World:
    """A daemon with two instances, whose recipe installs into the tree and into the environment."""

    running: Daemon
    setup: str
    base: str
    other: str


DEEP = "python3 -c \"import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]\""
SPARSE = "truncate -s 15T hole"
SEARCH = shlex.join(search("canary-of-the-daemon"))
INSTALL = 'echo "version = 1" >version.py && id -u >$VIRTUAL_ENV/builder'
PROJECT = {
    "pyproject.toml": """
        [build-system]
        requires = []
        build-backend = "backend"
        backend-path = ["."]
        [tool.uv.sources]
        tiny = { path = "nowhere" }
    """,
    "backend.py": """
import zipfile

def build_editable(directory, *ignored):
    with zipfile.ZipFile(f"{directory}/r-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("r.pth", "/testbed")
        wheel.writestr("r-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: r\\nVersion: 1.0\\n")
        wheel.writestr("r-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("r-1.0.dist-info/RECORD", "")
    return "r-1.0-py3-none-any.whl"
""",
}
FIXED = "def answer():\n    return 42  # the fix, which is long enough to be unique\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("upstreams")
    upstream = Upstream(root / "o" / "r")
    setup = upstream.commit({"requirements.txt": "tiny==1.0\n", ".gitignore": "version.py\n"})
    base = upstream.commit({"requirements.txt": "tiny==2.0\n", **PROJECT})
    other = upstream.commit({"requirements.txt": "tiny==3.0\n"})
    upstream.commit({"code.py": FIXED})
    rows = root / "rows.jsonl"
    with rows.open("w") as file:
        for number, (commit, install) in enumerate(
            [
                (base, INSTALL),
                (other, "exit 7"),
                (base, DEEP),
                (base, SPARSE),
                (base, SEARCH),
                (base, "python -m pip install --no-deps -e ."),
            ],
            1,
        ):
            row = {
                "instance_id": f"o__r-{number}", "repo": "o/r", "base_commit": commit, "patch": "",
                "test_patch": "", "problem_statement": "", "version": str(number),
                "environment_setup_commit": setup, "FAIL_TO_PASS": [], "PASS_TO_PASS": [],
                "install_config": {
                    "python": "3.11", "packages": "requirements.txt", "test_cmd": "pytest",
                    "reqs_path": ["requirements.txt"], "install": install,
                    "pip_packages": ["leak"],
                },
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
    os.environ["CANARY"] = "canary-of-the-daemon"
    with building(text) as (running, packages), Client(running.socket) as client:
        del os.environ["CANARY"]
        wheel(packages, "leak", "1.0", {"r/code.py": FIXED})
        client.wait(client.import_dataset(rows))
        yield World(running, setup, base, other)


@pytest.mark.root
def test_an_instance_is_built_without_rights_and_prepared(world: World) -> None:
    """It is built at the setup commit, with the packages that a file of that commit names. Each
    checkout of the base commit has what the recipe installs, also after a reset, and no diff has it.
    """
    with Client(world.running.socket) as client:
        made = report(client.wait(client.build_environments("o__r-1")))
        assert (made.failed, made.prepared) == ([], [world.base])
        found = client.get_environment(made.ready[0])
        assert (found.key, found.commit) == ("o__r-1", world.setup)
        assert found.recipe is not None
        assert found.recipe.requirements == ["tiny==1.0"]
        assert client.list_checkouts() == []
        again = report(client.wait(client.build_environments("o__r-1")))
        assert (again.ready, again.prepared) == (made.ready, [])
        with client.checkout("o__r-1", environment="auto") as checkout:
            beside = Path(checkout.directory) / "environment"
            for _ in range(2):
                assert (checkout.path / "version.py").read_text() == "version = 1\n"
                assert (beside / "builder").read_text() == f"{build_owner()[0]}\n"
                assert (beside / "lib/python3.11/site-packages/tiny/__init__.py").exists()
                assert checkout.diff() == b""
                (checkout.path / "version.py").unlink()
                (beside / "builder").write_text("changed")
                checkout.reset()


@pytest.mark.root
def test_what_is_built_is_scanned(world: World) -> None:
    """A package has a file of a later commit."""
    with Client(world.running.socket) as client:
        made = report(client.wait(client.build_environments("o__r-1")))
        found = client.get_environment(made.ready[0])
    paths = {leak["path"] for leak in found.findings}
    assert "lib/python3.11/site-packages/r/code.py" in paths
    assert found.prepared[0].findings == found.findings


@pytest.mark.root
def test_a_failed_preparation_is_a_finding_that_waits_for_a_change(world: World) -> None:
    with Client(world.running.socket) as client:
        for _ in range(2):
            ended = client.wait(client.build_environments("o__r-2"))
            made = report(ended)
            assert "exit 7: status 7" in made.failed[0].detail
        assert "nothing has changed" in made.failed[0].detail
        found = client.get_environment("o__r-2")
        assert found.state == "ready"
        assert [each.error for each in found.prepared] == ["exit 7: status 7"]
        log = b"".join(client.environment_log("o__r-2")).decode()
        assert log.count("$ exit 7") == 1


@pytest.mark.root
@pytest.mark.parametrize(
    ("instance", "fact"), [("o__r-3", "400 directories deep"), ("o__r-4", "MiB; the limit is")]
)
def test_a_preparation_that_makes_too_much_is_a_finding(
    world: World, instance: str, fact: str
) -> None:
    with Client(world.running.socket) as client:
        made = report(client.wait(client.build_environments(instance)))
        assert fact in made.failed[0].detail
        prepared = client.get_environment(instance).prepared
        assert [fact in (each.error or "") for each in prepared] == [True]
        assert client.list_checkouts() == []


@pytest.mark.root
def test_a_plain_installation_needs_no_pip(world: World) -> None:
    """This environment has none: uv installs the tree, by the tree's own backend."""
    with Client(world.running.socket) as client:
        assert report(client.wait(client.build_environments("o__r-6"))).failed == []
        with client.checkout("o__r-6", environment="auto") as checkout:
            packages = Path(checkout.directory) / "environment/lib/python3.11/site-packages"
            assert (packages / "r.pth").read_text() == "/testbed"


@pytest.mark.root
def test_nothing_of_the_daemon_is_readable_in_a_build(world: World) -> None:
    with Client(world.running.socket) as client:
        client.wait(client.build_environments("o__r-5"))
        log = b"".join(client.environment_log("o__r-5")).decode()
    answer = json.loads(next(line for line in log.splitlines() if line.startswith('{"where"')))
    assert (answer["where"], answer["read"] > 300) == ({}, True)


@pytest.mark.root
def test_an_ordinary_users_daemon_builds_as_that_user() -> None:
    """Outside of a home, where root, who asks here, would be a stranger."""
    text = '[service]\nnamespace = "never"\n'
    with building(text, user=34555) as (running, _), Client(running.socket) as client:
        import_recipes(running, recipe("k", "tiny"))
        assert build(running, "k").failed == []
        prefix = running.state_dir / "templates/.environments" / client.get_environment("k").digest
        assert {path.lstat().st_uid for path in prefix.rglob("*")} == {34555}


def hanging_index() -> Iterator[tuple[str, list[int]]]:
    """An index that accepts and never answers; how many asked."""
    asked: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return
                asked.append(1)

        Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple", asked
        server.shutdown(socket.SHUT_RDWR)
        for each in held:
            each.close()


@pytest.fixture
def index() -> Iterator[tuple[str, list[int]]]:
    yield from hanging_index()


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, with their arguments."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, errors="replace", check=True
    )
    # those of other tests may have no arguments
    rows = [(*line.split(None, 2), "")[:3] for line in listed.stdout.splitlines()[1:]]
    found = {pid: ""}
    while more := {
        int(p): args for p, above, args in rows if int(above) in found and int(p) not in found
    }:
        found |= more
    return {each: args for each, args in found.items() if each != pid}


def of_build(running: Daemon) -> list[int]:
    """The builder and what is in its box; uv is."""
    known = descendants(running.pid)
    builders = [pid for pid, args in known.items() if "mirrord.environments.builder" in args]
    found = {each: args for pid in builders for each, args in descendants(pid).items()}
    assert any("/opt/uv/bin/uv pip install" in args for args in found.values())
    return [*builders, *found]


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def leftovers(running: Daemon) -> list[str]:
    places = (
        running.state_dir / "templates/.environments",
        running.state_dir / "environments/builds",
    )
    return [str(path) for place in places for path in place.glob("*") if path.name != ".files"]


@pytest.mark.root
def test_a_cancelled_build_ends_with_all_its_processes(index: tuple[str, list[int]]) -> None:
    url, asked = index
    with building(index=url) as (running, _), Client(running.socket) as client:
        import_recipes(running, recipe("slow", "tiny"))
        operation = client.build_environments("slow")
        until(lambda: len(asked) > 0)
        assert client.get_environment("slow").state == "building"
        assert b"installing pip" in b"".join(client.environment_log("slow"))
        pids = of_build(running)
        assert client.cancel_operation(operation.id).state == "cancelled"
        until(lambda: are_gone(pids))
        until(lambda: not leftovers(running))


@pytest.mark.root
def test_a_killed_daemon_leaves_no_builder_and_nothing_half_ready(
    index: tuple[str, list[int]],
) -> None:
    url, asked = index
    with building(index=url) as (running, _):
        import_recipes(running, recipe("slow", "tiny"))
        with Client(running.socket) as client:
            client.build_environments("slow")
            until(lambda: len(asked) > 0)
        pids = of_build(running)
        running.kill()
        until(lambda: are_gone(pids))
        running.start()
        until(lambda: not leftovers(running))
        with Client(running.socket) as client:
            assert client.list_environments() == []
            assert client.list_checkouts() == []


@pytest.mark.root
def test_a_killed_builder_is_no_failure_of_the_recipe(index: tuple[str, list[int]]) -> None:
    url, asked = index
    with building(index=url) as (running, _), Client(running.socket) as client:
        import_recipes(running, recipe("slow", "tiny"))
        operation = client.build_environments("slow")
        until(lambda: len(asked) > 0)
        pids = of_build(running)
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: are_gone(pids))
        while (ended := client.get_operation(operation.id)).state == "running":
            time.sleep(0.02)
        assert ended.error is not None
        assert "the builder ended before it had finished" in ended.error.detail
        assert client.list_environments() == []
