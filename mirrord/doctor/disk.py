"""Checks of the file system of the state directory, by its type and by trials in a scratch
directory, which is removed at the end.
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
from ..host.mount_tables import find_mount
from ..host.mounts import attach, make_overlay, may_mount, replace, umount
from ..host.room import measure
from ..presence import exists, is_symlink
from .checks import Result, existing, judge

SCRATCH_PREFIX = ".doctor-"
_USE_LOCAL = "put state_dir on a local ext4, xfs or btrfs"
_REMOTE = "locks, renames and times depend on its server, and overlays on it do not work"


@contextmanager
def scratch(settings: Settings) -> Iterator[Path]:
    """Yield a directory where the state directory is or will be; a killed doctor leaves it."""
    above = existing(settings.state_dir)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=above) as name:
        yield Path(name)


# -- by type and mount ----------------------------------------------------------------------------


# file systems with problems that trials do not show
_UNSUITABLE = {
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "9p", "afs"), _REMOTE),
    **dict.fromkeys(("lustre", "ceph", "gpfs", "beegfs"), f"{_REMOTE}; Unix sockets hang on some"),
    **dict.fromkeys(("vfat", "exfat", "ntfs3"), "it has no owners, modes or links"),
    **dict.fromkeys(("tmpfs", "ramfs"), "a reboot empties it, and it uses memory"),
    "overlay": "it is removed with its container, and checkouts on it cannot be overlays",
}


def file_system(settings: Settings) -> Result:
    kind = find_mount(settings.state_dir).kind
    family = "9p" if kind.startswith("9p") else kind
    reason = _UNSUITABLE.get(family) or (_REMOTE if kind.startswith("fuse") else None)
    return judge(
        reason is None, f"{kind}: {reason}" if reason else kind, _USE_LOCAL, otherwise="warn"
    )


_SLOW_OPTIONS = {
    "discard": "removals wait for the disk: mount without it, and enable fstrim.timer",
    "sync": "writes wait for the disk: mount without it",
    "dirsync": "new names wait for the disk: mount without it",
    "strictatime": "each read is a write: mount with relatime or noatime",
    "nobarrier": "a power cut can damage flushed data: mount without it",
    "noexec": "programs in a tree cannot run: mount with exec",
}


def options(settings: Settings) -> Result:
    mount = find_mount(settings.state_dir)
    if "ro" in mount.options:
        remedy = "check dmesg: ext4 becomes read-only when a disk fails; then remount it"
        return "fail", f"{mount.at} is read-only", remedy
    slow = sorted(mount.options & _SLOW_OPTIONS.keys())
    fact = f"mounted with {', '.join(slow)}" if slow else "no slow mount options"
    remedy = "; ".join(f"{name}: {_SLOW_OPTIONS[name]}" for name in slow)
    return judge(not slow, f"{mount.at}: {fact}", remedy, otherwise="warn")


def journal(settings: Settings) -> Result:
    """Check that ext4 has a journal; sysfs names its process or `<none>` (Linux 5.1)."""
    mount = find_mount(settings.state_dir)
    if mount.kind != "ext4":
        return "ok", f"not needed: {mount.kind}", ""
    device = Path("/sys/dev/block", mount.device).resolve().name
    task = Path("/sys/fs/ext4", device, "journal_task")
    if not exists(task):  # containers hide devices
        return "ok", f"unknown: {task} is not shown here", ""
    if task.read_text(encoding="ascii").strip() != "<none>":
        return "ok", "ext4 has a journal", ""
    fact = (
        "ext4 without a journal: each mkdir searches all inodes that were freed in the last seconds"
        " (1.2 ms instead of 0.03 in our measurements), and a power cut requires an fsck"
    )
    remedy = f"unmount it, then `tune2fs -O has_journal {mount.source}`; or use another disk"
    return "warn", fact, remedy


def quotas(settings: Settings) -> Result:
    """Check that a user's disk usage is limited; an owner may change project quotas."""
    if "usrquota" in find_mount(settings.state_dir).options:  # on ext4 and xfs
        return "ok", "the kernel enforces user quotas", ""
    if settings.access.bytes_per_user:
        fact = "no kernel quota; mirrord checks usage every minute ([access] bytes_per_user)"
        return "ok", fact, ""
    remedy = "set [access] bytes_per_user, or mount it with usrquota (ext4) or uquota (xfs)"
    return "warn", "no limit on what a user writes", remedy


