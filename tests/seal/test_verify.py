"""verify_seal against every published leak of later history, and against hostile repositories."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import ENV, Upstream, git

from mirrord.errors import InvalidCommitError, PathNotFoundError
from mirrord.seal.verify import verify_seal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    """An upstream and a sealed store made of it, which each test copies."""
    upstream = Upstream(tmp_path_factory.mktemp("grown") / "upstream")
    for number, commit in enumerate(upstream.history(10)):
        if number in {2, 7}:
            upstream.git("tag", "-a", "-m", f"release {number}", f"v{number}", commit)
    sealed_by_hand(upstream, upstream.path.parent / "sealed")
    return upstream


@pytest.fixture
def upstream(grown: Upstream, tmp_path: Path) -> Upstream:
    """Ten commits; an annotated tag on the third, one on the eighth."""
    return grown.copy(tmp_path / "upstream")


def base_of(upstream: Upstream) -> str:
    return upstream.git("rev-parse", "HEAD~5")


def sealed_by_hand(upstream: Upstream, path: Path) -> str:
    """A store with the closure of the base commit and its tag."""
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
def sealed(grown: Upstream, tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "sealed"
    shutil.copytree(grown.path.parent / "sealed", path)
    return path, base_of(grown)


def kinds(path: Path, base: str, mirror: Path | None = None) -> set[str]:
    report = verify_seal(path, base, mirror)
    assert report.sealed == (not report.leaks)
    return {leak.kind for leak in report.leaks}


def test_exact_store_is_sealed(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """With the closure, a tag on an ancestor and a detached HEAD; with and without the mirror."""
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
    """Removing the names of later commits does not remove the commits."""
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
    assert {"shallow", "incomplete"} <= kinds(
        tmp_path / "shallow", upstream.git("rev-parse", "HEAD")
    )


def test_later_tag_is_a_leak(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """Its name leaks even if the commit is absent."""
    path, base = sealed
    with (path / ".git/packed-refs").open("a") as file:
        file.write(f"{upstream.git('rev-parse', 'v7')} refs/tags/v7\n")
    assert kinds(path, base) == {"ref"}


def test_own_commits_are_outside_the_closure(sealed: tuple[Path, str]) -> None:
    """An agent's commits are judged too."""
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
def test_configuration_that_leads_outside_is_found(
    sealed: tuple[Path, str], config: str, kind: str
) -> None:
    path, base = sealed
    with (path / ".git/config").open("a") as file:
        file.write(config)
    assert kinds(path, base) == {kind}


def test_bundles_and_packs_outside_the_store_are_found(
    sealed: tuple[Path, str], upstream: Upstream
) -> None:
    """git sees neither a bundle nor a pack without an index, but both have the solution."""
    path, base = sealed
    upstream.git("bundle", "create", "-q", str(path / ".git/info/x"), "HEAD")
    objects = upstream.git("rev-list", "--objects", "HEAD").encode()
    name = upstream.git("pack-objects", "-q", f"{path}/.git/objects/pack/pack", stdin=objects)
    (path / f".git/objects/pack/pack-{name}.idx").unlink()
    stray = [leak.detail for leak in verify_seal(path, base).leaks if leak.kind == "stray-file"]
    assert len(stray) == 2


def bundle_at(place: str) -> Callable[[Path, Upstream], None]:
    def hide(git_dir: Path, upstream: Upstream) -> None:
        (git_dir / place).parent.mkdir(parents=True, exist_ok=True)
        upstream.git("bundle", "create", "-q", str(git_dir / place), "HEAD")

    return hide


def text_at(place: str, text: str) -> Callable[[Path, Upstream], None]:
    def hide(git_dir: Path, _: Upstream) -> None:
        (git_dir / place).parent.mkdir(parents=True, exist_ok=True)
        with (git_dir / place).open("a") as file:
            file.write(text)

    return hide


def pack_of(git_dir: Path) -> Path:
    return next((git_dir / "objects/pack").glob("*.pack"))


def later_pack(git_dir: Path, upstream: Upstream) -> Path:
    """A pack with all of upstream's history and its index, in a directory of their own."""
    objects = upstream.git("rev-list", "--objects", "HEAD").encode()
    (git_dir.parent / "../later").mkdir()
    name = upstream.git("pack-objects", "-q", f"{git_dir.parent.parent}/later/pack", stdin=objects)
    return git_dir.parent.parent / f"later/pack-{name}.pack"


def hide_pack_as_bitmap(git_dir: Path, upstream: Upstream) -> None:
    shutil.copyfile(later_pack(git_dir, upstream), pack_of(git_dir).with_suffix(".bitmap"))


def hide_bundle_as_keep(git_dir: Path, upstream: Upstream) -> None:
    bundle_at(f"objects/pack/{pack_of(git_dir).stem}.keep")(git_dir, upstream)


