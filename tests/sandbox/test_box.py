"""The inside of a sandbox: real bwrap, started by root for another uid, by a user, for a subordinate uid."""

from __future__ import annotations

import json
import os
import re
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
from procsearch import command as search
from sandbox_here import needs_sandbox
from waiting import until

from mirrord.places import ACTIVATE, ENVIRONMENT, TESTBED
from mirrord.sandbox import seccomp
from mirrord.sandbox.box import Box

pytestmark = [
    pytest.mark.root,
    needs_sandbox,
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
import ctypes, fcntl, json, os, resource, socket, sys, termios
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
attempt("init", lambda: must(len(os.listdir("/proc/1")) - 1))
attempt("init's memory", lambda: open("/proc/1/mem", "rb"))
attempt("trace of init", lambda: must(libc.ptrace(16, 1, 0, 0)))
attempt("seizure of init", lambda: must(libc.ptrace(0x4206, 1, 0, 0)))
attempt("limits of init", lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)))
byte = (ctypes.c_char * 8)()
vector = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 8)
for call in (libc.process_vm_readv, libc.process_vm_writev):
    attempt(call.__name__, lambda: must(call(1, vector, 1, vector, 1, 0)))
attempt("keys", lambda: must(len(open("/proc/keys").read()) - 1))
attempt("another's root", lambda: os.listdir(f"/proc/{outside}/root"))
attempt("socket", lambda: connect(socket.AF_UNIX, server))
attempt("abstract socket", lambda: connect(socket.AF_UNIX, "\\0mirrord-test-box-" + outside))
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
def connecting():
    with socket.socket() as s:  # nobody answers, as behind a firewall
        s.setblocking(False)
        return os.strerror(s.connect_ex(("10.255.255.1", 80)))
