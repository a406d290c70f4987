"""Pool trees whose `.git` borrows the sealed store: what they have, and what agents try with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from checkout_parts import Service, running_service
from gitrepos import ENV, Upstream, git
from waiting import BOUND_S

from mirrord.checkouts.volumes import Existing, Volumes
from mirrord.errors import CheckoutBusyError, DiskFullError, InvalidRequestError, MirrordError
from mirrord.host.peers import Peer
from mirrord.model import Backend, ObjectSource
from mirrord.protocol import (
    Checkout,
    ForkCheckout,
    MakeSnapshot,
    ResetCheckout,
    SaveLayer,
    StartCheckout,
    StartGrade,
)
from mirrord.sandbox.calls import box_of
from mirrord.seal.verify import verify_seal
from mirrord.trees import pooled

pytestmark = pytest.mark.root

PEER = Peer(uid=0, gid=0, pid=os.getpid())


@pytest.fixture
def service(rich: Upstream) -> Iterator[Service]:
    """Without overlays, as for an ordinary user; its checkouts are the daemon's own user's."""
    with running_service(rich) as running:
        commit = git(running.mirror, "rev-parse", "v2")
        row = {"instance_id": "psf__requests-1", "repo": "psf/requests", "base_commit": commit}
        running.import_instances([row])
        yield running


def start(
    service: Service, name: str = "psf__requests@v2", *, objects: ObjectSource | None = None
) -> Checkout:
    request = StartCheckout(instance=name, backend=Backend.POOL, objects=objects)
    found: Checkout = service.call(service.checkouts.checkout, request, PEER)
    return found


def reset(service: Service, held: Checkout, **where: Any) -> Any:
    return service.call(service.checkouts.reset, held.id, ResetCheckout(**where), PEER)


def in_tree(held: Checkout, *args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=held.path, env=ENV, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def alternates(held: Checkout) -> Path:
    return Path(held.path, ".git/objects/info/alternates")


def leaks(held: Checkout) -> set[str]:
    return {leak.kind for leak in verify_seal(Path(held.path), held.commit).leaks}


def is_borrowing(held: Checkout) -> bool:
    packs = list(Path(held.path, ".git/objects/pack").iterdir())
    return alternates(held).exists() and not packs


def test_a_borrowing_tree_is_whole_sealed_and_small(service: Service) -> None:
    """git works in it as in any other; it has no pack, and no file of it is one of the store."""
    held = start(service)
    assert held.borrows is not None
    assert alternates(held).read_text() == f"{held.borrows}\n"
    assert is_borrowing(held)
    assert in_tree(held, "status", "--porcelain", "--ignored") == ""
    assert "missing" not in in_tree(held, "fsck", "--full")
    assert len(in_tree(held, "log", "--format=%H").splitlines()) == 2
    assert leaks(held) == set()
    store = {path.stat().st_ino for path in Path(held.borrows).rglob("*") if path.is_file()}
    tree = {path.lstat().st_ino for path in Path(held.directory).rglob("*")}
    assert not store & tree
    assert service.call(service.checkouts.seal, held.id, PEER).sealed
    proof = reset(service, held).proof
    assert proof.packs == sorted(path.name for path in Path(held.borrows, "pack").glob("*.pack"))


def test_who_does_not_see_the_store_gets_a_copy(service: Service) -> None:
    """Another user, a request or the setting for `private`, and a volume, which a container shows."""
    other = StartCheckout(instance="psf__requests@v2", owner=1234)
    assert not is_borrowing(service.call(service.checkouts.checkout, other, PEER))
    with pytest.raises(InvalidRequestError, match="cannot borrow"):
        shared_one = replace(other, objects=ObjectSource.SHARED)
        service.call(service.checkouts.checkout, shared_one, PEER)
    asked = StartCheckout(instance="psf__requests@v2", objects=ObjectSource.PRIVATE)
    alone = service.call(service.checkouts.checkout, asked, PEER)
    assert (alone.borrows, is_borrowing(alone), leaks(alone)) == (None, False, set())
    parts = service.checkouts
    volume = Volumes(parts.leasing, parts.checkout, parts.fork)
    wanted = StartCheckout(instance="psf__requests@v2")
    service.call(volume.create, "cache", "tree", {}, wanted, PEER)
    (lease, _), *_ = volume.list()
    assert (lease.objects, lease.borrows) == (ObjectSource.PRIVATE, False)
    shared = start(service)
    with pytest.raises(InvalidRequestError, match="borrows objects"):
        service.call(volume.create, "late", "tree", {}, Existing(shared.id), PEER)
    service.change(objects=ObjectSource.PRIVATE)
    assert is_borrowing(start(service, objects=ObjectSource.SHARED))
    private = start(service)
    assert (private.borrows, is_borrowing(private)) == (None, False)
    assert leaks(private) == set()


@pytest.mark.parametrize("wanted", [ObjectSource.AUTO, ObjectSource.SHARED])
def test_where_overlays_work_only_the_setting_shares(rich: Upstream, wanted: ObjectSource) -> None:
    """The pool is asked for there by who binds the tree into a container."""
    with running_service(rich, with_overlay=True) as service:
        service.change(objects=wanted)
        held = start(service)
        assert is_borrowing(held) == (wanted is ObjectSource.SHARED)
        assert leaks(held) == set()


# -- what an agent does to it ----------------------------------------------------------------------


def add_mirror(held: Checkout, mirror: Path) -> None:
    with alternates(held).open("a") as file:
        file.write(f"{mirror}/objects\n")


def replace_by_mirror(held: Checkout, mirror: Path) -> None:
    alternates(held).write_text(f"{mirror}/objects\n")


def lead_by_relative_path(held: Checkout, mirror: Path) -> None:
    objects = Path(held.path, ".git/objects")
    alternates(held).write_text(f"{os.path.relpath(held.borrows or '', objects)}\n")


def nest_own(held: Checkout, mirror: Path) -> None:
    """A store of the same name that leads on to the mirror."""
    assert held.borrows
    own = Path(held.path, "build/.git")
    shutil.copytree(Path(held.borrows).parent, own)
    (own / "objects/info").mkdir(exist_ok=True)
    (own / "objects/info/alternates").write_text(f"{mirror}/objects\n")
    alternates(held).write_text(f"{own}/objects\n")


def widen_own(held: Checkout, mirror: Path) -> None:
    """A store of the same form that has later objects."""
    assert held.borrows
    own = Path(held.path, "build/.git")
    shutil.copytree(Path(held.borrows).parent, own)
    for file in (mirror / "objects/pack").iterdir():
        shutil.copy(file, own / "objects/pack")
    alternates(held).write_text(f"{own}/objects\n")


def name_by_http(held: Checkout, mirror: Path) -> None:
    alternates(held).with_name("http-alternates").write_text(f"{mirror}/objects\n")


def link_store(held: Checkout, mirror: Path) -> None:
    own = Path(held.path, "build/.git")
    own.mkdir(parents=True)
    (own / "objects").symlink_to(held.borrows or "")
    alternates(held).write_text(f"{own}/objects\n")


def graph_later(held: Checkout, mirror: Path) -> None:
    """A commit-graph that names commits of the mirror."""
    git(mirror, "commit-graph", "write", "--reachable")
    shutil.move(mirror / "objects/info/commit-graph", alternates(held).with_name("commit-graph"))


@pytest.mark.parametrize(
    "attack",
    [
        add_mirror, replace_by_mirror, lead_by_relative_path, nest_own, widen_own, name_by_http,
        link_store, graph_later,
    ],
)  # fmt: skip
def test_other_alternates_are_leaks_and_a_reset_removes_them(
    service: Service, attack: Callable[[Checkout, Path], None]
) -> None:
    held = start(service)
    attack(held, service.mirror)
    assert leaks(held)
    reset(service, held)
    assert alternates(held).read_text() == f"{held.borrows}\n"
    assert is_borrowing(held)
    assert leaks(held) == set()
    assert in_tree(held, "status", "--porcelain", "--ignored") == ""


def test_gc_and_repack_in_a_borrowing_tree(service: Service) -> None:
    """What git writes there goes with a reset; the store stays as it was."""
    held = start(service)
    assert held.borrows
    before = {path: path.stat().st_mtime_ns for path in Path(held.borrows).rglob("*")}
    Path(held.path, "README").write_text("mine\n")
    in_tree(held, "commit", "--quiet", "--all", "--message", "mine")
    in_tree(held, "repack", "-a", "-d", "-q")
    in_tree(held, "gc", "--quiet", "--prune=now")
    assert list(Path(held.path, ".git/objects/pack").iterdir())
    assert {path: path.stat().st_mtime_ns for path in Path(held.borrows).rglob("*")} == before
    reset(service, held)
    assert is_borrowing(held)
    assert in_tree(held, "rev-parse", "HEAD") == held.commit
    assert "missing" not in in_tree(held, "fsck", "--full")
    assert leaks(held) == set()


@pytest.mark.parametrize("damage", ["bytes", "gone", "nested"])
def test_a_store_that_root_wrote_to_is_built_again(service: Service, damage: str) -> None:
    """Root of a container that shows the store can write to it: the next reset sees it."""
    held = start(service)
    store = Path(held.borrows or "")
    pack = next(store.glob("pack/*.pack"))
    if damage == "bytes":
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 0xFF
        pack.write_bytes(data)
    elif damage == "gone":
        pack.unlink()
    else:
        (store / "info").mkdir(exist_ok=True)
        (store / "info/alternates").write_text(f"{service.mirror}/objects\n")
        assert leaks(held)
    reset(service, held)
    assert "missing" not in in_tree(held, "fsck", "--full")
    assert leaks(held) == set()


# -- as long as a tree borrows ---------------------------------------------------------------------


async def until_a_spare_is_ready(service: Service) -> None:
    with anyio.fail_after(BOUND_S):
        while not service.checkouts.pool.spares.ready:
            await anyio.sleep(0.01)


def collect(service: Service) -> Any:
    async def collect() -> Any:
        return await service.templates.collect(frozenset())

    return service.call(collect)


def test_a_borrowed_store_is_not_evicted(service: Service) -> None:
    """By nobody while a tree borrows it, also after a restart and a move; afterwards it is."""
    held = start(service)
    first = Path(held.borrows or "")
    collect(service)
    assert first.is_dir()
    service.restart()
    collect(service)
    assert first.is_dir()
    moved = reset(service, held, commit="v3")
    second = Path(moved.borrows)
    assert second != first
    collect(service)
    assert (first.is_dir(), second.is_dir()) == (False, True)
    assert in_tree(moved, "log", "--format=%H").splitlines()[0] == moved.commit
    service.call(service.checkouts.release, held.id, PEER)
    service.call(service.trash.settle)
    service.call(until_a_spare_is_ready, service)  # which is a copy of the template
    collect(service)
    assert not second.exists()


def test_a_store_that_is_gone_at_the_start_is_built_again(service: Service) -> None:
    held = start(service)
    service.call(service.close)
    shutil.rmtree(service.state / "templates")
    (service.state / "templates").mkdir(mode=0o700)
    service.call(service.open)
    assert "missing" not in in_tree(held, "fsck", "--full")


def die_in_the_middle(*args: Any) -> Any:
    """In a worker: `make_clean`, killed after `.git` is written and before the manifest is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled, "_converge", partial(die_after, pooled._converge))
        return pooled.make_clean(*args)


