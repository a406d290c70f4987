"""Layers by content: what `write_layer` writes, and what a checkout on it shows, with both backends."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from checkout_parts import (
    NAME,
    USER,
    USER_PEER,
    Service,
    as_user,
    run_as,
    running_service,
    terms_of,
)
from gitrepos import Upstream, git
from waiting import until

from mirrord.checkouts.lease import Base, Lease
from mirrord.errors import ProofFailedError
from mirrord.git.objects.repository import open_objects
from mirrord.git.objects.trees import BaseTree
from mirrord.model import Backend, CommitId, History, LayerId, new_checkout_id
from mirrord.protocol import ResetCheckout
from mirrord.trees.layer import LayerFile, is_whiteout, write_layer

pytestmark = pytest.mark.root

BACKENDS = [Backend.OVERLAY, Backend.POOL]


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        yield running


def checkout_on(
    service: Service, files: list[LayerFile], backend: Backend, *, failures: int = 0
) -> Lease:
    """A checkout of v2 with a layer of these files, as grading makes one, after some that fail."""
    tree = git(service.mirror, "rev-parse", "v2^{tree}")
    commit = CommitId(git(service.mirror, "rev-parse", "v2"))
    leases = service.checkouts.leases
    checkout = new_checkout_id()
    draft = Lease(
        id=checkout, directories=leases.directories(checkout), mirror=NAME, history=History.SEALED,
        backend=backend, base=Base(commit=commit, tree=tree), terms=terms_of(USER),
    )  # fmt: skip

    async def make() -> Lease:
        lifecycle = service.checkouts.lifecycle
        with service.checkouts.layers.making() as new:
            with open_objects(service.mirror) as objects:
                write_layer(new, BaseTree(objects, tree).names_in, files)
            base = replace(draft.base, layer=LayerId(new.name))
            for _ in range(failures):
                wrong = replace(leases.like(draft, backend), base=replace(base, tree="0" * 40))
                with pytest.raises(ProofFailedError):
                    await lifecycle.make(wrong)
                while any((service.state / "leases").glob(".trash-*")):
                    await anyio.sleep(0.01)
            lease, _ = await lifecycle.make(replace(draft, base=base))
        return lease

    return service.call(make)


def layers_of(service: Service) -> list[str]:
    return [each for each in os.listdir(service.state / "templates/.layers") if each[0] != "."]


FILES: list[LayerFile] = [
    (b"README", 0o100644, b"changed\n"),
    (b"new/deep/file.py", 0o100755, b"print()\n"),
    (b"new/link", 0o120000, b"../README"),
    (b"empty", None, b""),
    (b"src/deep/er/x.txt", None, b""),  # and with it two directories
    (b"docs", 0o100644, b"a file where a directory was\n"),
    (b"docs/page.txt", None, b""),
    (b"docs/new2.txt", None, b""),
    (b"run.sh", None, b""),
    (b"run.sh/inside", 0o100644, b"a directory where a file was\n"),
    (b"never/there", None, b""),
    (b"caf\xe9 \n.txt", 0o100644, b"odd\n"),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkout_on_a_layer_shows_it_as_its_owners(service: Service, backend: Backend) -> None:
    """git in the checkout sees exactly the changes, and what the base has and lost is gone."""
    lease = checkout_on(service, FILES, backend)
    tree = lease.tree_path
    assert (tree / "README").read_bytes() == b"changed\n"
    assert stat.S_IMODE((tree / "new/deep/file.py").stat().st_mode) == 0o755
    assert os.readlink(tree / "new/link") == "../README"
    assert not (tree / "src/deep").exists()
    assert (tree / "docs").is_file()
    assert {path.lstat().st_uid for path in tree.rglob("*")} == {USER}
    as_user(tree, "add", "--all")
    seen = as_user(tree, "status", "--porcelain", "--no-renames", "-z").split("\0")
    assert sorted(filter(None, seen)) == sorted([
        "M  README", "A  caf\udce9 \n.txt", "A  docs", "D  docs/new2.txt", "D  docs/page.txt",
        "D  empty", "A  new/deep/file.py", "A  new/link", "D  run.sh", "A  run.sh/inside",
        "D  src/deep/er/x.txt",
    ])  # fmt: skip
    service.call(service.checkouts.release, lease.id, USER_PEER)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_attempt_that_failed_leaves_the_layer_to_the_next_one(
    service: Service, backend: Backend
) -> None:
    """Its files are removed, while the layer that both share is still wanted."""
    lease = checkout_on(service, FILES, backend, failures=1)
    assert (lease.tree_path / "README").read_bytes() == b"changed\n"
    service.call(service.checkouts.release, lease.id, USER_PEER)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_diff_of_a_checkout_on_a_layer_is_from_the_base(
    service: Service, backend: Backend
) -> None:
    """The layer's changes and later ones are one diff."""
    lease = checkout_on(service, FILES, backend)
    tree = lease.tree_path
    script = "for f in README src/main.py; do echo more >> $f; done; rm docs; mkdir docs; touch docs/other"
    run_as(USER, script, tree, service)
    patch = service.diff(lease)
    as_user(tree, "add", "--all")
    wanted = as_user(tree, "diff", "--cached", "--binary", "--full-index", "-M")
    assert os.fsdecode(patch).rstrip("\n") == wanted
    service.call(service.checkouts.release, lease.id, USER_PEER)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reset_drops_the_layer(service: Service, backend: Backend) -> None:
    """It proves clean, and the layer's directory goes."""
    lease = checkout_on(service, FILES, backend)
    assert lease.base.layer in layers_of(service)
    service.call(service.checkouts.reset, lease.id, ResetCheckout(), USER_PEER)
    assert as_user(lease.tree_path, "status", "--porcelain", "--ignored") == ""
    assert service.diff(lease) == b""
    assert lease.base.layer not in layers_of(service)
    service.call(service.checkouts.release, lease.id, USER_PEER)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_lives_as_long_as_its_lease(service: Service, backend: Backend) -> None:
    """Over a restart too, which removes those without a lease."""
    lease = checkout_on(service, FILES, backend)
    stray = service.state / "templates/.layers/straystraystrays"
    stray.mkdir()
    service.restart()
    assert (lease.tree_path / "README").read_bytes() == b"changed\n"
    assert lease.base.layer in layers_of(service)
    service.call(service.checkouts.release, lease.id, USER_PEER)
    until(lambda: os.listdir(service.state / "templates/.layers") == [])


