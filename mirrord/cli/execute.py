"""`mirrord exec`: a checkout for the time of one command, which cannot reach any other checkout.

The command runs without the daemon's socket, and with --owner as another user without any groups.
When `mirrord exec` is killed, the command dies with it, and the daemon releases the checkout, which
is bound to this process. Where the daemon cannot see the process, the deadline does that: the lease
is short, and renewed while the command runs.
"""

from __future__ import annotations

import grp
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from .. import errors
from ..host.namespaces import Confinement
from ..host.processes import hide_argument
from ..model import Bind, View
from . import parameters
from .parameters import Argument, Option
from .session import Session

if TYPE_CHECKING:
    from .. import Checkout

_LEASE = timedelta(minutes=3)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def execute(
    session: Session,
    instance: parameters.InstanceArgument,
    command: Annotated[
        list[str], Argument(metavar="COMMAND...", help="After --; runs in the checkout's tree.")
    ],
    diff: Annotated[
        Path | None, Option(metavar="FILE", help="Write the patch of its changes to FILE.")
    ] = None,
    history: parameters.HistoryOption = None,
    view: parameters.ViewOption = View.AGENT,
    backend: parameters.BackendOption = None,
    owner: parameters.OwnerOption = None,
    keep_access: Annotated[
        bool, Option("--keep-access", help="Leave the daemon's socket within the command's reach.")
    ] = False,
) -> None:
    """Ends with the command's exit status; 128 and the signal's number when a signal ended it.

    The checkout is released in any case; the command finds its id in MIRRORD_CHECKOUT. With --owner
    it runs as that user, without any groups.
    """
    patch = None if diff is None else diff.absolute()
    if patch is not None:
        try:
            patch.open("ab").close()  # better now than after hours of the command
        except OSError as error:
            hint = "name another file with --diff"
            raise errors.UsageError(f"cannot write {diff}: {error.strerror}", hint=hint) from error
    uid = parameters.read_owner(owner)
    client = session.client
    wanted: dict[str, Any] = {"history": history, "view": view, "backend": backend}
    wanted |= {"ttl": _LEASE, "owner": uid, "auto_renew": False}
    take = partial(client.checkout, instance, **wanted)
    try:
        checkout = take(bind=Bind.PROCESS)
    except errors.ProcessGoneError:  # the daemon cannot see this process
        checkout = take()
    with checkout:
        lease = checkout.lease
        if lease.instance and lease.instance != instance:  # the dataset's id tells a commit
            hide_argument(instance)
        is_other = lease.owner_uid != os.getuid()
        become = (lease.owner_uid, lease.owner_gid) if is_other else None
        hidden = None if keep_access else client.socket.resolve()
        _tell(session, become, hidden)
        confinement = Confinement(os.getpid(), checkout.path, become, hidden)
        with _forwarding() as forward_to:
            # Started before there is a second thread: the child runs Python before its exec.
            process = _start(checkout, command, confinement)
            forward_to(process)
            with _renewing(session, checkout):
                status = process.wait()
        if patch is not None:
            patch.write_bytes(checkout.diff())
    raise SystemExit(status if status >= 0 else 128 - status)


def _tell(session: Session, become: tuple[int, int] | None, hidden: Path | None) -> None:
    """Print which groups the command loses, and that root keeps its access."""
    is_roots = hidden and not become and os.getuid() == 0
    if (become or is_roots) and (groups := set(os.getgroups()) - {os.getgid()}):
        names = []
        for gid in groups:
            try:
                names.append(grp.getgrgid(gid).gr_name)
            except KeyError:
                names.append(str(gid))
        user = become[0] if become else 0
        without = f"without the groups {', '.join(names)}"
        session.note(f"mirrord: the command runs as uid {user}, {without}")
    if is_roots:
        session.note("mirrord: root can reach the daemon all the same; name a user with --owner")


def _start(
    checkout: Checkout, command: list[str], confinement: Confinement
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "MIRRORD_CHECKOUT": checkout.id, "PWD": str(checkout.path)}
    if confinement.hidden:
        for name in ("MIRRORD_SOCKET", "MIRRORD_CONFIG"):
            environment.pop(name, None)
    reading, writing = os.pipe()  # closed in the child by its exec

    def enter() -> None:
        try:
            confinement.enter()
        except (OSError, errors.MirrordError) as error:
            os.write(writing, str(getattr(error, "strerror", None) or error).encode())
            raise

    try:
        return subprocess.Popen(command, env=environment, preexec_fn=enter)  # noqa: PLW1509
    except FileNotFoundError as error:
        hint = "write mirrord exec INSTANCE -- COMMAND..."
        raise errors.NotFoundError(
            f"cannot run {command[0]}: no such command", hint=hint
        ) from error
    except OSError as error:
        raise errors.UsageError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.SubprocessError as error:
        fact = os.read(reading, 4096).decode(errors="replace")
        raise errors.BackendUnavailableError(
            f"cannot run {command[0]} without access to the daemon: {fact}",
            hint="it needs user namespaces (see docs/security.md), for --owner newuidmap and a "
            "range in /etc/subuid and /etc/subgid, or root; --keep-access leaves the socket "
            "within reach",
        ) from error
    finally:
        os.close(writing)
        os.close(reading)


@contextmanager
def _forwarding() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward our signals to the command, early ones included, and outlive them."""
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not running:
            early.append(number)
        elif number != signal.SIGINT or not _in_foreground():  # a terminal sent it to both
            with suppress(ProcessLookupError):
                running[0].send_signal(number)

    def forward_to(process: subprocess.Popen[bytes]) -> None:
        running.append(process)
        for number in early:
            forward(number, None)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


@contextmanager
def _renewing(session: Session, checkout: Checkout) -> Iterator[None]:
    """Renew the lease while the command runs; a failure is printed, and tried again."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_LEASE.total_seconds() / 3):
            try:
                checkout.renew(_LEASE)
            except errors.MirrordError as error:
                session.fail(error)

    thread = threading.Thread(target=renew, name="renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
