"""What both sides of the mount service share: targets, orders of overlays, idmapped templates.

Loaded by the privileged service, so it imports the standard library and a few modules of ours only.
"""

import ctypes
import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import BackendUnavailableError
from ..model import Target
from . import mounts
from .files import opened
from .processes import Owner, die_with_parent

PROBE_LAYER = ".probe"
# clients write below these, so they are mounted `nosuid,nodev`
BOUND = ("checkouts", "leases")
# the directory for idmapped templates, used before Linux 6.15
IDMAPS = "idmaps"
# the directory for `followers.py`, used in a user namespace
FOLLOWERS = "followers"
# of the mount service's socket; a request names a few dozen directories
MESSAGE_MAX_BYTES = 64 * 1024
_CLONE_NEWUSER = 0x10000000  # linux/sched.h
# the mount points in a checkout's directory
TREE, ENVIRONMENT = TARGETS = (Target.TREE, Target.ENVIRONMENT)
_libc = ctypes.CDLL(None, use_errno=True)


class OverlayOrder(NamedTuple):
    """An overlay to be made. `layers` are directories below `templates`, top first.

    `upper` is the name of the directory below `leases/<checkout>` with `upper` and `work`, which
    must be fresh; it also tells the target. Templates appear as files of `owner`, if given.
    """

    checkout: str
    upper: str
    layers: tuple[str, ...]
    owner: Owner | None

    @property
    def target(self) -> Target:
        return ENVIRONMENT if self.upper.startswith(ENVIRONMENT) else TREE


def split_target(checkout: str, target: str) -> tuple[str, str]:
    """Return a target's parent directory, relative to the state directory, and its name."""
    if target == Target.DIRECTORY:
        return "checkouts", checkout
    return f"checkouts/{checkout}", target


def make_userns(stored: Owner, seen: Owner) -> int:
    """Make a user namespace in which files of `stored` appear as those of `seen`.

    Returns a descriptor. A forked child makes the namespace, because unshare(CLONE_NEWUSER) fails
    with EINVAL in a process of several threads. It is killed once the descriptor holds the
    namespace.
    """
    parent = os.getpid()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:  # must never return into the parent's code
        try:
            die_with_parent(parent)
            failed = _libc.unshare(_CLONE_NEWUSER)
            os.write(writer, bytes([ctypes.get_errno() if failed else 0]))
            if not failed:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with opened(reader):
            answer = os.read(reader, 1)
        if answer != b"\0":
            # no answer: the child was killed
            number = answer[0] if answer else errno.EIO
            raise OSError(number, os.strerror(number))
        for kind, inside, outside in (("uid", stored[0], seen[0]), ("gid", stored[1], seen[1])):
            # mount_setattr(2) takes the ids inside as those on the disk, and shows those outside
            Path(f"/proc/{child}/{kind}_map").write_text(f"{inside} {outside} 1\n", "ascii")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BackendUnavailableError(
            f"cannot make a user namespace: {error.strerror}",
            hint="see user.max_user_namespaces; without user namespaces only the daemon's own user"
            " gets overlay checkouts",
            errno=error.errno or errno.EIO,
        ) from error
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@dataclass(slots=True)
class _Mapped:
    clone: int
    source: int  # the inode that was cloned; not reused while the clone exists
    attached: str | None
    users: int = 0


class MappedTemplates:
    """Idmapped templates: for each owner a read-only clone that no other process can reach.

    Clones are detached, so nothing can unmount them. Before Linux 6.15 overlayfs accepts only
    attached layers; then each clone is attached in a private tmpfs at `place`, under a random name.
    An overlay holds its own reference. At most MAX clones are kept, and one in use is never closed.
    """

    # each is a mount in the kernel; making one again takes 0.1 ms
    MAX = 256

    def __init__(self, place: str, stored: Owner | None = None) -> None:
        self._place = place
        self._stored = stored
        self._known: dict[Owner, _Mapped] = {}  # the last used at the end
        self._lock = threading.Lock()
        self._room: int | None = None

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._known

    @contextmanager
    def view(self, templates: int, owner: Owner) -> Iterator[int]:
        """Borrow the owner's clone of the open directory `templates`."""
        mapped = self._take(templates, owner)
        try:
            yield mapped.clone
        finally:
            with self._lock:
                mapped.users -= 1
                if mapped is not self._known.get(owner):
                    self._end(mapped)

    def close(self) -> None:
        with self._lock:
            for owner in list(self._known):
                self._end(self._known.pop(owner))
            if self._room is not None:
                os.close(self._room)
                self._room = None
                mounts.umount(self._place)

    def _take(self, templates: int, owner: Owner) -> _Mapped:
        st = os.fstat(templates)
        with self._lock:
            kept = self._known.get(owner)
            if kept is not None and kept.source == st.st_ino:
                self._known[owner] = self._known.pop(owner)
                kept.users += 1
                return kept
        # not under the lock, because it forks
        userns = make_userns(self._stored or (st.st_uid, st.st_gid), owner)
        try:
            clone = mounts.clone_idmapped(templates, userns)
        finally:
            os.close(userns)
        with self._lock:
            try:
                attached = None if mounts.KERNEL >= (6, 15) else self._attach(clone)
            except BaseException:
                os.close(clone)
                raise
            # another thread may have made one meanwhile; one in use ends with its last user
            if earlier := self._known.pop(owner, None):
                self._end(earlier)
            mapped = self._known[owner] = _Mapped(clone, st.st_ino, attached, users=1)
            if len(self._known) > self.MAX:
                self._end(self._known.pop(next(iter(self._known))))
            return mapped

    def _attach(self, clone: int) -> str:
        if self._room is None:
            mounts.umount(self._place)  # an earlier process may have left one
            with suppress(FileExistsError):
                os.mkdir(self._place, 0o700)
            self._room = mounts.mount_private(self._place)
        path = f"{mounts.descriptor_path(self._room)}/{os.urandom(8).hex()}"
        os.mkdir(path, 0o700)
        mounts.attach(clone, path)
        return path

    def _end(self, mapped: _Mapped) -> None:
        if mapped.users:
            return
        os.close(mapped.clone)
        if mapped.attached is not None and self._room is not None:
            mounts.umount(mapped.attached)
            with suppress(FileNotFoundError):
                os.rmdir(mapped.attached)
