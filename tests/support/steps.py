"""What one daemon of a fleet changes, seen as it happens: on its disk, in the store, in PostgreSQL.

It reaches the last two through links of its own. A step is what its daemon is about to do, by name
and by how often that came; of what others see at once, also when it was done and the answer is on
its way. Questions are no steps: a kill there is one after the step before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from faults.tripwire import Tripwire
from link import Link

_REQUEST = re.compile(rb"(GET|PUT|POST|DELETE|HEAD) /\w+(?:/prefix)?([^ ?]*)\S* HTTP/1\.1\r\n")
_WRITE = re.compile(rb"(?<!FOR )(INSERT INTO|UPDATE|DELETE FROM) (\w+)")
_RANDOM = (
    (re.compile(r"[0-9a-f]{64}"), "*"),
    (re.compile(r"checks/[0-9a-f]{32}"), "checks/*"),
    (re.compile(r"\d{10}"), "*"),
    (re.compile(r"owner__\w+"), "owner__*"),
    (re.compile(r"\b(publish|download)-\w+"), r"\1-*"),
    (re.compile(r"(?<=publish-\*/)[0-9a-f]{2}(?=/|`)"), "*"),
)
_HEARTBEATS = {b"nodes"}  # of every daemon, all the time

OnStep = Callable[[str, int], bool]
"""Answers whether the daemon was killed there: what it was about to send does not arrive."""


class Steps:
    """Calls `on_step` in some thread for every step, from `with` to its end."""

    def __init__(self, root: Path, store: Link, database: Link, on_step: OnStep) -> None:
        self._links = {store: self._see_request, database: self._see_statement}
        self._on_step = on_step
        self._disk = Tripwire(root, self._see_change)
        self._seen: Counter[str] = Counter()
        self._unanswered: dict[int, str] = {}
        self._written: set[int] = set()  # connections in a transaction that wrote

    def __enter__(self) -> Steps:
        self._disk.__enter__()
        for link, see in self._links.items():
            link.on_data = see
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            link.on_data = lambda *_: None
        self._disk.__exit__()

    def _tell(self, step: str) -> None:
        self._seen[step] += 1
        if self._on_step(step, self._seen[step]):
            raise ConnectionAbortedError  # a link that meets an OSError closes the connection

    def _answered(self, connection: int) -> None:
        if step := self._unanswered.pop(connection, None):
            self._tell(f"{step}: done")

    def _see_change(self, step: str, count: int) -> None:
        self._on_step(_plain(step), count)

    def _see_request(self, connection: int, is_request: bool, data: bytes) -> None:
        if not is_request:
            self._answered(connection)
        elif found := _REQUEST.match(data):
            step = _plain(f"{found[1].decode()} {found[2].decode()}").rstrip()
            self._tell(step)
            if found[1] not in {b"GET", b"HEAD"}:
                self._unanswered[connection] = step

    def _see_statement(self, connection: int, is_request: bool, data: bytes) -> None:
        if not is_request:
            self._answered(connection)
        elif found := _WRITE.search(data):
            if found[2] not in _HEARTBEATS:
                self._written.add(connection)
                self._tell(f"{found[1].decode()} {found[2].decode()}")
        elif b"COMMIT" in data and connection in self._written:
            self._written.discard(connection)
            self._tell("COMMIT")
            self._unanswered[connection] = "COMMIT"


def _plain(step: str) -> str:
    for pattern, replacement in _RANDOM:
        step = pattern.sub(replacement, step)
    return step
