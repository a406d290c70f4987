"""Sandboxes, as both clients have them: started here, by the client's process, and no daemon.

Which box a sandbox has: that of its checkout as it is now, whoever reset it."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from ... import protocol
from ...bubblewrap import Box
from ...errors import CheckoutNotFoundError, PathNotFoundError, UsageError
from ...places import PROGRAMS
from .. import gitremote
from .calls import Executed, SandboxCall
from .rooms import EndedError, Limits, SandboxRoom

_GIT_CONFIG = b"""\
[url "mirrord::https://github.com/"]
	insteadOf = https://github.com/
[protocol "mirrord"]
	allow = always
"""


class Keeper:
    """Has a room for one checkout: another one after a reset, whoever asked for it."""

    def __init__(
        self,
        lease: Callable[[], protocol.Checkout],
        box: Callable[[protocol.Checkout], Box],
        memory_bytes: int | None,
        processes: int | None,
    ) -> None:
        self._lease, self._box = lease, box
        self._limits = memory_bytes, processes
        self._lock = threading.Lock()
        self._room: SandboxRoom | None = None
        self._seen: object = None

    def run(self, call: SandboxCall) -> Executed:
        try:
            while True:
                with self._lock:
                    room = self._enter()
                with suppress(EndedError):
                    return call.follow(room)
        finally:
            call.close()

    def _enter(self) -> SandboxRoom:
        lease = self._lease()
        seen = _look(lease)
        if self._room is None or not self._room.is_open or seen != self._seen:
            self._close()
            self._room, self._seen = SandboxRoom(self._box(lease), Limits(*self._limits)), seen
        return self._room

    def close(self) -> None:
        """End all processes; HOME and /tmp are gone."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        room, self._room = self._room, None
        if room:
            room.close()


def choose_environment(lease: protocol.Checkout, named: Path | str | None) -> Path | None:
    """A directory of the caller's own, if that is named; else the checkout's, which must be it.

    Raises UsageError, PathNotFoundError.
    """
    if named is None:
        return None
    if isinstance(named, Path) or "/" in named:
        if not Path(named, "bin").is_dir():
            hint = "name the prefix of an environment, such as a virtual environment's"
            raise PathNotFoundError(f"cannot use environment {named}: it has no bin", hint=hint)
        return Path(named).absolute()
    key, _, digest = named.partition("@")
    has = lease.environment or ""
    if has.partition("@")[0] != key or not has.startswith(f"{key}@{digest[:12]}"):
        fact = f"cannot use environment {named}: the checkout has {has or 'none'}"
        raise UsageError(fact, hint="name it where the checkout is made or reset")
    return None


def box_of(
    lease: protocol.Checkout,
    environment: Path | None = None,
    *,
    network: bool,
    variables: Mapping[str, str],
) -> Box:
    """The box of a checkout, for its owner; with an `environment` of the caller's, or its own."""
    is_mine = lease.owner_uid == os.geteuid()
    given = {"MIRRORD_CHECKOUT": lease.id, "MIRRORD_REPOSITORY": lease.mirror.replace("__", "/", 1)}
    given |= {"MIRRORD_INSTANCE": lease.instance} if lease.instance else {}
    return Box(
        tree=Path(lease.path),
        environment=environment or environment_of(lease),
        is_environment_shared=environment is not None,
        owner=None if is_mine else (lease.owner_uid, lease.owner_gid),
        network=network,
        variables={**given, **variables},
        files=_clone_files(network=network),
    )


@cache
def _clone_files(*, network: bool) -> dict[str, bytes]:
    """For `git clone`: git-remote-mirrord; where no forge can be reached, it takes their place."""
    files = {f"{PROGRAMS}/git-remote-mirrord": Path(gitremote.__file__).read_bytes()}
    return files if network else {**files, "/etc/gitconfig": _GIT_CONFIG}


def environment_of(lease: protocol.Checkout) -> Path | None:
    """Where the environment of a checkout is on the host."""
    return Path(lease.directory, "environment") if lease.environment else None


def _look(lease: protocol.Checkout) -> object:
    """What is mounted at a checkout. As long as a box has it, no later mount has its number."""
    environment = environment_of(lease)
    paths = [Path(lease.path), *([environment] if environment else [])]
    try:
        return [(found.st_dev, found.st_ino) for found in map(os.stat, paths)]
    except (
        PermissionError
    ):  # the tree of a subordinate uid: mountinfo names its mounts to everybody
        names = {os.fsencode(path) for path in paths}
        with open("/proc/self/mountinfo", "rb") as mounts:
            return [line for line in mounts if line.split()[4] in names]
    except FileNotFoundError as error:
        fact = f"cannot find the tree of checkout {lease.id}: it was released, or has expired"
        raise CheckoutNotFoundError(fact, hint="take another one") from error
