"""Scan a directory or an image for content, repositories and links beyond a base commit.

Every file, also in archives, is compared with every blob that the mirror has outside the closure of
the base commit. Repositories are judged by `verify.py`; files that lead elsewhere are reported.
Content that differs by a byte is not found: compiled, minified, or with other line ends.
"""

import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ..errors import CommitNotFoundError, MirrordError
from ..git.command import lines_of, run_git_sync
from ..jsontext import loads
from ..model import CommitId, parse_commit, shown
from ..places import ENVIRONMENT, TESTBED
from ..protocol import RootLeak, RootReport
from ..quoting import decode_name
from ..telemetry import masked
from .contents import Contents, read_archive, read_directory
from .images import RootFilesystem, take_out, views_of
from .repository import TIMEOUT, TRIVIAL_BYTES, borrow, locate, read_closure, repository_at
from .verify import judge

# -- what a mirror has outside of a base commit's closure ------------------------------------------
#
# Kept refs and unreachable objects count. The mirror is trusted; git reads its store through a
# directory of ours, so that a partial clone fetches nothing.

_WALK = ("rev-list", "--objects", "--missing=allow-any")


class Place(NamedTuple):
    """The first commit with an object, and its path there; None if no ref leads to it."""

    commit: str | None = None
    name: str | None = None


class Future:
    """The objects of the bare repository `mirror` outside the closure of `base`.

    `scratch` is an empty directory. Raises CommitNotFoundError if the mirror lacks the base.
    """

    def __init__(self, mirror: Path, base: CommitId, scratch: Path) -> None:
        self.mirror, self.base = mirror, base
        self._scratch = borrow(scratch, locate(mirror))
        kind, _ = self._look_up([base]).get(bytes.fromhex(base), ("missing", 0))
        if kind != "commit":
            raise CommitNotFoundError(
                f"cannot compare with {base}: {mirror} has no such commit",
                hint="sync that mirror, or name another one",
            )

    @cached_property
    def closure(self) -> set[bytes]:
        """The raw ids of the base commit's closure."""
        return read_closure(self.mirror, self.base, self._scratch)[0]

    @cached_property
    def past(self) -> set[bytes]:
        """The commits of the closure."""
        listed = run_git_sync("rev-list", self.base, git_dir=self.mirror, doing="list the past")
        return {bytes.fromhex(line) for line in listed.lines}

    @cached_property
    def names(self) -> set[str]:
        """The paths of the base commit and of the mirror's HEAD."""
        listings = (
            run_git_sync(
                "ls-tree", "-r", "-z", "--name-only", tip, git_dir=self.mirror, ok=(0, 128)
            )
            for tip in (self.base, "HEAD")
        )
        return {path for each in listings for path in os.fsdecode(each.stdout).split("\0")}

    def outside(self, ids: Iterable[bytes]) -> dict[bytes, str]:
        """Return the type of each of `ids` that is outside the closure. Ignores trivial blobs."""
        found = {
            oid: kind
            for oid, (kind, size) in self._look_up(oid.hex() for oid in ids).items()
            if kind != "blob" or size >= TRIVIAL_BYTES
        }
        return {oid: kind for oid, kind in found.items() if oid not in self.closure}

    def _look_up(self, names: Iterable[str]) -> dict[bytes, tuple[str, int]]:
        listed = run_git_sync(
            "cat-file", "--buffer", "--batch-check=%(objectname) %(objecttype) %(objectsize)",
            git_dir=self._scratch, stdin=lines_of(names), timeout=TIMEOUT, doing="look up objects",
        )  # fmt: skip
        rows = (line.split() for line in listed.lines)
        return {bytes.fromhex(row[0]): (row[1], int(row[2])) for row in rows if len(row) == 3}

    def places(self, ids: Collection[bytes]) -> dict[bytes, Place]:
        """Find where each of `ids` appears first, from the oldest commit on."""
        wanted, commit = {oid.hex().encode() for oid in ids}, None
        found = dict[bytes, Place]()
        listing = self._scratch / "listing"
        # --in-commit-order lists an object after the first commit that has it; commits have no name
        order = ("--in-commit-order", "--reverse", "--all", "--not", self.base)
        run_git_sync(
            *_WALK, *order,
            git_dir=self.mirror, stdout_path=listing, timeout=TIMEOUT, doing="walk the mirror",
        )  # fmt: skip
        with listing.open("rb") as lines:
            for line in lines:
                oid = line[:40]
                if line[40:] == b"\n":
                    commit = oid.decode()
                elif oid in wanted:
                    name = decode_name(line[41:-1])
                    found.setdefault(bytes.fromhex(oid.decode()), Place(commit, name))
        return found


