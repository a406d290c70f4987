"""Open repositories, few at a time, and verified reads from them."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pygit2
from pygit2.enums import ObjectType, RepositoryOpenFlag

from ...errors import CorruptObjectError, DamagedMirrorError

# An open repository keeps packs mapped and trees cached: 50 of them reached 1.5 GB.
_KEPT_OPEN = 2
_FLAGS = RepositoryOpenFlag.NO_SEARCH | RepositoryOpenFlag.NO_DOTGIT | RepositoryOpenFlag.BARE


class Objects:
    """Verified reads by object id (hexadecimal, or 20 bytes) from one repository."""

    def __init__(self, git_dir: Path) -> None:
        self.git_dir = git_dir
        try:
            self.repository = pygit2.Repository(str(git_dir), _FLAGS)
        except (pygit2.GitError, KeyError) as error:
            fact = "its HEAD, refs, objects or configuration are damaged"
            raise _damaged(git_dir, fact) from error

    def read(self, oid: str | bytes, kind: ObjectType) -> bytes:
        """Raises CorruptObjectError where it is absent, damaged or of another kind."""
        try:
            found, data = self.repository.read(_oid(oid))
        except (pygit2.GitError, KeyError, ValueError) as error:
            if "out of memory" in str(error).lower():  # libgit2's words where malloc fails
                raise MemoryError from error
            raise _corrupt(oid, error) from error
        if found != kind:
            wrong = f"it is a {ObjectType(found).name.lower()}, not a {kind.name.lower()}"
            raise _corrupt(oid, wrong)
        return data

    def read_blob(self, oid: str | bytes) -> bytes:
        return self.read(oid, ObjectType.BLOB)

    def blob_size(self, oid: str | bytes) -> int:
        """The size in the object's header, without inflating the object."""
        try:
            return self.repository.odb.read_header(_oid(oid))[1]
        except (pygit2.GitError, KeyError, ValueError) as error:
            raise _corrupt(oid, error) from error

    def close(self) -> None:
        self.repository.free()


def _oid(oid: str | bytes) -> pygit2.Oid:
    return pygit2.Oid(raw=oid) if isinstance(oid, bytes) else pygit2.Oid(hex=oid)


def _corrupt(oid: str | bytes, fact: str | Exception) -> CorruptObjectError:
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


class _OpenRepositories(threading.local):
    """A libgit2 repository belongs to one thread at a time, so each thread has its own."""

    def __init__(self) -> None:
        self.by_key: OrderedDict[tuple[Path, int, int], Objects] = OrderedDict()


_open = _OpenRepositories()


@contextmanager
def open_objects(git_dir: Path) -> Iterator[Objects]:
    """Borrow the repository at `git_dir`, opened now or lately; one put in its place is opened."""
    try:
        found = os.stat(git_dir)
    except FileNotFoundError as error:
        raise _damaged(git_dir, "it is gone") from error
    except OSError as error:
        raise _damaged(git_dir, str(error.strerror)) from error
    key = (git_dir, found.st_dev, found.st_ino)
    objects = _open.by_key.pop(key, None) or Objects(git_dir)
    try:
        yield objects
    finally:
        _open.by_key[key] = objects
        while len(_open.by_key) > _KEPT_OPEN:
            _open.by_key.popitem(last=False)[1].close()