def die_after(work: Callable[..., Any], *args: Any) -> None:
    work(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_in_the_middle(*args: Any) -> Any:
    """In a worker, which others use afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled, "_converge", fail)
        return pooled.make_clean(*args)


def fail(*_: Any) -> Any:
    raise DiskFullError("cannot write: no space")


@contextmanager
def resets_run(service: Service, instead: Callable[..., Any]) -> Iterator[None]:
    run = service.workers.run

    async def run_instead(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await run(instead if function is pooled.make_clean else function, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.workers, "run", run_instead)
        yield


def test_a_reset_that_was_killed_half_way_is_completed(service: Service) -> None:
    """By the daemon itself, where nobody repeats it."""
    held = start(service)
    with resets_run(service, die_in_the_middle), pytest.raises(MirrordError):
        reset(service, held, commit="v3")
    assert service.call(service.checkouts.get, held.id, PEER).is_resetting
    with pytest.raises(CheckoutBusyError, match="half-way"):
        service.call(service.checkouts.diff, held.id, PEER)
    assert service.call(service.checkouts.complete_resets) == 1
    now = service.call(service.checkouts.get, held.id, PEER)
    assert not now.is_resetting
    assert in_tree(now, "rev-parse", "HEAD") == git(service.mirror, "rev-parse", "v3")
    assert is_borrowing(now)
    assert leaks(now) == set()


def test_a_failed_reset_can_be_repeated_or_released(service: Service) -> None:
    """And the list of checkouts says so meanwhile."""
    first, second = start(service), start(service)
    with resets_run(service, fail_in_the_middle):
        for held in (first, second):
            with pytest.raises(DiskFullError):
                reset(service, held)
    shown = service.call(service.checkouts.list, PEER)
    assert [each.is_resetting for each in shown] == [True, True]
    assert not reset(service, first).is_resetting
    service.call(service.checkouts.release, second.id, PEER)
    assert [each.id for each in service.call(service.checkouts.list, PEER)] == [first.id]


# -- copies of such trees --------------------------------------------------------------------------


def test_forks_snapshots_layers_and_grades_of_borrowing_trees(service: Service) -> None:
    """Each has the agent's files and commits, a store of its own to borrow from, and no other."""
    held = start(service, "psf__requests-1")
    Path(held.path, "README").write_text("mine\n")
    in_tree(held, "commit", "--quiet", "--all", "--message", "mine")
    mine = in_tree(held, "rev-parse", "HEAD")
    Path(held.path, "new").write_text("new\n")
    service.call(service.checkouts.snapshot, held.id, MakeSnapshot(name="s"), PEER)
    fork = service.call(service.checkouts.fork, held.id, ForkCheckout(snapshot="s"), PEER)
    assert fork.borrows == held.borrows
    assert in_tree(fork, "rev-parse", "HEAD") == mine
    assert "missing" not in in_tree(fork, "fsck", "--full")
    assert Path(fork.path, "new").read_text() == "new\n"
    service.call(service.checkouts.save, held.id, SaveLayer(name="l"), PEER)
    layered = StartCheckout(instance="psf__requests-1", layer="l")
    prepared = service.call(service.checkouts.checkout, layered, PEER)
    assert (prepared.borrows, Path(prepared.path, "new").read_text()) == (held.borrows, "new\n")
    graded = service.call(service.grading.grade, held.id, StartGrade(owner=4321), PEER)
    assert (graded.borrows, Path(graded.path, "new").read_text()) == (None, "new\n")
    add_mirror(held, service.mirror)
    again = service.call(service.checkouts.fork, held.id, ForkCheckout(), PEER)
    assert alternates(again).read_text() == f"{held.borrows}\n"


def test_a_sandbox_shows_the_store_read_only(service: Service) -> None:
    """At the same path, so git works inside; nothing else of the state is there."""
    held = start(service)
    box = box_of(held, network=False, variables={})
    assert held.borrows
    pack = next(Path(held.borrows, "pack").glob("*.pack"))
    script = f"""git -c safe.directory='*' log --format=%H && git -c safe.directory='*' fsck --full
        test -e {service.mirror} || echo hidden
        touch {held.borrows}/pack/mine; chmod u+w {pack}; echo junk > {pack}"""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with box.start(["sh", "-c", script], stdin=nothing, stdout=pipe, stderr=pipe) as started:
        stdout, stderr = started.communicate(timeout=BOUND_S)
    assert stdout.splitlines()[0] == held.commit.encode()
    assert b"hidden" in stdout
    assert stderr.count(b"Read-only file system") >= 2
    assert "missing" not in in_tree(held, "fsck", "--full")
    assert not Path(held.borrows, "pack/mine").exists()
