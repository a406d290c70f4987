"""First and later syncs of an upstream that has many refs and a damaged object that a quarter of
them reach.
"""

from __future__ import annotations

import copy
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from forge import Forge, serving
from gitrepos import Upstream, git

from mirrord.config import Settings
from mirrord.git.command import Git
from mirrord.host.trash import Trash
from mirrord.mirrors.quarantine import Quarantine
from mirrord.mirrors.repository import INCOMING, KEPT, Repository
from mirrord.mirrors.sync import sync
from mirrord.mirrors.upstreams.credentials import Credentials
from mirrord.mirrors.upstreams.fetching import Fetcher
from mirrord.mirrors.upstreams.upstream import parse_upstream
from mirrord.model import MirrorName
from mirrord.protocol import Synced

pytestmark = pytest.mark.slow

COMMITS = 30
REFS = COMMITS + COMMITS // 3 + 1
STRUCK = 22
"""The commit whose objects are damaged; everything on it reaches them."""


@dataclass
class Case:
    """An upstream before and after its damage, and the refs that it cannot give."""

    whole: Upstream
    path: Path
    lost: set[str]


def build(root: Path) -> Upstream:
    """A tag on every commit, and a branch with a commit of its own on every third."""
    upstream = Upstream(root)
    for n in range(COMMITS):
        files: dict[str, str | bytes | None] = {
            "README": f"{n}\n",
            "src/deep/mod.py": f"value = {n // 3}\n",
        }
        if n == STRUCK:
            files |= {"src/deep/new/struck.py": "struck = True\n", "src/struck.py": "struck too\n"}
        upstream.commit(files)
        upstream.git("tag", *(("-a", "-m", "a tag") if n % 2 else ()), f"v{n}")
    for n in range(0, COMMITS, 3):
        upstream.git("checkout", "--quiet", "-b", f"topic{n}", f"v{n}")
        upstream.commit({f"topic{n}": f"{n}\n"})
    upstream.git("checkout", "--quiet", "main")
    return upstream


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    upstream = build(tmp_path_factory.mktemp("whole") / "upstream")
    upstream.git("repack", "-adq")
    return upstream


def loose(path: Path) -> Path:
    """A copy of a repository with every object a file."""
    packs = list((path / "objects/pack").iterdir())
    streams = [file.read_bytes() for file in packs if file.suffix == ".pack"]
    for file in packs:
        file.unlink()
    for stream in streams:
        git(path, "unpack-objects", "-q", stdin=stream)
    return path


def named(path: Path, rev: str) -> Path:
    oid = git(path, "rev-parse", rev)
    return path / "objects" / oid[:2] / oid[2:]


def drop(rev: str) -> Callable[[Path], None]:
    return lambda path: named(path, rev).unlink()


def corrupt(path: Path) -> None:
    """Under the right name, content that is another's."""
    file = named(path, f"v{STRUCK}:src/struck.py")
    file.chmod(0o644)
    file.write_bytes(zlib.compress(b"blob 6\0other\n"))


def make_hostile(path: Path) -> None:
    """Every ref on the struck commit gets one more, on a commit whose header has a NUL."""
    date = {"GIT_AUTHOR_DATE": "1700000000 +0000", "GIT_COMMITTER_DATE": "1700000000 +0000"}
    good = git(path, "rev-parse", f"v{STRUCK}^{{tree}}")
    parent = git(path, "rev-parse", f"v{STRUCK}^{{commit}}")
    who = "A\0 <a@example.com> 1700000000 +0000"
    raw = f"tree {good}\nparent {parent}\nauthor {who}\ncommitter {who}\n\nhostile\n".encode()
    commit = git(path, "hash-object", "-t", "commit", "-w", "--stdin", "--literally", stdin=raw)
    for ref in reaching(path, f"v{STRUCK}"):
        git(
            path,
            "update-ref",
            ref,
            git(path, "commit-tree", good, "-p", commit, "-m", ref, env=date),
        )


def reaching(path: Path, rev: str) -> set[str]:
    return set(git(path, "for-each-ref", "--contains", rev, "--format=%(refname)").splitlines())


DAMAGES = {
    "blob": drop(f"v{STRUCK}:src/struck.py"),
    "tree": drop(f"v{STRUCK}:src/deep/new"),
    "commit": drop(f"v{STRUCK}^{{commit}}"),
    "corrupt": corrupt,
    "hostile": make_hostile,
}


@pytest.fixture
def strike(tmp_path: Path, whole: Upstream) -> Callable[[Callable[[Path], None]], Case]:
    def make(damage: Callable[[Path], None]) -> Case:
        path = tmp_path / "upstreams/damaged.git"
        shutil.copytree(whole.path / ".git", path)
        git(path, "config", "core.bare", "true")
        git(path, "config", "uploadpack.allowFilter", "true")
        lost = reaching(path, f"v{STRUCK}")
        damage(loose(path))
        return Case(whole, path, lost)

    return make


