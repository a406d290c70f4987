"""Random trees, patches between them, what befalls patches on their way, and git's word on the result."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from gitrepos import ENV, git

from mirrord.git.modes import DIRECTORY
from mirrord.patches.fit import Change, File

Files = dict[bytes, File]
Listing = dict[bytes, tuple[int, str]]  # mode and blob of each path
EMPTY = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
REGULAR, EXECUTABLE, SYMLINK = 0o100644, 0o100755, 0o120000

NAMES = [b"a.py", b"b.txt", b"src/m.py", b"src/deep/n.py", b"sp ace.py", b"docs/x", b"t\tab", b'q"uote', b"caf\xc3\xa9"]  # fmt: skip
LINES = [b"def f(x):", b"    return x", b"", b"    pass", b"import os", b"class A:", b"x = 1", b"    y = 2  ", b"\t z", b"a\rb"]  # fmt: skip
OPTIONS = [["-M"], ["--no-renames"], ["-M", "--binary", "--full-index"], ["-U1"], ["-U0"], ["-U10"], ["--no-prefix", "--no-renames"]]  # fmt: skip


class MemoryTree:
    """A tree to apply patches to."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._directories = {
            path[:at] for path in files for at, byte in enumerate(path) if byte == ord("/")
        }

    def read(self, path: bytes) -> File | None:
        directory = File(DIRECTORY, b"") if path in self._directories else None
        return self.files.get(path, directory)

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        return (each for each in self.files if each.startswith(path + b"/"))

    def after(self, changes: list[Change]) -> Files:
        gone = {change.path for change in changes}
        new = {at.path: File(at.mode, at.data) for at in changes if at.mode is not None}
        return {path: file for path, file in self.files.items() if path not in gone} | new


# -- trees -----------------------------------------------------------------------------------------


def random_files(random: Random) -> Files:
    modes = [REGULAR, REGULAR, REGULAR, EXECUTABLE]
    files = {name: File(random.choice(modes), random_text(random)) for name in NAMES}
    return files | {b"link": File(SYMLINK, b"a.py")}


def random_text(random: Random) -> bytes:
    lines = [
        random.choice(LINES) + random.choice([b"", b" %d" % random.randrange(4)])
        for _ in range(random.choice([0, 1, 2, 3, 5, 8, 20, 60]))
    ]
    text = b"\n".join(lines) + (b"\n" if lines and random.random() < 0.85 else b"")
    if random.random() < 0.05:  # git calls it binary
        text = b"\0" + text
    return text.replace(b"\n", b"\r\n") if random.random() < 0.08 else text


def edited_text(random: Random, text: bytes) -> bytes:
    lines = text.split(b"\n")
    for _ in range(random.choice([1, 1, 2, 4])):
        at = random.randrange(len(lines) + 1)
        deed = random.randrange(4)
        if deed == 0:
            lines[at:at] = random.choices(LINES, k=random.choice([1, 1, 3]))
        elif deed == 1:
            del lines[at : at + random.choice([1, 1, 2, 5])]
        elif at < len(lines):
            lines[at] = random.choice(LINES) + b"!"
    return b"\n".join(lines)


def edited_files(random: Random, files: Files) -> Files:
    """Files changed, removed, made executable, renamed, new; a file that becomes a directory, and back."""
    after = dict(files)
    for name, (mode, data) in files.items():
        deed = random.random()
        if deed < 0.3:
            after[name] = File(mode, b"b.txt" if mode == SYMLINK else edited_text(random, data))
        elif deed < 0.4:
            del after[name]
        elif deed < 0.5 and mode != SYMLINK:
            after[name] = File(EXECUTABLE if mode == REGULAR else REGULAR, data)
        elif deed < 0.56 and mode != SYMLINK:
            after[name + b".new"] = after.pop(name)
    for name in (b"new1", b"src/new2", b"a.py/x"):
        if random.random() < 0.25:
            after[name] = File(REGULAR, random_text(random))
            if name == b"a.py/x":
                after.pop(b"a.py", None)
    if random.random() < 0.15 and b"docs/x" in after:
        del after[b"docs/x"]
        after[b"docs"] = File(REGULAR, b"hi\n")
    return after


