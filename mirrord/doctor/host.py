"""Checks of the host: programs, libraries, and the kernel with its privileges and limits."""

import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import anyio

from ..config import Settings
from ..environments.builder import build_owner, find_uv
from ..errors import MirrordError
from ..git.command import run_git_sync
from ..host.mount_tables import shares_mounts
from ..host.mounting import LocalMounter, choose_mounter, probe_overlay
from ..host.mounts import may_mount
from ..host.namespaces import home
from ..host.processes import search_path
from ..model import Backend, Place
from ..presence import exists, is_dir
from ..workers.pool import Workers
from .checks import Result, Verdict, entries, existing, judge
from .place import WEAKER, here


def _version(text: str, parts: int = 2) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:parts]))


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
    if _version(text) < (2, 39):
        return "warn", text, "mirrord is tested with git 2.39 and newer"
    major, minor, *patch = _version(text, 3)
    if (patch or [0])[0] >= _GIT_FIXED.get((major, minor), 0):
        return "ok", text, ""
    if package := _git_package():
        return "ok", f"{text}, {package}: distributions fix it under the same version", ""
    first = f"{major}.{minor}.{_GIT_FIXED[major, minor]}"
    return "warn", f"{text} {_GIT_FAULTS}", f"install {first} or newer, or a distribution's package"


# The first release of each series with the fixes of 2.45.1; later series have them. Distributions
# fix it under the same version (Debian 12: 2.39.5-0+deb12u3).
_GIT_FIXED = {
    (2, 39): 4, (2, 40): 2, (2, 41): 1, (2, 42): 2, (2, 43): 4, (2, 44): 1, (2, 45): 1,
}  # fmt: skip
_GIT_FAULTS = (
    "may run programs of an upstream that is another user's local repository (CVE-2024-32004,"
    " CVE-2024-32465)"
)
# databases of rpm, apk and pacman: where one is, the git in /usr/bin is the distribution's
_PACKAGES = "/var/lib/rpm", "/usr/lib/sysimage/rpm", "/lib/apk/db", "/var/lib/pacman/local"


