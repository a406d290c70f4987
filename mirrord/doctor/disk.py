"""Checks of the file system below the state directory: tried where that is possible, else by name.

All that is tried happens in a scratch directory, which is gone at the end.
"""

import fcntl
import mmap
import os
import socket
import stat
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from ..config import Settings
from ..errors import MirrordError
from ..host.files import opened
from ..host.mounts import attach, find_mount, make_overlay, may_mount, replace, umount
from ..host.room import measure
from .checks import Result, existing, judge

SCRATCH_PREFIX = ".doctor-"
_GIB = 1024**3
_LOCAL = "put state_dir on a local ext4, xfs or btrfs"
_REMOTE = "its server decides about locks, renames and times, and no overlay is made above it"
_BY_NAME = {
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "9p", "afs"), _REMOTE),
    **dict.fromkeys(
        ("lustre", "ceph", "gpfs", "beegfs"), f"{_REMOTE}; Unix sockets hang on some of them"
    ),
    **dict.fromkeys(("vfat", "exfat", "ntfs3"), "it has no owners, modes or links"),
    **dict.fromkeys(("tmpfs", "ramfs"), "a restart of the machine empties it, and it takes memory"),
    "overlay": "it goes with its container, and checkouts above it cannot be overlays",
}
"""File systems that work until they do not: no trial shows that."""

_SLOW_OPTIONS = {
    "discard": "each removal waits for the disk: mount without it, and enable fstrim.timer",
    "sync": "each write waits for the disk: mount without it",
    "dirsync": "each new name waits for the disk: mount without it",
    "strictatime": "each read is a write: mount with relatime or noatime",
    "nobarrier": "a power cut can damage what was flushed: mount without it",
    "noexec": "no program of a tree can run: mount with exec",
}


@contextmanager
def scratch(settings: Settings) -> Iterator[Path]:
    """A directory where the state directory is, or will be; a killed doctor leaves it."""
    above = existing(settings.state_dir)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=above) as name:
        yield Path(name)


# -- by name --------------------------------------------------------------------------------------


def file_system(settings: Settings) -> Result:
    kind = find_mount(settings.state_dir).kind
    family = "9p" if kind.startswith("9p") else kind
    known = _BY_NAME.get(family) or (_REMOTE if kind.startswith("fuse") else None)
    return judge(known is None, f"{kind}: {known}" if known else kind, _LOCAL, otherwise="warn")


def options(settings: Settings) -> Result:
    mount = find_mount(settings.state_dir)
    if "ro" in mount.options:
        remedy = "see the kernel's log: ext4 does that to itself where a disk fails; then remount"
        return "fail", f"{mount.at} is read-only", remedy
    found = sorted(mount.options & _SLOW_OPTIONS.keys())
    fact = f"{mount.at} is mounted with {', '.join(found)}" if found else f"of {mount.at}"
    remedy = "; ".join(f"{name}: {_SLOW_OPTIONS[name]}" for name in found)
    return judge(not found, fact, remedy, otherwise="warn")


def journal(settings: Settings) -> Result:
    """By what ext4 says in sysfs (Linux 5.1): `<none>`, or its journal's process."""
    mount = find_mount(settings.state_dir)
    if mount.kind != "ext4":
        return "ok", f"{mount.kind} is no ext4", ""
    device = Path("/sys/dev/block", mount.device).resolve().name
    said = Path("/sys/fs/ext4", device, "journal_task").read_text(encoding="ascii").strip()
    if said != "<none>":
        return "ok", "ext4 has a journal", ""
    fact = (
        "ext4 without a journal: each mkdir looks through all inodes that were freed within the"
        " last seconds, 1.2 ms instead of 0.03 in our measurements, and a power cut costs an fsck"
    )
    remedy = f"unmount it, then `tune2fs -O has_journal {mount.source}`; or another disk"
    return "warn", fact, remedy


def quotas(settings: Settings) -> Result:
    """What bounds the disk of one user; project quotas do not: an owner may change the project."""
    if "usrquota" in find_mount(settings.state_dir).options:  # so ext4 and xfs write it
        return "ok", "the kernel enforces those of users", ""
    if settings.access.bytes_per_user:
        fact = "none of the kernel's: users are weighed every minute ([access] bytes_per_user)"
        return "ok", fact, ""
    remedy = "set [access] bytes_per_user, or mount it with usrquota (ext4) or uquota (xfs)"
    return "warn", "nothing bounds what one user writes", remedy


