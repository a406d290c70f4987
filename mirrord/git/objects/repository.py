"""Repositories and verified reads from them; commit look-ups; packs of what a commit adds."""

import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from itertools import repeat, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pygit2
from cachetools import LRUCache, cachedmethod
from pygit2.enums import ConfigLevel, DescribeStrategy, ObjectType, Option, RepositoryOpenFlag

from ...errors import CommitNotFoundError, CorruptObjectError, DamagedMirrorError, GitFailedError
from ...host.files import read_plain
from ...model import FIRST_PARENTS_LIMIT, CommitId, Resolved, shown
from ...quoting import encode_name, quote_name
from .. import WITHOUT_PARENTS
from ..command import run_git_sync
from ..configuration import UNTRUSTING
from ..modules import modules_blemishes
from ..special import must_be_plain

# An open repository keeps packs mapped and trees cached: 50 of them used 1.5 GB.
_OPEN_MAX = 2
_NAMES_KEPT = 20_000  # of trees that were read, some 5 MB
_BLOB_BYTES_KEPT = 4 * 1024**2
_HEADERS: dict[int, bytes] = {
    ObjectType.COMMIT: b"commit %d\0",
    ObjectType.TREE: b"tree %d\0",
    ObjectType.BLOB: b"blob %d\0",
    ObjectType.TAG: b"tag %d\0",
}
# the path itself or nothing: libgit2 would look for a .git in it, then in those above
_FLAGS = RepositoryOpenFlag.NO_SEARCH | RepositoryOpenFlag.NO_DOTGIT | RepositoryOpenFlag.BARE


@cache
def _leave_out_unreadable_home() -> None:
    """Open repositories without the user's configuration if HOME is another's, as sudo leaves it.

    libgit2 opens nothing where it may not stat ~/.gitconfig.
    """
    try:
        os.stat(os.path.expanduser("~/.gitconfig"))
    except PermissionError:
        for level in (ConfigLevel.GLOBAL, ConfigLevel.XDG):
            pygit2.option(Option.SET_SEARCH_PATH, level, "")
    except OSError:
        pass


class Objects:
    """Verified reads from one repository, by object id: hexadecimal, or 20 bytes."""

    def __init__(self, git_dir: Path) -> None:
        self.git_dir = git_dir
        self.trees: LRUCache[Any, Any] = LRUCache(_NAMES_KEPT, getsizeof=len)
        """The names in trees, as `BaseTree` read them: each turn on a commit reads the same."""
        # each turn reads the bases of its changes twice, and others on its commit read them, too
        self._blobs: LRUCache[Any, bytes] = LRUCache(_BLOB_BYTES_KEPT, getsizeof=len)
        self._reads_many = False
        _leave_out_unreadable_home()
        try:
            self.repository = pygit2.Repository(str(git_dir), _FLAGS)
        except (pygit2.GitError, KeyError) as error:
            fact = "its HEAD, refs, objects or configuration are damaged"
            raise _damaged(git_dir, fact) from error

    def read(self, oid: str | bytes, kind: ObjectType) -> bytes:
        """Raises CorruptObjectError if the object is absent, damaged or of another kind."""
        try:
            actual, data = self._read_verified(as_oid(oid))
        except KeyError as error:
            raise corrupt_object(oid, error) from error
        except (pygit2.GitError, ValueError) as error:
            if "out of memory" in str(error).lower():  # libgit2's message when malloc fails
                raise MemoryError from error
            if (copy := self._read_copy(oid, kind)) is None:
                raise corrupt_object(oid, error) from error
            return copy
        if actual != kind:
            wrong = f"it is a {ObjectType(actual).name.lower()}, not a {kind.name.lower()}"
            raise corrupt_object(oid, wrong)
        return data

    def _read_verified(self, oid: pygit2.Oid) -> tuple[int, bytes]:
        """Read an object and compare its hash.

        libgit2 hashes with a search for collisions, which took 90 of 215 ms for 2,059 files where
        OpenSSL takes 23. git made that search when the object was fetched.
        """
        with nullcontext() if self._reads_many else self.reading_many():
            kind, data = self.repository.odb.read(oid)
        digest = hashlib.sha1(_HEADERS[kind] % len(data), usedforsecurity=False)
        digest.update(data)
        if digest.digest() != oid.raw:
            raise pygit2.GitError("hash mismatch")
        return kind, data

    @contextmanager
    def reading_many(self) -> Iterator[None]:
        """Switch libgit2's check off once for many reads, which are verified here.

        To switch it for each took 25 of 190 ms for 2,059 files. Nothing else of libgit2 may be
        called in the block.
        """
        pygit2.option(Option.ENABLE_STRICT_HASH_VERIFICATION, False)
        self._reads_many = True
        try:
            yield
        finally:
            self._reads_many = False
            pygit2.option(Option.ENABLE_STRICT_HASH_VERIFICATION, True)

    def _read_copy(self, oid: str | bytes, kind: ObjectType) -> bytes | None:
        """Read by git an object of which libgit2 (1.9) tried a damaged copy alone; verified."""
        name, word = str(as_oid(oid)), kind.name.lower()
        try:
            data = run_git_sync(*UNTRUSTING, "cat-file", word, name, git_dir=self.git_dir).stdout
        except (CorruptObjectError, DamagedMirrorError, GitFailedError):
            return None
        header = f"{word} {len(data)}\0".encode()
        is_right = hashlib.sha1(header + data, usedforsecurity=False).hexdigest() == name
        return data if is_right else None

    def read_blob(self, oid: str | bytes) -> bytes:
        return self.read(oid, ObjectType.BLOB)

    @cachedmethod(attrgetter("_blobs"))
    def read_base_blob(self, oid: str) -> bytes:
        """Read a blob that changes are compared with; the last ones are kept."""
        return self.read_blob(oid)

    def blob_size(self, oid: str | bytes) -> int:
        """Read the size from the object's header, without inflating the object."""
        try:
            return self.repository.odb.read_header(as_oid(oid))[1]
        except KeyError as error:
            raise corrupt_object(oid, error) from error
        except (pygit2.GitError, ValueError):
            return len(self.read_blob(oid))

    def close(self) -> None:
        self.repository.free()