def _git_package() -> str | None:
    """Return the version of the distribution's git package, None if git is from elsewhere."""
    path = shutil.which("git", path=search_path()) or ""
    if Path(path).parent not in (Path("/usr/bin"), Path("/bin")):
        return None
    with suppress(OSError):
        packages = Path("/var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
        # a paragraph for each package; Debian's version of git has an epoch (1:2.39.5-0+deb12u3)
        if match := re.search(r"(?m)^Package: git\n(?:.+\n)*?Version: (?:\d+:)?(.+)", packages):
            return match[1]
    return "a package" if any(map(is_dir, _PACKAGES)) else None


def setpriv(settings: Settings) -> Result:
    path = shutil.which("setpriv", path=search_path())
    fact = path or "setpriv is not installed"
    return judge(path is not None, fact, "install util-linux: git would outlive a killed daemon")


def packages(settings: Settings) -> Result:
    """Check distributions, not modules: that of the client has no module of its name."""
    missing, lines = [], []
    with suppress(PackageNotFoundError):
        lines = requires("mirrord") or []
    for name in (re.split(r"[^A-Za-z0-9._-]", line)[0] for line in lines if is_needed(line)):
        try:
            distribution(name)
        except PackageNotFoundError:
            missing.append(name)
    fact = f"missing: {', '.join(missing)}" if missing else "all installed"
    return judge(not missing, fact, "install mirrord with its dependencies")


_OLDER_PYTHON = re.compile(r"python_version < ['\"](\d+)\.(\d+)")


def is_needed(requirement: str) -> bool:
    """Return whether a requirement is of no extra, and for this Python."""
    older = _OLDER_PYTHON.search(requirement)
    is_for_this = older is None or sys.version_info < (int(older[1]), int(older[2]))
    return is_for_this and "extra ==" not in requirement


def builds(settings: Settings) -> Result:
    """Check what builds of environments need besides sandboxes."""
    uid, _ = build_owner()
    index = settings.environments.index.removeprefix("file://")
    if index.startswith("/") and not is_dir(index):
        return "warn", f"index {index} is not a directory", "set [environments] index"
    try:
        return "ok", f"as uid {uid}, by {find_uv()}", ""
    except MirrordError as error:
        return "warn", error.message.partition(": ")[2], f"to build environments, {error.hint}"


def images(settings: Settings) -> Result:
    """Check what imports of images need."""
    missing = [name for name in ("skopeo", "umoci") if shutil.which(name) is None]
    if missing:
        return "warn", f"{' and '.join(missing)} not installed", f"install `{' '.join(missing)}`"
    file = settings.environments.auth_file
    if file and not os.access(file, os.R_OK):
        return "warn", f"{file} cannot be read", "set [environments] auth_file"
    if here(settings) in (Place.USER, Place.CONTAINER):
        return "warn", "imported, but not used: a root file system needs mounts", WEAKER
    return "ok", "by skopeo and umoci", ""


def certificates(settings: Settings) -> Result:
    exists = is_dir("/etc/ssl/certs")
    fact = f"/etc/ssl/certs {'exists' if exists else 'is missing'}"
    return judge(exists, fact, "install ca-certificates: git cannot fetch over HTTPS without them")


def libgit2(settings: Settings) -> Result:
    """Load it in a worker process, as the daemon does."""

    async def ask_worker() -> str:
        workers = Workers(size=1)
        try:
            # loading takes 0.2 s; more than 30 is a worker that hangs
            return await workers.run(_load_objects, timeout=timedelta(seconds=30))
        finally:
            await workers.close()

    return "ok", anyio.run(ask_worker), ""


def _load_objects() -> str:
    from ..git.objects import repository  # noqa: F401, PLC0415  (libgit2 only in workers)

    return "loads in a worker process"


# -- the kernel -----------------------------------------------------------------------------------


def kernel(settings: Settings) -> Result:
    release = platform.release()
    is_recent = _version(release) >= (5, 19)  # idmapped mounts as lower layers of an overlay
    remedy = "use Linux 5.19 or newer for overlay checkouts of other users than the daemon's"
    return judge(is_recent, f"Linux {release}", remedy, otherwise="warn")


def overlay(settings: Settings) -> Result:
    """Mount one in the state directory, for this user and another, as the daemon does."""
    verdict: Verdict = "fail" if settings.checkouts.backend is Backend.OVERLAY else "warn"
    above = existing(settings.state_dir)
    try:
        mounter = choose_mounter(settings.state_dir, settings.socket.parent / "mount.sock")
        if not isinstance(mounter, LocalMounter):
            return "ok", "mounted by the mount service", ""
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=above) as scratch:
            mounter = LocalMounter(Path(scratch))
            try:
                unmapped = probe_overlay(Path(scratch), mounter)
            finally:
                mounter.close(unbind=True)
    except MirrordError as error:
        remedy = f"{error.hint or 'check dmesg'}; without overlays the pool backend serves"
        return verdict, error.message, remedy
    if home.is_inside():  # where files of the host cannot be mapped to others
        return "ok", "overlay mount works, for this user", ""
    fact = f"overlay mount works: {unmapped}" if unmapped else "overlay mount works"
    remedy = "only the daemon's user gets overlay checkouts; the pool backend serves others"
    return judge(not unmapped, fact, remedy, otherwise="warn")


def privileges(settings: Settings) -> Result:
    allowed = may_mount()
    remedy = "run as root or with the mount service; otherwise there are no overlays, and the pool"
    remedy += " backend serves only the daemon's user"
    fact = f"uid {os.geteuid()}, {'may' if allowed else 'may not'} mount"
    return judge(allowed, fact, remedy, otherwise="warn")


def mount_namespace(settings: Settings) -> Result:
    if (shared := shares_mounts(1)) is None:
        return "ok", "unknown: this process may not read the namespace of pid 1", ""
    remedy = "other processes do not see mounts made here: run it without file system sandboxing"
    return judge(shared, "shared with pid 1" if shared else "private", remedy, otherwise="warn")


