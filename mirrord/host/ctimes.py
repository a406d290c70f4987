"""Who could set the ctime of a file, by which a tree is proven unchanged.

Linux sets a ctime from its clock alone. Root sets the clock, or writes to the kernel or to the
disk's device: by a capability, or through a device that its control group lets it open.
"""

import ctypes
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .processes import Capability

_libc = ctypes.CDLL(None, use_errno=True)
_FORGING = (
    Capability.SYS_MODULE,
    Capability.SYS_RAWIO,
    Capability.SYS_ADMIN,
    Capability.SYS_TIME,
)
# what engines let a container open: null, zero, full, random, urandom; tty, console, ptmx; tun and
# fuse; of the majors 136 to 143, terminals (admin-guide/devices.txt of Linux)
_HARMLESS = {
    *((1, minor) for minor in (3, 5, 7, 8, 9)),
    *((5, minor) for minor in range(3)),
    *((10, minor) for minor in (200, 229)),
}
_TERMINALS = range(136, 144)
_NO_DRIVER = os.makedev(0xFFF, 0xFFFFF)  # the last one: only a rule for all devices has it


def may_forge_ctimes() -> bool:
    """Return whether any process here could set the ctime of a file.

    Asks each process that /proc shows for its bounding set, which only shrinks: root in a container
    without these capabilities cannot get one back. MKNOD counts unless the process is in this
    control group and that refuses devices. What cannot be read counts as yes.
    """
    forging = sum(1 << capability for capability in _FORGING)
    seen = False
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            lines = (process / "status").read_bytes().splitlines()
            status = dict(line.partition(b":\t")[::2] for line in lines)
            bound = int(status[b"CapBnd"], 16)
            if bound & forging:
                return True
            # one that nobody waits for has no control group any more; its threads may go on
            has_ended = status[b"State"].startswith(b"Z") and int(status[b"Threads"]) <= 1
            may_make_devices = bound >> Capability.MKNOD & 1 and not has_ended
            if may_make_devices and not (_is_in_this_group(process) and _refuses_devices()):
                return True
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        except (OSError, KeyError):
            return True
        seen = seen or process.name == "1"
    return not seen


def _is_in_this_group(process: Path) -> bool:
    return (process / "cgroup").read_bytes() == Path("/proc/self/cgroup").read_bytes()


@cache
def _refuses_devices() -> bool:
    """Return whether this control group lets nobody write to a disk's device, or to any unknown.

    Asks access(2) about nodes made for it: that opens no device and does not look for `nodev`, and
    only the control group answers it with EPERM. What cannot be asked counts as no. The disk of the
    trees is among them, so those that appear later do not matter.
    """
    try:
        blocks, characters = list(_blocks()), list(_characters())
        if not (blocks and characters):  # hidden: engines may mask parts of /proc and /sys
            return False
        with tempfile.TemporaryDirectory(prefix="mirrord-devices-") as scratch:
            node = os.path.join(scratch, "node")
            return all(
                _is_refused(node, kind | 0o600, number)
                for kind, numbers in ((stat.S_IFBLK, blocks), (stat.S_IFCHR, characters))
                for number in (_NO_DRIVER, *numbers)
            )
    except OSError:
        return False


def _is_refused(node: str, mode: int, number: int) -> bool:
    os.mknod(node, mode, number)
    try:
        allowed = _libc.access(os.fsencode(node), os.W_OK) == 0
        return not allowed and ctypes.get_errno() == errno.EPERM
    finally:
        os.unlink(node)


def _blocks() -> Iterator[int]:
    """Yield the devices of all disks and partitions of the host, which no namespace hides."""
    for line in Path("/proc/partitions").read_text(encoding="ascii").splitlines()[2:]:
        major, minor, *_ = line.split()
        yield os.makedev(int(major), int(minor))


def _characters() -> Iterator[int]:
    for name in os.listdir("/sys/dev/char"):
        major, _, minor = name.partition(":")
        number = int(major), int(minor)
        if number not in _HARMLESS and number[0] not in _TERMINALS:
            yield os.makedev(*number)
