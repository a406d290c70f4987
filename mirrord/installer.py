"""Units, users, directories and configuration of this mirrord on a host with systemd.

They start the programs of the environment that this process runs in. A plan is made first and
changes nothing; done again, it is an upgrade. Configuration and state are never removed.
"""

import os
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .client.primitives_sync import whole_file
from .doctor.checks import Step, run
from .doctor.units import NAMES, PLACES, RUNNING
from .errors import AccessError, ConflictError, ResourceError
from .host.mounts import mounts_below, umount

_PACKAGE = Path(__file__).parent
SHARE = next(
    (each for each in (_PACKAGE / "share", _PACKAGE.parent) if (each / "systemd").is_dir()),
    _PACKAGE,
)
"""Of a wheel, or of the source: `systemd/` and `config.toml`."""

UNITS = Path("/etc/systemd/system")
CONFIG = Path("/etc/mirrord/config.toml")
STATE = Path("/var/lib/mirrord")
ENABLED = ("mirrord.socket", "mirrord-mount.socket", "mirrord-build.socket", "mirrord.service")
_SERVICES = ("mirrord-mount.service", "mirrord.service")
_FRAGMENTS = {
    "mirrord.sysusers": Path("/etc/sysusers.d/mirrord.conf"),
    "mirrord.tmpfiles": Path("/etc/tmpfiles.d/mirrord.conf"),
}
_LINKS = Path("/usr/local/bin")
_PROGRAMS = ("mirrord", "git-remote-mirrord")
_IN_UNITS = "/opt/mirrord"  # the environment that the units of the source name
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108  (ProtectHome=, PrivateTmp=)
_ELSEWHERE = (
    "make one with `python3 -m venv /opt/mirrord`, install mirrord there, and run its"
    " `/opt/mirrord/bin/mirrord service install`"
)
_START_S = 330.0  # TimeoutStartSec= and a bit


def plan_install(environment: Path) -> list[Step]:
    """Everything that an installation or an upgrade does. Raises where it could not work."""
    refuse_environment(environment)
    for place in PLACES[2:]:
        if (place / "mirrord.service").exists():
            fact = f"cannot install the service: {place} has its units, of a package"
            raise ConflictError(fact, hint="use its mirrord, or remove that package")
    return [*_write_steps(environment), *_link_steps(environment), *_start_steps()]


def plan_uninstall(environment: Path) -> list[Step]:
    """Stop the service and remove what an installation wrote, but for configuration and state."""
    units = [name for name in NAMES if (UNITS / name).exists()]
    links = [_LINKS / name for name in _PROGRAMS if _is_link_into(environment, _LINKS / name)]
    fragments = [path for path in _FRAGMENTS.values() if path.exists()]
    removed = [*(UNITS / name for name in units), *fragments, *links]
    steps = [Step(f"remove {path}", path.unlink) for path in removed]
    if units:
        stop = _run("systemctl", "disable", "--now", *(name for name in units if "@" not in name))
        unmount = Step(f"unmount what is mounted below {STATE}", _unmount_all)
        steps = [stop, *steps, _run("systemctl", "daemon-reload"), unmount]
    return steps


def refuse_host() -> None:
    """Raise where this process cannot set up a service."""
    if os.geteuid() != 0:
        fact = "cannot set up the service: only root may"
        raise AccessError(fact, hint="use sudo; without root, `mirrord serve` runs a daemon")
    if not RUNNING.is_dir():
        fact = "cannot set up the service: systemd does not run here"
        raise ResourceError(fact, hint="`mirrord serve` runs the daemon without it")


def refuse_environment(environment: Path) -> None:
    """Raise where units cannot start from an environment, or others than root could change it."""
    if not re.fullmatch(r"[\w./+-]+", str(environment)):
        fact = f"cannot install units for {environment}: it has characters that units treat apart"
        raise ResourceError(fact, hint=_ELSEWHERE)
    interpreter = Path(os.path.realpath(environment / "bin/python"))
    for path in (interpreter, environment, environment.resolve(), _PACKAGE.resolve()):
        for part in (path, *path.parents):
            _refuse_part(path, part)


def _refuse_part(path: Path, part: Path) -> None:
    fact = f"cannot install units for {path}: "
    if str(part) in _HIDDEN:
        raise ResourceError(f"{fact}they do not see {part}", hint=_ELSEWHERE)
    held = part.stat()
    mode = stat.S_IMODE(held.st_mode)
    is_open = mode & 0o002 or (mode & 0o020 and held.st_gid != 0)
    if held.st_uid != 0 or (is_open and not mode & stat.S_ISVTX):
        reason = f"others than root may change {part}, and the mount service runs as root"
        raise ResourceError(f"{fact}{reason}", hint=f"`chown root {part}; chmod go-w {part}`")
    if not mode & 0o001:
        reason = f"user mirrord cannot enter {part}"
        raise ResourceError(f"{fact}{reason}", hint=f"`chmod go+rx {part}`, and what is below")


def render_unit(text: str, environment: Path) -> str:
    """A unit that starts the programs of an environment."""
    return text.replace(f"={_IN_UNITS}/bin/", f"={environment}/bin/")


def _write_steps(environment: Path) -> Iterator[Step]:
    for name in NAMES:
        text = render_unit((SHARE / "systemd" / name).read_text(), environment)
        yield _write(UNITS / name, text)
    for name, path in _FRAGMENTS.items():
        yield _write(path, (SHARE / "systemd" / name).read_text())
    yield _run("systemd-sysusers", "mirrord.conf")
    yield _run("systemd-tmpfiles", "--create", "mirrord.conf")
    if not CONFIG.exists():
        yield _write(CONFIG, (SHARE / "config.toml").read_text(), 0o640)


def _link_steps(environment: Path) -> Iterator[Step]:
    for name in _PROGRAMS:
        link, program = _LINKS / name, environment / "bin" / name
        if link.resolve() != program.resolve() and (link.is_symlink() or not link.exists()):
            yield Step(f"link {link} to {program}", partial(_link, link, program))


def _start_steps() -> Iterator[Step]:
    yield _run("systemctl", "daemon-reload")
    yield _run("systemctl", "enable", *ENABLED)
    yield _run("systemctl", "start", *(name for name in ENABLED if name.endswith(".socket")))
    yield _run("systemctl", "restart", *_SERVICES)


def _run(*command: str) -> Step:
    return Step(f"run {' '.join(command)}", partial(run, *command, timeout_s=_START_S))


def _write(path: Path, text: str, mode: int = 0o644) -> Step:
    return Step(f"write {path}", partial(_replace, path, text, mode))


def _replace(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with whole_file(path, mode) as file:
        file.write(text.encode())


def _link(link: Path, program: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(program)


def _is_link_into(environment: Path, link: Path) -> bool:
    return link.is_symlink() and link.readlink().parent == environment / "bin"


def _unmount_all() -> None:
    """Checkouts that are held are mounted again by the next daemon."""
    for point in sorted(mounts_below(str(STATE)), reverse=True):
        if point != str(STATE):
            umount(point)
