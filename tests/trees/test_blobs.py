"""Files of layers are shared: a version of a file is on disk once, and only while a layer has it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import Upstream
from template_parts import Store, assert_equals_commit, disk_bytes, run

pytestmark = pytest.mark.root


def test_a_file_of_several_layers_is_on_disk_once(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """A file that a later commit has again is a link; git still sees clean trees; the file is removed with its last layer."""
    upstream = make_upstream("up")
    commits = [upstream.commit({f"d{n % 3}/f{n}": os.urandom(9999).hex() for n in range(30)})]
    text = os.urandom(9999).hex()
    for turn in range(4):
        commits.append(
            upstream.commit(
                {"d0/back": text if turn % 2 == 0 else None, f"d1/new{turn}": f"{turn}"}
            )
        )
    trees = [upstream.git("rev-parse", f"{commit}^{{tree}}") for commit in commits]

    async def test(store: Store) -> None:
        made = [await store.ensure(commit) for commit in commits]
        copies = list(store.trees.glob("*@*/files/d0/back"))
        assert len(copies) > 1
        assert {copy.stat().st_ino for copy in copies} == {copies[0].stat().st_ino}
        blobs = store.trees.parent / "blobs"
        assert sum(len(text) == blob.stat().st_size for blob in blobs.iterdir()) == 1
        for number, (template, tree) in enumerate(zip(made, trees, strict=True)):
            assert_equals_commit(template, tmp_path / str(number), tree)
        assert store.templates._registry.size_bytes <= disk_bytes(store.trees)
        store.template_bytes = "1B"
        assert await store.templates.evict() == len(commits)
        assert list(blobs.iterdir()) == []
        assert store.templates._registry.size_bytes == 0

    run(tmp_path, upstream, test)


@pytest.mark.parametrize("damage", ["bytes", "mode"])
def test_a_damaged_shared_file_is_not_linked(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, damage: str
) -> None:
    """Its bytes are hashed before a layer gets it: the layer is sound, the next one shares the new file."""
    upstream = make_upstream("up")
    first = upstream.commit({f"d{n}/f": os.urandom(9999).hex() for n in range(30)})
    second = upstream.commit({"shared": "same " * 999})
    third = upstream.commit({"shared": None, "d1/shared": "same " * 999})
    tree = upstream.git("rev-parse", f"{third}^{{tree}}")

    async def test(store: Store) -> None:
        await store.ensure(first)
        await store.ensure(second)
        (copy,) = store.trees.glob("*@*/files/shared")
        if damage == "bytes":
            copy.write_text("SAME " * 999)
        else:
            copy.chmod(0o600)
        template = await store.ensure(third)
        (sound,) = store.trees.glob("*@*/files/d1/shared")
        assert sound.stat().st_ino != copy.stat().st_ino
        assert_equals_commit(template, tmp_path / "third", tree)

    run(tmp_path, upstream, test)


def test_shared_files_of_no_layer_are_removed(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """A killed build leaves them; the next daemon removes them when it sees what there is."""
    upstream = make_upstream("up")
    first = upstream.commit({f"d{n}/f": os.urandom(9999).hex() for n in range(30)})
    second = upstream.commit({"shared": "same " * 999})

    async def test(store: Store) -> None:
        await store.ensure(first)
        await store.ensure(second)
        blobs = store.trees.parent / "blobs"
        kept = {blob.name for blob in blobs.iterdir()}
        (blobs / f"{'1' * 40}.644").write_text("left")
        again = await store.reopened()
        assert not await again.templates.is_full()
        assert {blob.name for blob in blobs.iterdir()} == kept
        assert again.templates._registry.size_bytes == store.templates._registry.size_bytes

    run(tmp_path, upstream, test)
