"""Many mirrors: one dataset over thousands of small repositories, in a daemon of its own.

`bench.py --cases scale --mirrors 2000` measures a tenth first, then the whole, each in a daemon that begins with nothing.
What a user waits for is a command of the command line, from its start to its end. The upstreams are generated, and with
`--upstreams DIRECTORY` kept for the next run.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from measured_daemon import Daemon, instance_row
from results import Growth
from rivals import git_bytes

COMMITS = 20  # of each repository; every second one is a base commit, the newest also the environment setup commit
ROWS = COMMITS // 2
_FILES = 10
_DATASET = "scale"
_BEGAN = 1_577_836_800  # 2020


class Upstreams:
    """Bare repositories `owner/name.git` below a directory, made where they are missing, with their commits."""

    def __init__(self, place: Path, count: int) -> None:
        self.place = place
        self.commits = {self._repo(number): self._make(number) for number in range(count)}

    def write_dataset(self, file: Path) -> None:
        with file.open("w") as lines:
            for repo, commits in self.commits.items():
                for commit in commits[::2]:
                    row = instance_row(repo, commit) | {"environment_setup_commit": commits[-1]}
                    lines.write(json.dumps(row) + "\n")

    def _repo(self, number: int) -> str:
        return f"owner{number // 10}/name{number}"

    def _make(self, number: int) -> list[str]:
        """The repository's commits, the oldest first."""
        path = self.place / f"{self._repo(number)}.git"
        marks = path / "commits"
        if not marks.exists():
            shutil.rmtree(path, ignore_errors=True)
            git_bytes("init", "--quiet", "--bare", "--initial-branch=main", "--template=", path)
            stream = "".join(_commits(number)).encode()
            git_bytes(
                "fast-import", "--quiet", f"--export-marks={marks}.new", cwd=path, stdin=stream
            )
            marks.with_name("commits.new").rename(marks)
        by_mark = dict(line.split() for line in marks.read_text().splitlines())
        return [by_mark[f":{mark}"] for mark in range(1, COMMITS + 1)]


def _commits(number: int) -> Iterator[str]:
    for mark in range(1, COMMITS + 1):
        who = f"bench <bench@example.com> {_BEGAN + 3600 * mark} +0000\n"
        yield f"commit refs/heads/main\nmark :{mark}\ncommitter {who}data 2\n{mark:02}\n"
        for file in range(_FILES if mark == 1 else 2):
            text = f"value = {number} * {mark}\n" * (20 + file)
            name = file if mark == 1 else (mark + file) % _FILES
            yield f"M 100644 inline package/module{name}.py\ndata {len(text)}\n{text}\n"
    yield f"reset refs/tags/v1\nfrom :{COMMITS // 2}\n\n"


class Scale:
    """One daemon with nothing in it, and what it is asked for, in the order of a user's first days."""

    def __init__(self, area: Path, upstreams: Path, count: int) -> None:
        self.count = count
        self.upstreams = Upstreams(upstreams, count)
        url = f"[upstream]\nurl = {json.dumps(f'file://{upstreams}/{{owner}}/{{name}}.git')}\n"
        self.daemon = Daemon(area, settings=url, sync="24h")
        self.file = area / f"{_DATASET}.jsonl"
        self.upstreams.write_dataset(self.file)
        self.measured: dict[str, tuple[float, str, float | None]] = {}

    def run(self) -> None:
        self._import("import", None)
        self._import("import again, unchanged", None)
        self._shown()
        self._timed("sync of all, no change", 60, lambda: self._mirrord("mirror", "sync"))
        self._timed(
            "audit, level quick",
            30,
            lambda: self._mirrord("audit", "--level", "quick", "--no-heal"),
        )
        self._restarted()
        self._timed("dataset remove", None, lambda: self._mirrord("dataset", "remove", _DATASET))
        self.daemon.stop()

    def _import(self, what: str, most: float | None) -> None:
        with self._weighing() as peak:
            self._timed(what, most, lambda: self._mirrord("dataset", "import", str(self.file)))
        self._note(f"{what}: the daemon, resident at most", peak["daemon"], "MiB", 300)
        self._note(f"{what}: workers and git beside it, at most", peak["others"], "MiB")

    def _shown(self) -> None:
        for words in (
            ("status",),
            ("mirror", "list"),
            ("dataset", "list"),
            ("dataset", "show", _DATASET),
        ):
            took, lines = [], 0
            for _ in range(5):
                began = time.perf_counter()
                lines = self._mirrord(*words).count("\n")
                took.append(time.perf_counter() - began)
            self._note(f"mirrord {' '.join(words)}", statistics.median(took), "s", 0.5)
            if words == ("status",):
                self._note("mirrord status prints", lines, "lines")

    def _restarted(self) -> None:
        began = time.perf_counter()
        self.daemon.stop()
        self._note("stop", time.perf_counter() - began, "s")
        self._timed("start, until it serves", 3, self.daemon.start)
        paths: list[str] = []
        identity = json.loads(self.file.read_text().partition("\n")[0])["instance_id"]
        self._timed(
            "the first checkout after it",
            None,
            lambda: paths.append(self._mirrord("checkout", identity)),
        )
        self.daemon.process.kill()  # as a crash does: nothing is known of how it left the mirrors
        self.daemon.process.wait()
        self._timed("start after a kill, until it serves", 3, self.daemon.start)
        self._note("the daemon after a start, resident", self.daemon.resident_mib(), "MiB", 300)
        self._mirrord("release", *(path.strip() for path in paths))

    def _timed(self, what: str, most: float | None, work: Callable[[], object]) -> None:
        began, process, spent = time.perf_counter(), self.daemon.process, self._cpu_s()
        work()
        self._note(what, time.perf_counter() - began, "s", most)
        spent = self._cpu_s() - (spent if self.daemon.process is process else 0)
        self._note(f"{what}: processor time of the daemon and its children", spent, "s")

    def _cpu_s(self) -> float:
        return self.daemon.cpu_s() if self.daemon.process.poll() is None else 0.0

    def _note(self, what: str, value: float, unit: str, most: float | None = None) -> None:
        self.measured[what] = value, unit, most
        print(f"  {self.count:,} mirrors: {what}: {value:,.2f} {unit}", flush=True)

    def _mirrord(self, *words: str) -> str:
        command = [str(Path(sys.executable).with_name("mirrord")), *words]
        env = os.environ | {"MIRRORD_SOCKET": str(self.daemon.socket)}
        return subprocess.run(
            command, env=env, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    @contextmanager
    def _weighing(self) -> Iterator[dict[str, float]]:
        """The most memory that is resident during the block: of the daemon, and of all below it together."""
        peak = {"daemon": 0.0, "others": 0.0}
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(0.25):
                alone, family = self.daemon.resident_mib(), self.daemon.memory()["rss_mib"]
                peak["daemon"] = max(peak["daemon"], alone)
                peak["others"] = max(peak["others"], family - alone)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield peak
        finally:
            ended.set()
            watcher.join()


def grow(area: Path, upstreams: Path, count: int) -> list[Growth]:
    """A tenth, then the whole."""
    few, many = (_measure(area / str(some), upstreams, some) for some in (count // 10, count))
    return [
        Growth(what, few[what][0], value, unit, most)
        for what, (value, unit, most) in many.items()
        if what in few
    ]


def _measure(area: Path, upstreams: Path, count: int) -> dict[str, tuple[float, str, float | None]]:
    scale = Scale(area, upstreams, count)
    try:
        scale.run()
    finally:
        scale.daemon.stop()
    return scale.measured
