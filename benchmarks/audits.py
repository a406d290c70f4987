"""Audits against git: a closure audit beside one walk, a content audit beside one fsck, and a quick audit of many mirrors.

Ours is the daemon's own time for the whole operation, from the request to the audit on record.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta

from measured_daemon import REPO, Daemon, instance_row
from rivals import Git

from mirrord.model import AuditLevel, CommitState
from mirrord.protocol import Operation

_TIMEOUT = timedelta(minutes=30)


class Audited:
    """The daemon's mirror with base commits spread over its line recorded, and the rival's mirror with the same ones pinned."""

    def __init__(self, daemon: Daemon, git: Git, line: list[str], count: int = 200) -> None:
        self._daemon = daemon
        self._git = git
        self.commits = line[:: max(1, len(line) // count)][:count]
        git.pin(self.commits)
        self._import("bench-audit", {REPO: self.commits})

    def audit(self, level: AuditLevel) -> float:
        """Seconds of one audit that must find nothing."""
        with self._daemon.client() as client:
            ended = client.wait(client.start_audit(level=level, heal=False), timeout=_TIMEOUT)
            found = client.get_audit(str((ended.result or {})["id"]))
        recorded = sum(found.counts.values())
        assert found.counts == {CommitState.OK: recorded}, found.findings[:3]
        return _duration_s(ended)

    def walk(self) -> float:
        return _timed(lambda: self._git.walk(self.commits))

    def fsck(self) -> float:
        return _timed(self._git.fsck)

    def multiply(self, mirrors: int) -> None:
        """Hard-linked copies of the mirror, adopted by a start, each with everything recorded."""
        self._daemon.stop()
        names = [f"bench/copy{number}" for number in range(mirrors - 1)]
        for name in names:
            copy = self._daemon.mirror.with_name(name.replace("/", "__"))
            shutil.copytree(self._daemon.mirror, copy, copy_function=os.link)
        self._daemon.start()
        self._import("bench-copies", dict.fromkeys(names, self.commits))

    def _import(self, name: str, recorded: dict[str, list[str]]) -> None:
        file = self._daemon.area / f"{name}.jsonl"
        rows = (
            instance_row(repo, commit) for repo, commits in recorded.items() for commit in commits
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with self._daemon.client() as client:
            client.wait(client.import_dataset(file, name=name), timeout=_TIMEOUT)


def _duration_s(operation: Operation) -> float:
    assert operation.finished_at is not None
    return (operation.finished_at - operation.started_at).total_seconds()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
