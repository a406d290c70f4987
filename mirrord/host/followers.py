"""Clones of a checkout's directories for other mount namespaces, where they follow its resets.

What is mounted on a directory must be cloned with the directory beneath it, to which the next mount
propagates. No path leads there. Root opens it by its file handle. In a user namespace the kernel
refuses that, so there the directory is found in a second mount of its parent.
"""

import ctypes
import errno
import os
import threading
from contextlib import ExitStack, suppress

from ..errors import BackendUnavailableError
from . import mounts
from .files import opened
from .processes import in_user_namespace

_FLAGS = mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV
# a slave: what is mounted on it in a container stays there
_FOLLOWING = mounts.MountAttributes(attr_set=_FLAGS, propagation=mounts.MS_SLAVE)
_libc = ctypes.CDLL(None, use_errno=True)


class Followers:
    """Makes the clones. `place` is a directory for a private tmpfs, used in a user namespace."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._room: int | None = None

    def clone(self, above: int, name: str) -> int:
        """Make a detached clone of `name`, a directory in `above`, with the mounts on it.

        Once attached, in any namespace, it follows later mounts and unmounts on `name` (but not
        while it is detached; seen on Linux 6.18).
        """
        with opened(os.open(name, mounts.DIRECTORY, dir_fd=above)) as top:
            # nothing is mounted on it, so this is the bare directory itself
            if mounts.mount_id(top) == mounts.mount_id(above):
                return mounts.clone_with(top, _FOLLOWING, mounts.AT_RECURSIVE)
            if in_user_namespace():
                with self._lock:
                    return self._clone_again(above, name, top)
        with (
            opened(mounts.clone_mount(above)) as uncovered,
            opened(os.open(name, mounts.DIRECTORY, dir_fd=uncovered)) as same,
            # open_by_handle_at(2) takes no O_PATH descriptor for the mount, which `above` is
            opened(os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=above)) as place,
            opened(_open_by_handle(same, place)) as covered,
        ):
            return mounts.clone_with(covered, _FOLLOWING, mounts.AT_RECURSIVE)

    def close(self) -> None:
        with self._lock:
            if self._room is not None:
                os.close(self._room)
                self._room = None
                mounts.umount(self._place)

    def _clone_again(self, above: int, name: str, top: int) -> int:
        """Mount a clone of what is mounted on `name` on a clone of the bare directory.

        Attached meanwhile, because before Linux 6.15 nothing can be mounted on a detached mount.
        """
        with ExitStack() as stack:
            room = self._open_room()

            def attach(mount: int, directory: str) -> None:
                path = f"{mounts.descriptor_path(room)}/{directory}"
                with suppress(FileExistsError):
                    os.mkdir(path, 0o700)
                stack.callback(mounts.umount, path)
                mounts.attach(mount, path)

            parent = stack.enter_context(opened(mounts.clone_with(above, _FOLLOWING)))
            attach(parent, "parent")
            bare = stack.enter_context(opened(os.open(name, mounts.DIRECTORY, dir_fd=parent)))
            bare = stack.enter_context(opened(mounts.clone_with(bare, _FOLLOWING)))
            attach(bare, "bare")
            mounts.attach_over(stack.enter_context(opened(mounts.clone_mount(top))), bare)
            return mounts.clone_with(bare, _FOLLOWING, mounts.AT_RECURSIVE)

    def _open_room(self) -> int:
        if self._room is None:
            mounts.umount(self._place)  # an earlier process may have left one
            with suppress(FileExistsError):
                os.mkdir(self._place, 0o700)
            self._room = mounts.mount_private(self._place)
        return self._room


class _FileHandle(ctypes.Structure):
    """struct file_handle, with room for MAX_HANDLE_SZ bytes."""

    _fields_ = (("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128))


_AT_EMPTY_PATH = 0x1000  # linux/fcntl.h


def _open_by_handle(directory: int, place: int) -> int:
    """Open `directory` in the mount of `place`, beneath what is mounted on it there.

    Needs CAP_DAC_READ_SEARCH in the first user namespace.
    """
    handle, mount = _FileHandle(128), ctypes.c_int()
    pointer, itself = ctypes.byref(handle), ctypes.byref(mount)
    if _libc.name_to_handle_at(directory, b"", pointer, itself, _AT_EMPTY_PATH) < 0:
        raise mounts.refused("name", "a directory", ctypes.get_errno())
    fd = int(_libc.open_by_handle_at(place, pointer, os.O_PATH | os.O_CLOEXEC))
    if fd < 0 and ctypes.get_errno() == errno.EPERM:
        raise BackendUnavailableError(
            "cannot open a directory by its handle: not permitted",
            hint="to attach checkouts, the daemon or the mount service needs CAP_DAC_READ_SEARCH"
            " and open_by_handle_at(2), which containers may block",
        )
    if fd < 0:
        raise mounts.refused("open", "a directory", ctypes.get_errno())
    return fd
