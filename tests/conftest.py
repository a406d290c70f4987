"""What every test has: git away from this machine's configuration, and upstreams built at run time."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from anyio.from_thread import start_blocking_portal
from checkout_parts import rich_upstream
from gitrepos import Upstream
from heal_parts import Furnished, House

from mirrord.workers.pool import FORK_SERVER


def pytest_configure() -> None:
    """Be independent of the shell: it may ignore Ctrl-C for its children, or have a strict umask."""
    gc.disable()  # until the tests are collected: a million objects, of which none is garbage
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o022)
    # A busy machine is no failure of the code.
    hypothesis.settings.register_profile(
        "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("tests")
    # Parts of a daemon in this process have a worker for each test, which would import them all.
    FORK_SERVER.preload = (
        "mirrord.audit.examine",
        "mirrord.changes.pools",
        "mirrord.changes.survey",
        "mirrord.datasets.reading",
        "mirrord.environments.leaks",
        "mirrord.grading.prepare",
        "mirrord.heal.damaged_packs",
        "mirrord.heal.publish",
        "mirrord.mirrors.survey",
        "mirrord.patches.diff",
        "mirrord.templates.layers",
        "mirrord.trees.pooled",
    )


def pytest_collection_finish() -> None:
    """No collection looks at modules and tests again, and no fork copies their pages for one."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that none is left alone at the end of a parallel run.

    Before all others those whose tests may take longest.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    allowed_s = dict.fromkeys(slow, 0)
    for item in items:
        if item.path in slow and (timeout := item.get_closest_marker("timeout")):
            allowed_s[item.path] = max(allowed_s[item.path], timeout.args[0])
    items.sort(key=lambda item: (item.path not in slow, -allowed_s.get(item.path, 0)))
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _own_git_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The machine's own `safe.directory=*` would hide ownership bugs."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def make_upstream(tmp_path: Path) -> Callable[[str], Upstream]:
    """Build an upstream by name, below the test's own directory."""

    def make(name: str = "upstream") -> Upstream:
        return Upstream(tmp_path / "upstreams" / name)

    return make


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    """Three commits with everything a tree can hold, for reading only."""
    repository = Upstream(tmp_path_factory.mktemp("upstream") / "rich")
    rich_upstream(repository)
    return repository


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Furnished]:
    root = tmp_path_factory.mktemp("house")
    upstream = Upstream(root / "name")
    upstream.history(5)
    with start_blocking_portal() as portal:
        house = House(root, upstream)
        portal.call(house.open)
        portal.call(house.furnish)
        yield Furnished(root, house, portal)
        portal.call(house.close)


@pytest.fixture
def furnished(alive: Furnished) -> Furnished:
    alive.restore()
    return alive


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path must be short, pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="mc-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "s"
