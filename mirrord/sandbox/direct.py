"""Sandboxes where no namespace can be made: in a container, or where the kernel refuses users.

The paths of a sandbox are then paths of the host: `at` says which. docs/where.md has what each
`Isolation` keeps from what. A guard (`confine.py`) is the parent of all processes of one.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError
from ..model import Isolation
from ..places import ENVIRONMENT, PROGRAMS, SANDBOX_HOME, TESTBED
from ..presence import matching
from . import seccomp
from .box import PIPES, Box, ScratchDirectory, Started, find_obstacle

_CONFINE = Path(__file__).with_name("confine.py")
_GITCONFIG = "/etc/gitconfig"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sys")
_ETC = ("alternatives", "bash.bashrc", "debian_version", "group", "hosts", "inputrc", "ld.so.cache",
        "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "passwd",
        "profile", "profile.d", "protocols", "services", "ssl/certs", "ssl/openssl.cnf",
        "timezone")  # fmt: skip
_ETC_OF_NETWORK = ("gai.conf", "resolv.conf")
# Semaphores of Python are files of /dev/shm.
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
_ASK = "see `mirrord doctor` for what this place allows, and what to ask for"


class Guarded(Started):
    """A running sandbox without namespaces: the guard is the parent of its command."""

    depth = 1

    def end(self) -> None:
        self.terminate()  # it kills all others first
        self.wait()


class DirectBox:
    """A box whose command is confined without namespaces. It starts one command."""

    def __init__(self, box: Box, isolation: Isolation) -> None:
        self.isolation, self.environment = isolation, box.environment
        self._box, self._scratch = box, ScratchDirectory()
        self._owner = box.owner or (os.geteuid(), os.getegid())
        scratch = Path(self._scratch.path)
        self._home, self._tmp, self._files = scratch / "home", scratch / "tmp", scratch / "files"
        places = {path: self._files / path.lstrip("/") for path in box.own_files(str)}
        places |= {PROGRAMS: self._files / PROGRAMS.lstrip("/"), TESTBED: box.tree}
        places |= {SANDBOX_HOME: self._home, "/tmp": self._tmp}  # noqa: S108
        if not f"{box.workdir}/".startswith(f"{TESTBED}/"):
            places[box.workdir] = box.tree
        places |= {ENVIRONMENT: box.environment} if box.environment else {}
        places |= {PIPES: box.pipes} if box.pipes else {}
        self._places = {**places, **box.readable, **box.writable}
        for path in (self._home, self._tmp):
            path.mkdir(mode=0o700)
            os.chown(path, *self._owner)
        for inside, content in box.own_files(self.at).items():
            path = self._places[inside]
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o555 if content.startswith(b"#!") else 0o444)

    def at(self, path: str) -> str:
        """Return where a command finds a path of the sandbox: on the host."""
        within = [place for place in self._places if f"{path}/".startswith(f"{place}/")]
        if not within:
            return path
        place = max(within, key=len)
        return f"{self._places[place]}{path[len(place) :]}"

    def text(self, words: str) -> str:
        """Return a text with the paths of the host for those of the sandbox."""
        if not self._box.names_paths:
            return words
        places = "|".join(map(re.escape, sorted(self._places, key=len, reverse=True)))
        names = rf"(?<![\w.-])(?:{places})(?![\w.-])"
        return re.sub(names, lambda match: str(self._places[match[0]]), words)

    def start(
        self, command: Sequence[str], *, before: Sequence[str] = (), **options: Any
    ) -> Started:
        """Start the command in the tree; arguments are those of `Box.start`."""
        order = {
            "parent": os.getpid(),
            "owner": self._box.owner,
            "directory": self.at(self._box.workdir),
            "scratch": [self._scratch.path, self._scratch.lock],
            "paths": self._paths() if self.isolation is Isolation.LANDLOCK else None,
            "variables": self._variables(),
            "command": [*map(self.text, command)],
        }
        # with the caller's uid, the daemon would take what connects to its socket for the caller
        is_own_uid = self._owner[0] != os.geteuid()
        sockets = seccomp.Sockets.ALL if is_own_uid else seccomp.Sockets.NOT_LOCAL
        sockets = sockets if self._box.network else seccomp.Sockets.NONE
        with ExitStack() as stack:
            given = []
            for content in (json.dumps(order).encode(), seccomp.program(sockets)):
                fd = os.memfd_create("mirrord")
                stack.callback(os.close, fd)
                os.write(fd, content)
                os.lseek(fd, 0, os.SEEK_SET)
                given.append(fd)
            argv = [*before, sys.executable, "-I", "-S", "-B", str(_CONFINE), *map(str, given)]
            keep = [*given, self._scratch.lock]  # locked as long as the guard lives
            started = Guarded(argv, pass_fds=keep, env={}, cwd="/", **options)
        self._scratch.leave()
        return started

    def _variables(self) -> dict[str, str]:
        variables = {name: self.text(value) for name, value in self._box.variables.items()}
        environ = replace(self._box, variables=variables).all_variables(self.at)
        own = {
            # a directory of its own: without a mount namespace /tmp is the host's
            "TMPDIR": self.at("/tmp"),  # noqa: S108
            "GIT_CONFIG_SYSTEM": self.at(_GITCONFIG),
        }
        environ = {**own, "MIRRORD_TREE": self.at(TESTBED), **environ}
        if paths := [*self._paths_of_tree()]:
            environ = {"PYTHONPATH": ":".join(paths)} | environ
        return {**environ, "MIRRORD_ISOLATION": self.isolation}

    def _paths_of_tree(self) -> Iterator[str]:
        """Yield what the environment's path files say is in the tree, which is elsewhere here."""
        if self._box.environment is None:
            return
        for file in sorted(matching(self._box.environment, "lib/python3*/site-packages/*.pth")):
            for line in file.read_text(errors="replace").splitlines():
                if f"{line}/".startswith(f"{TESTBED}/"):
                    yield self.at(line)

    def _paths(self) -> dict[str, list[str]]:
        """Return what Landlock lets the command reach."""
        box = self._box
        names = (*_ETC, *(_ETC_OF_NETWORK if box.network else ()))
        shown = [*box.readable.values(), self._files]
        read = [*_SYSTEM, *(f"/etc/{name}" for name in names), *map(str, shown)]
        write = [self._home, self._tmp, box.tree, *box.writable.values()]
        devices = [f"/dev/{name}" for name in _DEVICES]
        if box.environment:
            (read if box.is_environment_shared else write).append(box.environment)  # type: ignore[arg-type]
        return {
            "read": [os.path.realpath(path) for path in read],
            "pipes": [str(box.pipes)] if box.pipes else [],
            "write": [*(os.path.realpath(path) for path in write), *devices],
        }


