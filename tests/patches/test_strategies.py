"""The engine of `apply`: git's word on random patches, GNU patch's on fuzz, and what a tolerant one takes."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import random_patches
from gitrepos import ENV
from random_patches import EMPTY, REGULAR, SYMLINK, Files, MemoryTree, Oracle

from mirrord.errors import MirrordError
from mirrord.model import ApplyStrategy, FoundStrategy
from mirrord.patches import fit
from mirrord.patches.fit import File
from mirrord.patches.parse import NeedsGitError, parse
from mirrord.patches.splicing import MisfitError, splice, splice_fuzzily
from mirrord.patches.strategies import apply_patch
from mirrord.trees.manifest import blob_id

CASES = int(os.environ.get("PATCH_CASES", "100"))
SEED = int(os.environ.get("PATCH_SEED", "1"))


def ids(files: Files) -> dict[bytes, tuple[int, str]]:
    return {path: (file.mode, blob_id(file.data).hex()) for path, file in files.items()}


@pytest.mark.slow
def test_an_exact_patch_equals_git_apply(tmp_path: Path) -> None:
    """Random edits as patches, spoiled in seventeen ways: taken where git takes them, with its tree."""
    random = Random(SEED)
    oracle = Oracle(tmp_path / "oracle")
    plain = 0
    for case in range(CASES):
        if case % 30 == 0:
            files = random_patches.random_files(random)
            before = oracle.write_tree(files)
        if case % 5 == 0:
            edited = random_patches.edited_files(random, files)
            after = oracle.write_tree(edited)
        name = random.choice([*random_patches.MUTATIONS, "nothing", "nothing"])
        patch = oracle.diff(before, after, *random.choice(random_patches.OPTIONS))
        patch = random_patches.MUTATIONS[name](random, patch).removesuffix(b"\n") + b"\n"
        reverse = random.random() < 0.3
        wanted = oracle.apply(after if reverse else before, patch, reverse=reverse)
        if wanted and (SYMLINK, EMPTY) in wanted.values():  # git's index takes such a link
            wanted = None
        tree = MemoryTree(edited if reverse else files)
        try:
            done = apply_patch(tree, patch, scratch=tmp_path / "scratch", reverse=reverse)
        except MirrordError:
            done = None
        assert (ids(tree.after(done.changes)) if done else None) == wanted, (case, name, patch)
        plain += is_plain(tree, patch, reverse=reverse)
    assert plain > CASES // 8


def is_plain(tree: MemoryTree, patch: bytes, *, reverse: bool) -> bool:
    try:
        fit.fit(tree, parse(patch), reverse=reverse, splice=splice)
    except (NeedsGitError, MisfitError):
        return False
    return True


@pytest.mark.parametrize("options", [("--binary", "--full-index"), ()], ids=["binary", "differ"])
@pytest.mark.parametrize("reverse", [False, True])
def test_binary_files_equal_those_of_git(
    tmp_path: Path, options: tuple[str, ...], reverse: bool
) -> None:
    """New, changed, gone, and with another mode: their headers alone would make empty files. Without their bytes,
    git refuses them.
    """
    oracle, blob = Oracle(tmp_path / "oracle"), bytes(range(256))
    text = File(REGULAR, b"text\n")
    files = {
        b"kept": File(REGULAR, blob),
        b"made": File(REGULAR, blob + b"1"),
        b"run": File(0o100755, blob + b"2"),
    }
    for name in (b"kept", b"made", b"run"):
        before = {b"text": text, **{n: f for n, f in files.items() if n != name}}
        changed = File(0o100755, blob[::-1])
        for after in ({**before, name: files[name]}, {**before, b"text": text, b"kept": changed}):
            trees = oracle.write_tree(before), oracle.write_tree(after)
            patch = oracle.diff(*trees, *options)
            assert b"inary" in patch
            wanted = oracle.apply(trees[1 if reverse else 0], patch, reverse=reverse)
            tree = MemoryTree(after if reverse else before)
            try:
                done = apply_patch(tree, patch, scratch=tmp_path / "scratch", reverse=reverse)
            except MirrordError:
                done = None
            assert (ids(tree.after(done.changes)) if done else None) == wanted
            assert (wanted is None) == (not options)


@pytest.mark.slow
def test_fuzz_equals_gnu_patch(tmp_path: Path) -> None:
    """Where git refuses a patch of one file, patch takes or refuses it as we do, with the same bytes."""
    random = Random(SEED)
    oracle = Oracle(tmp_path / "oracle")
    taken = 0
    for case in range(CASES):
        text = random_patches.random_text(random)
        before = oracle.write_tree({b"f": File(REGULAR, text)})
        after = oracle.write_tree({b"f": File(REGULAR, random_patches.edited_text(random, text))})
        patch = oracle.diff(before, after, random.choice(["-U3", "-U3", "-U1", "-U5"]))
        if b"\n@@ " not in patch:
            continue
        patch = patch[patch.index(b"--- ") :]
        for name in random.choices(["shifted", "context", "context", "nothing"], k=2):
            patch = random_patches.MUTATIONS[name](random, patch)
        if random.random() < 0.4:  # a file that has changed since
            text = random_patches.edited_text(random, text)
        wanted = gnu_patch(tmp_path, text, patch)
        try:
            got = splice_fuzzily(text, parse(patch)[0].hunks)
        except MisfitError:
            got = None
        except NeedsGitError:
            continue
        assert got == wanted, (case, text, patch)
        taken += got is not None
    assert taken > CASES // 5


def gnu_patch(area: Path, text: bytes, patch: bytes) -> bytes | None:
    file = area / "f"
    file.write_bytes(text)
    command = ["patch", "--batch", "--forward", "--fuzz=5", "-p1", "--no-backup-if-mismatch"]
    done = subprocess.run(command, cwd=area, input=patch, env=ENV, capture_output=True, check=False)
    return file.read_bytes() if done.returncode == 0 else None


def tolerantly(files: Files, patch: bytes, scratch: Path) -> tuple[Files, FoundStrategy]:
    tree = MemoryTree(files)
    done = apply_patch(tree, patch, scratch=scratch, strategy=ApplyStrategy.TOLERANT)
    return tree.after(done.changes), done.strategy


def test_a_file_with_crlf_keeps_it(tmp_path: Path) -> None:
    """Under a patch without; one that only adds lines differs from it in blanks alone, as git sees it."""
    files = {b"f": File(REGULAR, b"1\r\n2\r\n3\r\n")}
    head = b"--- a/f\n+++ b/f\n"
    after, strategy = tolerantly(
        files, head + b"@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n", tmp_path / "s"
    )
    assert (after[b"f"].data, strategy) == (b"1\r\ntwo\r\n3\r\n", FoundStrategy.CRLF)
    after, strategy = tolerantly(files, head + b"@@ -1,2 +1,3 @@\n 1\n+x\n 2\n", tmp_path / "s")
    assert (after[b"f"].data, strategy) == (b"1\r\nx\n2\r\n3\r\n", FoundStrategy.BLANKS)


@pytest.mark.slow
def test_a_large_patch_is_left_to_git(tmp_path: Path) -> None:
    """A patch and a file; both as exact as small ones."""
    lines = b"".join(b"%0999d\n" % at for at in range(17_000))
    patch = b"--- a/f\n+++ b/f\n@@ -9,3 +9,3 @@\n %0999d\n-%0999d\n+nine\n %0999d\n" % (8, 9, 10)
    tree = MemoryTree({b"f": File(REGULAR, lines)})
    done = apply_patch(tree, patch, scratch=tmp_path / "s")
    assert done.changes[0].data == lines.replace(b"%0999d\n" % 9, b"nine\n", 1)
    new = (
        b"--- /dev/null\n+++ b/g\n@@ -0,0 +1,17000 @@\n"
        b"+" + lines[:-1].replace(b"\n", b"\n+") + b"\n"
    )
    done = apply_patch(tree, new, scratch=tmp_path / "s")
    assert done.changes[0].data == lines
    assert done.strategy is FoundStrategy.EXACT


@pytest.mark.slow
def test_a_patch_that_swe_bench_takes_gives_its_tree(tmp_path: Path) -> None:
    """Patches spoiled twice, applied by the real commands in a clone: git apply, --3way, --reject, patch."""
    random = Random(SEED)
    oracle = Oracle(tmp_path / "oracle")
    spoilers = ["shifted", "context", "counts", "crlf", "blanks", "prose", "nothing", "no modes"]
    taken = 0
    for case in range(CASES // 3):
        if case % 10 == 0:
            made = random_patches.random_files(random)
            files = {name: made[name] for name in random_patches.NAMES if made[name].data}
            before = oracle.write_tree(files)
        edited = random_patches.edited_files(random, files)
        patch = oracle.diff(before, oracle.write_tree(edited), "--no-renames")
        names = random.choices(spoilers, k=2)
        for name in names:
            patch = random_patches.MUTATIONS[name](random, patch)
        wanted = oracle.apply_as_graders(before, patch)
        tree = MemoryTree(files)
        try:
            strategy = ApplyStrategy.TOLERANT
            done = apply_patch(tree, patch, scratch=tmp_path / "scratch", strategy=strategy)
        except MirrordError:
            done = None
        if wanted is not None:
            assert done is not None, (case, names, patch)
            assert ids(tree.after(done.changes)) == wanted, (case, names, done.strategy, patch)
            taken += done.strategy is not FoundStrategy.EXACT
    assert taken


HOSTILE: dict[str, bytes] = {
    "outside": b"--- a/../f\n+++ b/../f\n@@ -1,3 +1,3 @@\n-a\n+x\n b\n c\n",
    "absolute": b"diff --git a/f b/f\nsimilarity index 100%\nrename from f\nrename to /etc/mirrord-f\n",
    "of git": b"--- /dev/null\n+++ b/.git/hooks/post-checkout\n@@ -0,0 +1,2 @@\n+b\n",
    "a new link": b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n"
    b"--- /dev/null\n+++ b/l/mirrord-f\n@@ -0,0 +1 @@\n+b\n",
    "below a link": b"--- /dev/null\n+++ b/link/f\n@@ -0,0 +1,9 @@\n+b\n",
    "an ed script": b"Index: a/f\n1c\nb\n.\n!touch /tmp/mirrord-ed\n",
    "a fuzzy hunk, then an ed script": b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n x\n-b\n+B\n c\n"
    b"Index: a/g\n1c\nb\n.\n",
    "a NUL": b"--- /dev/null\n+++ b/f\0g\n@@ -0,0 +1 @@\n+b\n",
    "hunks of other lines": b"--- a/f\n+++ b/f\n@@ -0,0 +1,9 @@\n" + b"+b\n" * 9 + b"@@ -900000000,1 +900000000 @@\n-b\n",
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_patch_reaches_no_other_file(tmp_path: Path, what: str) -> None:
    """It is refused, or only its good hunk is taken. Nothing is made outside of the scratch tree, which is gone."""
    tree = MemoryTree({
        b"f": File(REGULAR, b"a\nb\nc\n"), b"g": File(REGULAR, b"a\n"), b"link": File(SYMLINK, b"/tmp")
    })  # fmt: skip
    scratch = tmp_path / "above/scratch"
    scratch.parent.mkdir()
    taken: list[bytes] = []
    with suppress(MirrordError):
        done = apply_patch(tree, HOSTILE[what], scratch=scratch, strategy=ApplyStrategy.TOLERANT)
        taken = [change.path for change in done.changes]
    assert taken == ([b"f"] if "hunk" in what else [])
    assert list(tmp_path.rglob("*")) == [scratch.parent]
    made = ("/etc/mirrord-f", "/tmp/f", "/tmp/mirrord-ed")
    assert not any(map(os.path.lexists, made))
