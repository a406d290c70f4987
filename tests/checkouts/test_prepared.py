"""Prepared layers, of both backends: what they keep, what is relative to them, who may use them, how long they stay."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkoutlab import ROOT_PEER, USER, USER_PEER, Service, as_user, running_service
from gitrepos import ENV, Upstream

from mirrord.host.peers import Peer
from mirrord.model import Backend
from mirrord.protocol import (
    Checkout,
    Fork,
    ForkCheckout,
    MakeSnapshot,
    PreparedLayer,
    ResetAnswer,
    ResetCheckout,
    SaveLayer,
    Snapshot,
    StartCheckout,
)

pytestmark = pytest.mark.root

GRADER = 23456
OTHER_PEER = Peer(uid=34567, gid=USER, pid=1)

# What an install step does: generated files that are ignored, one that is not, edits of what git tracks, and repositories
# of its own.
PREPARE = r"""
mkdir build; echo compiled > build/ext.o; echo object > src/main.o; echo seen > generated.txt
echo '# pinned' >> README; chmod 755 src/main.py; rm docs/new2.txt; rm empty; ln -s README empty
git init -q build/nested; echo x > build/nested/f; git config user.name me; echo hook > .git/hooks/post-checkout || true
git checkout -q -b mine; git -c user.email=a@b commit -q -a -m theirs
"""


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_held(service: Service) -> Iterator[None]:
    yield
    for lease in service.checkouts._leases:
        service.call(service.checkouts.release, lease.id, ROOT_PEER)
    for layer in service.call(service.checkouts.list_layers, None, ROOT_PEER):
        service.call(service.checkouts.remove_layer, layer.id, ROOT_PEER)


@pytest.fixture(params=[Backend.OVERLAY, Backend.POOL])
def backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    return backend


class Held:
    """What a user does with one checkout."""

    def __init__(self, service: Service, checkout: Checkout, peer: Peer = USER_PEER) -> None:
        self.service = service
        self.lease = checkout
        self.peer = peer
        self.id = checkout.id
        self.tree = Path(checkout.path)

    def shell(self, script: str) -> str:
        done = subprocess.run(
            ["sh", "-ec", script], cwd=self.tree, env=ENV, user=USER, group=USER, extra_groups=[],
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(errors="surrogateescape")

    def save(self, name: str, peer: Peer | None = None) -> PreparedLayer:
        request = SaveLayer(name=name)
        return self.service.call(self.service.checkouts.save, self.id, request, peer or self.peer)

    def fork(self, snapshot: str | None = None) -> Held:
        request = ForkCheckout(snapshot=snapshot)
        made: Fork = self.service.call(self.service.checkouts.fork, self.id, request, self.peer)
        return Held(self.service, made)

    def snapshot(self, name: str) -> Snapshot:
        request = MakeSnapshot(name=name)
        return self.service.call(self.service.checkouts.snapshot, self.id, request, self.peer)

    def reset(self, **where: Any) -> ResetAnswer:
        request = ResetCheckout(**where)
        return self.service.call(self.service.checkouts.reset, self.id, request, self.peer)

    def diff(self) -> bytes:
        return self.service.diff(self.lease)

    def release(self) -> None:
        self.service.call(self.service.checkouts.release, self.id, self.peer)


def start(
    service: Service,
    backend: Backend | None = None,
    commit: str = "v2",
    peer: Peer = USER_PEER,
    **more: Any,
) -> Held:
    request = StartCheckout(instance=f"psf__requests@{commit}", backend=backend, **more)
    return Held(service, service.call(service.checkouts.checkout, request, peer), peer)


def content(tree: Path) -> dict[str, tuple[object, ...]]:
    """Kind, mode, owner and content of all but `.git`."""
    found: dict[str, tuple[object, ...]] = {}
    for above, directories, names in os.walk(tree):
        if above == str(tree):
            directories.remove(".git")
        for name in (*directories, *names):
            path = Path(above) / name
            seen = path.lstat()
            data = (
                os.readlink(path)
                if path.is_symlink()
                else path.read_bytes()
                if path.is_file()
                else b""
            )
            found[str(path.relative_to(tree))] = (oct(seen.st_mode), seen.st_uid, data)
    return found


def control(tree: Path) -> dict[str, bytes]:
    git_dir = tree / ".git"
    return {
        str(path.relative_to(git_dir)): path.read_bytes()
        for path in git_dir.rglob("*")
        if path.is_file()
    }


def prepared(
    service: Service, backend: Backend, name: str = "tools"
) -> dict[str, tuple[object, ...]]:
    """Save a layer; what a checkout with it has to show."""
    held = start(service, backend)
    held.shell(PREPARE)
    held.save(name)
    wanted = content(held.tree)
    held.release()
    return {path: found for path, found in wanted.items() if "build/nested/.git" not in path}


def test_a_checkout_with_a_layer_shows_what_was_saved_and_nothing_of_any_git(
    service: Service, backend: Backend
) -> None:
    plain = start(service, backend)
    wanted = prepared(service, backend)
    held = start(service, backend, layer="tools")
    assert held.lease.layer == "tools"
    assert content(held.tree) == wanted
    theirs, ours = control(plain.tree), control(held.tree)
    assert (ours.keys(), ours["HEAD"]) == (theirs.keys(), theirs["HEAD"])
    assert {n: d for n, d in ours.items() if n != "index"} == {
        n: d for n, d in theirs.items() if n != "index"
    }
    assert not list(held.tree.glob("build/**/.git"))


def test_diff_reset_and_forks_are_relative_to_the_layer(service: Service, backend: Backend) -> None:
    wanted = prepared(service, backend)
    held = start(service, backend, layer="tools")
    assert held.diff() == b""
    held.shell("echo mine >> README; rm generated.txt build/ext.o; echo new > new.txt; rm -r docs")
    patch = held.diff()
    changed = as_user(held.tree, "apply", "--numstat", stdin=patch).splitlines()
    assert [line.split("\t")[2] for line in changed] == [
        "README", "docs/page.txt", "generated.txt", "new.txt",
    ]  # fmt: skip
    assert b" # pinned\n+mine" in patch
    before = content(held.tree)
    held.snapshot("worked")
    fork = held.fork()
    assert content(fork.tree) == before
    assert fork.diff() == patch
    proof = held.reset().proof
    assert proof.tree == held.lease.tree
    assert content(held.tree) == wanted
    assert held.diff() == b""
    held.reset(to="worked")
    assert (content(held.tree), held.diff()) == (before, patch)
    fork.reset()
    assert content(fork.tree) == wanted


def test_git_shows_what_a_layer_does_to_tracked_files_and_not_what_is_ignored(
    service: Service, backend: Backend
) -> None:
    """As after the install step itself; the patch of `diff` has none of it."""
    prepared(service, backend)
    held = start(service, backend, layer="tools")
    status = as_user(held.tree, "status", "--porcelain").splitlines()
    assert sorted(status) == [
        " D docs/new2.txt", " M README", " M src/main.py", " T empty", "?? generated.txt",
    ]  # fmt: skip


def test_a_patch_of_a_layer_applies_on_another_checkout_with_it(
    service: Service, backend: Backend
) -> None:
    prepared(service, backend)
    held, other = (start(service, backend, layer="tools") for _ in range(2))
    held.shell(
        "sed -i 's/pinned/loose/' README; echo x >> generated.txt; git mv src/deep src/moved"
    )
    patch = held.diff()
    service.call(service.checkouts.apply, other.id, USER_PEER, patch=patch)
    assert other.diff() == patch
    assert content(other.tree)["README"] == content(held.tree)["README"]


def test_a_layer_on_a_layer(service: Service, backend: Backend) -> None:
    prepared(service, backend)
    held = start(service, backend, layer="tools")
    held.shell("rm build/ext.o; echo second > build/more.o; echo '# more' >> README")
    wanted = content(held.tree)
    second = held.save("second")
    assert second.copied.files == 3
    held.release()
    on_it = start(service, backend, layer="second")
    assert (content(on_it.tree), on_it.diff()) == (wanted, b"")
    first = next(
        each
        for each in service.call(service.checkouts.list_layers, None, USER_PEER)
        if each.name == "tools"
    )
    service.call(service.checkouts.remove_layer, first.id, USER_PEER)
    on_it.shell("echo x >> README")
    on_it.reset()
    assert content(on_it.tree) == wanted
