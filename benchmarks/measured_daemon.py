"""The daemon under measurement: started on a scratch state directory, asked through its socket, weighed, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rivals import disk_bytes

from mirrord import Client
from mirrord.config import Settings
from mirrord.errors import MirrordError
from mirrord.git.command import Git
from mirrord.host.trash import Trash
from mirrord.jobs.events import Events
from mirrord.templates.builder import StoreBuilder
from mirrord.templates.service import Templates
from mirrord.workers.pool import Workers

NOBODY = 65534  # another user than the daemon's
MEMBERS = 61000  # the gid of members, who have no name on this host
REPO = "bench/repo"
MIRROR = "bench__repo"


class Daemon:
    """With a mirror of `source`, or without any; syncs run every `sync`.

    `settings` are further lines of its configuration, `checkouts` those of that table.
    """

    def __init__(
        self,
        area: Path,
        source: Path | None = None,
        settings: str = "",
        sync: str = "0",
        checkouts: str = "prewarm = false",
    ) -> None:
        self.area, self.state, self.socket = area, area / "state", area / "mirrord.sock"
        area.mkdir(parents=True)
        area.chmod(0o755)
        quoted = json.dumps
        (area / "config.toml").write_text(
            f"state_dir = {quoted(str(self.state))}\nsocket = {quoted(str(self.socket))}\n"
            f'[sync]\ninterval = "{sync}"\n[audit]\ninterval = "0"\n[maintenance]\ninterval = "0"\n'
            f'[access]\nadmins = [{NOBODY}]\ngroup = "{MEMBERS}"\ncommits = "any"\n'
            f"[checkouts]\nmax = 4000\n{checkouts}\n[datasets]\nwatch = false\nlfs = true\n"
            f'[log]\nformat = "json"\n{settings}'
            + (
                f'[[mirror]]\nrepo = "{REPO}"\nurl = {quoted(f"file://{source}")}\n'
                if source
                else ""
            )
        )
        self.start()
        if source is not None:
            with self.client() as client:
                client.wait(client.sync_mirror(REPO), timeout=timedelta(minutes=20))

    def client(self) -> Client:
        return Client(self.socket)

    def start(self) -> None:
        command = [
            str(Path(sys.executable).with_name("mirrord")),
            "serve",
            "--config",
            str(self.area / "config.toml"),
        ]
        with (self.area / "daemon.log").open("ab") as log:
            # with it in the environment the daemon writes each line of its log at once
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stderr=log
            )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with Client(self.socket, patience=timedelta()) as client:
                    if (
                        client.health().status == "ok"
                    ):  # until then it answers, and opens its state directory
                        return
            except MirrordError:
                pass
            time.sleep(0.02)
        self.stop()
        raise RuntimeError((self.area / "daemon.log").read_text())

    def stop(self) -> None:
        """End it, and wait for its workers: on a busy machine they end later, and hold its disk."""
        if self.process.poll() is None:
            below = family(self.process.pid)[1:]
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=60)
            ends = time.monotonic() + 30
            while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < ends:
                time.sleep(0.02)

    def record(self, commit: str, test_patch: bytes) -> str:
        """Import an instance of the mirror; its id."""
        row = instance_row(REPO, commit, test_patch.decode())
        row["instance_id"] += "-rollouts"  # else that of the case audit, without tests, is graded
        file = self.area / "instance.jsonl"
        file.write_text(json.dumps(row) + "\n")
        with self.client() as client:
            client.wait(client.import_dataset(file, name="bench-rollouts"))
        return row["instance_id"]

    def forget_templates(self) -> None:
        """As a mirror is just after its first sync: nothing prepared."""
        self.stop()
        shutil.rmtree(self.state / "templates")
        self.start()

    def rest(self, after: timedelta) -> int:
        """As so long after the last was asked for; answers how many templates the daemon dropped."""
        self.stop()
        then = time.time() - after.total_seconds()
        for pattern in ("gits/*.json", "trees/*/layer.json"):
            for record in (self.state / "templates").glob(f"*/{pattern}"):
                os.utime(record, (then, then))
        evicted = asyncio.run(_evict(self.state))
        self.start()
        return evicted

    def memory(self) -> dict[str, float]:
        """MiB of the daemon and everything below it: resident, and proportional (pages shared are counted once)."""
        pids = family(self.process.pid)
        sums = {"Rss": 0, "Pss": 0}
        for pid in pids:
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, rest = line.partition(":")
                if name in sums:
                    sums[name] += int(rest.split()[0])
        return {
            "processes": len(pids),
            "rss_mib": sums["Rss"] / 1024,
            "pss_mib": sums["Pss"] / 1024,
        }

    def resident_mib(self) -> float:
        """MiB of the daemon alone."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2

    def private_mib(self) -> float:
        """MiB that the daemon alone has written and shares with no other process."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        dirty = next(line for line in lines if line.startswith("Private_Dirty:"))
        return int(dirty.split()[1]) / 1024

    def has_trash(self) -> bool:
        """Whether something that was released or reset is still to be removed."""
        places = ("checkouts", "leases", "leases/*", "templates/.layers")
        return any(any(self.state.glob(f"{place}/.trash-*")) for place in places)

    def cpu_s(self) -> float:
        """Processor seconds of the daemon and everything below it so far, of ended workers too."""
        ticks = 0
        for pid in family(self.process.pid):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except FileNotFoundError:  # it ended meanwhile
                continue
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def mirror(self) -> Path:
        return self.state / "mirrors" / MIRROR

    def templates_bytes(self) -> int:
        return disk_bytes(self.state / "templates")


def instance_row(repo: str, commit: str, test_patch: str = "") -> dict[str, str]:
    identity = f"{repo.replace('/', '__')}-{commit[:12]}"
    texts = dict.fromkeys(("patch", "problem_statement", "hints_text", "version"), "")
    texts["test_patch"] = test_patch
    lists = {"FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}
    return {
        "instance_id": identity,
        "repo": repo,
        "base_commit": commit,
        "created_at": "2020-01-01T00:00:00Z",
        **texts,
        **lists,
    }


async def _evict(state: Path) -> int:
    """What the daemon does every few minutes."""
    workers = Workers(size=1)
    places: dict[str, Any] = {
        "state_dir": state,
        "workers": workers,
        "mirrors_path": lambda name: state / "mirrors" / str(name),
        "trash": Trash(),
    }
    stores = StoreBuilder(git=Git(home=state / "home"), **places)
    templates = Templates(settings=Settings, stores=stores, events=Events(), **places)
    try:
        await templates.open()
        return await templates.evict()
    finally:
        await workers.close()


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    with suppress(OSError):  # it ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found