def space(settings: Settings) -> Result:
    bounds = settings.checkouts
    found = measure(existing(settings.state_dir), bounds.disk_reserve)
    fact = (
        f"{found.free_bytes / _GIB:.1f} GiB are free, [checkouts]"
        f" template_bytes is {bounds.template_bytes / _GIB:.1f} GiB,"
        f" {found.reserve_bytes / _GIB:.1f} GiB are reserved"
    )
    if found.shortage:
        return "fail", fact, "make room: new work is refused (disk_reserve); `mirrord gc` and `du`"
    remedy = "make room, or lower [checkouts] template_bytes"
    well = found.free_bytes - found.reserve_bytes > bounds.template_bytes / 10
    return judge(well, fact, remedy, otherwise="warn")


def inodes(settings: Settings) -> Result:
    held = os.statvfs(existing(settings.state_dir))
    if held.f_files == 0:
        return "ok", "without limit", ""
    remedy = "make room: each template holds a file for every file of its tree"
    return judge(held.f_favail > 200_000, f"{held.f_favail:,} free", remedy, otherwise="warn")


# -- by trying ------------------------------------------------------------------------------------


def abilities(settings: Settings) -> Result:
    """What mirrord, git and SQLite do with files."""
    essential: list[str] = []
    other: list[str] = []
    with scratch(settings) as place:
        for name, (attempt, is_essential) in _ABILITIES.items():
            try:
                works = attempt(place)
            except OSError:
                works = False
            if not works:
                (essential if is_essential else other).append(name)
    if not essential and not other:
        return "ok", f"all {len(_ABILITIES)} that were tried work", ""
    fact = f"these do not work: {', '.join([*essential, *other])}"
    return ("fail" if essential else "warn"), fact, _LOCAL


def _hard_links(place: Path) -> bool:
    (place / "linked").touch()
    os.link(place / "linked", place / "link")
    return (place / "link").stat().st_nlink == 2


def _symbolic_links(place: Path) -> bool:
    (place / "symbolic").symlink_to("nowhere")
    return (place / "symbolic").is_symlink()


def _modes(place: Path) -> bool:
    (place / "mode").touch(mode=0o600)
    (place / "mode").chmod(0o711)
    return stat.S_IMODE((place / "mode").stat().st_mode) == 0o711


def _letter_case(place: Path) -> bool:
    (place / "CASE").touch()
    return not (place / "case").exists()


