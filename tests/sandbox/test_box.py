"""The inside of a sandbox: real bwrap, started by root for another uid, by a user, for a subordinate uid."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import accounts
from anyone import BARE_PYTHON, python
from waiting import until

from mirrord.places import ACTIVATE, ENVIRONMENT, TESTBED
from mirrord.sandbox.box import Box, find_obstacle

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(find_obstacle()), reason=f"no sandbox here: {find_obstacle()}"),
]

AGENT, MEMBER, SUBUID, SUBGID = 34521, 34522, 220003, 420003
PYTHON = "/usr/bin/python3"

# Started by another uid: what a harness does.
START = """
import json, sys
from pathlib import Path
from mirrord.sandbox.box import Box
tree, owner, command, options = json.loads(sys.argv[1])
with Box(tree=Path(tree), owner=owner and tuple(owner), **options).start(command) as started:
    print(started.pid, flush=True)
    sys.exit(started.wait())
"""

ESCAPES = """
import ctypes, fcntl, json, os, socket, sys, termios
libc = ctypes.CDLL(None, use_errno=True)
found = {}
def attempt(name, call):
    try:
        found[name] = repr(call())
    except OSError as error:
        found[name] = None
def must(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
secret, server, outside = sys.argv[1:]
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(address)
attempt("secret", lambda: open(secret).read())
attempt("secret by init", lambda: open(f"/proc/1/root{secret}").read())
attempt("another's root", lambda: os.listdir(f"/proc/{outside}/root"))
attempt("socket", lambda: connect(socket.AF_UNIX, server))
attempt("abstract socket", lambda: connect(socket.AF_UNIX, "\\0mirrord-test-box"))
attempt("shadow", lambda: open("/etc/shadow").read())
attempt("host's user", lambda: must(open("/etc/passwd").read().count("daemon") - 1))
attempt("usr", lambda: open("/usr/x", "w"))
attempt("bin", lambda: open("/bin/x", "w"))
attempt("kernel", lambda: open("/proc/sys/kernel/core_pattern", "w"))
attempt("user namespace", lambda: must(libc.unshare(0x10000000)))
attempt("mount namespace", lambda: must(libc.unshare(0x20000)))
attempt("mount", lambda: must(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)))
attempt("ptrace", lambda: must(libc.ptrace(16, int(outside), 0, 0)))
attempt("kill", lambda: os.kill(int(outside), 0))
attempt("terminal", lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x"))
attempt("device", lambda: os.mknod("/tmp/d", 0o020666, os.makedev(1, 1)))
attempt("uid", lambda: os.setuid(12345))
status = [l.split()[1] for l in open("/proc/self/status") if l.startswith(("Cap", "NoNewPrivs"))]
json.dump({
    "found": {name: what for name, what in found.items() if what}, "status": status,
    "ids": [os.getuid(), os.getgid()], "cwd": os.getcwd(), "pids": sorted(filter(str.isdigit, os.listdir("/proc")))[:2],
    "interfaces": [name for _, name in socket.if_nameindex()],
}, sys.stdout)
"""


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tree that any uid may enter."""
    with subprocess.Popen(["mktemp", "--directory"], stdout=subprocess.PIPE, text=True) as made:
        path = Path(made.communicate()[0].strip())
    path.chmod(0o777)
    yield path
    subprocess.run(["rm", "-r", path], check=True)


@pytest.fixture
def subids() -> Iterator[None]:
    with accounts(
        passwd=f"mirrord-box:x:{MEMBER}:{MEMBER}::/:/bin/sh",
        subuid=f"{MEMBER}:220000:10",
        subgid=f"{MEMBER}:420000:10",
    ):
        yield


def start(
    uid: int, tree: Path, owner: tuple[int, int] | None, *command: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a sandbox as `uid`; its first line of output is its pid."""
    arguments = json.dumps([str(tree), owner, command, options])
    return subprocess.Popen(
        [*python(), "-c", START, arguments], user=uid, group=uid, extra_groups=[], cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


CASES = [(0, (AGENT, AGENT)), (MEMBER, None), (MEMBER, (SUBUID, SUBGID)), (0, None)]


@pytest.mark.parametrize(("uid", "owner"), CASES)
def test_nothing_leads_out_of_a_sandbox(
    uid: int, owner: tuple[int, int] | None, tree: Path, subids: None
) -> None:
    """Uid 0 too can neither read the host nor change its kernel, though it owns /proc/sys."""
    secret = tree.with_name(f"{tree.name}.secret")
    secret.write_text("gold")
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{secret}.socket")
    server.listen()
    os.chmod(f"{secret}.socket", 0o777)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0mirrord-test-box")
    abstract.listen()
    try:
        script = [PYTHON, "-c", ESCAPES, str(secret), f"{secret}.socket", str(os.getpid())]
        with start(uid, tree, owner, *script) as started:
            out, err = started.communicate(timeout=60)
        assert started.returncode == 0, err
        found = json.loads(out.partition(b"\n")[2])
    finally:
        for each in (secret, Path(f"{secret}.socket")):
            each.unlink()
        server.close()
        abstract.close()
    assert found["found"] == {}
    assert found["status"] == ["0" * 16] * 5 + ["1"]
    assert found["ids"] == list(owner or (uid, uid))
    assert (found["cwd"], found["pids"], found["interfaces"]) == (TESTBED, ["1", "2"], ["lo"])


@pytest.mark.parametrize(("uid", "owner"), CASES[:3])
def test_a_sandbox_ends_with_the_process_that_started_it(
    uid: int, owner: tuple[int, int] | None, tree: Path, subids: None
) -> None:
    """With processes in other sessions, and after a SIGKILL."""
    marker = f"5{os.getpid()}"
    script = f"setsid sleep {marker} & sleep {marker}"
    with start(uid, tree, owner, "bash", "-c", script) as started:
        assert started.stdout is not None
        int(started.stdout.readline())
        until(lambda: len(sleeping(marker)) == 2)
        started.send_signal(signal.SIGKILL)
    until(lambda: not sleeping(marker))


def sleeping(marker: str) -> list[Path]:
    wanted = b"sleep\0" + marker.encode() + b"\0"
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path] if path.read_bytes() == wanted else []
        except OSError:
            continue
    return found


def test_an_environment_is_active_at_its_fixed_path(tree: Path) -> None:
    """For a command, for a login shell, and for a script that activates it by conda's name."""
    environment = tree / "environment"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", environment], check=True)
    (tree / "run.sh").write_text(
        f"PATH=/bin\nsource {ACTIVATE}\nconda activate testbed\npython -c 'import sys; print(sys.prefix)'\n"
    )
    box = Box(
        tree=tree,
        environment=environment,
        owner=(AGENT, AGENT),
        variables={"TOKEN": "se cret"},
        readable={"/opt/tools": tree},
    )
    script = (
        "python -c 'import sys; print(sys.prefix)'; bash -lc 'command -v python'; bash run.sh;"
        ' echo "$TOKEN"; ls /opt/tools/run.sh; touch /opt/tools/x'
    )
    with box.start(
        ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        assert b"se cret" not in Path(f"/proc/{started.pid}/cmdline").read_bytes()
        out, err = started.communicate(timeout=60)
    assert out.decode().split("\n") == [
        ENVIRONMENT, f"{ENVIRONMENT}/bin/python", ENVIRONMENT, "se cret", "/opt/tools/run.sh", ""
    ]  # fmt: skip
    assert b"Read-only file system" in err


def test_a_host_without_user_namespaces_is_explained() -> None:
    """Root tries it as another user, who may have fewer rights."""
    script = "import os; os.geteuid = lambda: 1; from mirrord.sandbox.box import *"
    command = f"{sys.executable} -c '{script}; print(find_obstacle())'"
    forbid = f"echo 0 > /proc/sys/user/max_user_namespaces && exec {command}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "namespace" in done.stdout, done.stdout + done.stderr


def test_without_bwrap_the_package_is_named() -> None:
    script = "from mirrord.sandbox.box import find_obstacle; print(find_obstacle())"
    done = subprocess.run(
        [BARE_PYTHON, "-c", script], env={"PATH": "/nowhere", "PYTHONPATH": os.fspath(Path(__file__).parents[2])},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "bwrap is not installed\n"
