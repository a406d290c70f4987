"""Stores of both kinds; fleets of real daemons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import daemon_fleet
import postgresql
import pytest
import s3
from gitrepos import Upstream

from mirrord.fleet.objects import ObjectStore


@pytest.fixture
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ObjectStore:
    """A directory, or with `s3.OF_EACH_KIND` a bucket too."""
    if getattr(request, "param", "directory") == "directory":
        return ObjectStore(f"file://{tmp_path}/store/below")
    server = s3.shared()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return ObjectStore(server.create())


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(5)
    made.git("tag", "-a", "-m", "one", "v1")
    return made


@pytest.fixture(scope="session")
def server() -> Iterator[postgresql.Server]:
    with postgresql.running() as made:
        yield made


@pytest.fixture
def fleet(
    server: postgresql.Server, tmp_path: Path, upstream: Upstream
) -> Iterator[daemon_fleet.Fleet]:
    with daemon_fleet.fleet(server, f"file://{tmp_path}/store", upstream.path.parent) as made:
        yield made