def _locks(place: Path) -> bool:
    """Of both kinds: the daemon's, and SQLite's."""
    with (place / "lock").open("w") as one, (place / "lock").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.lockf(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


def _shared_memory(place: Path) -> bool:
    """As SQLite's write-ahead log."""
    with (place / "shared").open("wb+") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            memory[:2] = b"ok"
        return os.pread(file.fileno(), 2, 0) == b"ok"


def _sockets(place: Path) -> bool:
    """By the directory's descriptor: a socket's path is short."""
    with opened(os.open(place, os.O_PATH)) as fd, ExitStack() as stack:
        path = f"/proc/self/fd/{fd}/socket"
        server, client = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        server.bind(path)
        server.listen()
        client.settimeout(1)
        client.connect(path)
        return True


def _fine_times(place: Path) -> bool:
    """Where files changed within a second look unchanged, every reset reads them."""
    (place / "time").touch()
    os.utime(place / "time", ns=(1, 123_456_789))
    return (place / "time").stat().st_mtime_ns == 123_456_789


def _clock(place: Path) -> bool:
    """A server has its own."""
    (place / "now").touch()
    return abs((place / "now").stat().st_mtime - time.time()) < 2


def _replacing(place: Path) -> bool:
    (place / "old").mkdir()
    (place / "new").mkdir()
    os.replace(place / "new", place / "old")
    return not (place / "new").exists()


def _attributes(place: Path) -> bool:
    """As agents' trees may have; overlays keep theirs apart, as `trusted.`."""
    (place / "attribute").touch()
    os.setxattr(place / "attribute", "user.mirrord", b"x")
    return os.getxattr(place / "attribute", "user.mirrord") == b"x"


def _whiteouts(place: Path) -> bool:
    """How an overlay says that a file of a lower layer is gone."""
    os.mknod(place / "whiteout", stat.S_IFCHR, 0)
    return stat.S_ISCHR((place / "whiteout").lstat().st_mode)


_ABILITIES: dict[str, tuple[Callable[[Path], bool], bool]] = {
    "hard links": (_hard_links, True),
    "symbolic links": (_symbolic_links, True),
    "modes": (_modes, True),
    "locks": (_locks, True),
    "shared memory": (_shared_memory, True),
    "replacing directories": (_replacing, True),
    "names that differ in letter case": (_letter_case, False),
    "Unix sockets": (_sockets, False),
    "times in nanoseconds": (_fine_times, False),
    "the same clock as this host": (_clock, False),
    "extended attributes": (_attributes, False),
    "overlays' whiteouts": (_whiteouts, False),
}


_COST_FILES = 200
_PART_S = 0.3
_ROUNDS = 15
_SLOW = 5  # so many times what is normal is worth a warning


class Part(NamedTuple):
    """`normal_ms` is the most that a quiet machine with a local disk takes."""

    name: str
    ms: float
    normal_ms: float

    def __str__(self) -> str:
        took = f"{self.ms:.0f}" if self.ms >= 10 else f"{self.ms:.2g}"
        return f"{self.name} {took} ms (normal: up to {self.normal_ms:g})"


def speed(settings: Settings) -> Result:
    with scratch(settings) as place:
        parts = [Part("a directory", _mkdir_ms(place), 0.1)]
        written_ms, looked_ms = _tree_ms(place)
        if may_mount():
            try:
                mounted_ms, reset_ms = _overlay_ms(place)
            except MirrordError:  # the check of overlays says why
                pass
            else:
                parts.append(Part("an overlay made and taken down", mounted_ms, 1))
                parts.append(Part("one put in its place", reset_ms, 1))
        parts.append(Part("1,000 files written", written_ms, 200))
        parts.append(Part("looked at", looked_ms, 20))
    slow = [part.name for part in parts if part.ms > _SLOW * part.normal_ms]
    remedy = f"slow: {', '.join(slow)}; is the machine busy? see the checks of the file system"
    return judge(not slow, ", ".join(map(str, parts)), remedy, otherwise="warn")


def _median_ms(attempt: Callable[[int], None]) -> float:
    """Of as many rounds as there is time for, at least one."""
    taken, end = [], time.perf_counter() + _PART_S
    for number in range(_ROUNDS):
        began = time.perf_counter()
        attempt(number)
        taken.append(time.perf_counter() - began)
        if time.perf_counter() > end:
            break
    return statistics.median(taken) * 1000


def _mkdir_ms(place: Path) -> float:
    """After removals, as in a daemon at work: an ext4 without a journal looks through those."""
    end = time.perf_counter() + _PART_S
    for number in range(300):
        path = place / f"removed-{number}"
        path.mkdir()
        path.rmdir()
        if time.perf_counter() > end:
            break
    return _median_ms(lambda number: (place / f"made-{number}").mkdir())


def _tree_ms(place: Path) -> tuple[float, float]:
    """Write a tree and look at all of it, for a thousand files."""
    tree, content = place / "layer", b"x" * 4096
    tree.mkdir()
    began = time.perf_counter()
    for number in range(_COST_FILES):
        (tree / f"file-{number}").write_bytes(content)
    written = time.perf_counter()
    for entry in os.scandir(tree):
        entry.stat(follow_symlinks=False)
    looked = time.perf_counter()
    return (written - began) * 1e6 / _COST_FILES, (looked - written) * 1e6 / _COST_FILES


def _overlay_ms(place: Path) -> tuple[float, float]:
    """Mount overlays and take them down; put one in another's place, as a reset does."""

    def overlay(name: str) -> int:
        paths = [place / "layer", *(place / f"{name}-{part}" for part in ("upper", "work"))]
        for path in paths[1:]:
            path.mkdir()
        with ExitStack() as stack:
            layer, upper, work = (
                stack.enter_context(opened(os.open(path, os.O_PATH | os.O_DIRECTORY)))
                for path in paths
            )
            return make_overlay([layer], upper, work)

    def checkout(number: int) -> None:
        tree = place / f"tree-{number}"
        tree.mkdir()
        with opened(overlay(f"checkout-{number}")) as mount:
            attach(mount, str(tree))
        umount(str(tree))

    def reset(number: int) -> None:
        with opened(overlay(f"reset-{number}")) as mount:
            replace(mount, str(place / "tree-0"))

    mounted_ms = _median_ms(checkout)
    try:
        with opened(overlay("first")) as mount:
            attach(mount, str(place / "tree-0"))
        return mounted_ms, _median_ms(reset)
    finally:
        umount(str(place / "tree-0"))