_GIB = 1024**3


def space(settings: Settings) -> Result:
    bounds = settings.checkouts
    measured = measure(existing(settings.state_dir), bounds.disk_reserve)
    fact = (
        f"{measured.free_bytes / _GIB:.1f} GiB free, "
        f"{measured.reserve_bytes / _GIB:.1f} GiB reserved,"
        f" [checkouts] template_bytes is {bounds.template_bytes / _GIB:.1f} GiB"
    )
    if measured.shortage:
        return "fail", fact, "free space, see `mirrord du`: new work is refused (disk_reserve)"
    remedy = "free space, or lower [checkouts] template_bytes"
    is_enough = measured.free_bytes - measured.reserve_bytes > bounds.template_bytes / 10
    return judge(is_enough, fact, remedy, otherwise="warn")


def inodes(settings: Settings) -> Result:
    held = os.statvfs(existing(settings.state_dir))
    # btrfs makes inodes as they are needed, and says 0
    if held.f_files == 0:
        return "ok", "no limit", ""
    remedy = "free inodes: a template has a file for every file of its tree"
    return judge(held.f_favail > 200_000, f"{held.f_favail:,} free", remedy, otherwise="warn")


# -- by trials ------------------------------------------------------------------------------------


def abilities(settings: Settings) -> Result:
    """Try what mirrord, git and SQLite do with files."""
    essential: list[str] = []
    other: list[str] = []
    with scratch(settings) as place:
        for name, (trial, is_essential) in _ABILITIES.items():
            try:
                works = trial(place)
            except OSError:
                works = False
            if not works:
                (essential if is_essential else other).append(name)
    if not essential and not other:
        return "ok", f"all {len(_ABILITIES)} trials succeeded", ""
    fact = f"not working: {', '.join([*essential, *other])}"
    return ("fail" if essential else "warn"), fact, _USE_LOCAL


def _hard_links(place: Path) -> bool:
    (place / "linked").touch()
    os.link(place / "linked", place / "link")
    return (place / "link").stat().st_nlink == 2


def _symbolic_links(place: Path) -> bool:
    (place / "symbolic").symlink_to("nowhere")
    return is_symlink(place / "symbolic")


def _modes(place: Path) -> bool:
    (place / "mode").touch(mode=0o600)
    (place / "mode").chmod(0o711)
    return stat.S_IMODE((place / "mode").stat().st_mode) == 0o711


def _letter_case(place: Path) -> bool:
    (place / "CASE").touch()
    return not exists(place / "case")


