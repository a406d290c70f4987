"""A private repository with blobs and an index of a few paths, for one git to work on."""

import os
from collections.abc import Iterable
from pathlib import Path

import pygit2
from pygit2.enums import FileMode

from .trees import TreeEntry

_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfilemode = true\n"


class ScratchRepository:
    """Made at `git_dir`, which must not exist; it has no object of any other repository."""

    def __init__(self, git_dir: Path) -> None:
        for name in ("objects/info", "refs"):
            (git_dir / name).mkdir(parents=True)
        (git_dir / "HEAD").write_text("ref: refs/heads/none\n")
        (git_dir / "config").write_text(_CONFIG)
        self.git_dir = git_dir
        self._repository = pygit2.Repository(str(git_dir))

    def write_blob(self, data: bytes) -> str:
        return str(self._repository.create_blob(data))

    def read_blob(self, oid: str) -> bytes:
        return self._repository[oid].read_raw()

    def write_index(self, entries: Iterable[TreeEntry]) -> None:
        index = pygit2.Index(str(self.git_dir / "index"))
        for entry in entries:
            oid, mode = pygit2.Oid(hex=entry.oid), FileMode(entry.mode)
            # a name need not be UTF-8; pygit2 (1.21) takes bytes, though its types do not say so
            index.add(pygit2.IndexEntry(entry.path, oid, mode))  # type: ignore[arg-type]
        index.write()

    def read_index(self) -> list[TreeEntry]:
        index = pygit2.Index(str(self.git_dir / "index"))
        index.read(force=True)
        return [TreeEntry(os.fsencode(at.path), int(at.mode), str(at.id)) for at in index]
