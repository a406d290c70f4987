"""Listening sockets of the daemon: systemd's if it passes some, else our own."""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..host.systemd import take_sockets
from ..places import DOCKER_SOCKET

# What a killed daemon held is held on by a child that it was starting, until its exec: up to 13 ms
# were seen on an idle machine, after one kill in nine.
_LET_GO_TIMEOUT_S = 3.0
_LET_GO_PAUSE_S = 0.01


def comes_true(condition: Callable[[], bool]) -> bool:
    """Ask until it is so, for as long as children of a killed daemon may need to let go."""
    deadline = time.monotonic() + _LET_GO_TIMEOUT_S
    while not (is_so := condition()) and time.monotonic() < deadline:
        time.sleep(_LET_GO_PAUSE_S)
    return is_so


# as Backlog= of mirrord.socket; Linux cuts it to net.core.somaxconn, 4,096 since 5.4
_BACKLOG = 2048
_PATH_LIMIT = 107  # sockaddr_un.sun_path without its zero byte
_DOCKER_SOCKET_NAME = "docker.socket"  # FileDescriptorName= of mirrord-docker.socket


class Listener(NamedTuple):
    """A listening Unix socket. `inode` is that of its file if we created it and must remove it."""

    socket: socket.socket
    path: Path
    inode: int | None

    def remove(self) -> None:
        """Remove our socket file, unless another daemon has replaced it."""
        with contextlib.suppress(FileNotFoundError):
            if self.inode is not None and self.path.stat().st_ino == self.inode:
                self.path.unlink()


class Listeners(NamedTuple):
    """The sockets of the API and of the volume driver; a reload changes the latter."""

    api: Sequence[Listener]
    volumes: list[Listener]

    @property
    def all(self) -> list[Listener]:
        return [*self.api, *self.volumes]

    def remove(self) -> None:
        for listener in self.all:
            listener.remove()


def open_listeners(path: Path) -> Listeners:
    """Take systemd's sockets, or listen at `path`. Raises ConflictError.

    Everybody may connect there: access is decided for each request by the peer's credentials.
    """
    taken = take_sockets()
    passed = {
        name: Listener(listener, Path(os.fsdecode(listener.getsockname())), None)
        for name, listener in taken.items()
    }
    for_volumes = [passed.pop(name) for name in list(passed) if name == _DOCKER_SOCKET_NAME]
    return Listeners(list(passed.values()) or [_bind(path, 0o666)], for_volumes)


def listen_for_docker() -> Listener:
    """Listen where docker looks for a volume driver. Raises MirrordError."""
    return _bind(DOCKER_SOCKET, 0o600)


def _bind(path: Path, mode: int) -> Listener:
    # the staged name ends with our pid, at most 2²² (proc_sys_kernel(5))
    if len(os.fsencode(path)) > _PATH_LIMIT - len(".4194304"):
        raise errors.InvalidConfigError(
            f"cannot listen at {path}: the path is longer than {_PATH_LIMIT} bytes",
            hint="choose a shorter `socket`",
        )
    _refuse_occupied(path)
    # gets its name when it has its mode and listens: no client meets one that refuses it
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # of a daemon with this pid that was killed: in a container it is often the same
        staged.unlink(missing_ok=True)
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        listener.bind(os.fsencode(staged))
        staged.chmod(mode)
        listener.listen(_BACKLOG)
        staged.rename(path)
    except OSError as error:
        raise errors.ResourceError(
            f"cannot listen at {path}: {error.strerror}",
            hint="check the directory's owner and mode",
        ) from error
    return Listener(listener, path, path.stat().st_ino)


def _refuse_occupied(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise errors.ConflictError(
            f"cannot listen at {path}: the file is not a socket",
            hint="move it away, or choose another `socket`",
        )
    if not comes_true(partial(_is_abandoned, path)):
        raise errors.ConflictError(
            f"cannot listen at {path}: another process listens there",
            hint="stop that process, or choose another `socket`",
        )


def _is_abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        # connect(2) waits for room in the backlog of a daemon that hangs
        probe.settimeout(1.0)
        try:
            probe.connect(os.fsencode(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:  # EAGAIN for a full backlog, EACCES: a process listens there
            pass
    return False
