"""Run the commands and snippets that the documents show; compare what they print where that is
stable.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from sessions import PROJECT, Shell, blocks, localized, session

import mirrord

pytestmark = pytest.mark.slow
OF_ROOT = pytest.mark.root  # checkouts for other users
NOT_RUN = {
    "make setup": "the tests run in the environment that it makes",
    "mirrord serve": "the tests have a daemon with an upstream of their own",
    'export PATH="$PWD/.venv/bin:$PATH"': "the session has a PATH of its own",
    "pipx install": "tests/packaging/test_installation.py installs the wheels",
    "uv tool install": "it does so too",
    "python3 -m venv harness": "tests/client/test_packaging.py installs the client",
    "harness/bin/python": "it needs that environment",
}


class World:
    """A daemon that knows the documents' instances, and a directory to run their commands in."""

    def __init__(self, running: Daemon, bases: list[str], directory: Path) -> None:
        self.running = running
        self.bases = bases
        self.directory = directory
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MIRRORD_SOCKET": str(running.socket),
            "GIT_PAGER": "cat",
        }

    def localized(self, text: str) -> str:
        """A document's text with the commits of our upstream."""
        return localized(text, self.bases)

    def shell(self) -> Shell:
        return Shell(env=self.environment, cwd=self.directory)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("documents")
    upstream = Upstream(root / "psf" / "requests")
    setup = [f"# line {number}" for number in range(1, 58)] + ["setup("]
    setup += ["    classifiers=(", "", "    ),", ")"]
    upstream.write({"setup.py": "\n".join(setup) + "\n"})
    (upstream.path / "setup.py").chmod(0o755)
    upstream.git("add", "--all")
    upstream.git("commit", "--quiet", "--message", "history update")
    bases = [upstream.commit({"VERSION": f"{v}\n"}, f"v{v}") for v in ("2.3.0", "2.31.0")]
    upstream.commit({"VERSION": "later\n"})
    directory = root / "session"
    directory.mkdir()
    with daemon(f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n') as running:
        yield World(running, bases, directory)


def stable(text: str) -> str:
    """Drop what differs between machines: paths of checkouts, blob ids, numbers of objects."""
    text = re.sub(r"\S*/checkouts/[a-z2-7]{16}/tree", "TREE", text)
    text = re.sub(r"^[0-9a-f]{7} ", "ID ", text, flags=re.MULTILINE)
    text = re.sub(r"^index [0-9a-f]{40}\.\.[0-9a-f]{40}", "index A..B", text, flags=re.MULTILINE)
    text = re.sub(r"(checked (?:index|control files)) [0-9a-f]{64}", r"\1 HASH", text)
    text = re.sub(r"objects \d+ hashed", "objects N hashed", text)
    return re.sub(r"\d[\d,]* objects present, [\d,]+ in", "N objects present, N in", text)


def is_run(command: str) -> bool:
    return not any(command.startswith(prefix) for prefix in NOT_RUN)


@pytest.mark.parametrize(
    "document", ["README.md", "docs/backup.md", pytest.param("docs/grading.md", marks=OF_ROOT)]
)
def test_a_session_prints_what_it_shows(world: World, document: str) -> None:
    if document != "README.md":
        subprocess.run(
            ["mirrord", "mirror", "add", "psf/requests"], env=world.environment, check=True
        )
    shell = world.shell()
    shown_tree, tree = "", ""
    try:
        for block in blocks(document, "console"):
            for command, shown in session(world.localized(block)):
                if not is_run(command):
                    continue
                printed = shell.run(command.replace(shown_tree, tree) if tree else command)
                if command.startswith("mirrord checkout "):
                    shown_tree, tree = shown.strip(), printed.strip()
                if shown:
                    assert stable(printed) == stable(shown), command
    finally:
        shell.close()
        with mirrord.Client(world.running.socket) as client:
            for checkout in client.list_checkouts():
                client.release_checkout(checkout.id)


@pytest.mark.parametrize(
    "document", ["CONTRIBUTING.md", "docs/installation.md", "docs/observability/README.md"]
)
def test_commands_run(world: World, document: str) -> None:
    shell = world.shell()
    try:
        for block in blocks(document, "sh"):
            for command in filter(is_run, block.splitlines()):
                at_project = (
                    f"cd {PROJECT} && {command}" if command.startswith(".venv") else command
                )
                shell.run(at_project)
    finally:
        shell.close()


@pytest.mark.parametrize("document", ["README.md", pytest.param("docs/client.md", marks=OF_ROOT)])
def test_snippets_run(world: World, document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace each, with an agent that changes a file."""
    monkeypatch.chdir(world.directory)
    monkeypatch.setenv("MIRRORD_SOCKET", str(world.running.socket))
    rows = [
        f'{{"instance_id": "psf__requests-v{v}", "repo": "psf/requests",'
        f' "base_commit": "{base}"}}\n'
        for v, base in zip(("2.3.0", "2.31.0"), world.bases, strict=True)
    ]
    (world.directory / "releases.jsonl").write_text("".join(rows))
    with mirrord.Client() as client:
        client.wait(client.import_dataset("releases.jsonl"))
    patches: list[bytes] = []
    snippets = blocks(document, "python")
    if document == "docs/client.md":
        snippets += blocks("docs/sandboxes.md", "python")
    assert snippets
    for snippet in snippets:
        names: dict[str, object] = {
            "run_agent": lambda path: (path / "new").write_text("work\n"),
            "run_install": lambda path: (path / "version").write_text("1\n"),
            "run_tests": lambda path: (path / "new").read_text(),
        }
        exec(compile(snippet, document, "exec"), names)
        if isinstance(patch := names.get("patch"), bytes):
            patches.append(patch)
    assert patches
    assert all(b"+work" in patch for patch in patches)
    with mirrord.Client() as client:
        assert client.list_checkouts() == []
