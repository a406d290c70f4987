"""Check what this host can and cannot do for a daemon with given settings, and what to change.

Changes nothing and needs no daemon. A check that cannot run is reported as a warning.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..config import Settings
from ..errors import MirrordError
from . import credentials, disk, host, place, records, repairs, service, state, units
from .checks import Result, Verdict
from .repairs import config_file


class Check(NamedTuple):
    """A verdict with the fact behind it, and a remedy unless it is ok."""

    name: str
    verdict: Verdict
    fact: str
    remedy: str = ""


def examine(settings: Settings, config_path: Path | None = None) -> list[Check]:
    """Run all checks; `config_path` is the file of the settings."""
    checks = []
    of_file: dict[str, _Check] = {"configuration": partial(config_file, path=config_path)}
    for name, check in ({"place": place.place} | of_file | _CHECKS).items():
        try:
            if name in place.OF_MOUNTS:
                check = partial(place.where_it_runs, check)
            verdict, fact, remedy = check(settings)
        except (OSError, MirrordError, ValueError) as error:
            verdict, fact = "warn", f"cannot check: {error}"
            remedy = "check it by hand"
            remedy += "" if os.geteuid() == 0 else ", or ask root to run the doctor"
        checks.append(Check(name, verdict, fact, place.possible(settings, name, remedy)))
    return checks


_Check = Callable[[Settings], Result]
_CHECKS: dict[str, _Check] = {
    "git": host.git,
    "setpriv": host.setpriv,
    "python packages": host.packages,
    "certificates": host.certificates,
    "libgit2": host.libgit2,
    "kernel": host.kernel,
    "overlay": host.overlay,
    "privileges": host.privileges,
    "mount namespace": host.mount_namespace,
    "mount limit": host.mount_limit,
    "inotify": host.inotify,
    "open files": host.open_files,
    "processes": host.processes,
    "namespaces": host.namespaces,
    "security modules": host.security_modules,
    "control groups": host.control_groups,
    "clock": host.clock,
    "state directory": state.state_dir,
    "its parents": state.parents,
    "its file system": disk.file_system,
    "its mount options": disk.options,
    "its journal": disk.journal,
    "its quotas": disk.quotas,
    "its abilities": disk.abilities,
    "its speed": disk.speed,
    "its parts": state.one_file_system,
    "access control lists": state.access_lists,
    "set-id bits": state.set_id_bits,
    "space": disk.space,
    "inodes": disk.inodes,
    "catalog": records.catalog,
    "store": records.store,
    "credentials": credentials.credentials,
    "unfinished": state.unfinished,
    "leftovers": repairs.remaining,
    "leases": service.leases,
    "systemd": units.units,
    "drop-ins": units.drop_ins,
    "socket": service.socket_path,
    "its mode": service.socket_mode,
    "daemon": service.daemon,
    "group": service.group,
    "binds of trees": service.binds,
    "volumes": service.volumes,
    "exec": service.confinement,
    "builds": host.builds,
    "images": host.images,
}
