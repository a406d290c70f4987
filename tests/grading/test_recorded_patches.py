"""Patches as data sets and models record them: every kind is graded, applied and rehearsed, and says how."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from daemons import daemon
from gitrepos import ENV, Upstream

from mirrord import Client, FoundStrategy, InvalidPatchError, PatchConflictError, View
from mirrord.cli.main import run

pytestmark = pytest.mark.root

BASE = {
    "t.py": "one\ntwo\nthree\nfour\n\n\n",
    "code.py": "def f():\n    if  x:\n        return 1\n    return 2\n",
    "dos.txt": "a\r\nb\r\nc\r\n",
    "ragged": "no newline\nat the end",
    "run.sh": "#!/bin/sh\nexit 1\n",
    "späße/tab\tname.py": "a\nb\nc\n",
    "old name.py": "".join(f"line {n}\n" for n in range(20)),
    "picture": bytes(range(256)).decode("latin-1"),
}


def _edit(*edits: tuple[str, str, str]) -> Callable[[Path], None]:
    def change(tree: Path) -> None:
        for name, old, new in edits:
            text = (tree / name).read_bytes()
            assert old.encode() in text
            (tree / name).write_bytes(text.replace(old.encode(), new.encode(), 1))

    return change


def _move(tree: Path) -> None:
    (tree / "old name.py").rename(tree / "new name.py")
    _edit(("new name.py", "line 9\n", "line nine\n"))(tree)


def _modes(tree: Path) -> None:
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("t.py")
    (tree / "empty").write_bytes(b"")
    (tree / "code.py").unlink()


@dataclass(frozen=True)
class Kind:
    """An edit of the base, what becomes of its patch, and the strategy that takes it."""

    edit: Callable[[Path], None]
    spoil: Callable[[bytes], bytes]
    strategy: FoundStrategy


PLAIN = _edit(("t.py", "three\n", "three\nand a half\n"))
INDENTED = _edit(("code.py", "return 1", "return 3"))
KINDS = {
    "as git writes it": Kind(PLAIN, lambda patch: patch, FoundStrategy.EXACT),
    "without its last newline": Kind(PLAIN, lambda patch: patch[:-1], FoundStrategy.EXACT),
    "blank lines cut off its end": Kind(PLAIN, bytes.rstrip, FoundStrategy.COUNTS),
    "counts that are off": Kind(
        PLAIN, lambda patch: re.sub(rb"\+(\d),\d", rb"+\1,9", patch), FoundStrategy.COUNTS
    ),
    "blanks of empty lines cut off": Kind(
        PLAIN, lambda patch: re.sub(rb"(?m)^ $", b"", patch), FoundStrategy.EXACT
    ),
    "other blanks at line ends": Kind(
        INDENTED, lambda patch: patch.replace(b"if  x:", b"if  x:  "), FoundStrategy.BLANKS
    ),
    "other blanks inside lines": Kind(
        INDENTED,
        lambda patch: patch.replace(b"if  x:", b"if x:").replace(b"-        ret", b"-    ret"),
        FoundStrategy.BLANKS,
    ),
    "CRLF all over": Kind(PLAIN, lambda patch: patch.replace(b"\n", b"\r\n"), FoundStrategy.CRLF),
    "LF for a file with CRLF": Kind(
        _edit(("dos.txt", "b\r\n", "B\r\n")),
        lambda patch: patch.replace(b"\r\n", b"\n"),
        FoundStrategy.CRLF,
    ),
    "a file without a last newline": Kind(
        _edit(("ragged", "at the end", "in the end")), lambda patch: patch, FoundStrategy.EXACT
    ),
    "its marker cut off": Kind(
        _edit(("ragged", "no newline", "none")),
        lambda patch: patch.replace(b"\n\\ No newline at end of file", b""),
        FoundStrategy.BLANKS,
    ),
    "a quoted path": Kind(
        _edit(("späße/tab\tname.py", "b\n", "B\n")), lambda patch: patch, FoundStrategy.EXACT
    ),
    "a quoted path, stripped": Kind(
        _edit(("späße/tab\tname.py", "b\n", "B\n")),
        lambda patch: patch.replace(b" c\n", b" c  \n"),
        FoundStrategy.BLANKS,
    ),
    "a rename with changes": Kind(_move, lambda patch: patch, FoundStrategy.EXACT),
    "a rename with wrong counts": Kind(
        _move, lambda patch: re.sub(rb",7 @@", b",9 @@", patch), FoundStrategy.COUNTS
    ),
    "modes, a link, an empty and a removed file": Kind(
        _modes, lambda patch: patch, FoundStrategy.EXACT
    ),
    "a binary file": Kind(
        _edit(("picture", "\x00\x01", "\x01\x00\x01")), lambda patch: patch, FoundStrategy.EXACT
    ),
    "prose around": Kind(
        PLAIN,
        lambda patch: b"Here it is:\n```diff\n" + patch + b"```\nDone.\n",
        FoundStrategy.EXACT,  # git skips what is before and after
    ),
    "context of another version": Kind(
        PLAIN, lambda patch: patch.replace(b" one\n", b" eins\n"), FoundStrategy.FUZZ
    ),
}  # fmt: skip
NAMES = {f"acme__kinds-{at}": name for at, name in enumerate(KINDS)}
BAD = "acme__kinds-bad"


@dataclass(frozen=True)
class Recorded:
    client: Client
    socket: Path
    trees: dict[str, str]
    patches: dict[str, bytes]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A daemon with a row for each kind, as a test patch and as the gold one."""
    root = tmp_path_factory.mktemp("kinds")
    upstream = Upstream(root / "acme/kinds")
    files: dict[str, str | bytes | None] = {
        name: text.encode("latin-1" if name == "picture" else "utf-8")
        for name, text in BASE.items()
    }
    commit = upstream.commit(files)
    rows, trees, patches = [], {}, {}
    for identity, name in NAMES.items():
        KINDS[name].edit(upstream.path)
        upstream.git("add", "--all")
        command = ["git", "diff", "--cached", "--binary", "-M", commit]
        patch = subprocess.run(
            command, cwd=upstream.path, env=ENV, capture_output=True, check=True
        ).stdout
        trees[identity] = upstream.git("write-tree")
        upstream.git("reset", "--hard", "--quiet", commit)
        patches[identity] = KINDS[name].spoil(patch)
        text = patches[identity].decode()
        row = {"instance_id": identity, "repo": "acme/kinds", "base_commit": commit}
        rows += [
            row | {"test_patch": text},
            row | {"instance_id": f"{identity}-gold", "patch": text},
        ]
    bad = "--- a/t.py\n+++ b/t.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n@@ -30,2 +30,2 @@\n thirty\n-x\n+y\n"
    rows.append(row | {"instance_id": BAD, "test_patch": bad})
    file = root / "kinds.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
    with daemon(text) as running, Client(running.socket) as client:
        client.wait(client.import_dataset(file))
        yield Recorded(client, running.socket, trees, patches)


