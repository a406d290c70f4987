"""Run a command that sees a checkout at its path: `attacher.py DESCRIPTOR DIRECTORY COMMAND…`.

The mount of the descriptor is attached at the directory, in a user and a mount namespace of its
own, which the command is in. Run as a program of its own: a process of several threads, such as a
harness, can enter no user namespace. Standard library only.
"""

import ctypes
import os
import sys

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h
# linux/mount.h and linux/fcntl.h; the number is the same on every architecture
_SYS_MOVE_MOUNT, _AT_FDCWD, _F_EMPTY_PATH = 429, -100, 0x4
# linux/prctl.h
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


def main(descriptor: int, directory: str, command: list[str]) -> None:
    """Attach, and become the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    parent, uid, gid = os.getppid(), os.geteuid(), os.getegid()

    def must(result: int, verb: str) -> None:
        if result < 0:
            sys.exit(f"cannot {verb}: {os.strerror(ctypes.get_errno())}")

    must(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "make a user namespace")
    for name, line in (
        # first: else the kernel refuses an unprivileged gid map (user_namespaces(7))
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)
    moved = libc.syscall(
        _SYS_MOVE_MOUNT, descriptor, b"", _AT_FDCWD, os.fsencode(directory), _F_EMPTY_PATH
    )
    must(moved, f"attach a checkout at {directory}")
    os.close(descriptor)
    # who starts a sandbox wants it to end with itself; a change of credentials may have undone that
    must(libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "end with the parent")
    # it may have ended before the call above
    if os.getppid() == parent:
        os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
