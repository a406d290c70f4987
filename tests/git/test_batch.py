"""Many objects from one `git cat-file`: existing, missing, ambiguous or damaged."""

from __future__ import annotations

import itertools
from pathlib import Path

import anyio
import pytest
from gitrepos import Upstream

from mirrord.errors import CorruptObjectError, GitFailedError
from mirrord.git.batch import BatchObject, object_info, read_objects_sync
from mirrord.git.command import Git

ABSENT = "12" * 20
DOING = "read objects"


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path / "upstream")


def test_each_name_is_answered_in_order(upstream: Upstream, tmp_path: Path) -> None:
    head = upstream.commit({"a": "content\n"})
    git_dir = upstream.path / ".git"
    tree, blob = (
        upstream.git("rev-parse", f"HEAD{suffix}").strip() for suffix in ("^{tree}", ":a")
    )
    names = [f"{head}^{{tree}}", ABSENT, blob, head, f"{ABSENT}^{{commit}}", "no such name"]
    kinds = [(tree, "tree"), ("", "missing"), (blob, "blob"), (head, "commit")]
    kinds += [("", "missing"), ("", "missing")]
    expected = [BatchObject(name, *each) for name, each in zip(names, kinds, strict=True)]
    assert list(read_objects_sync(git_dir, [], info=names, doing=DOING)) == expected
    assert anyio.run(info, tmp_path, git_dir, names) == expected
    read = list(read_objects_sync(git_dir, names, doing=DOING))
    assert [each._replace(data=b"") for each in read] == expected
    assert read[2].data == b"content\n"
    assert read[1].data == b""
    assert list(read_objects_sync(git_dir, [], doing=DOING)) == []


async def info(home: Path, git_dir: Path, names: list[str]) -> list[BatchObject]:
    return await object_info(Git(home=home / "home"), git_dir, names, doing=DOING, bisect=True)


def test_a_damaged_object_does_not_affect_the_others(upstream: Upstream, tmp_path: Path) -> None:
    head = upstream.commit({"a": "content\n", "b": "other\n"})
    git_dir = upstream.path / ".git"
    a, b = (upstream.git("rev-parse", f"HEAD:{name}").strip() for name in "ab")
    loose = git_dir / "objects" / a[:2] / a[2:]
    loose.chmod(0o644)
    loose.write_bytes(loose.read_bytes()[:-6] + b"damage")
    with pytest.raises((CorruptObjectError, GitFailedError)):
        list(read_objects_sync(git_dir, [head, a, b], doing=DOING))
    read = read_objects_sync(git_dir, [head, a, b], doing=DOING, bisect=True)
    assert [(each.name, each.kind) for each in read] == [
        (head, "commit"),
        (a, "damaged"),
        (b, "blob"),
    ]


def test_an_ambiguous_name_is_reported(upstream: Upstream, tmp_path: Path) -> None:
    upstream.commit({str(number): f"{number}\n" for number in range(600)})
    listing = ("cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    ids = sorted(upstream.git(*listing).split())
    short = next(a[:4] for a, b in itertools.pairwise(ids) if a[:4] == b[:4])
    (found,) = read_objects_sync(upstream.path / ".git", [], info=[short], doing=DOING)
    assert (found.kind, found.exists) == ("ambiguous", False)
