"""kill -9 of a process that syncs, then a start: nothing half, nothing left, nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forge import serving
from gitrepos import Upstream, git
from mirror_parts import NAME, Builder, House
from waiting import BOUND_S

from mirrord.errors import DiskFullError
from mirrord.mirrors.quarantine import held_files

pytestmark = pytest.mark.slow

_SYNC = """
import sys; sys.path.insert(0, {tests!r})
from pathlib import Path
from mirror_parts import NAME, Builder
async def body(it):
    await it.mirrors.add("owner/name", {url!r})
    await it.mirrors.sync(NAME)
if __name__ == "__main__":
    Builder(Path({root!r}), {url!r}.replace("name", "{{name}}")).run(body)
"""


@pytest.mark.parametrize("requests", [2, 4])
@pytest.mark.parametrize("first", [True, False])
def test_a_kill_in_a_sync_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, make_upstream: Callable[..., Upstream], requests: int, first: bool
) -> None:
    """Killed while it asks, while objects come, or after; for a first clone and a later sync."""
    upstream = make_upstream("owner+name")
    upstream.history(3)
    with serving(upstream.path.parent) as forge:
        url = f"{forge.url}/owner+name/.git"
        house = Builder(tmp_path, url.replace("name", "{name}"))
        old: list[str] = []
        if not first:

            async def prepare(it: House) -> None:
                await it.mirrors.add("owner/name", url)
                await it.mirrors.sync(NAME)
                old.append((await it.mirrors.resolve(NAME, "main"))[0])

            house.run(prepare)
            forge.requests.clear()
            upstream.git("reset", "--hard", "--quiet", "HEAD~1")
            upstream.commit({"new": "1"})
        forge.delay_s = 0.15
        _kill_at(tmp_path, url, lambda: len(forge.requests) >= requests)
        forge.delay_s = 0
        new = upstream.git("rev-parse", "HEAD")

        async def check(it: House) -> None:
            path = it.mirrors.path(NAME)
            if path.exists():
                assert git(path, "rev-parse", "main") in {new, *old}
                git(path, "fsck", "--full")
            await it.mirrors.sync(NAME)
            assert (await it.mirrors.resolve(NAME, "main"))[0] == new
            if old:
                assert git(path, "rev-parse", f"refs/mirrord/kept/{old[0]}") == old[0]
            names = [
                file.name for file in (tmp_path / "state").rglob("*") if "catalog" not in file.name
            ]
            assert not [
                name
                for name in names
                if name.startswith("tmp_")
                or name.endswith(".lock")
                or "mirrord-transaction" in name
            ]

        _wait_for_orphans(tmp_path / "state")
        house.run(check)
        assert not list((tmp_path / "state/quarantine").iterdir())


@pytest.mark.root
def test_a_full_disk_stops_the_sync_and_harms_nothing(
    tmp_path: Path, make_upstream: Callable[..., Upstream]
) -> None:
    """What was there is served on, nothing is left of the attempt, and with space the sync goes
    through.
    """
    upstream = make_upstream("owner+name")
    old = upstream.history(2)[-1]
    state = tmp_path / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(state)], check=True)

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        new = upstream.commit({"large": os.urandom(8_000_000)})
        with pytest.raises(DiskFullError) as caught:
            await it.mirrors.sync(NAME)
        assert caught.value.exit_status == 7
        assert (await it.mirrors.resolve(NAME, "main"))[0] == old
        assert (await it.mirrors.describe(NAME)).state == "failed"
        assert not list((state / "quarantine").iterdir())
        subprocess.run(["mount", "-o", "remount,size=64m", str(state)], check=True)
        await it.mirrors.sync(NAME)
        assert (await it.mirrors.resolve(NAME, "main"))[0] == new

    try:
        Builder(tmp_path, f"file://{upstream.path.parent}/{{owner}}+{{name}}").run(body)
    finally:
        subprocess.run(["umount", "--lazy", str(state)], check=True)


def _kill_at(root: Path, url: str, moment: Callable[[], bool]) -> None:
    script = root / "sync.py"
    script.write_text(
        textwrap.dedent(_SYNC).format(
            tests=str(Path(__file__).parents[2] / "tests/support"), root=str(root), url=url
        ),
        encoding="utf-8",
    )
    with subprocess.Popen(
        [sys.executable, str(script)], cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL
    ) as child:
        deadline = time.monotonic() + BOUND_S
        while not moment() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL) if child.poll() is None else None


def _wait_for_orphans(state: Path) -> None:
    """git's own children may outlive it by a moment; a start does not remove what they hold."""
    deadline = time.monotonic() + BOUND_S
    while held_files(state) and time.monotonic() < deadline:
        time.sleep(0.01)
