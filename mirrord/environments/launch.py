"""Start the builder, feed its answer to a log, and end it when the caller leaves.

Root starts it as the user `mirrord-build`, or as a uid of nobody's; another user as itself. A
daemon that systemd keeps from making namespaces asks for one at `build.sock`, a unit of its own.
"""

import asyncio
import importlib
import json
import os
import pwd
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, ResourceError
from ..git.process import NOTHING, Child, start
from ..host.processes import Owner, may_give_files_away
from .builder import Order

USER = "mirrord-build"
UID = 60815
"""Between the uids of people and those that systemd hands out by itself (60706 to 61183 are of
nobody, says systemd's UIDS-GIDS); an ordinary one, to which the mount service gives checkouts.
"""
TIMEOUT = timedelta(hours=1)
_LINE_LIMIT = 1 << 20

Say = Callable[[str], None]


def build_owner() -> Owner:
    """The uid and gid of builds."""
    if not may_give_files_away():
        return os.geteuid(), os.getegid()
    with suppress(KeyError):
        found = pwd.getpwnam(USER)
        return found.pw_uid, found.pw_gid
    return UID, UID


def find_uv() -> str:
    """The path of uv, which the extra `environments` installs."""
    with suppress(ImportError, FileNotFoundError):
        return str(importlib.import_module("uv").find_uv_bin())
    raise ResourceError(
        "cannot build environments: uv is not installed",
        hint='install it beside mirrord: `pip install "mirrord[environments]"`',
    )


async def run_builder(order: Order, service: Path, say: Say) -> str | None:
    """Run an order to its end; answers what failed of it, such as a command of the recipe's.

    Raises ResourceError where the builder itself cannot work, which says nothing of the recipe.
    """
    try:
        async with asyncio.timeout(TIMEOUT.total_seconds()):
            if service.exists():
                last = await _ask_service(order, service, say)
            else:
                last = await _run_child(order, say)
    except TimeoutError:
        return f"it took longer than {TIMEOUT}"
    if broken := last.get("broken"):
        raise ResourceError(f"cannot build: {broken}", hint="see `mirrord doctor`")
    return last.get("failed")


async def _run_child(order: Order, say: Say) -> dict[str, Any]:
    uid, gid = build_owner()
    argv = [sys.executable, "-P", "-m", "mirrord.environments.builder"]
    if uid != os.geteuid():
        argv = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--", *argv]
    path = os.pathsep.join(filter(os.path.isabs, sys.path))
    environment = {"PATH": os.defpath, "PYTHONPATH": path, "LANG": "C.UTF-8"}
    ours, theirs = socket.socketpair()
    with theirs:
        process = start(argv, environment, Path("/"), stdin=theirs.fileno(), stdout=NOTHING)
    async with Child(process) as child:
        complaints = asyncio.create_task(_read_all(child.read_stderr))
        try:
            return await _converse(ours, order, say)
        except ConnectionError:
            with suppress(TimeoutError):
                said = await asyncio.wait_for(complaints, 1)
                raise _ended(said.decode(errors="replace").strip()[-500:]) from None
            raise _ended("") from None
        finally:
            complaints.cancel()


async def _read_all(read: Callable[[], Awaitable[bytes]]) -> bytes:
    received = b""
    while piece := await read():
        received = (received + piece)[-4096:]
    return received


async def _ask_service(order: Order, service: Path, say: Say) -> dict[str, Any]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, str(service))
    except OSError as error:
        connection.close()
        raise BackendUnavailableError(
            f"cannot ask the build service at {service}: {error.strerror}",
            hint="see mirrord-build.socket; it answers only to the daemon's user",
        ) from error
    try:
        return await _converse(connection, order, say)
    except ConnectionError:
        raise _ended("see the log of mirrord-build@.service") from None


async def _converse(connection: socket.socket, order: Order, say: Say) -> dict[str, Any]:
    """Send the order, pass on what is said; the last line. ConnectionError where none comes."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=_LINE_LIMIT)
    try:
        writer.write(order.line())
        while line := await reader.readline():
            answer: dict[str, Any] = json.loads(line)
            if "log" not in answer:
                return answer
            say(str(answer["log"]))
        raise ConnectionResetError
    finally:
        writer.close()


def _ended(said: str) -> ResourceError:
    return ResourceError(
        f"cannot build: the builder ended before it had finished{': ' if said else ''}{said}",
        hint="possibly out of memory; try again",
    )
