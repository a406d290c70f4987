"""The Debian packages under systemd: used, upgraded, removed, purged; and a wheel's service.

One machine is booted for the whole file; the tests run in order, each from where the last one left it. The commands are
those of docs/installation.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import firstsession
import installed
import pytest
from debian_host import BLOCKS, ENV, REASON, STATE, Host, booted, build

import mirrord

pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(600),
    pytest.mark.root,
    pytest.mark.release,
]

OLD = "0.0.9"
UNNEEDED = ("sqlalchemy/testing",)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mirrord-package-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def _packages(scratch: Path) -> Path:
    """Those of this tree, and that of an older release that has not all inside yet; answers the last."""
    directory = scratch / "packages"
    _, new = build(directory)
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
    return old


@pytest.fixture(scope="module")
def host(scratch: Path) -> Iterator[Host]:
    old = _packages(scratch)
    installed.wheels(scratch / "ours")
    (scratch / "opt").mkdir()
    binds = {"/srv/libraries": installed.LIBRARIES, "/srv/ours": scratch / "ours"}
    with booted(scratch, old.name, binds=binds, writable={"/opt": scratch / "opt"}) as host:
        yield host


def test_an_older_release_is_in_use(host: Host) -> None:
    for command in host.documented(BLOCKS[0]):
        host.shell(command)
    assert host.shell("mirrord --version") == f"mirrord {OLD}"
    host.shell("usermod -aG mirrord alice; mirrord dataset import /srv/upstreams/rows.jsonl")
    made = host.json("checkout", "psf__requests-9", user="alice")
    host.shell(f"echo mine >>{made['path']}/README", "alice")


def test_an_upgrade_restarts_the_daemon_and_keeps_what_is_held(host: Host) -> None:
    """And the configuration that was changed, and what the administrator switched off."""
    (held,) = host.json("checkouts", user="alice")
    host.shell("echo '[sync]\ninterval = \"7h\"' >/etc/mirrord/config.toml")
    host.shell("systemctl disable --now mirrord-build.socket")
    before = host.pid()
    host.install(
        f"mirrord_{mirrord.__version__}-1*.deb", f"mirrord-full_{mirrord.__version__}-1*.deb"
    )
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
    host.install(host.package)
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
        apt-get install --yes /srv/packages/{host.package}
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
