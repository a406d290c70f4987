"""The home of an ordinary user's daemon: a user and a mount namespace of its own.

In it the daemon may mount overlays, which only processes in it see. The holder (`holder.py`) keeps
it over restarts of the daemon. The user's ids are mapped to themselves, and so are those that
/etc/subuid and /etc/subgid give to it, by newuidmap(1).
"""

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ...errors import BackendUnavailableError, NotFoundError
from ..files import opened
from .holder import END, SOCKET

_HINT = "see docs/where.md, or set `[service] namespace` to never; the pool backend serves"
_libc = ctypes.CDLL(None, use_errno=True)
# why this process has no home, if it wanted one
refusals: list[str] = []
_holders: list[int] = []  # the pidfd of the holder whose home this process has entered


SEEN_BY = (
    "this daemon mounts in a namespace of its own: use `mirrord exec`, in Python sandbox=True, or"
    " `mirrord enter` before the whole harness"
)
"""The hint for a client that does not see the mounts of a home."""


def is_inside() -> bool:
    """Return whether this process has entered a home."""
    return bool(_holders)


def enter(state_dir: Path) -> None:
    """Join the home of a state directory, made if it does not exist.

    Call it before this process starts a thread. Raises BackendUnavailableError if the host does not
    allow it.
    """
    overflow = _overflow_ids()
    if os.geteuid() in overflow or os.getegid() in overflow:
        # Every user without a mapping is shown as this one, and so would be an administrator.
        raise BackendUnavailableError(
            f"cannot make a user namespace for uid {os.geteuid()}: others are shown as that uid",
            hint="run the daemon as a user of its own",
        )
    try:
        with opened(os.open(state_dir / "holder.lock", os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            # two starts at once would make a holder each, and the later one would take the socket
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (process := find(state_dir)) is None:
                _start(state_dir)
                process = find(state_dir)
    except OSError as error:
        fact = f"cannot make a user namespace: {error.strerror or error}"
        raise BackendUnavailableError(fact, hint=_HINT) from error
    if process is None:
        raise BackendUnavailableError("cannot make a user namespace: its holder ended", hint=_HINT)
    _holders.append(process)
    try:
        _join(process)
    except BaseException:
        os.close(_holders.pop())
        raise


def holder() -> int | None:
    """Return the pidfd of the holder whose home this process has entered; it ends with it."""
    return _holders[-1] if _holders else None


def replace_holder(state_dir: Path) -> None:
    """Have a new holder keep the namespaces of this process, whose holder has ended.

    One that was made meanwhile, with a home of its own, ends, because its socket is replaced.
    Raises BackendUnavailableError, OSError.
    """
    _start(state_dir, "inherit")
    if (process := find(state_dir)) is None:
        raise BackendUnavailableError("cannot replace the holder: the new one ended", hint=_HINT)
    old, _holders[-1] = _holders[-1], process
    with suppress(ChildProcessError):  # it may have been an earlier daemon's
        os.waitid(os.P_PIDFD, old, os.WEXITED | os.WNOHANG)
    os.close(old)


def enter_existing(state_dir: Path) -> None:
    """Join the home of a running daemon. Raises NotFoundError."""
    try:
        process = find(state_dir)
    except OSError as error:
        raise NotFoundError(
            f"cannot enter the home of {state_dir}: {error.strerror}",
            hint="run it as the daemon's user",
        ) from error
    if process is None:
        raise NotFoundError(
            f"cannot enter the home of {state_dir}: it has none",
            hint="`mirrord serve` of an ordinary user makes one; `mirrord doctor` says whether it"
            " can. Other daemons need none: their paths are visible to all",
        )
    with opened(process):
        _join(process)


def find(state_dir: Path) -> int | None:
    """Return a pidfd of the holder; None if there is none."""
    with _connected(state_dir) as connection:
        if connection is None:
            return None
        # the holder's credentials, as it began to listen
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = struct.unpack("iII", raw)[0]
        process = os.pidfd_open(pid)
        try:
            connection.send(b"?")  # it lives: the number is still its own
        except OSError:
            os.close(process)
            return None
        return process


def end(state_dir: Path) -> None:
    """Tell the holder to end, and so the mounts that no other process has."""
    with suppress(OSError), _connected(state_dir) as connection:
        if connection is not None:
            connection.send(END)
            connection.recv(1)  # until it closed the connection


_TIMEOUT_S = 10.0


# lower case as `opened`: used as a function
class _connected:  # noqa: N801
    """A connection to the holder; None if there is none."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    def __enter__(self) -> socket.socket | None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # the kernel connects to a holder that was stopped (SIGSTOP), which then never answers
        self._socket.settimeout(_TIMEOUT_S)
        try:
            # by a descriptor: an address has at most 107 bytes of path
            with opened(os.open(self._state_dir, os.O_PATH | os.O_DIRECTORY)) as directory:
                self._socket.connect(f"/proc/self/fd/{directory}/{SOCKET}")
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.close()


_HOLDER = Path(__file__).with_name("holder.py")


def _start(state_dir: Path, *inherit: str) -> None:
    """Start a holder, and map the ids of its user namespace unless it inherits ours."""
    command = [sys.executable, "-I", "-S", str(_HOLDER), str(state_dir), *inherit]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", env={}, text=True
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with process.stdin, process.stdout, process.stderr:
        if not inherit and process.stdout.readline():
            _map_ids(process.pid)
            process.stdin.write("\n")
            process.stdin.flush()
        if process.stdout.readline():
            process.returncode = 0  # it outlives us: nobody waits for it
            return
        reason = process.stderr.read().strip() or "its holder ended"
    process.wait()
    raise BackendUnavailableError(f"cannot make a home: {reason}", hint=_HINT)


def _map_ids(pid: int) -> None:
    """Map the ids of this user, and its subordinate ones if newuidmap and newgidmap allow that."""
    # never to root, after which setgroups(2) and newuidmap fail
    uid, gid = os.geteuid(), os.getegid()
    with suppress(OSError, subprocess.CalledProcessError):
        users, groups = _subordinate_ids()
        if users and groups:
            for program, own, ranges in (
                ("newgidmap", gid, groups),
                ("newuidmap", uid, users),
            ):
                triples = [(own, own, 1), *((first, first, count) for first, count in ranges)]
                numbers = [str(number) for triple in triples for number in triple]
                path = shutil.which(program) or program
                subprocess.run([path, str(pid), *numbers], check=True, capture_output=True)
            return
    proc = Path(f"/proc/{pid}")
    # newgidmap may have succeeded before newuidmap failed, and a map can be written only once
    if not (proc / "gid_map").read_text():
        # without it the kernel refuses a gid map of an unprivileged user (user_namespaces(7))
        (proc / "setgroups").write_text("deny")
        (proc / "gid_map").write_text(f"{gid} {gid} 1")
    (proc / "uid_map").write_text(f"{uid} {uid} 1")


def _subordinate_ids() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    from ..peers import SUBGID, SUBUID, iter_subids  # noqa: PLC0415  (only to start a holder)

    # ranges of a map may not overlap, and an overflow id stands for every user without a mapping
    mine = {os.geteuid(), os.getegid(), *_overflow_ids()}
    users, groups = (
        [
            (first, count)
            for first, count, user in iter_subids(file)
            if user == os.geteuid() and not any(first <= own < first + count for own in mine)
        ]
        for file in (SUBUID, SUBGID)
    )
    return users, groups


def _overflow_ids() -> set[int]:
    files = (Path("/proc/sys/kernel", name) for name in ("overflowuid", "overflowgid"))
    return {int(file.read_text()) for file in files}


_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h


def _join(process: int) -> None:
    directory = os.getcwd()
    if _libc.setns(process, _CLONE_NEWUSER | _CLONE_NEWNS) < 0:
        reason = os.strerror(ctypes.get_errno())
        raise BackendUnavailableError(
            f"cannot join the user namespace of the holder: {reason}",
            hint="joining needs one thread, and the holder's user",
        )
    with suppress(OSError):
        os.chdir(directory)  # setns(2) changed it to the root
