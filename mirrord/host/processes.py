"""What a process asks the kernel and the allocator about itself.

Owns the two calls that a worker process makes: dying with its parent, and giving memory back. Never touches another process.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from ..errors import ResourceError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Ask for SIGKILL when the thread that started this process ends; `parent_pid` is who it must still be."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ResourceError(f"cannot tie a worker to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def resident_bytes() -> int:
    """How much memory this process holds now."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def trim_memory() -> None:
    """Give freed memory back to the kernel: glibc keeps it after libgit2 has walked large trees."""
    if trim := getattr(_libc, "malloc_trim", None):
        trim(0)