def as_oid(oid: str | bytes) -> pygit2.Oid:
    return pygit2.Oid(raw=oid) if isinstance(oid, bytes) else pygit2.Oid(hex=oid)


def corrupt_object(oid: str | bytes, fact: str | Exception) -> CorruptObjectError:
    name = oid.hex() if isinstance(oid, bytes) else oid
    if isinstance(fact, Exception):
        fact = "it is absent" if isinstance(fact, KeyError) else "it is damaged"
    return CorruptObjectError(
        f"cannot read object {name}: {fact}", hint="audit and heal the mirror", object=name
    )


def _damaged(git_dir: Path, fact: str) -> DamagedMirrorError:
    return DamagedMirrorError(
        f"cannot open repository {git_dir.name}: {fact}",
        hint=f"`mirrord heal {git_dir.name}` repairs a mirror",
    )


# device and inode of a repository, and size, inode and time of each file beside its packs
Stamp = dict[str, tuple[int, ...]]

# open repositories that no thread uses: libgit2 allows one thread at a time
_cached: OrderedDict[Path, tuple[Stamp, Objects]] = OrderedDict()


@contextmanager
def open_objects(git_dir: Path) -> Iterator[Objects]:
    """Borrow the repository at `git_dir` from a cache, as it is on disk now."""
    must_be_plain(git_dir)
    forget_replaced()
    stamp = _stamp(git_dir)
    cached = _cached.pop(git_dir) if git_dir in _cached else None
    objects = cached[1] if cached else Objects(git_dir)
    try:
        yield objects
    finally:
        _cached[git_dir] = stamp, objects
        while len(_cached) > _OPEN_MAX:
            _cached.popitem(last=False)[1][1].close()


def forget_replaced() -> None:
    """Close the cached repositories that lost a file since, or have another in its place.

    A heal, a repack, a restoration and a mirror that was added again do that. libgit2 (1.9) keeps
    indexes mapped and never looks again at a pack that it has; all repositories of a process that
    read a pack, also as an alternate, share what is mapped of it. It does find packs that were
    added.
    """
    for git_dir, (before, objects) in list(_cached.items()):
        try:
            is_same = before.items() <= _stamp(git_dir).items()
        except DamagedMirrorError:
            is_same = False
        if not is_same:
            del _cached[git_dir]
            objects.close()


def _stamp(git_dir: Path) -> Stamp:
    try:
        place = os.stat(git_dir)
        stamp: Stamp = {"": (place.st_dev, place.st_ino)}
        with suppress(FileNotFoundError, NotADirectoryError):
            lent = os.stat(git_dir / "objects/info/alternates")
            stamp["alternates"] = lent.st_ino, lent.st_mtime_ns
        for objects in (git_dir / "objects", *lenders_of(git_dir / "objects")):
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(objects / "pack") as it,
            ):
                for file in it:
                    status = file.stat(follow_symlinks=False)
                    stamp[file.path] = status.st_size, status.st_ino, status.st_mtime_ns
    except FileNotFoundError as error:
        raise _damaged(git_dir, "it does not exist") from error
    except OSError as error:
        raise _damaged(git_dir, str(error.strerror)) from error
    return stamp


