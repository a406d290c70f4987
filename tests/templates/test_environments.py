"""Environments on disk: found by name, held, removed, found again by a start."""

import json
import os
from pathlib import Path

import pytest

from mirrord.errors import ConflictError, NotFoundError
from mirrord.host.trash import Trash
from mirrord.templates.environments import EnvironmentRecord, EnvironmentStore

pytestmark = pytest.mark.anyio

OLD, NEW = "aa" * 32, "ab" * 32


def opened(state_dir: Path) -> EnvironmentStore:
    (state_dir / "templates").mkdir(exist_ok=True)
    store = EnvironmentStore(state_dir, Trash())
    store.open()
    return store


def add(
    store: EnvironmentStore, digest: str, *, at: float = 0, state: str = "ready"
) -> EnvironmentRecord:
    path = store.new_path()
    path.mkdir()
    if state == "ready":
        (path / "files").mkdir()
    facts = {"key": "flask-2.0", "digest": digest, "state": state, "at": at}
    (path / "environment.json").write_text(json.dumps(facts))
    return store.add(path, digest)


async def test_a_key_means_the_environment_built_last_and_a_digest_may_be_cut(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    add(store, OLD, at=1)
    add(store, NEW, at=2)
    add(store, "cc" * 32, at=3, state="failed")
    assert store.get("flask-2.0").digest == NEW
    assert store.get("flask-2.0@aaaa").digest == OLD
    assert store.get("flask-2.0").name == f"flask-2.0@{NEW[:12]}"
    for unknown in ("flask-2.0@cccc", "flask", "../flask", "flask-2.0@"):
        assert store.find(unknown) is None
    with pytest.raises(NotFoundError, match="cannot find environment"):
        store.get("flask")


async def test_a_start_finds_environments_and_removes_what_is_not_whole(tmp_path: Path) -> None:
    store = opened(tmp_path)
    add(store, OLD)
    add(store, NEW, state="failed")
    store.new_path().mkdir()
    (store.root / ("dd" * 32)).mkdir()
    (store.root / ".trash-1").mkdir()
    store.shared.mkdir()
    again = opened(tmp_path)
    assert [(each.digest, each.is_ready) for each in again.list()] == [(OLD, True), (NEW, False)]
    assert sorted(os.listdir(store.root)) == [".files", OLD, NEW]


async def test_a_held_environment_is_not_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    add(store, OLD)
    store.hold(OLD)
    store.hold(OLD)
    store.drop(OLD)
    with pytest.raises(ConflictError, match="a checkout or a prepared layer"):
        store.remove(OLD)
    store.drop(OLD)
    store.remove(OLD)
    assert store.find("flask-2.0") is None
    assert not store.directory(OLD).exists()
