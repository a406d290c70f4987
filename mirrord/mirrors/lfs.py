"""LFS objects of a mirror: fetched by git-lfs, verified by their sha256, kept in `lfs/objects`.

git-lfs works in an empty repository in quarantine, with a commit of the wanted pointers alone: it
fetches these objects and no others. What it wrote is hashed, and renamed into the mirror.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from pathlib import Path

from anyio import to_thread

from ..catalog import MirrorRow
from ..errors import InvalidBundleError, InvalidUrlError, MirrordError, StoppingError
from ..git.command import GitResult
from ..git.lfs import (
    RECORDS,
    Pointer,
    RecordedObject,
    find_fault,
    has_object,
    object_path,
    pointer_bytes,
    read_records,
    records_bytes,
)
from ..git.objects.trees import FILE_LIMIT_BYTES
from ..host.files import sync_directory, sync_file
from ..model import MirrorName, shown
from ..presence import exists, is_file, is_symlink
from ..protocol import Progress, ProgressSink
from .quarantine import within_room
from .refs import write_durably
from .repository import Refs, Repository
from .service import Mirrors
from .upstreams.upstream import Upstream, parse_upstream

_TIMEOUT = timedelta(hours=24)
# pointers in one directory of the commit
_DIRECTORY_MAX = 1000
_LIST = "objects.txt"


async def fetch_objects(
    mirrors: Mirrors,
    row: MirrorRow,
    wanted: Collection[tuple[Pointer, str | None]],
    sink: ProgressSink | None = None,
) -> dict[str, str]:
    """Fetch LFS objects into a mirror, each from the URL that a `.lfsconfig` names, or None.

    Returns those that could not be had, with the reason.
    """
    git_dir = mirrors.path(row.name)
    missing: defaultdict[str | None, set[Pointer]] = defaultdict(set)
    reasons: dict[str, str] = {}
    for pointer, url in wanted:
        if pointer.size > FILE_LIMIT_BYTES:
            limit = f"the limit is {FILE_LIMIT_BYTES >> 20} MiB"
            reasons[pointer.oid] = f"it has {pointer.size} bytes; {limit}"
        elif not has_object(git_dir, pointer):
            missing[url].add(pointer)
    for url, pointers in missing.items():
        try:
            servers = _servers(mirrors, row, url)
            for upstream, lfs_url in servers:
                left = {pointer for pointer in pointers if not has_object(git_dir, pointer)}
                if left:
                    said = await _fetch(mirrors, row, upstream, lfs_url, sorted(left), sink)
        except StoppingError:
            raise
        except MirrordError as error:
            said = error.message
        reasons |= {pointer.oid: said for pointer in pointers if not has_object(git_dir, pointer)}
    had = [RecordedObject(pointer, url) for pointer, url in wanted if has_object(git_dir, pointer)]
    if had:
        await to_thread.run_sync(_record, git_dir, had)
    return reasons


def _servers(
    mirrors: Mirrors, row: MirrorRow, url: str | None
) -> list[tuple[Upstream, str | None]]:
    """Return whom to ask: the upstream and its fallbacks, or the server that `.lfsconfig` names.

    That is upstream's word: it may not read files of this host where upstream does not.
    """
    upstreams = mirrors.upstreams(row)
    if url is None:
        return [(upstream, None) for upstream in upstreams]
    server = parse_upstream(url)
    if server.is_local and not upstreams[0].is_local:
        raise InvalidUrlError(f"cannot ask {shown(url)} for LFS objects: it is local", hint="")
    return [(server, server.remote.url)]


async def _fetch(
    mirrors: Mirrors,
    row: MirrorRow,
    upstream: Upstream,
    lfs_url: str | None,
    pointers: Collection[Pointer],
    sink: ProgressSink | None,
) -> str:
    """Fetch objects and take in those that are right; return what git-lfs said at last."""
    doing = f"fetch {len(pointers)} LFS objects from {upstream.shown}"
    room = mirrors.quarantine.room
    await room.ensure(doing)
    if sink:
        sink(Progress(total=len(pointers), unit="LFS objects", note=row.name.repo))
    async with (
        mirrors.quarantine.directory("lfs") as directory,
        mirrors.asking(upstream) as remote,
    ):
        scratch = Repository(mirrors.git, row.name, directory / "repository")
        await scratch.create()
        commit = await _write_commit(scratch, pointers)
        url = remote.url if "://" in remote.url or ":" in remote.url else f"file://{remote.url}"
        settings = [
            f"remote.origin.url={url}",
            # git-lfs gives up after 30 s of silence; git has 300 (`http.lowSpeedTime`)
            "lfs.activitytimeout=300",
        ]
        settings += [f"lfs.url={lfs_url}"] if lfs_url else []
        words = [word for setting in settings for word in ("-c", setting)]
        done = await scratch.run(
            # it fails for one absent object; what arrived is judged file by file
            *words, "lfs", "fetch", "origin", commit, remote=remote, ok=range(256),
            timeout=_TIMEOUT, progress=within_room(room, None, doing), doing=doing,
        )  # fmt: skip
        git_dir = mirrors.path(row.name)
        said = _last_line(done, remote.secrets)
        wrong = await to_thread.run_sync(_take_in, scratch.path, git_dir, pointers)
        return wrong or said


async def _write_commit(scratch: Repository, pointers: Collection[Pointer]) -> str:
    """Write a commit with one file for each pointer, by a stream of fast-import."""

    def stream() -> Iterator[bytes]:
        yield b"commit refs/heads/main\ncommitter mirrord <mirrord@localhost> 0 +0000\ndata 0\n"
        for number, pointer in enumerate(pointers):
            data = pointer_bytes(pointer)
            path = f"{number // _DIRECTORY_MAX}/{pointer.oid}".encode()
            yield b"M 100644 inline %s\ndata %d\n%s\n" % (path, len(data), data)

    await scratch.run(
        "fast-import", "--quiet", stdin=b"".join(stream()), doing="write a list of LFS objects"
    )
    return (await scratch.all_refs())["refs/heads/main"]


# git-lfs ends with a summary; its lines with a cause come before
_CAUSE = re.compile(r"error transferring|\[[45]\d\d\]|batch re|missing", re.IGNORECASE)


def _last_line(done: GitResult, secrets: Iterable[str]) -> str:
    text = done.stderr.strip() or "git-lfs fetched it not"
    if "'lfs' is not a git command" in text:
        return "git-lfs is not installed"
    lines = text.splitlines()
    line = next((cause for cause in lines if _CAUSE.search(cause)), lines[-1])
    for secret in secrets:
        line = line.replace(secret, "***")
    return shown(line.strip(), 300)


def _take_in(source: Path, git_dir: Path, pointers: Iterable[Pointer]) -> str | None:
    """Rename the objects that are right into a mirror, durably; return what is wrong with one."""
    wrong = None
    directories = set[Path]()
    for pointer in pointers:
        file = object_path(source, pointer.oid)
        if not is_file(file) or is_symlink(file):
            continue
        if fault := find_fault(file, pointer):
            wrong = f"what {pointer.oid[:12]} was served with is not it: {fault}"
            continue
        target = object_path(git_dir, pointer.oid)
        for above in (*reversed(target.relative_to(git_dir).parents[:-1]),):
            (git_dir / above).mkdir(exist_ok=True, mode=0o755)
            directories.add(git_dir / above)
        own = file.with_suffix(".own")  # git-lfs links the files of a local upstream
        shutil.copyfile(file, own)
        own.chmod(0o444)
        sync_file(own)
        own.rename(target)
    for directory in directories:
        sync_directory(directory)
    return wrong


def _record(git_dir: Path, had: Iterable[RecordedObject]) -> None:
    """Add objects to the list of those that a mirror should have, durably."""
    before = read_records(git_dir)
    records = {record.pointer: record for record in (*before, *had)}.values()
    content = records_bytes(records)
    if content != records_bytes(before) or not exists(git_dir / RECORDS):
        write_durably(git_dir / RECORDS, content)


async def fetch_again(
    mirrors: Mirrors, row: MirrorRow, oids: Collection[str], sink: ProgressSink | None
) -> dict[str, str]:
    """Replace LFS objects that are damaged or gone; return those that could not be had."""
    git_dir = mirrors.path(row.name)
    records = {
        record.pointer.oid: record for record in await to_thread.run_sync(read_records, git_dir)
    }
    for oid in oids:
        if exists(object_path(git_dir, oid)):
            await mirrors.quarantine.discard(object_path(git_dir, oid))
    wanted = [(records[oid].pointer, records[oid].url) for oid in oids if oid in records]
    return await fetch_objects(mirrors, row, wanted, sink)


# -- in bundles ------------------------------------------------------------------------------------

# below it the ref of a commit with the objects of a mirror as files, named by their sha256
IN_BUNDLE = "refs/mirrord/lfs/"


async def write_objects(repository: Repository, objects: Path) -> Refs:
    """Write the LFS objects of a mirror into an object directory; return the ref of their commit.

    The ref is the same for the same objects; there is none where the mirror has none.
    """
    records = await to_thread.run_sync(read_records, repository.path)
    had = [record for record in records if has_object(repository.path, record.pointer)]
    if not had:
        return {}
    files: dict[str, bytes | Path] = {_LIST: records_bytes(had)}
    files |= {
        record.pointer.oid: object_path(repository.path, record.pointer.oid) for record in had
    }
    message, doing = f"LFS objects of {repository.name}", "write the LFS objects of a mirror"
    tip = await repository.write_commit(message, files, objects, doing=doing, timeout=_TIMEOUT)
    return {f"{IN_BUNDLE}{repository.name}": tip}


async def take_objects(
    mirrors: Mirrors, source: Repository, commit: str, name: MirrorName, scratch: Path
) -> int:
    """Take the LFS objects of a bundle into a mirror, each compared with its sha256.

    Returns how many the mirror has of them; raises InvalidBundleError for one that is another.
    """
    doing = "read the LFS objects of a bundle"

    async def read(file: str, into: Path) -> bool:
        await to_thread.run_sync(lambda: into.parent.mkdir(parents=True, exist_ok=True))
        words = ("cat-file", "blob", f"{commit}:{file}")
        return (await source.run(*words, stdout_path=into, ok=(0, 128), doing=doing)).status == 0

    git_dir = mirrors.path(name)
    is_listed = await read(_LIST, scratch / RECORDS)
    try:
        records = read_records(scratch) if is_listed else set()
    except ValueError as error:
        raise InvalidBundleError(
            "cannot import the bundle: its list of LFS objects is bad"
        ) from error
    wanted = [record for record in records if not has_object(git_dir, record.pointer)]
    for record in wanted:
        if record.pointer.size <= FILE_LIMIT_BYTES:
            await read(record.pointer.oid, object_path(scratch, record.pointer.oid))
    pointers = [record.pointer for record in wanted]
    if wrong := await to_thread.run_sync(_take_in, scratch, git_dir, pointers):
        raise InvalidBundleError(f"cannot import the bundle: {wrong}")
    had = [record for record in records if has_object(git_dir, record.pointer)]
    await to_thread.run_sync(_record, git_dir, had)
    return len(had)
