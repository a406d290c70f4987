"""A call of a worker that is struck at one step of its change: killed, given an error, or raced by the tree's owner.

A step is a system call that the product makes on names or contents, from where the journal is begun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import mirrord

_CALLS = {"open", "write", "mkdir", "rmdir", "unlink", "rename", "symlink", "utime", "fchown", "chown", "fchmod", "chmod"}  # fmt: skip
_PRODUCT = str(Path(mirrord.__file__).parent)
_full_for: int | None = None


def _stay_full(event: str, arguments: tuple[Any, ...]) -> None:
    if _full_for is None:
        return
    is_new = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
    if is_new or event in {"os.mkdir", "os.symlink"}:
        raise OSError(_full_for, os.strerror(_full_for))


sys.addaudithook(_stay_full)


class Strike:
    """`fault` is "kill", an error number, or a script for the tree's owner; at the step `at`, from 0."""

    def __init__(self, fault: str | int, at: int, tree: Path, uid: int) -> None:
        self._fault, self._at = fault, at
        self.count = -1  # until the journal is begun
        self._owner: subprocess.Popen[bytes] | None = None
        if isinstance(fault, str) and fault != "kill":
            # started here: the thread that is struck may have no right to change its uid
            user: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": []}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._owner = subprocess.Popen(["sh"], cwd=tree, bufsize=0, **pipes, **user)

    def see(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event == "call":
            if (
                self.count < 0
                and code.co_name == "begin"
                and code.co_filename.endswith("journal.py")
            ):
                self.count = 0
            is_step = code.co_name == "rename_new"
        else:
            is_step = (
                event == "c_call"
                and called.__name__ in _CALLS
                and code.co_filename.startswith(_PRODUCT)
            )
        if is_step and self.count >= 0:
            self.count += 1
            if self.count == self._at + 1:
                self._strike()

    def _strike(self) -> None:
        global _full_for
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif isinstance(self._fault, int):
            _full_for = self._fault  # of the calls that make something, from now on
            raise OSError(self._fault, os.strerror(self._fault), b"struck")
        else:
            self.end(self._fault.encode())

    def end(self, script: bytes = b"") -> None:
        """End the owner's shell, if there is one, after a script."""
        if self._owner and self._owner.returncode is None:
            said, _ = self._owner.communicate(script)
            assert said == b""


def struck(function: Callable[..., Any], args: tuple[Any, ...], strike: Strike) -> int:
    """Make the call in this process, struck; returns how many steps it had."""
    global _full_for
    sys.setprofile(strike.see)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
        strike.end()
        _full_for = None
    return strike.count


def killed(function: Callable[..., Any], args: tuple[Any, ...], strike: Strike) -> None:
    """Make the call in a process of its own, which is killed at the step."""
    if (pid := os.fork()) == 0:
        with suppress(BaseException):
            struck(function, args, strike)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
