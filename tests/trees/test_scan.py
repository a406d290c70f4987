"""A scan finds whatever a checkout's user did, and is misled by nothing that they can forge."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from gitrepos import Upstream, git
from trees import awkward, contents, record_control

from mirrord.host.files import open_directory, opened
from mirrord.host.processes import ActingAs
from mirrord.host.trash import TrashDirectory
from mirrord.trees.manifest import Entries, Manifest, clock_ns
from mirrord.trees.reader import TreeReader
from mirrord.trees.scan import ScanResult, scan
from mirrord.trees.tree import materialise, repair

OWNER = (1234, 1234)

pytestmark = pytest.mark.root


class Checkout:
    """A tree of an ordinary user's with a `.git`, recorded long enough ago that nothing is racy."""

    def __init__(self, upstream: Upstream, commit: str, root: Path) -> None:
        self.upstream, self.root = upstream, root
        manifest = materialise(upstream.path / ".git", commit, root, owner=OWNER)
        git(root, "init", "-q")
        (root / ".git/index").write_bytes(b"an index")
        self.manifest = settle(record_control(root, manifest))

    def scan(self, *, rehash: bool | None = None) -> ScanResult:
        return scan(self.root, self.manifest, rehash=rehash)

    def repair(self) -> Manifest:
        with closing(TrashDirectory(self.root.parent / ".trash-1")) as graves:
            return repair(
                self.upstream.path / ".git", self.manifest, self.scan(), self.root, graves
            )


def settle(manifest: Manifest) -> Manifest:
    return manifest.settled(time.time_ns() + 10**9)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> tuple[Upstream, str]:
    """Built once: a scan does not change it."""
    upstream = Upstream(tmp_path_factory.mktemp("scan") / "upstream")
    return upstream, awkward(upstream)[0]


@pytest.fixture
def checkout(upstream: tuple[Upstream, str], tmp_path: Path) -> Checkout:
    return Checkout(*upstream, tmp_path / "checkout")


def test_an_untouched_checkout_is_proven_by_lstat_alone(checkout: Checkout) -> None:
    """Nothing differs, nothing is read."""
    found = checkout.scan()
    assert found.is_empty
    assert found.hashed == 0
    assert found.looked_at == len(checkout.manifest.files) + len(checkout.manifest.control) - 1


