"""The builder: `python -m mirrord.environments.builder`, with a socket as its standard input.

A process without rights that runs one order of the daemon in a box of bubblewrap: it makes an
environment with uv, or runs a recipe's commands in a checkout that has it. Output goes back as
lines of JSON, the outcome last. It reads no state of mirrord, and ends with all that it started
when the daemon hangs up. Root starts it as the user `mirrord-build`, or as a reserved uid; another
user as itself. A daemon that systemd keeps from making namespaces asks for one at `build.sock`,
which starts `mirrord-build@.service`.
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, MirrordError, ResourceError
from ..host.children import NOTHING, Child, start
from ..host.processes import Owner, is_mapped, may_give_files_away
from ..jsontext import loads
from ..model import Isolation
from ..places import ACTIVATE, ENVIRONMENT, SANDBOX_HOME
from ..sandbox.box import Box
from ..sandbox.direct import best, isolate
from .bounds import BuildBounds

USER = "mirrord-build"
UID = 60815
"""For a host without that user: neither of people nor handed out by systemd (of 60706 to 61183,
says its UIDS-GIDS), but an ordinary one, to which the mount service gives checkouts.
"""
# of a whole build; then it is ended, and fails with that reason
TIMEOUT = timedelta(hours=1)

_UV = "/opt/uv/bin/uv"
_INDEX = "/opt/index"  # where a directory of packages is shown, which may be below the host's /tmp
_PYTHON = f"{ENVIRONMENT}/bin/python"
_PROGRAM, _INPUT = "/run/program.py", "/run/input"
_CACHE = f"{SANDBOX_HOME}/.cache"
_SEEDS = ("pip<25.3", "setuptools<81", "wheel")
"""As old as conda's: later ones lack `setup.py develop` and `pkg_resources`."""
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # instead of those that uv and pip bring
# 8,192 characters can be 98,304 bytes of JSON; asyncio's own limit of a line is 65,536
_LINE, _LINE_LIMIT = 8192, 1 << 20  # of output, and of an answer

Say = Callable[[str], None]


# -- the process -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Order:
    """One build, with paths of the host. `scratch` has `home` and `tmp`.

    With `commands`, they run in `tree` with the finished `environment`. With `program`, which is
    Python, it runs there with a file of `input`. Without both, the
    environment is made, of the host's `interpreter` or of uv's managed Python of that version.
    """

    tree: str
    environment: str
    scratch: str
    uv: str
    cache: str
    python: str
    interpreter: str | None
    index: str
    network: bool
    index_date: str | None = None
    requirements: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    program: str = ""
    input: str = ""


@dataclass(frozen=True)
class _BuildStep:
    """A command of a build; a failure ends the build if it `must_succeed`."""

    title: str
    command: Sequence[str]
    must_succeed: bool = True


def steps_of(order: Order) -> Iterator[_BuildStep]:
    """Iterate over the commands of a build."""
    if order.program:
        # nothing of the tree, of variables or of path files is imported by its start
        yield _BuildStep("running a program", [_PYTHON, "-I", "-S", "-B", _PROGRAM, _INPUT])
        return
    if order.commands:
        for command in order.commands:
            script = f". {ACTIVATE}\n{command}"
            # pipefail: `make | tee log` is a failure where make fails
            yield _BuildStep(f"$ {command}", ["bash", "-o", "pipefail", "-c", script])
        return
    if order.interpreter:
        making = [_UV, "venv", "--no-project", "--allow-existing", "--python", order.interpreter]
        yield _BuildStep(f"making a venv of {order.interpreter}", [*making, ENVIRONMENT])
    else:
        # a managed Python can be moved: it becomes the prefix, which is all that a sandbox needs,
        # and environments share its files
        place = f"{SANDBOX_HOME}/python"
        fetching = [_UV, "python", "install", "--no-bin", "--install-dir", place, order.python]
        yield _BuildStep(f"fetching Python {order.python}", fetching)
        script = (
            f'for each in {place}/*; do [ -L "$each" ] || cp -a "$each/." {ENVIRONMENT} || exit;'
            f" done; rm -rf {place};"
            # uv's Pythons have this file, because of which pip refuses to install (PEP 668)
            f" find {ENVIRONMENT}/lib -name EXTERNALLY-MANAGED -delete;"
            f" [ -e {_PYTHON} ] || ln -s python3 {_PYTHON}"
        )
        yield _BuildStep("moving it to the prefix", ["bash", "-c", script])
    install = [_UV, "pip", "install", "--python", _PYTHON]
    # as with conda, the index date does not apply: environments of many dates share these
    seeding = ["env", "--unset=UV_EXCLUDE_NEWER", *install, *_SEEDS]
    yield _BuildStep("installing pip", seeding, must_succeed=False)
    for title, lines in (("requirements", order.requirements), ("packages", order.packages)):
        if lines:
            listed = "".join(f"{line}\n" for line in lines)
            script = f'printf %s "$1" >/tmp/{title}; shift; exec "$@" -r /tmp/{title}'
            yield _BuildStep(
                f"installing {title}", ["bash", "-c", script, "bash", listed, *install]
            )
    # Checked by the hash of the source, because times are not kept and an agent may edit a package;
    # equal files compile to equal bytes, which environments share. Without pip's own files, which
    # are a quarter of a small environment and which tests do not import.
    script = (
        "import compileall, re, sys; from py_compile import PycInvalidationMode as M;"
        "compileall.compile_dir(sys.argv[1], quiet=2, force=True, rx=re.compile('-packages/pip/'),"
        " invalidation_mode=M.CHECKED_HASH)"
    )
    compiling = [_PYTHON, "-c", script, f"{ENVIRONMENT}/lib"]
    yield _BuildStep("compiling", compiling, must_succeed=False)