def leave_promisor(git_dir: Path, upstream: Upstream) -> None:
    pack_of(git_dir).with_suffix(".promisor").write_text(
        upstream.git("rev-parse", "HEAD") + " refs/heads/main\n"
    )


def leave_later_index(git_dir: Path, upstream: Upstream) -> None:
    index = later_pack(git_dir, upstream).with_suffix(".idx")
    shutil.copyfile(index, git_dir / "objects/pack" / index.name)


def write_multi_pack_index(git_dir: Path, upstream: Upstream) -> None:
    pack = later_pack(git_dir, upstream)
    copies = [
        shutil.copy(file, git_dir / "objects/pack") for file in (pack, pack.with_suffix(".idx"))
    ]
    git(git_dir, "multi-pack-index", "write")
    for copy in copies:
        Path(copy).unlink()


def peel_to_later(git_dir: Path, upstream: Upstream) -> None:
    tag = git(git_dir, "rev-parse", "refs/tags/v2")
    (git_dir / "refs/tags/v2").unlink()
    (git_dir / "packed-refs").write_text(
        f"# pack-refs with: peeled fully-peeled sorted \n{tag} refs/tags/v2\n^{upstream.git('rev-parse', 'HEAD')}\n"
    )


def grow_packed_refs(git_dir: Path, upstream: Upstream) -> None:
    with (git_dir / "packed-refs").open("w") as file:
        file.write(f"{upstream.git('rev-parse', 'HEAD')} refs/heads/later\n")
        file.truncate(300 * 1024**2)


def index_later_blob(git_dir: Path, upstream: Upstream) -> None:
    blob = upstream.git("rev-parse", "HEAD:README")
    git(git_dir.parent, "update-index", "--add", "--cacheinfo", f"100644,{blob},later")


def index_extension(git_dir: Path, _: Upstream) -> None:
    """An optional extension, which git ignores."""
    data = (git_dir / "index").read_bytes()[:-20]
    data += b"ZZZZ" + (4).to_bytes(4, "big") + b"gold"
    (git_dir / "index").write_bytes(data + hashlib.sha1(data).digest())


def trail_loose_object(git_dir: Path, _: Upstream) -> None:
    oid = git(git_dir, "rev-parse", "HEAD^{tree}")
    git(git_dir, "cat-file", "tree", oid)
    header = b"tree %d\0" % int(git(git_dir, "cat-file", "-s", oid))
    raw = subprocess.run(
        ["git", "cat-file", "tree", oid], cwd=git_dir, env=ENV, capture_output=True, check=True
    ).stdout
    file = git_dir / "objects" / oid[:2] / oid[2:]
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(zlib.compress(header + raw) + b"the answer")


def reverse_index(git_dir: Path, _: Upstream) -> None:
    """One with foreign bytes and a correct checksum."""
    git(git_dir, "-c", "pack.writeReverseIndex=true", "index-pack", str(pack_of(git_dir)))
    file = pack_of(git_dir).with_suffix(".rev")
    file.chmod(0o644)
    data = bytearray(file.read_bytes()[:-20])
    data[12:20] = b"the gold"
    file.write_bytes(bytes(data) + hashlib.sha1(data).digest())


def nest_clone(git_dir: Path, upstream: Upstream) -> None:
    git(git_dir.parent, "clone", "-q", upstream.url, "deep/er/clone")


def nest_bare(git_dir: Path, upstream: Upstream) -> None:
    git(git_dir.parent, "clone", "-q", "--bare", upstream.url, "vendor.git")


def link_directory(place: str) -> Callable[[Path, Upstream], None]:
    def hide(git_dir: Path, upstream: Upstream) -> None:
        shutil.rmtree(git_dir / place, ignore_errors=True)
        (git_dir / place).symlink_to(upstream.path)

    return hide


