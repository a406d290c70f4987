"""git-remote-mirrord with the real git: in a sealed tree, through a daemon, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from daemons import Daemon, daemon
from gitrepos import ENV, Upstream, git

from mirrord.sandbox import gitremote

URL = "https://github.com/acme/widget"


class World(NamedTuple):
    """`tree` is sealed at `base`; `later` is the commit after it."""

    tree: Path
    base: str
    later: str
    environment: dict[str, str]

    def git(self, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *args],
            cwd=cwd or self.tree.parent,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )


def seal(upstream: Upstream, tree: Path, base: str) -> None:
    git(tree.parent, "init", "--quiet", "--template=", str(tree))
    git(tree, "fetch", "--quiet", upstream.url, base, "refs/tags/v1:refs/tags/v1")
    git(tree, "checkout", "--quiet", "--detach", base)
    git(tree, "pack-refs", "--all")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """The helper alone, as sandboxes and containers have it: without any package."""
    upstream = Upstream(tmp_path / "upstream")
    first, base, later = upstream.history(3)
    upstream.git("tag", "-a", "-m", "x", "v1", first)
    tree = tmp_path / "testbed"
    seal(upstream, tree, base)
    programs, home = tmp_path / "bin", tmp_path / "home"
    for directory in (programs, home):
        directory.mkdir()
    helper = programs / "git-remote-mirrord"
    helper.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {gitremote.__file__} "$@"\n')
    helper.chmod(0o755)
    environment = {
        **ENV, "PATH": f"{programs}:{ENV['PATH']}", "HOME": str(home), "TMPDIR": str(home),
        "MIRRORD_TREE": str(tree), "MIRRORD_REPOSITORY": "acme/Widget",
        "MIRRORD_INSTANCE": "acme__widget-7", "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "url.mirrord::https://github.com/.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/",
    }  # fmt: skip
    return World(tree, base, later, environment)


@pytest.mark.parametrize(
    "address",
    ["mirrord::acme__widget-7", "mirrord::acme/widget", "mirrord::acme__widget", URL,
     "https://github.com/Acme/Widget.git/", "mirrord::ssh://git@forge.example/acme/widget.git"],
)  # fmt: skip
def test_a_clone_has_what_the_tree_has(world: World, address: str) -> None:
    """On a branch, with tags, clean; a fetch finds nothing new; nothing is left behind."""
    done = world.git("clone", "--quiet", address, "clone")
    assert (done.returncode, done.stderr) == (0, "")
    clone = world.tree.parent / "clone"
    assert world.git("fetch", cwd=clone).returncode == 0
    assert git(clone, "status", "--short", "--branch") == "## main...origin/main"
    assert git(clone, "rev-parse", "HEAD") == world.base
    assert git(clone, "describe", "--tags").startswith("v1-1-g")
    assert git(clone, "rev-list", "--all", "--count") == "2"
    assert list(Path(world.environment["HOME"]).iterdir()) == []


def test_shallow_clones_and_listings(world: World) -> None:
    assert world.git("clone", "--quiet", "--depth=1", URL, "clone").returncode == 0
    assert git(world.tree.parent / "clone", "rev-list", "--count", "HEAD") == "1"
    listed = world.git("ls-remote", URL).stdout.split()
    assert listed[1::2] == ["HEAD", "refs/heads/main", "refs/tags/v1", "refs/tags/v1^{}"]


@pytest.mark.parametrize("version", ["0", "2"])
def test_a_later_commit_cannot_be_fetched(world: World, version: str) -> None:
    """Nor is it in the store that is served."""
    world.git("clone", "--quiet", URL, "clone")
    clone = world.tree.parent / "clone"
    done = world.git("-c", f"protocol.version={version}", "fetch", "origin", world.later, cwd=clone)
    assert done.returncode != 0
    assert git(clone, "cat-file", "--batch-all-objects", "--batch-check").count("commit") == 2


def test_work_of_the_tree_is_cloned_and_its_hooks_and_settings_do_not_run(world: World) -> None:
    trap = world.tree.parent / "sprung"
    git(world.tree, "switch", "--quiet", "--create", "work")
    git(world.tree, "commit", "--quiet", "--allow-empty", "--message", "work")
    git(world.tree, "config", "uploadpack.packObjectsHook", f"touch {trap}; exec")
    git(world.tree, "config", "core.fsmonitor", f"touch {trap}")
    assert world.git("clone", "--quiet", URL, "clone").returncode == 0
    assert git(world.tree.parent / "clone", "log", "-1", "--format=%s") == "work"
    assert not trap.exists()


def test_submodules_are_cloned_where_their_protocol_is_allowed(world: World) -> None:
    """One of another repository is not here."""
    allow = ("-c", "protocol.mirrord.allow=always")
    top = world.tree.parent / "top"
    git(top.parent, "init", "--quiet", str(top))
    assert world.git(*allow, "submodule", "--quiet", "add", URL, "sub", cwd=top).returncode == 0
    git(top, "commit", "--quiet", "--message", "sub")
    done = world.git(*allow, "clone", "--quiet", "--recurse-submodules", str(top), "copy")
    assert done.returncode == 0
    assert git(world.tree.parent / "copy/sub", "rev-parse", "HEAD") == world.base
    done = world.git("clone", "--recurse-submodules", str(top), "other")
    assert "transport 'mirrord' not allowed" in done.stderr


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("https://github.com/acme/other", "this is a checkout of acme/widget; name an instance"),
        ("mirrord::acme__widget-8", "it is not this checkout"),
        ("mirrord::", "it is not this checkout"),
    ],
)
def test_wrong_names_are_refused(world: World, address: str, told: str) -> None:
    done = world.git("ls-remote", address)
    assert (done.returncode, told in done.stderr) == (128, True), done.stderr


def test_only_reading_is_served(world: World) -> None:
    world.git("clone", "--quiet", URL, "clone")
    done = world.git("push", "origin", "HEAD:new", cwd=world.tree.parent / "clone")
    assert "mirrord: cannot push to" in done.stderr
    assert done.returncode != 0
    assert world.git("archive", f"--remote={URL}", "HEAD").returncode != 0


def test_a_store_that_leads_elsewhere_is_not_served(world: World, tmp_path: Path) -> None:
    """A linked work tree, alternates, links: each may be a whole mirror."""
    objects, moved = world.tree / ".git/objects", tmp_path / "moved"
    objects.rename(moved)
    objects.symlink_to(moved)
    assert "not a sealed store" in world.git("ls-remote", URL).stderr
    objects.unlink()
    moved.rename(objects)
    (objects / "info").mkdir(exist_ok=True)
    (objects / "info/alternates").write_text("/elsewhere\n")
    assert "not a sealed store" in world.git("ls-remote", URL).stderr
    shutil.rmtree(world.tree / ".git")
    (world.tree / ".git").write_text("gitdir: /elsewhere\n")
    assert "not a sealed store" in world.git("ls-remote", URL).stderr


# -- through a daemon ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, list[str]]]:
    top = tmp_path_factory.mktemp("gitremote")
    upstream = Upstream(top / "acme/widget")
    commits = upstream.history(3)
    row = {"repo": "acme/widget", "instance_id": "acme__widget-7", "base_commit": commits[1]}
    text = f'[upstream]\nurl = "file://{top}/{{owner}}/{{name}}"\n[checkouts]\nprewarm = false\n'
    with daemon(text) as made:
        rows = top / "rows.jsonl"
        rows.write_text(json.dumps(row) + "\n")
        command = [sys.executable, "-m", "mirrord", "--socket", str(made.socket)]
        subprocess.run([*command, "dataset", "import", str(rows)], check=True, capture_output=True)
        yield made, commits


def test_an_instance_is_cloned_from_a_checkout_for_this_call(
    running: tuple[Daemon, list[str]], world: World
) -> None:
    """By its name, or by the repository's where the environment says which instance is meant."""
    served, commits = running
    helper = world.tree.parent / "bin/git-remote-mirrord"
    code = "from mirrord.sandbox.gitremote import main; main()"
    helper.write_text(f"#!/bin/sh\nexec {sys.executable} -P -c '{code}' \"$@\"\n")
    project = Path(gitremote.__file__).parents[2]
    environment = {
        **world.environment, "MIRRORD_SOCKET": str(served.socket), "MIRRORD_TREE": "/nonexistent",
        "PYTHONPATH": str(project),
    }  # fmt: skip
    here = world._replace(environment=environment)
    for number, address in enumerate(("mirrord::acme__widget-7", URL)):
        clone = world.tree.parent / f"clone{number}"
        done = here.git("clone", "--quiet", address, str(clone))
        assert (done.returncode, done.stderr) == (0, "")
        assert git(clone, "rev-list", "--all") == "\n".join(commits[1::-1])
        assert here.git("fetch", "origin", commits[2], cwd=clone).returncode != 0
    assert served.json("GET", "/v1/checkouts") == []
    unknown = here.git("ls-remote", "mirrord::acme__widget-8")
    assert "mirrord: cannot" in unknown.stderr
    here.environment["MIRRORD_SOCKET"] = "/nonexistent"
    assert "mirrord: cannot" in here.git("ls-remote", "mirrord::acme__widget-7").stderr
