"""One big mirror: 60,000 refs, and 5,000 pins. Each function measures for a count of them; the bench asks for a tenth too.

The histories are generated: one line of commits, each with one small file changed.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

from measured_daemon import REPO, Daemon, instance_row
from resets import timed
from results import Growth
from rivals import disk_bytes, git, git_bytes

from mirrord import Client
from mirrord.model import AuditLevel

_TIMEOUT = timedelta(minutes=20)


def many_refs(area: Path, count: int) -> list[Growth]:
    """A mirror with `count` refs, half of them branches: first sync, no change, one ref moved."""
    source = _generated(area / "source", count, refs=count)
    began = time.perf_counter()
    daemon = Daemon(area / "daemon", source)
    try:
        first = time.perf_counter() - began
        unchanged = min(_sync(daemon) for _ in range(3))
        before, moved = disk_bytes(daemon.mirror), []
        for number in range(10):
            git("update-ref", f"refs/heads/b{2 * number}", "main", cwd=source)
            moved.append(_sync(daemon))
        grown = (disk_bytes(daemon.mirror) - before) / len(moved)
        with daemon.client() as client:
            audit = timed(partial(_audit, client))
            log = timed(lambda: client.log_refs(REPO))
    finally:
        daemon.stop()
    named = "one mirror with 60,000 refs: "
    return [
        _cost(named + "daemon's start and first sync", first, "s"),
        _cost(named + "sync without change", unchanged, "s", 1),
        _cost(named + "sync of one ref that moved", min(moved), "s"),
        _cost(named + "growth by such a sync", grown / 1024, "KiB"),
        _cost(named + "closure audit", audit, "s"),
        _cost(named + "refs log", log, "s"),
    ]


def many_pins(area: Path, count: int) -> list[Growth]:
    """A mirror of which a dataset records `count` commits."""
    source = _generated(area / "source", count + 100, refs=1)
    daemon = Daemon(area / "daemon", source)
    commits = git("rev-list", "main", cwd=source).split()
    rows = area / "rows.jsonl"
    rows.write_text(
        "".join(f"{json.dumps(instance_row(REPO, each))}\n" for each in commits[:count])
    )
    try:
        with daemon.client() as client:

            def load() -> object:
                return client.wait(client.import_dataset(rows, name="pins"), timeout=_TIMEOUT)

            imported, again = timed(load), timed(load)
            unchanged = min(_sync(daemon) for _ in range(3))
            one_more = min(timed(partial(client.pin, REPO, each)) for each in commits[-3:])
            audit = timed(partial(_audit, client))
    finally:
        daemon.stop()
    named = "one mirror with 5,000 pins: "
    return [
        _cost(named + "import", imported, "s"),
        _cost(named + "import again, unchanged", again, "s"),
        _cost(named + "sync without change", unchanged, "s", 1),
        _cost(named + "one more pin", one_more, "s"),
        _cost(named + "closure audit", audit, "s"),
    ]


def _cost(what: str, value: float, unit: str, most: float | None = None) -> Growth:
    return Growth(what, value, value, unit, most)


def _sync(daemon: Daemon) -> float:
    with daemon.client() as client:
        return timed(lambda: client.wait(client.sync_mirror(REPO), timeout=_TIMEOUT))


def _audit(client: Client) -> None:
    client.wait(client.start_audit(level=AuditLevel.CLOSURE), timeout=_TIMEOUT)


def _generated(path: Path, commits: int, refs: int) -> Path:
    """A bare repository with a line of commits, the last `refs` of which have a branch or tag of their own."""
    git("init", "--quiet", "--bare", "--initial-branch=main", path)
    stream = []
    for number in range(commits):
        ref = (
            "refs/heads/main"
            if number < commits - refs
            else f"refs/{('heads/b', 'tags/v')[number % 2]}{number}"
        )
        stream.append(
            f"commit {ref}\nmark :{number + 1}\ncommitter bench <bench@example.com> {1600000000 + number} +0000\n"
            f"data 1\n.\n"
            + (f"from :{number}\n" if number else "")
            + f"M 100644 inline {number % 50}\ndata {len(str(number))}\n{number}\n\n"
        )
    stream.append(f"reset refs/heads/main\nfrom :{commits}\n\n")
    git_bytes("fast-import", "--quiet", cwd=path, stdin="".join(stream).encode())
    git("pack-refs", "--all", cwd=path)
    return path