def tree_of(path: Path) -> str:
    subprocess.run(["git", "add", "--all"], cwd=path, env=ENV, capture_output=True, check=True)
    done = subprocess.run(["git", "write-tree"], cwd=path, env=ENV, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.mark.parametrize("identity", NAMES, ids=list(KINDS))
def test_a_patch_as_it_is_recorded_gives_the_tree_that_was_meant(
    recorded: Recorded, identity: str
) -> None:
    """As the instance's tests in a grade, as a model's in another, as `@test_patch` and as `@patch`."""
    client, kind = recorded.client, KINDS[NAMES[identity]]
    with client.grade(identity, b"") as grade:
        assert grade.tests_strategy == kind.strategy
        assert tree_of(grade.path) == recorded.trees[identity]
    with client.grade(f"{identity}-gold", recorded.patches[identity]) as grade:
        assert (grade.strategy, grade.tests_strategy) == (kind.strategy, None)
        assert tree_of(grade.path) == recorded.trees[identity]
    for row, named in ((identity, "@test_patch"), (f"{identity}-gold", "@patch")):
        with client.checkout(row, view=View.GRADER) as checkout:
            assert checkout.apply(named) == kind.strategy
            assert tree_of(checkout.path) == recorded.trees[identity]


def test_a_rehearsal_takes_them_all_and_counts_how(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In its text, in `--json` and on its page."""
    names = [row for identity in NAMES for row in (identity, f"{identity}-gold")]
    page = tmp_path / "page.html"
    assert run(["rehearse", *names, "--report", str(page), "--socket", str(recorded.socket)]) == 0
    said = capsys.readouterr().out
    for named in ("@test_patch", "@patch"):
        assert f"{named} applied by strategy: 9 exact, 3 counts, 2 crlf, 4 blanks, 1 fuzz" in said
    assert "Test patches applied by strategy crlf: 2" in page.read_text()
    assert run(["rehearse", *names, "--json", "--socket", str(recorded.socket)]) == 0
    rows = json.loads(capsys.readouterr().out)["instances"]
    steps = {
        (row["instance"].removesuffix("-gold"), step["strategy"])
        for row in rows
        for step in row["steps"]
        if step["strategy"]
    }
    assert steps == {(identity, KINDS[name].strategy) for identity, name in NAMES.items()}


def test_a_refusal_names_the_hunk_of_a_file(recorded: Recorded) -> None:
    """Of the tests, and of a model's patch that fits nowhere or cannot be read."""
    hunk = r"hunk 2 of 't\.py' \(@@ -30,2 \+30,2 @@\) fits nowhere"
    with pytest.raises(PatchConflictError, match=f"the tests of the instance: .*{hunk}"):
        recorded.client.grade(BAD, b"")
    head = b"--- a/t.py\n+++ b/t.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
    with pytest.raises(PatchConflictError, match=hunk):
        recorded.client.grade(BAD, head + b"@@ -30,2 +30,2 @@\n thirty\n-x\n+y\n")
    said = r"hunk 2 of 't\.py' \(@@ -30,2 \+30,2 @@\) has other lines than it says"
    with pytest.raises(InvalidPatchError, match=said):
        recorded.client.grade(BAD, head + b"@@ -30,2 +30,2 @@\n thirty\n", strategy="exact")
