"""`mirrord exec`: run a command in a sandbox that shows a temporary or a held checkout.

A temporary checkout is bound to this process, so the daemon releases it even if the process is
killed. If `mirrord exec` is killed, the command is killed too; if it is asked to end, the command
has ten seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ... import errors, protocol
from ...model import Bind, Isolation, View, shown
from ...presence import exists
from ...sandbox.box import become, showing
from ...sandbox.calls import box_of, choose_workdir, environment_of, is_shown, weaker
from ...sandbox.direct import best, isolate
from ...sandbox.relaying import forwarding, kill, outputs, relaying
from ...sandbox.room import Limits
from ...units import parse_size
from ..session import (
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
from .checkouts import Environment, Layer, find_id, is_id

if TYPE_CHECKING:
    from ... import Checkout

# renewed at a third of it; after a killed `mirrord exec` the tree is gone within three minutes
_LEASE_TTL = timedelta(minutes=3)
_SANDBOX_PATH = "/usr/local/bin:/usr/bin:/bin"
# shown in every sandbox; a program elsewhere is shown by itself
_SANDBOX_DIRECTORIES = ("/usr/", "/bin/", "/sbin/")
_TARGET_HELP = "An instance id, NAME@COMMITISH, or a held checkout."
_COMMAND_HELP = "The command, with or without -- before it; default: a shell."


class SandboxOptions(NamedTuple):
    """What the command may see and use."""

    network: Annotated[bool, Option("Share the host's network, localhost included.")] = False
    show: Annotated[
        list[str] | None, Option("Path of the host to show read-only; repeatable.", "PATH")
    ] = None
    variable: Annotated[
        list[str] | None,
        Option("Environment variable to set or pass; repeatable.", "NAME[=VALUE]"),
    ] = None
    timeout: Annotated[
        str | None, Option("Kill the command after this time, such as 10m.", "DURATION")
    ] = None
    memory: Annotated[str | None, Option("Limit of memory, such as 2GiB.", "SIZE")] = None
    processes: Annotated[str | None, Option("Limit of processes.", "NUMBER")] = None
    workdir: Annotated[
        str | None, Option("Where the tree is, besides /testbed; default: as the row says.", "PATH")
    ] = None
    entrypoint: Annotated[
        bool, Option("Run the image's entry point; the command is its arguments.")
    ] = False
    isolation: Annotated[
        Isolation | None,
        Option("Demand this isolation, instead of the best that is possible here."),
    ] = None
    keep_access: Annotated[
        bool, Option("Run it without a sandbox, with access to the whole host.")
    ] = False

    @property
    def needs_uid(self) -> bool:
        """Return whether root's command needs a uid of its own, because it has no namespaces."""
        if os.geteuid() != 0 or self.keep_access or self.isolation is Isolation.NONE:
            return False
        return (self.isolation or best(None)) is not Isolation.NAMESPACES


def execute(
    session: Session,
    target: Annotated[str, Argument(_TARGET_HELP, "INSTANCE|ID", "checkout or instance")],
    command: Annotated[
        list[str] | None, Argument(_COMMAND_HELP, "[COMMAND...]", is_command=True)
    ] = None,
    diff: Annotated[Path | None, Option("File for the patch of the changes.", "FILE")] = None,
    environment: Environment = None,
    layer: Layer = None,
    history: HistoryOption = None,
    view: ViewOption = View.AGENT,
    backend: BackendOption = None,
    owner: OwnerOption = None,
    *,
    sandbox: SandboxOptions,
) -> None:
    """The tree is at /testbed, and where the instance's row or --workdir says; the command starts
    there. Its environment is active. HOME and /tmp are private. The command
    sees the host's /usr, but no other process, network, file or socket. The exit status is that of
    the command, or 128 plus the number of the signal that ended it.

    The checkout of an INSTANCE is temporary; MIRRORD_CHECKOUT is its id. With --owner the command
    runs as that user, without groups.
    """
    run = _Run(command or [], sandbox)
    patch = None if diff is None else _must_be_writable(diff)
    given: dict[str, Any] = {"history": history, "backend": backend, "environment": environment}
    given |= {"layer": layer, "owner": read_owner(owner)}
    if not (is_id(target) or given["owner"]) and sandbox.needs_uid:
        given["owner"] = _free_uid(session)
    with _checkout(session, target, given, view) as checkout:
        if checkout.lease.owner_uid == 0 and not sandbox.keep_access:
            how = "`mirrord checkout --owner`" if is_id(target) else "--owner"
            session.note(f"mirrord: the command runs as root; name another user with {how}")
        status = run.in_checkout(checkout, session)
        if patch is not None:
            patch.write_bytes(checkout.diff())
    raise SystemExit(status)


