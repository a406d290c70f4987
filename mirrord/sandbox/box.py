"""Sandboxes for untrusted commands, made by bubblewrap.

`Box` is the only writer of bwrap(1) options; docs/sandboxes.md has the guarantees. Except for its
mounts everything, HOME and /tmp too, is in memory and ends with the sandbox. All its processes end
with bwrap or the thread that started it. Nothing of the starting process is in it but the standard
streams.
"""

import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError
from ..model import Isolation
from ..places import ACTIVATE, ENVIRONMENT, PROGRAMS, SANDBOX_HOME, TESTBED
from ..presence import exists, is_symlink, matching
from ..protocol import Image
from . import seccomp

PIPES = "/run/mirrord"


class Started(subprocess.Popen[bytes]):
    """A running sandbox."""

    depth = 3  # of the command: the guard's first process, bwrap's, the command

    def find_command(self) -> int | None:
        """Find the host's pid of the command; None before it starts and after it ended."""
        pid = self.pid
        try:
            for _ in range(self.depth):
                pid = _children(pid)[0]
        except (OSError, IndexError):
            return None
        return pid

    def find_orphans(self) -> list[int]:
        """Find the host's pids of processes whose parents have ended."""
        pid = self.pid
        try:
            for _ in range(self.depth - 1):
                pid = _children(pid)[0]
            return _children(pid)[1:]  # its first child is the command
        except (OSError, IndexError):
            return []

    def end(self) -> None:
        """Kill all processes of the sandbox, and wait until they have ended."""
        first: int | None = None
        with suppress(OSError, IndexError):
            children = _children(self.pid)
            first = os.pidfd_open(children[0])
            if _children(self.pid) != children:  # the pid may have been reused
                os.close(first)
                first = None
        self.kill()  # --kill-child: the first process of the guard's namespace dies too
        self.wait()
        if first is not None:
            ended = select.poll()
            ended.register(first, select.POLLIN)
            ended.poll()  # the kernel ends it after all others of its namespace
            os.close(first)


# Copied as files: a bind mount costs 0.2 ms, and more on a host with many mounts.
_ETC = ("debian_version", "ld.so.cache", "ld.so.conf", "localtime", "mime.types", "protocols",
        "services", "ssl/openssl.cnf", "timezone")  # fmt: skip
