"""Checks of mirrord's systemd units and drop-ins, by their files."""

import pwd
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .. import __version__
from ..config import Settings
from ..presence import exists, is_dir, matching
from .checks import Result, judge

RUNNING = Path("/run/systemd/system")
# in systemd's order of precedence: a unit of the administrator hides that of a package
PLACES = [
    *(Path("/etc/systemd/system"), RUNNING, Path("/usr/local/lib/systemd/system")),
    *(Path("/usr/lib/systemd/system"), Path("/lib/systemd/system")),
]
NAMES = (
    *("mirrord.service", "mirrord.socket", "mirrord-mount.service", "mirrord-mount.socket"),
    *("mirrord-build@.service", "mirrord-build.socket", "mirrord-docker.socket"),
)
_PACKAGE = Path(__file__).parents[1]
SHIPPED = [_PACKAGE / "share/systemd", _PACKAGE.parent / "systemd"]  # in a wheel, in the source
_PROGRAM = re.compile(r"(?m)^Exec\w+=/\S+")


def find_unit(name: str) -> Path | None:
    return next((place / name for place in PLACES if exists(place / name)), None)


def unit_uid() -> int:
    """Return the uid that the unit runs the daemon as, 0 if there is no unit."""
    unit = find_unit("mirrord.service")
    with suppress(KeyError):
        if unit and (match := re.search(r"(?m)^User=(\S+)", unit.read_text())):
            return pwd.getpwnam(match[1]).pw_uid
    return 0


def units(settings: Settings) -> Result:
    if not is_dir(RUNNING):
        return "ok", "systemd does not run here", ""
    paths = [path for path in map(find_unit, NAMES) if path]
    if not paths:
        return "ok", "none is installed", ""
    for path in paths:
        if missing := [program for program in _programs(path) if not exists(program)]:
            fact = f"{path} starts {missing[0]}, which does not exist"
            return "fail", fact, "install mirrord again, or remove the unit"
    # what `systemctl enable` links, whether of the service or of its socket
    wanted = [link for place in PLACES for link in matching(place, "*.wants/mirrord.s*")]
    fact = f"{len(paths)} of {len(NAMES)} in {paths[0].parent}"
    if not wanted:
        remedy = "`systemctl enable --now mirrord`; it does not start at boot otherwise"
        return "warn", f"{fact}, not enabled", remedy
    if not find_unit("mirrord-mount.service"):
        remedy = "install mirrord-mount.service: the daemon's unit may not mount"
        return "warn", f"{fact}, without the mount service", remedy
    if others := [str(path) for path in paths if not _is_shipped(path)]:
        remedy = "reinstall them, then `systemctl daemon-reload`; keep changes in drop-ins"
        return "warn", f"not those of mirrord {__version__}: {', '.join(others)}", remedy
    return "ok", f"{fact}, enabled", ""


# Each gives a service a private mount namespace.
_PRIVATE_MOUNTS = re.compile(
    r"(?m)^(Protect(?:System|Home|ControlGroups|Kernel\w+|Proc)|Private(?:Tmp|Devices|Mounts|Users)"
    r"|(?:ReadOnly|ReadWrite|Inaccessible|Exec|NoExec|Bind|BindReadOnly)Paths|TemporaryFileSystem"
    r"|Root(?:Directory|Image)|DynamicUser|MountFlags)\s*=\s*(?!no\b|false\b|off\b|0\b|$)"
)


def drop_ins(settings: Settings) -> Result:
    """Check drop-ins of the administrator, which may be for an earlier release."""
    files = [path for place in PLACES[:2] for path in sorted(matching(place, "mirrord*.d/*.conf"))]
    for path in files:
        unit = path.parent.name.removesuffix(".d")
        text = path.read_text(encoding="utf-8", errors="replace")
        if find_unit(unit) is None:
            return "warn", f"{path} is for a unit that is not installed", "remove it"
        if unit == "mirrord-mount.service" and (key := _PRIVATE_MOUNTS.search(text)):
            fact = f"{path} sets {key[1]}=, which hides the mounts of the mount service"
            return "fail", fact, f"remove {key[1]}=, then `systemctl daemon-reload` and restart it"
        if missing := [program for program in _programs(path) if not exists(program)]:
            fact = f"{path} starts {missing[0]}, which does not exist"
            return "fail", fact, "change or remove it, then `systemctl daemon-reload`"
    names = ", ".join(str(path) for path in files)
    return judge(True, names or "none", "")


def _is_shipped(path: Path) -> bool:
    """True if a unit is that of this release but for the paths of programs, or none is shipped."""
    for source in SHIPPED:
        with suppress(FileNotFoundError):
            one, other = (_PROGRAM.sub("", file.read_text()) for file in (path, source / path.name))
            return one == other
    return True


def _programs(path: Path) -> Iterator[Path]:
    """Yield the programs that a unit or drop-in starts."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # the prefixes of systemd.service(5), such as `-` for a failure that does not count
    for words in re.findall(r"(?m)^Exec\w+\s*=\s*[-@:+!]*(/\S+)", text):
        yield Path(words)
