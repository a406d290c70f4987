"""An ordinary user's daemon in a home of its own, and clients of the same user outside of it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import anyone
from accounts import accounts
from daemons import Daemon
from gitrepos import Upstream

# a user of this process's own: tests beside it may give theirs subordinate ids
UID, SUB = 1_000_000 + os.getpid(), 471_100_000
WITHOUT = (
    # of mounts that no other test unmounts: bwrap ends where one goes before it is changed
    "unshare",
    "--user",
    "--map-current-user",
    "--mount",
    "--propagation",
    "private",
    "bwrap",
    "--die-with-parent",
    "--unshare-user",
    "--disable-userns",
    "--dev-bind",
    "/",
    "/",
    "--",
)


class Home(Daemon):
    """A user's daemon; its clients run as the user, outside of its namespaces."""

    def run(
        self, *arguments: str, check: bool = True, user: int = UID, prefix: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        return self.execute([*prefix, *anyone.python(), "-P", *arguments], check=check, user=user)

    def execute(
        self, command: Sequence[str], *, check: bool = True, user: int = UID, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.root),
                "MIRRORD_SOCKET": str(self.socket),
                **variables,
            },
            cwd=self.root,
            user=user,
            group=user,
            extra_groups=(),
            capture_output=True,
            text=True,
            timeout=400,  # a harness imports for a while on a loaded machine
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}: {done.stderr}{self.log}")
        return done

    def cli(self, *arguments: str, **how: object) -> str:
        return self.run("-m", "mirrord", *arguments, **how).stdout  # type: ignore[arg-type]

    def holder(self) -> int:
        """Its pid, as the kernel knows the process that listens."""
        script = "import pathlib, sys; from mirrord.host.namespaces import home\n"
        script += f"pidfd = home.find(pathlib.Path({str(self.state_dir)!r}))\n"
        script += (
            "print(pidfd and open(f'/proc/self/fdinfo/{pidfd}').read().split('Pid:')[1].split()[0])"
        )
        return int(self.run("-c", script).stdout)

    def end_holder(self) -> None:
        with suppress(AssertionError, ValueError, ProcessLookupError):
            os.kill(self.holder(), signal.SIGKILL)


@contextmanager
def home(
    text: str = "",
    *,
    subordinate: bool = False,
    namespaces: bool = True,
    fill: Callable[[Path], None] = lambda root: None,
) -> Iterator[Home]:
    """Start it; `fill` makes further files, which are the user's. ROOT in `text` is their directory."""
    line = f"md{UID}:{SUB}:65536"
    lines = {"subuid": line, "subgid": line} if subordinate else {}
    with (
        accounts(passwd=f"md{UID}:x:{UID}:{UID}::/:/bin/sh", group=f"md{UID}:x:{UID}:", **lines),
        tempfile.TemporaryDirectory(prefix="md-", ignore_cleanup_errors=True) as scratch,
    ):
        root = Path(scratch)
        root.chmod(0o755)
        upstream = Upstream(root / "up" / "owner" / "name")
        upstream.commit({"a.txt": "a\n", "d/b.txt": "b\n"})
        fill(root)
        made = Home(
            root,
            f'[upstream]\nurl = "file://{root}/up/{{owner}}/{{name}}"\n{text.replace("ROOT", scratch)}',
        )
        made.user = UID
        made._environment |= {"HOME": scratch}
        for path in (root, *root.rglob("*")):
            os.chown(path, UID, UID)
        made.start(prefix=() if namespaces else WITHOUT)
        try:
            made.cli("mirror", "add", "owner/name")
            yield made
        finally:
            if made.process is not None:
                made.stop()
            made.end_holder()
