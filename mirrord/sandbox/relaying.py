"""`mirrord exec` in the place of its command: forwards signals, relays output."""

import os
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from .box import Started


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command, with a sandbox all its processes, and wait for their end."""
    process.end() if isinstance(process, Started) else process.kill()
    process.wait()


def outputs() -> dict[str, int]:
    """Return Popen's options for output that is a file.

    By /proc/self/fd a process opens the file of a descriptor anew: an agent of the caller's uid
    would read and change the log of its harness. So it gets a pipe instead.
    """
    files = {name: os.fstat(number) for name, number in (("stdout", 1), ("stderr", 2))}
    kept = {name: file for name, file in files.items() if stat.S_ISREG(file.st_mode)}
    options = dict.fromkeys(kept, subprocess.PIPE)
    if len(kept) == 2 and os.path.samestat(kept["stdout"], kept["stderr"]):
        options["stderr"] = subprocess.STDOUT  # keeps the order of lines
    return options


@contextmanager
def relaying(process: subprocess.Popen[bytes], note: Callable[[str], None]) -> Iterator[None]:
    """Copy the output of pipes until the command has ended."""
    pipes = ((process.stdout, 1), (process.stderr, 2))
    threads = [
        threading.Thread(target=_relay, args=(pipe, number, note), daemon=True)
        for pipe, number in pipes
        if pipe
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def _relay(pipe: IO[bytes], target: int, note: Callable[[str], None]) -> None:
    """Copy output; where that fails, the command's next write fails too."""
    with pipe:
        try:
            # as much as a pipe holds (pipe(7))
            while data := os.read(pipe.fileno(), 1 << 16):
                while data:
                    # a write may be short, as on a disk that fills up
                    data = data[os.write(target, data) :]
        except OSError as error:
            note(f"mirrord: cannot write the command's output: {error.strerror}")


_GRACE_S = 10.0  # as of `docker stop`


_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # SIGINT may be Ctrl-C in an interpreter


@contextmanager
def forwarding() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward signals to the command, also those that came before it started.

    What still runs ten seconds after a signal to end is killed: an agent may ignore it.
    """
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []
    timers: list[threading.Timer] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not running:
            early.append(number)
            return
        process = running[0]
        pid = process.find_command() if isinstance(process, Started) else process.pid
        with suppress(ProcessLookupError):
            if pid is None:  # the command has not started in the sandbox
                process.kill()
            # later its number may be another process's
            elif process.returncode is None:
                os.kill(pid, number)
        if number in _ENDING and not timers:
            timers.append(threading.Timer(_GRACE_S, kill, running))
            timers[0].daemon = True
            timers[0].start()

    def forward_to(process: subprocess.Popen[bytes]) -> None:
        running.append(process)
        for number in early:
            forward(number, None)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()
