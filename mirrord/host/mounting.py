"""Mounting for checkouts: in this process, or by the mount service.

Owns the mounts of a state directory: `checkouts/<name>/tree` and `…/environment`, each an overlay
with its upper layer in `leases/<name>/`, and `checkouts` and `leases`, bound over themselves.
`LocalMounter` calls the kernel. `RemoteMounter` asks `mirrord.host.mounter`, for a daemon with a
private mount namespace, whose mounts clients would not see. Calls are short and block.
"""

import json
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, MirrordError, ResourceError, from_problem
from ..jsontext import loads
from ..model import new_checkout_id
from ..presence import exists
from . import mount_tables, mounts
from .files import opened
from .followers import Followers
from .overlays import (
    BOUND,
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
from .processes import Owner, in_user_namespace
from .trash import find_trash, remove_tree


class LocalMounter:
    """Mounts in this process; trusts its caller and the state directory.

    A missing path raises FileNotFoundError, any other failure a ResourceError.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state = str(state_dir)
        self._mapped = MappedTemplates(f"{self._state}/{IDMAPS}")
        self._followers = Followers(f"{self._state}/{FOLLOWERS}")

    def open(self) -> None:
        """Bind `checkouts` and `leases` over themselves, unless that was done."""
        for name in BOUND:
            mounts.bind_once(f"{self._state}/{name}")

    def is_mapped(self, owner: Owner) -> bool:
        """Return whether an overlay for the owner can be made without a fork."""
        return owner in self._mapped

    def map_owner(self, owner: Owner) -> None:
        """Prepare overlays for an owner; forks."""
        with (
            opened(os.open(f"{self._state}/templates", mounts.DIRECTORY)) as templates,
            self._mapped.view(templates, owner),
        ):
            pass

    def make(self, order: OverlayOrder) -> int:
        """Make a detached overlay; return a descriptor of its root."""
        private = f"{self._state}/leases/{order.checkout}/{order.upper}"
        with ExitStack() as stack:

            def at(path: str, above: int | None = None) -> int:
                fd = os.open(path, mounts.DIRECTORY, dir_fd=above)
                stack.callback(os.close, fd)
                return fd

            templates = at(f"{self._state}/templates")
            if order.owner is not None:
                templates = stack.enter_context(self._mapped.view(templates, order.owner))
            lower = [at(layer, templates) for layer in order.layers]
            return mounts.make_overlay(lower, at(f"{private}/upper"), at(f"{private}/work"))

    def attach(self, checkout: str, mount: int, target: str = TREE) -> None:
        """Mount a detached overlay in the checkout's directory."""
        mounts.attach(mount, f"{self._state}/checkouts/{checkout}/{target}")

    def replace(self, checkout: str, mount: int, target: str = TREE) -> None:
        """Replace the checkout's overlay, in one step for all who mounted `checkouts/<id>`."""
        mounts.replace(mount, f"{self._state}/checkouts/{checkout}/{target}")

    def clone(self, checkout: str, target: str, owner: Owner) -> int:
        """Clone the checkout's `target` for another mount namespace, where it follows resets."""
        path, name = split_target(checkout, target)
        with opened(os.open(f"{self._state}/{path}", mounts.DIRECTORY)) as above:
            return self._followers.clone(above, name)

    def umount(self, checkout: str) -> None:
        """Unmount all its targets, even in use. 15 ms if 5,000 files were looked at."""
        for target in TARGETS:
            mounts.umount(f"{self._state}/checkouts/{checkout}/{target}")

    def visible_to(self, pid: int) -> mount_tables.Visible:
        """Return what a process sees of the checkouts."""
        return mount_tables.visible_to(pid, Path(self._state, "checkouts"))

    def close(self, *, unbind: bool) -> None:
        """Close the clones. `unbind` undoes `open`, unless the directories are in use."""
        self._mapped.close()
        self._followers.close()
        if unbind:
            for name in BOUND:
                mounts.umount_unused(f"{self._state}/{name}")


_UNREACHABLE = (FileNotFoundError, ConnectionRefusedError, PermissionError, TimeoutError)


class RemoteMounter:
    """Asks the mount service at a socket. Thread-safe; a late answer is an error."""

    def __init__(self, path: Path, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self._path, self._timeout = path, timeout
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Nothing to do: the service bound them when it started."""

    def is_mapped(self, owner: Owner) -> bool:
        """Always: the service forks, not this process."""
        return True

    def map_owner(self, owner: Owner) -> None:
        """Nothing to do: the service maps the owner with the first overlay."""

    def make(self, order: OverlayOrder) -> int:
        return _only(self._ask("make", **order._asdict()))

    def attach(self, checkout: str, mount: int, target: str = TREE) -> None:
        """Mount the overlay made last for this target: the service accepts no descriptor."""
        self._ask("attach", checkout=checkout, target=target)

    def replace(self, checkout: str, mount: int, target: str = TREE) -> None:
        self._ask("replace", checkout=checkout, target=target)

    def clone(self, checkout: str, target: str, owner: Owner) -> int:
        return _only(self._ask("clone", checkout=checkout, target=target, owner=owner))

    def umount(self, checkout: str) -> None:
        self._ask("umount", checkout=checkout)

    def visible_to(self, pid: int) -> mount_tables.Visible:
        """Ask the service: our own /proc may hide the process (ProtectProc=)."""
        pids = os.stat("/proc/self/ns/pid").st_ino
        try:
            answer, _ = self._request("visible", pid=pid, pids=pids)
            return mount_tables.Visible(answer["visible"])
        except (MirrordError, OSError, KeyError, ValueError):  # an older service, or none
            return mount_tables.Visible.UNKNOWN

    def close(self, *, unbind: bool) -> None:
        with self._lock:
            self._disconnect()

    def _ask(self, request: str, **arguments: Any) -> Sequence[int]:
        return self._request(request, **arguments)[1]

    def _request(self, request: str, **arguments: Any) -> tuple[dict[str, Any], Sequence[int]]:
        """Return the answer with its descriptors."""
        message = json.dumps({"request": request, **arguments}).encode()
        with self._lock:
            try:
                answer, descriptors = self._exchange(message)
            except OSError as error:
                # a late answer would be taken for that of the next request
                self._disconnect()
                fact = f"cannot ask the mount service at {self._path}: {error.strerror or error}"
                if isinstance(error, _UNREACHABLE):
                    hint = "see mirrord-mount.socket; it answers only to the daemon's user"
                    raise BackendUnavailableError(fact, hint=hint) from error
                hint = "try again; see the log of mirrord-mount.service"
                raise ResourceError(fact, hint=hint) from error
        reply: dict[str, Any] = loads(answer)
        if (problem := reply.get("problem")) is None:
            return reply, descriptors
        if problem.get("code") == "gone":
            raise FileNotFoundError(problem["errno"], problem["detail"])
        raise from_problem(problem)

    def _exchange(self, message: bytes) -> tuple[bytes, Sequence[int]]:
        try:
            (connection := self._connected()).send(message)
        except (
            BrokenPipeError,
            ConnectionResetError,
        ):  # it restarted, and did not read the message
            self._disconnect()
            (connection := self._connected()).send(message)
        flags = socket.MSG_CMSG_CLOEXEC
        # one descriptor at most: the kernel closes what a message has beyond it
        answer, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_MAX_BYTES, 1, flags)
        if not answer:
            raise ConnectionResetError("it closed the connection without an answer")
        return answer, descriptors

    def _connected(self) -> socket.socket:
        if self._socket is None:
            # keeps the bounds of messages (unix(7)): an answer needs no length
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(self._timeout.total_seconds())
            try:
                connection.connect(str(self._path))
            except OSError:
                connection.close()
                raise
            self._socket = connection
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _only(descriptors: Sequence[int]) -> int:
    if len(descriptors) == 1:
        return descriptors[0]
    hint = "see the log of mirrord-mount.service"
    raise ResourceError("cannot mount: the mount service sent no mount", hint=hint)


Mounter = LocalMounter | RemoteMounter


def choose_mounter(state_dir: Path, service: Path) -> Mounter:
    """Mount in this process if clients see its mounts, else by the service at a socket.

    Raises BackendUnavailableError if neither can mount.
    """
    may_mount, is_shared = mounts.may_mount(), mount_tables.shares_mounts(1)
    if may_mount and is_shared:
        return LocalMounter(state_dir)
    if exists(service):
        return RemoteMounter(service)
    if may_mount and is_shared is None:  # unknown: `visible_to` judges each client by itself
        return LocalMounter(state_dir)
    fact = "it is in a mount namespace of its own" if may_mount else "it lacks CAP_SYS_ADMIN"
    hint = f"start mirrord-mount.socket, which makes {service}; or run the daemon as root"
    raise BackendUnavailableError(f"cannot mount in this process: {fact}", hint=hint)


def probe_overlay(state_dir: Path, mounter: Mounter) -> str:
    """Mount, use and unmount an overlay, for the daemon's user and for another one.

    Returns why other users cannot have one, empty if they can. Raises BackendUnavailableError if
    the daemon's user cannot either. Leaves nothing behind; a kill leaves a checkout without a
    lease, which the next start removes.
    """
    layer = state_dir / "templates" / PROBE_LAYER
    (layer / "directory").mkdir(mode=0o755, parents=True, exist_ok=True)
    (layer / "directory" / "file").touch()
    try:
        _probe_as(state_dir, mounter, None)
        try:
            # nobody's
            _probe_as(state_dir, mounter, (65534, 65534))
        except (MirrordError, OSError) as error:
            return str(error)
        return ""
    except FileNotFoundError as error:
        raise BackendUnavailableError(
            f"cannot mount an overlay in {state_dir}: {error.strerror}"
        ) from error
    finally:
        for left in (layer, *find_trash(layer.parent)):
            remove_tree(left)


def _probe_as(state_dir: Path, mounter: Mounter, mapped: Owner | None) -> None:
    """Check that a file of the lower layer belongs to the owner, and rename a directory."""
    owner = mapped or (os.geteuid(), os.getegid())
    name = new_checkout_id()
    public, private = state_dir / "checkouts" / name, state_dir / "leases" / name
    tree = public / "tree"
    terms = {"owner_uid": owner[0], "owner_gid": owner[1]}
    try:
        for path in (tree, private / "layer" / "upper", private / "layer" / "work"):
            path.mkdir(mode=0o700, parents=True)
        # never by its last name: a start would take what a kill or a full disk left for a checkout
        (private / "lease.json.new").write_text(json.dumps({"terms": terms}))
        with opened(mounter.make(OverlayOrder(name, "layer", (PROBE_LAYER,), mapped))) as mount:
            mounter.attach(name, mount)
        try:
            st = (tree / "directory" / "file").stat()
            if not in_user_namespace():  # without redirect_dir it is EXDEV
                (tree / "directory").rename(tree / "renamed")
        except OSError as error:
            message = f"cannot use an overlay in {public.parent}: {error.strerror}"
            raise BackendUnavailableError(message) from error
        if (st.st_uid, st.st_gid) != owner:
            fact = f"they are shown as uid {st.st_uid}'s"
            raise BackendUnavailableError(f"cannot give files to uid {owner[0]}: {fact}")
    finally:
        mounter.umount(name)
        remove_tree(public)
        remove_tree(private)
