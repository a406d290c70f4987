"""Checks of the state directory: whose it is, where it lies, how much room it has, what a crash left."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from pathlib import Path

from ..config import Settings
from ..errors import BackendUnavailableError
from ..host.files import admit
from ..host.mounting import choose_mounter
from .asking import Result, entries, existing, file_system_of, judge

_GIB = 1024**3
_NOBODY = 65534
_HARMLESS = os.ST_NOSUID | os.ST_NODEV
_DIRECTORIES = ("mirrors", "templates", "checkouts", "leases", "quarantine", "datasets", "bundles")
_POOR_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "vfat", "overlay", "tmpfs"}


def state_dir(settings: Settings) -> Result:
    path = settings.state_dir
    if not path.exists():
        well = os.access(existing(path), os.W_OK)
        return judge(well, f"{path} is not there yet", f"make {path}, owned by the daemon's user")
    held = path.stat()
    mode = stat.S_IMODE(held.st_mode)
    fact = f"{path}, mode {mode:04o}, owner {held.st_uid}"
    if held.st_uid not in (0, os.geteuid()):
        return "fail", fact, "run the daemon as the owner, or give it another state_dir"
    return judge(not mode & 0o022, fact, f"take write permission from others: chmod 0711 {path}")


def parents(settings: Settings) -> Result:
    """Whoever may rename a parent may put another tree in the place of ours."""
    unsafe = [str(parent) for parent in existing(settings.state_dir).parents if _is_open(parent)]
    fact = f"others may write to {', '.join(unsafe)}" if unsafe else "only their owners may write"
    return judge(
        not unsafe, fact, "move state_dir below directories that only root or its owner may write"
    )


def _is_open(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def file_system(settings: Settings) -> Result:
    kind = file_system_of(existing(settings.state_dir))
    remedy = "put state_dir on a local ext4, xfs or btrfs: locks, renames and overlay's upper layers depend on it"
    return judge(kind not in _POOR_FILE_SYSTEMS, kind, remedy, otherwise="warn")


def one_file_system(settings: Settings) -> Result:
    found = [path for name in _DIRECTORIES if (path := settings.state_dir / name).exists()]
    home = existing(settings.state_dir).stat().st_dev
    away = [path.name for path in found if path.stat().st_dev != home]
    fact = f"elsewhere: {', '.join(away)}" if away else "one file system"
    return judge(
        not away,
        fact,
        "keep all of state_dir on one file system: it renames and hard-links between them",
    )


def access_lists(settings: Settings) -> Result:
    """By making one: each checkout has an entry for its owner."""
    with tempfile.TemporaryDirectory(
        prefix=".doctor-", dir=existing(settings.state_dir)
    ) as scratch:
        try:
            admit(scratch, _NOBODY)
        except BackendUnavailableError as error:
            return (
                "fail",
                "none: only root and the daemon's own user can have checkouts",
                error.hint or "",
            )
    return "ok", "a checkout is entered by its owner alone", ""


def set_id_bits(settings: Settings) -> Result:
    checkouts = settings.state_dir / "checkouts"
    if checkouts.exists() and os.statvfs(checkouts).f_flag & _HARMLESS == _HARMLESS:
        return "ok", f"without effect in {checkouts}, and devices too", ""
    remedy = (
        "run the daemon as root or beside mirrord-mount.service, which see to that;"
        f" or mount a file system of its own at {checkouts} with nosuid,nodev"
    )
    try:
        choose_mounter(settings.state_dir, settings.socket.parent / "mount.sock")
    except BackendUnavailableError:
        return "warn", f"with effect in {checkouts}, and devices too", remedy
    return "ok", "without effect in checkouts as soon as a daemon runs, and devices too", ""


def space(settings: Settings) -> Result:
    held = os.statvfs(existing(settings.state_dir))
    free = held.f_bavail * held.f_frsize
    wanted = settings.checkouts.template_bytes
    fact = f"{free / _GIB:.1f} GiB free, [checkouts] template_bytes is {wanted / _GIB:.1f} GiB"
    if free < _GIB:
        return "fail", fact, "make room"
    return judge(
        free > wanted / 10, fact, "make room, or lower [checkouts] template_bytes", otherwise="warn"
    )


def inodes(settings: Settings) -> Result:
    held = os.statvfs(existing(settings.state_dir))
    if held.f_files == 0:
        return "ok", "without limit", ""
    return judge(
        held.f_favail > 200_000,
        f"{held.f_favail:,} free",
        "make room: each template holds a file for every file of its tree",
        otherwise="warn",
    )


def leftovers(settings: Settings) -> Result:
    quarantine = [entry.name for entry in entries(settings.state_dir / "quarantine")]
    packs = sorted(
        str(path)
        for path in settings.state_dir.glob("mirrors/*/objects/pack/tmp_*")
        if path.stat().st_mtime < time.time() - 3600
    )
    fact = f"{len(quarantine)} in quarantine, {len(packs)} unfinished packs"
    return judge(
        not packs and len(quarantine) < 100,
        fact,
        "the daemon removes them when it starts",
        otherwise="warn",
    )
