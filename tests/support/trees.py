"""Trees to test with, and git's own opinion of them."""

from __future__ import annotations

import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

from gitrepos import Upstream, git

from mirrord.git.modes import DIRECTORY
from mirrord.trees.manifest import NO_OBJECT, Entry, Manifest, blob_id


def awkward(upstream: Upstream) -> list[str]:
    """Two commits of everything that is hard about trees; the second turns kinds of things into each other."""
    up = upstream.path
    raw = os.fsencode(up)
    upstream.write(
        {
            "plain.txt": "plain\n",
            "run.sh": "#!/bin/sh\n",
            "empty": "",
            "Case/File": "upper",
            "case/file": "lower",
            "/".join(["deep"] * 40) + "/leaf": "deep",
            "turns/dir-to-file/a/b": "1",
            "turns/file-to-dir": "2",
            "turns/file-to-link": "3",
            "turns/dir-to-link/x": "4",
            "turns/dir-to-submodule/x/y": "5",
            "turns/mode": "6",
            "gone/a/b/c": "7",
        }
    )
    (up / "run.sh").chmod(0o755)
    (up / "dangling").symlink_to("nowhere/at/all")
    (up / "to-directory").symlink_to("Case")
    (up / "long-link").symlink_to("x" * 4000)
    (up / "turns/link-to-file").symlink_to("../plain.txt")
    (up / "turns/link-to-dir").symlink_to("/etc")
    with open(raw + b"/not-utf8-\xff\xfe", "wb") as file:
        file.write(b"bytes\n")
    os.makedirs(raw + b"/dir-\xe9")
    with open(raw + b"/dir-\xe9/new\nline", "wb") as file:
        file.write(b"x")
    upstream.git("add", "--all")
    upstream.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},modules/one")
    upstream.git(
        "update-index", "--add", "--cacheinfo", f"160000,{'2' * 40},turns/submodule-to-dir"
    )
    upstream.git("commit", "-qm", "first")
    first = upstream.git("rev-parse", "HEAD")

    upstream.git("rm", "-rq", "--cached", ".")
    for name in ("dir-to-file", "dir-to-link", "dir-to-submodule"):
        shutil.rmtree(up / "turns" / name)
    for name in ("file-to-dir", "file-to-link", "link-to-file", "link-to-dir"):
        (up / "turns" / name).unlink()
    shutil.rmtree(up / "gone")
    upstream.write(
        {
            "turns/dir-to-file": "1",
            "turns/file-to-dir/x": "2",
            "turns/link-to-file": "3",
            "turns/link-to-dir/passwd": "4",
        }
    )
    upstream.write({"turns/submodule-to-dir/file": "5", "plain.txt": "changed\n"})
    (up / "turns/file-to-link").symlink_to("dir-to-file")
    (up / "turns/dir-to-link").symlink_to("/tmp")
    (up / "turns/mode").chmod(0o755)
    upstream.git("add", "--all")
    upstream.git(
        "update-index", "--add", "--cacheinfo", f"160000,{'3' * 40},turns/dir-to-submodule"
    )
    upstream.git("update-index", "--add", "--cacheinfo", f"160000,{'4' * 40},modules/one")
    upstream.git("commit", "-qm", "second")
    return [first, upstream.git("rev-parse", "HEAD")]


def tree_of(upstream: Upstream, commit: str) -> str:
    return upstream.git("rev-parse", f"{commit}^{{tree}}")


def worktree(upstream: Upstream, commit: str, at: Path) -> Path:
    """What git itself writes."""
    old = os.umask(0o022)
    try:
        git(upstream.path, "worktree", "add", "--quiet", "--detach", str(at), commit)
    finally:
        os.umask(old)
    (at / ".git").unlink()
    git(upstream.path, "worktree", "prune")
    return at


def contents(root: Path) -> dict[bytes, tuple[int, bytes]]:
    """Everything below a directory: type with permissions, and content or target."""
    found = {}
    top = os.fsencode(root)
    for above, directories, names in os.walk(top):
        for name in (*directories, *names):
            path = os.path.join(above, name)
            mode = os.lstat(path).st_mode
            data = b""
            if stat.S_ISLNK(mode):
                data = os.readlink(path)
            elif stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    data = file.read()
            found[os.path.relpath(path, top)] = (mode, data)
    return found


def record_control(root: Path, manifest: Manifest) -> Manifest:
    """Add to a manifest everything below `.git` as it is now."""
    control = {}
    for above, directories, names in os.walk(os.fsencode(root / ".git")):
        for path in (above, *(os.path.join(above, name) for name in (*directories, *names))):
            found = os.lstat(path)
            is_directory = stat.S_ISDIR(found.st_mode)
            content = NO_OBJECT if is_directory else blob_id(Path(os.fsdecode(path)).read_bytes())
            entry = Entry(DIRECTORY if is_directory else 0o100000, NO_OBJECT, content)
            control[os.path.relpath(path, os.fsencode(root))] = entry.with_stat(found)
    files = manifest.files | {b"": manifest.files[b""].with_stat(os.stat(root))}
    return replace(manifest, files=files, control=control, recorded_ns=time.time_ns())
