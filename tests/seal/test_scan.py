"""Roots: directories, tars and images with later content, links to it, or hostile content."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from gitrepos import Upstream, git

from mirrord.errors import CommitNotFoundError, UsageError
from mirrord.places import ENVIRONMENT
from mirrord.protocol import RootReport
from mirrord.seal import contents
from mirrord.seal.scan import scan_environment, scan_root


def text(subject: str) -> str:
    return f"# the {subject} of this project, which is long enough to say something\n" * 3


OLD, BASE, FIXED, KEPT, LOST = map(text, ("old core", "base core", "fixed core", "kept", "lost"))
SIX, LICENCE = text("copy of six"), text("licence that everybody uses")


class World(NamedTuple):
    mirror: Path
    base: str
    fix: str
    clone: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A mirror with a fix after the base commit, a kept ref, a lost blob, a committed environment."""
    top = tmp_path_factory.mktemp("scan")
    upstream = Upstream(top / "acme/widget")
    upstream.commit({"widget/__init__.py": "", "widget/core.py": OLD, "setup.py": text("set-up")})
    base = upstream.commit({"widget/core.py": BASE})
    fix = upstream.commit({"widget/core.py": FIXED, "LICENSE": LICENCE, "short": "x = 1\n"})
    upstream.git("branch", "careless")
    upstream.commit({"venv/lib/python3/site-packages/six.py": SIX})
    mirror = top / "acme__widget"
    git(top, "clone", "--quiet", "--mirror", upstream.url, str(mirror))
    lost = upstream.commit({"widget/kept.py": KEPT})
    upstream.git("push", "--quiet", str(mirror), f"{lost}:refs/mirrord/kept/1")
    git(mirror, "hash-object", "-w", "--stdin", stdin=LOST.encode())
    git(top, "clone", "--quiet", upstream.url, "clone")
    return World(mirror, base, fix, top / "clone")


