"""Test repositories built at run time with fixed dates and the real git, away from this machine's git configuration."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
from pathlib import Path

ENV = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "A U Thor",
    "GIT_AUTHOR_EMAIL": "author@example.com",
    "GIT_COMMITTER_NAME": "C O Mitter",
    "GIT_COMMITTER_EMAIL": "committer@example.com",
    "LC_ALL": "C.UTF-8",
}


def git(
    cwd: Path,
    *args: str | bytes,
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
    check: bool = True,
) -> str:
    """Run git in `cwd`; answers stdout without its last newline."""
    done = subprocess.run(
        ["git", *args],
        cwd=cwd,
        input=stdin,
        env={**ENV, **(env or {})},
        capture_output=True,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(
            f"git {args!r} failed with {done.returncode}: {done.stderr.decode(errors='replace')}"
        )
    return done.stdout.decode(errors="surrogateescape").rstrip("\n")


class Upstream:
    """A repository with a work tree, for tests to write history into. Each commit is one hour after the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clock = 1_600_000_000
        path.mkdir(parents=True)
        git(path, "init", "--quiet", "--initial-branch=main")

    def copy(self, path: Path) -> Upstream:
        """The same at another path; what one gets then, the other does not."""
        shutil.copytree(self.path, path, symlinks=True)
        other = copy.copy(self)
        other.path = path
        return other

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def git(self, *args: str | bytes, stdin: bytes | None = None, check: bool = True) -> str:
        self._clock += 3600
        date = f"{self._clock} +0000"
        return git(
            self.path,
            *args,
            stdin=stdin,
            env={"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date},
            check=check,
        )

    def write(self, files: dict[str, str | bytes | None]) -> None:
        """Write files; None deletes."""
        for name, content in files.items():
            file = self.path / name
            if content is None:
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)

    def commit(
        self, files: dict[str, str | bytes | None] | None = None, message: str = "change"
    ) -> str:
        """Commit everything in the work tree; answers the commit id."""
        self.write(files or {})
        self.git("add", "--all")
        once = ("-c", "maintenance.auto=false", "commit", "--quiet", "--allow-empty")
        self.git(*once, "--message", message)
        return self.git("rev-parse", "HEAD")

    def history(self, count: int) -> list[str]:
        """`count` commits, each touching a few files in a few directories, as `commit` makes them."""
        parent = git(self.path, "rev-parse", "--quiet", "--verify", "HEAD", check=False)
        stream = []
        for n in range(count):
            date = f"{self._clock + 7200} +0000"
            self._clock += 10800
            stream += [
                f"commit HEAD\nmark :{n + 1}\nauthor A U Thor <author@example.com> {date}",
                f"committer C O Mitter <committer@example.com> {date}\ndata 7\nchange\n",
                *([f"from {parent}"] if parent and not n else []),
            ]
            for name, content in {
                f"src/mod{n % 5}.py": f"value = {n}\n" * 20,
                f"docs/page{n}.txt": f"page {n}\n",
                "README": f"number {n}\n",
            }.items():
                stream.append(f"M 100644 inline {name}\ndata {len(content)}\n{content}")
            stream.append(f"get-mark :{n + 1}")
        made = git(self.path, "fast-import", "--quiet", stdin="\n".join([*stream, ""]).encode())
        git(self.path, "reset", "--quiet", "--hard")
        return made.splitlines()
