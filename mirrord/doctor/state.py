"""Checks of the installation: state directory, catalog, store, and the way to the daemon."""

import fcntl
import grp
import os
import shutil
import socket
import sqlite3
import stat
import tempfile
import time
import tomllib
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

from ..checkouts.leases import find_unreadable
from ..config import Settings
from ..errors import BackendUnavailableError, MirrordError
from ..git.command import run_git_sync
from ..host.files import grant_search, opened
from ..host.mounting import choose_mounter
from ..host.mounts import HARMLESS, find_left_behind
from ..host.processes import search_path
from ..model import MirrorName
from ..places import DOCKER_SOCKET, Layout
from ..sandbox.box import find_obstacle
from .checks import Result, entries, existing, judge
from .units import find_unit, unit_uid

# -- the state directory --------------------------------------------------------------------------


def state_dir(settings: Settings) -> Result:
    path = settings.state_dir
    if not path.exists():
        can_make = os.access(existing(path), os.W_OK)
        remedy = f"create {path}, owned by the daemon's user"
        return judge(can_make, f"{path} does not exist yet", remedy)
    held = path.stat()
    mode = stat.S_IMODE(held.st_mode)
    fact = f"{path}, mode {mode:04o}, owner {held.st_uid}"
    if held.st_uid not in (0, os.geteuid(), unit_uid()):
        return "fail", fact, "run the daemon as the owner, or set another state_dir"
    return judge(not mode & 0o022, fact, f"others may write to it: chmod 0711 {path}")


def parents(settings: Settings) -> Result:
    """Check who may rename a parent, and so replace the whole state directory."""
    modes = [(parent, parent.stat().st_mode) for parent in existing(settings.state_dir).parents]
    unsafe = [str(path) for path, mode in modes if mode & 0o022 and not mode & stat.S_ISVTX]
    fact = f"others may write to {', '.join(unsafe)}" if unsafe else "writable by their owners only"
    remedy = "move state_dir below directories that only root or its owner may write to"
    return judge(not unsafe, fact, remedy)


def one_file_system(settings: Settings) -> Result:
    layout, home = Layout(settings.state_dir), existing(settings.state_dir).stat().st_dev
    parts = layout.mirrors, layout.templates, layout.checkouts, layout.leases, layout.quarantine
    found = [path for path in (*parts, layout.datasets, layout.bundles) if path.exists()]
    foreign = [path.name for path in found if path.stat().st_dev != home]
    fact = f"on other file systems: {', '.join(foreign)}" if foreign else "on one file system"
    remedy = "keep state_dir on one file system: files are renamed and hard-linked between parts"
    return judge(not foreign, fact, remedy)


def access_lists(settings: Settings) -> Result:
    """Try one: each checkout has an entry for its owner."""
    above = existing(settings.state_dir)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=above) as scratch:
        try:
            grant_search(scratch, 65534)
        except BackendUnavailableError as error:
            fact = "not supported: only root and the daemon's user can have checkouts"
            return "fail", fact, error.hint or ""
    return "ok", "only its owner can enter a checkout", ""


def set_id_bits(settings: Settings) -> Result:
    checkouts = settings.state_dir / "checkouts"
    if checkouts.exists() and os.statvfs(checkouts).f_flag & HARMLESS == HARMLESS:
        return "ok", f"{checkouts} is mounted with nosuid,nodev", ""
    try:
        choose_mounter(settings.state_dir, settings.socket.parent / "mount.sock")
    except BackendUnavailableError:
        remedy = (
            "run the daemon as root or with mirrord-mount.service, which mount it so; or mount a"
        )
        remedy += f" separate file system with nosuid,nodev at {checkouts}"
        return "warn", f"{checkouts} allows set-id programs and devices", remedy
    return "ok", "a running daemon mounts checkouts with nosuid,nodev", ""


def unfinished(settings: Settings) -> Result:
    quarantine = len(list(entries(settings.state_dir / "quarantine")))
    hour_ago = time.time() - 3600
    packs = settings.state_dir.glob("mirrors/*/objects/pack/tmp_*")
    old = sum(path.stat().st_mtime < hour_ago for path in packs)
    fact = f"{quarantine} in quarantine, {old} unfinished packs"
    remedy = "the daemon removes them when it starts"
    return judge(not old and quarantine < 100, fact, remedy, otherwise="warn")


# -- the catalog ----------------------------------------------------------------------------------

_REBUILD = (
    "start the daemon: it adopts mirrors and pins, and imports the files in datasets/ again; add"
    " mirrors with other URLs again, and import other dataset files by hand"
)
_RECORDED = (
    "SELECT 'dataset/' || datasets.name, mirror_key, commit_id FROM recorded_commits"
    " JOIN datasets ON datasets.id = recorded_commits.dataset_id UNION"
    " SELECT owner, mirror_key, commit_id FROM pins WHERE owner NOT LIKE 'dataset/%'"
)


