"""A stand-in for a mirror: a repository with links to its good objects, and its refs.

An audit reads it where git would stop at the mirror's bad files; a heal works in it, so that the
mirror stays as it was until everything is proven. It has no configuration, commit-graph, bitmap or
multi-pack index: every object that git finds in it is good. Runs in a worker or a thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .object_files import BadFile, FileKind
from .refs import RefFiles

_IN_THE_WAY = {FileKind.PACK, FileKind.INDEX, FileKind.LOOSE, FileKind.LAYOUT, FileKind.PLANTED}


@contextmanager
def readable(git_dir: Path, found: RefFiles, strange: Collection[BadFile]) -> Iterator[Path]:
    """The mirror, or a stand-in where git would refuse it or believe what was planted in it."""
    if not found.bad and not strange:
        yield git_dir
        return
    with tempfile.TemporaryDirectory(prefix="mirrord-stand-in-") as directory:
        stand_in = Path(directory)
        if any(bad.kind in _IN_THE_WAY for bad in strange):
            # git reads through a symbolic link; a finding that hits no commit yet
            unread = [bad for bad in strange if not is_readable_link(git_dir / bad.path)]
            make_stand_in(git_dir, unread, found.refs, stand_in, link=os.symlink)
        else:  # as one link, that follows when the mirror is packed meanwhile
            (stand_in / "objects").symlink_to(git_dir / "objects")
        _write_refs(stand_in, found.refs, found.head)
        yield stand_in


def is_readable_link(path: Path) -> bool:
    """Whether a symbolic link leads to a file or directory."""
    return path.is_symlink() and (path.is_file() or path.is_dir())


def make_stand_in(
    git_dir: Path,
    bad_files: Collection[BadFile],
    refs: Mapping[str, str],
    into: Path,
    *,
    link: Callable[[Path, Path], None] = os.link,
) -> None:
    """Make `into` a repository that has `refs` and the objects of good files.

    A hard link stays when a file of the mirror moves; a symbolic one crosses file systems.
    """
    bad = {bad.path for bad in bad_files}
    make_repository(into, refs)
    if "objects" in bad:
        return
    for index in () if "objects/pack" in bad else (git_dir / "objects/pack").glob("pack-*.idx"):
        pack = index.with_suffix(".pack")
        if bad.isdisjoint({f"objects/pack/{index.name}", f"objects/pack/{pack.name}"}):
            link(pack, into / "objects/pack" / pack.name)
            link(index, into / "objects/pack" / index.name)
    for directory in (git_dir / "objects").glob("[0-9a-f][0-9a-f]"):
        if f"objects/{directory.name}" in bad:
            continue
        target = into / "objects" / directory.name
        names = os.listdir(directory)
        good = [name for name in names if f"objects/{directory.name}/{name}" not in bad]
        if len(good) == len(names):  # as a whole: nothing is written into it
            target.symlink_to(directory)
            continue
        target.mkdir()
        for name in good:
            link(directory / name, target / name)


def make_repository(path: Path, refs: Mapping[str, str] | None = None) -> None:
    """Make an empty repository, with refs to objects that are to come."""
    (path / "objects/pack").mkdir(parents=True)
    _write_refs(path, refs or {}, None)


def _write_refs(repository: Path, refs: Mapping[str, str], head: str | None) -> None:
    (repository / "HEAD").write_text(f"ref: {head or 'refs/heads/main'}\n")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "packed-refs").write_bytes(packed_refs(refs))


def packed_refs(refs: Mapping[str, str]) -> bytes:
    """The content of a packed-refs file. Nothing is peeled, so git does that when it is asked."""
    lines = (f"{oid} {ref}\n" for ref, oid in sorted(refs.items()))
    return "".join(["# pack-refs with: sorted \n", *lines]).encode("utf-8", "surrogateescape")


def borrow_from(repository: Path, *lenders: Path) -> None:
    """Let git in `repository` read the objects of others too, by alternates."""
    info = repository / "objects/info"
    info.mkdir(exist_ok=True)
    (info / "alternates").write_text("".join(f"{lender / 'objects'}\n" for lender in lenders))
