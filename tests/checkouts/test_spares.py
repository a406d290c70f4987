"""Trees written ahead for the pool: what a client left behind reaches no later checkout."""

from __future__ import annotations

import array
import mmap
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from checkout_parts import (
    USER,
    USER_PEER,
    Pool,
    Service,
    as_user,
    passable_directory,
    running_pool,
    running_service,
)
from gitrepos import Upstream, git
from waiting import BOUND_S

from mirrord.checkouts.pool import spares
from mirrord.model import Backend, History
from mirrord.protocol import StartCheckout

pytestmark = pytest.mark.root

Story = Callable[[Pool, list[str]], Awaitable[None]]


@pytest.fixture
def run_pool(make_upstream: Callable[[str], Upstream]) -> Callable[[Story], None]:
    def run(story: Story) -> None:
        async def main() -> None:
            upstream = make_upstream("upstream")
            ids = upstream.history(3)
            with passable_directory() as state:
                async with running_pool(state, upstream) as pool:
                    await story(pool, ids)

        anyio.run(main)

    return run


# -- what is left of a lease -----------------------------------------------------------------------


def hold_directory(tree: Path, stack: ExitStack) -> Callable[[], None]:
    directory = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    stack.callback(os.close, directory)

    def write() -> None:
        for name in ("README", "evil", "docs/page0.txt"):
            with open(
                os.open(f"/proc/self/fd/{directory}/{name}", os.O_WRONLY | os.O_CREAT), "w"
            ) as file:
                file.write("evil")

    return write


def hold_file(tree: Path, stack: ExitStack) -> Callable[[], object]:
    """By a descriptor that can neither read nor write, until it is opened again."""
    file = os.open(tree / "README", os.O_PATH)
    stack.callback(os.close, file)
    return lambda: Path(f"/proc/self/fd/{file}").write_text("evil")


def hold_mapping(tree: Path, stack: ExitStack) -> Callable[[], None]:
    with (tree / "README").open("r+b") as file:
        mapped = stack.enter_context(mmap.mmap(file.fileno(), 0))

    def write() -> None:
        mapped[:4] = b"evil"
        mapped.flush()

    return write


def hold_in_flight(tree: Path, stack: ExitStack) -> Callable[[], None]:
    """In no process's table of descriptors: /proc shows it nowhere."""
    here, there = (stack.enter_context(end) for end in socket.socketpair())
    directory = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    here.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [directory]))])
    os.close(directory)

    def write() -> None:
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
        try:
            Path(f"/proc/self/fd/{fds[0]}/evil").write_text("evil")
        except FileNotFoundError:  # the tree was removed
            pass
        os.close(fds[0])

    return write


