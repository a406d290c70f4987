"""Checks of the host: programs, libraries, the kernel, what it allows this process, its limits."""

import importlib
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Literal

import anyio

from ..checkouts.overlay.probe import try_overlay
from ..config import Settings
from ..environments.launch import build_owner, find_uv
from ..errors import MirrordError
from ..git.command import run_git_sync
from ..git.workers import Workers
from ..host.mounting import LocalMounter, choose_mounter
from ..host.mounts import may_mount
from ..host.namespaces import shares_mounts
from ..host.processes import search_path
from ..model import Backend

Verdict = Literal["ok", "warn", "fail"]
Result = tuple[Verdict, str, str]
"""A verdict, the fact behind it, and a remedy unless it is ok."""


def judge(well: bool, fact: str, remedy: str, *, otherwise: Verdict = "fail") -> Result:
    return ("ok", fact, "") if well else (otherwise, fact, remedy)


def existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def entries(path: Path) -> Iterator[os.DirEntry[str]]:
    if path.is_dir():
        with os.scandir(path) as found:
            yield from found


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _kernel_setting(name: str) -> int:
    return int(Path("/proc/sys", name).read_text(encoding="ascii"))


# -- programs and libraries -----------------------------------------------------------------------


def git(settings: Settings) -> Result:
    try:
        text = run_git_sync("version").stdout.decode().strip()
    except MirrordError as error:
        return "fail", error.message, "install git 2.39 or newer"
    if _version(text) < (2, 36):  # core.fsync as a list of components
        return "fail", text, "install git 2.39 or newer: this one lacks core.fsync"
    remedy = "mirrord is tested with git 2.39 and newer"
    return judge(_version(text) >= (2, 39), text, remedy, otherwise="warn")


def setpriv(settings: Settings) -> Result:
    found = shutil.which("setpriv", path=search_path())
    fact = found or "setpriv is not installed"
    return judge(found is not None, fact, "install util-linux: it ends git with the daemon")


def packages(settings: Settings) -> Result:
    """By distribution: the client's has no module of its name."""
    missing, lines = [], []
    with suppress(PackageNotFoundError):
        lines = requires("mirrord") or []
    for name in (re.split(r"[^A-Za-z0-9._-]", line)[0] for line in lines if "extra ==" not in line):
        try:
            distribution(name)
        except PackageNotFoundError:
            missing.append(name)
    fact = f"missing: {', '.join(missing)}" if missing else "all installed"
    return judge(not missing, fact, "install mirrord with its dependencies")


def builds(settings: Settings) -> Result:
    """What builds of environments need, besides sandboxes."""
    uid, _ = build_owner()
    index = settings.environments.index.removeprefix("file://")
    if index.startswith("/") and not Path(index).is_dir():
        return "warn", f"the index {index} is no directory", "see [environments] index"
    try:
        return "ok", f"as uid {uid}, by {find_uv()}", ""
    except MirrordError as error:
        return "warn", error.message.partition(": ")[2], f"to build environments, {error.hint}"


def certificates(settings: Settings) -> Result:
    well = Path("/etc/ssl/certs").is_dir()
    fact = f"/etc/ssl/certs {'exists' if well else 'is missing'}"
    return judge(well, fact, "install ca-certificates: git cannot fetch over HTTPS without them")


def libgit2(settings: Settings) -> Result:
    """In a worker process, as the daemon does."""

    async def ask_worker() -> str:
        workers = Workers(size=1)
        try:
            return await workers.run(_load_objects, timeout=timedelta(seconds=30))
        finally:
            await workers.close()

    return "ok", anyio.run(ask_worker), ""


def _load_objects() -> str:
    importlib.import_module("mirrord.git.objects.repository")
    return "loads in a worker process"


# -- the kernel -----------------------------------------------------------------------------------


def kernel(settings: Settings) -> Result:
    release = platform.release()
    well = _version(release) >= (5, 19)  # idmapped mounts as lower layers of an overlay
    remedy = "Linux 5.19 and newer give overlay checkouts to other users than the daemon's"
    return judge(well, f"Linux {release}", remedy, otherwise="warn")


def overlay(settings: Settings) -> Result:
    """Makes one in the state directory, for this user and for another, as the daemon does."""
    verdict: Verdict = "fail" if settings.checkouts.backend is Backend.OVERLAY else "warn"
    above = existing(settings.state_dir)
    try:
        mounter = choose_mounter(settings.state_dir, settings.socket.parent / "mount.sock")
        if not isinstance(mounter, LocalMounter):
            return "ok", "the mount service makes them", ""
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=above) as scratch:
            mounter = LocalMounter(Path(scratch))
            try:
                unmapped = try_overlay(Path(scratch), mounter)
            finally:
                mounter.close(unbind=True)
    except MirrordError as error:
        remedy = f"{error.hint or 'see the kernel log'}; without it the pool backend serves"
        return verdict, error.message, remedy
    fact = f"mounted one: {unmapped}" if unmapped else "mounted one"
    remedy = "only the daemon's own user has overlay checkouts; the pool backend serves others"
    return judge(not unmapped, fact, remedy, otherwise="warn")


def privileges(settings: Settings) -> Result:
    well = may_mount()
    remedy = "run as root or beside the mount service: otherwise there is no overlay, and the pool"
    remedy += " serves only the daemon's own user"
    fact = f"uid {os.geteuid()}, {'may' if well else 'may not'} mount"
    return judge(well, fact, remedy, otherwise="warn")


def mount_namespace(settings: Settings) -> Result:
    if not os.access("/proc/1/ns/mnt", os.F_OK):
        return "ok", "not known: this process may not look at pid 1", ""
    shared = shares_mounts(1)
    remedy = "no process outside sees mounts made here: mount without file system sandboxing"
    return judge(shared, "shared with pid 1" if shared else "private", remedy, otherwise="warn")


def mount_limit(settings: Settings) -> Result:
    limit, most = _kernel_setting("fs/mount-max"), settings.checkouts.max
    fact = f"fs.mount-max is {limit}, [checkouts] max is {most}"
    remedy = f"set fs.mount-max to {most + 1000} or more, or lower [checkouts] max"
    return judge(limit >= most + 1000, fact, remedy, otherwise="warn")


def inotify(settings: Settings) -> Result:
    instances = _kernel_setting("fs/inotify/max_user_instances")
    watches = _kernel_setting("fs/inotify/max_user_watches")
    fact, remedy = f"{instances} instances, {watches} watches", "raise fs.inotify.max_user_*"
    return judge(instances >= 16 and watches >= 64, fact, remedy, otherwise="warn")


def open_files(settings: Settings) -> Result:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    well = hard == resource.RLIM_INFINITY or hard >= 4096
    remedy = "raise it with LimitNOFILE= or `ulimit -Hn 65536`"
    return judge(well, f"at most {hard}", remedy, otherwise="warn")


def clock(settings: Settings) -> Result:
    now = time.time()
    newest = max((entry.stat().st_mtime for entry in entries(settings.state_dir)), default=0.0)
    if newest > now + 60:
        fact = f"the state directory was written {round(newest - now)} s in the future"
        return "fail", fact, "set the clock, or wait until it is right"
    well, fact = now > 1_735_689_600, time.strftime("%Y-%m-%d %H:%M:%S %Z")  # since 2025-01-01
    return judge(well, fact, "set the clock: leases and reset proofs depend on it")
