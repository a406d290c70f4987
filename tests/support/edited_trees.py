"""Random changes in a real work tree, what a diff makes of them, and what git makes of the same."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

from gitrepos import ENV, git

from mirrord.model import DiffFormat
from mirrord.patches.diff import Diff, diff
from mirrord.patches.worktree import PatchJob

GIT_OPTIONS = {
    DiffFormat.PATCH: ["--binary", "--full-index", "-M"],
    DiffFormat.STAT: ["--stat", "-M"],
    DiffFormat.NAME_STATUS: ["--name-status", "-M"],
}
NAMES = [
    b"a.txt", b"b.py", b"c.crlf", b"d.id", b"e.bin", b"f.dat", b"g.u16", b"x.o", b"keep.o", b"README",
    b"sp ace", b"t\tab", b'q"uote', b"caf\xc3\xa9.txt", b"n\xff", b"back\\slash", b"-dash", b"new\nline",
    b"build", b"docs", b"src", b"__init__.py", b"h.drv", b"{x => y}", b"A" * 90,
]  # fmt: skip
LINES = [b"def f(x):", b"    return x", b"", b"}", b"  pass  ", b"import os", b"class A:", b"$Id$", b"$Id: old $", b"\t z", b"a\rb", b"caf\xe9", b"class Caf\xe9:", b"async def g(): \x0b",
         b"def " + b"long_" * 15 + b"   end():", *[b"x = %d" % n for n in range(40)], b"odd = 1 \x0c"]  # fmt: skip
IGNORES = [b"*.o", b"!keep.o", b"build/", b"/docs", b"src/*", b"!src/b.py", b"**/x.o", b"e.*", b"[a-c]*", b"\\!x", b"doc?", b"!*/", b"#x", b"sp ace  ", b"sp\\ ace"]  # fmt: skip
ATTRIBUTES = [b"*.txt text", b"* text=auto", b"*.crlf eol=crlf", b"*.crlf text eol=lf", b"*.id ident", b"*.bin binary", b"*.dat -diff", b"*.u16 working-tree-encoding=UTF-16",
              b"*.drv diff=rust", b"*.py diff", b"*.py diff=python", b"* diff=python", b"src/* -text", b"*.txt !text eol=crlf", b"[attr]odd text=auto eol=crlf", b"*.o odd", b"*.dat text=auto ident"]  # fmt: skip


class Tree:
    """A clone to change at random; `base` is its commit's tree, `mirror` has the objects."""

    def __init__(self, path: Path, mirror: Path, random: Random) -> None:
        self.path = path
        self.top = os.fsencode(path)
        self.mirror = mirror
        self.random = random
        self.base = git(path, "rev-parse", "HEAD^{tree}")
        listed = git(path, "ls-files", "-z").encode(errors="surrogateescape")
        self.tracked = [each for each in listed.split(b"\0") if each]

    def diff(self, form: DiffFormat, changed: list[bytes] | None = None) -> tuple[bytes, Diff]:
        """What mirrord prints."""
        owner = (os.geteuid(), os.getegid())
        scratch, spool = self.path.parent / "scratch", self.path.parent / "spool"
        job = PatchJob(self.path, self.mirror, "HEAD", self.base, owner, scratch)
        made = diff(job, lambda: self.changed() if changed is None else changed, form, spool)
        assert not scratch.exists()
        assert not spool.with_name("spool-part").exists()
        if made.content is not None:
            return made.content, made
        content = spool.read_bytes()
        spool.unlink()
        return content, made

    def git_diff(self, form: DiffFormat) -> bytes:
        """What git prints after `git add --all`, which ran before."""
        return subprocess.run(
            ["git", "diff", "--cached", *GIT_OPTIONS[form]], cwd=self.path, env=ENV, capture_output=True, check=True
        ).stdout  # fmt: skip

    def add_all(self) -> str | None:
        """Run `git add --all`; answers why it failed."""
        command = ["git", "add", "--all"]
        done = subprocess.run(command, cwd=self.path, env=ENV, capture_output=True, check=False)
        return done.stderr.decode(errors="replace") if done.returncode else None

    def clean(self) -> None:
        for each in self.path.iterdir():
            if each.name != ".git":
                subprocess.run(["rm", "-rf", "--", str(each)], check=True)
        git(self.path, "reset", "--quiet", "--hard")

    def changed(self) -> list[bytes]:
        """All that may differ: every tracked path, and what is extra, without what is in that."""
        known = {b""}
        for path in self.tracked:
            while path := path.rpartition(b"/")[0]:
                known.add(path)
        found = list(self.tracked)
        for above in sorted(known):
            directory = os.path.join(self.top, above)
            if os.path.isdir(directory) and not os.path.islink(directory):
                inside = above + b"/" if above else b""
                found += [inside + name for name in os.listdir(directory) if name != b".git"]
        return found

    # -- changes -----------------------------------------------------------------------------------

    def change(self, count: int) -> None:
        for _ in range(count):
            self.random.choice(_CHANGES)(self)

    def files(self) -> list[bytes]:
        """Every file and link that is there, but rules."""
        found = []
        for above, below, names in os.walk(self.top):
            if above == self.top:
                below.remove(b".git")
            found += [os.path.join(above, name) for name in names if not name.startswith(b".git")]
        pipes = filter(lambda path: stat.S_ISFIFO(os.lstat(path).st_mode), found)
        return [os.path.relpath(path, self.top) for path in sorted({*found} - {*pipes})]

    def some(self) -> bytes:
        there = sorted(self.files())
        return self.random.choice(there) if there else self.anywhere()

    def anywhere(self) -> bytes:
        """A path that may be there."""
        parts = [self.random.choice(NAMES) for _ in range(self.random.choice((1, 1, 2, 2, 3)))]
        if self.random.random() < 0.4 and self.tracked:
            above = self.random.choice(self.tracked).rpartition(b"/")[0]
            parts = [above, *parts] if above else parts
        return b"/".join(parts)

    def content(self) -> bytes:
        kind = self.random.random()
        if kind < 0.08:
            return b""
        if kind < 0.2:
            return self.random.randbytes(self.random.choice((1, 30, 300, 9000)))
        lines = [self.random.choice(LINES) for _ in range(self.random.choice((1, 3, 12, 60)))]
        end = b"\r\n" if self.random.random() < 0.25 else b"\n"
        if self.random.random() < 0.1:
            return end.join(lines).decode("latin-1").encode("utf-16")
        return end.join(lines) + (end if self.random.random() < 0.8 else b"")

    def put(self, path: bytes, content: bytes, mode: int = 0o644) -> None:
        full = os.path.join(self.top, path)
        try:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            if os.path.islink(full) or not os.path.isfile(full):
                self.remove(path)
            with open(full, "wb") as file:
                file.write(content)
            os.chmod(full, mode)
        except OSError:
            pass

    def remove(self, path: bytes) -> None:
        subprocess.run([b"rm", b"-rf", b"--", os.path.join(self.top, path)], check=True)

    def read(self, path: bytes) -> bytes:
        full = os.path.join(self.top, path)
        if not stat.S_ISREG(os.lstat(full).st_mode):
            return b""
        return Path(os.fsdecode(full)).read_bytes()

    def write(self) -> None:
        self.put(self.anywhere(), self.content(), self.random.choice((0o644, 0o644, 0o755, 0o600)))

    def edit(self) -> None:
        path = self.some()
        lines = (
            self.read(path).splitlines(keepends=True)
            if os.path.lexists(os.path.join(self.top, path))
            else []
        )
        for _ in range(self.random.choice((1, 1, 2, 5))):
            at = self.random.randint(0, len(lines))
            new = [
                self.random.choice(LINES) + b"\n" for _ in range(self.random.choice((0, 1, 1, 4)))
            ]
            lines[at : at + self.random.choice((0, 1, 1, 3))] = new
        self.put(path, b"".join(lines))

    def swap_line_ends(self) -> None:
        path = self.some()
        if os.path.lexists(os.path.join(self.top, path)):
            data = self.read(path)
            crlf = data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
            self.put(path, crlf if b"\r\n" not in data else data.replace(b"\r\n", b"\n"))

    def delete(self) -> None:
        path = self.some()
        self.remove(path.rpartition(b"/")[0] or path if self.random.random() < 0.2 else path)

    def move(self) -> None:
        old, new = self.some(), self.anywhere()
        try:
            os.makedirs(os.path.dirname(os.path.join(self.top, new)), exist_ok=True)
            os.rename(os.path.join(self.top, old), os.path.join(self.top, new))
        except OSError:
            pass
        if self.random.random() < 0.3:
            self.edit()

    def copy(self) -> None:
        path = self.some()
        if os.path.lexists(os.path.join(self.top, path)):
            self.put(self.anywhere(), self.read(path))

    def change_mode(self) -> None:
        path = os.path.join(self.top, self.some())
        if os.path.isfile(path) and not os.path.islink(path):
            os.chmod(path, self.random.choice((0o644, 0o755, 0o711, 0o640)))

    def link(self) -> None:
        path = self.some() if self.random.random() < 0.4 else self.anywhere()
        full = os.path.join(self.top, path)
        try:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            self.remove(path)
            os.symlink(self.random.choice((b"README", b"/etc/passwd", b"nowhere\xff", b"..")), full)
        except OSError:
            pass

    def swap_kind(self) -> None:
        """A file becomes a directory, or a directory a file."""
        path = self.some()
        if self.random.random() < 0.5 and b"/" in path:
            above = path.rpartition(b"/")[0]
            self.remove(above)
            self.put(above, self.content())
        else:
            self.remove(path)
            self.put(path + b"/" + self.random.choice(NAMES), self.content())

    def make_pipe(self) -> None:
        path = self.anywhere()
        full = os.path.join(self.top, path)
        try:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            if path not in self.tracked:  # git refuses one in a file's place
                os.mkfifo(full)
        except OSError:
            pass

    def write_rules(self) -> None:
        name, rules = self.random.choice(
            ((b".gitignore", IGNORES), (b".gitattributes", ATTRIBUTES))
        )
        above = self.some().rpartition(b"/")[0] if self.random.random() < 0.5 else b""
        chosen = [self.random.choice(rules) for _ in range(self.random.randint(1, 3))]
        self.put(above + b"/" + name if above else name, b"\n".join(chosen) + b"\n")