def isolate(box: Box, demanded: Isolation | None = None) -> Box | DirectBox:
    """Return the box with the isolation that was demanded, else with the best possible one.

    Raises BackendUnavailableError if that is not possible here.
    """
    if box.image:
        if reason := _refusal(demanded or Isolation.NAMESPACES, box.owner, box.mount):
            fact = f"cannot run a command in an image: {reason}"
            raise BackendUnavailableError(fact, hint=_ASK)
        if demanded not in (None, Isolation.NAMESPACES):
            fact = f"cannot isolate a command in an image by {demanded}: it needs namespaces"
            raise BackendUnavailableError(fact, hint="demand `namespaces`, or nothing")
        return box
    if demanded is None:
        demanded = Isolation.NAMESPACES if box.mount is not None else best(box.owner)
    elif reason := _refusal(demanded, box.owner, box.mount):
        fact = f"cannot isolate the command by {demanded}: {reason}"
        raise BackendUnavailableError(fact, hint=_ASK)
    return box if demanded is Isolation.NAMESPACES else DirectBox(box, demanded)


@cache
def best(owner: tuple[int, int] | None) -> Isolation:
    """Return the best isolation that is possible here, for commands of an owner."""
    return next(isolation for isolation in Isolation if _refusal(isolation, owner) is None)


def _refusal(
    isolation: Isolation, owner: tuple[int, int] | None, mount: int | None = None
) -> str | None:
    """Return why an isolation is not possible here, for commands of an owner; None if it is."""
    if mount is not None and isolation is not Isolation.NAMESPACES:
        return "the checkout is a mount of the daemon's, which only namespaces show"
    is_other = owner is not None and owner[0] != os.geteuid()
    if isolation is Isolation.NAMESPACES:
        return find_obstacle(owner) if _may_be_refused() else None
    if is_other and os.geteuid() != 0:
        return f"only root can run a command as uid {owner and owner[0]}"
    if isolation is Isolation.LANDLOCK and not has_landlock():
        return "this kernel, or its container, has no Landlock"
    if isolation is Isolation.UID and not is_other:
        return "the checkout's owner is the user who runs it"
    return None


def _may_be_refused() -> bool:
    """Return whether something here could refuse namespaces, so that they must be tried."""
    # the kernel's version of a filter is 2: engines of containers refuse them by one
    settings = {
        "self/status": "\nSeccomp:\t2\n",
        "sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
        "sys/kernel/unprivileged_userns_clone": "0\n",
        "sys/user/max_user_namespaces": "0\n",
    }
    for name, refusing in settings.items():
        try:
            text = Path("/proc", name).read_text()
        except FileNotFoundError:
            continue
        except OSError:
            return True
        if refusing in text if name == "self/status" else text == refusing:
            return True
    return False


@cache
def has_landlock() -> bool:
    """Return whether the kernel has Landlock, and lets this process use it."""
    from .confine import landlock_abi  # noqa: PLC0415  loads ctypes

    return landlock_abi() > 0
