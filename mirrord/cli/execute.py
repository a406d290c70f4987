"""`mirrord exec`: a checkout for the time of one command, which reaches no other.

The command runs without the daemon's socket, and with --owner as another user without any groups.
When `mirrord exec` is killed, the command dies with it, and the daemon releases the checkout, which
is bound to this process. Where the daemon cannot see the process the deadline does that: the lease
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
from typing import TYPE_CHECKING, Annotated

from ..errors import (
    BackendUnavailableError,
    MirrordError,
    NotFoundError,
    ProcessGoneError,
    UsageError,
)
from ..host.namespaces import Confinement
from ..model import Backend, Bind, History, View
from .checkouts import Owner, read_owner
from .parameters import Argument, Option
from .session import Session

if TYPE_CHECKING:
    from .. import Checkout

_LEASE = timedelta(minutes=3)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def execute(
    session: Session,
    instance: Annotated[
        str, Argument(metavar="INSTANCE", help="An instance id, or NAME@COMMITISH.")
    ],
    command: Annotated[
        list[str], Argument(metavar="-- COMMAND...", help="Runs in the checkout's directory.")
    ],
    diff: Annotated[
        Path | None, Option(metavar="FILE", help="Leave the patch of what it changed here.")
    ] = None,
    history: Annotated[
        History | None, Option(help="How much of the past it shows; default: as configured.")
    ] = None,
    view: Annotated[
        View, Option(help="Who it is for: an agent, or the grader of one.")
    ] = View.AGENT,
    backend: Annotated[
        Backend | None, Option(help="How it is made; default: as configured.")
    ] = None,
    owner: Owner = None,
    keep_access: Annotated[
        bool, Option("--keep-access", help="Leave the daemon's socket within reach of the command.")
    ] = False,
) -> None:
    """Ends with the command's own exit status, 128 and the signal's number when a signal ended it. The checkout is released on
    any end; the command finds its id in MIRRORD_CHECKOUT. With --owner it runs as that user, without any groups."""
    patch = None if diff is None else _openable(diff)
    uid = read_owner(owner)
    with (
        session.client() as client,
        _bound(
            partial(
                client.checkout,
                instance,
                history=history,
                view=view,
                backend=backend,
                ttl=_LEASE,
                owner=uid,
                auto_renew=False,
            )
        ) as checkout,
    ):
        become = (
            (checkout.lease.owner_uid, checkout.lease.owner_gid)
            if checkout.lease.owner_uid != os.getuid()
            else None
        )
        hidden = None if keep_access else client.socket.resolve()
        _tell(session, become, hidden)
        status = _run(
            session, checkout, command, Confinement(os.getpid(), checkout.path, become, hidden)
        )
        if patch is not None:
            patch.write_bytes(checkout.diff())
    raise SystemExit(status)


def _bound(take: Callable[..., Checkout]) -> Checkout:
    """A checkout that ends with this process, where the daemon can see it."""
    try:
        return take(bind=Bind.PROCESS)
    except ProcessGoneError:
        return take()


def _tell(session: Session, become: tuple[int, int] | None, hidden: Path | None) -> None:
    """What the command has no more, and what it still has."""
    is_roots = hidden and not become and os.getuid() == 0
    if (become or is_roots) and (groups := set(os.getgroups()) - {os.getgid()}):
        user = become[0] if become else 0
        session.note(
            f"mirrord: the command runs as uid {user}, without the groups {', '.join(map(_group_name, groups))}"
        )
    if is_roots:
        session.note("mirrord: root can reach the daemon all the same; name a user with --owner")


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _openable(path: Path) -> Path:
    """Find out before the command has run that its patch will have a place."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="name another file with --diff"
        ) from error
    return path.absolute()


def _run(session: Session, checkout: Checkout, command: list[str], confinement: Confinement) -> int:
    with _forwarding() as forward_to:
        process = _start(
            checkout, command, confinement
        )  # before there is a thread: the child runs Python
        forward_to(process)
        with _renewing(session, checkout):
            status = process.wait()
    return status if status >= 0 else 128 - status


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
        except (OSError, MirrordError) as error:
            os.write(writing, str(getattr(error, "strerror", None) or error).encode())
            raise

    try:
        return subprocess.Popen(command, env=environment, preexec_fn=enter)  # noqa: PLW1509
    except FileNotFoundError as error:
        raise NotFoundError(
            f"cannot run {command[0]}: no such command",
            hint="write mirrord exec INSTANCE -- COMMAND...",
        ) from error
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.SubprocessError as error:
        raise BackendUnavailableError(
            f"cannot run {command[0]} without access to the daemon: {os.read(reading, 4096).decode(errors='replace')}",
            hint="it needs user namespaces (see docs/security.md), for --owner newuidmap and a range in /etc/subuid and "
            "/etc/subgid, or root; --keep-access leaves the socket within reach",
        ) from error
    finally:
        os.close(writing)
        os.close(reading)


@contextmanager
def _forwarding() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Give the command our signals, also those from before it was known, and outlive them.

    From a terminal, Ctrl-C has reached the command already.
    """
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not running:
            early.append(number)
        elif number != signal.SIGINT or not _in_foreground():
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
    """Keep the lease while the command runs. A failure is told once; the next try comes all the same."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_LEASE.total_seconds() / 3):
            try:
                checkout.renew(_LEASE)
            except MirrordError as error:
                session.fail(error)

    thread = threading.Thread(target=renew, name="renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
