"""The holder: the process that keeps the namespaces of an ordinary user's daemon, and its mounts.

`home.py` starts it by its path, so it imports the standard library only. It makes a user and a
mount namespace and has its parent map the ids, or keeps those of its parent, where it replaces a
holder that was killed. It listens in the state directory, and waits. It ends when a connection says
so, at SIGTERM, and when its socket is gone or is another holder's.
"""

import ctypes
import errno
import os
import select
import signal
import socket
import sys

SOCKET = "holder.sock"
END = b"end"
# a removed state directory wakes no poll, so it is looked for
_LOOK_MS = 5000
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h
_MS_REC, _MS_SLAVE = 0x4000, 1 << 19  # linux/mount.h


def main(state_dir: str, *, inherits: bool) -> None:
    """Answer the parent on stdout: a word for each step that worked, or why one failed."""
    if not inherits:
        make_namespaces()
    os.setsid()
    directory = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    path = f"/proc/self/fd/{directory}/{SOCKET}"  # of any length
    # of a holder that was killed, or that this one replaces
    if os.path.lexists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    os.umask(0o177)
    listener.bind(path)
    listener.listen()
    own = os.stat(path).st_ino
    say("listening")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    keep(listener, state_dir, own)


def make_namespaces() -> None:
    """Make them, or end with the reason."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result: int, verb: str) -> None:
        if result < 0:
            reason = os.strerror(number := ctypes.get_errno())
            if number == errno.ENOSPC:  # of user_namespaces(7), not of a disk
                reason = "user.max_user_namespaces allows no more"
            sys.exit(f"cannot {verb}: {reason}")

    must(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "make a user namespace")
    say("unshared")
    sys.stdin.readline()  # until the ids are mapped
    # Ubuntu's AppArmor lets the namespace be made, and refuses what it is for.
    must(libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "mount in a user namespace")


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def keep(listener: socket.socket, state_dir: str, own: int) -> None:
    """Wait until the socket is gone, or a connection says so."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        came = poll.poll(_LOOK_MS)
        try:
            # by its name: a descriptor would still find a removed directory
            if os.stat(os.path.join(state_dir, SOCKET)).st_ino != own:
                return
        except OSError:
            return
        if came:
            connection, _ = listener.accept()
            with connection:
                # one that connects and says nothing must not keep out the others
                connection.settimeout(1)
                try:
                    told = connection.recv(len(END))
                except OSError:
                    told = b""
            if told == END:
                os.unlink(os.path.join(state_dir, SOCKET))
                return


if __name__ == "__main__":
    main(sys.argv[1], inherits="inherit" in sys.argv[2:])