# -- what befalls a patch --------------------------------------------------------------------------


def shift(random: Random, patch: bytes) -> bytes:
    """Line numbers of another version."""

    def shifted(found: re.Match[bytes]) -> bytes:
        number = int(found[2])
        return b"%b%d" % (found[1], number and max(1, number + random.randrange(-4, 5)))

    lines = patch.split(b"\n")
    return b"\n".join(
        re.sub(rb"([-+])(\d+)", shifted, line, count=2) if line.startswith(b"@@ -") else line
        for line in lines
    )


def spoil_context(random: Random, patch: bytes) -> bytes:
    lines = patch.split(b"\n")
    context = [at for at, line in enumerate(lines) if line.startswith(b" ")]
    if context:
        lines[random.choice(context)] = b" wrong"
    return b"\n".join(lines)


def miscount(random: Random, patch: bytes) -> bytes:
    def wrong(found: re.Match[bytes]) -> bytes:
        return b",%d" % max(0, int(found[1]) + random.randrange(-2, 3))

    lines = patch.split(b"\n")
    hunks = [at for at, line in enumerate(lines) if line.startswith(b"@@ -")]
    if hunks:
        at = random.choice(hunks)
        lines[at] = re.sub(rb",(\d+)", wrong, lines[at], count=random.choice([1, 2]))
    return b"\n".join(lines)


def to_crlf(random: Random, patch: bytes) -> bytes:
    return patch.replace(b"\n", b"\r\n")


def strip_trailing_blanks(random: Random, patch: bytes) -> bytes:
    return re.sub(rb"(?m)[ \t]+$", b"", patch)


def wrap(random: Random, patch: bytes) -> bytes:
    return b"Here is the fix:\n\n```diff\n" + patch + b"```\n\nIt makes `@@ -1 +1 @@` work.\n"


def truncate(random: Random, patch: bytes) -> bytes:
    lines = patch.split(b"\n")
    return b"\n".join(lines[: random.randrange(len(lines) + 1)])


def drop_line(random: Random, patch: bytes) -> bytes:
    lines = patch.split(b"\n")
    del lines[random.randrange(len(lines))]
    return b"\n".join(lines)


