"""The guard of a command that is confined without namespaces; a program without imports of ours.

It starts the command with another uid, under Landlock and a system call filter, and is the parent
of all that the command leaves behind. It kills all of them and removes their scratch directory at
the end of the command, or at SIGTERM: `confine.py ORDER FILTER`, both descriptors, of JSON and of
struct sock_filter[].
"""

import ctypes
import json
import os
import shutil
import signal
import stat
import struct
import sys
from contextlib import suppress

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# linux/prctl.h
_PDEATHSIG, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 22, 36, 38
# linux/seccomp.h: SECCOMP_MODE_FILTER
_SECCOMP_FILTER = 2
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h
# the same on every architecture
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
# linux/landlock.h: the flag that asks for the ABI, and the type of a rule for paths
_VERSION, _PATH_BENEATH = 1, 1
# linux/landlock.h
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # how many an ABI knows; 16 since 5
_SCOPES = 0b11  # abstract sockets and signals, since ABI 6
# as a shell ends for a program that is there and cannot be run (POSIX)
_SPAWN_FAILED = 126


def _must(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(option: int, value: int, what: str, pointer: bytes = b"") -> None:
    none = ctypes.c_ulong(0)
    _must(_libc.prctl(option, ctypes.c_ulong(value), pointer or none, none, none), what)


def landlock_abi() -> int:
    """Return the version of Landlock's interface, 0 without Landlock."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def _restrict(paths: dict[str, list[str]]) -> None:
    """Let this process reach only what is below the paths: to `read`, to `write`, as `pipes`."""
    abi = landlock_abi()
    handled = (1 << _RIGHTS.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 0, _SCOPES if abi >= 6 else 0)
    # struct landlock_ruleset_attr got its second member with ABI 4, the third with 6
    size = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16}.get(abi, 24)
    made = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    ruleset = _must(made, "Landlock")
    granted = {"read": _READ, "pipes": _READ | _WRITE_FILE, "write": handled}
    for how, listed in paths.items():
        for path in listed:
            with suppress(FileNotFoundError, PermissionError, NotADirectoryError):
                _allow(ruleset, path, granted[how] & handled)
    _must(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    # enough for Landlock, and needs no right to the file
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, fd)
        _must(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"Landlock for {path}")
    finally:
        os.close(fd)


def _drop_rights(owner: "list[int] | None") -> None:
    """Become the owner, without capabilities; uid 0 gains none by executing, either."""
    if owner is not None:
        os.setgroups([])
        os.setresgid(*[owner[1]] * 3)
        os.setresuid(*[owner[0]] * 3)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _must(_libc.capset(header, struct.pack("6I", *[0] * 6)), "capabilities")
    # without it Landlock and filters need CAP_SYS_ADMIN
    _prctl(_NO_NEW_PRIVS, 1, "no_new_privs")


def _filter(program: bytes) -> None:
    lines = ctypes.create_string_buffer(program, len(program))
    address = ctypes.addressof(lines)
    # struct sock_fprog: the number of instructions, 8 bytes each, and their address
    packed = struct.pack("HxxxxxxQ", len(program) // 8, address)
    _prctl(_SECCOMP, _SECCOMP_FILTER, "seccomp", packed)


def _become_command(order: dict, program: bytes) -> None:  # type: ignore[type-arg]
    """Replace this process, a child of the guard, with the command."""
    try:
        _prctl(_PDEATHSIG, signal.SIGKILL, "pdeathsig")
        os.umask(0o022)
        _drop_rights(order["owner"])
        _prctl(_PDEATHSIG, signal.SIGKILL, "pdeathsig")  # a change of uid cleared it
        os.chdir(order["directory"])
        if order["paths"] is not None:
            _restrict(order["paths"])
        _filter(program)
        # Python ignores SIGPIPE and SIGXFSZ, and what is ignored stays so over execve(2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe(order["command"][0], order["command"], order["variables"])  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot confine the command: {error}\n".encode())
    finally:
        os._exit(_SPAWN_FAILED)


def _children() -> "list[int]":
    with open("/proc/thread-self/children", "rb") as listed:
        return [int(pid) for pid in listed.read().split()]


def _end_all() -> None:
    """Kill what the command left; what loses its parent becomes a child of this process."""
    while True:
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _watch(command: int) -> int:
    """Wait for the command or an order to end; return the command's status."""
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    while True:
        if signal.sigwait(awaited) == signal.SIGTERM:
            return 128 + signal.SIGKILL
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                status = os.waitstatus_to_exitcode(ended[1])
                return status if status >= 0 else 128 - status


def _read(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


def main() -> int:
    # sigwait(3) needs them blocked; one that comes before it waits is kept
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    order, program = json.loads(_read(int(sys.argv[1]))), _read(int(sys.argv[2]))
    scratch, lock = order["scratch"]  # its lock lives as long as this process
    os.set_inheritable(lock, False)
    _prctl(_PDEATHSIG, signal.SIGTERM, "pdeathsig")
    _prctl(_DUMPABLE, 0, "dumpable")  # nobody of its uid reads its memory
    _prctl(_SUBREAPER, 1, "subreaper")
    status = _SPAWN_FAILED
    if os.getppid() == order["parent"]:
        if (command := os.fork()) == 0:
            _become_command(order, program)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # the command's end is the end of its output
            os.dup2(nothing, standard)
        status = _watch(command)
    _end_all()
    shutil.rmtree(scratch, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
