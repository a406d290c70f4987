"""A stand-in for a mirror: a repository with its refs and links to its good objects.

An audit reads it where git would stop at the mirror's bad files. A heal works in it, so that the
mirror stays as it was until everything is proven. It has no configuration, commit-graph, bitmap
or multi-pack index, so every object that git finds in it is good.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..git.packs import packs_in
from ..mirrors.refs import packed_refs
from ..presence import is_dir, is_file, is_symlink, matching
from ..quoting import encode_name
from .defects import BadFile
from .refs import RefFiles


@contextmanager
def readable(git_dir: Path, files: RefFiles, strange: Collection[BadFile]) -> Iterator[Path]:
    """Return the mirror, or a stand-in where git would refuse it, or follow planted files."""
    if not files.bad and not strange:
        yield git_dir
        return
    with tempfile.TemporaryDirectory(prefix="mirrord-stand-in-") as directory:
        stand_in = Path(directory)
        if strange:
            # git follows symbolic links, so their findings affect no commit
            unread = [bad for bad in strange if not is_readable_link(git_dir / bad.path)]
            make_stand_in(git_dir, unread, files.refs, stand_in, link=os.symlink)
        else:  # one link, in case the mirror is packed during the audit
            (stand_in / "objects").symlink_to(git_dir / "objects")
        _write_refs(stand_in, files.refs, files.head)
        yield stand_in


def is_readable_link(path: Path) -> bool:
    return is_symlink(path) and (is_file(path) or is_dir(path))


def make_stand_in(
    git_dir: Path,
    bad_files: Collection[BadFile],
    refs: Mapping[str, str],
    into: Path,
    *,
    link: Callable[[Path, Path], None] = os.link,
) -> None:
    """Make `into` a repository that has `refs` and the objects of good files.

    A hard link survives when a file of the mirror moves; a symbolic one crosses file systems.
    """
    bad = {bad.path for bad in bad_files}
    make_repository(into, refs)
    if "objects" in bad:
        return
    for index in () if "objects/pack" in bad else packs_in(git_dir / "objects/pack", ".idx"):
        pack = index.with_suffix(".pack")
        if bad.isdisjoint({f"objects/pack/{index.name}", f"objects/pack/{pack.name}"}):
            # git finds a pack by its index, which therefore comes last
            link(pack, into / "objects/pack" / pack.name)
            link(index, into / "objects/pack" / index.name)
    for directory in matching(git_dir / "objects", "[0-9a-f][0-9a-f]"):
        if f"objects/{directory.name}" in bad:
            continue
        target = into / "objects" / directory.name
        names = os.listdir(directory)
        good = [name for name in names if f"objects/{directory.name}/{name}" not in bad]
        if len(good) == len(names):  # git writes nothing into it
            target.symlink_to(directory)
            continue
        target.mkdir()
        for name in good:
            link(directory / name, target / name)


def make_repository(path: Path, refs: Mapping[str, str] | None = None) -> None:
    """Make an empty repository with refs, whose objects come later."""
    (path / "objects/pack").mkdir(parents=True)
    _write_refs(path, refs or {}, None)


def _write_refs(repository: Path, refs: Mapping[str, str], head: str | None) -> None:
    (repository / "HEAD").write_bytes(encode_name(f"ref: {head or 'refs/heads/main'}\n"))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "packed-refs").write_bytes(packed_refs(refs))


def borrow_from(repository: Path, *lenders: Path) -> None:
    """Let git in `repository` read the objects of others, by alternates."""
    info = repository / "objects/info"
    info.mkdir(exist_ok=True)
    (info / "alternates").write_text("".join(f"{lender / 'objects'}\n" for lender in lenders))
