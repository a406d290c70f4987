"""The mount service: `python -m mirrord.host.mounter --state-dir DIR --user USER [--socket
PATH]`.

A process with CAP_SYS_ADMIN in the host's mount namespace, which mounts checkouts for a daemon
without either, and a privilege boundary: docs/security-inside.md has its rules. It makes every path
itself out of checked names, and gives the kernel only descriptors. It reads no file of a checkout,
executes nothing, and has no state that a restart loses.
"""

import argparse
import errno
import grp
import json
import os
import pwd
import re
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

from .. import errors
from ..jsontext import loads
from ..model import Target
from . import mount_tables, mounts
from .files import open_directory, open_regular, opened
from .followers import Followers
from .overlays import (
    BOUND,
    ENVIRONMENT,
    FOLLOWERS,
    IDMAPS,
    MESSAGE_MAX_BYTES,
    PROBE_LAYER,
    TARGETS,
    TREE,
    MappedTemplates,
    OverlayOrder,
    split_target,
)
from .processes import Owner
from .systemd import Notifier, take_sockets

_CHECKOUT = re.compile(r"[a-z2-7]{16}")
# mounts that nobody has attached yet; the oldest is dropped
_PENDING_MAX = 64
# 2³²-1 is `(uid_t) -1`, which means no change to chown(2)
_ID_MAX = 2**32 - 2


class GuardedMounter:
    """Mounts below one state directory, for its `daemon`."""

    def __init__(self, state_dir: Path, daemon: Owner) -> None:
        for directory in (state_dir, *(state_dir / name for name in BOUND)):
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
                os.chown(directory, *daemon)
        for name in BOUND:
            mounts.bind_once(str(state_dir / name))
        self._state, self._daemon = open_directory(state_dir), daemon
        self._checkouts = state_dir / "checkouts"
        place = f"{mounts.descriptor_path(self._state)}/{IDMAPS}"
        self._mapped = MappedTemplates(place, stored=daemon)
        self._followers = Followers(f"{mounts.descriptor_path(self._state)}/{FOLLOWERS}")
        self._pending: dict[tuple[str, str], int] = {}

    def make(self, order: OverlayOrder) -> int:
        """Make an overlay and keep it for `show`; return its root, which stays open here."""
        private = f"leases/{order.checkout}"
        with ExitStack() as stack:
            upper = self._open(stack, f"{private}/{order.upper}/upper")
            work = self._open(stack, f"{private}/{order.upper}/work")
            templates = self._open(stack, "templates")
            if order.owner is not None:
                self._check_lease(stack, order.checkout, order.owner)
                self._check_ordinary(order.owner)
                self._check_templates(templates)
                templates = stack.enter_context(self._mapped.view(templates, order.owner))
            lower = [
                stack.enter_context(opened(mounts.open_beneath(templates, layer)))
                for layer in order.layers
            ]
            mount = mounts.make_overlay(lower, upper, work)
            # so that the daemon can remove them
            for path in ("work/incompat/volatile", "work/incompat", "work"):
                with suppress(FileNotFoundError), opened(mounts.open_beneath(work, path)) as made:
                    os.chown(mounts.descriptor_path(made), self._daemon[0], -1)
        place = order.checkout, order.target
        self._drop(place)
        self._pending[place] = mount
        if len(self._pending) > _PENDING_MAX:
            self._drop(next(iter(self._pending)))
        return mount

    def show(self, checkout: str, target: str, show: Callable[[int, str], None]) -> None:
        """Mount the overlay made last for a target. A peer's own mount could be of anything."""
        place = checkout, target
        if place not in self._pending:
            raise FileNotFoundError(f"cannot mount checkout {checkout}: nothing was made for it")
        with ExitStack() as stack:
            stack.callback(self._drop, place)
            above = self._open(stack, f"checkouts/{checkout}")
            # if it becomes a link after this, the kernel does not follow it
            os.close(mounts.open_beneath(above, target))
            show(self._pending[place], f"{mounts.descriptor_path(above)}/{target}")

    def clone(self, checkout: str, target: str, owner: Owner) -> int:
        """Clone the checkout's `target`, for the daemon to give to its owner."""
        with ExitStack() as stack:
            self._check_lease(stack, checkout, owner)
            path, name = split_target(checkout, target)
            return self._followers.clone(self._open(stack, path), name)

    def umount(self, checkout: str) -> None:
        with suppress(FileNotFoundError), ExitStack() as stack:
            above = self._open(stack, f"checkouts/{checkout}")
            for target in TARGETS:
                mounts.umount(f"{mounts.descriptor_path(above)}/{target}")

    def visible_to(self, pid: int, pids: int) -> mount_tables.Visible:
        """Return what a process sees of the checkouts; `pids` is the pid namespace of its number,
        as an inode.
        """
        if os.stat("/proc/self/ns/pid").st_ino != pids:
            return mount_tables.Visible.UNKNOWN
        return mount_tables.visible_to(pid, self._checkouts)

    def close_sent(self, descriptors: Sequence[int]) -> None:
        """Close descriptors that were sent, except those that `show` needs."""
        for descriptor in descriptors:
            if descriptor not in self._pending.values():
                os.close(descriptor)

    def drop_pending(self) -> None:
        """Close the overlays that were made and not attached."""
        for place in list(self._pending):
            self._drop(place)

    def close(self) -> None:
        self.drop_pending()
        self._mapped.close()
        self._followers.close()

    def _drop(self, place: tuple[str, str]) -> None:
        if (mount := self._pending.pop(place, None)) is not None:
            os.close(mount)

    def _check_lease(self, stack: ExitStack, checkout: str, owner: Owner) -> None:
        """Refuse unless the checkout's lease, or the one being written, names this owner."""
        private = self._open(stack, f"leases/{checkout}")
        # a reset has resetting.json in place of lease.json; the first lease of a checkout that is
        # being made gets its name at the end
        for name in (b"lease.json.new", b"resetting.json", b"lease.json"):
            with suppress(FileNotFoundError), opened(open_regular(private, name)) as file:
                # the daemon's user writes the file, so its length is not trusted
                terms = loads(os.read(file, 64 * 1024))["terms"]
                if (terms["owner_uid"], terms["owner_gid"]) == owner:
                    return
        raise errors.AccessError(f"cannot mount checkout {checkout}: it is not leased to that user")

    def _check_ordinary(self, owner: Owner) -> None:
        """Refuse root, the daemon and system groups, who would own files written in a checkout."""
        uid, gid = owner
        if uid == self._daemon[0] or not _is_ordinary(uid, gid):
            raise errors.BackendUnavailableError(
                f"cannot give checkouts to uid {uid}, gid {gid}: only to ordinary users, with a"
                " group of their own",
                hint="name an ordinary user with --owner; without an environment or --attach the"
                " pool backend serves other users too",
            )

    def _check_templates(self, templates: int) -> None:
        """Refuse templates of another owner, whose files would be shown as a third user's."""
        st = os.fstat(templates)
        if (st.st_uid, st.st_gid) != self._daemon:
            raise errors.AccessError(
                f"cannot mount: templates belong to uid {st.st_uid}, gid {st.st_gid}, not to"
                " the daemon",
                hint=f"chown them to {self._daemon[0]}:{self._daemon[1]}",
            )

    def _open(self, stack: ExitStack, path: str) -> int:
        return stack.enter_context(opened(mounts.open_beneath(self._state, path)))


