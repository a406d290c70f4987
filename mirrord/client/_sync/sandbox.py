# @generated from ../_async/sandbox.py by tests/support/unasync.py: edit that file, then run it.
"""A sandbox: runs commands that see only a checkout and its environment, at fixed paths."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ... import errors, protocol
from ...model import Isolation
from ...places import TESTBED
from ...sandbox.archive import Capped, pack, unpack
from ...sandbox.calls import (
    Executed,
    Keeper,
    Output,
    SandboxCall,
    box_of,
    choose_environment,
    choose_workdir,
    environment_of,
    is_shown,
)
from ...sandbox.verdicts import PluginReport, Reporter, can_report
from ..primitives_sync import in_thread

if TYPE_CHECKING:
    from .checkout import Checkout

# the answer is in memory; `download` takes a tree of any size to disk
_READ_MAX_BYTES = 256 * 1024 * 1024
_TRANSFER_S = 1800.0  # the agent may replace the programs that read and write
# without a slash in it, ${1%/*} is the whole name: no directory to make
_WRITE = '[ -d "${1%/*}" ] || [ "$1" = "${1##*/}" ] || mkdir -p -- "${1%/*}" && exec cat >"$1"'
_UNPACK = 'mkdir -p -- "$1" && exec tar -x -C "$1"'
# `unpack` reads headers of GNU tar alone, and refuses hard links; -P keeps the `/` by which it
# knows a single file
_PACK = """\
set -- "$(realpath -- "$1")"
if [ -d "$1" ]; then exec tar -c --format=gnu --hard-dereference -C "$1" .; fi
exec tar -c --format=gnu -P -- "$1"
"""


class Sandbox:
    """Runs commands in a checkout, which is at /testbed with its environment active.

    Commands run as the checkout's owner, unprivileged, in private namespaces, and without a network
    unless `network` shares the host's. HOME, /tmp and background processes last until `reset`,
    `close`, the end of this process, or a reset by another client, after which commands see the new
    tree. Commands may run concurrently. `memory_bytes` and `processes` limit all of them together;
    without a writable control group, `memory_bytes` limits each process.

    The checkout's environment is writable until a reset. `environment` is the KEY or KEY@DIGEST
    that it must have, or a directory to show read-only instead. `frozen` are files of the tree that
    commands cannot change, with namespaces. The tree is also at `workdir`, by default the one that
    the instance's row names; commands start there.

    `isolation` demands that; without it, the sandbox has the best that this place allows, and warns
    where that is weaker than namespaces. Without them the paths are those of the host: `at` says
    which.

        with Sandbox(checkout) as sandbox:
            done = sandbox.exec("python -m pytest -q", timeout=600)
            print(done.exit_code, done.stdout.decode())
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
        frozen: Sequence[str] = (),
        workdir: str | None = None,
        isolation: Isolation | str | None = None,
    ) -> None:
        self._checkout = checkout
        own = choose_environment(checkout.lease, environment)
        self._workdir = choose_workdir(workdir)
        self._keeper = Keeper(
            lambda: checkout.lease,
            lambda lease: box_of(
                lease,
                own,
                network=network,
                variables=variables or {},
                frozen=frozen,
                workdir=self._workdir,
            ),
            memory_bytes,
            processes,
            isolation if isolation is None else Isolation(isolation),
        )

    @property
    def checkout(self) -> Checkout:
        """The checkout that commands see."""
        return self._checkout

    @property
    def workdir(self) -> str:
        """The directory in which commands start, as they see it."""
        lease = self._checkout.lease
        return self._workdir or lease.workdir or (lease.image.tree if lease.image else TESTBED)

    def isolation(self) -> Isolation:
        """Return what keeps commands from the host."""
        with self._mount() as mount:
            return in_thread(lambda: self._keeper.isolation(mount))

    def at(self, path: str) -> str:
        """Return where commands find a path of the sandbox, such as /testbed."""
        with self._mount() as mount:
            return in_thread(lambda: self._keeper.at(path, mount))

    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        variables: Mapping[str, str] | None = None,
        # as subprocess.run names it
        input: bytes | None = None,  # noqa: A002
    ) -> Executed:
        """Run a command and return its result; a string runs in bash.

        After `timeout` seconds its process group is killed. `cwd` is relative to the tree. Raises
        BackendUnavailableError if sandboxes cannot run, CheckoutNotFoundError after a release.

        Example:
            done = sandbox.exec(["python", "-m", "pytest", "-q"], timeout=600, cwd="tests")
            print(done.exit_code, done.stdout.decode())
        """
        source = io.BytesIO(input) if input else None
        options: dict[str, Any] = {"timeout": timeout, "cwd": cwd, "variables": variables}
        return self._run(SandboxCall(command, source=source, **options))

    def exec_tests(
        self,
        command: str,
        *,
        timeout: float | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> tuple[Executed, PluginReport | None]:
        """Run a command as `exec` does; returns the report of the pytest that it starts, too.

        The report is None where the checkout has no environment whose pytest can report. Standard
        input has the key of the report. `files` are in the directory MIRRORD_FILES, read-only.

        Example:
            done, report = sandbox.exec_tests("python -m pytest -q", timeout=600)
        """
        with self._mount() as mount:
            reports = can_report(environment_of(self._checkout.lease, mount))
        if not reports:
            return self._run(SandboxCall(command, timeout=timeout, files=files)), None
        reporter = Reporter()
        source = io.BytesIO(reporter.key)
        call = SandboxCall(command, timeout=timeout, source=source, reporter=reporter, files=files)
        ended = self._run(call)
        return ended, reporter.read(call.report.bytes())

    def read(self, path: str) -> bytes:
        """Return the content of a file of at most 256 MiB; raises PathNotFoundError.

        Example:
            text = (sandbox.read("setup.py")).decode()
        """
        # Output keeps the first and the last half: so none of it is left out
        content = Output(2 * _READ_MAX_BYTES)
        call = SandboxCall(
            # one byte more than may be, by which a longer file is known
            ["head", "-c", str(_READ_MAX_BYTES + 1), "--", self.at(path)],
            stdout=content,
        )
        done = self._must("read", path, call)
        if len(done.stdout) > _READ_MAX_BYTES:
            hint = "use `download`"
            fact = f"cannot read {path}: it has more than {_READ_MAX_BYTES} bytes"
            raise errors.ResourceError(fact, hint=hint)
        return done.stdout

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and its missing parents; raises PathNotFoundError.

        Example:
            sandbox.write("tests/test_new.py", b"def test(): pass\\n")
        """
        call = SandboxCall(["sh", "-c", _WRITE, "sh", self.at(path)], source=io.BytesIO(data))
        self._must("write", path, call)

    def upload(self, local: Path | str, path: str) -> None:
        """Copy a file or directory of the host to `path`.

        Example:
            sandbox.upload("/srv/fixtures", "/tmp/fixtures")
        """
        path = self.at(path)
        with tempfile.TemporaryFile() as packed:
            above = in_thread(lambda: pack(Path(local), path, packed))
            call = SandboxCall(["sh", "-c", _UNPACK, "sh", above], source=packed)
            self._must("write", path, call)

    def download(self, path: str, local: Path | str) -> None:
        """Copy a file, or the files and links of a directory, to the new path `local`.

        Links are the agent's: do not follow them on the host. Raises LimitReachedError above 4 GiB,
        1,000,000 files or 256 directories deep; then nothing of it is kept.

        Example:
            sandbox.download("build/report", "report")
        """
        path = self.at(path)
        with tempfile.TemporaryFile() as packed:
            call = SandboxCall(["sh", "-c", _PACK, "sh", path], stdout=Capped(packed, path))
            self._must("read", path, call)
            in_thread(lambda: unpack(packed, path, Path(local)))

    def _must(self, verb: str, path: str, call: SandboxCall) -> Executed:
        call.timeout = _TRANSFER_S
        done = self._run(call)
        if done.struck == "time":
            fact = f"cannot {verb} {path} in a sandbox: it took longer than {_TRANSFER_S:.0f} s"
            raise errors.LimitReachedError(fact, hint="transfer parts of it")
        if done.exit_code:
            fact = done.stderr.decode(errors="replace").strip() or f"status {done.exit_code}"
            hint = "relative paths start at the tree"
            raise errors.PathNotFoundError(f"cannot {verb} {path} in a sandbox: {fact}", hint=hint)
        return done

    def _run(self, call: SandboxCall) -> Executed:
        with self._mount() as mount:
            return in_thread(lambda: self._keeper.run(call, mount), call.cancel)

    @contextmanager
    def _mount(self) -> Iterator[int | None]:
        """Yield the descriptor of the checkout's mount where this mount namespace shows none."""
        if is_shown(self._checkout.lease):
            yield None
            return
        mount = self._checkout.open_mount()
        try:
            yield mount
        finally:
            os.close(mount)

    def reset(self, instance: str | None = None, **target: str | None) -> protocol.Proof:
        """End all processes and reset the checkout; arguments are those of its `reset`.

        Example:
            sandbox.reset("psf__requests-863")
        """
        in_thread(self._keeper.close)
        return self._checkout.reset(instance, **target)

    def close(self) -> None:
        """End all processes and remove HOME and /tmp; the next command starts a new sandbox."""
        in_thread(self._keeper.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
