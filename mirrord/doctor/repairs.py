"""What can be put right without a decision: modes, missing directories and accounts, leftovers.

Never touches a mirror, a pin, a row or a checkout with a lease. `find_repairs` changes nothing.
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

from ..bubblewrap import sweep_scratch
from ..config import Settings
from ..errors import MirrordError
from ..host.files import opened
from ..host.mounts import mounts_below, umount
from ..host.trash import find_trash, remove_tree
from ..places import Layout
from ..telemetry import masked
from .checks import Result, Step, entries, existing, judge, run
from .disk import SCRATCH_PREFIX
from .units import find_unit

_SYSUSERS = Path("sysusers.d/mirrord.conf")
_TMPFILES = Path("tmpfiles.d/mirrord.conf")
_CONFIGURED = (Path("/etc"), Path("/run"), Path("/usr/local/lib"), Path("/usr/lib"))


class Repaired(NamedTuple):
    """`detail` says why it failed."""

    what: str
    state: Literal["planned", "done", "failed"]
    detail: str = ""


def find_repairs(settings: Settings, config_path: Path | None, *, alone: bool) -> list[Step]:
    """Leftovers last: removing them may need the modes. `alone`: inside of `no_daemon`."""
    return [
        *_accounts(settings),
        *_directories(settings),
        *_modes(settings),
        *_config_mode(config_path),
        *find_leftovers(settings, alone=alone),
    ]


def repair(settings: Settings, config_path: Path | None, *, dry_run: bool) -> list[Repaired]:
    """Do all of it, or say what would be done; one that fails stops no other."""
    done = []
    with no_daemon(settings) as alone:
        for each in find_repairs(settings, config_path, alone=alone):
            if dry_run:
                done.append(Repaired(each.what, "planned"))
                continue
            try:
                each.act()
            except FileNotFoundError:  # somebody else did
                done.append(Repaired(each.what, "done"))
            except (OSError, MirrordError) as error:
                done.append(Repaired(each.what, "failed", str(error)))
            else:
                done.append(Repaired(each.what, "done"))
    return done


def config_file(settings: Settings, path: Path | None) -> Result:
    if path is None:
        return "ok", "none: the defaults are in use", ""
    mode = stat.S_IMODE(path.stat().st_mode)
    fact = f"{path}, mode {mode:04o}"
    if mode & 0o002:
        return "fail", f"{fact}: everybody may change it", f"chmod o-w {path}"
    if list(_config_mode(path)):
        return "warn", f"{fact}, and it holds a password or token", f"chmod o-r {path}"
    return "ok", fact, ""


def _config_mode(path: Path | None) -> Iterator[Step]:
    """Who else may read it learns the credentials in URLs."""
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


def _accounts(settings: Settings) -> Iterator[Step]:
    """Only root can; systemd's own way where the package has it."""
    if os.geteuid() != 0:
        return
    if _installed(_SYSUSERS) and not _exists(pwd.getpwnam, "mirrord"):
        make = partial(run, "systemd-sysusers", "mirrord.conf")
        yield Step("make mirrord's users with systemd-sysusers", make)
    name = settings.access.group
    if not _exists(grp.getgrnam, name) and not (name == "mirrord" and _installed(_SYSUSERS)):
        yield Step(f"make group {name}", partial(run, "groupadd", "--system", name))


def _directories(settings: Settings) -> Iterator[Step]:
    if _installed(_TMPFILES) and os.geteuid() == 0 and find_unit("mirrord.service"):
        missing = [each for each in ("/run/mirrord", "/var/lib/mirrord") if not os.path.isdir(each)]
        if missing:
            what = f"make {' and '.join(missing)} with systemd-tmpfiles"
            yield Step(what, partial(run, "systemd-tmpfiles", "--create", "mirrord.conf"))
            return
    if not settings.state_dir.exists() and os.access(existing(settings.state_dir), os.W_OK):
        layout = Layout(settings.state_dir)
        yield Step(f"make {layout.root} with mode 0711", layout.make_root)
    above = settings.socket.parent
    if not above.exists() and os.access(existing(above), os.W_OK):
        make = partial(above.mkdir, mode=0o755, parents=True)
        yield Step(f"make {above} with mode 0755", make)