_CHANGES: list[Callable[[Tree], None]] = [
    *[Tree.edit] * 6, *[Tree.write] * 6, Tree.swap_line_ends, Tree.delete, Tree.move, Tree.copy,
    Tree.change_mode, Tree.link, Tree.swap_kind, Tree.make_pipe, Tree.write_rules,
]  # fmt: skip


def make_tree(place: Path, random: Random) -> Tree:
    """A small repository with a bit of everything, and a clone of it."""
    upstream = place / "upstream"
    upstream.mkdir(parents=True)
    git(upstream, "init", "--quiet")
    tree = Tree.__new__(Tree)
    tree.path, tree.top, tree.random, tree.tracked = upstream, os.fsencode(upstream), random, []
    for _ in range(30):
        random.choice((Tree.write, Tree.write, Tree.write, Tree.link))(tree)
    if random.random() < 0.7:
        tree.write_rules()
    git(upstream, "add", "--all", "--force", check=False)
    git(upstream, "commit", "--quiet", "--allow-empty", "--message", "one")
    return clone(place, upstream, random)


def clone(place: Path, upstream: Path, random: Random, commit: str = "HEAD") -> Tree:
    oid = git(upstream, "rev-parse", commit)
    git(place, "clone", "--quiet", "--no-checkout", str(upstream), str(place / "tree"))
    git(place / "tree", "checkout", "--quiet", "--detach", oid)
    git_dir = upstream / ".git" if (upstream / ".git").is_dir() else upstream
    return Tree(place / "tree", git_dir, random)