def write(top: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        file = top / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return top


def scan(world: World, root: Path) -> RootReport:
    report = scan_root(root, world.mirror, world.base)
    assert report.sealed == all(leak.hidden for leak in report.leaks)
    return report


def found(report: RootReport) -> set[tuple[str, str]]:
    return {(leak.kind, leak.path) for leak in report.leaks}


def as_tar(files: dict[str, str | bytes], mode: str = "w") -> bytes:
    """A tar of files; a name that ends in / is a directory, content that begins with -> a link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, given in files.items():
            data = given.encode() if isinstance(given, str) else given
            info = tarfile.TarInfo(name.rstrip("/"))
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            elif data.startswith(b"->"):
                info.type, info.linkname, data = tarfile.SYMTYPE, data[2:].decode(), b""
            elif data.startswith(b"=="):
                info.type, info.linkname, data = tarfile.LNKTYPE, data[2:].decode(), b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def as_zip(files: dict[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


# -- directories -----------------------------------------------------------------------------------


def test_later_content_is_found_everywhere(world: World, tmp_path: Path) -> None:
    """Of a later commit, a kept ref, no ref; with the first commit that has it."""
    site = "lib/python3.11/site-packages"
    root = write(
        tmp_path / "root",
        {
            f"{site}/widget/core.py": FIXED,
            "notes/a": KEPT,
            "b": LOST,
            f"{site}/widget/old.py": OLD,
            "base.py": BASE,
            "short": "x = 1\n",
            "empty": "",
            "unknown": text("agent's own work"),
        },
    )
    report = scan(world, root)
    assert found(report) == {
        ("future-file", f"{site}/widget/core.py"),
        ("future-file", "notes/a"),
        ("future-file", "b"),
    }
    fixed = next(leak for leak in report.leaks if leak.path.endswith("core.py"))
    assert (fixed.commit, fixed.name) == (world.fix, "widget/core.py")
    assert next(leak for leak in report.leaks if leak.path == "b").commit is None
    assert report.file_count == 8


def test_licences_and_files_of_other_packages_are_no_leaks(world: World, tmp_path: Path) -> None:
    """A mirror has copies of them, as in an environment committed to a branch."""
    site = "lib/python3.11/site-packages"
    root = write(tmp_path / "root", {f"{site}/six.py": SIX, "doc/LICENSE.txt": LICENCE})
    report = scan(world, root)
    assert report.leaks == []
    assert ["of other projects" in note for note in report.notes] == [True]
    disguised = write(tmp_path / "disguised", {f"{site}/six.py": FIXED, "doc/fix.txt": LICENCE})
    assert len(scan(world, disguised).leaks) == 2


def test_members_of_wheels_sdists_and_caches_are_files(world: World, tmp_path: Path) -> None:
    wheel = as_zip({"widget/core.py": FIXED, "widget/old.py": OLD})
    sdist = as_tar({"widget-2.0/src/widget/core.py": FIXED}, "w:gz")
    root = write(
        tmp_path / "root",
        {
            "wheels/widget-2.0-py3-none-any.whl": wheel,
            "widget-2.0.tar.gz": sdist,
            "root/.cache/pip/http-v2/1/2/3.body": wheel,
            "root/.cache/pip/http/1/2": b"cc=4,\x82\xa4body" + wheel + b"\xa7headers",
            "deep.tar": as_tar({"dist/w.whl": wheel}),
            "plain.py.gz": gzip.compress(FIXED.encode()),
        },
    )
    assert found(scan(world, root)) == {
        ("future-file", "wheels/widget-2.0-py3-none-any.whl!widget/core.py"),
        ("future-file", "widget-2.0.tar.gz!widget-2.0/src/widget/core.py"),
        ("future-file", "root/.cache/pip/http-v2/1/2/3.body!widget/core.py"),
        ("future-file", "root/.cache/pip/http/1/2!widget/core.py"),
        ("future-file", "deep.tar!dist/w.whl!widget/core.py"),
    }


def test_installs_that_lead_elsewhere_are_leaks(world: World, tmp_path: Path) -> None:
    """Except to the checkout, into the scanned root, or to an earlier commit."""
    direct = "site-packages/w-1.dist-info/direct_url.json"
    url = "https://forge.example/other/Widget.git"
    root = write(
        tmp_path / "root",
        {
            "site-packages/a.pth": f"import sys\n# no\n/testbed/src\n{tmp_path}/root/src\n../src\n/src\n",
            "site-packages/b.pth": "/elsewhere/widget\n",
            "site-packages/c.egg-link": "/home/me/widget\n../",
            "site-packages/__editable___widget_finder.py": "MAPPING = {'widget': '/opt/w'}\n",
            "src/x.py": "pass\n",
            direct: json.dumps({"url": url, "vcs_info": {"vcs": "git", "commit_id": world.fix}}),
            f"1/{direct}": json.dumps({"url": url, "vcs_info": {"commit_id": world.base}}),
            f"2/{direct}": json.dumps({"url": "https://x/y", "vcs_info": {"commit_id": "1" * 40}}),
            f"3/{direct}": json.dumps({"url": "https://x/y", "vcs_info": {"commit_id": world.fix}}),
            f"4/{direct}": json.dumps({"url": "file:///w", "dir_info": {"editable": True}}),
            f"5/{direct}": json.dumps({"url": "file:///testbed", "dir_info": {"editable": True}}),
            f"6/{direct}": "[" * 60_000,
            "nowhere/.git": "gitdir: /srv/widget/.git/worktrees/x\n",
        },
    )
    assert found(scan(world, root)) == {
        ("editable", "site-packages/b.pth"),
        ("editable", "site-packages/c.egg-link"),
        ("editable", "site-packages/__editable___widget_finder.py"),
        ("direct-url", direct),
        ("direct-url", f"3/{direct}"),
        ("editable", f"4/{direct}"),
        ("direct-url", f"6/{direct}"),
        ("repository", "nowhere/.git"),
    }


def test_an_environment_is_judged_at_its_fixed_path(world: World, tmp_path: Path) -> None:
    line = f"{ENVIRONMENT}/src/other\n"
    root = write(tmp_path / "e", {"lib/a.pth": line, "src/other/x.py": "pass\n"})
    assert scan_environment(root, world.mirror, world.base) == []
    write(root, {"lib/widget/core.py": FIXED})
    assert [leak.kind for leak in scan_environment(root, world.mirror, world.base)] == [
        "future-file"
    ]
    with pytest.raises(CommitNotFoundError):
        scan_environment(root, world.mirror, "1" * 40)


def test_repositories_are_judged_except_those_of_other_projects(
    world: World, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(world.clone, root / "testbed")
    git(root, "clone", "--quiet", "--bare", "testbed", "srv/w.git")
    git(root / "testbed", "worktree", "add", "--quiet", "--detach", "../tree", world.base)
    other = Upstream(root / "opt/pyenv")
    other.commit({"README": text("other project"), "LICENSE": LICENCE})
    bundle = root / "x.bundle"
    git(root / "testbed", "bundle", "create", "--quiet", str(bundle), "main")
    report = scan(world, root)
    assert set(report.repositories) == {"testbed/.git", "srv/w.git", "opt/pyenv/.git"}
    kinds = {path: {k for k, at in found(report) if at == path} for _, path in found(report)}
    assert {"object", "ref", "remote", "shared-store"} <= kinds["testbed/.git"]
    assert {"object", "ref"} <= kinds["srv/w.git"]
    assert kinds["x.bundle"] == {"pack"}
    assert "opt/pyenv/.git" not in kinds
    assert "'opt/pyenv/.git': a repository of another project" in report.notes
    assert ("repository", "tree/.git") not in found(report)


def test_a_sealed_repository_and_its_tree_are_sealed(world: World, tmp_path: Path) -> None:
    root = tmp_path / "root"
    git(tmp_path, "init", "--quiet", "--template=", "root/testbed")
    git(root / "testbed", "fetch", "--quiet", str(world.clone), world.base)
    git(root / "testbed", "reset", "--quiet", "--hard", world.base)
    for name in ("FETCH_HEAD", "ORIG_HEAD", "logs"):
        path = root / "testbed/.git" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    report = scan(world, root)
    assert (report.leaks, report.sealed, report.repositories) == ([], True, ["testbed/.git"])


def test_nothing_outside_of_the_root_is_read(world: World, tmp_path: Path) -> None:
    """Links, alternates and pointers lead out of it; devices and pipes do not block."""
    root = write(tmp_path / "root", {"a/keep": "x"})
    write(tmp_path / "outside", {"core.py": FIXED})
    (root / "a/out").symlink_to(tmp_path / "outside")
    (root / "a/core.py").symlink_to(tmp_path / "outside/core.py")
    os.mkfifo(root / "a/pipe")
    (root / "linked").mkdir()
    (root / "linked/.git").symlink_to(world.clone / ".git")
    borrowing = root / "borrowing"
    git(root, "init", "--quiet", "--template=", str(borrowing))
    write(borrowing, {".git/objects/info/alternates": f"{world.clone}/.git/objects\n"})
    report = scan(world, root)
    assert ("repository", "linked/.git") in found(report)
    assert "objects outside the closure" not in str(report.leaks)
    assert not [leak for leak in report.leaks if leak.kind == "future-file"]


def test_loose_objects_without_a_repository_are_found_by_their_names(
    world: World, tmp_path: Path
) -> None:
    oid = git(world.clone, "rev-parse", f"{world.fix}:widget/core.py")
    root = write(tmp_path / "root", {f"cache/{oid[:2]}/{oid[2:]}": b"x\x01whatever"})
    assert found(scan(world, root)) == {("object", f"cache/{oid[:2]}/{oid[2:]}")}


# -- archives and images ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compress",
    [bytes, gzip.compress, bz2.compress, lzma.compress, lambda data: pa.compress(data, "zstd", asbytes=True)],
    ids=["plain", "gzip", "bzip2", "xz", "zstd"],
)  # fmt: skip
def test_a_tar_of_a_root_file_system(world: World, tmp_path: Path, compress: object) -> None:
    """With hard links, nested archives, and a repository that is extracted and judged."""
    files: dict[str, str | bytes] = {
        "./usr/lib/python3/site-packages/widget/core.py": FIXED,
        "again.py": "==./usr/lib/python3/site-packages/widget/core.py",
        "dist.tar.gz": as_tar({"widget/core.py": FIXED}, "w:gz"),
        "testbed/": "",
        **{
            f"testbed/.git/{path.relative_to(world.clone / '.git')}": path.read_bytes()
            for path in (world.clone / ".git").rglob("*")
            if path.is_file()
        },
    }
    image = tmp_path / "root.tar"
    image.write_bytes(compress(as_tar(files)))  # type: ignore[operator]
    report = scan(world, image)
    assert {
        ("future-file", "usr/lib/python3/site-packages/widget/core.py"),
        ("future-file", "again.py"),
        ("future-file", "dist.tar.gz!widget/core.py"),
        ("object", "testbed/.git"),
        ("remote", "testbed/.git"),
    } <= found(report)
    assert report.repositories == ["testbed/.git"]


def layers_of(world: World) -> list[bytes]:
    """A clone and the fix in the first layer; the second removes most of that; the third adds."""
    repository: dict[str, str | bytes] = {
        f"testbed/.git/{path.relative_to(world.clone / '.git')}": path.read_bytes()
        for path in (world.clone / ".git").rglob("*")
        if path.is_file()
    }
    first = {
        **repository, "a/fix.py": FIXED, "b/fix.py": FIXED, "c/fix.py": FIXED, "d/fix.py": FIXED,
        "e/fix.py": FIXED,
    }  # fmt: skip
    second: dict[str, str | bytes] = {
        "a/.wh.fix.py": "", "b/": "", "b/.wh..wh..opq": "", "c/fix.py": "replaced", ".wh.d": "",
        "testbed/.wh..git": "",
    }  # fmt: skip
    third: dict[str, str | bytes] = {"d/new.py": KEPT}
    return [as_tar(first), as_tar(second), as_tar(third)]


def docker_archive(layers: list[bytes]) -> bytes:
    names = [f"{number:064x}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "c.json", "RepoTags": ["i:1"], "Layers": names}]
    files = dict(zip(names, layers, strict=True))
    files[f"{9:064x}/layer.tar"] = b"->../" + names[0].encode()
    manifest[0]["Layers"] = [f"{9:064x}/layer.tar", *names[1:]]
    return as_tar({**files, "manifest.json": json.dumps(manifest)})


def oci_archive(layers: list[bytes]) -> bytes:
    blobs = {
        f"blobs/sha256/{number:064x}": gzip.compress(each) for number, each in enumerate(layers)
    }
    kind = "application/vnd.oci.image.layer.v1.tar+gzip"
    described = [{"mediaType": kind, "digest": name[6:].replace("/", ":")} for name in blobs]
    manifest = {
        "layers": [*described, {"mediaType": "application/vnd.in-toto+json", "digest": "x:y"}]
    }
    inner = {"manifests": [{"digest": f"sha256:{'a' * 64}"}]}
    index = {"manifests": [{"digest": f"sha256:{'b' * 64}"}]}
    return as_tar(
        {
            "oci-layout": "{}",
            **blobs,
            f"blobs/sha256/{'a' * 64}": json.dumps(manifest),
            f"blobs/sha256/{'b' * 64}": json.dumps(inner),
            "index.json": json.dumps(index),
        }
    )


@pytest.mark.parametrize("save", [docker_archive, oci_archive])
def test_layers_of_an_image_cover_each_other(world: World, tmp_path: Path, save: object) -> None:
    """What a container does not see is reported as hidden, and is no leak."""
    image = tmp_path / "image.tar"
    image.write_bytes(save(layers_of(world)))  # type: ignore[operator]
    report = scan(world, image)
    assert {(leak.path, leak.hidden) for leak in report.leaks} == {
        ("a/fix.py", True), ("b/fix.py", True), ("c/fix.py", True), ("d/fix.py", True),
        ("e/fix.py", False), ("d/new.py", False), ("testbed/.git", True),
    }  # fmt: skip
    image.write_bytes(save([as_tar({"e": FIXED}), as_tar({".wh.e": ""})]))  # type: ignore[operator]
    report = scan(world, image)
    assert (report.sealed, len(report.leaks)) == (True, 1)


def test_a_repository_is_merged_from_its_layers(world: World, tmp_path: Path) -> None:
    """HEAD of the second layer with the objects of the first."""
    files: dict[str, str | bytes] = {
        f"r/.git/{path.relative_to(world.clone / '.git')}": path.read_bytes()
        for path in (world.clone / ".git").rglob("*")
        if path.is_file()
    }
    image = tmp_path / "image.tar"
    over = as_tar({"r/.git/HEAD": f"{world.base}\n", "r/.git/.wh.packed-refs": ""})
    image.write_bytes(docker_archive([as_tar(files), over]))
    report = scan(world, image)
    kinds = {kind for kind, path in found(report) if path == "r/.git"}
    assert "object" in kinds
    assert "head" not in kinds


def test_an_image_without_one_of_its_layers_is_not_sealed(world: World, tmp_path: Path) -> None:
    image = tmp_path / "image.tar"
    image.write_bytes(as_tar({"manifest.json": json.dumps([{"Layers": ["a.tar"]}])}))
    assert found(scan(world, image)) == {("unreadable", "a.tar")}


# -- hostile ---------------------------------------------------------------------------------------


def test_damaged_archives_are_reported(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bombs too; what precedes the damage is judged."""
    monkeypatch.setattr(contents, "_FREE_BYTES", 1 << 20)
    inner = as_zip({"d.zip": as_zip({"e.zip": as_zip({"f": FIXED})})})
    root = write(
        tmp_path / "root",
        {
            "bomb.tar.gz": gzip.compress(as_tar({"a": FIXED, "zeros": bytes(8 << 20)})),
            "bomb.zip": as_zip({"a": FIXED, "zeros": bytes(8 << 20)}),
            "deep.zip": as_zip({"b.zip": as_zip({"c.zip": inner})}),
            "torn.tar.gz": as_tar({"a": FIXED, "b": os.urandom(1 << 16)}, "w:gz")[:-400],
            "no.zip": b"PK\3\4" + bytes(200),
            "name.tar": as_tar({"x" * 2000: "a" * 99}, "w")[:600],
        },
    )
    report = scan(world, root)
    assert found(report) == {
        ("future-file", f"{name}!a") for name in ("bomb.tar.gz", "bomb.zip", "torn.tar.gz")
    }
    told = {note.split("'")[1] for note in report.notes}
    assert told == {
        "bomb.tar.gz", "bomb.zip", "deep.zip!b.zip!c.zip!d.zip!e.zip", "torn.tar.gz", "no.zip", "name.tar",
    }  # fmt: skip


def test_an_unreadable_layer_is_a_leak(world: World, tmp_path: Path) -> None:
    """Truncated, with garbage in the middle, or with names that lead out."""
    image = tmp_path / "image.tar"
    whole = as_tar({"a": "x" * 600, "b": "y" * 600})
    garbage = whole[:1536] + b"\xff" * 512 + whole[2048:]
    for layer in (whole[:700], garbage, as_tar({"../../etc/passwd": "x" * 99})):
        image.write_bytes(docker_archive([layer]))
        assert {leak.kind for leak in scan(world, image).leaks} == {"unreadable"}
    for torn in (gzip.compress(whole)[:-20], gzip.compress(whole)[:20], b"BZh91AY&SY" + whole):
        image.write_bytes(torn)
        assert found(scan(world, image)) == {("unreadable", "")}


def test_other_files_are_refused(world: World, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UsageError):
        scan(world, file)


@pytest.mark.root
def test_unreadable_files_are_leaks(world: World, tmp_path: Path) -> None:
    """And so are trees deeper than PATH_MAX."""
    root = write(tmp_path / "root", {"x": "x"})
    deep = os.open(root, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=deep)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    assert [leak.kind for leak in scan(world, root).leaks] == ["unreadable"]
