"""Worker processes: results, errors, deadlines, crashes, cancelling, retiring."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import anyio
import pytest
import structlog
from waiting import BOUND_S
from worker_calls import (
    LONG,
    add,
    die,
    hang,
    is_gone,
    loaded_and_parent,
    own_pid,
    refuse,
    seen_context,
    until,
)

from mirrord.errors import (
    CommitNotFoundError,
    DeadlineError,
    OutOfMemoryError,
    StoppingError,
    WorkerCrashedError,
)
from mirrord.host.processes import memory_limit_bytes
from mirrord.workers.pool import ForkServer, Workers


def run(
    body: Callable[[Workers], Awaitable[None]], *, idle: timedelta = LONG, size: int = 1
) -> None:
    async def main() -> None:
        workers = Workers(size=size, idle=idle)
        try:
            await body(workers)
        finally:
            await workers.close()

    anyio.run(main)


def test_a_call_runs_in_another_process() -> None:
    """The process is kept for the next call."""

    async def body(workers: Workers) -> None:
        assert await workers.run(add, 2, 3, timeout=LONG) == 5
        pid = await workers.run(own_pid, timeout=LONG)
        assert pid != os.getpid()
        assert await workers.run(own_pid, timeout=LONG) == pid

    run(body)


def test_an_idle_worker_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    """Whatever else happens meanwhile."""

    async def body(workers: Workers) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: workers.run(hang, str(tmp_path / "pid"), timeout=LONG))
            await until(lambda: (tmp_path / "pid").exists())
            dying = await workers.run(own_pid, timeout=LONG)
            os.kill(dying, signal.SIGKILL)
            await until(lambda: is_gone(dying))
            with anyio.fail_after(BOUND_S):
                assert await workers.run(own_pid, timeout=LONG) != dying
            tasks.cancel_scope.cancel()

    run(body, size=2)


@pytest.mark.slow
def test_a_call_waits_while_all_workers_are_busy() -> None:
    """However long that takes."""

    async def main() -> None:
        workers = Workers(size=1)
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(lambda: workers.run(time.sleep, 1.8, timeout=LONG))
        finally:
            await workers.close()

    anyio.run(main)


def test_modules_are_preloaded_once() -> None:
    """Every worker is forked from one process that imported them."""

    async def main() -> None:
        parents = []
        for _ in range(2):
            workers = Workers(size=1, server=server)
            was_loaded, parent = await workers.run(loaded_and_parent, "nturl2path", timeout=LONG)
            assert was_loaded
            parents.append(parent)
            await workers.close()
        assert parents[0] == parents[1] != os.getpid()

    server = ForkServer()
    server.preload = ("nturl2path",)
    try:
        anyio.run(main)
    finally:
        server.stop()


def test_the_end_of_the_fork_server_costs_only_running_calls(tmp_path: Path) -> None:
    """Its workers end with it, hanging or not; the next call gets a new one."""

    async def body(workers: Workers) -> None:
        _, server = await workers.run(loaded_and_parent, "os", timeout=LONG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                lambda: _crashes(workers.run(hang, str(tmp_path / "pid"), timeout=LONG))
            )
            await until(
                lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text())
            )
            os.kill(server, signal.SIGKILL)
        await until(lambda: is_gone(int((tmp_path / "pid").read_text(encoding="ascii"))))
        assert await workers.run(add, 1, 1, timeout=LONG) == 2

    run(body)


def test_a_worker_ends_silently_after_its_daemon() -> None:
    """As after a SIGKILL: a traceback would be at the end of the daemon's log."""
    script = """
    import pickle, select, time
    from mirrord.workers.pool import ForkServer
    server = ForkServer()
    connection, pidfd = server.fork()
    call = pickle.dumps((None, {}, time.sleep, (0.2,)))
    connection.sendall(len(call).to_bytes(8) + call)
    connection.close()
    assert select.select([pidfd], [], [], 60)[0]
    server.stop()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def _crashes(call: Awaitable[object]) -> None:
    with pytest.raises(WorkerCrashedError):
        await call


def test_an_error_crosses_with_all_its_facts() -> None:
    """Class, message, hint and facts."""

    async def body(workers: Workers) -> None:
        with pytest.raises(CommitNotFoundError, match="it is not there") as caught:
            await workers.run(refuse, timeout=LONG)
        assert caught.value.hint == "sync"
        assert caught.value.facts == {"commit": "x"}

    run(body)


def test_a_missed_deadline_kills_the_worker_and_only_it(tmp_path: Path) -> None:
    """The next call gets a new worker."""

    async def body(workers: Workers) -> None:
        pid = await workers.run(own_pid, timeout=LONG)
        with pytest.raises(DeadlineError, match="hang"):
            await workers.run(hang, str(tmp_path / "pid"), timeout=timedelta(seconds=1))
        await until(lambda: is_gone(pid))
        assert await workers.run(add, 1, 1, timeout=LONG) == 2

    run(body)


def test_a_crash_costs_one_call() -> None:
    """A worker killed from outside is an error of its call only."""

    async def body(workers: Workers) -> None:
        with pytest.raises(WorkerCrashedError):
            await workers.run(die, timeout=LONG)
        assert await workers.run(add, 1, 1, timeout=LONG) == 2

    run(body)


def devour() -> int:
    return len(bytearray(memory_limit_bytes() + 1))


def run_git_that_devours() -> int:
    command = "b = bytearray(int(__import__('sys').argv[1]) + 1)"
    return subprocess.run(
        [sys.executable, "-c", command, str(memory_limit_bytes())], capture_output=True
    ).returncode


def test_memory_is_bounded_and_costs_one_call() -> None:
    """Of a worker and of its children; the next call has its own limit."""

    async def body(workers: Workers) -> None:
        with pytest.raises(OutOfMemoryError, match="MiB of memory"):
            await workers.run(devour, timeout=LONG)
        assert await workers.run(run_git_that_devours, timeout=LONG) == 1
        assert await workers.run(add, 1, 1, timeout=LONG) == 2

    run(body)


def test_cancelling_kills_the_worker(tmp_path: Path) -> None:
    """A result without a caller is not computed."""

    async def body(workers: Workers) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: workers.run(hang, str(tmp_path / "pid"), timeout=LONG))
            await until(
                lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text())
            )
            group.cancel_scope.cancel()
        pid = int((tmp_path / "pid").read_text(encoding="ascii"))
        await until(lambda: is_gone(pid))

    run(body)


def test_idle_workers_are_retired_and_come_back() -> None:
    """An idle daemon has no worker processes."""

    async def body(workers: Workers) -> None:
        pid = await workers.run(own_pid, timeout=LONG)
        await until(lambda: is_gone(pid))
        assert await workers.run(own_pid, timeout=LONG) != pid

    run(body, idle=timedelta(milliseconds=50))


def test_closing_ends_running_calls(tmp_path: Path) -> None:
    """With an error; new calls are refused."""

    async def body(workers: Workers) -> None:
        refused: list[str] = []

        async def wait() -> None:
            with pytest.raises(StoppingError) as caught:
                await workers.run(hang, str(tmp_path / "pid"), timeout=LONG)
            refused.append(caught.value.code)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await until(lambda: (tmp_path / "pid").exists())
            await workers.close()
        assert refused == ["stopping"]
        with pytest.raises(StoppingError):
            await workers.run(add, 1, 1, timeout=LONG)

    run(body)


def test_the_logging_context_travels() -> None:
    """Fields bound to log lines here are bound in the worker, for this call."""

    async def body(workers: Workers) -> None:
        with structlog.contextvars.bound_contextvars(request="r1"):
            assert await workers.run(seen_context, timeout=LONG) == {"request": "r1"}
        assert await workers.run(seen_context, timeout=LONG) == {}

    run(body)


def test_a_kept_worker_is_prepared_again() -> None:
    """A reload changes the logs of existing workers."""

    async def body(workers: Workers) -> None:
        pid = await workers.run(own_pid, timeout=LONG)
        for place in ("/", "/usr"):
            workers.prepare_by(partial(os.chdir, place))
            assert await workers.run(os.getcwd, timeout=LONG) == place
        assert await workers.run(own_pid, timeout=LONG) == pid

    run(body)


def test_workers_die_with_the_daemon(tmp_path: Path) -> None:
    """kill -9 of the parent leaves no worker, not even a hanging one, and no fork server."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / "tests/support")!r})
        import anyio
        from datetime import timedelta
        from mirrord.workers.pool import Workers
        from worker_calls import hang
        async def main():
            workers = Workers(size=1)
            await workers.run(hang, {str(tmp_path / "pid")!r}, timeout=timedelta(seconds=30))
        if __name__ == "__main__":
            anyio.run(main)
        """),
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, str(script)], cwd=Path(__file__).parents[2]) as parent:
        anyio.run(
            until, lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text())
        )
        parent.kill()
    pids = [int((tmp_path / name).read_text(encoding="ascii")) for name in ("pid", "pid.parent")]
    anyio.run(until, lambda: all(map(is_gone, pids)))


def test_workers_import_neither_settings_nor_a_database() -> None:
    """Each costs a worker 10 MB and 0.1 s; no call on a repository needs them."""
    of_git = ("command", "objects.repository", "objects.trees", "objects.text")
    others = (
        "workers.forkserver",
        "changes.survey",
        "checkouts.pool.backend",
        "grading.prepare",
        "templates.layers",
    )
    modules = [*(f"git.{name}" for name in of_git), *others]
    script = "\n".join(["import sys", *(f"import mirrord.{name}" for name in modules)])
    script += "\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "pygit2" in loaded
    assert loaded.isdisjoint({"mirrord.config", "mirrord.catalog", "pydantic", "sqlalchemy"})