def lenders_of(objects: Path) -> list[Path]:
    """Return the object directories that a repository borrows from, which borrow from no other."""
    try:
        lines = read_plain(objects / "info/alternates").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [objects / os.fsdecode(line) for line in lines if line]


# -- commits: resolving what a person typed --------------------------------------------------------

# a name that git allows, which has no `@{`, then steps back
_COMMITISH = re.compile(
    r"([^~^:@{}\x00-\x20\x7f?*\[\\]+(?:@(?!\{)[^~^:@{}\x00-\x20\x7f?*\[\\]*)*)((?:[~^]\d*)*)"
)
_TIME = re.compile(rb"^committer .*> (-?\d+)", re.MULTILINE)
_HEX = re.compile(r"[0-9a-fA-F]{4,40}")


_REPLACES = re.compile(rb"(?m)^%s([0-9a-f]{40})$" % WITHOUT_PARENTS)


class CommitInfo(NamedTuple):
    """`time` is the committer date, in seconds since the epoch.

    `replaces` is the commit of a shallow upstream that it stands for.
    """

    commit: CommitId
    tree: str
    parents: tuple[CommitId, ...]
    time: int
    replaces: CommitId | None = None


def resolve(git_dir: Path, commitish: str) -> Resolved:
    """Find the commit that a full or abbreviated id, branch, tag or ref means, with `~N` and `^N`.

    Raises CommitNotFoundError, also if the text is ambiguous.
    """
    with open_objects(git_dir) as objects:
        info = read_commit(objects, commitish)
        try:
            near = tuple(_first_parents(objects, info.commit, FIRST_PARENTS_LIMIT))
        except CorruptObjectError:
            near = ()
        refused = tuple(_refused(objects, git_dir, info.tree))
        return Resolved(info.commit, info.tree, info.time, near, refused, info.replaces)


def _refused(objects: Objects, git_dir: Path, tree: str) -> Iterator[tuple[str, str]]:
    """Iterate what fsck refuses in the `.gitmodules` of a tree; names and modes are the tree's."""
    try:
        entries = tree_entries(objects.read(tree, ObjectType.TREE)) or []
        modules = [(mode, oid.hex()) for mode, name, oid in entries if name == b".gitmodules"]
        for mode, oid in modules:
            if int(mode, 8) & 0o170000 != 0o100000:
                yield oid, "gitmodulesBlob: it is no file"
                continue
            for blemish in modules_blemishes(git_dir, oid, objects.blob_size(oid)):
                yield oid, str(blemish)
    except CorruptObjectError:  # told when the tree is read
        return


def describe(git_dir: Path) -> str | None:
    """Return `git describe --tags --long` of HEAD, NAME-COUNT-gDIGITS; None without a tag."""
    options: dict[str, Any] = {
        "describe_strategy": DescribeStrategy.TAGS,
        "always_use_long_format": True,
    }
    forget_replaced()
    objects = Objects(git_dir)
    try:
        text: str = objects.repository.describe("HEAD", **options)
    except (pygit2.GitError, KeyError, UnicodeDecodeError):  # a tag that is not UTF-8 is no version
        return None
    finally:
        objects.close()
    return text


def _first_parents(objects: Objects, commit: str, limit: int) -> list[CommitId]:
    chain = [bytes.fromhex(commit)]
    while len(chain) < limit and (
        parents := links_of(objects.read(chain[-1], ObjectType.COMMIT))[1]
    ):
        chain.append(parents[0])
    return [CommitId(oid.hex()) for oid in chain]


