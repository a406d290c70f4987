"""An import of rows whose base commits have a submodule and LFS objects, beside one without.

Both are of mirrors that are here. Each base commit is a commit of the line with a small one on top.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

from measured_daemon import Daemon, instance_row
from results import Figure, Row
from rivals import git, git_bytes

_ROWS, _VERSIONS = 500, 20
_LINKS = '[submodule "lib"]\n\tpath = lib\n\turl = ../library\n'
_NUMBERS = count()


def imports(
    daemon: Daemon,
    mirror: Path,
    line: list[str],
    compare: Callable[[Row, Callable[[], float], Callable[[], float]], None],
) -> list[Figure]:
    """Compare imports under a new name, and again under the same one."""
    up = daemon.area / "upstreams"
    bases = line[:_ROWS]
    library = _library(up / "library")
    files = {}
    for name in ("needy", "plain"):
        parts = library if name == "needy" else []
        commits = _commits(up / name, mirror, bases, parts)
        rows = [instance_row(f"upstreams/{name}", commit) for commit in commits]
        files[name] = daemon.area / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
        with daemon.client() as client:
            client.add_mirror(f"upstreams/{name}", url=f"file://{up / name}")
    figures = []
    what = f"import of {len(bases)} rows with submodules and LFS objects"
    for work, names in ((f"{what}, a new data set", _NUMBERS), (f"{what}, again", None)):
        used: dict[str, list[float]] = {"needy": [], "plain": []}

        def run(
            name: str,
            names: Iterator[int] | None = names,
            used: dict[str, list[float]] = used,
        ) -> float:
            dataset = f"{name}-{next(names) if names else 'again'}"
            began, before = time.perf_counter(), daemon.cpu_s()
            with daemon.client() as client:
                operation = client.import_dataset(files[name], name=dataset)
                done = client.wait(operation, timeout=timedelta(minutes=20))
            used[name].append(daemon.cpu_s() - before)
            needs = (done.result or {})["needs"]
            has = (needs["submodules"], needs["lfs_pointers"], needs["lfs_missing"])
            if has != ((len(bases), 2 * len(bases), 0) if name == "needy" else (0, 0, 0)):
                raise RuntimeError(f"{name}: {has}")
            return time.perf_counter() - began

        run("needy"), run("plain")
        compare(Row(work, "without them", goal=0.83), lambda: run("needy"), lambda: run("plain"))
        least = {name: min(seconds) for name, seconds in used.items()}
        ratio = least["needy"] / least["plain"]
        figures.append(Figure(f"{work}: processor, times that of without", ratio, "", "1.2"))
    return figures


def _library(path: Path) -> list[str]:
    git("init", "--quiet", "--bare", "--initial-branch=main", path)
    stream = b"".join(
        b"commit refs/heads/main\ncommitter b <b@x> %d +0000\ndata 0\nM 100644 inline f%d\ndata 1\n1\n"
        % (number, number)
        for number in range(_VERSIONS)
    )
    git_bytes("fast-import", "--quiet", cwd=path, stdin=stream)
    return git("rev-list", "main", cwd=path).split()


def _commits(path: Path, mirror: Path, bases: list[str], library: list[str]) -> list[str]:
    """Write a commit on top of each base; with a submodule and pointers if there is a library."""
    git("clone", "--quiet", "--bare", "--shared", mirror, path)
    stream = b""
    for number, base in enumerate(bases):
        stream += b"commit refs/heads/bench-%d\nmark :%d\n" % (number, number + 1)
        stream += b"committer b <b@x> 0 +0000\ndata 0\nfrom %s\n" % base.encode()
        files = {"data/plain.txt": b"%d\n" % (number % _VERSIONS)}
        if library:
            link = library[number * len(library) // len(bases)]
            stream += b"M 160000 %s lib\n" % link.encode()
            files = {
                ".gitmodules": _LINKS.encode(),
                ".gitattributes": b"*.bin filter=lfs -text\n",
                "data/a.bin": _pointer(path, b"a" * 1000),
                "data/b.bin": _pointer(path, b"%d" % (number % _VERSIONS) * 1000),
            }
        for name, data in files.items():
            stream += b"M 100644 inline %s\ndata %d\n%s\n" % (name.encode(), len(data), data)
    git_bytes("fast-import", "--quiet", cwd=path, stdin=stream)
    refs = git("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads", cwd=path)
    tips = dict(line.split() for line in refs.splitlines())
    return [tips[f"refs/heads/bench-{number}"] for number in range(len(bases))]


def _pointer(path: Path, data: bytes) -> bytes:
    """Put an LFS object beside an upstream; return its pointer."""
    oid = hashlib.sha256(data).hexdigest()
    file = path / "lfs/objects" / oid[:2] / oid[2:4] / oid
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n"
    return text.encode()
