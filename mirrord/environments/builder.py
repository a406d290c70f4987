"""The builder: `python -m mirrord.environments.builder`, with a socket as its standard input.

Runs one order of the daemon in a box of bubblewrap, as a user that has nothing: makes the
environment with uv, or runs a recipe's commands in a checkout that has it. What the commands print
goes back as lines of JSON, the outcome is the last of them. It reads nothing of mirrord's state,
holds no right, and ends with all that it started when the daemon hangs up. The daemon starts it, or
systemd (`mirrord-build@.service`) where the daemon may not make namespaces.
"""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..bubblewrap import Box
from ..errors import MirrordError
from ..places import ACTIVATE, ENVIRONMENT, SANDBOX_HOME

_UV = "/opt/uv/bin/uv"
_INDEX = "/opt/index"  # the directory of packages: /tmp inside would hide one below /tmp
_PYTHON = f"{ENVIRONMENT}/bin/python"
_CACHE = f"{SANDBOX_HOME}/.cache"
_SEEDS = ("pip<25.3", "setuptools<81", "wheel")
"""Of the age of conda's: later ones lost `setup.py develop` and `pkg_resources`."""
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # the host's: uv and pip bring their own
_LINE = 8192


@dataclass(frozen=True, kw_only=True)
class Order:
    """One build, by the paths of the host. `scratch` has `home` and `tmp`.

    With `commands` they run in `tree` with the finished `environment`; without, that is made: from
    `interpreter` of the host, or else from the managed Python of that version.
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

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True)
class _Step:
    """`must_succeed` ends the build where the command fails."""

    title: str
    command: Sequence[str]
    must_succeed: bool = True


def steps_of(order: Order) -> Iterator[_Step]:
    """The commands of a build, in order."""
    if order.commands:
        for command in order.commands:
            script = f". {ACTIVATE}\n{command}"
            yield _Step(f"$ {command}", ["bash", "-o", "pipefail", "-c", script])
        return
    if order.interpreter:
        making = [_UV, "venv", "--no-project", "--allow-existing", "--python", order.interpreter]
        yield _Step(f"making a venv of {order.interpreter}", [*making, ENVIRONMENT])
    else:
        # A managed Python can be moved: it becomes the prefix itself, so that nothing else has to
        # be shown in a sandbox, and environments share its files.
        place = f"{SANDBOX_HOME}/python"
        fetching = [_UV, "python", "install", "--no-bin", "--install-dir", place, order.python]
        yield _Step(f"fetching Python {order.python}", fetching)
        script = (
            f'for each in {place}/*; do [ -L "$each" ] || cp -a "$each/." {ENVIRONMENT} || exit;'
            f" done; rm -rf {place};"
            f" find {ENVIRONMENT}/lib -name EXTERNALLY-MANAGED -delete;"
            f" [ -e {_PYTHON} ] || ln -s python3 {_PYTHON}"
        )
        yield _Step("moving it to the prefix", ["bash", "-c", script])
    install = [_UV, "pip", "install", "--python", _PYTHON]
    # Not of the instance's date, as conda's are not: environments of many dates share them.
    seeding = ["env", "--unset=UV_EXCLUDE_NEWER", *install, *_SEEDS]
    yield _Step("installing pip", seeding, must_succeed=False)
    for title, lines in (("requirements", order.requirements), ("packages", order.packages)):
        if lines:
            listed = "".join(f"{line}\n" for line in lines)
            script = f'printf %s "$1" >/tmp/{title}; shift; exec "$@" -r /tmp/{title}'
            yield _Step(f"installing {title}", ["bash", "-c", script, "bash", listed, *install])
    # Checked by the hash of the source: times are not kept, and an agent may edit a package.
    # At the same path the bytes are the same, so that environments share them. Not pip's own, which
    # are a quarter of a small environment, and which tests do not import.
    script = (
        "import compileall, re, sys; from py_compile import PycInvalidationMode as M;"
        "compileall.compile_dir(sys.argv[1], quiet=2, force=True, rx=re.compile('-packages/pip/'),"
        " invalidation_mode=M.CHECKED_HASH)"
    )
    compiling = [_PYTHON, "-c", script, f"{ENVIRONMENT}/lib"]
    yield _Step("compiling", compiling, must_succeed=False)


def box_of(order: Order) -> Box:
    """What the commands of a build see."""
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
    )


def _directory_of(index: str) -> Path | None:
    """The directory of packages that an index is, where it is none of the network."""
    path = index.removeprefix("file://")
    return Path(path) if path.startswith("/") else None


def _variables(order: Order, directory: Path | None) -> dict[str, str]:
    """How uv and pip find packages."""
    found = {
        "UV_LINK_MODE": "copy",
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "manual",
        "UV_BREAK_SYSTEM_PACKAGES": "1",
        "UV_CACHE_DIR": f"{_CACHE}/uv",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": "315532800",
    }
    if os.path.exists(_CERTIFICATES):
        found |= {"SSL_CERT_FILE": _CERTIFICATES, "PIP_CERT": _CERTIFICATES}
    if order.commands:  # what they import is no part of what they install
        found["PYTHONDONTWRITEBYTECODE"] = "1"
    if not order.network:
        found |= {"UV_OFFLINE": "1", "PIP_RETRIES": "0"}
    if url := f"file://{_INDEX}" if directory else order.index:
        found |= {"UV_DEFAULT_INDEX": url, "PIP_INDEX_URL": url}
    if directory:  # as a simple index, or as a heap of archives
        found |= {"UV_FIND_LINKS": _INDEX, "PIP_FIND_LINKS": _INDEX}
    if order.index_date and directory is None:  # files of a directory have no date
        found |= {"UV_EXCLUDE_NEWER": order.index_date, "PIP_UPLOADED_PRIOR_TO": order.index_date}
    return found


def run(order: Order, connection: socket.socket) -> dict[str, Any]:
    """Run the steps; the last line of the answer."""

    def say(text: str) -> None:
        connection.sendall(json.dumps({"log": text}).encode() + b"\n")

    box = box_of(order)
    for step in steps_of(order):
        say(f"== {step.title}\n")
        reading, writing = os.pipe()
        with os.fdopen(reading, encoding="utf-8", errors="replace") as output:
            with open(os.devnull, "rb") as nothing:
                child = box.start(
                    step.command, stdin=nothing, stdout=writing, stderr=writing, cwd="/"
                )
            os.close(writing)
            while piece := output.readline(_LINE):
                say(piece)
            status = child.wait()
        if status and step.must_succeed:
            said = f"signal {-status}" if status < 0 else f"status {status}"
            return {"failed": f"{step.title.removeprefix('$ ')}: {said}"}
        if status:
            say(f"status {status}; going on without\n")
    return {"done": True}


def _end_with(connection: socket.socket) -> None:
    """End this process, and by that its box, when the daemon hangs up."""
    with suppress(OSError):
        while connection.recv(1):
            pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Do one order; 1 where the daemon was gone before it."""
    os.nice(10)  # requests come first
    connection = socket.socket(fileno=os.dup(0))
    received = bytearray()
    while not received.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            return 1
        received += piece
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    order = Order(**json.loads(received))
    try:
        last = run(order, connection)
    except (MirrordError, OSError) as error:
        fact = error.message if isinstance(error, MirrordError) else str(error)
        last = {"broken": fact}
    connection.sendall(json.dumps(last).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
