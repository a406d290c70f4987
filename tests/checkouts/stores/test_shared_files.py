"""What sealed stores have alike is on disk once, is never lent when it is not what it was, and goes with the last that has it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import Upstream
from templatelab import Store, assert_equals_commit, run

from mirrord.checkouts.stores.store import SHARED, remove_unused, unshare, write_shared
from mirrord.host.trash import Trash


def kept(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"{SHARED}*"))


def test_equal_contents_are_one_file(tmp_path: Path) -> None:
    """Others are others."""
    for name, content in (("a", b"same"), ("b", b"same"), ("c", b"other")):
        write_shared(tmp_path, tmp_path / name, content)
        assert (tmp_path / name).read_bytes() == content
    assert (tmp_path / "a").samefile(tmp_path / "b")
    assert not (tmp_path / "a").samefile(tmp_path / "c")
    assert len(kept(tmp_path)) == 2


def test_what_was_altered_is_not_lent(tmp_path: Path) -> None:
    """The next store gets what was asked for, and so do those after it."""
    write_shared(tmp_path, tmp_path / "a", b"same")
    (tmp_path / "a").write_bytes(b"evil")
    for name in ("b", "c"):
        write_shared(tmp_path, tmp_path / name, b"same")
        assert (tmp_path / name).read_bytes() == b"same"
    assert (tmp_path / "b").samefile(tmp_path / "c")


def test_it_goes_with_the_last_that_has_it(tmp_path: Path) -> None:
    """Or at a start, where a crash came between."""
    for name in ("a", "b"):
        write_shared(tmp_path, tmp_path / name, b"same")
    unshare(tmp_path, tmp_path / "a")
    assert len(kept(tmp_path)) == 1
    (tmp_path / "a").unlink()
    assert remove_unused(tmp_path, Trash()) == 0
    unshare(tmp_path, tmp_path / "b")
    assert kept(tmp_path) == []
    write_shared(tmp_path, tmp_path / "d", b"same")
    (tmp_path / "d").unlink()
    assert remove_unused(tmp_path, Trash()) == 1
    assert kept(tmp_path) == []


def test_a_file_with_all_the_links_there_can_be_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 allows 65,000."""
    write_shared(tmp_path, tmp_path / "a", b"same")

    def refused(source: Path, target: Path) -> None:
        assert source == kept(tmp_path)[0] or target == kept(tmp_path)[0]
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refused)
        write_shared(tmp_path, tmp_path / "b", b"same")
    assert (tmp_path / "b").read_bytes() == b"same"
    assert not (tmp_path / "a").samefile(tmp_path / "b")


@pytest.mark.root
def test_sealed_stores_share_their_control_files(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Every checkout sees its own; git finds nothing amiss in any."""
    upstream = make_upstream("up")
    commits = upstream.history(4)

    async def test(store: Store) -> None:
        for number, commit in enumerate(commits):
            made = await store.ensure(commit)
            assert_equals_commit(
                made, tmp_path / str(number), upstream.git("rev-parse", f"{commit}^{{tree}}")
            )
        gits = store.trees.parent / "gits"
        assert len({path.stat().st_ino for path in gits.glob("*/.git/config")}) == 1
        assert len({path.stat().st_ino for path in gits.glob("*/.git/packed-refs")}) == 1
        assert len({path.stat().st_ino for path in gits.glob("*/.git/HEAD")}) == len(commits)
        store.template_bytes = "1B"
        assert await store.templates.evict() == len(commits)
        assert list(gits.iterdir()) == []

    run(tmp_path, upstream, test)