@pytest.mark.parametrize(
    ("hide", "kind"),
    [
        pytest.param(bundle_at("objects/info/x.bundle"), "stray-file", id="bundle in objects/info"),
        pytest.param(
            bundle_at("objects/pack/multi-pack-index.x"), "stray-file", id="bundle beside the packs"
        ),
        pytest.param(hide_bundle_as_keep, "stray-file", id="bundle as .keep"),
        pytest.param(hide_pack_as_bitmap, "stray-file", id="pack as .bitmap"),
        pytest.param(
            write_multi_pack_index, "stray-file", id="multi-pack-index names later objects"
        ),
        pytest.param(leave_later_index, "stray-file", id="index without its pack"),
        pytest.param(leave_promisor, "stray-file", id=".promisor"),
        pytest.param(reverse_index, "damaged", id="bytes in a reverse index"),
        pytest.param(peel_to_later, "ref", id="peeled line"),
        pytest.param(grow_packed_refs, "unreadable", id="packed-refs of 300 MiB"),
        pytest.param(index_later_blob, "index", id="index names a later blob"),
        pytest.param(index_extension, "index", id="index has an extension"),
        pytest.param(text_at("rr-cache/1/postimage", "the fix\n"), "stray-file", id="rr-cache"),
        pytest.param(text_at("lost-found/other/1", "the fix\n"), "stray-file", id="lost-found"),
        pytest.param(text_at("rebase-apply/patch", "+ the fix\n"), "stray-file", id="rebase-apply"),
        pytest.param(text_at("x.patch", "+ the fix\n"), "stray-file", id="patch"),
        pytest.param(text_at("COMMIT_EDITMSG", "the fix\n"), "stray-file", id="COMMIT_EDITMSG"),
        pytest.param(text_at("hooks/post-checkout", "# the fix\n"), "stray-file", id="hook"),
        pytest.param(
            text_at("hooks/pre-commit.sample", "# the fix\n"), "stray-file", id="sample of a hook"
        ),
        pytest.param(text_at("info/exclude", "# the fix\n"), "stray-file", id="exclude"),
        pytest.param(
            text_at("logs/HEAD", "the fix\n"), "reflog", id="reflog with a line of its own"
        ),
        pytest.param(text_at("config", "# the fix\n"), "configuration", id="comment in config"),
        pytest.param(
            text_at("config", '[branch "x"]\n\tremote = /x\n'),
            "configuration",
            id="branch.x.remote",
        ),
        pytest.param(
            text_at("config", '[submodule "x"]\n\turl = /x\n'), "submodule", id="submodule.x.url"
        ),
        pytest.param(text_at("config", "[alias]\n\tst = fetch /x\n"), "configuration", id="alias"),
        pytest.param(
            text_at("config", "[core]\n\tworktree = /\n"), "configuration", id="core.worktree"
        ),
        pytest.param(
            text_at("config", "[fetch]\n\tbundleURI = /x\n"), "configuration", id="fetch.bundleURI"
        ),
        pytest.param(trail_loose_object, "damaged", id="bytes behind a loose object"),
        pytest.param(nest_clone, "nested-repository", id="clone in the working tree"),
        pytest.param(nest_bare, "nested-repository", id="bare clone in the working tree"),
        pytest.param(bundle_at("../x"), "stray-file", id="bundle in the working tree"),
        pytest.param(link_directory("refs/tags"), "stray-file", id="refs/tags is a link"),
        pytest.param(link_directory("logs"), "stray-file", id="logs is a link"),
        pytest.param(link_directory("info"), "stray-file", id="info is a link"),
    ],
)
def test_only_listed_files_in_their_exact_form_are_allowed(
    sealed: tuple[Path, str], upstream: Upstream, hide: Callable[[Path, Upstream], None], kind: str
) -> None:
    path, base = sealed
    hide(path / ".git", upstream)
    assert kind in kinds(path, base)