# -- files of installers that lead elsewhere -------------------------------------------------------
#
# They are read as text, and never executed.

_LITERAL = re.compile(r"""["'](/[^"'\n]+)["']""")
_PATH_LINE = re.compile(r"(?!import[ \t]|#)\s*\S.*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_EDITABLE = "packages are imported from"


class Lead(NamedTuple):
    """A path that a file leads to, or the commit that was installed; `is_own`: of this project."""

    kind: str
    fact: str
    target: str | None = None
    commit: str | None = None
    is_own: bool = False


def find_leads(path: str, text: bytes, project: str) -> Iterator[Lead]:
    """Iterate where a file of a known name leads. `project` is the mirrored repository's name."""
    name, content = path.rpartition("/")[2], decode_name(text)
    if name == ".git":
        target = content.removeprefix("gitdir:").strip()
        yield Lead("repository", "its repository is at", target)
    elif name == "direct_url.json":
        yield from _direct_url(content, project)
    elif name.endswith(".py"):
        yield from (Lead("editable", _EDITABLE, target) for target in _LITERAL.findall(content))
    else:  # .pth, or .egg-link, whose second line is the path from the first to setup.py
        lines = content.splitlines()[: 1 if name.endswith(".egg-link") else None]
        paths = (line.strip() for line in lines if _PATH_LINE.match(line))
        yield from (Lead("editable", _EDITABLE, target) for target in paths)


def _direct_url(content: str, project: str) -> Iterator[Lead]:
    """PEP 610: pip and uv record an installation that is not from an index."""
    try:
        found = loads(content)
        url, facts = urlsplit(str(found["url"])), {**found.get("vcs_info", {})}
        is_editable = found.get("dir_info", {}).get("editable") is True
        is_archive = "archive_info" in found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield Lead("direct-url", "it cannot be read", is_own=True)
        return
    if is_editable:
        yield Lead("editable", _EDITABLE, unquote(url.path))
    elif facts or (is_archive and url.scheme != "file"):
        names = {part.removesuffix(".git").lower() for part in url.path.split("/")}
        commit = str(facts.get("commit_id", ""))
        fact = f"installed from {shown(masked(found['url']), 200)}"
        fact += f" at {commit}" if (known := _COMMIT.fullmatch(commit)) else ""
        yield Lead("direct-url", fact, None, commit if known else None, project.lower() in names)


def resolve(path: str, target: str, seen_at: str) -> str | None:
    """Resolve a target in the file at `path`, relative to the root; None if it is outside.

    `seen_at` is the path of the root itself.
    """
    if target.startswith("/"):
        inside = f"{target}/".startswith(f"{seen_at.rstrip('/')}/")
        found = os.path.relpath(target, seen_at) if inside else os.path.normpath(target)
        return found.lstrip("/").removeprefix(".")
    found = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return None if found.startswith("..") else found.removeprefix(".")


# -- files of other projects -----------------------------------------------------------------------
#
# Branches contain copies of other projects: vendored packages, built documentation, committed
# environments. 467 of the 10,400 files of a plain environment are in pull requests of psf/requests.

_INSTALLED = re.compile(r"(?:^|.*/)(?:site-packages|dist-packages|node_modules)/")
_COPIED = re.compile(rf"{_INSTALLED.pattern}|(?:^|.*/)(?:bin|Scripts)/[Aa]ctivate")
_SHARED = {"test", "tests", "testing", "doc", "docs", "example", "examples", "setup", "conftest"}
_MODULE = re.compile(r"(?:(?:src|lib|python)/)?([^/]+)\.py")


def own_names(project: str, paths: Collection[str]) -> set[str]:
    """Return the names by which a project is imported or its directories are called.

    They are the project's name, its top-level packages and modules.
    """
    packages = {
        path.removesuffix("/__init__.py") for path in paths if path.endswith("/__init__.py")
    }
    outer = {path for path in packages if path.rpartition("/")[0] not in packages}
    names = {path.rpartition("/")[2] for path in outer if not _SHARED & {*path.split("/")}}
    names |= {found[1] for path in paths if (found := _MODULE.fullmatch(path))}
    return {project.lower(), project.lower().replace("-", "_"), *names} - _SHARED


def is_foreign(path: str, place: str, own: Collection[str]) -> bool:
    """Return whether a file is another project's, of which the mirror has a copy at `place`.

    No component of its path may be a name of the project. The mirror's copy must be in an
    environment too, or have the same file name while this file is installed or in an archive.
    """
    *_, installed = _INSTALLED.split(path.rpartition("!")[2])
    if any(part.removesuffix(".py") in own for part in installed.split("/")):
        return False
    is_alike = installed.rpartition("/")[2] == place.rpartition("/")[2]
    return bool(_COPIED.match(place)) or (installed != path and is_alike)


# -- the scan --------------------------------------------------------------------------------------

_LICENCE = re.compile(r"(?:.*/)?(?:(?:un)?licen[cs]e|copying|notice|authors)[^/]*", re.IGNORECASE)
_DAMAGE = {"damaged", "unreadable"}
_LOOSE = re.compile(r"(?:.*/)?([0-9a-f]{2})/([0-9a-f]{38})")
_PACK = re.compile(r"pack-[0-9a-f]{40}\.pack")


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
        contents = read_directory(root) if root.is_dir() else read_archive(root)
        scan = _Scan(root, seen_at or str(root.resolve()), future, contents, scratch)
        leaks = [*scan.files(), *scan.leads(), *scan.packs(), *scan.repositories()]
        leaks = [*contents.leaks, *leaks]
        return RootReport(
            root=str(root),
            base=commit,
            sealed=all(leak.hidden for leak in leaks),
            file_count=contents.file_count,
            size_bytes=contents.byte_count,
            repositories=sorted({at or "." for found in scan.stores for at in found}),
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


class _Scan:
    def __init__(
        self, root: Path, seen_at: str, future: Future, contents: Contents, scratch: Path
    ) -> None:
        self._root, self._seen_at, self._scratch = root, seen_at, scratch
        self._future, self._contents = future, contents
        self._views = views_of(contents)
        self.stores = [view.git_directories() for view in self._views]

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
            commit, name = place = places.get(oid, Place())
            for kind, view, number, path, label in seen[oid]:
                if _is_licence(label, place):
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
            inside = tuple(f"{at}/" if at else "" for at in stores)
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
            at = resolve(path, lead.target, self._seen_at)
            if lead.kind == "repository":
                return at is not None and any(f"{at}/".startswith(f"{each}/") for each in stores)
            return at is not None and view.has(at)
        oid = bytes.fromhex(lead.commit or "")
        return oid in self._future.past or not (lead.is_own or self._future.outside([oid]))

    def packs(self) -> Iterator[RootLeak]:
        """Find packs and bundles outside of repositories."""
        for view, stores in zip(self._views, self.stores, strict=True):
            own = [f"{at}/objects/pack/" if at else "objects/pack/" for at in stores]
            for number, (_, tree) in enumerate(view.layers):
                for path in tree.packs:
                    directory, _, name = path.rpartition("/")
                    if f"{directory}/" in own and _PACK.fullmatch(name):
                        continue
                    hidden = not view.shows(number, path.partition("!")[0])
                    fact = "a git pack or bundle, outside of a repository"
                    yield RootLeak(kind="pack", path=path, detail=fact, hidden=hidden)

    def repositories(self) -> Iterator[RootLeak]:
        """Judge each repository; of other projects' report only damage."""
        for number, (view, stores) in enumerate(zip(self._views, self.stores, strict=True)):
            visible = [at for at, is_seen in stores.items() if is_seen]
            for at in stores.keys() - visible:
                fact = "a repository, which a later layer removes"
                yield RootLeak(kind="repository", path=at, detail=fact, hidden=True)
            top = self._root
            if not top.is_dir() and visible:
                top = self._scratch / f"image{number}"
                yield from take_out(self._root, view, visible, top)
            for at in visible:
                yield from self._judge(top, at)

    def _judge(self, top: Path, at: str) -> Iterator[RootLeak]:
        future, path = self._future, at or "."
        try:
            repository = repository_at(top / at, top)
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
            _is_licence("licence", place) for place in self._future.places(outside).values()
        )


def _is_licence(path: str, place: Place) -> bool:
    """Return whether both names are of licences and the like, which many projects share."""
    return bool(_LICENCE.fullmatch(path) and place.name and _LICENCE.fullmatch(place.name))


def project_of(mirror: Path) -> str:
    """Return the repository's name without its owner, from the mirror's name or remote URL."""
    if "__" in mirror.name:
        return mirror.name.partition("__")[2]
    words = ("config", "--get", "remote.origin.url")
    found = run_git_sync(*words, git_dir=mirror, ok=(0, 1), doing="read its configuration").stdout
    url = decode_name(found).strip() or mirror.name
    return url.rstrip("/").rpartition("/")[2].removesuffix(".git")
