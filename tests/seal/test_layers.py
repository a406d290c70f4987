"""Layers are read once, and judged for one commit of a mirror at a time."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from gitrepos import Upstream, git

from mirrord.environments.images.layers import make_cover
from mirrord.host.files import make_whiteout
from mirrord.model import CommitId
from mirrord.seal.layers import LayerScan, ScannedLayer, as_paths, read_layer, scan_layers


def text(subject: str) -> str:
    return f"# the {subject} of this project, which is long enough to say something\n" * 3


class World(NamedTuple):
    upstream: Upstream
    mirror: Path
    old: CommitId
    base: CommitId
    fix: CommitId


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    top = tmp_path_factory.mktemp("layers")
    upstream = Upstream(top / "acme/widget")
    commits = [
        upstream.commit({"widget/__init__.py": "", "widget/core.py": text(each)})
        for each in ("old", "base", "fix")
    ]
    mirror = top / "acme__widget"
    git(top, "clone", "--quiet", "--mirror", upstream.url, str(mirror))
    return World(upstream, mirror, *map(CommitId, commits))


def layer(top: Path, name: str, files: dict[str, str | None]) -> ScannedLayer:
    """Make and read a layer; a file without content is a whiteout."""
    root = top / name
    root.mkdir()
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            make_whiteout(None, os.fsencode(file))
        else:
            file.write_text(content)
    return ScannedLayer(root, top / f"{name}.list")


def judge(
    world: World, layers: list[ScannedLayer], base: CommitId, inside: bytes | None = None
) -> LayerScan:
    for each in layers:
        read_layer(each)
    return scan_layers(layers, world.mirror, base, inside)


def found(scan: LayerScan) -> set[tuple[str, str]]:
    return {(leak.kind, leak.path) for leak in scan.leaks}


def test_each_door_is_found_and_what_upper_layers_hide_is_not(world: World, tmp_path: Path) -> None:
    lowest = layer(tmp_path, "a", {
        "srv/core.py": text("fix"), "srv/past.py": text("base"), "gone/core.py": text("fix"),
    })  # fmt: skip
    with zipfile.ZipFile(lowest.path / "cache.whl", "w") as wheel:
        wheel.writestr("widget/core.py", text("fix"))
    for name, options in {"bare.git": ("--bare",), "clone": ()}.items():
        git(tmp_path, "clone", "--quiet", *options, world.upstream.url, str(lowest.path / name))
    git(lowest.path / "clone", "worktree", "add", "--quiet", "../tree")
    git(lowest.path / "bare.git", "bundle", "create", "--quiet", "../b.bundle", "--all")
    (pack,) = (lowest.path / "bare.git/objects/pack").glob("*.pack")
    shutil.copy(pack, lowest.path / "stray")
    git(tmp_path, "clone", "--quiet", world.upstream.url, str(lowest.path / "past"))
    git(lowest.path / "past", "checkout", "--quiet", "--detach", world.base)
    for command in (
        ("remote", "remove", "origin"), ("branch", "-D", "main"),
        ("reflog", "expire", "--expire=now", "--all"), ("repack", "-adq"),
        ("prune-packed",), ("prune", "--expire=now"),
    ):  # fmt: skip
        git(lowest.path / "past", *command)
    upper = layer(tmp_path, "b", {"gone": None, "srv/own.py": text("own")})
    scan = judge(world, [upper, lowest], world.base)
    expected = {
        ("future-file", "srv/core.py"), ("future-file", "cache.whl!widget/core.py"),
        ("future-file", "clone/widget/core.py"), ("future-file", "tree/widget/core.py"),
        ("repository", "bare.git"), ("repository", "clone/.git"), ("pack", "b.bundle"),
        ("pack", "stray"),
    }  # fmt: skip
    assert found(scan) == expected
    assert [each for each in scan.notes if each.startswith("'past/.git': ")]
    # of another commit: what was the past is now beyond it
    assert ("future-file", "srv/past.py") in found(judge(world, [upper, lowest], world.old))
    assert not [
        each for each in found(judge(world, [upper, lowest], world.fix)) if "pack" not in each
    ]


def test_a_damaged_store_is_a_finding(world: World, tmp_path: Path) -> None:
    lowest = layer(tmp_path, "a", {})
    git(tmp_path, "clone", "--quiet", "--bare", world.upstream.url, str(lowest.path / "x.git"))
    (index,) = (lowest.path / "x.git/objects/pack").glob("*.idx")
    index.chmod(0o644)
    index.write_bytes(b"x")
    assert found(judge(world, [lowest], world.fix)) == {("unreadable", "x.git")}


def test_later_objects_are_found_without_reading_anything_again(
    world: World, tmp_path: Path
) -> None:
    mirror = tmp_path / "acme__widget"
    shutil.copytree(world.mirror, mirror)
    place = world._replace(mirror=mirror)
    lowest = layer(tmp_path, "a", {"new.py": text("next"), "past.py": text("base")})
    first = judge(place, [lowest], world.base)
    assert first.leaks == []
    assert first.inside == bytes.fromhex(git(mirror, "rev-parse", f"{world.base}:widget/core.py"))
    shutil.rmtree(lowest.path)
    git(mirror, "hash-object", "-w", "--stdin", stdin=text("next").encode())
    again = judge(place, [lowest], world.base, first.inside)
    assert found(again) == {("future-file", "new.py")}
    assert again.inside == first.inside


def test_a_cover_hides_and_keeps_the_modes_above(tmp_path: Path) -> None:
    lowest = layer(tmp_path, "a", {"root/.cache/x": "x", "lib/x": "x", "d/x": "x"}).path
    upper = layer(tmp_path, "b", {"root/y": "y", "d": None}).path
    (upper / "root").chmod(0o700)
    (upper / "lib").symlink_to("d")
    make_cover(tmp_path / "cover", ["root/.cache/x", "lib/x", "d/x", "absent/x"], [upper, lowest])
    listed = {str(path.relative_to(tmp_path / "cover")) for path in (tmp_path / "cover").rglob("*")}
    assert listed == {"root", "root/.cache", "root/.cache/x"}
    assert (tmp_path / "cover/root").stat().st_mode & 0o777 == 0o700


def test_what_is_within_a_hidden_directory_is_not_named_again(world: World, tmp_path: Path) -> None:
    lowest = layer(tmp_path, "a", {"x/core.py": text("fix"), "x/a!b": text("fix")})
    git(tmp_path, "clone", "--quiet", "--bare", world.upstream.url, str(lowest.path / "x/g"))
    assert as_paths(judge(world, [lowest], world.base).leaks) == [
        "x/a", "x/a!b", "x/core.py", "x/g",
    ]  # fmt: skip
