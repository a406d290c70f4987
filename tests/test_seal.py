"""verify_seal against every published way to leak the future, and against repositories that are hostile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from gitrepos import Upstream, git

from mirrord.checkouts.seal import verify_seal
from mirrord.errors import InvalidCommitError, PathNotFoundError


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    """Ten commits; an annotated tag on the third, one on the eighth."""
    upstream = Upstream(tmp_path / "upstream")
    for number, commit in enumerate(upstream.history(10)):
        if number in {2, 7}:
            upstream.git("tag", "-a", "-m", f"release {number}", f"v{number}", commit)
    return upstream


def base_of(upstream: Upstream) -> str:
    return upstream.git("rev-parse", "HEAD~5")


def sealed_by_hand(upstream: Upstream, path: Path) -> str:
    """A store with the closure of the base commit, its tag, and nothing else."""
    base = base_of(upstream)
    git(path.parent, "init", "-q", str(path))
    objects = upstream.git("rev-list", "--objects", base, "v2").encode()
    upstream.git("pack-objects", "-q", f"{path}/.git/objects/pack/pack", stdin=objects)
    (path / ".git/HEAD").write_text(f"{base}\n")
    git(path, "update-ref", "refs/tags/v2", upstream.git("rev-parse", "v2"))
    git(path, "reset", "-q", "--hard")
    shutil.rmtree(path / ".git/logs", ignore_errors=True)
    (path / ".git/ORIG_HEAD").unlink(missing_ok=True)
    return base


@pytest.fixture
def sealed(upstream: Upstream, tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "sealed"
    return path, sealed_by_hand(upstream, path)


def kinds(path: Path, base: str, mirror: Path | None = None) -> set[str]:
    report = verify_seal(path, base, mirror)
    assert report.sealed == (not report.leaks)
    return {leak.kind for leak in report.leaks}


def test_exact_store_is_sealed(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """The closure, a tag on an ancestor and a detached HEAD are no leak, with and without the mirror to compare with."""
    path, base = sealed
    report = verify_seal(path, base)
    assert (report.sealed, report.leaks, report.head) == (True, [], base)
    assert report.objects_present == report.objects_in_closure + 1
    assert kinds(path, base, upstream.path / ".git") == set()
    assert kinds(path / ".git", base) == set()


def test_linked_worktree_leaks_the_whole_mirror(upstream: Upstream, tmp_path: Path) -> None:
    base = base_of(upstream)
    upstream.git("worktree", "add", "-q", "--detach", str(tmp_path / "tree"), base)
    assert {"object", "shared-store", "ref"} <= kinds(tmp_path / "tree", base)


def test_shared_clone_leaks_through_alternates(upstream: Upstream, tmp_path: Path) -> None:
    """Removing remote, refs and reflogs of a shared clone leaves every object readable."""
    base = base_of(upstream)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--shared", str(upstream.path), str(clone))
    git(clone, "checkout", "-q", "--detach", base)
    assert {"object", "alternate", "remote", "ref"} <= kinds(clone, base)
    git(clone, "remote", "remove", "origin")
    git(clone, "branch", "-D", "main")
    git(clone, "tag", "-d", "v7")
    git(clone, "reflog", "expire", "--expire=now", "--all")
    git(clone, "gc", "-q", "--prune=now")
    assert {"object", "alternate"} <= kinds(clone, base)


def test_alternates_of_alternates_are_followed(upstream: Upstream, tmp_path: Path) -> None:
    base = base_of(upstream)
    git(tmp_path, "clone", "-q", "--shared", str(upstream.path), "one")
    git(tmp_path, "clone", "-q", "--shared", "one", "two")
    report = verify_seal(tmp_path / "two", base)
    assert len([leak for leak in report.leaks if leak.kind == "alternate"]) == 2


def test_ordinary_clone_leaks_objects_refs_and_remote(upstream: Upstream, tmp_path: Path) -> None:
    base = base_of(upstream)
    git(tmp_path, "clone", "-q", upstream.url, "clone")
    git(tmp_path / "clone", "checkout", "-q", base)
    assert {"object", "remote", "ref", "reflog"} <= kinds(tmp_path / "clone", base)


def test_stripped_refs_leave_unreachable_objects(upstream: Upstream, tmp_path: Path) -> None:
    """Deleting the names of later commits does not delete the commits."""
    base = base_of(upstream)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--no-local", upstream.url, str(clone))
    git(clone, "checkout", "-q", "--detach", base)
    git(clone, "remote", "remove", "origin")
    git(clone, "branch", "-D", "main")
    git(clone, "tag", "-d", "v7")
    shutil.rmtree(clone / ".git/logs")
    (clone / ".git/packed-refs").unlink()
    assert kinds(clone, base) == {"object"}


def test_bare_clone_is_judged(upstream: Upstream, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--mirror", upstream.url, "bare.git")
    assert {"object", "ref", "head", "remote"} <= kinds(tmp_path / "bare.git", base_of(upstream))


def test_shallow_clone_is_incomplete(upstream: Upstream, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", upstream.url, "shallow")
    assert {"shallow", "incomplete"} <= kinds(tmp_path / "shallow", upstream.git("rev-parse", "HEAD"))


def test_later_tag_is_a_leak(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """A tag of a later commit leaks its name even where the commit is absent."""
    path, base = sealed
    with (path / ".git/packed-refs").open("a") as file:
        file.write(f"{upstream.git('rev-parse', 'v7')} refs/tags/v7\n")
    assert kinds(path, base) == {"ref"}


def test_own_commits_are_outside_the_closure(sealed: tuple[Path, str]) -> None:
    """What an agent commits is judged too: the seal is as of now."""
    path, base = sealed
    (path / "new.txt").write_text("new\n")
    git(path, "add", "new.txt")
    git(path, "commit", "-q", "-m", "mine")
    assert {"object", "head", "reflog"} <= kinds(path, base)


def test_stash_is_a_leak(sealed: tuple[Path, str]) -> None:
    path, base = sealed
    (path / "README").write_text("changed\n")
    git(path, "stash", "-q")
    assert {"object", "stash", "reflog"} <= kinds(path, base)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("FETCH_HEAD", "pseudo-ref"),
        ("ORIG_HEAD", "pseudo-ref"),
        ("MERGE_HEAD", "pseudo-ref"),
        ("rebase-merge/onto", "pseudo-ref"),
        ("packed-refs.bak", "pseudo-ref"),
        ("refs/replace/" + "1" * 40, "replace-ref"),
        ("refs/heads/later", "ref"),
        ("logs/HEAD", "reflog"),
        ("info/grafts", "graft"),
        ("shallow", "shallow"),
    ],
)
def test_every_place_that_names_a_later_commit_is_found(
    sealed: tuple[Path, str], upstream: Upstream, file: str, kind: str
) -> None:
    path, base = sealed
    target = path / ".git" / file
    target.parent.mkdir(parents=True, exist_ok=True)
    later = upstream.git("rev-parse", "HEAD")
    target.write_text(f"{later} {later} someone\n" if kind == "reflog" else f"{later}\n")
    assert kind in kinds(path, base)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ('[remote "o"]\n\turl = https://example.com/x\n', "remote"),
        ('[url "file:///srv/"]\n\tinsteadOf = x:\n', "remote"),
        ("[include]\n\tpath = /etc/passwd\n", "include"),
        ('[includeIf "gitdir:/"]\n\tpath = x\n', "include"),
        ("[extensions]\n\tpartialClone = o\n", "partial-clone"),
        ("[broken\n", "unreadable"),
    ],
)
def test_configuration_that_leads_outside_is_found(sealed: tuple[Path, str], config: str, kind: str) -> None:
    path, base = sealed
    with (path / ".git/config").open("a") as file:
        file.write(config)
    assert kinds(path, base) == {kind}


def test_bundles_and_packs_outside_the_store_are_found(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """Neither a bundle nor a pack without an index is seen by git, but both hold the answer."""
    path, base = sealed
    upstream.git("bundle", "create", "-q", str(path / ".git/info/x"), "HEAD")
    objects = upstream.git("rev-list", "--objects", "HEAD").encode()
    name = upstream.git("pack-objects", "-q", f"{path}/.git/objects/pack/pack", stdin=objects)
    (path / f".git/objects/pack/pack-{name}.idx").unlink()
    stray = [leak.detail for leak in verify_seal(path, base).leaks if leak.kind == "stray-file"]
    assert len(stray) == 2


def test_submodule_store_is_found(sealed: tuple[Path, str], upstream: Upstream, tmp_path: Path) -> None:
    path, base = sealed
    git(tmp_path, "clone", "-q", "--bare", upstream.url, str(path / ".git/modules/lib"))
    assert "submodule" in kinds(path, base)


def test_object_under_a_false_name_is_found(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """A loose file with an allowed name and a later blob's bytes does not pass."""
    path, base = sealed
    allowed = upstream.git("rev-parse", f"{base}:README")
    later = upstream.git("rev-parse", "HEAD:README")
    target = path / ".git/objects" / allowed[:2] / allowed[2:]
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(upstream.path / ".git/objects" / later[:2] / later[2:], target)
    assert kinds(path, base) == {"damaged"}


