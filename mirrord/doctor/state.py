"""Checks of the state directory."""

import os
import stat
import tempfile
import time

from ..config import Settings
from ..errors import BackendUnavailableError
from ..host.files import grant_search
from ..host.mounting import choose_mounter
from ..host.mounts import HARMLESS
from ..places import Layout
from ..presence import exists, matching
from .checks import Result, entries, existing, judge
from .units import unit_uid


def state_dir(settings: Settings) -> Result:
    path = settings.state_dir
    if not exists(path):
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
    # in a sticky directory nobody renames what is another's
    unsafe = [str(path) for path, mode in modes if mode & 0o022 and not mode & stat.S_ISVTX]
    fact = f"others may write to {', '.join(unsafe)}" if unsafe else "writable by their owners only"
    remedy = "move state_dir below directories that only root or its owner may write to"
    return judge(not unsafe, fact, remedy)


def one_file_system(settings: Settings) -> Result:
    layout, home = Layout(settings.state_dir), existing(settings.state_dir).stat().st_dev
    parts = layout.mirrors, layout.templates, layout.checkouts, layout.leases, layout.quarantine
    paths = [path for path in (*parts, layout.datasets, layout.bundles) if exists(path)]
    foreign = [path.name for path in paths if path.stat().st_dev != home]
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
    if exists(checkouts) and os.statvfs(checkouts).f_flag & HARMLESS == HARMLESS:
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
    # a younger one may be of a fetch that runs; maintenance too removes those older than an hour
    hour_ago = time.time() - 3600
    packs = matching(settings.state_dir, "mirrors/*/objects/pack/tmp_*")
    old = sum(path.stat().st_mtime < hour_ago for path in packs)
    fact = f"{quarantine} in quarantine, {old} unfinished packs"
    remedy = "the daemon removes them when it starts"
    return judge(not old and quarantine < 100, fact, remedy, otherwise="warn")
