"""The place of this host, and what it makes of the remedies of other checks."""

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from ..config import Settings
from ..errors import MirrordError
from ..host.ctimes import may_forge_ctimes
from ..host.mounts import may_mount
from ..host.namespaces import home
from ..host.namespaces.place import find_place
from ..model import Place
from .checks import Result

_WHAT = {
    Place.ROOT: "root on the host; overlay checkouts for all users, sandboxes in namespaces",
    Place.NAMESPACE: "an ordinary user who may make user namespaces; sandboxes in namespaces",
    Place.USER: "an ordinary user who may not make user namespaces; checkouts and environments are"
    " plain directories, sandboxes are weaker",
    Place.CONTAINER: "root in a container without CAP_SYS_ADMIN; checkouts and environments are"
    " plain directories, sandboxes are weaker",
}
_ASK = {
    Place.USER: "ask the administrator for `sysctl -w user.max_user_namespaces=10000`, on Ubuntu"
    " for `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`; see docs/where.md",
    Place.CONTAINER: "ask for a pod with `securityContext: {capabilities: {add: [SYS_ADMIN]},"
    " seccompProfile: {type: Unconfined}}`; see docs/where.md",
}
_FASTER = "; for faster resets, for one without MKNOD, or whose control group refuses disks"
OF_MOUNTS = "overlay", "privileges"
WEAKER = "nothing more here: see `place`"


def place(settings: Settings) -> Result:
    where = here(settings)
    ask = _ASK.get(where, "")
    if where is Place.CONTAINER and may_forge_ctimes():
        ask += _FASTER
    return "warn" if ask else "ok", f"{where}: {_WHAT[where]}", ask


def here(settings: Settings) -> Place:
    return find_place(settings.socket.parent / "mount.sock")


def where_it_runs(check: Callable[[Settings], Result], settings: Settings) -> Result:
    """Make a check of mounts in namespaces as an ordinary user's daemon makes itself, if it may."""
    own = settings.service.namespace == "auto"
    own = own and not {"group", "admins"} & settings.access.model_fields_set  # as it decides
    if not own or here(settings) is not Place.NAMESPACE or may_mount():
        return check(settings)
    with tempfile.TemporaryDirectory(prefix="mirrord-doctor-") as scratch:
        printed, to_print = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child has one
            child = os.fork()
        if child == 0:
            try:
                home.enter(Path(scratch))
                os.write(to_print, json.dumps(check(settings)).encode())
            except MirrordError as error:
                os.write(to_print, json.dumps(("warn", error.message, error.hint or "")).encode())
            finally:
                os._exit(0)
        os.close(to_print)
        with open(printed, "rb") as file:
            result = file.read()
        os.waitpid(child, 0)
        home.end(Path(scratch))
    verdict, fact, remedy = json.loads(result)
    return verdict, fact, remedy


_OF_HOST = "ask the administrator of the host for it: "
_MOUNTING = "overlay", "privileges", "set-id bits", "exec", "namespaces", "volumes"
_HOST = "mount limit", "inotify", "its mount options", "its journal", "kernel"
_CONTAINER = {
    "group": "",
    "open files": "start the container with `--ulimit nofile=65536`, in Kubernetes by LimitNOFILE="
    " of containerd's unit",
}
# what to be told, and by whom, is not decided here
_OWN = {
    "control groups": "nothing: limits of sandboxes apply to each process here",
    "group": "nothing: other users cannot use a daemon of this user",
}


def possible(settings: Settings, name: str, remedy: str) -> str:
    """Return the remedy of a check as far as this place allows it.

    Who is not root on the host cannot start services, raise its limits or mount.
    """
    where = here(settings)
    if where is Place.ROOT or not remedy:
        return remedy
    if name in _MOUNTING:
        return WEAKER if where in _ASK or name not in OF_MOUNTS else remedy
    if name in _HOST:
        return f"{_OF_HOST}{remedy}"
    if where is Place.CONTAINER and name in _CONTAINER:
        return _CONTAINER[name] or remedy
    return _OWN.get(name, remedy)
