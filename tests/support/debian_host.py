"""A booted Debian for the tests of our packages, which it sees in /srv/packages; its dpkg knows the packages of this machine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import firstsession
import installed
import nspawn
from mount_table import mount_lines
from sessions import Shell

PROJECT = Path(__file__).parents[2]
WHEELS = PROJECT / ".venv/wheels"
REASON = (
    nspawn.why_not()
    or installed.why_not()
    or ("" if (WHEELS / "lock").exists() else "no wheels here: `make wheels` downloads them")
    or ("" if shutil.which("dpkg-deb") else "this is no Debian")
)
"""Why none can be booted here; empty where one can."""
BLOCKS = re.findall(
    r"^```bash\n(.*?)^```", (PROJECT / "docs/installation.md").read_text(), re.DOTALL | re.MULTILINE
)
STATE = "/var/lib/mirrord"
USERS = """\
u alice 12345 "to be a member" /tmp
u bob 12347 "another member" /tmp
u mallory 12346 "a stranger" /tmp
u agent 3000 "the owner of a checkout" /tmp
"""
ENV = {
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
    "PATH": f"{nspawn.PATH}:/usr/local/bin",
}
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/wheels", "PIP_NO_CACHE_DIR": "1"}


class Host:
    """The booted machine; `package` is the file name of the package that its commands install."""

    def __init__(self, machine: nspawn.Machine, package: str, url: str, bases: list[str]) -> None:
        self.machine = machine
        self.package = package
        self.url = url
        self.bases = bases

    def shell(self, script: str, user: str | None = None, *, check: bool = True) -> str:
        env = {**ENV, **OFFLINE}
        run = self.machine.run("sh", "-ec", script, user=user, env=env, check=check, bound_s=300)
        return (run.stdout + run.stderr).rstrip("\n")

    def install(self, *packages: str) -> str:
        files = " ".join(f"./{package}" for package in packages)
        return self.shell(f"cd /srv/packages && apt-get install --yes --allow-downgrades {files}")

    def bash(self, user: str | None = None) -> Shell:
        """A shell in an empty directory; no login session, and so no runtime directory."""
        shell = Shell(self.machine.command("bash", user=user, env=ENV))
        shell.run('cd "$(mktemp -d)"; export HOME=$PWD GIT_PAGER=cat')
        return shell

    def json(self, *args: str, user: str | None = None) -> Any:
        done = self.machine.run("mirrord", *args, "--json", user=user, env=ENV)
        return json.loads(done.stdout)

    def documented(self, block: str) -> list[str]:
        """The commands of a document, for the packages and the upstream that are here."""
        commands = [line.partition("  #")[0].strip() for line in block.splitlines() if line]
        known = {
            r"\./mirrord_\S+\.deb": f"/srv/packages/{self.package}",
            r"mirror add psf/requests": f"mirror add psf/requests --url {self.url}",
            r"apt(-get)? install": "apt-get install --yes",
        }
        for pattern, here in known.items():
            commands = [re.sub(pattern, here, command) for command in commands]
        return commands

    def pid(self) -> int:
        return int(self.machine.show("mirrord.service", "MainPID"))

    def mounts(self) -> list[str]:
        table = mount_lines(self.machine.leader)
        return [line.split()[4] for line in table if line.split()[4].startswith(f"{STATE}/")]


def build(directory: Path, *options: str) -> list[Path]:
    """The packages of this tree, sorted by their names."""
    command = [sys.executable, str(PROJECT / "packaging/deb.py"), str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(directory.iterdir())


@contextmanager
def booted(
    scratch: Path,
    package: str,
    *,
    binds: Mapping[str, Path] | None = None,
    writable: Mapping[str, Path] | None = None,
) -> Iterator[Host]:
    """Boot, with `scratch`/packages and upstreams that the documents name."""
    _, bases = firstsession.upstream(scratch / "upstreams" / "psf__requests")
    row = {"instance_id": "psf__requests-9", "repo": "psf/requests", "base_commit": bases[0]}
    (scratch / "upstreams/rows.jsonl").write_text(json.dumps(row))
    firstsession.write_datasets(scratch / "upstreams", bases)
    (scratch / "sysusers").mkdir()
    (scratch / "sysusers/users.conf").write_text(USERS)
    for name in ("state", "usr"):
        (scratch / name).mkdir()
    shutil.copytree("/var/lib/dpkg", scratch / "dpkg", symlinks=True)
    (scratch / "dpkg/statoverride").write_text("")  # for groups that a new /etc has not
    read = {
        "/srv/upstreams": scratch / "upstreams",
        "/srv/packages": scratch / "packages",
        "/srv/wheels": WHEELS,
        "/run/sysusers.d": scratch / "sysusers",
    } | dict(binds or {})
    written = {STATE: scratch / "state", "/var/lib/dpkg": scratch / "dpkg"} | dict(writable or {})
    with nspawn.booted(scratch, binds=read, writable=written, usr=scratch / "usr") as machine:
        host = Host(machine, package, "file:///srv/upstreams/psf__requests", bases)
        host.shell("rm -f /usr/sbin/policy-rc.d")  # of this machine, which is a container
        host.shell(
            "mkdir -p /etc/dpkg/dpkg.cfg.d; echo force-unsafe-io >/etc/dpkg/dpkg.cfg.d/quick"
        )
        yield host