def catalog(settings: Settings) -> Result:
    """Check that it can be read, and that it records all mirrors and pins on disk.

    Pins are refs of mirrors: a lost or older catalog lacks mirrors, or owners of pins. A running
    import looks the same until it ends.
    """
    if settings.catalog.url:
        return _shared_catalog(settings.catalog.url)
    path, mirrors = settings.state_dir / "catalog.sqlite3", settings.state_dir / "mirrors"
    names = [entry.name for entry in entries(mirrors)]
    missing = _read_pins(mirrors, names)
    if not path.exists() or not path.stat().st_size:
        fact = f"it does not exist, but {len(names)} mirrors do" if names else "none yet"
        return judge(not names, fact, _remedy(missing))
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            known = {row[0].lower() for row in connection.execute("SELECT name FROM mirrors")}
            missing -= set(connection.execute(_RECORDED))
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    if verdict != "ok":
        remedy = f"stop the daemon and move {path}* away; then {_remedy(missing)}"
        return "fail", f"it is damaged: {verdict}", remedy
    if unknown := [name for name in names if name.lower() not in known]:
        fact = f"{len(known)} mirrors, but {len(unknown)} on disk are not recorded"
        return "warn", fact, _remedy(missing)
    if not missing:
        return "ok", f"{len(known)} mirrors; all pins are recorded", ""
    counts = sorted(Counter(owner.removeprefix("dataset/") for owner, _, _ in missing).items())
    listed = ", ".join(f"{count} of {owner}" for owner, count in counts)
    fact = f"lost, or older than the mirrors: pinned commits are not recorded, {listed}"
    return "warn", fact, _remedy(missing)


def _shared_catalog(url: str) -> Result:
    """Check that PostgreSQL answers, without the daemon's systemd credentials."""
    from ..catalog import database  # noqa: PLC0415  (takes 0.2 s to load)

    try:
        revision = database.read_revision(url)
    except MirrordError as error:
        return "fail", error.message, error.hint or ""
    if revision is None:
        return "ok", "the database is empty; the first daemon creates the tables", ""
    return "ok", f"PostgreSQL answers; its schema is {revision}", ""


def store(settings: Settings) -> Result:
    """Check that the fleet's store answers and supports conditional writes."""
    if not settings.store.url:
        return "ok", "none is configured", ""
    try:
        from ..fleet.objects import ObjectStore  # noqa: PLC0415  (an extra; takes 0.1 s to load)

        ObjectStore(settings.store.url).check()
    except ImportError:
        return "fail", "obstore is not installed", "pip install 'mirrord[fleet]'"
    except MirrordError as error:
        return "fail", error.message, error.hint or ""
    return "ok", f"{settings.store.url} answers, with conditional writes", ""


def _remedy(missing: set[tuple[str, str, str]]) -> str:
    owners = sorted({owner for owner, _, _ in missing if owner.startswith("dataset/")})
    if not owners:
        return _REBUILD
    imports = [f"mirrord dataset import FILE --name {each.partition('/')[2]}" for each in owners]
    fact = "Until then their pins stay; a bundle of a mirror also has its rows"
    return f"{_REBUILD}: {'; '.join(imports)}. {fact}"


def _read_pins(mirrors: Path, names: list[str]) -> set[tuple[str, str, str]]:
    """Return owner, mirror key and commit of each pin; mirrors that git cannot read are skipped."""
    found = set()
    for name in names:
        try:
            key = MirrorName.parse(name).key
            arguments = "for-each-ref", "--format=%(refname:lstrip=3)", "refs/mirrord/pins/"
            refs = run_git_sync(*arguments, git_dir=mirrors / name, doing="list pins").lines
        except MirrordError:
            continue
        parts = (ref.rpartition("/") for ref in refs)
        found |= {(owner, key, commit) for owner, _, commit in parts}
    return found


# -- the way to the daemon ------------------------------------------------------------------------


def socket_path(settings: Settings) -> Result:
    path = settings.socket
    if len(os.fsencode(path)) > 107:  # sockaddr_un, less its final zero
        return "fail", f"{path} is longer than 107 bytes", "choose a shorter `socket`"
    if (unit := find_unit("mirrord.socket")) and f"ListenStream={path}\n" in unit.read_text():
        return "ok", f"{path}, created by {unit.name}", ""
    parent = existing(path.parent)
    # the daemon's uid is that of the state directory
    uid = settings.state_dir.stat().st_uid if settings.state_dir.exists() else os.geteuid()
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
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 400, 0).decode(errors="replace").strip() or "starting"
            return "ok", f"running: {holder}", ""
    with socket.socket(socket.AF_UNIX) as probe:
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
        fact = f"group {name} does not exist: only root and the daemon's user may use mirrord"
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
    if not DOCKER_SOCKET.is_socket():
        fact = f"no driver listens at {DOCKER_SOCKET}"
        return "warn", fact, "start the daemon; under systemd first enable mirrord-docker.socket"
    if not shutil.which("podman", path=search_path()) or str(DOCKER_SOCKET) in _podman_plugins():
        return "ok", f"served at {DOCKER_SOCKET}", ""
    setting = f'[engine.volume_plugins] mirrord = "{DOCKER_SOCKET}"'
    return "warn", "podman does not know the driver", f"write to {_PODMAN}/mirrord.conf: {setting}"


_PODMAN = "/etc/containers/containers.conf.d"


def _podman_plugins() -> set[str]:
    """Return the sockets of volume drivers in podman's configuration for all users."""
    found = set()
    for file in (Path("/etc/containers/containers.conf"), *Path(_PODMAN).glob("*.conf")):
        with suppress(OSError, ValueError):
            engine = tomllib.loads(file.read_text(encoding="utf-8")).get("engine", {})
            found |= set(engine.get("volume_plugins", {}).values())
    return found


def confinement(settings: Settings) -> Result:
    """Check what sandboxes need: bubblewrap, and user namespaces."""
    if obstacle := find_obstacle():
        remedy = "install `bubblewrap`, and allow user namespaces; sandboxes do not run otherwise"
        return "warn", obstacle, remedy
    if shutil.which("newuidmap", path=search_path()) is None:
        return "ok", "for this uid and root; newuidmap is not installed", ""
    return "ok", "for this uid, subordinate uids and root", ""
