"""A view of a mirror without its bad files: where an audit looks when git would stop at them, and
where a heal works, so that the mirror stays as it was until all is proven.

Links to the good packs and loose objects, no configuration, no commit-graph, no bitmap, no
multi-pack index: what git finds in it is there. Owns only the directory it is given. Runs in a worker.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .object_files import BadFile, FileKind
from .ref_files import Names

_IN_THE_WAY = {FileKind.PACK, FileKind.INDEX, FileKind.LOOSE, FileKind.LAYOUT, FileKind.PLANTED}


@contextmanager
def readable(git_dir: Path, names: Names, strange: Collection[BadFile]) -> Iterator[Path]:
    """The mirror itself, or a stand-in with its good objects where git would refuse it, or be told
    something that is not so by what was planted.
    """
    if not names.faults and not strange:
        yield git_dir
        return
    with tempfile.TemporaryDirectory(prefix="mirrord-stand-in-") as directory:
        stand_in = Path(directory)
        if any(bad.kind in _IN_THE_WAY for bad in strange):
            # git reads through a symbolic link; that it is one is a finding, and hits nobody yet
            unread = [bad for bad in strange if not is_readable_link(git_dir / bad.path)]
            make_view(git_dir, unread, names.refs, stand_in, link=os.symlink)
        else:  # as one link, that follows when the mirror is packed meanwhile
            (stand_in / "objects").symlink_to(git_dir / "objects")
        write_skeleton(stand_in, names.refs, names.head)
        yield stand_in


def is_readable_link(path: Path) -> bool:
    """Whether a symbolic link leads to a file or directory."""
    return path.is_symlink() and (path.is_file() or path.is_dir())


def make_view(
    git_dir: Path,
    bad_files: Collection[BadFile],
    refs: Mapping[str, str],
    into: Path,
    *,
    link: Callable[[Path, Path], None] = os.link,
) -> None:
    """Make `into` a repository that has the refs given and the objects that good files hold. A
    hard link stays when a file of the mirror is moved; a symbolic one reaches another file system.
    """
    bad = {bad.path for bad in bad_files}
    make_repository(into, refs)
    if bad.isdisjoint({"objects", "objects/pack"}):
        _link_packs(git_dir / "objects/pack", bad, into / "objects/pack", link)
    for directory in (git_dir / "objects").glob("[0-9a-f][0-9a-f]"):
        if bad.isdisjoint({"objects", f"objects/{directory.name}"}):
            _link_loose(directory, bad, into / "objects" / directory.name, link)


def make_repository(path: Path, refs: Mapping[str, str] | None = None) -> None:
    """An empty repository, with refs to objects that are to come."""
    (path / "objects/pack").mkdir(parents=True)
    write_skeleton(path, dict(refs or {}), None)


def write_skeleton(repository: Path, refs: dict[str, str], head: str | None) -> None:
    """What git needs beside objects: HEAD, and refs, all packed."""
    (repository / "HEAD").write_text(f"ref: {head or 'refs/heads/main'}\n")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "packed-refs").write_bytes(packed_refs(refs))


def packed_refs(refs: dict[str, str]) -> bytes:
    """The content of a packed-refs file. Nothing is peeled, so git does that when it is asked."""
    lines = (f"{oid} {ref}\n" for ref, oid in sorted(refs.items()))
    return "".join(["# pack-refs with: sorted \n", *lines]).encode("utf-8", "surrogateescape")


def _link_packs(
    source: Path, bad: Collection[str], target: Path, link: Callable[[Path, Path], None]
) -> None:
    """Packs whose index and bytes are both good; the rest is for salvage."""
    for index in source.glob("pack-*.idx"):
        pack = index.with_suffix(".pack")
        if not {f"objects/pack/{index.name}", f"objects/pack/{pack.name}"} & set(bad):
            link(pack, target / pack.name)
            link(index, target / index.name)


def _link_loose(
    source: Path, bad: Collection[str], target: Path, link: Callable[[Path, Path], None]
) -> None:
    """A directory without a bad file is linked as a whole: nothing is written into it."""
    names = [f"objects/{source.name}/{name}" for name in os.listdir(source)]
    if not any(name in bad for name in names):
        target.symlink_to(source)
        return
    target.mkdir()
    for name in names:
        if name not in bad:
            link(source.parent.parent / name, target / Path(name).name)


def damaged_packs(git_dir: Path, bad_files: Collection[BadFile]) -> list[Path]:
    """Packs that are there and cannot be used as they are, because of themselves or of their index."""
    stems = {
        Path(bad.path).stem for bad in bad_files if bad.kind in {FileKind.PACK, FileKind.INDEX}
    }
    packs = (git_dir / "objects/pack" / f"{stem}.pack" for stem in sorted(stems))
    return [pack for pack in packs if pack.is_file()]


def borrow_from(repository: Path, *lenders: Path) -> None:
    """Let git in `repository` read the objects of others too."""
    info = repository / "objects/info"
    info.mkdir(exist_ok=True)
    (info / "alternates").write_text("".join(f"{lender / 'objects'}\n" for lender in lenders))