def read_commit(objects: Objects, commitish: str) -> CommitInfo:
    parts = _COMMITISH.fullmatch(commitish)
    if parts is None:
        raise _not_found(commitish, "it is not a commit id, branch or tag")
    base, steps = parts.groups()
    if len(base) == 40 and _HEX.fullmatch(base):
        try:
            starts = {_find(objects.repository, base)} - {None}
        except CorruptObjectError:  # or one that libgit2 (1.9) does not parse
            objects.read(base, ObjectType.COMMIT)
            starts = {base}
    else:
        names = (base, f"refs/tags/{base}", f"refs/heads/{base}")
        starts = {_find(objects.repository, name) for name in names}
        starts = (starts | {_find_abbreviated(objects.repository, base)}) - {None}
    if len(starts) > 1:
        hint = "give the full id, or refs/heads/… or refs/tags/…"
        raise _not_found(commitish, "it is ambiguous: it could mean two different commits", hint)
    if not starts:
        raise _not_found(commitish, "no commit of the mirror has that name")
    commit = str(starts.pop())
    for sign, digits in re.findall(r"([~^])(\d*)", steps):
        count = int(digits[:9] or 1)  # no history is as long
        # ^0 is the commit itself
        for number in repeat(0, count) if sign == "~" else range(count - 1, count or -1):
            parents = links_of(objects.read(commit, ObjectType.COMMIT))[1]
            if number >= len(parents):
                raise _not_found(commitish, "its history does not go back that far")
            commit = parents[number].hex()
    return _info(commit, objects.read(commit, ObjectType.COMMIT))


def _info(commit: str, data: bytes) -> CommitInfo:
    tree, parents = links_of(data)
    head = data.partition(b"\n\n")[0]
    time, replaces = _TIME.search(head), _REPLACES.search(head)
    ids = tuple(CommitId(parent.hex()) for parent in parents)
    return CommitInfo(
        CommitId(commit.lower()),
        tree.hex(),
        ids,
        int(time[1]) if time else 0,
        CommitId(replaces[1].decode()) if replaces else None,
    )


def _find(repository: pygit2.Repository, name: str) -> str | None:
    try:
        # pygit2 (1.21) takes bytes too, against its own types: a name need not be UTF-8
        target = repository.revparse_single(encode_name(name))  # type: ignore[arg-type]
        # libgit2 says of a tag of a blob what it says of damage, unless it is peeled before
        peeled = target.peel(None) if isinstance(target, pygit2.Tag) else target
        return str(peeled.peel(pygit2.Commit).id)
    except ValueError as error:
        if "ambiguous" in str(error):
            fact = "several objects begin with these digits"
            raise _not_found(name, fact, "give the full id") from error
        if not isinstance(error, pygit2.GitError) or isinstance(error, pygit2.InvalidSpecError):
            return None
        for ref in (name, f"refs/tags/{name}", f"refs/heads/{name}"):
            with suppress(KeyError, ValueError, pygit2.GitError):  # a commit without an e-mail, say
                oid = str(repository.lookup_reference(ref).resolve().target)
                if repository.odb.read_header(oid)[0] is ObjectType.COMMIT:
                    return oid
        raise _unreadable(name, error) from error
    except KeyError:
        return None
    except pygit2.GitError as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> CorruptObjectError:
    return CorruptObjectError(
        f"cannot read commit {shown(name)}: {error}", hint="audit and heal the mirror"
    )


def _find_abbreviated(repository: pygit2.Repository, digits: str) -> str | None:
    """Look for an id, which `revparse` does not if a branch has that name (libgit2 1.9)."""
    if not _HEX.fullmatch(digits):
        return None
    try:
        target = repository.get(digits)
        return str(target.peel(pygit2.Commit).id) if target is not None else None
    except (ValueError, pygit2.InvalidSpecError):
        return None


def _not_found(
    commitish: str, fact: str, hint: str = "sync the mirror, or check the spelling"
) -> CommitNotFoundError:
    return CommitNotFoundError(
        f"cannot resolve commit {shown(commitish)}: {fact}",
        hint=hint,
        commit=quote_name(commitish[:200]),
    )


_ENTRY = re.compile(rb"([0-7]+) ([^\0]*)\0(.{20})", re.DOTALL)
_FIXED_BYTES = 22  # the space, the NUL and the id


def links_of(commit: bytes) -> tuple[bytes, list[bytes]]:
    """Return a commit's tree and parents."""
    tree, *headers = commit.split(b"\n")
    lines = takewhile(lambda line: line.startswith(b"parent "), headers)
    return bytes.fromhex(tree[5:].decode()), [bytes.fromhex(line[7:].decode()) for line in lines]


def tree_entries(data: bytes) -> list[tuple[bytes, bytes, bytes]] | None:
    """Return mode, name and raw id of each entry of a tree object; None if it is malformed."""
    entries: list[tuple[bytes, bytes, bytes]] = _ENTRY.findall(data)
    size = sum(len(mode) + len(name) + _FIXED_BYTES for mode, name, _ in entries)
    return entries if size == len(data) else None