def test_nothing_is_believed_of_another_boot(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut can leave a file with its whole stat and other bytes: here one whose record is of other bytes."""
    path, entry = next(
        (path, entry) for path, entry in checkout.manifest.files.items() if stat.S_ISREG(entry.mode)
    )
    other = entry._replace(content=bytes(20))
    files = Entries({**checkout.manifest.files.decoded(), path: other})
    replace(checkout.manifest, files=files).save(tmp_path / "manifest")
    checkout.manifest = Manifest.load(tmp_path / "manifest")
    assert checkout.scan().is_empty
    monkeypatch.setattr("mirrord.trees.manifest.boot_id", lambda: "another")
    checkout.manifest = Manifest.load(tmp_path / "manifest")
    found = checkout.scan()
    assert (found.modified, found.hashed > 1) == ([path], True)


def test_reading_changes_nothing(checkout: Checkout) -> None:
    """A user who only looks leaves a clean checkout."""
    contents(checkout.root)
    assert checkout.scan().is_empty


def test_a_directory_with_only_another_stat_is_proven(checkout: Checkout) -> None:
    """A directory in which a file came and went is no difference; its new stat is noted for the next time."""
    (checkout.root / "turns/came").touch()
    (checkout.root / "turns/came").unlink()
    found = checkout.scan()
    assert found.is_empty
    assert list(found.proven) == [b"turns"]


def test_whole_seconds_prove_less(checkout: Checkout) -> None:
    """Where a file system keeps whole seconds only, a file is too young for longer."""
    coarse = {
        path: entry._replace(ctime_ns=entry.ctime_ns // 10**9 * 10**9)
        for path, entry in checkout.manifest.files.items()
    }
    assert checkout.manifest.racy_from_ns == checkout.manifest.recorded_ns
    assert (
        replace(checkout.manifest, files=Entries(coarse)).racy_from_ns
        <= checkout.manifest.recorded_ns - 2 * 10**9
    )


def test_no_change_is_older_than_the_clock_before_it(tmp_path: Path) -> None:
    """The premise of scans: the kernel stamps ctimes with the clock that `clock_ns` reads, or a finer one."""
    file = tmp_path / "file"
    for _ in range(2000):
        before_ns = clock_ns()
        file.write_bytes(b"")
        assert file.stat().st_ctime_ns >= before_ns


def test_a_rehash_reads_every_file(checkout: Checkout) -> None:
    """Root can set the clock, so root's files are read."""
    found = checkout.scan(rehash=True)
    assert found.is_empty
    assert found.hashed > 20


def test_a_file_of_the_same_tick_is_read(checkout: Checkout) -> None:
    """A racy file's stat proves nothing; one that is clean stops being racy once the scan is recorded."""
    racy = checkout.manifest.settled(checkout.manifest.files[b"plain.txt"].ctime_ns)
    assert scan(checkout.root, racy).hashed > 0
    assert scan(checkout.root, racy.settled(time.time_ns() + 10**9)).hashed == 0


def forge_content(root: Path) -> None:
    path = root / "plain.txt"
    was = path.stat()
    path.write_text("plaim\n")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def replace_by_copy(root: Path) -> None:
    shutil.copy2(root / "plain.txt", root / "copy")
    os.rename(root / "copy", root / "plain.txt")


def swap_files(root: Path) -> None:
    os.rename(root / "plain.txt", root / "aside")
    os.rename(root / "run.sh", root / "plain.txt")
    os.rename(root / "aside", root / "run.sh")


def hard_link(root: Path) -> None:
    os.link(root / "plain.txt", root.parent / "outside")


def nested_repository(root: Path) -> None:
    (root / "nested").mkdir()
    git(root / "nested", "init", "-q")


def bind_socket(root: Path) -> None:
    here = os.open(root, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/socket")
    os.close(here)


def lock_and_change(root: Path) -> None:
    (root / "plain.txt").write_text("other")
    os.system(f"chattr +i {root}/plain.txt; chattr +a {root}/case")


def chown_away(root: Path) -> None:
    os.chown(root / "plain.txt", 0, 0)
    os.chown(root / "case", 0, 0)
    os.chmod(root / "case", 0o700)


def set_attribute(root: Path) -> None:
    os.setxattr(root / "case", "user.note", b"x")
    os.setxattr(root / "run.sh", "user.note", b"x")


def move_behind_link(root: Path) -> None:
    """Every path below still leads to the file it led to."""
    os.rename(root / "turns", root / "aside")
    (root / "turns").symlink_to("aside")


def hide_name(root: Path) -> None:
    was = (root / "turns").stat()
    (root / "turns/hidden").touch()
    os.utime(root / "turns", ns=(was.st_atime_ns, was.st_mtime_ns))


def swap_directories(root: Path) -> None:
    os.rename(root / "Case", root / "aside")
    os.rename(root / "case", root / "Case")
    os.rename(root / "aside", root / "case")


DEEDS: dict[str, Callable[[Path], object]] = {
    "content with a forged mtime": forge_content,
    "a copy with the same stat": replace_by_copy,
    "two files swapped": swap_files,
    "a hard link to the outside": hard_link,
    "a directory moved behind a link": move_behind_link,
    "a name in a directory with forged times": hide_name,
    "two directories swapped": swap_directories,
    "a file deleted": lambda root: (root / "plain.txt").unlink(),
    "a directory deleted": lambda root: shutil.rmtree(root / "deep"),
    "the mode of a file": lambda root: (root / "plain.txt").chmod(0o600),
    "the mode of a directory": lambda root: (root / "case").chmod(0o2777),
    "setuid": lambda root: (root / "run.sh").chmod(0o4755),
    "mode 000 file": lambda root: (root / "plain.txt").chmod(0),
    "mode 000 directory": lambda root: (root / "case").chmod(0),
    "the mode of the root": lambda root: root.chmod(0o777),
    "an ignored file": lambda root: (root / "build.o").touch(),
    "an empty directory": lambda root: (root / "turns/new").mkdir(),
    "a file in a submodule": lambda root: (root / "modules/one/planted").touch(),
    "a nested repository": nested_repository,
    "a pipe": lambda root: os.mkfifo(root / "pipe"),
    "a pipe in place of a file": lambda root: (
        (root / "plain.txt").unlink(),
        os.mkfifo(root / "plain.txt"),
    ),
    "a socket": bind_socket,
    "a device in place of a file": lambda root: (
        (root / "empty").unlink(),
        os.mknod(root / "empty", stat.S_IFCHR, 0x0103),
    ),
    "a link in place of a file": lambda root: (
        (root / "empty").unlink(),
        (root / "empty").symlink_to("/etc/passwd"),
    ),
    "a link in place of a directory": lambda root: (
        shutil.rmtree(root / "case"),
        (root / "case").symlink_to("/etc"),
    ),
    "a link that points elsewhere": lambda root: (
        (root / "dangling").unlink(),
        (root / "dangling").symlink_to("plain.txt"),
    ),
    "a directory in place of a file": lambda root: (
        (root / "empty").unlink(),
        (root / "empty").mkdir(),
    ),
    "a file in place of a directory": lambda root: (
        shutil.rmtree(root / "case"),
        (root / "case").touch(),
    ),
    "a file in place of a submodule": lambda root: (
        (root / "modules/one").rmdir(),
        (root / "modules/one").touch(),
    ),
    "immutable and append-only": lock_and_change,
    "owned by another": chown_away,
    "extended attributes": set_attribute,
    "a name of bytes": lambda root: open(os.fsencode(root) + b"/\xff\n", "w").close(),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_every_deed_in_the_tree_is_found_and_undone(checkout: Checkout, deed: str) -> None:
    """A scan says something differs, a repair brings the tree back, and what was outside stays as it was."""
    DEEDS[deed](checkout.root)
    found = checkout.scan()
    assert found.in_tree()
    mended = checkout.repair()
    again = scan(checkout.root, mended)
    assert again.is_empty
    assert scan(checkout.root, mended, rehash=True).is_empty


CONTROL: dict[str, Callable[[Path], object]] = {
    "a hook": lambda git: (git / "hooks/pre-commit").write_text("#!/bin/sh\n"),
    "config": lambda git: (git / "config").write_text("[core]\n\tfsmonitor = evil\n"),
    "a ref": lambda git: (git / "refs/heads/other").write_text("1" * 40),
    "stash": lambda git: (git / "refs/stash").write_text("1" * 40),
    "attributes": lambda git: (git / "info/attributes").write_text("* filter=evil\n"),
    "sparse checkout": lambda git: (git / "info/sparse-checkout").write_text("/*\n"),
    "a reflog": lambda git: ((git / "logs").mkdir(), (git / "logs/HEAD").write_text("x")),
    "a merge": lambda git: (git / "MERGE_HEAD").write_text("1" * 40),
    "objects": lambda git: (
        (git / "objects/ab").mkdir(),
        (git / "objects/ab" / ("c" * 38)).write_bytes(b"x"),
    ),
    "alternates": lambda git: (git / "objects/info/alternates").write_text("/elsewhere\n"),
    "the index": lambda git: (git / "index").write_bytes(b"an indeX"),
    "HEAD": lambda git: (git / "HEAD").unlink(),
    "replace refs": lambda git: (git / "refs/replace").mkdir(),
    "a link for .git": lambda git: (
        os.rename(git, git.parent.parent / "moved"),
        git.symlink_to("../moved"),
    ),
    "no .git": shutil.rmtree,
}


def in_control(found: ScanResult) -> list[bytes]:
    """All that differs below `.git`."""
    return sorted({*found.modified, *found.missing, *found.extra} - set(found.in_tree()))


@pytest.mark.parametrize("deed", CONTROL)
def test_every_deed_below_git_is_found(checkout: Checkout, deed: str) -> None:
    """Control files are just more of the manifest; they do not count as changes of the tree."""
    CONTROL[deed](checkout.root / ".git")
    found = checkout.scan()
    assert in_control(found)
    assert not [path for path in found.in_tree() if path]


def test_an_extra_directory_is_listed_whole_on_demand(checkout: Checkout) -> None:
    """A scan names it once; a patch wants what is in it. Links are not followed."""
    (checkout.root / "turns/new/deep").mkdir(parents=True)
    (checkout.root / "turns/new/deep/file").touch()
    (checkout.root / "turns/new/link").symlink_to("/etc")
    assert checkout.scan().extra == [b"turns/new"]
    with opened(open_directory(checkout.root)) as root, TreeReader(root, ActingAs(None)) as reader:
        assert [path for path, _ in reader.iter_below(b"turns/new")] == [
            b"turns/new", b"turns/new/deep", b"turns/new/deep/file", b"turns/new/link",
        ]  # fmt: skip
