"""Reading objects: names resolve to one commit or none, damage is an error, diffs are git's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import Upstream, git
from trees import awkward, tree_of

from mirrord.errors import CommitNotFoundError, CorruptObjectError, DamagedMirrorError
from mirrord.git.objects.repository import open_objects, read_commit, resolve
from mirrord.git.objects.trees import TreeChange, changes, walk

Make = Callable[[str], Upstream]


def git_dir(upstream: Upstream) -> Path:
    return upstream.path / ".git"


def test_every_way_to_name_a_commit_resolves(make_upstream: Make) -> None:
    """Full and short ids, branches, light and annotated tags, refs, HEAD, parents."""
    upstream = make_upstream("up")
    first, second, third = upstream.history(3)
    upstream.git("tag", "light", second)
    upstream.git("tag", "-a", "-m", "annotated", "v1.0", second)
    upstream.git("tag", "-a", "-m", "nested", "v1.0-nested", "v1.0")
    upstream.git("branch", "feature/a@b", first)
    cases = {
        third: third,
        third[:10]: third,
        third.upper(): third,
        "main": third,
        "HEAD": third,
        "refs/heads/main": third,
        "light": second,
        "v1.0": second,
        "v1.0-nested": second,
        "refs/tags/v1.0": second,
        "tags/v1.0": second,
        "feature/a@b": first,
        "main~1": second,
        "HEAD^": second,
        "v1.0~1": first,
        "main^1~1": first,
    }
    for text, commit in cases.items():
        assert resolve(git_dir(upstream), text)[:2] == (commit, tree_of(upstream, commit)), text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "1" * 40,
        "HEAD~9",
        "HEAD:README",
        "main..light",
        "@{-1}",
        ":/message",
        "a b",
        "-x",
        "main^{/x}",
        "\0",
        "é",
    ],
)
def test_other_texts_are_not_found(make_upstream: Make, text: str) -> None:
    """Nor what git would search for, or read from a file: only names resolve."""
    upstream = make_upstream("up")
    upstream.history(2)
    with pytest.raises(CommitNotFoundError):
        resolve(git_dir(upstream), text)


def test_an_ambiguous_name_is_refused(make_upstream: Make) -> None:
    """A branch and a tag of one name; a branch named like an abbreviated id."""
    upstream = make_upstream("up")
    first, second = upstream.history(2)
    upstream.git("tag", "both", first)
    upstream.git("branch", "both", second)
    upstream.git("branch", first[:8], second)
    for text in ("both", first[:8]):
        with pytest.raises(CommitNotFoundError, match="two different commits"):
            resolve(git_dir(upstream), text)
    upstream.git("branch", first, second)
    assert resolve(git_dir(upstream), first)[0] == first


@pytest.mark.parametrize("kind", [(), ("-a", "-m", "x")])
@pytest.mark.parametrize("target", ["HEAD^{tree}", "HEAD:README"])
def test_a_tag_of_no_commit_is_not_found(
    make_upstream: Make, kind: tuple[str, ...], target: str
) -> None:
    """By its name and by its own id; an annotated tag of a blob is no damage either."""
    upstream = make_upstream("up")
    upstream.history(1)
    upstream.git("tag", *kind, "other", target)
    for name in ("other", upstream.git("rev-parse", "other")):
        with pytest.raises(CommitNotFoundError):
            resolve(git_dir(upstream), name)


@pytest.mark.parametrize("name", ["odd", "refs/heads/odd", "v1", "refs/tags/v1"])
def test_a_commit_that_libgit2_does_not_parse_has_its_names(make_upstream: Make, name: str) -> None:
    upstream = make_upstream("up")
    [commit] = upstream.history(1)
    text = upstream.git("cat-file", "-p", commit).replace("<author@example.com>", "")
    words = ("hash-object", "-t", "commit", "-w", "--stdin", "--literally")
    odd = upstream.git(*words, stdin=f"{text}\n".encode())
    upstream.git("update-ref", "refs/heads/odd", odd)
    upstream.git("update-ref", "refs/tags/v1", odd)
    assert resolve(git_dir(upstream), name).commit == odd


def test_commits_are_as_in_git(make_upstream: Make) -> None:
    upstream = make_upstream("up")
    first, second, _ = upstream.history(3)
    with open_objects(git_dir(upstream)) as objects:
        info = read_commit(objects, second)
    assert (info.tree, info.parents) == (tree_of(upstream, second), (first,))
    assert info.time == int(upstream.git("log", "-1", "--format=%ct", second))
    assert resolve(git_dir(upstream), second)[1:3] == (info.tree, info.time)


def test_tree_entries_are_as_in_git(make_upstream: Make) -> None:
    """All kinds of entries, names as bytes, a directory before its content."""
    upstream = make_upstream("up")
    commit = awkward(upstream)[0]
    lines = upstream.git("ls-tree", "-rt", "-z", commit).split("\0")[:-1]
    expected = [
        (os.fsencode(line.split("\t", 1)[1]), line.split()[0], line.split()[2]) for line in lines
    ]
    with open_objects(git_dir(upstream)) as objects:
        found = list(walk(objects, tree_of(upstream, commit)))
    assert [(entry.path, f"{entry.mode:06o}", entry.oid) for entry in found] == expected


def test_tree_changes_are_as_in_git(make_upstream: Make) -> None:
    """In both directions; a removed directory covers its content."""
    upstream = make_upstream("up")
    a, b = awkward(upstream)

    def changed(old: str, new: str) -> list[TreeChange]:
        with open_objects(git_dir(upstream)) as objects:
            return list(changes(objects, tree_of(upstream, old), tree_of(upstream, new)))

    for old, new in ((a, b), (b, a)):
        expected = set(
            upstream.git("diff-tree", "-r", "-z", "--name-only", old, new).split("\0")[:-1]
        )
        found = changed(old, new)
        leaves = {
            c.path for c in found if (c.old and not c.old.is_tree) or (c.new and not c.new.is_tree)
        }
        assert leaves == {os.fsencode(path) for path in expected}
    gone = {change.path: change for change in changed(a, b)}
    assert not gone[b"gone"].inherited
    assert gone[b"gone/a"].inherited


@pytest.mark.parametrize("how", ["missing", "altered", "wrong kind"])
def test_damage_is_an_error_that_names_the_object(make_upstream: Make, how: str) -> None:
    """A blob with replaced bytes is refused, although it inflates."""
    upstream = make_upstream("up")
    upstream.commit({"a": "content a\n", "b": "content b\n"})
    a, b = (upstream.git("rev-parse", f"HEAD:{name}") for name in "ab")
    loose = {oid: git_dir(upstream) / "objects" / oid[:2] / oid[2:] for oid in (a, b)}
    loose[a].chmod(0o644)
    if how == "missing":
        loose[a].unlink()
    elif how == "altered":
        shutil.copy(loose[b], loose[a])
    else:
        a = upstream.git("rev-parse", "HEAD^{tree}")
    with open_objects(git_dir(upstream)) as objects, pytest.raises(CorruptObjectError, match=a):
        objects.read_blob(a)


def test_a_replaced_repository_is_opened_again(make_upstream: Make, tmp_path: Path) -> None:
    """A mirror that was removed and added again at the same path."""
    upstream = make_upstream("up")
    mirror = tmp_path / "mirror"
    commits: list[str] = []
    for _ in range(2):
        commits.append(upstream.commit({"a": str(len(commits))}))
        git(tmp_path, "clone", "-q", "--bare", str(upstream.path), "new")
        shutil.rmtree(mirror, ignore_errors=True)
        (tmp_path / "new").rename(mirror)
        assert resolve(mirror, "HEAD")[0] == commits[-1]


def test_objects_that_arrive_later_are_seen(make_upstream: Make, tmp_path: Path) -> None:
    """An open repository finds what a fetch adds and a repack moves."""
    upstream = make_upstream("up")
    upstream.history(2)
    git(tmp_path, "clone", "-q", "--mirror", str(upstream.path), "mirror")
    mirror = tmp_path / "mirror"
    resolve(mirror, "HEAD")
    new = upstream.commit({"new": "new"})
    git(mirror, "fetch", "-q")
    assert resolve(mirror, "HEAD")[0] == new
    git(mirror, "repack", "-adq")
    assert resolve(mirror, new).tree == git(mirror, "rev-parse", f"{new}^{{tree}}")


def test_a_path_without_a_repository_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(DamagedMirrorError):
            resolve(path, "HEAD")


def test_objects_are_read_without_certificates() -> None:
    """pygit2 needs them on import; the environment of git children does not change."""
    script = (
        "import os; before = dict(os.environ); import mirrord.git.objects.repository;"
        " assert dict(os.environ) == before"
    )
    nowhere = {"SSL_CERT_FILE": "/nonexistent", "SSL_CERT_DIR": "/nonexistent"}
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **nowhere}, check=True)