def _locks(place: Path) -> bool:
    """Try flock, as the daemon does, and POSIX locks, as SQLite does."""
    with (place / "lock").open("w") as one, (place / "lock").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # POSIX locks are a process's: no other descriptor of this one would be refused
            fcntl.lockf(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


def _shared_memory(place: Path) -> bool:
    """Try what SQLite's write-ahead log needs."""
    with (place / "shared").open("wb+") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            memory[:2] = b"ok"
        return os.pread(file.fileno(), 2, 0) == b"ok"


def _sockets(place: Path) -> bool:
    """Use the directory's descriptor, because the path of a socket has at most 107 bytes."""
    with opened(os.open(place, os.O_PATH)) as fd, ExitStack() as stack:
        path = f"/proc/self/fd/{fd}/socket"
        server, client = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        server.bind(path)
        server.listen()
        # on some file systems it hangs
        client.settimeout(1)
        client.connect(path)
        return True


def _fine_times(place: Path) -> bool:
    """Without fine times, every reset reads files that changed within the last second."""
    (place / "time").touch()
    os.utime(place / "time", ns=(1, 123_456_789))
    return (place / "time").stat().st_mtime_ns == 123_456_789


def _clock(place: Path) -> bool:
    """Compare with the clock of a file server."""
    (place / "now").touch()
    return abs((place / "now").stat().st_mtime - time.time()) < 2


def _replacing(place: Path) -> bool:
    (place / "old").mkdir()
    (place / "new").mkdir()
    os.replace(place / "new", place / "old")
    return not exists(place / "new")


def _attributes(place: Path) -> bool:
    """Try attributes of agents' files; those of overlays are in `trusted.`."""
    (place / "attribute").touch()
    os.setxattr(place / "attribute", "user.mirrord", b"x")
    return os.getxattr(place / "attribute", "user.mirrord") == b"x"


def _whiteouts(place: Path) -> bool:
    """Try what overlays use for removed files."""
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


# Short trials with a median: the disk has other users, and the doctor answers within seconds.
_TRIAL_FILES = 200
_TRIAL_S = 0.3
# of which the median counts, so that one pause of the disk does not
_ROUNDS = 15
_SLOW_FACTOR = 5  # warn above this many times the normal duration


class Timing(NamedTuple):
    """A duration; `normal_ms` is the maximum on an idle machine with a local disk."""

    name: str
    ms: float
    normal_ms: float

    def __str__(self) -> str:
        ms = f"{self.ms:.0f}" if self.ms >= 10 else f"{self.ms:.2g}"
        return f"{self.name} {ms} ms (normal: up to {self.normal_ms:g})"


def speed(settings: Settings) -> Result:
    with scratch(settings) as place:
        timings = [Timing("making a directory", _mkdir_ms(place), 0.1)]
        write_ms, stat_ms = _tree_ms(place)
        if may_mount():
            try:
                mounted_ms, reset_ms = _overlay_ms(place)
            except MirrordError:  # the check of overlays says why
                pass
            else:
                timings.append(Timing("mounting and unmounting an overlay", mounted_ms, 1))
                timings.append(Timing("replacing an overlay", reset_ms, 1))
        timings.append(Timing("writing 1,000 files", write_ms, 200))
        timings.append(Timing("stat of 1,000 files", stat_ms, 20))
    slow = [timing.name for timing in timings if timing.ms > _SLOW_FACTOR * timing.normal_ms]
    remedy = f"slow: {', '.join(slow)}; is the machine busy? see the checks of the file system"
    return judge(not slow, ", ".join(map(str, timings)), remedy, otherwise="warn")


def _median_ms(attempt: Callable[[int], None]) -> float:
    """Return the median of up to 15 rounds within 0.3 s."""
    taken, end = [], time.perf_counter() + _TRIAL_S
    for number in range(_ROUNDS):
        began = time.perf_counter()
        attempt(number)
        taken.append(time.perf_counter() - began)
        if time.perf_counter() > end:
            break
    return statistics.median(taken) * 1000


def _mkdir_ms(place: Path) -> float:
    """Time mkdir after removals, as in a busy daemon: ext4 without a journal searches those."""
    end = time.perf_counter() + _TRIAL_S
    for number in range(300):
        path = place / f"removed-{number}"
        path.mkdir()
        path.rmdir()
        if time.perf_counter() > end:
            break
    return _median_ms(lambda number: (place / f"made-{number}").mkdir())


def _tree_ms(place: Path) -> tuple[float, float]:
    """Return the times to write and to stat a thousand files."""
    tree, content = place / "layer", b"x" * 4096
    tree.mkdir()
    began = time.perf_counter()
    for number in range(_TRIAL_FILES):
        (tree / f"file-{number}").write_bytes(content)
    written = time.perf_counter()
    for entry in os.scandir(tree):
        entry.stat(follow_symlinks=False)
    ended = time.perf_counter()
    # seconds of 200 files as milliseconds of 1,000
    return (written - began) * 1e6 / _TRIAL_FILES, (ended - written) * 1e6 / _TRIAL_FILES


def _overlay_ms(place: Path) -> tuple[float, float]:
    """Return the times to mount and unmount an overlay, and to replace one as a reset does."""

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
