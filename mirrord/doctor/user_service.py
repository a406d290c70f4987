"""Installation of mirrord as an ordinary user's service: one unit of the user's systemd."""

import os
import pwd
import re
from functools import partial
from pathlib import Path

from ..errors import ResourceError, UsageError
from ..places import xdg_directory
from ..presence import exists, is_dir
from .checks import HostStep, run
from .installer import replace

# StartLimitIntervalSec=0: always restart, as the unit of the system does. Exit status 2 is an
# invalid configuration, 5 a state directory that another daemon holds: no restart mends either.
_UNIT = """\
[Unit]
Description=Git mirrors and sealed checkouts
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=all
ExecStart={environment}/bin/python -P -B -u -m mirrord.daemon
ExecReload={environment}/bin/python -P -B -m mirrord config reload
SyslogIdentifier=mirrord
Restart=on-failure
RestartSec=1s
WatchdogSec=60s
TimeoutStartSec=5min
TimeoutStopSec=60s
# what keeps the daemon's namespaces, and so its mounts, outlives a restart
KillMode=process
RestartPreventExitStatus=2 5
OOMPolicy=continue

[Install]
WantedBy=default.target
"""
_NAME = "mirrord.service"


def unit_path() -> Path:
    return xdg_directory("XDG_CONFIG_HOME", Path.home() / ".config") / "systemd/user" / _NAME


def render_unit(environment: Path) -> str:
    """Return the unit that starts the mirrord of an environment."""
    return _UNIT.format(environment=environment)


def plan_install(environment: Path) -> list[HostStep]:
    """Return the steps of an installation or upgrade. Raises ResourceError for odd paths."""
    if not re.fullmatch(r"[\w./+-]+", str(environment)):
        fact = f"cannot install a unit for {environment}: it has characters special in units"
        raise ResourceError(fact, hint="install mirrord in another directory")
    path, text = unit_path(), render_unit(environment)
    return [
        HostStep(f"write {path}", partial(replace, path, text)),
        _systemctl("daemon-reload"),
        _systemctl("enable", _NAME),
        _systemctl("restart", _NAME),
    ]


def plan_uninstall() -> list[HostStep]:
    """Return the steps that stop the service and remove its unit, and nothing else."""
    path = unit_path()
    if not exists(path):
        return []
    removing = HostStep(f"remove {path}", path.unlink)
    return [_systemctl("disable", "--now", _NAME), removing, _systemctl("daemon-reload")]


def refuse_user() -> None:
    """Raise if this process has no service manager of an ordinary user."""
    if os.geteuid() == 0:
        raise UsageError("cannot use --user as root", hint="leave it out")
    if not is_dir(_runtime() / "systemd"):
        fact = f"cannot set up the service: no systemd runs for user {user_name()}"
        hint = "`mirrord serve --detach` runs a daemon without one"
        if is_dir("/run/systemd/system"):  # sd_booted(3)
            hint = f"{linger_hint()}; {hint}"
        raise ResourceError(fact, hint=hint)


def linger_hint() -> str:
    """Say what keeps the service running without a login session."""
    return f"`loginctl enable-linger {user_name()}` starts it at boot and keeps it after logout"


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _runtime() -> Path:
    return Path(f"/run/user/{os.geteuid()}")


def _systemctl(*words: str) -> HostStep:
    # `run` passes no variables on, and `su` leaves those of another user
    command = ("env", f"XDG_RUNTIME_DIR={_runtime()}", "systemctl", "--user", *words)
    return HostStep(f"run {' '.join(command[2:])}", partial(run, *command, timeout_s=330.0))
