"""Repairs that need no decision: modes, missing directories and accounts, leftovers.

They never touch a mirror, a pin, a row or a leased checkout. `find_repairs` changes nothing.
"""

import fcntl
import grp
import os
import pwd
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from ..config import Settings
from ..errors import MirrordError
from ..host.files import opened
from ..host.mount_tables import mounts_below
from ..host.mounts import umount
from ..host.trash import find_trash, remove_tree
from ..places import Layout
from ..presence import exists, is_dir, is_socket, matching
from ..sandbox.box import sweep_scratch
from ..telemetry import masked
from .checks import HostStep, Result, entries, existing, judge, run
from .disk import SCRATCH_PREFIX
from .units import find_unit


class Repaired(NamedTuple):
    """A repair and its result; `detail` is the error of a failed one."""

    what: str
    state: Literal["planned", "done", "failed"]
    detail: str = ""


def find_repairs(settings: Settings, config_path: Path | None, *, alone: bool) -> list[HostStep]:
    """Return the repairs. Leftovers are last: removing them may need repaired modes.

    `alone` is what `no_daemon` yields.
    """
    return [
        *_accounts(settings),
        *_directories(settings),
        *_modes(settings),
        *_config_mode(config_path),
        *find_leftovers(settings, alone=alone),
    ]


def repair(settings: Settings, config_path: Path | None, *, dry_run: bool) -> list[Repaired]:
    """Do all repairs, or with `dry_run` only list them; a failure does not stop the rest."""
    done = []
    with no_daemon(settings) as alone:
        for step in find_repairs(settings, config_path, alone=alone):
            if dry_run:
                done.append(Repaired(step.what, "planned"))
                continue
            try:
                step.act()
            except FileNotFoundError:  # it is gone already
                done.append(Repaired(step.what, "done"))
            except (OSError, MirrordError) as error:
                done.append(Repaired(step.what, "failed", str(error)))
            else:
                done.append(Repaired(step.what, "done"))
    return done


def config_file(settings: Settings, path: Path | None) -> Result:
    if path is None:
        return "ok", "none: the defaults are in use", ""
    mode = stat.S_IMODE(path.stat().st_mode)
    fact = f"{path}, mode {mode:04o}"
    if mode & 0o002:
        return "fail", f"{fact}: all users may change it", f"chmod o-w {path}"
    if list(_config_mode(path)):
        return "warn", f"{fact}, and it has a password or token", f"chmod o-r {path}"
    return "ok", fact, ""


def _config_mode(path: Path | None) -> Iterator[HostStep]:
    """Yield a repair of a mode that lets others change the file or read credentials in URLs."""
    with suppress(OSError):
        if path is None:
            return
        mode = stat.S_IMODE(path.stat().st_mode)
        wanted = mode & ~0o002
        text = path.read_text(encoding="utf-8", errors="replace")
        if masked(text) != text:
            wanted &= ~0o007
        if mode != wanted:
            yield _set_mode(path, wanted)


_SYSUSERS = Path("sysusers.d/mirrord.conf")


def _accounts(settings: Settings) -> Iterator[HostStep]:
    """Yield repairs of missing users and groups, for root; with systemd-sysusers if installed."""
    if os.geteuid() != 0:
        return
    if _installed(_SYSUSERS) and not _exists(pwd.getpwnam, "mirrord"):
        make = partial(run, "systemd-sysusers", "mirrord.conf")
        yield HostStep("make mirrord's users with systemd-sysusers", make)
    name = settings.access.group
    if not _exists(grp.getgrnam, name) and not (name == "mirrord" and _installed(_SYSUSERS)):
        yield HostStep(f"make group {name}", partial(run, "groupadd", "--system", name))


_TMPFILES = Path("tmpfiles.d/mirrord.conf")


def _directories(settings: Settings) -> Iterator[HostStep]:
    if _installed(_TMPFILES) and os.geteuid() == 0 and find_unit("mirrord.service"):
        missing = [path for path in ("/run/mirrord", "/var/lib/mirrord") if not is_dir(path)]
        if missing:
            what = f"make {' and '.join(missing)} with systemd-tmpfiles"
            yield HostStep(what, partial(run, "systemd-tmpfiles", "--create", "mirrord.conf"))
            return
    if not exists(settings.state_dir) and os.access(existing(settings.state_dir), os.W_OK):
        layout = Layout(settings.state_dir)
        yield HostStep(f"make {layout.root} with mode 0711", layout.make_root)
    above = settings.socket.parent
    if not exists(above) and os.access(existing(above), os.W_OK):
        make = partial(above.mkdir, mode=0o755, parents=True)
        yield HostStep(f"make {above} with mode 0755", make)


