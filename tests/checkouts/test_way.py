"""The way of a checkout through the code: how many files and frames a reader has to follow."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from checkout_parts import USER_PEER, Service, running_service
from gitrepos import Upstream, git

import mirrord
from mirrord.model import Backend
from mirrord.protocol import ResetCheckout, StartCheckout

pytestmark = pytest.mark.root

_OURS = str(Path(mirrord.__file__).parent)
# a reader need not open it: `exists` and its like are what the standard library's names say
_WORDS = f"{_OURS}/presence.py"


class Way:
    """The files of mirrord that a task goes through on the event loop, and its deepest stack."""

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self.task = task
        self.files: list[str] = []
        self.frames = 0

    @property
    def moves(self) -> int:
        """How often the call goes on in another file."""
        return sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(_OURS) or file == _WORDS:
            return
        if asyncio.current_task() is not self.task:
            return  # such as the trash, which has ended meanwhile
        self.files.append(file.removeprefix(_OURS))
        depth, above = 0, frame
        while above is not None:
            depth += above.f_code.co_filename.startswith(_OURS)
            above = above.f_back  # type: ignore[assignment]
        self.frames = max(self.frames, depth)


def follow(service: Service, call: Callable[..., Awaitable[Any]], *args: Any) -> Way:
    async def traced() -> Way:
        way = Way(asyncio.current_task())
        sys.setprofile(way)
        try:
            await call(*args)
        finally:
            sys.setprofile(None)
        return way

    return service.call(traced)


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        commit = git(running.mirror, "rev-parse", "v2")
        row = {"instance_id": "psf__requests-1", "repo": "psf/requests", "base_commit": commit}
        running.import_instances([row])
        yield running


@pytest.mark.parametrize("backend", [Backend.OVERLAY, Backend.POOL])
def test_a_warm_checkout_can_be_read_in_one_sitting(service: Service, backend: Backend) -> None:
    """docs/architecture.md draws it. The bounds are those of a reader, not of a machine."""
    request = StartCheckout(instance="psf__requests-1", backend=backend)
    for _ in range(2):
        held = service.call(service.checkouts.checkout, request, USER_PEER)
    made = follow(service, service.checkouts.checkout, request, USER_PEER)
    reset = follow(service, service.checkouts.reset, held.id, ResetCheckout(), USER_PEER)
    assert len(set(made.files)) <= (22 if backend is Backend.OVERLAY else 27), set(made.files)
    assert len(set(reset.files)) <= 25, set(reset.files)
    for way in (made, reset):
        assert way.frames <= 16
        assert way.moves <= 140
    assert "/catalog/database.py" not in {*made.files, *reset.files}
    assert "/git/command.py" not in {*made.files, *reset.files}


def test_a_reset_with_its_worker_is_not_tossed_between_files(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of a pool reset, with what its worker does: of a clean tree, and of a change."""
    request = StartCheckout(instance="psf__requests-1", backend=Backend.POOL)
    held = service.call(service.checkouts.checkout, request, USER_PEER)

    async def run_here(function: Callable[..., Any], *args: Any, timeout: object = None) -> Any:
        return function(*args)

    monkeypatch.setattr(service.workers, "run", run_here)
    # it reads files with a ctime that is too recent to prove anything, until a later tick of the clock
    ways = (
        follow(service, service.checkouts.reset, held.id, ResetCheckout(), USER_PEER)
        for _ in range(20)
    )
    assert next(way for way in ways if way.moves <= 160).moves > 130
    changed = next(path for path in sorted(Path(held.path).iterdir()) if path.is_file())
    for is_dirty, bound in ((False, 160), (True, 250)):
        if is_dirty:
            changed.write_text("an agent's")
        way = follow(service, service.checkouts.reset, held.id, ResetCheckout(), USER_PEER)
        assert 130 < way.moves <= bound, (is_dirty, way.moves)
        assert way.frames <= 16
