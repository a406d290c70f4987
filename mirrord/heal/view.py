"""A view of a mirror without its bad files: where a heal works, so that the mirror stays as it was until all is proven.

Hard links to the good packs, links to the good loose objects, no commit-graph, no bitmap, no multi-pack index: what git finds in
it is there. Owns only the directory it is given, below the quarantine; a crash leaves that to be removed. Runs in a worker.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from ..audit.files import BadFile, FileKind
from ..audit.names import write_skeleton


def make_view(git_dir: Path, bad_files: Collection[BadFile], refs: Mapping[str, str], into: Path) -> None:
    """Make `into` a repository that has the refs given and the objects that good files hold."""
    bad = {bad.path for bad in bad_files}
    make_repository(into, refs)
    _link_packs(git_dir / "objects/pack", bad, into / "objects/pack")
    for directory in (git_dir / "objects").glob("[0-9a-f][0-9a-f]"):
        _link_loose(directory, bad, into / "objects" / directory.name)


def make_repository(path: Path, refs: Mapping[str, str] | None = None) -> None:
    """An empty repository, with refs to objects that are to come."""
    (path / "objects/pack").mkdir(parents=True)
    write_skeleton(path, dict(refs or {}), None)


def _link_packs(source: Path, bad: Collection[str], target: Path) -> None:
    """Packs whose index and bytes are both good; the rest is for salvage."""
    for index in source.glob("pack-*.idx"):
        pack = index.with_suffix(".pack")
        if not {f"objects/pack/{index.name}", f"objects/pack/{pack.name}"} & set(bad):
            os.link(pack, target / pack.name)
            os.link(index, target / index.name)


def _link_loose(source: Path, bad: Collection[str], target: Path) -> None:
    """A directory without a bad file is linked as a whole: nothing is written into it."""
    names = [f"objects/{source.name}/{name}" for name in os.listdir(source)]
    if not any(name in bad for name in names):
        target.symlink_to(source)
        return
    target.mkdir()
    for name in names:
        if name not in bad:
            os.link(source.parent.parent / name, target / Path(name).name)


def damaged_packs(git_dir: Path, bad_files: Collection[BadFile]) -> list[Path]:
    """Packs that are there and cannot be used as they are, because of themselves or of their index."""
    stems = {Path(bad.path).stem for bad in bad_files if bad.kind in {FileKind.PACK, FileKind.INDEX}}
    packs = (git_dir / "objects/pack" / f"{stem}.pack" for stem in sorted(stems))
    return [pack for pack in packs if pack.exists()]


def borrow_from(repository: Path, *lenders: Path) -> None:
    """Let git in `repository` read the objects of others too."""
    info = repository / "objects/info"
    info.mkdir(exist_ok=True)
    (info / "alternates").write_text("".join(f"{lender / 'objects'}\n" for lender in lenders))
