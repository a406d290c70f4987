"""What agents do to git in their checkout: change, copies and grade are by content, and a reset is clean."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemons import daemon
from gitrepos import ENV, Upstream

from mirrord import Backend, Checkout, Client

pytestmark = [pytest.mark.root, pytest.mark.slow]

AGENT = 34541
EDIT = "echo new >a; echo n >n\n"
IDENTITY = "git config user.name a; git config user.email a@example.com\n"
# each with what the diff has besides `a` and `n`; no action may leave the edit out
ACTIONS: dict[str, tuple[str, list[str]]] = {
    # repositories in the tree
    "a nested one with a newline in its name": ("git init -q 'sub\nx'; echo 1 >'sub\nx/f'", ["sub\nx/f"]),
    "a nested one with a commit": (
        "git init -q sub; cd sub; echo 1 >f; git add f; git commit -qm x", ["sub/f"],
    ),
    "a nested one that is broken": ("mkdir -p sub/.git; echo 1 >sub/f", ["sub/f"]),
    "one elsewhere": ("mkdir sub; echo gitdir: /nowhere >sub/.git; echo 1 >sub/f", ["sub/f"]),
    "three in each other": ("git init -q s; git init -q s/t; git init -q s/t/u; echo 1 >s/t/u/f", ["s/t/u/f"]),
    "an ignored one": ("mkdir ign; git init -q ign/r; echo 1 >ign/r/f", []),
    "a worktree inside": (
        "git worktree add -q wt -b w; echo 1 >wt/z", ["wt/.gitignore", "wt/a", "wt/b", "wt/dir/c", "wt/z"],
    ),
    "a submodule": (
        ("git init -q .git/made; git -C .git/made commit -q --allow-empty -m x;"
        " git -c protocol.file.allow=always submodule add -q ./.git/made s"), [".gitmodules"],
    ),
    # commits and branches
    "a commit": ("git add -A; git commit -qm x", []),
    "a commit, and gc": ("git add -A; git commit -qm x; git gc -q --prune=now --aggressive", []),
    "an earlier commit": ("git checkout -qf HEAD~1\n" + EDIT, []),
    "another branch": ("git checkout -qb o; git add -A; git commit -qm x", []),
    "no branch": ("git symbolic-ref HEAD refs/heads/none", []),
    "an orphan": ("git checkout -q --orphan o; git add -A; git commit -qm x", []),
    "tags and notes": ("git tag -a -m x t1; git tag t2; git notes add -m x; git replace HEAD HEAD~1", []),
    "a stash that stays": ("echo s >b; git stash -qu\n" + EDIT, []),
    "a merge with conflicts": (
        "git stash -qu; git checkout -qb o HEAD~1; echo x >a; git commit -qam x; git merge -q main\n" + EDIT, [],
    ),
    "a rebase that stopped": (
        "git stash -qu; git checkout -qb o HEAD~1; echo x >a; git commit -qam x; git rebase -q main\n" + EDIT, [],
    ),
    # the index
    "staged, then put back": ("echo s >b; git add b; echo 1 >b", []),
    "staged, then deleted": ("echo s >q; git add q; rm q", []),
    "intent to add": ("git add -N n", []),
    "skip-worktree": ("git update-index --skip-worktree a; git update-index --assume-unchanged b", []),
    "a sparse checkout": ("git sparse-checkout set --cone ign\n" + EDIT, ["dir/c"]),
    "a split index": ("git update-index --split-index; git add n", []),
    "a huge index": (
        ("h=$(git hash-object -w a); for i in $(seq 20000); do printf '100644 %s\\tz/%d\\n' $h $i; done"
        " | git update-index --index-info"), [],
    ),
    "locks": ("touch .git/index.lock .git/HEAD.lock .git/config.lock", []),
    "a directory as index": ("rm .git/index; mkdir .git/index", []),
    "a pipe as index": ("rm .git/index; mkfifo .git/index", []),
    # what .git is
    "no .git": ("rm -rf .git", []),
    "a new .git": ("rm -rf .git; git init -q; git add -A; git commit -qm x", []),
    "a file as .git": ("rm -rf .git; echo gitdir: /nowhere >.git", []),
    "a link as .git": ("rm -rf .git; ln -s /etc .git", []),
    "a link to itself as .git": ("rm -rf .git; ln -s .git .git", []),
    "a pipe as .git": ("rm -rf .git; mkfifo .git", []),
    "a locked .git": ("chmod -R 000 .git", []),
    # what is in .git
    "objects that are garbage": (
        "chmod -R u+w .git/objects; find .git/objects -type f | while read f; do echo garbage >$f; done", [],
    ),
    "objects that are empty": (
        "chmod -R u+w .git/objects; find .git/objects -type f | while read f; do : >$f; done", [],
    ),
    "no objects": ("rm -rf .git/objects", []),
    "a file as objects": ("rm -rf .git/objects; echo >.git/objects", []),
    "a file as refs": ("rm -rf .git/refs; echo >.git/refs", []),
    "a link as HEAD": ("rm .git/HEAD; ln -s /etc/shadow .git/HEAD", []),
    "a pipe as HEAD": ("rm .git/HEAD; mkfifo .git/HEAD", []),
    "a pipe as packed-refs": ("rm -f .git/packed-refs; mkfifo .git/packed-refs", []),
    "alternates": ("echo ../../.git/objects >.git/objects/info/alternates", []),
    "a configuration that is none": ("echo '[[[' >.git/config", []),
    "a monitor, filters and hooks": (
        ("git config core.fsmonitor 'touch \"$PWD/ran\"'; git config filter.x.clean 'touch ran'\n"
        "mkdir -p .git/info .git/hooks; echo '* filter=x eol=crlf ident' >.git/info/attributes\n"
        "printf '#!/bin/sh\\ntouch ran\\n' >.git/hooks/post-checkout; chmod +x .git/hooks/post-checkout"), [],
    ),
    "another format": ("git config extensions.objectFormat sha256; git config core.repositoryFormatVersion 9", []),
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("agents")
    upstream = Upstream(root / "acme/agents")
    upstream.commit({"a": "0\n", "b": "1\n", "dir/c": "1\n", ".gitignore": "ign/\n"})
    commit = upstream.commit({"a": "1\n"})
    file = root / "rows.jsonl"
    row = {"instance_id": "agents", "repo": "acme/agents", "base_commit": commit}
    file.write_text(json.dumps(row))
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
    with daemon(text) as running, Client(running.socket) as client:
        client.wait(client.import_dataset(file))
        yield client


@contextmanager
def held(client: Client, backend: Backend) -> Iterator[Checkout]:
    with client.checkout("agents", owner=AGENT, backend=backend) as checkout:
        yield checkout


def as_agent(tree: Path, script: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", script],
        cwd=tree,
        env=ENV,
        capture_output=True,
        check=False,
        user=AGENT,
        group=AGENT,
        extra_groups=[],
    )


def named(diff: bytes) -> set[bytes]:
    return {line for line in diff.splitlines() if line.startswith(b"diff --git ")}


@pytest.mark.parametrize("backend", [Backend.OVERLAY, Backend.POOL])
@pytest.mark.parametrize("action", ACTIONS)
def test_whatever_became_of_git_the_change_is_whole_and_a_reset_is_clean(
    client: Client, backend: Backend, action: str
) -> None:
    script, more = ACTIONS[action]
    with held(client, backend) as checkout:
        as_agent(checkout.path, IDENTITY + EDIT + script)
        diff = checkout.diff()
        assert b"+new\n" in diff
        assert len(named(diff)) == len({"a", "n", *more})
        snapshot = checkout.snapshot()
        for copy in (checkout.fork(), checkout.grade()):
            with copy:
                assert copy.diff() == diff
        checkout.reset()
        seen = as_agent(checkout.path, "git status --porcelain --ignored; git rev-parse HEAD; ls")
        assert seen.stdout.decode().split() == [checkout.commit, "a", "b", "dir"]
        checkout.reset(to=snapshot.name)
        assert checkout.diff() == diff
        assert not (checkout.path / "ran").exists()


@pytest.mark.parametrize("backend", [Backend.OVERLAY, Backend.POOL])
def test_a_process_that_writes_on_reaches_no_tree_after_a_reset(
    client: Client, backend: Backend
) -> None:
    """It keeps its old directory; the reset tree stays what was proven, for it and the next lease."""
    script = "while :; do echo x >evil; echo x >a; mkdir -p d; echo x >d/evil; git gc -q; done"
    with held(client, backend) as checkout:
        writer = subprocess.Popen(
            ["sh", "-c", script],
            cwd=checkout.path,
            env=ENV,
            stderr=subprocess.DEVNULL,
            user=AGENT,
            group=AGENT,
            extra_groups=[],
        )
        try:
            checkout.reset()
            checkout.release()
            with held(client, backend) as following:
                for _ in range(20):
                    assert following.diff() == b""
                    assert (following.path / "a").read_text() == "1\n"
        finally:
            writer.kill()
            writer.wait()
