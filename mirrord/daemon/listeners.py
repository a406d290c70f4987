"""The sockets that clients connect to: systemd's where it passes some, else our own.

Our own is bound beside its place and renamed into it once it listens, so that no client finds a
file that refuses; a left-over file is replaced only when nobody answers behind it.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..host.systemd import take_sockets
from ..places import DOCKER_SOCKET

_BACKLOG = 2048
_LONGEST_PATH = 107  # sockaddr_un.sun_path without its zero byte
_PASSED_FOR_VOLUMES = "docker.socket"  # FileDescriptorName= of mirrord-docker.socket


class Listener(NamedTuple):
    """A listening Unix socket; `inode` is its file's, where that is ours to remove."""

    socket: socket.socket
    path: Path
    inode: int | None

    def remove(self) -> None:
        """Remove our socket file, unless another daemon has replaced it."""
        with contextlib.suppress(FileNotFoundError):
            if self.inode is not None and self.path.stat().st_ino == self.inode:
                self.path.unlink()


class Listeners(NamedTuple):
    """Those of the API, and of the volume driver, which come and go with the settings."""

    api: Sequence[Listener]
    volumes: list[Listener]

    @property
    def all(self) -> list[Listener]:
        return [*self.api, *self.volumes]

    def remove(self) -> None:
        for listener in self.all:
            listener.remove()


def open_listeners(path: Path) -> Listeners:
    """Systemd's sockets, else our own at `path`.

    Raises AlreadyRunningError where another daemon listens at `path`. Everybody may connect there:
    each request is allowed or not by the peer's credentials.
    """
    taken = take_sockets()
    passed = {
        name: Listener(listener, Path(os.fsdecode(listener.getsockname())), None)
        for name, listener in taken.items()
    }
    for_volumes = [passed.pop(name) for name in list(passed) if name == _PASSED_FOR_VOLUMES]
    return Listeners(list(passed.values()) or [_bind(path, 0o666)], for_volumes)


def listen_for_docker() -> Listener:
    """Our own socket where docker looks for a volume driver. Raises MirrordError."""
    return _bind(DOCKER_SOCKET, 0o600)


def _bind(path: Path, mode: int) -> Listener:
    if len(os.fsencode(path)) > _LONGEST_PATH - len(".4194304"):
        raise errors.InvalidConfigError(
            f"cannot listen at {path}: the path is longer than {_LONGEST_PATH} bytes",
            hint="choose a shorter `socket`",
        )
    _refuse_occupied(path)
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
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
            f"cannot listen at {path}: a file that is not a socket is there",
            hint="move it away, or choose another `socket`",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fsencode(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:  # its backlog is full, or it refuses us: somebody is there
            pass
    raise errors.AlreadyRunningError(
        f"cannot listen at {path}: another process serves there",
        hint="stop that one, or choose another `socket`",
    )