def hold_mount(tree: Path, stack: ExitStack) -> Callable[[], None]:
    """A bind mount of one file in a namespace that /proc of an ordinary daemon does not show."""
    place = tree.parents[2] / "bound"
    place.touch()
    script = 'mount --bind "$0" "$1" && echo && read line && echo evil > "$1"'
    holder = stack.enter_context(
        subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, tree / "README", place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"\n"

    def write() -> None:
        holder.communicate(b"go on\n")
        assert holder.returncode == 0

    return write


def hold_working_directory(tree: Path, stack: ExitStack) -> Callable[[], None]:
    """A process of the client, without an end."""
    script = "while sleep 0.01; do echo evil > evil; echo evil > README; done"
    writer = stack.enter_context(
        subprocess.Popen(
            ["sh", "-c", script],
            cwd=tree,
            user=USER,
            group=USER,
            extra_groups=[],
            stderr=subprocess.DEVNULL,
        )
    )
    stack.callback(writer.kill)
    return lambda: None


HOLDS = (
    hold_directory,
    hold_file,
    hold_mapping,
    hold_in_flight,
    hold_mount,
    hold_working_directory,
)


@pytest.mark.parametrize("hold", HOLDS, ids=lambda hold: hold.__name__)
def test_who_holds_a_released_tree_reaches_no_later_checkout(
    run_pool: Callable[[Story], None], hold: Callable[[Path, ExitStack], Callable[[], object]]
) -> None:
    """Neither by a spare nor by a tree of its own, of the same owner and commit."""

    async def story(pool: Pool, ids: list[str]) -> None:
        with ExitStack() as stack:
            lease = await pool.checkout(ids[1])
            write = hold(lease.tree_path, stack)
            await pool.release(lease)
            later = [await pool.checkout(ids[1]) for _ in range(2)]
            try:
                write()
            except OSError:  # what it held was removed
                pass
            await anyio.sleep(0.1)
            for each in later:
                assert as_user(each.tree_path, "status", "--porcelain", "--ignored") == ""
                assert "evil" not in (each.tree_path / "README").read_text()

    run_pool(story)


# -- spares ----------------------------------------------------------------------------------------


async def until_ready(pool: Pool, count: int) -> None:
    with anyio.fail_after(BOUND_S):
        while len(pool.backend.spares.ready) < count:
            await anyio.sleep(0.01)


def test_a_checkout_takes_a_spare_of_its_owner(run_pool: Callable[[Story], None]) -> None:
    """Moved to its commit by the difference; another owner's is never taken; the next is written."""

    async def story(pool: Pool, ids: list[str]) -> None:
        await pool.release(await pool.checkout(ids[0]))
        await until_ready(pool, 1)
        spare = pool.backend.spares.ready[0].public / "tree"
        inode, kept = spare.stat().st_ino, (spare / "docs/page0.txt").stat().st_ino
        other = await pool.checkout(ids[0], uid=USER + 1)
        assert other.tree_path.stat().st_ino != inode
        lease = await pool.checkout(ids[2])
        assert lease.tree_path.stat().st_ino == inode
        assert (lease.tree_path / "docs/page0.txt").stat().st_ino == kept
        assert as_user(lease.tree_path, "status", "--porcelain", "--ignored") == ""
        assert as_user(lease.tree_path, "rev-parse", "HEAD") == ids[2]
        await until_ready(pool, 1)

    run_pool(story)


def test_a_linked_checkout_takes_a_spare_too(run_pool: Callable[[Story], None]) -> None:
    """Its `.git` becomes a file; a linked tree that ends orders no spare, which the mirror would
    list.
    """

    async def story(pool: Pool, ids: list[str]) -> None:
        for history in (History.SEALED, History.LINKED):
            lease = await pool.checkout(ids[1], uid=os.getuid(), history=history)
            assert (lease.tree_path / ".git").is_file() == (history is History.LINKED)
            assert git(lease.tree_path, "status", "--porcelain", "--ignored") == ""
            await pool.release(lease)
        assert "take" in pool.timings

    run_pool(story)


def test_spares_are_bounded_and_go_when_idle(
    run_pool: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one owner; over the bound in all the oldest goes for the newest."""
    monkeypatch.setattr(spares, "_MAX", 3)

    async def story(pool: Pool, ids: list[str]) -> None:
        held = [await pool.checkout(ids[0]) for _ in range(4)]
        for lease in held:
            await pool.release(lease)
        await until_ready(pool, 2)
        before = pool.backend.spares.ready
        assert len(before) == 2
        for uid in (USER + 1, USER + 2):
            await pool.release(await pool.checkout(ids[0], uid=uid))
        await until_ready(pool, 3)
        assert before[0] not in pool.backend.spares.ready
        pool.backend.spares.drop(timedelta())
        assert pool.backend.spares.ready == []

    run_pool(story)


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich) as running:
        yield running


def test_a_checkout_right_after_a_release_takes_the_spare(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is still being written: twelve of twelve."""
    monkeypatch.setattr(spares, "_WAIT_S", 60.0)
    taken = []
    for _ in range(13):
        wanted = StartCheckout(instance="psf__requests@v2", backend=Backend.POOL)
        made = service.call(service.checkouts.checkout, wanted, USER_PEER)
        taken.append("take" in made.timings)
        service.call(service.checkouts.release, made.id, USER_PEER)
    assert taken == [False] + [True] * 12
