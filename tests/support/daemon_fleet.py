"""Fleets for tests: several real daemons on one PostgreSQL and one store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import postgresql
from daemons import Daemon, daemon
from gitrepos import git

TEXT = """
[catalog]
url = "{catalog}"
[store]
url = "{store}"
[sync]
interval = "{interval}"
jitter = "0s"
[upstream]
url = "file://{upstreams}/{{owner}}+{{name}}"
"""


def eventually(look: Callable[[], Any], bound_s: float = 120.0) -> Any:
    """What `look` answers once that is true."""
    deadline = time.monotonic() + bound_s
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not become so"
        time.sleep(0.2)
    return found


def done(one: Daemon, method: str, path: str, body: Any = None, bound_s: float = 90.0) -> Any:
    """The result of an operation."""
    return well_ended(one, one.json(method, path, body), bound_s)


def well_ended(one: Daemon, operation: Any, bound_s: float = 90.0) -> Any:
    """The result of an operation that was begun."""
    answer = _wait(one, operation, bound_s)
    assert answer["state"] == "done", answer
    return answer["result"]


def ended(one: Daemon, method: str, path: str, body: Any = None, bound_s: float = 90.0) -> Any:
    """An operation, well ended or not."""
    return _wait(one, one.json(method, path, body), bound_s)


def _wait(one: Daemon, operation: Any, bound_s: float) -> Any:
    assert "id" in operation, operation
    deadline = time.monotonic() + bound_s
    while operation["state"] == "running":
        assert time.monotonic() < deadline, operation
        time.sleep(0.05)
        operation = one.json("GET", f"/v1/operations/{operation['id']}")
    return operation


def rows(*commits: str, prefix: str = "i", patch: str = "") -> bytes:
    """A dataset of one instance a commit."""
    empty = {"repo": "owner/name", "patch": patch, "test_patch": ""}
    lines = [
        {"instance_id": f"{prefix}-{number}", "base_commit": oid, **empty}
        for number, oid in enumerate(commits)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def refs(one: Daemon) -> str:
    """All refs of its mirror but kept ones, and HEAD; empty without it.

    A daemon whose sync nobody took keeps what it had fetched. Read from the files: this is asked
    again and again.
    """
    found = _read_refs(one.state_dir / "mirrors/owner__name")
    kept = "refs/mirrord/kept/"
    return "".join(f"{found[it]} {it}\n" for it in sorted(found) if not it.startswith(kept))


def _read_refs(mirror: Path) -> dict[str, str]:
    """Loose ones first, as git does: one that is packed meanwhile is found there."""
    found = dict[str, str]()
    with suppress(FileNotFoundError):
        loose = [it for it in (mirror / "refs").rglob("*") if it.is_file()]
        for path in (mirror / "HEAD", *(it for it in loose if it.suffix != ".lock")):
            with suppress(FileNotFoundError):
                found[str(path.relative_to(mirror))] = path.read_text().strip()
        for line in (mirror / "packed-refs").read_text().splitlines():
            if not line.startswith(("#", "^")):
                oid, _, name = line.partition(" ")
                found.setdefault(name, oid)
    return found


def become_like(model: Daemon, *nodes: Daemon, bound_s: float = 120.0) -> None:
    """Wait until they have its refs, with all that those reach."""
    for node in nodes:
        eventually(partial(_are_alike, model, node), bound_s)
        sound(node)


def _are_alike(one: Daemon, other: Daemon) -> bool:
    return refs(one) == refs(other)


def have(text: str, *nodes: Daemon, bound_s: float = 120.0) -> None:
    """Wait until a ref, or a commit that one names, is in their mirrors."""
    for node in nodes:
        eventually(partial(_has, text, node), bound_s)


def _has(text: str, one: Daemon) -> bool:
    return text in refs(one)


def checkout(one: Daemon, **body: str) -> bool:
    """Return whether a checkout succeeds."""
    return one.request("POST", "/v1/checkouts", body)[0] == 201


def sound(one: Daemon) -> None:
    git(one.state_dir / "mirrors/owner__name", "fsck", "--strict", "--connectivity-only")


class Fleet:
    """`make` adds a daemon to those that share a catalog and a store."""

    def __init__(
        self, server: postgresql.Server, store: str, upstreams: Path, stack: ExitStack
    ) -> None:
        self.server, self.store, self.upstreams = server, store, upstreams
        self.store_path = Path(store.removeprefix("file://"))
        self.catalog = server.create()
        self._stack = stack
        self.nodes: list[Daemon] = []

    def make(
        self,
        text: str = "",
        *,
        interval: str = "1h",
        start: bool = True,
        environment: Mapping[str, str] | None = None,
        catalog: str | None = None,
    ) -> Daemon:
        settings = TEXT.format(
            catalog=catalog or self.catalog,
            store=self.store,
            interval=interval,
            upstreams=self.upstreams,
        )
        made = self._stack.enter_context(
            daemon(settings + text, start=start, environment=environment)
        )
        self.nodes.append(made)
        return made


def newest(fleet: Fleet) -> tuple[int, int]:
    """Epoch and number of the mirror's newest generation."""
    query = "SELECT epoch, number FROM generations WHERE mirror_key = 'owner__name'"
    found = fleet.server.execute_in(fleet.catalog, query)
    return (int(str(found[0][0])), int(str(found[0][1]))) if found else (0, 0)


@contextmanager
def fleet(server: postgresql.Server, store: str, upstreams: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(server, store, upstreams, stack)
