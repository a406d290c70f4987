"""Checks of the way to the daemon: its socket, its group, its leases and volumes."""

import fcntl
import grp
import os
import shutil
import socket
import stat
import tomllib
from contextlib import suppress
from pathlib import Path

from ..checkouts.leases import find_unreadable
from ..config import Settings
from ..host.files import opened
from ..host.mount_tables import find_left_behind
from ..host.peers import SUBUID, iter_subids
from ..host.processes import search_path
from ..places import DOCKER_SOCKET, Layout
from ..presence import exists, is_socket, matching
from ..sandbox.box import find_ip, find_obstacle
from .checks import Result, existing, judge
from .units import find_unit


def socket_path(settings: Settings) -> Result:
    path = settings.socket
    if len(os.fsencode(path)) > 107:  # sockaddr_un, less its final zero
        return "fail", f"{path} is longer than 107 bytes", "choose a shorter `socket`"
    if (unit := find_unit("mirrord.socket")) and f"ListenStream={path}\n" in unit.read_text():
        return "ok", f"{path}, created by {unit.name}", ""
    parent = existing(path.parent)
    # the daemon's uid is that of the state directory
    uid = settings.state_dir.stat().st_uid if exists(settings.state_dir) else os.geteuid()
    is_own = uid == os.geteuid()
    can_write = os.access(parent, os.W_OK) if is_own else uid in (0, parent.stat().st_uid)
    remedy = f"uid {uid} may not write to {parent}: choose another `socket`"
    return judge(can_write, str(path), remedy)


def socket_mode(settings: Settings) -> Result:
    """Check that members of the group can connect."""
    try:
        held = settings.socket.stat()
    except FileNotFoundError:
        return "ok", "it does not exist now", ""
    mode, name = stat.S_IMODE(held.st_mode), settings.access.group
    fact = f"mode {mode:04o}, group {held.st_gid}"
    with suppress(KeyError):
        is_of_group = mode & 0o060 == 0o060 and held.st_gid == grp.getgrnam(name).gr_gid
        is_open = mode & 0o006 == 0o006 or is_of_group
        remedy = f"members of {name} cannot connect: set SocketMode=0666, or restart the daemon"
        return judge(is_open, fact, remedy, otherwise="warn")
    return "ok", fact, ""


def daemon(settings: Settings) -> Result:
    """Look for a daemon by the lock of the state directory, and at the socket."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with (
        suppress(FileNotFoundError),
        opened(os.open(settings.state_dir / "daemon.lock", flags)) as lock,
    ):
        try:
            # shared: two doctors at once do not take each other for a daemon
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 400, 0).decode(errors="replace").strip() or "starting"
            return "ok", f"running: {holder}", ""
    with socket.socket(socket.AF_UNIX) as probe:
        # connect(2) waits for room in the backlog of a daemon that hangs
        probe.settimeout(2)
        try:
            probe.connect(str(settings.socket))
        except OSError:
            return "ok", "not running", ""
    remedy = f"another daemon listens at {settings.socket}: choose another `socket`"
    return "fail", "not running", remedy


def group(settings: Settings) -> Result:
    name = settings.access.group
    try:
        return "ok", f"{name}, gid {grp.getgrnam(name).gr_gid}", ""
    except KeyError:
        who = "no other user may" if os.geteuid() else "only root and the daemon's user may"
        fact = f"group {name} does not exist: {who} use mirrord"
        return "warn", fact, f"create it with `groupadd --system {name}`"


def leases(settings: Settings) -> Result:
    """Find the checkouts whose lease cannot be read: a start sets them aside."""
    reasons = find_unreadable(settings.state_dir)
    listed = "; ".join(f"checkout {name}: {why}" for name, why in [*reasons.items()][:5])
    fact = f"{len(reasons)} unreadable: {listed}" if reasons else "every lease can be read"
    remedy = "repair the lease and restart, or `mirrord release ID` as an administrator"
    return judge(not reasons, fact, remedy, otherwise="warn")


def binds(settings: Settings) -> Result:
    """Check for containers that mounted a tree in a way that resets do not reach."""
    checkouts = Layout(settings.state_dir).checkouts
    stale = [f"process {pid} at {path}" for pid, path in find_left_behind(checkouts).items()]
    fact = f"resets do not reach the trees mounted by {', '.join(stale[:5])}"
    fact = fact if stale else "resets reach all mounts"
    remedy = "bind the checkout's `directory` with rslave, or use `mirrord attach --pid`"
    return judge(not stale, fact, remedy, otherwise="warn")


def volumes(settings: Settings) -> Result:
    """Check that docker and podman find the volume driver."""
    if not settings.docker.volumes:
        return "ok", "disabled: [docker] volumes is false", ""
    if os.geteuid() != 0:
        fact = f"only root can listen at {DOCKER_SOCKET}"
        return "warn", fact, "run the daemon as root, or enable mirrord-docker.socket"
    if not is_socket(DOCKER_SOCKET):
        fact = f"no driver listens at {DOCKER_SOCKET}"
        return "warn", fact, "start the daemon; under systemd first enable mirrord-docker.socket"
    if not shutil.which("podman", path=search_path()) or str(DOCKER_SOCKET) in _podman_plugins():
        return "ok", f"served at {DOCKER_SOCKET}", ""
    setting = f'[engine.volume_plugins] mirrord = "{DOCKER_SOCKET}"'
    return "warn", "podman does not know the driver", f"write to {_PODMAN}/mirrord.conf: {setting}"


_PODMAN = "/etc/containers/containers.conf.d"


def _podman_plugins() -> set[str]:
    """Return the sockets of volume drivers in podman's configuration for all users."""
    plugins = set()
    for file in (Path("/etc/containers/containers.conf"), *matching(Path(_PODMAN), "*.conf")):
        with suppress(OSError, ValueError):
            engine = tomllib.loads(file.read_text(encoding="utf-8")).get("engine", {})
            plugins |= set(engine.get("volume_plugins", {}).values())
    return plugins


def confinement(settings: Settings) -> Result:
    """Check what sandboxes need: bubblewrap, and user namespaces."""
    if obstacle := find_obstacle():
        remedy = "install `bubblewrap`, and allow user namespaces; sandboxes do not run otherwise"
        return "warn", obstacle, remedy
    if find_ip() is None:
        return (
            "warn",
            "without a route: ip is not installed",
            "install `iproute2`; connecting in a sandbox fails at once, instead of timing out",
        )
    if shutil.which("newuidmap", path=search_path()) is None:
        return "ok", "for this uid and root; newuidmap is not installed", ""
    if os.geteuid() == 0:
        return "ok", "for this uid, subordinate uids and root", ""
    if any(user == os.geteuid() for _, _, user in iter_subids(SUBUID)):
        return "ok", "for this uid and its subordinate uids", ""
    return "ok", f"for this uid; {SUBUID} gives it no others", ""