def add_line(random: Random, patch: bytes) -> bytes:
    lines = patch.split(b"\n")
    line = random.choice([b"", b" x", b"+new", b"-old", b"junk", b"\\ No newline at end of file", b"--- a/a.py", b"diff --git a/a.py b/a.py"])  # fmt: skip
    lines.insert(random.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


def exchange_hunks(random: Random, patch: bytes) -> bytes:
    """Hunks of one file under the numbers of another."""
    lines = patch.split(b"\n")
    hunks = [at for at, line in enumerate(lines) if line.startswith(b"@@ -")]
    if len(hunks) > 1:
        one, other = random.sample(hunks, 2)
        lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def reorder(random: Random, patch: bytes) -> bytes:
    parts = re.split(rb"(?m)^(?=diff --git)", patch)
    random.shuffle(parts)
    return b"".join(parts)


def _without(*starts: bytes) -> Callable[[Random, bytes], bytes]:
    def drop(random: Random, patch: bytes) -> bytes:
        return b"\n".join(line for line in patch.split(b"\n") if not line.startswith(starts))

    return drop


def add_timestamps(random: Random, patch: bytes) -> bytes:
    plain = _traditional(random, patch)
    stamp = rb"\1\t2010-07-05 19:41:17.620000023 -0500"
    return re.sub(rb"(?m)^((?:---|\+\+\+) .*)$", stamp, plain)


def without_directories(random: Random, patch: bytes) -> bytes:
    return re.sub(rb"(?m)^(---|\+\+\+) [ab]/", rb"\1 ", _traditional(random, patch))


_traditional = _without(b"diff --git ", b"index ", b"new file", b"deleted file")

MUTATIONS: dict[str, Callable[[Random, bytes], bytes]] = {
    "nothing": lambda random, patch: patch,
    "shifted": shift,
    "context": spoil_context,
    "counts": miscount,
    "crlf": to_crlf,
    "blanks": strip_trailing_blanks,
    "prose": wrap,
    "truncated": truncate,
    "a line less": drop_line,
    "a line more": add_line,
    "other hunks": exchange_hunks,
    "reordered": reorder,
    "doubled": lambda random, patch: patch + patch,
    "no modes": _without(b"new file", b"deleted file"),
    "no git headers": _without(b"diff --git ", b"index ", b"new file", b"deleted file", b"old mode", b"new mode"),
    "timestamps": add_timestamps,
    "no directories": without_directories,
}  # fmt: skip


# -- git's word ------------------------------------------------------------------------------------


CHAIN = [
    ["git", "apply", "--verbose"],
    ["git", "apply", "--verbose", "--3way"],
    ["git", "apply", "--verbose", "--reject"],
    ["patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i"],
]


class Oracle:
    """A repository in which git applies the same patches; it may share the objects of another."""

    def __init__(self, path: Path, other: Path | None = None) -> None:
        self.path = path
        path.mkdir()
        git(path, "init", "--quiet")
        if other:
            (path / ".git/objects/info/alternates").write_text(f"{other}/objects\n")

    def tree_of(self, commit: str) -> str | None:
        """The tree of a commit; None where that is not there, or not whole."""
        done = self._run("rev-list", "--objects", "--no-walk", commit)
        return git(self.path, "rev-parse", f"{commit}^{{tree}}") if done.returncode == 0 else None

    def changes(self, tree: str, after: Listing) -> Listing:
        """What differs from a tree; (0, the id of nothing) where a path is gone."""
        git(self.path, "read-tree", tree)
        before = self._listed()
        gone = dict.fromkeys(before.keys() - after.keys(), (0, EMPTY))
        return gone | {path: at for path, at in after.items() if before.get(path) != at}

    def write_tree(self, files: Files) -> str:
        git(self.path, "read-tree", "--empty")
        rows = [
            b"%o %b 0\t%b\0" % (file.mode, self._store(file.data), name)
            for name, file in files.items()
        ]
        git(self.path, "update-index", "-z", "--add", "--index-info", stdin=b"".join(rows))
        return git(self.path, "write-tree")

    def _store(self, data: bytes) -> bytes:
        return git(self.path, "hash-object", "-w", "--stdin", stdin=data).encode()

    def diff(self, before: str, after: str, *options: str) -> bytes:
        return self._run("diff-tree", "-p", *options, before, after).stdout

    def apply(self, tree: str, patch: bytes, *, reverse: bool) -> Listing | None:
        """Mode and blob of each path afterwards; None where git refuses."""
        git(self.path, "read-tree", tree)
        direction = ["--reverse"] if reverse else []
        done = self._run("apply", "--cached", "--whitespace=nowarn", *direction, "-", stdin=patch)
        (self.path / ".git/index.lock").unlink(missing_ok=True)  # git 2.39 aborts on some patches
        if done.returncode:
            return None
        return self._listed()

    def _listed(self) -> Listing:
        rows = self._run("ls-files", "--stage", "-z").stdout.split(b"\0")[:-1]
        return {row.partition(b"\t")[2]: (int(row[:6], 8), row[7:47].decode()) for row in rows}

    def apply_as_graders(self, tree: str, patch: bytes) -> Listing | None:
        """What SWE-bench's chain of commands leaves in a work tree; None where it ends in a failure."""
        git(self.path, "read-tree", "--empty")
        git(self.path, "clean", "-ffdxq")
        git(self.path, "read-tree", "--reset", "-u", tree)
        file = self.path.parent / "model.diff"
        file.write_bytes(patch)
        if not any(self._succeeds(*command, str(file)) for command in CHAIN):
            git(self.path, "read-tree", "--empty")
            return None
        for left in (each for kind in ("rej", "orig") for each in self.path.rglob(f"*.{kind}")):
            left.unlink()
        git(self.path, "add", "--all", "--force")
        return self._listed()

    def _succeeds(self, *command: str) -> bool:
        done = subprocess.run(command, cwd=self.path, env=ENV, capture_output=True, check=False)
        return done.returncode == 0

    def _run(self, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["git", *args], cwd=self.path, input=stdin, env=ENV, capture_output=True, check=False
        )
