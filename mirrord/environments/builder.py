"""The builder: `python -m mirrord.environments.builder`, with a socket as its standard input.

A process without rights that runs one order of the daemon in a box of bubblewrap: it makes an
environment with uv, or runs a recipe's commands in a checkout that has it. Output goes back as
lines of JSON, the outcome last. It reads no state of mirrord, and ends with all that it started
when the daemon hangs up.
"""

import asyncio
import importlib
import json
import os
import pwd
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, MirrordError, ResourceError
from ..host.children import NOTHING, Child, start
from ..host.processes import Owner, is_mapped, may_give_files_away
from ..jsontext import loads
from ..model import Isolation
from ..places import how_to_get
from ..presence import exists
from ..sandbox.direct import best, isolate
from .bounds import BuildBounds
from .steps import Order, box_of, steps_of

USER = "mirrord-build"
# for a host without that user: neither of people nor handed out by systemd (of 60706 to 61183, says
# its UIDS-GIDS), but an ordinary one, to which the mount service gives checkouts
UID = 60815
# of a whole build; then it is ended, and fails with that reason
TIMEOUT = timedelta(hours=1)

# 8,192 characters can be 98,304 bytes of JSON; asyncio's own limit of a line is 65,536
_LINE, _LINE_LIMIT = 8192, 1 << 20  # of output, and of an answer

Say = Callable[[str], None]


# -- the process -----------------------------------------------------------------------------------


def run(order: Order, connection: socket.socket) -> dict[str, Any]:
    """Run the steps of an order; return the last line of the answer."""

    # the thread that watches the bounds says something, too
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            connection.sendall(json.dumps({"log": text}).encode() + b"\n")

    box = box_of(order)
    isolation = best(box.owner)
    if isolation is not Isolation.NAMESPACES:
        say(f"== without namespaces: isolation {isolation}\n")
    for step in steps_of(order):
        say(f"== {step.title}\n")
        began = time.monotonic()
        reading, writing = os.pipe()
        with os.fdopen(reading, encoding="utf-8", errors="replace") as output:
            with open(os.devnull, "rb") as nothing:
                streams: dict[str, Any] = {"stdin": nothing, "stdout": writing, "stderr": writing}
                child = isolate(box).start(step.command, **streams)
            os.close(writing)
            with BuildBounds(child, (order.environment, order.scratch), say) as bounds:
                while piece := output.readline(_LINE):
                    say(piece)
                status = child.wait()
        # what a program prints is its answer, read to the end
        if not order.program:
            say(f"took {time.monotonic() - began:.1f} s\n")
        if bounds.reason:
            return {"failed": f"{step.title.removeprefix('$ ')}: {bounds.reason}"}
        if status and step.must_succeed:
            said = f"signal {-status}" if status < 0 else f"status {status}"
            return {"failed": f"{step.title.removeprefix('$ ')}: {said}"}
        if status:
            say(f"status {status}; continuing without\n")
    return {"done": True}


def _end_with(connection: socket.socket) -> None:
    """End this process, and with it its box, when the daemon hangs up."""
    with suppress(OSError):
        while connection.recv(1):
            pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run one order; return 1 if the daemon was gone before it."""
    os.nice(10)  # requests come first
    connection = socket.socket(fileno=os.dup(0))
    received = bytearray()
    while not received.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            return 1
        received += piece
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    order = Order(**loads(bytes(received)))
    try:
        last = run(order, connection)
    except (MirrordError, OSError) as error:
        fact = error.message if isinstance(error, MirrordError) else str(error)
        last = {"broken": fact}
    connection.sendall(json.dumps(last).encode() + b"\n")
    return 0


# -- the daemon's side -----------------------------------------------------------------------------


def build_owner() -> Owner:
    """Return the uid and gid of builds."""
    owner = UID, UID
    with suppress(KeyError):
        account = pwd.getpwnam(USER)
        owner = account.pw_uid, account.pw_gid
    return owner if may_give_files_away() and is_mapped(owner) else (os.geteuid(), os.getegid())


def find_uv() -> str:
    """Return the path of uv, which the extra `environments` installs. Raises ResourceError."""
    with suppress(ImportError, FileNotFoundError):
        return str(importlib.import_module("uv").find_uv_bin())
    raise ResourceError(
        "cannot build environments: uv is not installed",
        hint=how_to_get("environments"),
    )


async def run_builder(order: Order, service: Path, say: Say) -> str | None:
    """Have an order run; return what failed, such as a command of the recipe.

    Raises ResourceError if the builder itself cannot work, which says nothing about the recipe.
    """
    try:
        async with asyncio.timeout(TIMEOUT.total_seconds()):
            # a daemon that systemd keeps from making namespaces asks for a builder at `build.sock`
            if exists(service):
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
    connection, stdin = socket.socketpair()
    with stdin:
        process = start(argv, environment, Path("/"), stdin=stdin.fileno(), stdout=NOTHING)
    async with Child(process) as child:
        errors = asyncio.create_task(_read_tail(child.read_stderr))
        try:
            return await _converse(connection, order, say)
        except ConnectionError:
            # a process that outlived the builder may hold its stderr open
            with suppress(TimeoutError):
                text = await asyncio.wait_for(errors, 1)
                raise _ended(text.decode(errors="replace").strip()[-500:]) from None
            raise _ended("") from None
        finally:
            errors.cancel()


async def _read_tail(read: Callable[[], Awaitable[bytes]]) -> bytes:
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
    """Send the order and pass on its output; return the last line. Raises ConnectionError."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=_LINE_LIMIT)
    try:
        writer.write(json.dumps(asdict(order)).encode() + b"\n")
        while line := await reader.readline():
            answer: dict[str, Any] = loads(line)
            if "log" not in answer:
                return answer
            say(str(answer["log"]))
        raise ConnectionResetError
    finally:
        writer.close()


def _ended(detail: str) -> ResourceError:
    return ResourceError(
        f"cannot build: the builder ended before it had finished{': ' if detail else ''}{detail}",
        hint="possibly out of memory; try again",
    )


if __name__ == "__main__":
    sys.exit(main())
