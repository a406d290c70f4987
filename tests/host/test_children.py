"""Child processes on the event loop: their output, their end, and that they leave nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from waiting import BOUND_S, until

from mirrord.errors import ResourceError
from mirrord.host.children import NOTHING, Child, Popen, Stream, in_memory, run_to_end, start

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture
def run() -> Run:
    def start_loop(body: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            with anyio.fail_after(BOUND_S):
                await body()

        asyncio.run(main())

    return start_loop


def shell(script: str, stdin: Stream = NOTHING) -> Popen:
    return start(["sh", "-c", script], {"PATH": os.environ["PATH"]}, Path("/"), stdin)


async def read_all(child: Child) -> bytes:
    out = bytearray()
    while piece := await child.read_stdout():
        out += piece
    return bytes(out)


def held() -> set[str]:
    """Pipes, processes and files in memory that are open, and children, zombies too.

    Those of other tests of this process are among them and may end at any time, so what is held
    later is a subset, not equal.
    """
    gc.collect()
    kinds = ("pipe:", "anon_inode:[pidfd]", "/memfd:")
    held = set[str]()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if (target := os.readlink(path)).startswith(kinds):
                held.add(f"{path.name} {target}")
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            held.update(f"child {pid}" for pid in path.read_text().split())
    return held


def runs(pid: int) -> bool:
    """False for an orphan that has ended; init may reap it late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def any_runs_of(group: int) -> bool:
    """Whether a process of a group is there that has not ended."""
    listed = subprocess.run(["pgrep", "--pgroup", str(group)], stdout=subprocess.PIPE, check=False)
    return any(runs(int(pid)) for pid in listed.stdout.split())


@contextmanager
def other_threads(threads: int = 3) -> Iterator[None]:
    """Threads that open and close files, and check that their descriptors are still theirs."""
    stop, wrong = threading.Event(), list[str]()

    def work() -> None:
        while not stop.is_set():
            with tempfile.TemporaryFile() as mine:
                number = os.fstat(mine.fileno()).st_ino
                stop.wait(0.0005)
                try:
                    if os.fstat(mine.fileno()).st_ino != number:
                        wrong.append("somebody else's file")
                except OSError as error:
                    wrong.append(str(error))

    working = [threading.Thread(target=work) for _ in range(threads)]
    for thread in working:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in working:
            thread.join()
    assert wrong == []


def test_input_output_and_status(run: Run) -> None:
    async def body() -> None:
        data = os.urandom(300_000)
        with in_memory(data) as stdin:
            async with Child(shell("cat; echo told >&2; exit 3", stdin)) as child:
                assert await read_all(child) == data
                assert await child.read_stderr() == b"told\n"
                assert await child.wait() == child.status == 3

    run(body)


def test_hundreds_of_children_leave_no_descriptor_and_no_process(run: Run) -> None:
    """Read to the end, half read, killed and cancelled, while other threads use files."""

    async def read() -> None:
        async with Child(shell("echo out; echo err >&2")) as child:
            assert await read_all(child) == b"out\n"

    async def leave() -> None:
        async with Child(shell("sleep 60 & yes")) as child:
            assert await child.read_stdout()

    async def kill() -> None:
        async with Child(shell("sleep 60")) as child:
            child.signal(signal.SIGKILL)
            assert await child.wait() == -signal.SIGKILL

    async def cancel() -> None:
        async def hang() -> None:
            async with Child(shell("sleep 60")) as child:
                await asyncio.gather(child.read_stdout(), child.read_stderr())

        task = asyncio.ensure_future(hang())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def body() -> None:
        before = held()
        with other_threads():
            for _ in range(20):
                await asyncio.gather(
                    *(each() for each in (read, leave, kill, cancel) for _ in range(4))
                )
        assert held() <= before

    run(body)


def test_a_second_cancellation_leaves_nothing(run: Run) -> None:
    async def body() -> None:
        before = held()

        async def hang() -> None:
            async with Child(shell("trap '' TERM; echo ready; sleep 60; sleep 60")) as child:
                await child.read_stdout()
                ready.set()
                await child.wait()

        ready = asyncio.Event()
        task = asyncio.ensure_future(hang())
        await ready.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.05)
        await asyncio.wait([task])
        while not held() <= before:
            await asyncio.sleep(0.01)

    run(body)


def test_an_ended_child_is_reaped_with_its_group(run: Run) -> None:
    """Its output may stay open: a grandchild may hold the pipe."""

    async def body() -> None:
        before = held()
        async with Child(shell("sleep 300 & echo $!")) as child:
            orphan = int(await child.read_stdout())
            assert await child.read_stdout() == b""
            while any(each.startswith("child") for each in held() - before):
                await asyncio.sleep(0.01)
            assert child.status == 0
        while runs(orphan):
            await asyncio.sleep(0.01)

    run(body)


def test_an_unread_child_blocks(run: Run, tmp_path: Path) -> None:
    """At the capacity of a pipe."""

    async def body() -> None:
        async with Child(
            shell(f"i=0; while :; do printf %1024s x; i=$((i+1)); echo $i > {tmp_path}/count; done")
        ) as child:
            before, now, count = -1, 0, tmp_path / "count"
            while now != before or not now:
                await asyncio.sleep(0.2)
                before, now = now, int((count.exists() and count.read_text()) or 0)
            assert now <= 64
            assert await child.read_stdout()

    run(body)


def test_a_child_may_clean_up_after_sigterm(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        async with Child(
            shell(
                f"trap 'touch {tmp_path}/cleaned; exit 0' TERM; echo ready;"
                " while :; do sleep 0.01; done"
            )
        ) as child:
            await child.read_stdout()
        assert child.status == 0
        assert (tmp_path / "cleaned").exists()

    run(body)


def test_a_child_need_not_read_its_input(run: Run) -> None:
    async def body() -> None:
        with in_memory(b"x" * 1_000_000) as stdin:
            async with Child(shell("exec <&-; echo done", stdin)) as child:
                assert await read_all(child) == b"done\n"
                assert await child.wait() == 0

    run(body)


def test_a_failed_start_is_an_error_and_leaves_nothing(run: Run) -> None:
    async def body() -> None:
        before = held()
        with pytest.raises(ResourceError, match="no/such/program"):
            start(["/no/such/program"], {}, Path("/"))
        assert held() <= before

    run(body)


def test_without_a_loop_a_deadline_ends_the_whole_group() -> None:
    before = held()
    with in_memory(b"in") as stdin:
        assert run_to_end(shell("cat; echo err >&2; exit 2", stdin), timedelta(seconds=20)) == (
            2,
            b"in",
            b"err\n",
        )
    group = shell("sleep 300 & wait")
    assert run_to_end(group, timedelta(milliseconds=300)) is None
    until(lambda: not any_runs_of(group.pid))
    assert held() <= before
