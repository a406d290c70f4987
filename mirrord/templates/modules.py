"""Submodules and LFS objects in a sealed store: files, and stores of their own in `.git/modules`.

The store of a base commit is a lower directory of its checkouts, so what stands beside its `.git`
is in their trees: the files of each submodule, with a `.git` file. Runs in workers.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ..catalog import Module
from ..errors import ProofFailedError
from ..git.lfs import has_object, object_path
from ..git.objects.modules import read_needs
from ..presence import exists
from ..trees.dotgit import index_bytes
from ..trees.scan import hash_tree
from ..trees.tree import materialise
from .store import CONFIG, GRAPH, Filtering, link_or_copy

_COPIED = ("HEAD", "packed-refs")


def config_of(
    modules: Sequence[Module], above: str = "", *, filtering: Filtering = Filtering.NONE
) -> bytes:
    """Return the configuration of a repository with these submodules, or of one of them."""
    lines = [CONFIG.decode(), filtering.config.decode()]
    start = f"{above}/modules/" if above else "modules/"
    for module in modules:
        if module.git_dir == f"{start}{module.name}":
            name, url = (_quoted(text) for text in (module.name, module.url))
            lines.append(f"[submodule {name}]\n\tactive = true\n\turl = {url}\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def place_module(
    top: Path, module: Module, modules: Sequence[Module], mirror: Path, store: Path
) -> None:
    """Put a submodule into the unfinished store `top`; `store` is the `.git` of its own commit.

    Those above it were put before. Raises ProofFailedError.
    """
    target, git = top / module.path, top / ".git" / module.git_dir
    target.parent.mkdir(parents=True, exist_ok=True)
    manifest = materialise(mirror, module.commit, target)
    if (written := hash_tree(target, manifest)) != manifest.tree:
        raise ProofFailedError(
            f"cannot prove submodule {module.path}: what was written is {written}"
        )
    for directory in ("", "info", "objects", "objects/info", "objects/pack", "refs"):
        (git / directory).mkdir(parents=True, exist_ok=True)
    for file in (*(store / "objects/pack").iterdir(), store / GRAPH):
        if exists(file):
            link_or_copy(file, git / file.relative_to(store))
    for name in _COPIED:
        (git / name).write_bytes((store / name).read_bytes())
    work_tree = os.path.relpath(target, git)
    filtering = place_objects(mirror, module.commit, git)
    config = config_of(modules, module.git_dir, filtering=filtering)
    (git / "config").write_bytes(config + f"[core]\n\tworktree = {_quoted(work_tree)}\n".encode())
    (git / "index").write_bytes(index_bytes(manifest))
    (target / ".git").write_text(f"gitdir: {os.path.relpath(git, target)}\n")


def place_objects(mirror: Path, commit: str, git: Path) -> Filtering:
    """Put a commit's LFS objects that the mirror has into a git directory, as hard links.

    They are read-only, and every checkout has its own directory entries over them.
    """
    pointers = read_needs(mirror, [commit])[commit].objects
    had = [pointer for pointer in pointers if has_object(mirror, pointer)]
    for pointer in had:
        target = object_path(git, pointer.oid)
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(object_path(mirror, pointer.oid), target)
    if not pointers:
        return Filtering.NONE
    return Filtering.OURS if had else Filtering.OFF
