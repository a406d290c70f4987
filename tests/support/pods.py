"""A container as docker and Kubernetes make one by default: root, without CAP_SYS_ADMIN, and namespaces are refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyone
from container_engines import IMAGE, Engine, podman

# docker's default set
_CAPABILITIES = (
    "audit_write chown dac_override fowner fsetid kill mknod net_bind_service net_raw setfcap"
    " setgid setpcap setuid sys_chroot"
)
_LANDLOCK = "create_ruleset", "add_rule", "restrict_self"
_PROFILE = Path(__file__).with_name("pod_seccomp.json")


class Pod:
    """A running container with this project; `root` is a directory of the host, at the same path in it."""

    def __init__(self, engine: Engine, name: str, root: Path) -> None:
        self.engine, self.name, self.root = engine, name, root
        self._python = anyone.python()

    def run(
        self, *command: str, user: int = 0, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; an ordinary user's HOME is below `root`, and has no login session."""
        home = f"HOME={self.root}/{user}" if user else "HOME=/root"
        options = ("--interactive", "--user", str(user), "--env", home)
        return self.engine.try_run("exec", *options, self.name, *command, stdin=stdin)

    def python(self, *arguments: str, user: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run(*self._python, "-P", *arguments, user=user)

    def mirrord(self, *arguments: str, user: int = 0) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "mirrord", *arguments, user=user)

    def must(self, *arguments: str, user: int = 0) -> str:
        done = self.mirrord(*arguments, user=user)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def json(self, *arguments: str, user: int = 0) -> Any:
        return json.loads(self.must(*arguments, "--json", user=user))

    def serve(self, user: int = 0) -> None:
        """Start a user's daemon, and wait until it answers."""
        home = self.root / str(user)
        home.mkdir()
        os.chown(home, user, user)
        log = home / "daemon.log"
        config = ("--env", f"MIRRORD_CONFIG={self.root}/config.toml")
        command = f"exec {' '.join([*self._python, '-P', '-m', 'mirrord', 'serve'])} >{log} 2>&1"
        options = ("--detach", "--user", str(user), "--env", f"HOME={home if user else '/root'}")
        self.engine("exec", *options, *config, self.name, "sh", "-c", command)
        for _ in range(100):  # each takes a while
            if self.mirrord("status", user=user).returncode == 0:
                return
        raise AssertionError(log.read_text())


@contextmanager
def pod(
    root: Path, *more: Path, has_landlock: bool = True, drops: Sequence[str] = ()
) -> Iterator[Pod]:
    """Start one that sees `more` directories of the host, without the capabilities that it `drops`.

    Without Landlock its filter refuses that too, as older engines do.
    """
    profile = json.loads(_PROFILE.read_text())
    if not has_landlock:
        profile["syscalls"][0]["names"] += [f"landlock_{name}" for name in _LANDLOCK]
    (root / "seccomp.json").write_text(json.dumps(profile))
    shown = {root, Path(anyone.__file__).parents[2], *map(Path, _paths_of_python()), *more}
    volumes = [f"--volume={path}:{path}{'' if path == root else ':ro'}" for path in sorted(shown)]
    capabilities = [f"--cap-add={name}" for name in _CAPABILITIES.split() if name not in drops]
    with podman(root / "no-plugin") as engine:
        confined = ["--cap-drop=all", *capabilities, f"--security-opt=seccomp={root}/seccomp.json"]
        command = ["sh", "-c", "echo root:x:0:0::/root:/bin/sh >/etc/passwd; exec sleep 3600"]
        name = engine("run", "--detach", *confined, *volumes, IMAGE, *command)
        yield Pod(engine, name, root)


def _paths_of_python() -> Iterator[str]:
    """Yield the directories that `anyone.python` names."""
    for word in anyone.python():
        if word.startswith("PYTHONPATH="):
            yield from word.partition("=")[2].split(":")[:1]
