"""What a user would do without mirrord, each in its plain form, on a bare mirror made for it. Every call is one timed command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ENV = {
    **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "bench"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "bench@example.com"),
}


def git(*words: str | Path, cwd: Path | None = None) -> str:
    return git_bytes(*words, cwd=cwd).decode().strip()


def git_bytes(*words: str | Path, cwd: Path | None = None, stdin: bytes | None = None) -> bytes:
    done = subprocess.run(
        ["git", *map(str, words)], cwd=cwd, env=ENV, input=stdin, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(map(str, words))}: {done.stderr.decode()}")
    return done.stdout


class Git:
    """A bare mirror of `source` below `area`, and the things people do with one."""

    def __init__(self, source: Path, area: Path) -> None:
        self.area = area
        self.mirror = area / "mirror.git"
        self.tip = git("rev-parse", "HEAD", cwd=source)
        refs = ["+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"]
        git("init", "--quiet", "--bare", self.mirror)
        git("fetch", "--quiet", f"file://{source}", *refs, cwd=self.mirror)
        git("update-ref", "refs/heads/bench", self.tip, cwd=self.mirror)
        self._count = 0

    def line(self, count: int) -> list[str]:
        """Up to `count` commits of the first-parent line, newest first."""
        return git(
            "rev-list", "--first-parent", f"--max-count={count}", self.tip, cwd=self.mirror
        ).split()

    def fresh(self) -> Path:
        self._count += 1
        return self.area / f"rival-{self._count}"

    def worktree_add(self, path: Path, commit: str) -> None:
        git("worktree", "add", "--quiet", "--detach", path, commit, cwd=self.mirror)

    def clone_shared(self, path: Path, commit: str) -> None:
        git("clone", "--quiet", "--shared", "--no-checkout", self.mirror, path)
        git("checkout", "--quiet", "--detach", commit, cwd=path)

    def clone_isolated(self, path: Path, commit: str) -> None:
        """A clone that shares nothing and holds the history of one commit."""
        git("update-ref", "refs/heads/bench", commit, cwd=self.mirror)
        git(
            "clone", "--quiet", "--no-local", "--single-branch", "--branch=bench", self.mirror, path
        )

    def floor_bytes(self, commit: str) -> int:
        """The disk of one checkout without its `.git`, and of the one pack of its closure."""
        path = self.fresh()
        self.clone_isolated(path, commit)
        packs = disk_bytes(path / ".git" / "objects" / "pack")
        shutil.rmtree(path / ".git")
        tree = disk_bytes(path)
        self.remove(path)
        return packs + tree

    def least_bytes(self, commits: list[str]) -> int:
        """The bytes of every version of every file of some commits, each once, and of one closure pack for all of them."""
        versions: dict[str, int] = {}
        for commit in commits:
            for line in git("ls-tree", "-r", "-l", "-z", commit, cwd=self.mirror).split("\0"):
                mode, _, oid, size = (
                    line.partition("\t")[0].split()[:4] if line else ("160000", "", "", "")
                )
                if mode != "160000":
                    versions[oid] = int(size)
        pack = self.area / "least"
        listed = subprocess.run(
            ["git", "pack-objects", "-q", "--revs", pack],
            cwd=self.mirror,
            env=ENV,
            input="\n".join(commits).encode(),
            capture_output=True,
            check=True,
        )
        name = listed.stdout.decode().strip()
        return sum(versions.values()) + sum(
            (self.area / f"least-{name}.{kind}").stat().st_size for kind in ("pack", "idx")
        )

    def write_variants(self, mirror: Path, commit: str, count: int) -> list[str]:
        """Write `count` children of `commit` into `mirror`, each with a line more in one of its files."""
        listed = git("ls-tree", "-r", "-z", commit, cwd=mirror).split("\0")
        entries = [entry.partition("\t") for entry in listed if entry.startswith("100644 blob")]
        plain = [
            (meta.split()[2], path)
            for meta, _, path in entries
            if path.isascii() and '"' not in path and "\n" not in path
        ]
        chosen = plain[:: max(1, len(plain) // count)]
        blobs = _read_blobs(mirror, [oid for oid, _ in chosen])
        stream = self.area / "variants"
        with stream.open("wb") as out:
            for number in range(count):
                oid, path = chosen[number % len(chosen)]
                blob = blobs[oid] + b"# variant %d\n" % number
                head = f"commit refs/variants/{number}\ncommitter b <b@localhost> {number} +0000\ndata 1\nv\nfrom {commit}\n"
                out.write(
                    f"{head}M 100644 inline {path}\ndata {len(blob)}\n".encode() + blob + b"\n"
                )
        with stream.open("rb") as source:
            command = ["git", "-c", "fastimport.unpackLimit=1", "fast-import", "--quiet"]
            subprocess.run(command, cwd=mirror, env=ENV, stdin=source, check=True)
        return git("for-each-ref", "--format=%(objectname)", "refs/variants", cwd=mirror).split()

    def reset_and_clean(self, path: Path) -> None:
        git("reset", "--quiet", "--hard", cwd=path)
        git("clean", "--quiet", "-ffdx", cwd=path)

    def move_and_clean(self, path: Path, commit: str) -> None:
        git("checkout", "--quiet", "-f", "--detach", commit, cwd=path)
        git("clean", "--quiet", "-ffdx", cwd=path)

    def diff(self, tree: Path) -> bytes:
        git("add", "--all", cwd=tree)
        return git_bytes("diff", "--cached", "--binary", "--full-index", "-M", cwd=tree)

    def apply(self, tree: Path, *patches: bytes) -> None:
        for patch in patches:
            git_bytes("apply", "-", cwd=tree, stdin=patch)

    def stash(self, tree: Path) -> str:
        """Keep what changed as a commit, and leave it as it is."""
        git("add", "--all", cwd=tree)
        return git("stash", "create", cwd=tree)

    def roll_back(self, tree: Path, stash: str) -> None:
        self.reset_and_clean(tree)
        git("stash", "apply", "--quiet", stash, cwd=tree)

    def worktree_remove(self, tree: Path) -> None:
        git("worktree", "remove", "--force", tree, cwd=self.mirror)

    def pin(self, commits: list[str]) -> None:
        for commit in commits:
            git("update-ref", f"refs/pins/{commit}", commit, cwd=self.mirror)
        git("pack-refs", "--all", cwd=self.mirror)

    def walk(self, commits: list[str]) -> None:
        git("rev-list", "--objects", *commits, cwd=self.mirror)

    def fsck(self) -> None:
        """Slips that real histories have make its status 1, and cost it nothing."""
        subprocess.run(
            ["git", "fsck", "--full", "--no-progress"],
            cwd=self.mirror,
            env=ENV,
            capture_output=True,
            check=False,
        )

    def remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        git("worktree", "prune", cwd=self.mirror)


def _read_blobs(repository: Path, oids: list[str]) -> dict[str, bytes]:
    asked = "".join(f"{oid}\n" for oid in oids).encode()
    command = ["git", "cat-file", "--batch"]
    out = subprocess.run(
        command, cwd=repository, env=ENV, input=asked, capture_output=True, check=True
    ).stdout
    found, at = {}, 0
    for oid in oids:
        begin = out.index(b"\n", at) + 1
        at = begin + int(out[at:begin].split()[2])
        found[oid] = out[begin:at]
        at += 1
    return found


def disk_bytes(*paths: Path) -> int:
    """The blocks that directories take, hard links counted once."""
    done = subprocess.run(
        ["du", "-s", "-c", "-B1", *paths], capture_output=True, text=True, check=True
    )
    return int(done.stdout.splitlines()[-1].split()[0])


def dirty(tree: Path) -> None:
    """Change 20 tracked files and create 100."""
    files = git("ls-files", "-z", cwd=tree).split("\0")
    plain = [
        name
        for name in files
        if name and (tree / name).is_file() and not (tree / name).is_symlink()
    ]
    for name in plain[:: max(1, len(plain) // 20)][:20]:
        with (tree / name).open("ab") as file:
            file.write(b"# changed\n")
    for number in range(100):
        created = tree / f"created-{number % 10}" / f"file{number}.txt"
        created.parent.mkdir(exist_ok=True)
        created.write_text("created\n" * 20)
