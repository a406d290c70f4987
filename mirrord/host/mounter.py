"""The mount service: `python -m mirrord.host.mounter --state-dir DIR --user USER (--socket PATH | socket of systemd)`.

A process with CAP_SYS_ADMIN and no mount namespace of its own, that mounts checkouts for a daemon that has neither. It is a
privilege boundary: it answers one uid and root (SO_PEERCRED), takes four typed requests, makes every path itself out of checked
names, and opens each below the state directory following no link; the kernel gets those descriptors, so what a name comes to mean
later does not matter. Nobody's file is ever shown as root's or the daemon's. It reads no file of a checkout, runs nothing, and
keeps nothing: killed at any moment, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import re
import selectors
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

from ..errors import AccessError, BackendUnavailableError, InvalidRequestError, MirrordError, ResourceError
from . import mounts
from .files import open_directory, opened
from .mounting import MESSAGE_MAX_BYTES, PROBE_LAYER, OverlayOrder, make_idmap, templates_for
from .systemd import take_sockets
from .userns import Owner

_CHECKOUT = re.compile(r"(\.next-)?[a-z2-7]{16}")
_DIRECTORY = re.compile(
    r"(\.gone-|\.next-|\.warm-)*[A-Za-z0-9_][A-Za-z0-9._-]{0,200}"
)  # released ones are renamed, and may be anybody's rubbish
_MIRROR = r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}"
_LAYER = re.compile(
    rf"{_MIRROR}/(trees/[0-9a-f]{{40}}(@[0-9a-f]{{40}})?/files|indexes/[0-9a-f]{{40}}-\d+-\d+|gits/(sealed|squashed)-[0-9a-f]{{40}})"
)
_LAYERS_MAX = 64
_ID_MAX = 2**32 - 2
_CONNECTIONS_MAX = 64
_PEERCRED = struct.Struct("3i")


class GuardedMounter:
    """Does what a peer asks, below one state directory whose daemon is `uid`."""

    def __init__(self, state_dir: Path, uid: int) -> None:
        self._state = open_directory(state_dir)
        self._uid = uid

    def mount(self, order: OverlayOrder) -> None:
        directory = f"checkouts/{order.checkout}"
        with ExitStack() as stack:

            def opened_at(path: str) -> str:
                return mounts.descriptor_path(self._open(stack, path))

            work = self._open(stack, f"{directory}/layer/work")
            lower = [opened_at(f"{templates_for(order.owner)}/{layer}") for layer in order.layers]
            target = opened_at(f"{directory}/tree")
            mounts.mount_overlay(target, lower, opened_at(f"{directory}/layer/upper"), mounts.descriptor_path(work))
            self._give_back(work)

    def umount(self, checkout: str) -> None:
        with suppress(FileNotFoundError), ExitStack() as stack:
            mounts.umount(mounts.descriptor_path(self._open(stack, f"checkouts/{checkout}/tree")))

    def make_idmap(self, owner: Owner) -> None:
        self._must_be_ordinary(owner)
        self.drop_idmap(owner)
        with ExitStack() as stack:
            idmaps = self._open(stack, "idmaps")
            with suppress(FileExistsError):
                os.mkdir(f"{owner[0]}-{owner[1]}", 0o700, dir_fd=idmaps)
            make_idmap(self._open(stack, "templates"), self._open(stack, templates_for(owner)), owner)

    def drop_idmap(self, owner: Owner) -> None:
        with suppress(FileNotFoundError), ExitStack() as stack:
            mounts.umount(mounts.descriptor_path(self._open(stack, templates_for(owner))))

    def _must_be_ordinary(self, owner: Owner) -> None:
        """A file of the daemon's that is shown as root's could be copied up, set-uid bit and all."""
        if 0 in owner or owner[0] == self._uid:
            raise BackendUnavailableError(
                f"cannot map the templates to uid {owner[0]}, gid {owner[1]}: only to ordinary users",
                hint="the pool backend serves root where the daemon is not root",
            )

    def _open(self, stack: ExitStack, path: str) -> int:
        return stack.enter_context(opened(mounts.open_beneath(self._state, path)))

    def _give_back(self, work: int) -> None:
        """Give the daemon what overlayfs made in its work directory, so that it can remove that without being root."""
        for path in ("work/incompat/volatile", "work/incompat", "work"):
            with suppress(FileNotFoundError), opened(mounts.open_beneath(work, path)) as directory:
                os.chown(mounts.descriptor_path(directory), self._uid, -1)


# -- what was asked -----------------------------------------------------------------------------------------------------


def answer(mounter: GuardedMounter, message: bytes) -> dict[str, Any]:
    """Do one request; `{}`, or the problem."""
    try:
        _perform(mounter, json.loads(message))
    except MirrordError as error:
        return {"problem": error.problem()}
    except FileNotFoundError as error:
        return {"problem": {"code": "gone", "detail": str(error), "errno": error.errno}}
    except OSError as error:
        return {"problem": ResourceError(f"cannot mount: {error.strerror}", errno=error.errno).problem()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {"problem": InvalidRequestError(f"cannot read the request: {error!r}").problem()}
    return {}


def _perform(mounter: GuardedMounter, request: Mapping[str, Any]) -> None:
    kind = request["request"]
    if kind == "mount":
        owner = None if request["owner"] is None else _owner(request["owner"])
        mounter.mount(OverlayOrder(_matching(_CHECKOUT, request["checkout"]), _layers(request["layers"]), owner))
    elif kind == "umount":
        mounter.umount(_matching(_DIRECTORY, request["checkout"]))
    elif kind == "make_idmap":
        mounter.make_idmap(_owner(request["owner"]))
    elif kind == "drop_idmap":
        mounter.drop_idmap(_owner(request["owner"]))
    else:
        raise ValueError(kind)


def _layers(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _LAYERS_MAX:
        raise ValueError(value)
    return tuple(PROBE_LAYER if layer == PROBE_LAYER else _matching(_LAYER, layer) for layer in value)


def _owner(value: object) -> Owner:
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int and 0 <= each <= _ID_MAX for each in value):
        raise ValueError(value)
    return cast("Owner", tuple(value))


def _matching(pattern: re.Pattern[str], value: object) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value) or ".." in value:
        raise ValueError(value)
    return value


# -- serving ------------------------------------------------------------------------------------------------------------


class Service:
    """Answers the connections of one user, one request at a time."""

    def __init__(self, listener: socket.socket, mounter: GuardedMounter, uid: int) -> None:
        self._listener = listener
        self._mounter = mounter
        self._uid = uid
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                connection = cast("socket.socket", key.fileobj)
                if connection is self._listener:
                    self._accept()
                else:
                    self._serve(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it left before we came
            return
        connection.setblocking(False)
        _, uid, _ = _PEERCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        if uid in (0, self._uid) and len(self._selector.get_map()) <= _CONNECTIONS_MAX:
            self._selector.register(connection, selectors.EVENT_READ)
            return
        refusal = AccessError(f"cannot mount for uid {uid}: only for the daemon's user, {_CONNECTIONS_MAX} at a time")
        print(f"<4>connection.refused uid={uid}", file=sys.stderr, flush=True)  # noqa: T201  (the journal reads stderr)
        _send(connection, {"problem": refusal.problem()})
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            message = connection.recv(MESSAGE_MAX_BYTES)
        except OSError:
            message = b""
        if not message or not _send(connection, answer(self._mounter, message)):
            self._selector.unregister(connection)
            connection.close()


def _send(connection: socket.socket, reply: Mapping[str, Any]) -> bool:
    """False where the peer is gone, or does not read."""
    try:
        connection.send(json.dumps(reply).encode())
    except OSError:
        return False
    return True


def listen(path: Path, uid: int) -> socket.socket:
    """A socket at `path` that only `uid` and root can connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    os.chown(path, uid, -1)
    listener.listen(16)
    return listener


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until killed; 2 when started wrongly."""
    parser = argparse.ArgumentParser(prog="python -m mirrord.host.mounter", description="mounts checkouts for another process")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--user", required=True, help="the daemon's user: a name or a uid")
    parser.add_argument("--socket", type=Path, help="where to listen, unless systemd hands over a socket")
    options = parser.parse_args(arguments)
    uid = _uid_of(options.user)
    sockets = list(take_sockets().values())
    if uid is None or (not sockets and options.socket is None):
        parser.error("give a user that exists, and a socket: --socket, or through systemd")
    try:
        listener = sockets[0] if sockets else listen(options.socket, uid)
        service = Service(listener, GuardedMounter(options.state_dir, uid), uid)
    except OSError as error:
        parser.error(f"cannot serve: {error}")
    service.run()
    return 0


def _uid_of(user: str) -> int | None:
    if user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


if __name__ == "__main__":
    sys.exit(main())