def test_the_work_of_git_breaks_no_seal(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """Its configuration, reflogs, indexes of every version, packed refs and reverse indexes have the exact form."""
    path, base = sealed
    git(path, "config", "user.name", "somebody")
    git(path, "checkout", "-q", "-b", "mine")
    git(path, "checkout", "-q", "--detach", base)
    git(path, "pack-refs", "--all")
    git(path, "-c", "pack.writeReverseIndex=true", "index-pack", str(pack_of(path / ".git")))
    git(path, "update-server-info")
    shutil.rmtree(path / ".git/info/refs", ignore_errors=True)
    (path / ".git/info/refs").unlink()
    for version in ("2", "3", "4"):
        git(path, "update-index", "--index-version", version)
        assert kinds(path, base) == set(), version


def test_submodule_of_the_commit_is_no_leak_and_another_is(
    upstream: Upstream, tmp_path: Path
) -> None:
    inner = upstream.git("rev-parse", "HEAD")
    upstream.git("update-index", "--add", "--cacheinfo", f"160000,{inner},lib")
    upstream.git("commit", "-q", "-m", "with a submodule")
    for _ in range(5):
        upstream.commit({"more": os.urandom(4).hex()})
    path = tmp_path / "sealed"
    base = sealed_by_hand(upstream, path)
    assert kinds(path, base) == set()
    git(path, "update-index", "--cacheinfo", f"160000,{upstream.git('rev-parse', 'HEAD')},lib")
    assert kinds(path, base) == {"index"}


def test_the_message_of_a_squashed_commit_is_checked(upstream: Upstream, tmp_path: Path) -> None:
    base = base_of(upstream)
    path = tmp_path / "squashed"
    git(tmp_path, "init", "-q", str(path))
    commit = upstream.git(
        "commit-tree", "-m", "base", "-m", "+the fix\n+in two lines", f"{base}^{{tree}}"
    )
    upstream.git(
        "pack-objects",
        "-q",
        "--revs",
        f"{path}/.git/objects/pack/pack",
        stdin=f"{commit}\n".encode(),
    )
    (path / ".git/HEAD").write_text(f"{commit}\n")
    assert "head" in kinds(path, base, upstream.path / ".git")


def test_trees_deeper_than_recursion_are_walked(sealed: tuple[Path, str]) -> None:
    """Deeper than Python recurses, and than PATH_MAX."""
    path, base = sealed
    here = os.open(path, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("ddd", dir_fd=here)
        below = os.open("ddd", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert kinds(path, base) == {"unreadable"}
    subprocess.run(["rm", "-rf", str(path / "ddd")], check=True)


def test_submodule_store_is_found(
    sealed: tuple[Path, str], upstream: Upstream, tmp_path: Path
) -> None:
    path, base = sealed
    git(tmp_path, "clone", "-q", "--bare", upstream.url, str(path / ".git/modules/lib"))
    assert "submodule" in kinds(path, base)


def test_object_under_a_false_name_is_found(sealed: tuple[Path, str], upstream: Upstream) -> None:
    """A loose file with an allowed name and a later blob's bytes."""
    path, base = sealed
    allowed = upstream.git("rev-parse", f"{base}:README")
    later = upstream.git("rev-parse", "HEAD:README")
    target = path / ".git/objects" / allowed[:2] / allowed[2:]
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(upstream.path / ".git/objects" / later[:2] / later[2:], target)
    assert kinds(path, base) == {"damaged"}


def test_index_that_differs_from_its_pack_is_found(sealed: tuple[Path, str]) -> None:
    path, base = sealed
    index = next((path / ".git/objects/pack").glob("*.idx"))
    index.chmod(0o644)
    data = bytearray(index.read_bytes())
    data[8 + 1024 + 30] ^= 1
    index.write_bytes(data)
    assert "damaged" in kinds(path, base)


def test_missing_object_makes_the_closure_incomplete(
    sealed: tuple[Path, str], upstream: Upstream
) -> None:
    path, base = sealed
    git_dir = path / ".git"
    for pack in (git_dir / "objects/pack").iterdir():
        pack.unlink()
    keep = upstream.git("rev-list", "--objects", base).splitlines()[:-1]
    upstream.git(
        "pack-objects", "-q", f"{git_dir}/objects/pack/pack", stdin="\n".join(keep).encode()
    )
    (git_dir / "refs/tags/v2").unlink()
    assert kinds(path, base) == {"incomplete"}
    assert kinds(path, base, upstream.path / ".git") == {"incomplete"}


def test_absent_base_is_incomplete(sealed: tuple[Path, str], upstream: Upstream) -> None:
    path, _ = sealed
    assert {"incomplete", "head", "object"} <= kinds(path, upstream.git("rev-parse", "HEAD"))


def test_squashed_store_is_sealed_with_the_mirror(upstream: Upstream, tmp_path: Path) -> None:
    """One commit without parents, with the base's tree, is the squashed history of that base."""
    base = base_of(upstream)
    path = tmp_path / "squashed"
    git(tmp_path, "init", "-q", str(path))
    commit = upstream.git("commit-tree", "-m", "base", f"{base}^{{tree}}")
    upstream.git(
        "pack-objects",
        "-q",
        "--revs",
        f"{path}/.git/objects/pack/pack",
        stdin=f"{commit}\n".encode(),
    )
    (path / ".git/HEAD").write_text(f"{commit}\n")
    assert kinds(path, base, upstream.path / ".git") == set()
    assert kinds(path, commit) == set()
    report = verify_seal(path, base)
    assert "incomplete" in {leak.kind for leak in report.leaks}
    assert "--mirror" in next(leak.detail for leak in report.leaks if leak.kind == "head")


def test_hostile_repository_runs_nothing_and_does_not_block(
    sealed: tuple[Path, str], tmp_path: Path
) -> None:
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
    assert kinds(path, base) == {"configuration", "head", "stray-file"}
    assert not mark.exists()


def test_git_file_is_followed(sealed: tuple[Path, str], tmp_path: Path) -> None:
    path, base = sealed
    (path / ".git").rename(tmp_path / "elsewhere")
    (path / ".git").write_text(f"gitdir: {tmp_path}/elsewhere\n")
    assert kinds(path, base) == set()


def test_a_path_without_a_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PathNotFoundError):
        verify_seal(tmp_path, "1" * 40)
    with pytest.raises(InvalidCommitError):
        verify_seal(tmp_path, "main")


def test_a_commit_graph_may_name_only_the_closure(
    sealed: tuple[Path, str], upstream: Upstream
) -> None:
    """Single or in a chain; an unreadable one is a leak."""
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