def _must_be_writable(path: Path) -> Path:
    """Return the absolute path of a file; fails before the command, which may run for hours."""
    hint = "name a writable file with --diff"
    if str(path) == "-":
        raise errors.UsageError("cannot write the patch to -: stdout is the command's", hint=hint)
    absolute = path.absolute()
    try:
        absolute.open("ab").close()
    except OSError as error:
        raise errors.UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    return absolute


def _free_uid(session: Session) -> int:
    """Return a uid that owns no checkout, of those that systemd hands out to services."""
    owners: set[int] = {checkout.owner_uid for checkout in session.client.list_checkouts()}
    uids = range(61184, 65520)  # says its UIDS-GIDS; also mapped in a container of 65,536
    first = os.getpid() % len(uids)  # two that start at once have two
    free = (uid for uid in (*uids[first:], *uids[:first]) if uid not in owners)
    return int(next(free))


@contextmanager
def _checkout(
    session: Session, target: str, given: dict[str, Any], view: View
) -> Iterator[Checkout]:
    """Yield the named checkout, or a temporary one of the named instance."""
    client = session.client
    if is_id(target):
        if options := [name for name, value in given.items() if value is not None]:
            fact = f"cannot use --{options[0]} with a held checkout: it was chosen when it was made"
            raise errors.UsageError(fact, hint="name an instance")
        yield client.open_checkout(find_id(session, target))
        return
    lease = partial(client.checkout, target, view=view, ttl=_LEASE_TTL, sandbox=True, **given)
    try:
        leased = lease(bind=Bind.PROCESS)
    except errors.ProcessGoneError:  # the daemon cannot see this process
        leased = lease()
    with leased as checkout:
        if checkout.instance and checkout.instance != target:  # the id may name a commit
            from ...host.processes import hide_argument  # noqa: PLC0415 - loads ctypes

            hide_argument(target)
        yield checkout