def test_a_checkout_that_fails_leaves_no_layer(service: Service) -> None:
    lease = checkout_on(service, [], Backend.OVERLAY)

    async def fail() -> None:
        with service.checkouts.layers.making() as new:
            write_layer(new, lambda _: [], FILES[:1])
            wrong = replace(lease.base, tree="0" * 40, layer=LayerId(new.name))
            draft = service.checkouts.leases.like(lease, Backend.OVERLAY)
            await service.checkouts.lifecycle.make(replace(draft, base=wrong))

    with pytest.raises(Exception, match="cannot prove checkout"):
        service.call(fail)
    assert layers_of(service) == [lease.base.layer]
    service.call(service.checkouts.release, lease.id, USER_PEER)


def test_whiteouts_are_written_where_the_base_has_the_path(tmp_path: Path) -> None:
    base = {b"": [b"a", b"b", b"c"], b"a": [b"x", b"y"], b"b": [b"z"]}
    gone = [(path, None, b"") for path in (b"a/x", b"b/z", b"c", b"c/never", b"nothing")]
    write_layer(tmp_path / "layer", lambda path: base.get(path, []), gone)
    found = {
        path.relative_to(tmp_path / "layer").as_posix(): path.lstat()
        for path in (tmp_path / "layer").rglob("*")
    }
    assert {path for path, seen in found.items() if is_whiteout(seen)} == {"a/x", "b", "c"}
    assert found.keys() == {"a", "a/x", "b", "c"}
