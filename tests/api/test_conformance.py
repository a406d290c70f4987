"""Everything that a backend must undo: one table of what a checkout's user can do, for every backend and history.

Each entry is a shell script that runs in the checkout as its owner (or as root, where an owner could not do it), followed by a
reset. Real git, started away from the checkout's configuration, is the oracle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from checkout_parts import ROOT_PEER, USER, USER_PEER, Service, as_user, run_as, running_service
from gitrepos import Upstream, git

from mirrord.host.peers import Peer
from mirrord.model import Backend, History
from mirrord.protocol import Checkout, ResetAnswer, ResetCheckout, SaveLayer, StartCheckout

pytestmark = pytest.mark.root

HOSTILE = {
    "staged edits": "echo x >>README; git rm -q --cached src/main.py; git add -A",
    "ignored files": "mkdir build; echo 1 >build/out.o; echo 2 >a.o; echo 3 >src/b.o",
    "nested repositories": "git init -q nested; cd nested; echo 1 >f; git add f; git commit -qm n; cd ..; git init -q src",
    "hooks": """mkdir -p .git/hooks
        for h in post-checkout pre-commit post-index-change reference-transaction; do
        printf '#!/bin/sh\\ntouch "%s"\\n' "$CANARY" >.git/hooks/$h; chmod +x .git/hooks/$h; done""",
    "core.fsmonitor": """printf '#!/bin/sh\\ntouch "%s"\\n' "$CANARY" >evil; chmod +x evil
        git config core.fsmonitor "$PWD/evil" """,
    "core.hooksPath": """mkdir h; printf '#!/bin/sh\\ntouch "%s"\\n' "$CANARY" >h/post-index-change; chmod +x h/*
        git config core.hooksPath "$PWD/h" """,
    "aliases": """git config alias.st "!touch '$CANARY'"; git config core.pager "touch '$CANARY'" """,
    "filters": """git config filter.x.clean "touch '$CANARY'; cat"; git config filter.x.smudge "touch '$CANARY'; cat"
        echo '* filter=x' >.git/info/attributes; echo '* filter=x' >>.gitattributes; echo x >>README""",
    "info/attributes": "mkdir -p .git/info; echo '* -text' >.git/info/attributes",
    "info/exclude": "echo '*' >.git/info/exclude; echo 1 >hidden",
    "tags and branches": "git tag mine; git branch b; git checkout -q -b work",
    "stash": "echo x >>README; git stash -q",
    "refs/replace": "git replace HEAD $(git commit-tree -m forged HEAD^{tree})",
    "skip-worktree": "git update-index --skip-worktree README; echo x >README",
    "assume-unchanged": "git update-index --assume-unchanged README; echo x >README",
    "sparse checkout": "git sparse-checkout set docs",
    "forged stat": """m=$(stat -c %y README); s=$(stat -c %s README); head -c $s /dev/zero | tr '\\0' z >new
        cat new >README; rm new; touch -d "$m" README""",
    "half a merge": """git checkout -q -b a; echo a >README; git commit -qam a
        git checkout -q -b b HEAD~1; echo b >README; git commit -qam b; git merge -q a || true""",
    "half a rebase": """git checkout -q -b a; echo a >README; git commit -qam a
        git checkout -q -b b HEAD~1; echo b >README; git commit -qam b; git rebase -q a || true""",
    "half a bisect": "git bisect start -q || true; git bisect bad || true",
    "read-only directories": "echo 1 >docs/new; chmod 500 docs; echo 1 >src/deep/new; chmod 000 src/deep",
    "pipes and sockets": """mkfifo pipe; rm README; mkfifo README; rm -r docs; mkfifo docs
        python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'""",
    ".git deleted": "rm -rf .git",
    ".git a file": "rm -rf .git; echo 'gitdir: /etc' >.git",
    ".git a link": "rm -rf .git; ln -s /tmp .git",
    "gc and repack": "git commit -q --allow-empty -m x; git gc -q --prune=now; git repack -adfq",
    "packs deleted": "rm -rf .git/objects/pack/*",
    "packs altered": """for p in .git/objects/pack/*.pack; do [ -f "$p" ] || continue
        cp "$p" x; rm -f "$p"; (cat x; echo junk) >"$p"; rm -f x; done""",
    "packs replaced, size and time kept": """for p in .git/objects/pack/*; do cp -p "$p" x; rm -f "$p"
        head -c $(stat -c %s x) /dev/zero >"$p"; touch -r x "$p"; chmod 444 "$p"; rm -f x; done""",
    "directories behind links": "mv docs elsewhere; ln -s elsewhere docs; mv .git/objects o; ln -s ../o .git/objects",
    "HEAD moved": "git checkout -q HEAD~1 || git checkout -q --orphan nowhere",
    "commits made": "echo x >>README; git commit -qam x; echo y >new; git add new; git commit -qm y",
    "worktrees added": 'git worktree add -q --detach "$SPACE/wt"; rm -rf "$SPACE/wt"',
    "submodule directory filled": "echo 1 >vendor/sub/file; mkdir vendor/sub/d; echo 2 >vendor/sub/d/f",
    "chmod 000 of everything": "chmod -R 000 .",
    "everything deleted": "rm -rf ./* .gitignore .gitattributes",
    "files and directories swapped": "rm README; mkdir README; echo 1 >README/x; rm -r docs; echo 1 >docs; rm link; mkdir link",
    "links out of the tree": "rm -r src; ln -s /etc src; rm README; ln -s /etc/passwd README; ln -s / root",
    "hard links": "ln README docs/twin; ln data.bin twin; echo x >>twin",
    "modes": "chmod 755 README; chmod 644 run.sh; chmod 777 docs; chmod 4755 data.bin",
    "line ends": "printf 'a\\nb\\n' >win.txt",
    "odd names": r"""printf 1 >"$(printf 'n\377')"; printf 2 >"$(printf 'a\nb')"; mkdir -p "-rf"; echo 3 >"-rf/x"; rm caf*""",
    "deep directories": "for i in $(seq 60); do mkdir $(printf 'd%.0s' $(seq 50)) && cd d*; done; echo 1 >f",
    "empty directories": "mkdir -p e/m/p/t/y",
    "alternates, shallow, grafts": """mkdir -p .git/info .git/objects/info; echo /tmp >.git/objects/info/alternates
        git rev-parse HEAD >.git/shallow; git rev-parse HEAD >.git/info/grafts""",
    "commondir": "echo /tmp >.git/commondir",
}
"""Actions of a checkout's owner."""

BY_ROOT = {
    "files owned by others": "chown 0:0 README docs; mkdir -m 700 private; echo 1 >private/f; echo 1 >owned",
    "immutable files": "chattr +i README; echo 1 >kept; chattr +i kept; chattr +a docs; chattr +i src; chattr +i .",
    "top replaced by a link": 'mv "$PWD" "$PWD.moved"; ln -s /etc "$PWD"; rm -rf "$PWD.moved"',
    "top deleted": 'rm -rf "$PWD"',
}
"""Actions of root, or of a process with the daemon's uid."""


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        (running.state / "space").mkdir(mode=0o777)
        (running.state / "space").chmod(0o777)
        yield running


@pytest.fixture(params=[Backend.POOL, Backend.OVERLAY])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


def start(
    service: Service, backend: Backend, history: History, commit: str = "v2"
) -> tuple[Checkout, Peer]:
    peer = ROOT_PEER if history is History.LINKED else USER_PEER
    request = StartCheckout(instance=f"psf__requests@{commit}", history=history, backend=backend)
    return service.call(service.checkouts.checkout, request, peer), peer


def listing(root: Path, *, leave_out: str = "") -> dict[str, tuple[object, ...]]:
    """Kind, mode, owner and content of everything below a directory."""
    found: dict[str, tuple[object, ...]] = {}
    for above, directories, names in os.walk(root):
        for name in [*directories, *names]:
            path = Path(above) / name
            relative = str(path.relative_to(root))
            if relative == leave_out or relative.startswith(f"{leave_out}/"):
                continue
            seen = path.lstat()
            content = (
                os.readlink(path)
                if path.is_symlink()
                else path.read_bytes()
                if path.is_file()
                else b""
            )
            found[relative] = (oct(seen.st_mode), seen.st_uid, content)
    return found


class Fresh:
    """The state of a new checkout."""

    def __init__(self, service: Service, checkout: Checkout, uid: int) -> None:
        self._service = service
        self.checkout = checkout
        self._uid = uid
        self._tree = Path(checkout.path)
        self.state = self.look()

    def look(self) -> dict[str, object]:
        git_dir = Path(as_user(self._tree, "rev-parse", "--absolute-git-dir", uid=self._uid))
        control = {name: seen for name, seen in listing(git_dir).items() if name != "index"}
        return {
            "tree": listing(self._tree, leave_out=".git"),
            "control": control,
            "index": as_user(self._tree, "ls-files", "--stage", "-v", "-f", uid=self._uid),
            "objects": self._objects(),
            "hash": self._hash(),
        }

    def _objects(self) -> str:
        """Every object of the checkout's own store; a linked one has none."""
        if (self._tree / ".git").is_file():
            return ""
        return as_user(
            self._tree, "cat-file", "--batch-all-objects", "--batch-check", uid=self._uid
        )

    def _hash(self) -> str:
        """git's tree of what is on disk, computed with the mirror's repository and an own index."""
        index = {"GIT_INDEX_FILE": str(self._service.state / "oracle.index"), "GIT_CONFIG_COUNT": "1",
                 "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}  # fmt: skip
        at = (f"--git-dir={self._service.mirror}", f"--work-tree={self._tree}")
        git(self._tree, *at, "read-tree", "v2", env=index)
        git(self._tree, *at, "add", "--all", "--force", ":!/.git", env=index)
        return git(self._tree, *at, "write-tree", env=index)

    def must_be_back(self, answer: ResetAnswer) -> None:
        assert as_user(self._tree, "status", "--porcelain", "--ignored", uid=self._uid) == ""
        now = self.look()
        for part, before in self.state.items():
            assert now[part] == before, part
        assert now["hash"] == answer.proof.tree == answer.tree
        assert as_user(self._tree, "rev-parse", "HEAD", uid=self._uid) == answer.proof.head
        assert not (self._service.state / "space/canary").exists()


def reset(service: Service, checkout: Checkout, peer: Peer, **onto: str) -> ResetAnswer:
    return service.call(service.checkouts.reset, checkout.id, ResetCheckout(**onto), peer)


@pytest.fixture(scope="module")
def sealed(service: Service) -> Callable[[Backend], Fresh]:
    """A checkout in its initial state; the previous test failed otherwise."""
    return cache(lambda backend: Fresh(service, start(service, backend, History.SEALED)[0], USER))


@pytest.mark.parametrize("what", HOSTILE)
def test_reset_undoes(
    service: Service, sealed: Callable[[Backend], Fresh], backend: Backend, what: str
) -> None:
    """A reset undoes all actions of the owner, and nothing planted runs."""
    fresh = sealed(backend)
    run_as(USER, HOSTILE[what], Path(fresh.checkout.path), service)
    fresh.must_be_back(reset(service, fresh.checkout, USER_PEER))


@pytest.mark.parametrize("what", BY_ROOT)
def test_reset_undoes_what_root_did(service: Service, backend: Backend, what: str) -> None:
    """A reset undoes root's actions in another user's checkout."""
    checkout, peer = start(service, backend, History.SEALED)
    fresh = Fresh(service, checkout, USER)
    run_as(0, BY_ROOT[what], Path(checkout.path), service)
    fresh.must_be_back(reset(service, checkout, peer))
    service.call(service.checkouts.release, checkout.id, peer)


TOGETHER = {
    History.SQUASHED: (
        "staged edits", "ignored files", "nested repositories", "hooks", "core.fsmonitor", "filters", "info/exclude",
        "tags and branches", "refs/replace", "skip-worktree", "gc and repack", "commits made", "odd names",
        "submodule directory filled", "files and directories swapped", "packs deleted",
    ),
    History.LINKED: (
        "staged edits", "ignored files", "nested repositories", "skip-worktree", "assume-unchanged", "forged stat",
        "read-only directories", "submodule directory filled", "odd names", "modes", "everything deleted",
    ),
}  # fmt: skip
"""Actions in sequence for the other histories. Users of linked checkouts are trusted with the mirror."""


ON_A_LAYER = (
    "staged edits", "ignored files", "hooks", "info/exclude", "stash", "forged stat", "read-only directories",
    ".git deleted", "everything deleted", "files and directories swapped", "links out of the tree", "hard links", "modes",
)  # fmt: skip
PREPARE = """mkdir build; echo 1 >build/out.o; echo 2 >a.o; echo more >>README; rm -r docs; echo x >docs; rm run.sh
    chmod 755 data.bin; mkdir src/deep/new; echo y >src/deep/new/z; ln -sf README link"""


def test_reset_goes_back_to_a_prepared_layer(service: Service, backend: Backend) -> None:
    """A reset also undoes changes to the layer's files, and the layer is not part of the diff."""
    made, peer = start(service, backend, History.SEALED)
    run_as(USER, PREPARE, Path(made.path), service)
    layer = service.call(service.checkouts.save, made.id, SaveLayer(name="prepared"), peer)
    service.call(service.checkouts.release, made.id, peer)
    request = StartCheckout(instance="psf__requests@v2", backend=backend, layer="prepared")
    checkout = service.call(service.checkouts.checkout, request, peer)
    fresh = Fresh(service, checkout, USER)
    tree = Path(checkout.path)
    assert (tree / "docs").read_text() == "x\n"
    for what in ON_A_LAYER:
        run_as(USER, HOSTILE[what] + "; echo z >a.o; rm -rf src/deep/new", tree, service)
        answer = reset(service, checkout, peer)
        assert fresh.look() == fresh.state, what
        assert (answer.proof.tree, answer.layer) == (checkout.tree, "prepared")
        assert service.diff(checkout) == b""
    service.call(service.checkouts.release, checkout.id, peer)
    service.call(service.checkouts.remove_layer, layer.id, peer)


@pytest.mark.parametrize("history", TOGETHER)
def test_reset_undoes_many_things_at_once(
    service: Service, backend: Backend, history: History
) -> None:
    """Many actions on one checkout, for the other histories."""
    if (backend, history) == (Backend.OVERLAY, History.LINKED):
        pytest.skip("an overlay is never linked to a mirror")
    checkout, peer = start(service, backend, history)
    fresh = Fresh(service, checkout, peer.uid)
    for what in TOGETHER[history]:
        run_as(peer.uid, HOSTILE[what], Path(checkout.path), service)
    fresh.must_be_back(reset(service, checkout, peer))
    service.call(service.checkouts.release, checkout.id, peer)


@pytest.mark.parametrize("history", [History.SEALED, History.SQUASHED])
def test_nothing_outside_its_history_is_in_a_checkout(
    service: Service, backend: Backend, rich: Upstream, history: History
) -> None:
    """Its objects are the closure of HEAD: no tag object, later commit, remote or alternate."""
    checkout, peer = start(service, backend, history)
    tree = Path(checkout.path)
    present = {
        line.split()[0]
        for line in as_user(tree, "cat-file", "--batch-all-objects", "--batch-check").splitlines()
    }
    closure = {
        line.split()[0] for line in as_user(tree, "rev-list", "--objects", "HEAD").splitlines()
    }
    assert present == closure
    assert rich.git("rev-parse", "v3") not in present
    assert as_user(tree, "remote") == ""
    assert as_user(tree, "reflog") == ""
    assert not (tree / ".git/objects/info/alternates").exists()
    assert as_user(tree, "tag").split() == (["v1", "v2"] if history is History.SEALED else [])
    service.call(service.checkouts.release, checkout.id, peer)


def test_reset_moves_on_and_back(service: Service, backend: Backend) -> None:
    """Moved with changes to another commit of the mirror and back, verified clean each time."""
    checkout, peer = start(service, backend, History.SEALED)
    fresh = Fresh(service, checkout, USER)
    run_as(USER, HOSTILE["everything deleted"], Path(checkout.path), service)
    moved = reset(service, checkout, peer, commit="v1")
    assert as_user(Path(checkout.path), "describe", "--tags") == "v1"
    assert as_user(Path(checkout.path), "status", "--porcelain", "--ignored") == ""
    assert moved.commit == as_user(Path(checkout.path), "rev-parse", "HEAD")
    run_as(USER, HOSTILE["files and directories swapped"], Path(checkout.path), service)
    fresh.must_be_back(reset(service, checkout, peer, commit="v2"))
    service.call(service.checkouts.release, checkout.id, peer)
