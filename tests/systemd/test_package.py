"""The Debian package on a Debian under systemd: installed, used, upgraded, removed, purged; and a wheel's service.

One machine is booted for the whole file; the tests run in order, each from where the last one left it. Its dpkg knows the
packages of this machine. The commands are those of docs/installation.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import firstsession
import installed
import nspawn
import pytest
from mount_table import mount_lines
from sessions import Shell

import mirrord

PROJECT = Path(__file__).parents[2]
WHEELS = PROJECT / ".venv/wheels"
REASON = (
    nspawn.why_not()
    or installed.why_not()
    or ("" if (WHEELS / "lock").exists() else "no wheels here: `make wheels` downloads them")
    or ("" if shutil.which("dpkg-deb") else "this is no Debian")
)
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(600),
    pytest.mark.root,
    pytest.mark.slow,
]

BLOCKS = re.findall(
    r"^```bash\n(.*?)^```", (PROJECT / "docs/installation.md").read_text(), re.DOTALL | re.MULTILINE
)
STATE = "/var/lib/mirrord"
OLD = "0.0.9"
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
UNNEEDED = ("sqlalchemy/testing",)
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/wheels", "PIP_NO_CACHE_DIR": "1"}


class Host:
    """The booted machine, and the packages that it sees in /srv/packages."""

    def __init__(
        self, machine: nspawn.Machine, old: str, new: list[str], url: str, bases: list[str]
    ) -> None:
        self.machine = machine
        self.old = old
        self.new = new
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
            r"\./mirrord_\S+\.deb": f"/srv/packages/{self.old}",
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


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mirrord-package-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def _packages(scratch: Path) -> tuple[Path, list[Path]]:
    """Of an older release that has not all of the packages inside yet, and the two of this tree."""
    directory = scratch / "packages"
    command = [sys.executable, str(PROJECT / "packaging/deb.py"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    full, new = sorted(directory.iterdir())
    tree = scratch / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", new, tree], check=True)
    (site,) = tree.glob("usr/lib/mirrord/lib/*/site-packages")
    for name in UNNEEDED:
        shutil.rmtree(site / name)
    for compiled in site.glob("mirrord/__pycache__/__init__.*"):
        compiled.unlink()
    for path in (site / "mirrord/__init__.py", tree / "DEBIAN/control"):
        path.write_text(path.read_text().replace(mirrord.__version__, OLD))
    old = directory / new.name.replace(mirrord.__version__, OLD)
    subprocess.run(["dpkg-deb", "--build", "-Znone", tree, old], check=True, capture_output=True)
    shutil.rmtree(tree)
    return old, [new, full]


@pytest.fixture(scope="module")
def host(scratch: Path) -> Iterator[Host]:
    _, bases = firstsession.upstream(scratch / "upstreams" / "psf__requests")
    row = {"instance_id": "psf__requests-9", "repo": "psf/requests", "base_commit": bases[0]}
    (scratch / "upstreams/rows.jsonl").write_text(json.dumps(row))
    firstsession.write_datasets(scratch / "upstreams", bases)
    old, new = _packages(scratch)
    installed.wheels(scratch / "ours")
    (scratch / "sysusers").mkdir()
    (scratch / "sysusers/users.conf").write_text(USERS)
    for name in ("state", "usr", "opt"):
        (scratch / name).mkdir()
    shutil.copytree("/var/lib/dpkg", scratch / "dpkg", symlinks=True)
    (scratch / "dpkg/statoverride").write_text("")  # for groups that a new /etc has not
    binds = {
        "/srv/upstreams": scratch / "upstreams",
        "/srv/packages": scratch / "packages",
        "/srv/wheels": WHEELS,
        "/srv/libraries": installed.LIBRARIES,
        "/srv/ours": scratch / "ours",
        "/run/sysusers.d": scratch / "sysusers",
    }
    writable = {
        STATE: scratch / "state",
        "/opt": scratch / "opt",
        "/var/lib/dpkg": scratch / "dpkg",
    }
    with nspawn.booted(scratch, binds=binds, writable=writable, usr=scratch / "usr") as machine:
        url = "file:///srv/upstreams/psf__requests"
        host = Host(machine, old.name, [path.name for path in new], url, bases)
        host.shell("rm -f /usr/sbin/policy-rc.d")  # of this machine, which is a container
        host.shell(
            "mkdir -p /etc/dpkg/dpkg.cfg.d; echo force-unsafe-io >/etc/dpkg/dpkg.cfg.d/quick"
        )
        yield host


def test_from_nothing_to_a_checkout_takes_four_commands(host: Host) -> None:
    commands = host.documented(BLOCKS[0])
    assert len(commands) <= 4
    for command in commands:
        printed = host.shell(command)
    assert printed.startswith(f"{STATE}/checkouts/")
    assert host.shell(f"cat {printed}/README") == "first"
    assert host.shell("mirrord --version") == f"mirrord {OLD}"
    assert (
        host.shell("stat -c '%a %U' /etc/mirrord /etc/mirrord/config.toml") == "750 root\n640 root"
    )


def test_a_member_gets_overlays_pages_and_completion(host: Host) -> None:
    """By the units of the package, which start its own environment."""
    host.shell("usermod -aG mirrord alice; mirrord dataset import /srv/upstreams/rows.jsonl")
    made = host.json("checkout", "psf__requests-9", user="alice")
    assert (made["backend"], made["owner_uid"]) == ("overlay", 12345)
    host.shell(f"echo mine >>{made['path']}/README", "alice")
    assert "+mine" in host.shell(f"mirrord diff {made['id']}", "alice")
    pages = host.shell("ls /usr/share/man/man1 | grep ^mirrord").split()
    assert {"mirrord.1.gz", "mirrord-mirror-add.1.gz", "mirrord-checkout.1.gz"} <= set(pages)
    host.shell("test -e /usr/share/doc/mirrord/docs/observability/alerts.yml")
    host.shell("test -e /usr/lib/systemd/user/mirrord.service")
    script = "source /usr/share/bash-completion/completions/mirrord; complete -p mirrord"
    assert "_mirrord_completion" in host.shell(f"bash -c '{script}'")
    words = {
        **ENV,
        "_MIRRORD_COMPLETE": "bash_complete",
        "COMP_WORDS": "mirrord ch",
        "COMP_CWORD": "1",
    }
    assert "plain,checkout" in host.machine.run("mirrord", env=words).stdout
    checks = {
        each["name"]: each for each in json.loads(host.shell("mirrord doctor --json || true"))
    }
    assert checks["systemd"]["verdict"] == "ok", checks["systemd"]


def test_an_upgrade_restarts_the_daemon_and_keeps_what_is_held(host: Host) -> None:
    """And the configuration that was changed, and what the administrator switched off."""
    (held,) = host.json("checkouts", user="alice")
    host.shell("echo '[sync]\ninterval = \"7h\"' >/etc/mirrord/config.toml")
    host.shell("systemctl disable --now mirrord-build.socket")
    before = host.pid()
    host.install(*host.new)
    assert host.pid() not in (0, before)
    assert host.json("status")["version"] == mirrord.__version__
    assert "+mine" in host.shell(f"mirrord diff {held['id']}", "alice")
    assert host.shell("cat /etc/mirrord/config.toml").endswith('"7h"')
    assert host.shell("systemctl is-enabled mirrord-build.socket || true") == "disabled"
    assert host.shell("systemctl is-active mirrord.socket mirrord-mount.socket") == "active\nactive"


def test_every_documented_command_runs_on_the_package(host: Host) -> None:
    """As root; a member does what needs no administrator, and a stranger nothing: they are refused."""
    before = host.shell("cat /etc/mirrord/config.toml; usermod -aG mirrord bob")
    host.shell("systemctl start mirrord-build.socket")
    offline = '[environments]\nindex = "/srv/wheels"\nnetwork = false'
    host.shell(f"echo '{offline}' >>/etc/mirrord/config.toml; mirrord config reload")
    root = host.bash()
    firstsession.prepare(root, "/srv/upstreams")
    for ran in firstsession.type_session(root, host.bases, owner="agent"):
        assert ran.status == 0, ran
    verbs: dict[str, set[int]] = {}
    for user in ("bob", "mallory"):
        shell = host.bash(user)
        for ran in firstsession.type_session(shell, host.bases):
            for verb in firstsession.verbs_of(ran):
                verbs.setdefault(f"{user} {verb}", set()).add(ran.status)
        shell.close()
    assert verbs == {
        f"{user} {verb}": statuses
        for user, of_user in firstsession.STATUSES.items()
        for verb, statuses in of_user.items()
    }
    owned = root.run("mirrord checkout psf__requests-v2.3.0 --owner agent").strip()
    owner = host.bash("agent")
    for command in ("cd {}", "git log -1", "echo x >x", "mirrord diff .", "mirrord receipt . >/dev/null",
                    "mirrord reset .", "cd .", "mirrord exec {} -- cat setup.py", "mirrord release {}"):  # fmt: skip
        owner.run(command.format(owned))
    assert owner.try_run("mirrord checkout psf__requests-v2.3.0").status == 3
    owner.close()
    root.run(
        "mirrord release $(mirrord checkouts --json | jq -r '.[] | select(.owner_uid != 12345) | .id')"
    )
    root.run(
        f"printf '%s\\n' '{before}' >/etc/mirrord/config.toml; mirrord config reload; kill $(cat /tmp/container)"
    )
    root.close()
    assert "Traceback" not in host.machine.journal("mirrord.service")


def test_a_removal_stops_everything_and_a_purge_keeps_the_state(host: Host) -> None:
    """An installation after that has its mirrors and checkouts again."""
    (held,) = host.json("checkouts", user="alice")
    host.shell("apt-get remove --yes mirrord")
    assert host.mounts() == []
    assert host.shell("systemctl list-units --plain --no-legend 'mirrord*' --state=active") == ""
    assert host.shell("ls /usr/lib/mirrord /run/mirrord/*.sock 2>/dev/null || true") == ""
    assert host.shell("cat /etc/mirrord/config.toml").endswith('"7h"')
    host.install(host.old)
    assert [each["id"] for each in host.json("checkouts", user="alice")] == [held["id"]]
    assert "+mine" in host.shell(f"mirrord diff {held['id']}", "alice")
    told = host.shell("apt-get purge --yes mirrord")
    assert f"kept the mirrors, pins and checkouts in {STATE}" in told
    assert host.shell("ls -d /etc/mirrord /run/mirrord 2>/dev/null || true") == ""
    assert host.shell("ls /etc/systemd/system/*/mirrord* 2>/dev/null || true") == ""
    assert host.shell(f"ls {STATE}/mirrors") == "psf__requests"


def test_it_installs_where_no_systemd_runs(host: Host) -> None:
    """As in a container: the daemon is started by hand, and everything can be taken away."""
    script = f"""
        mount -t tmpfs none /run
        mount -t tmpfs none {STATE}
        apt-get install --yes /srv/packages/{host.old}
        mirrord serve 2>/run/log &
        mirrord status --wait 60s >/dev/null
        mirrord mirror add psf/requests --url {host.url} >/dev/null
        mirrord checkout psf/requests@v2.3.0
        kill $!; wait $! || true
        apt-get purge --yes mirrord
    """
    told = host.machine.run("unshare", "--mount", "sh", "-ec", script, env=ENV, bound_s=300).stdout
    assert re.search(rf"(?m)^{STATE}/checkouts/\w+/tree$", told)
    assert f"kept the mirrors, pins and checkouts in {STATE}" in told


def test_a_wheel_sets_up_the_service_from_its_environment(host: Host) -> None:
    """By the documented commands; done again it is an upgrade; nothing of it stays but configuration and state."""
    for command in host.documented(BLOCKS[1]):
        host.shell(f"cd /srv/ours && {command}")
    made = host.json("checkout", "psf__requests-9", user="alice")
    assert made["backend"] == "overlay"
    started = host.shell("tr '\\0' ' ' </proc/$(systemctl show --value -p MainPID mirrord)/cmdline")
    assert started.startswith("/opt/mirrord/bin/python ")
    before = host.pid()
    host.shell("mirrord service install")
    assert host.pid() not in (0, before)
    told = host.shell("/opt/mirrord/bin/mirrord service uninstall")
    assert f"kept: /etc/mirrord/config.toml, {STATE}" in told
    assert host.mounts() == []
    left = (
        "ls -d /etc/systemd/system/mirrord* /etc/systemd/system/*/mirrord* /usr/local/bin/*mirrord"
    )
    assert host.shell(f"{left} /etc/*.d/mirrord.conf 2>/dev/null || true") == ""
    assert os.listdir(Path(f"/proc/{host.machine.leader}/root{STATE}/mirrors")) == ["psf__requests"]


OWN_DAEMON = """[upstream]
url = "file:///srv/upstreams/{owner}__{name}"
"""


def test_a_daemon_of_ones_own_does_the_same(host: Host) -> None:
    """Of an ordinary user with no login session, from wheels; root's from source is in tests/docs."""
    shell = host.bash("bob")
    shell.run(f"cat >config.toml <<'END'\n{OWN_DAEMON}END")
    script = '#!/bin/sh\\nexec /opt/mirrord/bin/mirrord "$@"\\n'
    shell.run(f"mkdir bin; printf '{script}' >bin/mirrord; chmod +x bin/mirrord")
    shell.run("export PATH=$PWD/bin:$PATH MIRRORD_CONFIG=$PWD/config.toml")
    shell.run("mirrord serve >/dev/null 2>log &")
    shell.run("mirrord status --wait 30s >status || { cat log; false; }")
    for ran in firstsession.type_session(shell, host.bases, is_short=True):
        assert ran.status == 0, ran
    shell.run("cd")
    assert shell.run("mirrord status --problems") == ""
    assert shell.run("mirrord exec psf__requests-v2.3.0 -- cat README 2>/dev/null") == "first\n"
    shell.run("kill %1; wait %1")
    shell.close()
