"""Children on the event loop: pipes, ends, and what is let go of."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from mirrord.git.children import Child, start_child

_PIPE = subprocess.PIPE


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    uvloop.run(main())


async def start(*argv: str) -> Child:
    return await start_child(argv, environment={"PATH": os.environ["PATH"]}, cwd="/", stdin=_PIPE, stdout=_PIPE)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_goes_in_comes_out_and_the_status_is_told() -> None:
    async def body() -> None:
        child = await start("sh", "-c", "cat; echo told >&2; exit 3")
        assert child.stdin and child.stdout and child.stderr
        child.stdin.write(b"x" * 300_000)
        child.stdin.close()
        assert len(await child.stdout.read()) == 300_000
        assert await child.stderr.read() == b"told\n"
        assert await child.wait() == child.returncode == 3
        child.close()

    run(body)


def test_many_children_leave_no_descriptor_and_no_zombie() -> None:
    """Whether what they wrote was read or not, and though a child of theirs keeps the pipes open."""

    async def body() -> None:
        before = 0
        for number in range(30):
            child = await start("sh", "-c", "sleep 5 & echo much")
            await child.wait()
            child.close()
            os.killpg(child.pid, 9)
            if number == 4:
                before = descriptors()
        assert descriptors() <= before + 3
        with pytest.raises(ChildProcessError):
            os.waitpid(child.pid, os.WNOHANG)

    run(body)


def test_a_signal_is_a_negative_status() -> None:
    async def body() -> None:
        child = await start("sh", "-c", "kill -9 $$")
        assert await child.wait() == -9
        child.close()

    run(body)


def test_what_cannot_be_started_is_an_os_error() -> None:
    async def body() -> None:
        with pytest.raises(FileNotFoundError):
            await start("/no/such/program")

    run(body)