class Site:
    def __init__(self, root: Path) -> None:
        self.quarantine = Quarantine(root / "quarantine", Trash())
        self.quarantine.root.mkdir(parents=True)
        self.mirror = Repository(
            Git(home=root / "home"), MirrorName("owner", "name"), root / "mirror"
        )
        anyio.run(self.mirror.create)

    def sync(self, url: str, former: Synced | None = None, *, retry: bool = False) -> Synced:
        async def body() -> Synced:
            fetcher = Fetcher(
                self.mirror,
                parse_upstream(url),
                self.quarantine,
                timedelta(seconds=60),
                Credentials(Settings),
            )
            return await sync(
                fetcher,
                ("refs/heads/*", "refs/tags/*"),
                known_faults=former.faults if former else (),
                retry_faults=retry,
            )

        return anyio.run(body)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "state")


def asked(forge: Forge) -> int:
    """How often git came, and forget it."""
    count = sum("info/refs" in request for request in forge.requests)
    forge.requests.clear()
    return count


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_that_is_whole_arrives_in_a_few_steps(
    site: Site, tmp_path: Path, strike: Callable[[Callable[[Path], None]], Case], damage: str
) -> None:
    """A step for the refs, one that fails, one for the history, a few more. A later sync asks for
    the refs alone; and once for what was lost, if told to or a day later.
    """
    case = strike(DAMAGES[damage])
    config = (site.mirror.path / "config").read_bytes()
    with serving(tmp_path / "upstreams") as forge:
        first = site.sync(f"{forge.url}/damaged.git")
        steps = asked(forge)
        resting = site.sync(f"{forge.url}/damaged.git", first)
        resting_steps = asked(forge)
        later = site.sync(f"{forge.url}/damaged.git", resting, retry=True)
        later_steps = asked(forge)
        for fault in (aged := copy.deepcopy(resting)).faults:
            assert fault.asked_at
            object.__setattr__(fault, "asked_at", fault.asked_at - timedelta(days=1))
        site.sync(f"{forge.url}/damaged.git", aged)
        assert asked(forge) == later_steps
    assert (resting.faults, resting_steps) == (first.faults, 1)
    _must_have_all_but_the_lost(site, case, first)
    assert steps <= 20, f"{REFS} refs were asked for one by one"
    assert {fault.ref for fault in later.faults} == case.lost
    assert (later.changed, later_steps) == (False, 2)
    assert (site.mirror.path / "config").read_bytes() == config
    assert not list(site.quarantine.root.iterdir())


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_upstream_on_this_machine_needs_no_configuration(
    site: Site, strike: Callable[[Callable[[Path], None]], Case], damage: str
) -> None:
    case = strike(DAMAGES[damage])
    git(case.path, "config", "uploadpack.allowFilter", "false")
    _must_have_all_but_the_lost(site, case, site.sync(f"file://{case.path}"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_upstream_that_knows_no_filters_gives_all_that_is_whole(
    site: Site, tmp_path: Path, strike: Callable[[Callable[[Path], None]], Case], damage: str
) -> None:
    """In more steps, but no more than there are refs."""
    case = strike(DAMAGES[damage])
    git(case.path, "config", "uploadpack.allowFilter", "false")
    with serving(tmp_path / "upstreams") as forge:
        result = site.sync(f"{forge.url}/damaged.git")
        assert asked(forge) <= REFS
    _must_have_all_but_the_lost(site, case, result)


def test_refs_that_get_whole_later_arrive_then(
    site: Site, strike: Callable[[Callable[[Path], None]], Case]
) -> None:
    """And what upstream damages later stays as it was."""
    case = strike(DAMAGES["blob"])
    first = site.sync(f"file://{case.path}")
    git(case.path, "hash-object", "-w", "--stdin", stdin=b"struck too\n")
    second = site.sync(f"file://{case.path}", first, retry=True)
    assert (second.faults, second.ref_count) == ([], REFS)
    before = anyio.run(site.mirror.all_refs)
    drop(f"v{STRUCK - 1}:README")(case.path)
    for ref in sorted(case.lost):
        if ref.startswith("refs/heads/"):
            tree = git(case.path, "rev-parse", f"{ref}^{{tree}}")
            git(
                case.path,
                "update-ref",
                ref,
                git(case.path, "commit-tree", tree, "-p", ref, "-m", "newer"),
            )
    third = site.sync(f"file://{case.path}", second)
    assert third.faults == []  # the mirror has the blob, and upstream knows that
    after = anyio.run(site.mirror.all_refs)
    assert all(
        after.get(ref) == oid or ref in case.lost or ref.startswith("refs/mirrord/")
        for ref, oid in before.items()
    )


def _must_have_all_but_the_lost(site: Site, case: Case, result: Synced) -> None:
    assert {fault.ref for fault in result.faults} == case.lost
    assert all(fault.reason for fault in result.faults)
    there = {
        ref: oid
        for ref, oid in anyio.run(site.mirror.all_refs).items()
        if not ref.startswith("refs/mirrord/")
    }
    listed = git(case.path, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    assert there == {
        ref: oid for ref, oid in (line.split() for line in listed) if ref not in case.lost
    }
    git(site.mirror.path, "fsck", "--full", "--strict", "--no-dangling")
    assert not [ref for ref in there if ref.startswith((INCOMING, KEPT))]
