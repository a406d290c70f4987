"""Scan a directory or an image for content, repositories and links beyond a base commit.

Every file, also in archives, is compared with every blob that the mirror has outside the closure of
the base commit. Repositories are judged by `verify.py`; files that lead elsewhere are reported.
Content that differs by a byte is not found: compiled, minified, or with other line ends.
"""

import re
import tempfile
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ..errors import MirrordError
from ..git.command import run_git_sync
from ..model import parse_commit
from ..places import ENVIRONMENT, TESTBED
from ..presence import is_dir
from ..protocol import RootLeak, RootReport
from ..quoting import decode_name
from .contents import Contents, read_archive, read_directory
from .foreign import is_foreign, own_names
from .future import FirstSeen, Future
from .images import RootFilesystem, take_out, views_of
from .leads import Lead, find_leads, resolve
from .repository import repository_at
from .verify import judge


def scan_environment(directory: Path, mirror_git_dir: Path, commit: str) -> list[RootLeak]:
    """Return what must not be in an environment for checkouts of `commit`.

    `directory` is its prefix, which must not change meanwhile. Starts git; runs in a worker. Raises
    CommitNotFoundError, InvalidCommitError.
    """
    return scan_root(directory, mirror_git_dir, commit, seen_at=ENVIRONMENT).leaks


def scan_root(root: Path, mirror: Path, base: str, *, seen_at: str | None = None) -> RootReport:
    """Judge everything in a directory or an image archive against `base`.

    Absolute paths below `seen_at` (by default the root's own path) mean files of the root. Raises
    CommitNotFoundError, InvalidCommitError, UsageError.
    """
    commit = parse_commit(base)
    with tempfile.TemporaryDirectory(prefix="mirrord-scan-") as directory:
        scratch = Path(directory)
        future = Future(mirror, commit, scratch / "mirror")
        contents = read_directory(root) if is_dir(root) else read_archive(root)
        scan = _RootScan(root, seen_at or str(root.resolve()), future, contents, scratch)
        leaks = [*scan.files(), *scan.leads(), *scan.packs(), *scan.repositories()]
        leaks = [*contents.leaks, *leaks]
        return RootReport(
            root=str(root),
            base=commit,
            sealed=all(leak.hidden for leak in leaks),
            file_count=contents.file_count,
            size_bytes=contents.byte_count,
            repositories=sorted({store or "." for stores in scan.stores for store in stores}),
            leaks=leaks,
            notes=contents.notes,
        )


class _Sighting(NamedTuple):
    """An object in a layer of a view: the content of a file, or the name of a loose object."""

    kind: str
    view: RootFilesystem
    number: int
    path: str
    label: str


_LOOSE = re.compile(r"(?:.*/)?([0-9a-f]{2})/([0-9a-f]{38})")
_PACK = re.compile(r"pack-[0-9a-f]{40}\.pack")


class Scan:
    """Compares contents, as the views of them show them, with the future."""

    def __init__(self, contents: Contents, views: list[RootFilesystem], future: Future) -> None:
        self._future, self._contents, self._views = future, contents, views
        self.stores = [view.git_directories() for view in views]

    def files(self) -> Iterator[RootLeak]:
        """Find files with later content, and later loose objects outside of repositories."""
        seen = dict[bytes, list[_Sighting]]()
        for oid, sighting in self._sightings():
            seen.setdefault(oid, []).append(sighting)
        outside = self._future.outside(seen)
        places = self._future.places(outside) if outside else {}
        own = own_names(project_of(self._future.mirror), self._future.names) if outside else set()
        foreign = set[str]()
        for oid in outside:
            commit, name = place = places.get(oid, FirstSeen())
            for kind, view, number, path, label in seen[oid]:
                if is_licence(label, place):
                    continue
                if name and is_foreign(label, name, own):
                    foreign.add(label)
                    continue
                where = f"{name} of {commit}" if commit else "an object that no ref leads to"
                hidden = not view.shows(number, path)
                detail = f"has the content of {where}"
                yield RootLeak(
                    kind=kind, path=label, detail=detail, commit=commit, name=name, hidden=hidden
                )
        if foreign:
            fact = f"{len(foreign):,} files of other projects, such as this, are in the mirror too"
            self._contents.note(min(foreign), fact)

    def _sightings(self) -> Iterator[tuple[bytes, _Sighting]]:
        for view, stores in zip(self._views, self.stores, strict=True):
            inside = tuple(f"{store}/" if store else "" for store in stores)
            for number, (_, tree) in enumerate(view.layers):
                linked = ((path, tree.files.get(to)) for path, to in tree.links.items())
                for path, oid in chain(tree.files.items(), linked):
                    if oid:
                        yield oid, _Sighting("future-file", view, number, path, path)
                    if (loose := _LOOSE.fullmatch(path)) and not path.startswith(inside):
                        named = bytes.fromhex(loose[1] + loose[2])
                        yield named, _Sighting("object", view, number, path, path)
                for archive, member, oid in tree.inside:
                    path = archive.partition("!")[0]
                    label = f"{archive}!{member}"
                    yield oid, _Sighting("future-file", view, number, path, label)
                    if loose := _LOOSE.fullmatch(member):
                        named = bytes.fromhex(loose[1] + loose[2])
                        yield named, _Sighting("object", view, number, path, label)

    def packs(self) -> Iterator[RootLeak]:
        """Find packs and bundles outside of repositories."""
        for view, stores in zip(self._views, self.stores, strict=True):
            own = [f"{store}/objects/pack/" if store else "objects/pack/" for store in stores]
            for number, (_, tree) in enumerate(view.layers):
                for path in tree.packs:
                    directory, _, name = path.rpartition("/")
                    if f"{directory}/" in own and _PACK.fullmatch(name):
                        continue
                    hidden = not view.shows(number, path.partition("!")[0])
                    fact = "a git pack or bundle, outside of a repository"
                    yield RootLeak(kind="pack", path=path, detail=fact, hidden=hidden)


