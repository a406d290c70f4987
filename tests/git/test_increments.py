"""What a commit adds to a closure, compared with `git rev-list --objects`, on random histories."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from gitrepos import git

from mirrord.git.objects.increments import pack_increment
from mirrord.git.packs import PackIndex

_NAMES = ("a", "b", "d/a", "d/b", "d/e/a", "d/e/b", "f/a")


def _random_history(path: Path, seed: int, count: int) -> list[str]:
    """Files get new and former contents in turn, so that trees recur; some merges."""
    chance = random.Random(seed)
    contents = {name: ["0"] for name in _NAMES}
    stream = []
    for mark in range(1, count + 1):
        stream += [
            "commit refs/heads/main",
            f"mark :{mark}",
            f"committer x <x@y> {mark} +0000",
            "data 0",
        ]
        if mark > 1:
            stream.append(f"from :{chance.choice([mark - 1, mark - 1, chance.randrange(1, mark)])}")
        if mark > 3 and chance.random() < 0.2:
            stream.append(f"merge :{chance.randrange(1, mark)}")
        for name in chance.sample(_NAMES, 2):
            known = contents[name]
            known.append(f"{name} {mark}" if chance.random() < 0.5 else chance.choice(known[-3:]))
            stream += [f"M 100644 inline {name}", f"data {len(known[-1])}", known[-1]]
    git(path.parent, "init", "-q", "--bare", str(path))
    git(
        path,
        "fast-import",
        "--quiet",
        "--force",
        "--export-marks=marks",
        stdin="\n".join([*stream, ""]).encode(),
    )
    marks = dict(line.split() for line in (path / "marks").read_text().splitlines())
    return [marks[f":{mark}"] for mark in range(1, count + 1)]


def _reached(repository: Path, *tips: str) -> set[str]:
    return set(git(repository, "rev-list", "--objects", "--no-object-names", *tips).split())


@pytest.mark.parametrize("seed", range(4))
def test_a_closure_is_complete_where_changes_are_reverted(tmp_path: Path, seed: int) -> None:
    repository = tmp_path / "r.git"
    commits = _random_history(repository, seed, 60)
    for tip, base in [(59, 0), (50, 20), (40, 35), (30, 3)]:
        below = _reached(repository, commits[base])
        listing = "".join(f"{oid}\n" for oid in below).encode()
        name = git(
            repository, "pack-objects", "-q", str(tmp_path / f"{tip}"), stdin=listing
        ).strip()
        into = tmp_path / f"into-{tip}"
        into.mkdir()
        packed = pack_increment(repository, commits[tip], [tmp_path / f"{tip}-{name}.idx"], into)
        assert packed is not None
        added = {oid.hex() for oid in PackIndex((into / packed.name).with_suffix(".idx"))}
        assert added == _reached(repository, commits[tip]) - below
