"""`mirrord exec`: one command in a sandbox, in a checkout of its own or in one that is held.

The checkout of its own is released in any case: it is bound to this process. Where the daemon
cannot see the process, the deadline does that: the lease is short, and renewed while the command
runs. When `mirrord exec` is killed, the command dies with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from .. import errors
from ..bubblewrap import become, end, find_started
from ..client.sandboxes import box_of
from ..client.sandboxes.rooms import Limits
from ..host.processes import hide_argument
from ..model import Bind, View, shown
from ..units import parse_size
from .checkouts import Environment, Layer, find_id, is_id
from .session import (
    Argument,
    BackendOption,
    HistoryOption,
    Option,
    OwnerOption,
    Session,
    ViewOption,
    read_duration,
    read_owner,
)

if TYPE_CHECKING:
    from .. import Checkout

_LEASE = timedelta(minutes=3)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_INSIDE = "/usr/local/bin:/usr/bin:/bin"
_SHOWN = ("/usr/", "/bin/", "/sbin/")


def execute(
    session: Session,
    target: Annotated[
        str, Argument("An instance id, NAME@COMMITISH, or a held checkout.", "INSTANCE|ID")
    ],
    command: Annotated[list[str], Argument("After --; runs in the checkout's tree.", "COMMAND...")],
    diff: Annotated[Path | None, Option("Write the patch of its changes to FILE.", "FILE")] = None,
    environment: Environment = None,
    layer: Layer = None,
    history: HistoryOption = None,
    view: ViewOption = View.AGENT,
    backend: BackendOption = None,
    owner: OwnerOption = None,
    network: Annotated[bool, Option("With the host's network, its localhost too.")] = False,
    show: Annotated[
        list[str], Option("Show this of the host too, read-only; may be repeated.", "PATH")
    ] = [],  # noqa: B006
    variable: Annotated[
        list[str], Option("Set or pass a variable; may be repeated.", "NAME[=VALUE]")
    ] = [],  # noqa: B006
    timeout: Annotated[str | None, Option("End the command after this time.", "DURATION")] = None,
    memory: Annotated[str | None, Option("Bound its memory, such as 2GiB.", "SIZE")] = None,
    processes: Annotated[str | None, Option("Bound the number of its processes.", "NUMBER")] = None,
    keep_access: Annotated[bool, Option("No sandbox: all of the host stays within reach.")] = False,
) -> None:
    """The tree is at /testbed, its environment is active, HOME and /tmp are the command's own; it
    sees the host's /usr and no other process, network, file or socket. Ends with its exit status;
    128 and the signal's number when a signal ended it.

    The checkout of an INSTANCE is released in any case; the command finds its id in
    MIRRORD_CHECKOUT. With --owner it runs as that user, without any groups.
    """
    patch = None if diff is None else diff.absolute()
    if patch is not None:
        try:
            patch.open("ab").close()  # better now than after hours of the command
        except OSError as error:
            hint = "name another file with --diff"
            raise errors.UsageError(f"cannot write {diff}: {error.strerror}", hint=hint) from error
    given: dict[str, Any] = {"history": history, "backend": backend, "environment": environment}
    given |= {"layer": layer, "owner": read_owner(owner)}
    run = _Run(
        command,
        network,
        not keep_access,
        read_duration(timeout, "--timeout"),
        _read_limits(memory, processes),
        [Path(path).absolute() for path in show],
        dict(map(_read_variable, variable)),
    )
    with _checkout(session, target, given, view) as checkout:
        if checkout.lease.owner_uid == 0 and not keep_access:
            session.note("mirrord: the command runs as root; name another user with --owner")
        status = run.in_checkout(checkout, session)
        if patch is not None:
            patch.write_bytes(checkout.diff())
    raise SystemExit(status)


@contextmanager
def _checkout(
    session: Session, target: str, given: dict[str, Any], view: View
) -> Iterator[Checkout]:
    """The named checkout, or one of the named instance for the time of the command."""
    client = session.client
    if is_id(target):
        if named := [name for name, value in given.items() if value is not None]:
            fact = f"cannot take --{named[0]} with a checkout: it is as it was taken"
            raise errors.UsageError(fact, hint="name an instance")
        yield client.open_checkout(find_id(session, target))
        return
    take = partial(client.checkout, target, view=view, ttl=_LEASE, **given)
    try:
        taken = take(bind=Bind.PROCESS)
    except errors.ProcessGoneError:  # the daemon cannot see this process
        taken = take()
    with taken as checkout:
        if checkout.instance and checkout.instance != target:  # the dataset's id tells a commit
            hide_argument(target)
        yield checkout


class _Run(NamedTuple):
    """A command and what it may have."""

    command: list[str]
    network: bool
    is_boxed: bool
    timeout: timedelta | None
    limits: Limits
    shown: list[Path]
    variables: dict[str, str]

    def in_checkout(self, checkout: Checkout, session: Session) -> int:
        """Answers its exit status, and prints the limits that struck."""
        # Started by the thread that outlives it: with that, the kernel ends it.
        try:
            with _forwarding() as forward_to:
                process = self._start(checkout)
                forward_to(process, self.is_boxed)
                try:
                    seconds = self.timeout.total_seconds() if self.timeout else None
                    status = process.wait(seconds)
                except subprocess.TimeoutExpired:
                    end(process) if self.is_boxed else process.kill()
                    process.wait()
                    status = -signal.SIGKILL
                    session.note(f"mirrord: the command was ended after {self.timeout}")
            for limit, times in self.limits.strikes().items():
                if times:
                    session.note(f"mirrord: the limit of {limit} struck")
        finally:
            self.limits.remove()
        return status if status >= 0 else 128 - status

    def _start(self, checkout: Checkout) -> subprocess.Popen[bytes]:
        # Its own session: Ctrl-C is for this process, which forwards it.
        options: dict[str, Any] = {"cwd": "/", "start_new_session": True}
        box = box_of(checkout.lease, network=self.network, variables=self.variables)
        try:
            if self.is_boxed:
                command, shown_paths = self._find_program(box.environment)
                box = replace(box, readable={str(path): path for path in shown_paths})
                # a shell, for its message and status where there is no such command
                command = [*self.limits.inside, "sh", "-c", 'exec "$@"', "sh", *command]
                return box.start(command, before=self.limits.before, **options)
            own = () if box.owner is None and os.geteuid() == 0 else become(box.owner)
            start = [*self.limits.before, *own, "env", f"--chdir={checkout.path}"]
            variables = {**os.environ, **box.variables, "PWD": str(checkout.path)}
            argv = [*start, *self.limits.inside, *self.command]
            return subprocess.Popen(argv, env=variables, **options)
        except OSError as error:
            fact = f"cannot run {self.command[0]}: {error.strerror}"
            raise errors.UsageError(fact, hint="`mirrord doctor` tries what it needs") from error

    def _find_program(self, environment: Path | None) -> tuple[list[str], list[Path]]:
        """The command, with what of the host is shown: its program, where the sandbox has none."""
        name, *rest = self.command
        search = f"{environment}/bin:{_INSIDE}" if environment else _INSIDE
        is_inside = "/" not in name and shutil.which(name, path=search)
        found = None if is_inside else shutil.which(name)
        if found is None or not found.startswith("/") or found.startswith(_SHOWN):
            return self.command, self.shown
        return [found, *rest], [*self.shown, Path(found)]


def _read_variable(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not name or not (is_set or name in os.environ):
        hint = "write --variable NAME=VALUE"
        raise errors.UsageError(f"cannot pass variable {shown(text)}: it is not set", hint=hint)
    return name, value if is_set else os.environ[name]


def _read_limits(memory: str | None, processes: str | None) -> Limits:
    try:
        size = parse_size(memory) if memory else None
    except ValueError as error:
        raise errors.UsageError(f"cannot read --memory: {error}", hint="2GiB") from error
    if processes and not (processes.isdecimal() and int(processes)):
        fact = f"cannot read --processes: {shown(processes)} is no number above 0"
        raise errors.UsageError(fact, hint="write for example --processes 200")
    return Limits(size, int(processes) if processes else None)


Forward = Callable[[subprocess.Popen[bytes], bool], None]


@contextmanager
def _forwarding() -> Iterator[Forward]:
    """Forward our signals to the command, early ones included, and outlive them."""
    running: list[tuple[subprocess.Popen[bytes], bool]] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not running:
            early.append(number)
            return
        process, is_boxed = running[0]
        pid = find_started(process) if is_boxed else process.pid
        with suppress(ProcessLookupError):
            if pid is None:  # it has not begun
                process.kill()
            elif process.returncode is None:
                os.kill(pid, number)

    def forward_to(process: subprocess.Popen[bytes], is_boxed: bool) -> None:
        running.append((process, is_boxed))
        for number in early:
            forward(number, None)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