_DAMAGE = {"damaged", "unreadable"}


class _RootScan(Scan):
    def __init__(
        self, root: Path, seen_at: str, future: Future, contents: Contents, scratch: Path
    ) -> None:
        super().__init__(contents, views_of(contents), future)
        self._root, self._seen_at, self._scratch = root, seen_at, scratch

    def leads(self) -> Iterator[RootLeak]:
        """Find installations and `.git` files that lead to something that was not judged."""
        project = project_of(self._future.mirror)
        for view, stores in zip(self._views, self.stores, strict=True):
            for number, (_, tree) in enumerate(view.layers):
                for path, text in tree.texts.items():
                    for lead in find_leads(path, text, project):
                        if not self._is_known(lead, path, view, stores):
                            fact = " ".join(filter(None, [lead.fact, lead.target]))
                            hidden = not view.shows(number, path)
                            yield RootLeak(kind=lead.kind, path=path, detail=fact, hidden=hidden)

    def _is_known(
        self, lead: Lead, path: str, view: RootFilesystem, stores: Collection[str]
    ) -> bool:
        """Return whether a lead goes to the checkout, into the root, or to another project."""
        if lead.target is not None:
            if f"{lead.target}/".startswith(f"{TESTBED}/") and lead.kind == "editable":
                return True
            target = resolve(path, lead.target, self._seen_at)
            if lead.kind == "repository":
                return target is not None and any(
                    f"{target}/".startswith(f"{store}/") for store in stores
                )
            return target is not None and view.has(target)
        oid = bytes.fromhex(lead.commit or "")
        return oid in self._future.past or not (lead.is_own or self._future.outside([oid]))

    def repositories(self) -> Iterator[RootLeak]:
        """Judge each repository; of other projects' report only damage."""
        for number, (view, stores) in enumerate(zip(self._views, self.stores, strict=True)):
            visible = [store for store, is_seen in stores.items() if is_seen]
            for store in stores.keys() - visible:
                fact = "a repository, which a later layer removes"
                yield RootLeak(kind="repository", path=store, detail=fact, hidden=True)
            top = self._root
            if not is_dir(top) and visible:
                top = self._scratch / f"image{number}"
                yield from take_out(self._root, view, visible, top)
            for store in visible:
                yield from self._judge(top, store)

    def _judge(self, top: Path, store: str) -> Iterator[RootLeak]:
        future, path = self._future, store or "."
        try:
            repository = repository_at(top / store, top)
            judged = judge(repository, future.base, future.mirror, future.closure)
        except MirrordError as error:
            yield RootLeak(kind="unreadable", path=path, detail=error.message)
            return
        leaks = judged.report.leaks
        if not self._is_related(judged.objects):
            self._contents.note(path, "a repository of another project")
            leaks = [leak for leak in leaks if leak.kind in _DAMAGE]
        yield from (RootLeak(kind=leak.kind, path=path, detail=leak.detail) for leak in leaks)

    def _is_related(self, objects: set[bytes]) -> bool:
        """Return whether a repository has a commit of the base's past, or later objects."""
        if objects & self._future.past:
            return True
        outside = self._future.outside(objects)
        if not outside or set(outside.values()) != {"blob"}:
            return bool(outside)
        return not all(
            is_licence("licence", place) for place in self._future.places(outside).values()
        )


_LICENCE = re.compile(r"(?:.*/)?(?:(?:un)?licen[cs]e|copying|notice|authors)[^/]*", re.IGNORECASE)


def is_licence(path: str, place: FirstSeen) -> bool:
    """Return whether both names are of licences and the like, which many projects share."""
    return bool(_LICENCE.fullmatch(path) and place.name and _LICENCE.fullmatch(place.name))


def project_of(mirror: Path) -> str:
    """Return the repository's name without its owner, from the mirror's name or remote URL."""
    if "__" in mirror.name:
        return mirror.name.partition("__")[2]
    words = ("config", "--get", "remote.origin.url")
    printed = run_git_sync(*words, git_dir=mirror, ok=(0, 1), doing="read its configuration").stdout
    url = decode_name(printed).strip() or mirror.name
    return url.rstrip("/").rpartition("/")[2].removesuffix(".git")
