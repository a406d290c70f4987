"""What a process asks the kernel and the allocator about itself; never touches another process."""

import ctypes
import os
import resource
import signal
from contextlib import suppress
from enum import IntEnum
from functools import cache
from pathlib import Path

from ..errors import ResourceError

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h

Owner = tuple[int, int]  # a uid with its gid

_libc = ctypes.CDLL(None, use_errno=True)


class Capability(IntEnum):
    """linux/capability.h"""

    CHOWN = 0
    DAC_OVERRIDE = 1
    FOWNER = 3
    SETGID = 6
    SETUID = 7
    SYS_ADMIN = 21


def has_capabilities(*wanted: Capability) -> bool:
    """Whether this process, root or not, has all of them in effect."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return all(effective >> capability & 1 for capability in wanted)


def may_give_files_away() -> bool:
    """Whether this process can make files for other users, and remove them whatever their modes."""
    return has_capabilities(Capability.CHOWN, Capability.DAC_OVERRIDE, Capability.FOWNER)


def die_with_parent(parent_pid: int) -> None:
    """Ask for SIGKILL when the thread that started this process ends, in process `parent_pid`."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ResourceError(f"cannot tie a worker to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def dies_with_parent() -> bool:
    """Whether `die_with_parent` holds for this thread: a change of its credentials undoes it."""
    number = ctypes.c_int()
    _libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value == signal.SIGKILL


def lower_priority() -> None:
    """Have this thread, and the processes it starts, yield to all others.

    Linux keeps a nice value for each thread. Where the kernel schedules a disk by priority, 15 is
    also the last of its best-effort class (ionice(1)). Only root can undo it: call it in a thread
    that ends.
    """
    os.setpriority(os.PRIO_PROCESS, 0, 15)


def search_path() -> str:
    """PATH without the working directory: an empty entry means it, as `.` does."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(filter(os.path.isabs, entries)) or os.defpath


def memory_limit_bytes() -> int:
    """How much a process may allocate for foreign data: half of the machine, 1 to 4 GiB."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1024**3, min(machine // 2, 4 * 1024**3))


def limit_memory() -> None:
    """Hold this process, and each that it starts, to `memory_limit_bytes`: more is a MemoryError.

    RLIMIT_DATA: since Linux 4.7 it counts private writable mappings, and so not the packs that
    libgit2 and git map to read.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = memory_limit_bytes()
    limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def hide_argument(text: str) -> None:
    """Overwrite a text in the arguments of this process, which every user can read in /proc."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])  # arg_start and arg_end (Linux 3.5)
    with suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        arguments = memory.read(end - start)
        memory.seek(start)
        memory.write(arguments.replace(os.fsencode(text), b"*" * len(os.fsencode(text))))


def resident_bytes() -> int:
    """How much memory this process holds now."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def trim_memory() -> None:
    """Give freed memory back to the kernel: glibc keeps it after libgit2 has walked large trees."""
    if trim := getattr(_libc, "malloc_trim", None):
        trim(0)


@cache
def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
