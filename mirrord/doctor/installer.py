"""Installation of mirrord as a systemd service: units, users, directories, configuration.

The units start the programs of the Python environment that this process runs in. Plans change
nothing; their steps do. An installation over an earlier one is an upgrade. Configuration and state
are never removed.
"""

import os
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..client.primitives_sync import whole_file
from ..errors import AccessError, ConflictError, ResourceError
from ..host.mount_tables import mounts_below
from ..host.mounts import umount
from ..presence import exists, is_dir, is_symlink
from .checks import HostStep, run
from .units import NAMES, PLACES, RUNNING

_PACKAGE = Path(__file__).parents[1]
# has `systemd/` and `config.toml`, in a wheel or in the source
SHARE = next(
    (each for each in (_PACKAGE / "share", _PACKAGE.parent) if is_dir(each / "systemd")),
    _PACKAGE,
)

UNITS = Path("/etc/systemd/system")
CONFIG = Path("/etc/mirrord/config.toml")
STATE = Path("/var/lib/mirrord")
ENABLED = ("mirrord.socket", "mirrord-mount.socket", "mirrord-build.socket", "mirrord.service")
_FRAGMENTS = {
    "mirrord.sysusers": Path("/etc/sysusers.d/mirrord.conf"),
    "mirrord.tmpfiles": Path("/etc/tmpfiles.d/mirrord.conf"),
}
_LINKS = Path("/usr/local/bin")
_PROGRAMS = ("mirrord", "git-remote-mirrord")
# by ProtectHome= and PrivateTmp=
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108
_USE_OPT = (
    "create one with `python3 -m venv /opt/mirrord`, install mirrord there, and run"
    " `/opt/mirrord/bin/mirrord service install`"
)


def plan_install(environment: Path) -> list[HostStep]:
    """Return the steps of an installation or upgrade; raises if it could not work."""
    refuse_environment(environment)
    # the first two, below /etc and /run, are the administrator's own
    for place in PLACES[2:]:
        if exists(place / "mirrord.service"):
            fact = f"cannot install the service: a package has its units in {place}"
            raise ConflictError(fact, hint="use the mirrord of the package, or remove it")
    return [*_write_steps(environment), *_link_steps(environment), *_start_steps()]


def plan_uninstall(environment: Path) -> list[HostStep]:
    """Return the steps that stop the service and remove all but configuration and state."""
    units = [name for name in NAMES if exists(UNITS / name)]
    links = [_LINKS / name for name in _PROGRAMS if _is_link_into(environment, _LINKS / name)]
    fragments = [path for path in _FRAGMENTS.values() if exists(path)]
    removed = [*(UNITS / name for name in units), *fragments, *links]
    steps = [HostStep(f"remove {path}", path.unlink) for path in removed]
    if units:
        stop = _run("systemctl", "disable", "--now", *(name for name in units if "@" not in name))
        unmount = HostStep(f"unmount everything below {STATE}", _unmount_all)
        steps = [stop, *steps, _run("systemctl", "daemon-reload"), unmount]
    return steps


def refuse_host() -> None:
    """Raise if this process cannot install a service."""
    if os.geteuid() != 0:
        fact = "cannot set up the service: only root may"
        raise AccessError(fact, hint="use sudo; `mirrord serve` runs a daemon without root")
    if not is_dir(RUNNING):
        fact = "cannot set up the service: systemd is not running"
        raise ResourceError(fact, hint="`mirrord serve` runs a daemon without systemd")


def refuse_environment(environment: Path) -> None:
    """Raise if units cannot start its programs, or others than root may change them."""
    if not re.fullmatch(r"[\w./+-]+", str(environment)):
        fact = (
            f"cannot install units for {environment}: it has characters that are special in units"
        )
        raise ResourceError(fact, hint=_USE_OPT)
    # a virtual environment's python is a link, often to one below /root, which ProtectHome= hides
    interpreter = Path(os.path.realpath(environment / "bin/python"))
    for path in (interpreter, environment, environment.resolve(), _PACKAGE.resolve()):
        for part in (path, *path.parents):
            _refuse_part(path, part)


def _refuse_part(path: Path, part: Path) -> None:
    fact = f"cannot install units for {path}: "
    if str(part) in _HIDDEN:
        raise ResourceError(f"{fact}units cannot access {part}", hint=_USE_OPT)
    st = part.stat()
    mode = stat.S_IMODE(st.st_mode)
    is_writable = mode & 0o002 or (mode & 0o020 and st.st_gid != 0)
    # in a sticky directory, such as /tmp, nobody replaces what root has
    if st.st_uid != 0 or (is_writable and not mode & stat.S_ISVTX):
        reason = f"others than root may change {part}, but the mount service runs as root"
        raise ResourceError(f"{fact}{reason}", hint=f"`chown root {part}; chmod go-w {part}`")
    if not mode & 0o001:
        reason = f"user mirrord cannot enter {part}"
        raise ResourceError(f"{fact}{reason}", hint=f"`chmod -R go+rX {part}`")


_UNITS_ENVIRONMENT = "/opt/mirrord"  # as the units in the source have it


def render_unit(text: str, environment: Path) -> str:
    return text.replace(f"={_UNITS_ENVIRONMENT}/bin/", f"={environment}/bin/")


def _write_steps(environment: Path) -> Iterator[HostStep]:
    for name in NAMES:
        text = render_unit((SHARE / "systemd" / name).read_text(), environment)
        yield _write(UNITS / name, text)
    for name, path in _FRAGMENTS.items():
        yield _write(path, (SHARE / "systemd" / name).read_text())
    # before the directories, which belong to these users
    yield _run("systemd-sysusers", "mirrord.conf")
    yield _run("systemd-tmpfiles", "--create", "mirrord.conf")
    if not exists(CONFIG):
        # URLs in it may have passwords; the daemon reads it by CAP_DAC_READ_SEARCH
        yield _write(CONFIG, (SHARE / "config.toml").read_text(), 0o640)


def _link_steps(environment: Path) -> Iterator[HostStep]:
    for name in _PROGRAMS:
        link, program = _LINKS / name, environment / "bin" / name
        if link.resolve() != program.resolve() and (is_symlink(link) or not exists(link)):
            yield HostStep(f"link {link} to {program}", partial(_link, link, program))


_SERVICES = ("mirrord-mount.service", "mirrord.service")


def _start_steps() -> Iterator[HostStep]:
    yield _run("systemctl", "daemon-reload")
    yield _run("systemctl", "enable", *ENABLED)
    # before the restart: systemd holds the sockets, and clients wait instead of being refused
    yield _run("systemctl", "start", *(name for name in ENABLED if name.endswith(".socket")))
    yield _run("systemctl", "restart", *_SERVICES)


_START_TIMEOUT_S = 330.0  # more than TimeoutStartSec=


def _run(*command: str) -> HostStep:
    return HostStep(f"run {' '.join(command)}", partial(run, *command, timeout_s=_START_TIMEOUT_S))


def _write(path: Path, text: str, mode: int = 0o644) -> HostStep:
    return HostStep(f"write {path}", partial(replace, path, text, mode))


def replace(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file whole, with its missing directories."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with whole_file(path, mode) as file:
        file.write(text.encode())


def _link(link: Path, program: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(program)


def _is_link_into(environment: Path, link: Path) -> bool:
    return is_symlink(link) and link.readlink().parent == environment / "bin"


def _unmount_all() -> None:
    """Unmount checkouts; the next daemon mounts held ones again."""
    # a mount before the one that it is on
    for point in sorted(mounts_below(str(STATE)), reverse=True):
        if point != str(STATE):
            umount(point)