status = [l.split()[1] for l in open("/proc/self/status") if l.startswith(("Cap", "NoNewPrivs"))]
json.dump({
    "found": {name: what for name, what in found.items() if what}, "status": status,
    "ids": [os.getuid(), os.getgid()], "cwd": os.getcwd(), "pids": sorted(filter(str.isdigit, os.listdir("/proc")))[:2],
    "interfaces": [name for _, name in socket.if_nameindex()], "connecting": connecting(),
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
    abstract.bind(f"\0mirrord-test-box-{os.getpid()}")
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
    assert found["connecting"] == "Operation now in progress"


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


# -- the starting process and the kernel -----------------------------------------------------------


@pytest.mark.parametrize(("uid", "owner"), CASES)
def test_nothing_of_who_starts_a_sandbox_is_readable_in_it(
    uid: int, owner: tuple[int, int] | None, tree: Path, subids: None
) -> None:
    """Environment, arguments, directory, and a descriptor that children inherit."""
    words = [f"canary-{part}-{os.getpid()}" for part in ("variable", "argument", "place", "file")]
    variable, argument, place, file = words
    directory = tree.with_name(f"{tree.name}-{place}")
    directory.mkdir(mode=0o755)
    held = directory / file
    held.write_text(file)
    descriptor = os.open(held, os.O_RDONLY)
    arguments = json.dumps([str(tree), owner, search(*words), {}])
    try:
        done = subprocess.run(
            [*python(), "-c", START.replace("import json", f"import os; os.set_inheritable({descriptor}, True); import json"), arguments, argument],
            user=uid, group=uid, extra_groups=[], cwd=directory, pass_fds=[descriptor],
            env={"KEY": variable}, stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
    finally:
        os.close(descriptor)
        subprocess.run(["rm", "-r", directory], check=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition(b"\n")[2])
    assert found["where"] == {}
    assert found["read"] > 300


# Numbers of x86_64 and aarch64, for calls that have no function in every C library.
CALLS = """
import ctypes, errno, json, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
column = ["x86_64", "aarch64"].index(platform.machine())
print(json.dumps({name: errno.errorcode.get(libc.syscall(numbers[column], *arguments) < 0 and ctypes.get_errno(), "done")
    for name, (numbers, arguments) in json.loads(sys.argv[1]).items()}))
"""
REFUSED = {
    "io_uring_setup": ((425, 425), (1, 0)), "add_key": ((248, 217), (0, 0, 0, 0, 0)),
    "request_key": ((249, 218), (0, 0, 0, 0)), "keyctl": ((250, 219), (0, -3, 0)),
    "bpf": ((321, 280), (0, 0, 0)), "userfaultfd": ((323, 282), (1,)),
    "perf_event_open": ((298, 241), (0, 0, -1, -1, 0)), "unshare": ((272, 97), (0x10000000,)),
    "clone of a user namespace": ((56, 220), (0x10000011, 0, 0, 0, 0)),
    "setns": ((308, 268), (0, 0)), "mount": ((165, 40), (0, 0, 0, 0, 0)), "fsopen": ((430, 430), (0, 0)),
    "open_tree": ((428, 428), (0, 0, 0)), "open_by_handle_at": ((304, 265), (0, 0, 0)),
    "pivot_root": ((155, 41), (0, 0)), "chroot": ((161, 51), (0,)), "kcmp": ((312, 272), (1, 1, 0, 0, 0)),
    "pidfd_getfd": ((438, 438), (0, 0, 0)), "process_madvise": ((440, 440), (0, 0, 0, 0, 0)),
    "quotactl": ((179, 60), (0, 0, 0, 0)), "syslog": ((103, 116), (3, 0, 0)), "swapon": ((167, 224), (0, 0)),
    "kexec_load": ((246, 104), (0, 0, 0, 0)), "init_module": ((175, 105), (0, 0, 0)),
    "fanotify_init": ((300, 262), (0, 0)), "mbind": ((237, 235), (0, 0, 0, 0, 0, 0)),
    "socket AF_ALG": ((41, 198), (38, 5, 0)), "socket AF_VSOCK": ((41, 198), (40, 1, 0)),
    "personality": ((135, 92), (0x40000,)),
}  # fmt: skip
ALLOWED = {
    "getpid": ((39, 172), ()), "socket AF_INET": ((41, 198), (2, 1, 0)), "personality": ((135, 92), (0xFFFFFFFF,)),
    "clone": ((56, 220), (17, 0, 0, 0, 0)),
}  # fmt: skip


def test_the_kernels_calls_are_limited_as_dockers_are(tree: Path) -> None:
    """clone3 is absent, so that programs fall back to clone; so is what the table does not know."""
    absent = {
        "clone3": ((435, 435), (0, 0)),
        "of tomorrow": ((900, 900), ()),
        "x32": ((0x40000027,) * 2, ()),
    }
    box = Box(tree=tree, owner=(AGENT, AGENT))
    command = [
        PYTHON,
        "-c",
        CALLS,
        json.dumps({**REFUSED, **absent, **{f"allowed {n}": c for n, c in ALLOWED.items()}}),
    ]
    with box.start(command, stdout=subprocess.PIPE) as started:
        answers = json.loads(started.communicate(timeout=60)[0].splitlines()[-1])
    assert answers == {
        **dict.fromkeys(REFUSED, "EPERM"), **dict.fromkeys(absent, "ENOSYS"),
        **{f"allowed {name}": "done" for name in ALLOWED},
    }  # fmt: skip


HEADERS = ["x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h"]  # the latter of aarch64


@pytest.mark.parametrize("column", [0, 1])
def test_the_numbers_of_calls_are_the_kernels(column: int) -> None:
    """Of each name that the host's headers have."""
    header = Path("/usr/include", HEADERS[column])
    if not header.exists():
        pytest.skip("no headers of the kernel")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text()))
    words = [word.split("=") for word in [*seccomp.CHECKS, *seccomp.ALLOWED.split()]]
    ours = {name: columns.split("/")[column % len(columns.split("/"))] for name, columns in words}
    assert {n: (ours[n], numbers[n]) for n in ours if numbers.get(n, ours[n]) != ours[n]} == {}
    assert len(ours.keys() & numbers) > 240


def test_a_machine_without_a_filter_gets_no_sandbox() -> None:
    script = (
        "import os; from mirrord.sandbox import seccomp; from mirrord.sandbox.box import find_obstacle;"
        "seccomp.machine = lambda: 'riscv64'; print(find_obstacle())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "there is no system call filter for riscv64\n"


def test_what_developers_run_works_in_a_sandbox(tree: Path) -> None:
    """Threads, children, a tracer of its own children, pipes, and ps without pid 1."""
    script = (
        "set -e; git init -q r; git -C r -c user.name=a -c user.email=a@b commit -q --allow-empty -m x;"
        f" {PYTHON} -c 'import concurrent.futures as f; print(sum(f.ThreadPoolExecutor(8).map(int, range(9))))';"
        f" {PYTHON} -c 'import multiprocessing as m; print(m.Pool(2).map(abs, [-1]))';"
        " if command -v node >/dev/null; then node -e 'fetch; require(\"worker_threads\"); console.log(1)' >/dev/null; fi;"
        " if command -v strace >/dev/null; then strace -f -o /tmp/t true; fi;"
        " if command -v ps >/dev/null; then ps -e >/dev/null; fi; echo done"
    )
    with Box(tree=tree, owner=(AGENT, AGENT)).start(
        ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        out, err = started.communicate(timeout=60)
    assert (out, err) == (b"36\n[1]\ndone\n", b"")


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