_ETC_OF_NETWORK = ("gai.conf", "hosts", "resolv.conf")
# evaluation scripts source ACTIVATE, then run `conda activate testbed`
_SHIM = """\
conda() {{ :; }}
export -f conda
export VIRTUAL_ENV={0} CONDA_DEFAULT_ENV=testbed
case ":$PATH:" in *:{0}/bin:*) ;; *) export PATH={0}/bin:$PATH ;; esac
"""
_NAME = "testbed"  # of the user, the group and the host


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The mounts, files, variables and user of a sandbox.

    `owner` is a uid with its gid, by default the caller's. The environment is writable unless it is
    shared. `readable` and `writable` map further paths inside to paths of the host. Files of the
    tree that are `frozen` are read-only, and cannot be replaced. The tree is at /testbed, and at
    `workdir`, where commands start, unless that is below /testbed. `files` are made inside, and
    executable if they begin with #!, and in PROGRAMS found by name. All else, such as HOME, /tmp
    and /, is in memory, up to `scratch_bytes`. `pipes` is a directory of pipes, shown at PIPES.
    `mount` is the descriptor of the mount of the tree's parent directory, where this mount
    namespace does not show it.

    Where a box has no namespaces, commands find its paths elsewhere (`direct.py`); those of a box
    with `names_paths`, and its variables, may name them all the same.

    With an `image` the environment is a whole root file system, with the image's variables and
    user; the tree is where the image has its repository, and at `workdir`.
    """

    tree: Path
    environment: Path | None = None
    is_environment_shared: bool = False
    owner: tuple[int, int] | None = None
    network: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    pipes: Path | None = None
    readable: Mapping[str, Path] = field(default_factory=dict)
    writable: Mapping[str, Path] = field(default_factory=dict)
    frozen: Sequence[str] = ()
    workdir: str = TESTBED
    files: Mapping[str, bytes] = field(default_factory=dict)
    scratch_bytes: int = 4 * 1024**3
    mount: int | None = None
    image: Image | None = None
    names_paths: bool = False

    def start(
        self, command: Sequence[str], *, before: Sequence[str] = (), **options: Any
    ) -> Started:
        """Start a command in the sandbox; `options` are Popen's.

        `before` is the start of the command line: a program on the host that executes the
        arguments after its own. Variables are never in arguments, which every user can read, and
        bwrap has none of its own: those of its first process stay in /proc for the agent's uid.
        """
        with ExitStack() as opened:

            def give(content: bytes) -> str:
                """Return a descriptor of a file in memory, for bwrap."""
                descriptor = os.memfd_create("mirrord")
                opened.callback(os.close, descriptor)
                os.write(descriptor, content)
                os.lseek(descriptor, 0, os.SEEK_SET)
                given.append(descriptor)
                return str(descriptor)

            given: list[int] = list(options.pop("pass_fds", ()))
            host = self._root(self.image) if self.image else self._host()
            arguments = [*self._namespaces(), *host, *self._own()]
            # the root of an image is on the disk, where a file would stay
            how = "--ro-bind-data" if self.image else "--file"
            for path, content in self._files():
                mode = "0555" if content.startswith(b"#!") else "0444"
                arguments += "--perms", mode, how, give(content), path
            arguments += "--seccomp", give(seccomp.program()), "--chdir", self.workdir
            packed = give(b"".join(os.fsencode(argument) + b"\0" for argument in arguments))
            shown = showing(self.mount, self.tree.parent)
            given += [] if self.mount is None else [self.mount]
            program = [*become(self.owner), *shown, *_guard(network=self.network), find_bwrap()]
            argv = [*before, *program, "--args", packed, "--", *command]
            return Started(argv, pass_fds=given, env={}, cwd="/", **options)

    @property
    def isolation(self) -> Isolation:
        return Isolation.NAMESPACES

    def at(self, path: str) -> str:
        """Return where a command finds a path of the sandbox."""
        return path

    def _namespaces(self) -> Iterator[str]:
        yield from ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
        yield from ("--unshare-cgroup-try", "--hostname", _NAME, "--cap-drop", "ALL")
        # In a session of its own it cannot forge input of the terminal (TIOCSTI).
        yield from ("--new-session", "--die-with-parent")
        if _can_disable_userns():
            yield "--disable-userns"
        if not self.network and not find_ip():
            yield "--unshare-net"
        if self.image:
            yield from ("--uid", str(self.image.uid), "--gid", str(self.image.gid))

    def _host(self) -> Iterator[str]:
        """The host's programs, read-only, in a root directory in memory."""
        yield from ("--size", str(self.scratch_bytes), "--tmpfs", "/")
        yield from _programs()
        for directory in ("/etc/alternatives", "/etc/ssl/certs"):
            yield from ("--ro-bind-try", directory, directory)
        yield from self._kernel()
        yield from ("--dir", "/run", "--dir", "/var")
        # both in the sandbox, in memory
        yield from ("--symlink", "/tmp", "/var/tmp")  # noqa: S108

    def _root(self, image: Image) -> Iterator[str]:
        """An image's root file system, whose changes a reset discards."""
        assert self.environment
        yield from ("--bind", str(self.environment), "/")
        yield from self._kernel()

    @staticmethod
    def _kernel() -> Iterator[str]:
        # Read-only, because uid 0 may write to /proc/sys without any capability.
        yield from ("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev")
        # By its memory in /proc/1 an agent, of the same uid, would rule bwrap.
        yield from ("--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
        if exists("/proc/keys"):  # names the keys of who starts the sandbox
            yield from ("--ro-bind", "/dev/null", "/proc/keys")

    def _own(self) -> Iterator[str]:
        own = {"/tmp": "1777", **({} if self.image else {SANDBOX_HOME: "0700"})}  # noqa: S108
        for path, mode in own.items():
            yield from ("--perms", mode, "--dir", path)
        for inside, shown in {
            **self.readable,
            **({PIPES: self.pipes} if self.pipes else {}),
        }.items():
            yield from ("--ro-bind", str(shown), inside)
        if self.environment and not self.image:
            how = "--ro-bind" if self.is_environment_shared else "--bind"
            yield from (how, str(self.environment), ENVIRONMENT)
        main = self.image.tree if self.image else TESTBED
        is_within = f"{self.workdir}/".startswith(f"{main}/")
        places = (main,) if is_within else (main, self.workdir)
        for inside, shown in {**dict.fromkeys(places, self.tree), **self.writable}.items():
            yield from ("--bind", str(shown), inside)
        shown_at = (inside for inside, shown in self.writable.items() if shown == self.tree)
        for place in (*places, *shown_at):
            for path in self.frozen:
                yield from ("--ro-bind-try", str(self.tree / path), f"{place}/{path}")
        yield "--clearenv"
        for name, value in self.all_variables(self.at).items():
            yield from ("--setenv", name, value)

    def all_variables(self, at: Callable[[str], str]) -> dict[str, str]:
        """Return the variables of a command that finds the paths of the sandbox by `at`."""
        if self.image:
            return self._image_variables(self.image)
        environment = at(ENVIRONMENT)
        search = f"/usr/local/bin:/usr/bin:/bin:{at(PROGRAMS)}"
        active = {"VIRTUAL_ENV": environment, "CONDA_DEFAULT_ENV": "testbed"}
        return {
            "MIRRORD_ISOLATION": Isolation.NAMESPACES,
            "PATH": f"{environment}/bin:{search}" if self.environment else search,
            "HOME": at(SANDBOX_HOME),
            "USER": _NAME,
            "LOGNAME": _NAME,
            "LANG": "C.UTF-8",
            "MIRRORD_WORKDIR": at(self.workdir),
            **(active if self.environment else {}),
            **self.variables,
        }

    def _image_variables(self, image: Image) -> dict[str, str]:
        """Return the image's variables, with those that docker sets."""
        search = image.variables.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:"
                                     "/sbin:/bin")  # fmt: skip
        return {
            "MIRRORD_ISOLATION": Isolation.NAMESPACES,
            "HOME": image.home,
            "HOSTNAME": _NAME,
            "MIRRORD_WORKDIR": self.workdir,
            **image.variables,
            "PATH": f"{search}:{PROGRAMS}",
            **self.variables,
        }

    def own_files(self, at: Callable[[str], str]) -> dict[str, bytes]:
        """Return the files that are made for the sandbox, the one that activates it too."""
        is_prefix = self.environment and not self.image
        shim = {ACTIVATE: _SHIM.format(at(ENVIRONMENT)).encode()} if is_prefix else {}
        return {**shim, **self.files}

    def _files(self) -> Iterator[tuple[str, bytes]]:
        if self.image:
            yield "/etc/hosts", f"127.0.0.1 localhost {_NAME}\n::1 localhost\n".encode()
            if self.network:
                with suppress(OSError):
                    yield "/etc/resolv.conf", Path("/etc/resolv.conf").read_bytes()
            else:  # refuses at once: an answer from behind the route would be waited for
                yield "/etc/resolv.conf", b"nameserver 127.0.0.1\n"
            yield from self.own_files(self.at).items()
            return
        uid, gid = self.owner or (os.geteuid(), os.getegid())
        yield "/etc/passwd", f"{_NAME}:x:{uid}:{gid}::{SANDBOX_HOME}:/bin/bash\n".encode()
        yield "/etc/group", f"{_NAME}:x:{gid}:\n".encode()
        yield "/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n"
        if self.environment:
            # a login shell resets PATH
            yield "/etc/profile", f". {ACTIVATE}\nPATH=$PATH:{PROGRAMS}\n".encode()
        if not self.network:
            yield "/etc/hosts", f"127.0.0.1 localhost {_NAME}\n::1 localhost\n".encode()
        for name in (*_ETC, *(_ETC_OF_NETWORK if self.network else ())):
            with suppress(OSError):
                yield f"/etc/{name}", Path("/etc", name).read_bytes()
        yield from self.own_files(self.at).items()


