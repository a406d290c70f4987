"""A real systemd to test units with: booted by systemd-nspawn over this machine's /usr, with a root that is gone afterwards.

Owns what that needs where PID 1 is not systemd: a cgroup of its own, a private mount namespace, and a private /dev, because a
systemd that shares the machine's /dev may replace /dev/null by a file. Everything it made is taken away again, by id and by path.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_CGROUPS = Path("/sys/fs/cgroup")
_MASKED = (
    "systemd-networkd-wait-online.service",
    "systemd-firstboot.service",
    "systemd-networkd.service",
)

_START = r"""
set -e
group=$1 dev=$2
shift 2
for tree in unified systemd; do
    [ -d "/sys/fs/cgroup/$tree" ] || continue
    mkdir -p "/sys/fs/cgroup/$tree/$group"
    echo $$ > "/sys/fs/cgroup/$tree/$group/cgroup.procs"
done
mount -t tmpfs -o mode=755 none "$dev"
cd "$dev"
mknod -m 666 null c 1 3
mknod -m 666 zero c 1 5
mknod -m 666 full c 1 7
mknod -m 666 random c 1 8
mknod -m 666 urandom c 1 9
mknod -m 666 tty c 5 0
mkdir pts shm net
mount --bind /dev/pts pts
ln -s pts/ptmx ptmx
ln -s /proc/self/fd fd
cd /
mount --move "$dev" /dev
mkdir -p /run/systemd
mount -t tmpfs -o mode=755 none /run/systemd
exec systemd-nspawn "$@"
"""


def why_not() -> str:
    """Why no systemd can be booted here; empty where one can."""
    if os.geteuid() != 0:
        return "booting a systemd needs root"
    missing = [
        name
        for name in ("systemd-nspawn", "nsenter", "unshare", "mknod")
        if shutil.which(name) is None
    ]
    return f"not on this machine: {', '.join(missing)}" if missing else ""


class Machine:
    """A booted system, known by the process id of its PID 1."""

    def __init__(self, leader: int, console: Path) -> None:
        self.leader = leader
        self.console = console

    def command(
        self, *command: str, user: str | None = None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command that runs `command` inside."""
        enter = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        clean = [
            "env",
            "-i",
            f"PATH={PATH}",
            *(f"{name}={value}" for name, value in (env or {}).items()),
        ]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        return [*enter, *clean, *become, *command]

    def run(
        self,
        *command: str,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        bound_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root or as `user`."""
        inside = self.command(*command, user=user, env=env)
        done = subprocess.run(
            inside,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=bound_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}\n{self.journal()}"
            )
        return done

    def start(
        self, *command: str, user: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command inside; its end is the caller's business."""
        inside = self.command(*command, user=user, env=env)
        return subprocess.Popen(
            inside,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).stdout.strip()

    def journal(self, *units: str) -> str:
        """What units logged; without any, all of it."""
        chosen = [f"--unit={unit}" for unit in units]
        command = self.command("journalctl", "--no-pager", "--output=cat", *chosen)
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        ).stdout


def wait_until(condition: Callable[[], object], what: str, *, bound_s: float = 60) -> None:
    """Look again and again, because somebody else's process has to get there."""
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {bound_s} s until {what}"
        time.sleep(0.05)


@contextmanager
def booted(
    scratch: Path,
    *,
    binds: Mapping[str, Path],
    writable: Mapping[str, Path],
    usr: Path | None = None,
) -> Iterator[Machine]:
    """Boot; `binds` and `writable` say which directory of this machine is seen at which path inside.

    `usr` is an empty directory for what is written to /usr, which is read-only without it.
    """
    group = f"mirrord-test-{os.getpid()}"
    dev, console = scratch / "dev", scratch / "console"
    dev.mkdir()
    arguments = [
        "--quiet", "--register=no", "--keep-unit", f"--machine={group}", "--private-network", "--link-journal=no",
        "--system-call-filter=open_by_handle_at",
        "--resolv-conf=off", "--timezone=off", "-D", "/", "--volatile=yes", "--console=pipe",
        "--bind-ro=/etc/ssl", "--bind-ro=/etc/nsswitch.conf",
        *(f"--bind-ro={outside}:{inside}" for inside, outside in binds.items()),
        *(f"--bind={outside}:{inside}" for inside, outside in writable.items()),
        *([f"--overlay=/usr:{usr}:/usr"] if usr else []),
        "--boot", *(f"systemd.mask={unit}" for unit in _MASKED), "systemd.unit=multi-user.target",
    ]  # fmt: skip
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        _START,
        "sh",
        group,
        str(dev),
        *arguments,
    ]
    with console.open("wb") as output:
        environment = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
    try:
        yield _wait_for_boot(process, console)
    finally:
        _stop(process)
        _remove_cgroups(group)


def _wait_for_boot(process: subprocess.Popen[bytes], console: Path) -> Machine:
    def has_leader() -> bool:
        assert process.poll() is None, f"nothing was booted:\n{console.read_text(errors='replace')}"
        return _find_leader(process.pid) is not None

    wait_until(has_leader, "nspawn has started its PID 1")
    machine = Machine(_find_leader(process.pid) or 0, console)
    states = ("running", "degraded")
    wait_until(
        lambda: machine.run("systemctl", "is-system-running", check=False).stdout.strip() in states,
        "it is booted",
    )
    return machine


def _find_leader(nspawn: int) -> int | None:
    """The child that is PID 1 of its own world and has become systemd."""
    for child in Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split():
        with suppress(OSError):
            status = Path(f"/proc/{child}/status").read_text()
            ids = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
            if ids[-1] == "1" and len(ids) > 2 and status.startswith("Name:\tsystemd\n"):
                return int(child)
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Power off, as nspawn does on SIGTERM; what has not ended in time is killed with all that is in it."""
    if process.poll() is None:
        leader = _find_leader(process.pid)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            if leader:
                os.kill(leader, signal.SIGKILL)
            process.kill()
            process.wait(15)


def _remove_cgroups(group: str) -> None:
    for tree in ("unified", "systemd"):
        top = _CGROUPS / tree / group
        below = (
            sorted(top.rglob("*"), key=lambda path: len(path.parts), reverse=True)
            if top.is_dir()
            else []
        )
        for path in [*(each for each in below if each.is_dir()), top]:
            with suppress(FileNotFoundError):
                wait_until(lambda path=path: _removed(path), f"{path} is empty", bound_s=10)  # type: ignore[misc]


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
