"""Checks of the kernel: what it can, what it allows this process, and its limits."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
import time
from pathlib import Path

from ..checkouts.overlay.probe import try_overlay
from ..config import Settings
from ..errors import MirrordError
from ..host.mounting import LocalMounter, choose_mounter
from ..model import Backend
from .host import Result, Verdict, entries, existing, judge, kernel_setting, status_field, version

_IDMAPPED_LAYERS = (5, 19)  # idmapped mounts as lower layers of an overlay
_CAP_SYS_ADMIN = 21


def kernel(settings: Settings) -> Result:
    release = platform.release()
    remedy = "Linux 5.19 and newer give overlay checkouts to other users than the daemon's (idmapped layers)"
    return judge(version(release) >= _IDMAPPED_LAYERS, f"Linux {release}", remedy, otherwise="warn")


def overlay(settings: Settings) -> Result:
    """By making one where the checkouts will be, for ourselves and for another user, as the daemon does at its start."""
    verdict: Verdict = "fail" if settings.checkouts.backend is Backend.OVERLAY else "warn"
    try:
        mounter = choose_mounter(settings.state_dir, settings.socket.parent / "mount.sock")
        if not isinstance(mounter, LocalMounter):
            return "ok", "the mount service makes them", ""
        with tempfile.TemporaryDirectory(
            prefix=".doctor-", dir=existing(settings.state_dir)
        ) as scratch:
            mounter = LocalMounter(Path(scratch))
            try:
                unmapped = try_overlay(Path(scratch), mounter)
            finally:
                mounter.close(unbind=True)
    except MirrordError as error:
        return (
            verdict,
            error.message,
            f"{error.hint or 'see the kernel log'}; without it the pool backend serves",
        )
    remedy = "only the daemon's own user has overlay checkouts; the pool backend serves others"
    return judge(
        not unmapped,
        f"mounted one: {unmapped}" if unmapped else "mounted one",
        remedy,
        otherwise="warn",
    )


def privileges(settings: Settings) -> Result:
    effective = int(status_field("CapEff"), 16)
    mounts = bool(effective >> _CAP_SYS_ADMIN & 1)
    who = f"uid {os.geteuid()}, {'may' if mounts else 'may not'} mount"
    remedy = "run as root or beside the mount service: otherwise there is no overlay, and the pool serves only the daemon's own user"
    return judge(mounts, who, remedy, otherwise="warn")


def mount_namespace(settings: Settings) -> Result:
    try:
        shared = os.stat("/proc/self/ns/mnt").st_ino == os.stat("/proc/1/ns/mnt").st_ino
    except PermissionError:
        return "ok", "not known: this process may not look at pid 1", ""
    remedy = "mounts made here are seen by nobody outside: whoever mounts must run without file system sandboxing"
    return judge(shared, "shared with pid 1" if shared else "private", remedy, otherwise="warn")


def mount_limit(settings: Settings) -> Result:
    limit = kernel_setting("fs/mount-max")
    wanted = settings.checkouts.max + 1000
    remedy = f"set fs.mount-max to {wanted} or more, or lower [checkouts] max"
    return judge(
        limit >= wanted,
        f"fs.mount-max is {limit}, [checkouts] max is {settings.checkouts.max}",
        remedy,
        otherwise="warn",
    )


def inotify(settings: Settings) -> Result:
    instances = kernel_setting("fs/inotify/max_user_instances")
    watches = kernel_setting("fs/inotify/max_user_watches")
    fact = f"{instances} instances, {watches} watches"
    return judge(
        instances >= 16 and watches >= 64,
        fact,
        "raise fs.inotify.max_user_instances",
        otherwise="warn",
    )


def open_files(settings: Settings) -> Result:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    well = hard == resource.RLIM_INFINITY or hard >= 4096
    return judge(
        well,
        f"at most {hard}",
        "raise it with LimitNOFILE= or `ulimit -Hn 65536`",
        otherwise="warn",
    )


def clock(settings: Settings) -> Result:
    now = time.time()
    newest = max((entry.stat().st_mtime for entry in entries(settings.state_dir)), default=0.0)
    if newest > now + 60:
        return (
            "fail",
            f"the state directory was written {round(newest - now)} s in the future",
            "set the clock, or wait until it is right",
        )
    well = now > 1_735_689_600  # 2025-01-01
    return judge(
        well,
        time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "set the clock: leases and reset proofs depend on it",
    )