def test_index_that_lies_about_its_pack_is_found(sealed: tuple[Path, str]) -> None:
    path, base = sealed
    index = next((path / ".git/objects/pack").glob("*.idx"))
    index.chmod(0o644)
    data = bytearray(index.read_bytes())
    data[8 + 1024 + 30] ^= 1
    index.write_bytes(data)
    assert "damaged" in kinds(path, base)


def test_missing_object_makes_the_closure_incomplete(sealed: tuple[Path, str], upstream: Upstream) -> None:
    path, base = sealed
    git_dir = path / ".git"
    for pack in (git_dir / "objects/pack").iterdir():
        pack.unlink()
    keep = upstream.git("rev-list", "--objects", base).splitlines()[:-1]
    upstream.git("pack-objects", "-q", f"{git_dir}/objects/pack/pack", stdin="\n".join(keep).encode())
    (git_dir / "refs/tags/v2").unlink()
    assert kinds(path, base) == {"incomplete"}
    assert kinds(path, base, upstream.path / ".git") == {"incomplete"}


def test_absent_base_is_incomplete(sealed: tuple[Path, str], upstream: Upstream) -> None:
    path, _ = sealed
    assert {"incomplete", "head", "object"} <= kinds(path, upstream.git("rev-parse", "HEAD"))


