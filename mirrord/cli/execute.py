"""`mirrord exec`: a checkout for the time of one command.

When `mirrord exec` is killed, the command dies with it, and a process that stayed behind for this gives the checkout back. Where
that one was killed too, the deadline does: the lease is short, and renewed while the command runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from ..errors import MirrordError, NotFoundError, UsageError
from ..host.processes import die_with_parent, when_killed
from ..model import Backend, History, View
from .parameters import Argument, Option
from .session import Session

if TYPE_CHECKING:
    from .. import Checkout

_LEASE = timedelta(minutes=3)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def execute(
    session: Session,
    instance: Annotated[str, Argument(metavar="INSTANCE", help="An instance id, or NAME@COMMITISH.")],
    command: Annotated[list[str], Argument(metavar="-- COMMAND...", help="Runs in the checkout's directory.")],
    diff: Annotated[Path | None, Option(metavar="FILE", help="Leave the patch of what it changed here.")] = None,
    history: Annotated[History | None, Option(help="How much of the past it shows; default: as configured.")] = None,
    view: Annotated[View, Option(help="Who it is for: an agent, or the grader of one.")] = View.AGENT,
    backend: Annotated[Backend | None, Option(help="How it is made; default: as configured.")] = None,
) -> None:
    """Ends with the command's own exit status, 128 and the signal's number when a signal ended it. The checkout is released on
    any end; the command finds its id in MIRRORD_CHECKOUT."""
    patch = None if diff is None else _openable(diff)
    with (
        session.client() as client,
        client.checkout(instance, history=history, view=view, backend=backend, ttl=_LEASE) as checkout,
        when_killed(partial(_give_back, session, checkout.id)),
    ):
        status = _run(session, checkout, command)
        if patch is not None:
            patch.write_bytes(checkout.diff())
    raise SystemExit(status)


def _give_back(session: Session, checkout: str) -> None:
    """Over a connection of its own: the other one is the dead process's."""
    with suppress(MirrordError), session.client() as client:
        client.release_checkout(checkout)


def _openable(path: Path) -> Path:
    """Find out before the command has run that its patch will have a place."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name another file with --diff") from error
    return path.absolute()


def _run(session: Session, checkout: Checkout, command: list[str]) -> int:
    with _forwarding() as running, _renewing(session, checkout):
        process = _start(checkout, command)
        running.append(process)
        status = process.wait()
    return status if status >= 0 else 128 - status


def _start(checkout: Checkout, command: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "MIRRORD_CHECKOUT": checkout.id, "PWD": str(checkout.path)}
    die = partial(die_with_parent, os.getpid())
    try:
        return subprocess.Popen(command, cwd=checkout.path, env=environment, preexec_fn=die)  # noqa: PLW1509
    except FileNotFoundError as error:
        raise NotFoundError(
            f"cannot run {command[0]}: no such command", hint="write mirrord exec INSTANCE -- COMMAND..."
        ) from error
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from error


@contextmanager
def _forwarding() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Give the command our signals, and outlive them. From a terminal, Ctrl-C has reached the command already."""
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not running:
            early.append(number)
        elif number != signal.SIGINT or not _in_foreground():
            with suppress(ProcessLookupError):
                running[0].send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield running
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
