# @generated from ../_async/sandbox.py by tests/support/unasync.py: edit that file, then run it.
"""A sandbox: commands that see a checkout and its environment at fixed paths, and nothing else."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ... import errors, protocol
from ..primitives_sync import in_thread
from ..sandboxes import Keeper, box_of, choose_environment
from ..sandboxes.calls import Capped, Executed, Output, SandboxCall, pack, unpack

if TYPE_CHECKING:
    from .checkout import Checkout

_READ_BYTES = 256 * 1024 * 1024
_WRITE = '[ -d "${1%/*}" ] || [ "$1" = "${1##*/}" ] || mkdir -p -- "${1%/*}" && exec cat >"$1"'
_UNPACK = 'mkdir -p -- "$1" && exec tar -x -C "$1"'
_PACK = """\
set -- "$(realpath -- "$1")"
if [ -d "$1" ]; then exec tar -c --hard-dereference -C "$1" .; fi
exec tar -c -P -- "$1"
"""


class Sandbox:
    """Runs commands in a checkout, which is at /testbed with its environment active.

    They run as the checkout's owner, without rights, in namespaces of their own, and without a
    network unless asked: with `network` they have the host's. HOME, /tmp and processes in the
    background stay from one command to the next, until `reset`, `close`, or a reset that anybody
    else asked for: the next command then finds the new tree. Everything ends with this process,
    too. Commands may run side by side. `memory_bytes` and `processes` bound all of them together;
    where this process may make no control group, each process its memory.

    The environment is the checkout's, and writable until a reset. `environment` names the one that
    it must have, KEY or KEY@DIGEST, or is a directory of the caller's own, shown read-only.
    """

    def __init__(
        self,
        checkout: Checkout,
        *,
        environment: Path | str | None = None,
        network: bool = False,
        memory_bytes: int | None = None,
        processes: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._checkout = checkout
        own = choose_environment(checkout.lease, environment)
        self._keeper = Keeper(
            lambda: checkout.lease,
            lambda lease: box_of(lease, own, network=network, variables=variables or {}),
            memory_bytes,
            processes,
        )

    @property
    def checkout(self) -> Checkout:
        """The one that commands see."""
        return self._checkout

    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        variables: Mapping[str, str] | None = None,
        input: bytes | None = None,  # noqa: A002
    ) -> Executed:
        """Run a command to its end; a text runs in bash.

        `timeout` is in seconds; then the command is killed with the processes of its group. `cwd`
        is relative to the tree.
        """
        source = io.BytesIO(input) if input else None
        limits: dict[str, Any] = {"timeout": timeout, "cwd": cwd, "variables": variables}
        return self._run(SandboxCall(command, source=source, **limits))

    def read(self, path: str) -> bytes:
        """The content of a file, as a command sees it."""
        content = Output(2 * _READ_BYTES)
        call = SandboxCall(["head", "-c", str(_READ_BYTES + 1), "--", path], stdout=content)
        found = self._must("read", path, call)
        if len(found.stdout) > _READ_BYTES:
            hint = "take it with `download`"
            fact = f"cannot read {path}: it has more than {_READ_BYTES} bytes"
            raise errors.ResourceError(fact, hint=hint)
        return found.stdout

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and the directories on its way, as a command would."""
        call = SandboxCall(["sh", "-c", _WRITE, "sh", path], source=io.BytesIO(data))
        self._must("write", path, call)

    def upload(self, local: Path | str, path: str) -> None:
        """Copy a file or directory of the host to `path`."""
        with tempfile.TemporaryFile() as packed:
            above = in_thread(lambda: pack(Path(local), path, packed))
            call = SandboxCall(["sh", "-c", _UNPACK, "sh", above], source=packed)
            self._must("write", path, call)

    def download(self, path: str, local: Path | str) -> None:
        """Copy a file, or the files and links of a directory, to the new path `local`.

        Whoever follows one of the links on the host follows an agent's.
        """
        with tempfile.TemporaryFile() as packed:
            call = SandboxCall(["sh", "-c", _PACK, "sh", path], stdout=Capped(packed))
            self._must("read", path, call)
            in_thread(lambda: unpack(packed, path, Path(local)))

    def _must(self, verb: str, path: str, call: SandboxCall) -> Executed:
        done = self._run(call)
        if done.exit_code:
            fact = done.stderr.decode(errors="replace").strip() or f"status {done.exit_code}"
            hint = "relative paths begin at the tree"
            raise errors.PathNotFoundError(f"cannot {verb} {path} in a sandbox: {fact}", hint=hint)
        return done

    def _run(self, call: SandboxCall) -> Executed:
        return in_thread(lambda: self._keeper.run(call), call.cancel)

    def reset(self, instance: str | None = None, **target: str | None) -> protocol.Proof:
        """End all processes, then reset the checkout as its own `reset` does."""
        in_thread(self._keeper.close)
        return self._checkout.reset(instance, **target)

    def close(self) -> None:
        """End all processes; HOME and /tmp are gone. The next command begins again."""
        in_thread(self._keeper.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