def test_squashed_store_is_sealed_with_the_mirror(upstream: Upstream, tmp_path: Path) -> None:
    """One commit without parents on the base's tree is the squashed history of that base."""
    base = base_of(upstream)
    path = tmp_path / "squashed"
    git(tmp_path, "init", "-q", str(path))
    commit = upstream.git("commit-tree", "-m", "base", f"{base}^{{tree}}")
    upstream.git("pack-objects", "-q", "--revs", f"{path}/.git/objects/pack/pack", stdin=f"{commit}\n".encode())
    (path / ".git/HEAD").write_text(f"{commit}\n")
    assert kinds(path, base, upstream.path / ".git") == set()
    assert kinds(path, commit) == set()
    report = verify_seal(path, base)
    assert "incomplete" in {leak.kind for leak in report.leaks}
    assert "--mirror" in next(leak.detail for leak in report.leaks if leak.kind == "head")


def test_hostile_repository_runs_nothing_and_holds_nobody(sealed: tuple[Path, str], tmp_path: Path) -> None:
    """Hooks, fsmonitor, filters, aliases, pagers, a FIFO for HEAD: nothing runs, nothing hangs."""
    path, base = sealed
    mark = tmp_path / "ran"
    with (path / ".git/config").open("a") as file:
        file.write(
            f"[core]\n\tfsmonitor = touch {mark}\n\thooksPath = {path}/hooks\n\tpager = touch {mark}\n"
            f"\talternateRefsCommand = touch {mark}\n"
            f"[alias]\n\tcat-file = !touch {mark}\n\tconfig = !touch {mark}\n[uploadpack]\n\tpackObjectsHook = touch {mark}\n"
        )
    (path / ".git/HEAD").unlink()
    os.mkfifo(path / ".git/HEAD")
    os.mkfifo(path / ".git/FETCH_HEAD")
    os.mkfifo(path / ".git/objects/pack/pack-0.idx")
    assert kinds(path, base) == {"head", "stray-file"}
    assert not mark.exists()


def test_git_file_is_followed(sealed: tuple[Path, str], tmp_path: Path) -> None:
    path, base = sealed
    (path / ".git").rename(tmp_path / "elsewhere")
    (path / ".git").write_text(f"gitdir: {tmp_path}/elsewhere\n")
    assert kinds(path, base) == set()


def test_what_is_no_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PathNotFoundError):
        verify_seal(tmp_path, "1" * 40)
    with pytest.raises(InvalidCommitError):
        verify_seal(tmp_path, "main")


def test_a_commit_graph_names_the_closure_only(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """One of the closure is no leak, single or in a chain; one with later commits is, and so is one that cannot be read."""
    path, base = sealed
    git(path, "commit-graph", "write", "--stdin-commits", stdin=f"{base}\n".encode())
    assert kinds(path, base) == set()
    graph = path / ".git/objects/info/commit-graph"
    graph.unlink()
    git(path, "commit-graph", "write", "--stdin-commits", "--split", stdin=f"{base}\n".encode())
    assert kinds(path, base) == set()
    upstream.git("commit-graph", "write", "--reachable")
    shutil.copyfile(upstream.path / ".git/objects/info/commit-graph", graph)
    assert kinds(path, base) == {"commit-graph"}
    graph.write_bytes(graph.read_bytes()[:-1])
    assert kinds(path, base) == {"commit-graph"}