def _modes(settings: Settings) -> Iterator[HostStep]:
    """Yield repairs of directories' modes, as a start sets them, if this process may."""
    layout = Layout(settings.state_dir)
    for directory, wanted in layout.modes().items():
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            held = directory.lstat()
            mode = stat.S_IMODE(held.st_mode)
            if mode != wanted and os.geteuid() in (0, held.st_uid) and stat.S_ISDIR(held.st_mode):
                yield _set_mode(directory, wanted, os.O_DIRECTORY | os.O_NOFOLLOW)


def _set_mode(path: Path, mode: int, flags: int = 0) -> HostStep:
    """Set a mode without following links: the daemon's user could lead root elsewhere."""

    def act() -> None:
        with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)) as fd:
            os.fchmod(fd, mode)

    now = stat.S_IMODE(path.stat().st_mode)
    return HostStep(f"set the mode of {path} from {now:04o} to {mode:04o}", act)


# where systemd-sysusers(8) and systemd-tmpfiles(8) look
_CONFIG_PLACES = (Path("/etc"), Path("/run"), Path("/usr/local/lib"), Path("/usr/lib"))


def _installed(name: Path) -> bool:
    return any(exists(place / name) for place in _CONFIG_PLACES)


def _exists(look_up: Callable[[str], object], name: str) -> bool:
    try:
        look_up(name)
    except KeyError:
        return False
    return True


# -- leftovers of earlier daemons, doctors and clients ---------------------------------------------


@contextmanager
def no_daemon(settings: Settings) -> Iterator[bool]:
    """Keep a daemon from starting; yields False if one runs or may run."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(settings.state_dir / "daemon.lock", flags)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    with opened(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def find_leftovers(settings: Settings, *, alone: bool) -> list[HostStep]:
    """Return the removal of leftovers, those of the state directory only if `alone`."""
    sandboxes = [
        HostStep(f"remove {path}, left by a killed sandbox", partial(sweep_scratch))
        for path in sweep_scratch(dry_run=True)
    ]
    return [*_state_leftovers(settings), *sandboxes] if alone else sandboxes


def remaining(settings: Settings) -> Result:
    with no_daemon(settings) as alone:
        leftovers = find_leftovers(settings, alone=alone)
    fact = "; ".join(leftover.what for leftover in leftovers[:3]) + (
        "; …" if len(leftovers) > 3 else ""
    )
    remedy = "run `mirrord doctor --fix`, or start the daemon"
    return judge(not leftovers, f"to do: {fact}" if leftovers else "none", remedy, otherwise="warn")


def _state_leftovers(settings: Settings) -> Iterator[HostStep]:
    layout = Layout(settings.state_dir)
    above = existing(settings.state_dir)
    scratches = [Path(entry.path) for entry in entries(above) if _is_scratch(entry)]
    top = str(layout.checkouts)
    for root in (top, *map(str, scratches)):  # first: a mount point cannot be removed
        for point in mounts_below(root):
            if point != top and not _has_lease(layout, Path(point)):
                yield HostStep(
                    f"unmount {point}, which belongs to no checkout", partial(umount, point)
                )
    for directory in (
        *(layout.mirrors, layout.quarantine, layout.checkouts, layout.leases, layout.templates),
        *matching(layout.templates, "[!.]*"),
        *matching(layout.templates, "[!.]*/*"),
    ):
        for path in find_trash(directory):
            yield HostStep(
                f"remove {path}, which an earlier daemon discarded", partial(remove_tree, path)
            )
    for path in scratches:
        yield HostStep(f"remove {path}, left by a killed doctor", partial(remove_tree, path))
    if is_socket(settings.socket) and _is_dead(settings.socket):
        what = f"remove {settings.socket}, which has no listener"
        yield HostStep(what, settings.socket.unlink)


# a check ends within 20 s; a younger directory may be another doctor's
_SCRATCH_MAX_AGE_S = 60.0


def _is_scratch(entry: os.DirEntry[str]) -> bool:
    """True for the directory of a doctor that should have ended long ago."""
    with suppress(OSError):
        is_old = entry.stat().st_ctime < time.time() - _SCRATCH_MAX_AGE_S
        return entry.name.startswith(SCRATCH_PREFIX) and is_old
    return False


def _has_lease(layout: Layout, path: Path) -> bool:
    """True for a mount of a checkout that the next daemon takes over."""
    if not path.is_relative_to(layout.checkouts):
        return False
    private = layout.leases / path.relative_to(layout.checkouts).parts[0]
    return any(exists(private / name) for name in ("lease.json", "resetting.json"))


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        # a daemon whose backlog is full lets a connect wait
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