def _is_ordinary(uid: int, gid: int) -> bool:
    """Return whether a uid is a person's, an agent's or a container's, and the gid its group's."""
    if uid < _smallest("UID_MIN"):
        return False
    try:
        user = pwd.getpwuid(uid)
    except KeyError:  # a number that a container or a harness uses; its gid must not be a group's
        try:
            grp.getgrgid(gid)
        except KeyError:
            return gid >= _smallest("GID_MIN")
        return False
    return gid in os.getgrouplist(user.pw_name, user.pw_gid) and gid != 0


def _smallest(name: str) -> int:
    with suppress(OSError, ValueError):
        text = Path("/etc/login.defs").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.split()[:1] == [name]:
                return max(1, int(line.split()[1]))
    # shadow's own default, for a file without the line (login.defs(5))
    return 1000


def answer(mounter: GuardedMounter, message: bytes) -> tuple[dict[str, Any], list[int]]:
    """Perform a request; return the answer with its descriptors, or the problem."""
    try:
        request = loads(message)
        if request["request"] == "visible":
            pid, pids = map(_number, (request["pid"], request["pids"]))
            return {"visible": mounter.visible_to(pid, pids)}, []
        return {}, _perform(mounter, request)
    except errors.MirrordError as error:
        problem = error.problem()
    except FileNotFoundError as error:
        problem = {"code": "gone", "detail": str(error), "errno": error.errno or errno.ENOENT}
    except OSError as error:
        fact = f"cannot mount: {error.strerror}"
        problem = errors.ResourceError(fact, errno=error.errno).problem()
    # whatever a taken-over daemon sends, it must not end this service, which is root's
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = errors.InvalidRequestError(f"cannot read the request: {error!r}").problem()
    return {"problem": problem}, []


# an umount may also name a released checkout or a kept tree, which were renamed
_DIRECTORY = re.compile(r"(\.trash-|\.warm-)*[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_UPPER = re.compile(r"layer|next|environment|environment-next")
_TARGET, _CLONED = re.compile("|".join(TARGETS)), re.compile("|".join(Target))
_MIRROR = r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}"
_ID = "[0-9a-f]{40}"
_LAYER = {
    TREE: re.compile(
        rf"{_MIRROR}/(trees/{_ID}(@{_ID})?/(files|index)|gits/(sealed|squashed)-{_ID})"
        rf"|\.layers/{_CHECKOUT.pattern}"
    ),
    ENVIRONMENT: re.compile(
        r"\.environments/(?:[0-9a-f]{64}/(?:files|cover-[0-9a-f]{16})|\.layers/[0-9a-f]{64})"
        rf"|\.layers/{_CHECKOUT.pattern}"
    ),
}
# The daemon is not root and may be taken over: each number it sends is bounded. A stack has at most
# 19 layers, one over an image 127 more.
_LAYERS_MAX = 160