def _programs() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    # links where /usr is merged, directories elsewhere
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if is_symlink(path):
            yield from ("--symlink", str(path.readlink()), str(path))
        elif exists(path):
            yield from ("--ro-bind", str(path), str(path))


def become(owner: tuple[int, int] | None) -> Iterator[str]:
    """Start a command line that runs as its owner, in no group, and ends with its parent.

    A chain of programs, each of which executes the next.
    """
    uid, gid = owner or (os.geteuid(), os.getegid())
    is_root = os.geteuid() == 0
    if not is_root and uid != os.geteuid():
        # by newuidmap and newgidmap, with the same numbers inside and outside
        yield from ("unshare", "--user", f"--map-users={uid},{uid},1", f"--setuid={uid}")
        yield from (f"--map-groups={gid},{gid},1", f"--setgid={gid}", "--")
    # before bwrap starts, which so never has privileges
    yield "setpriv"
    if is_root:
        yield from (f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
    yield from ("--pdeathsig=KILL", "--")  # last: a change of uid clears it


def showing(mount: int | None, directory: Path) -> Iterator[str]:
    """Start a command line that sees a mount at a directory; see `attacher.py`."""
    if mount is not None:
        # not by its path, which another owner may not be allowed to read
        script = Path(__file__).with_name("attacher.py").read_text(encoding="utf-8")
        yield from (shutil.which("python3", path=os.defpath) or sys.executable, "-I", "-S", "-c")
        yield from (script, str(mount), str(directory))


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


# An agent may trace bwrap's process, the first of its pid namespace, and clear PR_SET_PDEATHSIG. So
# the sandbox is in one more pid namespace, whose first process it cannot see. That one has a /proc
# of its own, because bwrap reads the /proc of its own processes.
_GUARD = ("unshare", "--user", "--map-current-user", "--pid", "--mount-proc", "--kill-child")
# Without network the guard's namespace has an address and a route, as a container has, and what is
# sent there is lost, so that connecting ends with its time-out. A loopback device does that: Linux
# discards what comes out of it for others. It needs no module, as a dummy or veth does. The
# capabilities for it (`--keep-caps`) end before bwrap starts.
_SWALLOW = (
    '"$0" -batch - <<E || exit\n'
    "link set lo up\naddr add 172.17.0.2/32 dev lo\nroute add default dev lo src 172.17.0.2\nE\n"
    'exec setpriv --inh-caps=-all --ambient-caps=-all -- "$@"'
)


def _guard(*, network: bool) -> tuple[str, ...]:
    if network or not (program := find_ip()):
        return *_GUARD, "--"
    return *_GUARD, "--keep-caps", "--net", "--", "sh", "-c", _SWALLOW, program


@cache
def find_ip() -> str | None:
    """Return the path of ip(8). Without it a sandbox has no route, and connecting fails at once."""
    return shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")


def find_bwrap() -> str:
    """Return the path of bwrap. Raises BackendUnavailableError if it is not installed."""
    if path := shutil.which("bwrap"):
        return path
    hint = "install it: `apt-get install bubblewrap`"
    raise BackendUnavailableError("cannot make a sandbox: bwrap is not installed", hint=hint)


def find_obstacle(owner: tuple[int, int] | None = None) -> str | None:
    """Try to make a sandbox; return the reason why that fails, or None."""
    # Root becomes another user before it starts bwrap, who may have fewer rights.
    owner = owner or ((65534, 65534) if os.geteuid() == 0 else None)
    box = Box(tree=Path("/usr"), owner=owner)
    try:
        started = box.start(
            ["true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except BackendUnavailableError as error:
        return error.message.partition(": ")[2]
    _, stderr = started.communicate()
    return explain(stderr.decode(errors="replace")) if started.returncode else None


def explain(stderr: str) -> str:
    """Explain why a sandbox could not be made."""
    text = stderr.strip().removeprefix("bwrap: ") or "it ended at once"
    # the words of unshare(1) of util-linux, which starts the guard
    if "unshare failed" in text:
        return f"this host does not let users make user namespaces ({text})"
    return text


@cache
def _can_disable_userns() -> bool:
    """Return whether bwrap is version 0.8 or later."""
    version = subprocess.run(
        [find_bwrap(), "--version"], capture_output=True, text=True, check=True
    )
    major, minor = version.stdout.split()[-1].split(".")[:2]
    return (int(major), int(minor)) >= (0, 8)


_PREFIX = "mirrord-sandbox-"
_NEW_S = 60.0  # younger directories may not be locked yet
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScratchDirectory:
    """A temporary directory that other users may enter but not list, locked while in use."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        os.chmod(self.path, 0o711)  # noqa: S103
        self.lock = os.open(self.path, _OPEN)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the directory. Call it once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def leave(self) -> None:
        """Leave the directory, and its lock, to a process that inherited `lock`."""
        os.close(self.lock)


def sweep_scratch(*, dry_run: bool = False) -> list[str]:
    """Remove this user's unlocked scratch directories, for root those of all; return which."""
    swept = []
    for path in matching(Path(tempfile.gettempdir()), f"{_PREFIX}*"):
        with suppress(OSError), _locked(path):
            swept.append(str(path))
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
    return swept


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a directory. Raises OSError if it is another user's, new, or locked."""
    fd = os.open(path, _OPEN)
    try:
        st = os.fstat(fd)
        if os.geteuid() not in (0, st.st_uid) or st.st_mtime > time.time() - _NEW_S:
            raise PermissionError
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
