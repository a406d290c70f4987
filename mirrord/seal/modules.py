"""Submodules of a foreign repository: which stores in its `.git/modules` are those of its HEAD.

A store is one that the `.git` file of a submodule of HEAD's tree leads to; it is judged as a
repository of its own. Any other file in `.git/modules` is a leak.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from ..git.command import run_git_sync
from ..presence import is_dir, is_file, is_symlink
from ..quoting import decode_name, encode_name
from .repository import ForeignRepository, read_bytes, read_text, repository_at


class ModuleStore(NamedTuple):
    """`where` is its path in the git directory, `commit` what HEAD's tree names at `path`."""

    path: str
    commit: str
    where: str
    repository: ForeignRepository

    @property
    def settings(self) -> tuple[str, ...]:
        """The keys that configure the submodule in the repository above."""
        name = self.where.removeprefix("modules/")
        return f"submodule.{name}.active", f"submodule.{name}.url"


def gitlinks_of(private: Path, head: str) -> dict[str, str]:
    """Return the submodules of a commit's tree; none of one that cannot be read."""
    listed = run_git_sync(
        "ls-tree", "-r", "-z", head, git_dir=private, ok=range(256), doing=f"list {head}"
    )
    rows = decode_name(listed.stdout).split("\0")
    entries = (row.partition("\t") for row in rows if row.startswith("160000 "))
    return {path: row.split()[2] for row, _, path in entries}


def find_modules(
    repository: ForeignRepository, private: Path, head: str | None
) -> list[ModuleStore]:
    """Return the stores of submodules of HEAD. Nothing is read through a symbolic link."""
    top, modules = _work_tree(repository), repository.git_dir / "modules"
    if head is None or not is_dir(modules) or is_symlink(modules):
        return []
    stores = []
    for path, commit in gitlinks_of(private, head).items():
        work_tree = top / os.fsdecode(encode_name(path))
        pointer = read_text(work_tree / ".git") or ""
        target = Path(os.path.normpath(work_tree / pointer.removeprefix("gitdir: ").strip("\n")))
        is_inside = modules in target.parents and os.path.realpath(target) == os.path.join(
            os.path.realpath(repository.git_dir), target.relative_to(repository.git_dir)
        )
        if pointer.startswith("gitdir: ") and is_inside and is_file(target / "HEAD"):
            inner = repository_at(target)._replace(path=work_tree, work_tree=work_tree)
            where = decode_name(os.fsencode(target.relative_to(repository.git_dir)))
            stores.append(ModuleStore(path, commit, where, inner))
    return stores


def _work_tree(repository: ForeignRepository) -> Path:
    return repository.work_tree or repository.git_dir.parent


def has_own_work_tree(repository: ForeignRepository) -> bool:
    """Return whether a repository is that of a submodule, and names the work tree around it."""
    if repository.work_tree is None or repository.git_dir.parent == repository.work_tree:
        return False
    own = os.path.relpath(repository.work_tree, repository.git_dir)
    content = decode_name(read_bytes(repository.git_dir / "config") or b"")
    named = re.findall(r"^\s*worktree\s*=\s*(.*?)\s*$", content, re.MULTILINE)
    return named in ([own], [f'"{own}"'])  # git writes quotes where it needs them