def _perform(mounter: GuardedMounter, request: Mapping[str, Any]) -> list[int]:
    match request["request"]:
        case "make":
            layers = request["layers"]
            if not isinstance(layers, list) or not 0 < len(layers) <= _LAYERS_MAX:
                raise ValueError(layers)
            order = OverlayOrder(
                _matching(_CHECKOUT, request["checkout"]),
                _matching(_UPPER, request["upper"]),
                tuple(map(str, layers)),
                None if request["owner"] is None else _owner(request["owner"]),
            )
            for layer in order.layers:
                if layer != PROBE_LAYER:
                    _matching(_LAYER[order.target], layer)
            return [mounter.make(order)]
        case "clone":
            checkout = _matching(_CHECKOUT, request["checkout"])
            target = _matching(_CLONED, request["target"])
            return [mounter.clone(checkout, target, _owner(request["owner"]))]
        case "attach" | "replace" as how:
            show = mounts.attach if how == "attach" else mounts.replace
            target = _matching(_TARGET, request.get("target", TREE))
            mounter.show(_matching(_CHECKOUT, request["checkout"]), target, show)
        case "umount":
            mounter.umount(_matching(_DIRECTORY, request["checkout"]))
        case kind:
            raise ValueError(kind)
    return []


def _matching(pattern: re.Pattern[str], value: object) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value) or ".." in value:
        raise ValueError(value)
    return value


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _ID_MAX:
        raise ValueError(value)
    return value


def _owner(value: Any) -> Owner:
    uid, gid = value  # TypeError or ValueError unless it is a pair
    if not all(type(number) is int and 0 <= number <= _ID_MAX for number in (uid, gid)):
        raise ValueError(value)
    return uid, gid


def serve(listener: socket.socket, mounter: GuardedMounter, user: int) -> None:
    """Answer connections of one user and root forever, one request at a time."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            connection = cast("socket.socket", key.fileobj)
            if connection is listener:
                with suppress(OSError):  # the peer is gone already
                    _accept(listener, user, selector)
                continue
            try:
                message = connection.recv(MESSAGE_MAX_BYTES)
            except OSError:
                message = b""
            if not message or not _answer(connection, mounter, message):
                selector.unregister(connection)
                connection.close()
                mounter.drop_pending()


def _answer(connection: socket.socket, mounter: GuardedMounter, message: bytes) -> bool:
    reply, descriptors = answer(mounter, message)
    try:
        return _send(connection, reply, descriptors)
    finally:
        mounter.close_sent(descriptors)


# one daemon, and its threads that mount at the same time
_CONNECTIONS_MAX = 64


def _accept(listener: socket.socket, user: int, selector: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    # one thread serves all: a peer that does not read must not hold it up
    connection.setblocking(False)
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, uid, _ = struct.unpack("iII", raw)
    if uid in (0, user) and len(selector.get_map()) <= _CONNECTIONS_MAX:
        selector.register(connection, selectors.EVENT_READ)
        return
    # the journal reads stderr
    # `<4>` is the level of a warning (sd-daemon(3))
    print(f"<4>connection.refused uid={uid}", file=sys.stderr, flush=True)  # noqa: T201
    limits = f"only for the daemon's user, {_CONNECTIONS_MAX} at a time"
    refusal = errors.AccessError(f"cannot mount for uid {uid}: {limits}")
    _send(connection, {"problem": refusal.problem()}, [])
    connection.close()


def _send(connection: socket.socket, reply: Mapping[str, Any], descriptors: list[int]) -> bool:
    """Return False if the peer is gone or does not read."""
    try:
        # in one message with the answer: descriptors alone would need a byte of their own
        socket.send_fds(connection, [json.dumps(reply).encode()], descriptors)
    except OSError:
        return False
    return True


def listen(path: Path, uid: int) -> socket.socket:
    """Listen at `path`, where only `uid` and root can connect."""
    # keeps the boundaries of messages: one recv is one request
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # left by one that was killed; bind(2) would be EADDRINUSE
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
    """Serve until SIGTERM. Exits with 2 on wrong arguments."""
    about = "mounts checkouts for another process"
    parser = argparse.ArgumentParser(prog="python -m mirrord.host.mounter", description=about)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--user", required=True, help="the daemon's user: a name or a uid")
    parser.add_argument("--socket", type=Path, help="listen here, unless systemd gives a socket")
    options = parser.parse_args(arguments)
    user, daemon = options.user, None
    with suppress(KeyError):
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
        daemon = entry.pw_uid, entry.pw_gid
    if daemon is None and user.isdecimal():
        daemon = int(user), int(user)
    sockets = list(take_sockets().values())
    if daemon is None or (not sockets and options.socket is None):
        parser.error("give a user that exists, and a socket: --socket, or through systemd")
    try:
        listener = sockets[0] if sockets else listen(options.socket, daemon[0])
        mounter = GuardedMounter(options.state_dir, daemon)
    except (OSError, errors.MirrordError) as error:
        parser.error(f"cannot serve: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Notifier().ready("mounts checkouts")
    try:
        serve(listener, mounter, daemon[0])
    finally:
        mounter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