def mount_limit(settings: Settings) -> Result:
    limit, checkouts_max = _kernel_setting("fs/mount-max"), settings.checkouts.max
    # the limit is of a mount namespace, which has the mounts of the host too
    needed = checkouts_max + 1000
    fact = f"fs.mount-max is {limit}, [checkouts] max is {checkouts_max}"
    remedy = f"set fs.mount-max to {needed} or more, or lower [checkouts] max"
    return judge(limit >= needed, fact, remedy, otherwise="warn")


def inotify(settings: Settings) -> Result:
    instances = _kernel_setting("fs/inotify/max_user_instances")
    watches = _kernel_setting("fs/inotify/max_user_watches")
    fact, remedy = f"{instances} instances, {watches} watches", "raise fs.inotify.max_user_*"
    return judge(instances >= 16 and watches >= 64, fact, remedy, otherwise="warn")


def open_files(settings: Settings) -> Result:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = hard == resource.RLIM_INFINITY or hard >= 4096
    remedy = "raise it with LimitNOFILE= or `ulimit -Hn 65536`"
    return judge(is_enough, f"at most {hard}", remedy, otherwise="warn")


def processes(settings: Settings) -> Result:
    """Check the limit for workers, git and their threads; root has none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    is_enough = limit in (resource.RLIM_INFINITY, -1) or limit >= 512 or os.geteuid() == 0
    remedy = "raise it with TasksMax= and LimitNPROC=, or `ulimit -u 4096`"
    return judge(
        is_enough, f"at most {limit}" if limit >= 0 else "no limit", remedy, otherwise="warn"
    )


def namespaces(settings: Settings) -> Result:
    """Check settings that sandboxes and idmapped mounts need; not every kernel has them."""
    lines, remedies = [], []
    for name, minimum in _NAMESPACES.items():
        with suppress(FileNotFoundError):
            value = _kernel_setting(name)
            key = name.replace("/", ".")
            lines.append(f"{key} is {value}")
            if value < minimum:
                remedies.append(f"`sysctl -w {key}={minimum}`")
    with suppress(FileNotFoundError):
        if _kernel_setting(_RESTRICTED):
            lines.append("AppArmor restricts user namespaces")
            remedies.append("give bwrap an AppArmor profile with `userns,`")
    return judge(not remedies, ", ".join(lines), "; ".join(remedies), otherwise="warn")


_NAMESPACES = {
    "user/max_user_namespaces": 1000,
    "user/max_mnt_namespaces": 1000,
    "kernel/unprivileged_userns_clone": 1,  # Debian
}
_RESTRICTED = "kernel/apparmor_restrict_unprivileged_userns"  # Ubuntu 23.10


def security_modules(settings: Settings) -> Result:
    try:
        modules = Path("/sys/kernel/security/lsm").read_text(encoding="ascii").strip()
    except OSError:
        modules = "not readable by this user"
    with suppress(OSError):
        if Path("/sys/fs/selinux/enforce").read_text(encoding="ascii").strip() == "1":
            remedy = "label checkouts for containers: `chcon -Rt container_file_t`, or :z"
            return "warn", f"SELinux is enforcing ({modules})", remedy
    return "ok", modules, ""


def control_groups(settings: Settings) -> Result:
    """Check that this user's sandboxes can have control groups, which count met limits."""
    root = Path("/sys/fs/cgroup")
    is_unified = exists(root / "cgroup.controllers")
    places = [root] if is_unified else [root / "memory", root / "pids"]
    if all(os.access(place, os.W_OK) for place in places):
        return "ok", f"version {2 if is_unified else 1}, writable", ""
    fact = (
        "not writable: limits of sandboxes apply to each process, and met limits are not reported"
    )
    return "warn", fact, "run sandboxes as root for limits of all their processes"


def clock(settings: Settings) -> Result:
    now = time.time()
    newest = max((entry.stat().st_mtime for entry in entries(settings.state_dir)), default=0.0)
    if newest > now + 60:
        fact = f"the state directory was written {round(newest - now)} s in the future"
        return "fail", fact, "set the clock, or wait until it is right"
    is_plausible = now > 1_735_689_600  # 2025-01-01
    fact = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return judge(is_plausible, fact, "set the clock: leases and reset proofs depend on it")
