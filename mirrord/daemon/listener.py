"""The socket that clients connect to: systemd's where it passes one, else our own.

Our own is bound beside its place and renamed into it once it listens, so that no client finds a
file that refuses; a left-over file is replaced only when nobody answers behind it. Everybody may
connect (mode 0666): each request is allowed or not by the peer's credentials.
"""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import AlreadyRunningError, ConflictError, InvalidConfigError, ResourceError
from ..host import systemd

_BACKLOG = 2048
_LONGEST_PATH = 107  # sockaddr_un.sun_path without its zero byte


class Listener:
    """A listening Unix socket, with the inode of its file where that is ours to remove."""

    def __init__(self, listener: socket.socket, path: Path, inode: int | None) -> None:
        self.socket = listener
        self.path = path
        self._inode = inode

    def remove(self) -> None:
        """Remove our socket file, unless another daemon has replaced it."""
        with suppress(FileNotFoundError):
            if self._inode is not None and self.path.stat().st_ino == self._inode:
                self.path.unlink()


def open_listeners(path: Path) -> list[Listener]:
    """Systemd's sockets, else one of our own at `path`. Raises AlreadyRunningError."""
    if taken := systemd.take_sockets():
        return [
            Listener(listener, Path(os.fsdecode(listener.getsockname())), None)
            for listener in taken.values()
        ]
    return [_bind(path)]


def _bind(path: Path) -> Listener:
    if len(os.fsencode(path)) > _LONGEST_PATH - len(".4194304"):
        raise InvalidConfigError(
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
        staged.chmod(0o666)
        listener.listen(_BACKLOG)
        staged.rename(path)
    except OSError as error:
        raise ResourceError(
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
        raise ConflictError(
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
    raise AlreadyRunningError(
        f"cannot listen at {path}: another process serves there",
        hint="stop that one, or choose another `socket`",
    )