class _Run:
    """A command, its sandbox and its limits."""

    def __init__(self, command: list[str], options: SandboxOptions) -> None:
        boxed = ("isolation", "workdir", "entrypoint")
        if options.keep_access and (named := [name for name in boxed if getattr(options, name)]):
            fact = f"cannot use --{named[0]} with --keep-access: it applies to sandboxes only"
            raise errors.UsageError(fact, hint="name one of them")
        self._given, self._options = command, options
        self._timeout = read_duration(options.timeout, "--timeout")
        self._limits = _read_limits(options.memory, options.processes)
        self._shown_paths = list(map(_find_shown, options.show or ()))
        self._variables = dict(map(_read_variable, options.variable or ()))
        self._workdir = choose_workdir(options.workdir)

    def in_checkout(self, checkout: Checkout, session: Session) -> int:
        """Run the command, note the limits that it met, and return its exit status."""
        # Start it from the main thread: the kernel kills it when the thread that started it ends.
        try:
            with forwarding() as forward_to:
                process = self._start(checkout, session)
                forward_to(process)
                with relaying(process, session.note):
                    try:
                        seconds = self._timeout.total_seconds() if self._timeout else None
                        status = process.wait(seconds)
                    except subprocess.TimeoutExpired:
                        kill(process)
                        status = -signal.SIGKILL
                        session.note(f"mirrord: the command was killed after {self._timeout}")
            for limit, times in self._limits.strikes().items():
                if times:
                    session.note(f"mirrord: the command met its limit of {limit}")
        finally:
            self._limits.remove()
        # Popen has -N for signal N, where a shell has 128 + N
        return status if status >= 0 else 128 - status

    def _start(self, checkout: Checkout, session: Session) -> subprocess.Popen[bytes]:
        if is_shown(checkout.lease):
            return self._start_with(checkout, session, None)
        mount = checkout.open_mount()
        try:
            return self._start_with(checkout, session, mount)
        finally:
            os.close(mount)

    def _start_with(
        self, checkout: Checkout, session: Session, mount: int | None
    ) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches this process alone, which forwards it.
        options: dict[str, Any] = {"start_new_session": True}
        network, isolation, lease = self._options.network, self._options.isolation, checkout.lease
        box = box_of(lease, network=network, variables=self._variables, workdir=self._workdir)
        box = replace(box, mount=mount)
        try:
            if not self._options.keep_access:
                asked = self._command(box.image)
                command, paths = self._find_program(asked, environment_of(lease, mount))
                shown_paths = {str(path): path for path in paths}
                box = replace(box, readable={**box.readable, **shown_paths})
                # through a shell, for its message and status 127 if the command does not exist
                command = [*self._limits.inside, "sh", "-c", 'exec "$@"', "sh", *command]
                isolated = isolate(box, isolation)
                if isolation is None and isolated.isolation is not Isolation.NAMESPACES:
                    session.note(f"mirrord: {weaker(isolated.isolation)}")
                return isolated.start(command, before=self._limits.before, **options, **outputs())
            own = () if box.owner is None and os.geteuid() == 0 else become(box.owner)
            own = (*own, *showing(mount, checkout.directory))
            # not by cwd=: only the owner may enter it, and only where the mount is shown
            start = [*self._limits.before, *own, "env", f"--chdir={checkout.path}"]
            options["pass_fds"] = () if mount is None else (mount,)
            variables = {**os.environ, **box.variables, "PWD": str(checkout.path)}
            argv = [*start, *self._limits.inside, *self._command(None)]
            return subprocess.Popen(argv, env=variables, cwd="/", **options)
        except OSError as error:
            fact = f"cannot run {self._command(box.image)[0]}: {error.strerror}"
            raise errors.UsageError(fact, hint="see `mirrord doctor`") from error

    def _command(self, image: protocol.Image | None) -> list[str]:
        """Return the command: with an entry point as docker puts them together."""
        if not self._options.entrypoint:
            return self._given or ["sh"]  # the one that every sandbox has
        if image is None or not (command := [*image.entrypoint, *(self._given or image.command)]):
            fact = "it has nothing to run" if image else "the checkout has no image"
            hint = "leave --entrypoint out, and name a command"
            raise errors.UsageError(f"cannot run the entry point: {fact}", hint=hint)
        return command

    def _find_program(
        self, command: list[str], environment: Path | None
    ) -> tuple[list[str], list[Path]]:
        """Return the command and the paths to show; the host's program if the sandbox lacks it."""
        name, *rest = command
        search = f"{environment}/bin:{_SANDBOX_PATH}" if environment else _SANDBOX_PATH
        is_inside = "/" not in name and shutil.which(name, path=search)
        program = "" if is_inside else shutil.which(name) or ""
        if not program.startswith("/") or program.startswith(_SANDBOX_DIRECTORIES):
            return command, self._shown_paths
        return [program, *rest], [*self._shown_paths, Path(program)]


def _find_shown(text: str) -> Path:
    path = Path(text).absolute()
    if not exists(path):
        hint = "name a path of this host that you may read"
        raise errors.PathNotFoundError(f"cannot show {shown(text)}: no such path", hint=hint)
    return path


def _read_variable(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not name or not (is_set or name in os.environ):
        fact = "it is not set" if name else "it has no name"
        raise errors.UsageError(
            f"cannot pass variable {shown(text)}: {fact}", hint="use --variable NAME=VALUE"
        )
    return name, value if is_set else os.environ[name]


def _read_limits(memory: str | None, processes: str | None) -> Limits:
    try:
        size = parse_size(memory) if memory else None
    except ValueError as error:
        raise errors.UsageError(
            f"cannot read --memory: {error}", hint="for example 2GiB"
        ) from error
    if processes and not (processes.isdecimal() and int(processes)):
        fact = f"cannot read --processes: {shown(processes)} is not a number above 0"
        raise errors.UsageError(fact, hint="for example --processes 200")
    return Limits(size, int(processes) if processes else None)
