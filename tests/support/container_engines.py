"""podman and dockerd for tests, with storage of their own and no network, and an image that has nothing: a container sees the host's /usr."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from waiting import BOUND_S, until

IMAGE = "mirrord-test"
_PODMAN = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
netns = "none"
volumes = ["/usr:/usr:ro"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "runc"
tmp_dir = "{root}/tmp"
volume_plugin_timeout = 60
[engine.volume_plugins]
mirrord = "{plugin}"
"""
_STORAGE = '[storage]\ndriver = "vfs"\ngraphroot = "{root}/graph"\nrunroot = "{root}/run"\n'


def _image() -> bytes:
    """A root file system of directories and links: Debian's programs are all in /usr.

    It has a file where volumes are mounted, as images of SWE-bench do; engines copy it into an empty one.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("usr", "etc", "tmp", "testbed", "proc", "sys", "dev", "root"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        tar.addfile(tarfile.TarInfo("testbed/of-image"))
    return packed.getvalue()


class Engine:
    """One container engine; `driver` is the name under which it knows mirrord."""

    def __init__(
        self, program: str, environment: dict[str, str], driver: str, user: int | None = None
    ) -> None:
        self.program, self.driver, self.user = program, driver, user
        self.environment = {**os.environ, **environment}
        # podman reads these in its configuration
        self.usual = () if program == "podman" else ("--volume=/usr:/usr:ro", "--network=none")
        self.at_once = ("--time", "0") if program == "podman" else ()  # docker kills at once

    def try_run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.program, *arguments],
            input=stdin,
            env=self.environment,
            capture_output=True,
            check=False,
            timeout=600,
            user=self.user,
            group=self.user,
            extra_groups=None if self.user is None else [],
            cwd="/",
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    def __call__(self, *arguments: str, stdin: bytes = b"") -> str:
        done = self.try_run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments))

    def make_volume(self, name: str, **options: str) -> str:
        given = [word for key, value in options.items() for word in ("--opt", f"{key}={value}")]
        return self("volume", "create", "--driver", self.driver, *given, name)

    def start(self, volume: str, *more: str, user: int = 0) -> str:
        """A container that sleeps, with a volume such as `name:/testbed`; answers its id."""
        return self(
            *("run", "--detach", "--user", str(user), "--volume", volume),
            *(*self.usual, *more, IMAGE, "sleep", "600"),
        )

    def remove(self, container: str) -> None:
        self("rm", "--force", *self.at_once, container)

    def shell(self, container: str, script: str) -> str:
        return self("exec", container, "sh", "-c", f"exec 2>&1; {script}")

    def clean(self) -> None:
        if containers := self("ps", "--all", "--quiet").split():
            self("rm", "--force", *self.at_once, *containers)
        if volumes := self("volume", "ls", "--quiet").split():
            self("volume", "rm", *volumes)


def why_no_podman() -> str:
    missing = [name for name in ("podman", "runc") if not shutil.which(name)]
    return f"{', '.join(missing)} not installed" if missing else ""


def why_no_docker() -> str:
    return "" if shutil.which("dockerd", path=_WITH_SBIN) else "dockerd is not installed"


_WITH_SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextmanager
def podman(plugin: Path, user: int | None = None) -> Iterator[Engine]:
    """Root's, or rootless, of a user with subordinate ids."""
    root = Path(tempfile.mkdtemp(prefix="podman-"))
    (root / "containers.conf").write_text(_PODMAN.format(root=root, plugin=plugin))
    (root / "storage.conf").write_text(_STORAGE.format(root=root))
    files = {
        "CONTAINERS_CONF": str(root / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(root / "storage.conf"),
    }
    if user is not None:
        (root / "home").mkdir(mode=0o700)
        for path in (root, root / "home"):
            os.chown(path, user, user)
        files |= {"HOME": str(root / "home"), "XDG_RUNTIME_DIR": str(root / "home")}
    engine = Engine("podman", files, "mirrord", user)
    try:
        engine("import", "-", IMAGE, stdin=_image())
        yield engine
    finally:
        engine.try_run("rm", "--all", "--force", "--time", "0")
        engine.try_run("volume", "rm", "--all", "--force")
        if user is not None:
            engine.try_run("system", "migrate")  # ends the process that holds the user namespace
        until(lambda: not _names(root))  # after a container or an exec another podman cleans up
        shutil.rmtree(root)


def _names(root: Path) -> list[Path]:
    """The processes that name a directory in their arguments."""
    naming = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if os.fsencode(root) in file.read_bytes():
                naming.append(file)
    return naming


@contextmanager
def dockerd(plugin: Path) -> Iterator[Engine]:
    """A daemon of its own; a .spec file names the driver's socket, under a name that nobody has."""
    root = Path(tempfile.mkdtemp(prefix="dockerd-"))
    driver = f"mirrord-{uuid.uuid4().hex[:8]}"
    spec = Path(f"/etc/docker/plugins/{driver}.spec")
    spec.parent.mkdir(parents=True, exist_ok=True)
    spec.write_text(f"unix://{plugin}")
    limits = {name: {"Name": name, "Hard": 1024, "Soft": 1024} for name in ("nofile", "nproc")}
    settings = {
        "data-root": f"{root}/data", "exec-root": f"{root}/exec", "pidfile": f"{root}/pid",
        "hosts": [f"unix://{root}/s"], "bridge": "none", "iptables": False, "ip6tables": False,
        "ip-forward": False, "storage-driver": "vfs", "default-ulimits": limits,
    }  # fmt: skip
    (root / "daemon.json").write_text(json.dumps(settings))
    engine = Engine("/usr/bin/docker", {"DOCKER_HOST": f"unix://{root}/s"}, driver)
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            ["dockerd", "--config-file", str(root / "daemon.json")],
            stdout=log, stderr=log, env={**os.environ, "PATH": _WITH_SBIN},
        )  # fmt: skip
    try:
        until(lambda: engine.try_run("version").returncode == 0 or process.poll() is not None)
        assert process.poll() is None, (root / "log").read_text()
        engine("import", "-", IMAGE, stdin=_image())
        yield engine
    finally:
        if process.poll() is None:
            engine.clean()
        process.terminate()
        process.wait(BOUND_S)
        spec.unlink()
        shutil.rmtree(root, ignore_errors=True)