def _modes(settings: Settings) -> Iterator[Step]:
    """Those that a start sets, where they are this process's to set."""
    layout = Layout(settings.state_dir)
    for directory, wanted in layout.modes().items():
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            held = directory.lstat()
            mode = stat.S_IMODE(held.st_mode)
            if mode != wanted and os.geteuid() in (0, held.st_uid) and stat.S_ISDIR(held.st_mode):
                yield _set_mode(directory, wanted, os.O_DIRECTORY | os.O_NOFOLLOW)


def _set_mode(path: Path, mode: int, flags: int = 0) -> Step:
    """A directory of the daemon's user is no link to another's when root comes to it."""

    def act() -> None:
        with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)) as fd:
            os.fchmod(fd, mode)

    now = stat.S_IMODE(path.stat().st_mode)
    return Step(f"set the mode of {path} from {now:04o} to {mode:04o}", act)


def _installed(name: Path) -> bool:
    return any((place / name).exists() for place in _CONFIGURED)


def _exists(look_up: Callable[[str], object], name: str) -> bool:
    try:
        look_up(name)
    except KeyError:
        return False
    return True


# -- what earlier daemons, doctors and clients left; of the state directory what no daemon holds --


@contextmanager
def no_daemon(settings: Settings) -> Iterator[bool]:
    """Keeps a daemon from starting; answers False where one runs, or may."""
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


def find_leftovers(settings: Settings, *, alone: bool) -> list[Step]:
    """Mounts first: what is mounted on cannot be removed. `alone`: inside of `no_daemon`."""
    sandboxes = [
        Step(f"remove {path}, left by a killed sandbox", partial(sweep_scratch))
        for path in sweep_scratch(dry_run=True)
    ]
    return [*_of_state(settings), *sandboxes] if alone else sandboxes


def remaining(settings: Settings) -> Result:
    with no_daemon(settings) as alone:
        found = find_leftovers(settings, alone=alone)
    fact = "; ".join(each.what for each in found[:3]) + ("; …" if len(found) > 3 else "")
    remedy = "a start of the daemon, a sandbox, or `mirrord doctor --fix` does that"
    return judge(not found, f"to do: {fact}" if found else "none", remedy, otherwise="warn")


def _of_state(settings: Settings) -> Iterator[Step]:
    layout = Layout(settings.state_dir)
    above = existing(settings.state_dir)
    scratches = [Path(entry.path) for entry in entries(above) if _is_scratch(entry)]
    top = str(layout.checkouts)
    for point in [
        *mounts_below(top),
        *(p for place in scratches for p in mounts_below(str(place))),
    ]:
        if point != top and not _has_lease(layout, Path(point)):
            yield Step(f"unmount {point}, which belongs to no checkout", partial(umount, point))
    for directory in (
        *(layout.mirrors, layout.quarantine, layout.checkouts, layout.leases, layout.templates),
        *layout.templates.glob("[!.]*"),
        *layout.templates.glob("[!.]*/*"),
    ):
        for path in find_trash(directory):
            yield Step(
                f"remove {path}, which an earlier daemon discarded", partial(remove_tree, path)
            )
    for path in scratches:
        yield Step(f"remove {path}, left by a killed doctor", partial(remove_tree, path))
    if settings.socket.is_socket() and _is_dead(settings.socket):
        what = f"remove {settings.socket}, at which nobody listens"
        yield Step(what, settings.socket.unlink)


def _is_scratch(entry: os.DirEntry[str]) -> bool:
    """A doctor needs seconds."""
    with suppress(OSError):
        return entry.name.startswith(SCRATCH_PREFIX) and _is_old(entry.stat().st_ctime)
    return False


def _is_old(at: float) -> bool:
    return at < time.time() - 60


def _has_lease(layout: Layout, path: Path) -> bool:
    """Whether a mount is below the directory of a checkout that the next daemon adopts."""
    if not path.is_relative_to(layout.checkouts):
        return False
    private = layout.leases / path.relative_to(layout.checkouts).parts[0]
    return any((private / name).exists() for name in ("lease.json", "resetting.json"))


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