def box_of(order: Order) -> Box:
    """Return the box that the commands of a build run in."""
    if order.program:
        files = {_PROGRAM: order.program.encode(), _INPUT: order.input.encode()}
        tree, environment = Path(order.tree), Path(order.environment)
        return Box(
            tree=tree, environment=environment, is_environment_shared=True, files=files,
            names_paths=True,
        )  # fmt: skip
    directory = _directory_of(order.index)
    readable = {_UV: Path(order.uv), **({_INDEX: directory} if directory else {})}
    for path in ("/etc/uv", "/etc/pip.conf"):
        if Path(path).exists():
            readable[path] = Path(path)
    scratch = Path(order.scratch)
    home = {SANDBOX_HOME: scratch / "home", _CACHE: Path(order.cache)}
    writable = {"/tmp": scratch / "tmp", **home}  # noqa: S108
    return Box(
        tree=Path(order.tree),
        environment=Path(order.environment),
        network=order.network,
        variables={**_variables(order, directory), **order.variables},
        readable=readable,
        writable=writable,
        names_paths=True,
    )


def _directory_of(index: str) -> Path | None:
    """Return the directory of an index that is a path or file URL."""
    path = index.removeprefix("file://")
    return Path(path) if path.startswith("/") else None


def _variables(order: Order, directory: Path | None) -> dict[str, str]:
    """Return the variables by which uv and pip find packages."""
    variables = {
        "UV_LINK_MODE": "copy",
        "UV_NO_PROGRESS": "1",
        # no command but `uv python install` fetches a Python
        "UV_PYTHON_DOWNLOADS": "manual",
        # uv's own Pythons are marked as managed from outside (PEP 668)
        "UV_BREAK_SYSTEM_PACKAGES": "1",
        "UV_CACHE_DIR": f"{_CACHE}/uv",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        # what two builds make should be equal bytes, and so one file: the order of a frozenset in
        # bytecode depends on the seed
        "PYTHONHASHSEED": "0",
        # 1980-01-01: a zip, and so a wheel, has no earlier date
        "SOURCE_DATE_EPOCH": "315532800",
    }
    if os.path.exists(_CERTIFICATES):
        variables |= {"SSL_CERT_FILE": _CERTIFICATES, "PIP_CERT": _CERTIFICATES}
    if order.commands:  # importing a module must not change what they install
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
    if not order.network:
        # pip would try five times more, with pauses
        variables |= {"UV_OFFLINE": "1", "PIP_RETRIES": "0"}
    if url := f"file://{_INDEX}" if directory else order.index:
        variables |= {"UV_DEFAULT_INDEX": url, "PIP_INDEX_URL": url}
    if directory:  # it may be a simple index, or a flat directory of archives
        variables |= {"UV_FIND_LINKS": _INDEX, "PIP_FIND_LINKS": _INDEX}
    if order.index_date and directory is None:  # files of a directory have no date
        variables |= {
            "UV_EXCLUDE_NEWER": order.index_date,
            "PIP_UPLOADED_PRIOR_TO": order.index_date,
        }
    return variables


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
        hint='install it beside mirrord: `pip install "mirrord[environments]"`',
    )


async def run_builder(order: Order, service: Path, say: Say) -> str | None:
    """Have an order run; return what failed, such as a command of the recipe.

    Raises ResourceError if the builder itself cannot work, which says nothing about the recipe.
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
    connection, stdin = socket.socketpair()
    with stdin:
        process = start(argv, environment, Path("/"), stdin=stdin.fileno(), stdout=NOTHING)
    async with Child(process) as child:
        errors = asyncio.create_task(_read_tail(child.read_stderr))
        try:
            return await _converse(connection, order, say)
        except ConnectionError:
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
