"""The units we ship, run by a real systemd: an ordinary user's checkouts, restarts, crashes, and who may do what.

One machine is booted for the whole file; the tests run in order and leave it as they found it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import installed
import nspawn
import pytest
from gitrepos import Upstream
from mount_table import mount_lines
from python_packages import recipe, wheel
from redteam.__main__ import ATTACKS

REASON = nspawn.why_not() or installed.why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(240),
    pytest.mark.root,
    pytest.mark.slow,
]

UNITS = Path(__file__).parents[2] / "systemd"
ATTACKERS = Path(__file__).parents[1] / "redteam"
STATE = "/var/lib/mirrord"
MIRRORD = "/opt/mirrord/bin/mirrord"
PYTHON = "/opt/mirrord/bin/python"
USER = {"HOME": "/tmp", "LC_ALL": "C.UTF-8"}
USERS = 'u alice 12345 "a member" /tmp\nm alice mirrord\nu mallory 12346 "a stranger" /tmp\n'
CONFIG = """
[access]
commits = "any"
bytes_per_user = "64MiB"
[web]
listen = "127.0.0.1:8780"
[upstream]
url = "file:///srv/upstreams/{owner}__{name}"
[sync]
interval = "24h"
[docker]
volumes = true
[environments]
index = "/srv/upstreams/packages"
network = false
"""
# Asks until told to stop, each time on a new connection; every failure is a line.
ASKER = """
import os, socket, time
answers, failures = 0, []
while answers < 20 or not os.path.exists('/tmp/stop'):
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(30)
            s.connect('/run/mirrord/mirrord.sock')
            s.sendall(b'GET /v1/checkouts HTTP/1.1\\r\\nhost: m\\r\\nconnection: close\\r\\n\\r\\n')
            status = s.makefile('rb').readline()
        answers += status.startswith(b'HTTP/1.1 200')
        if not status.startswith(b'HTTP/1.1 200'):
            failures.append(repr(status))
    except OSError as error:
        failures.append(repr(error))
    time.sleep(0.005)
print(answers, len(failures), failures[:3])
"""
# The capabilities of a process that starts git as the daemon does, and of what git starts.
CAPABILITIES = """
import anyio
from pathlib import Path
from mirrord.git.command import Git
async def main():
    show, mirror = "alias.capabilities=!grep CapEff /proc/self/status", Path("/var/lib/mirrord/mirrors/psf__requests")
    done = await Git(home=Path("/tmp")).run("-c", show, "capabilities", git_dir=mirror)
    Path("/tmp/capabilities").write_text(Path("/proc/self/status").read_text() + done.stdout.decode())
anyio.run(main)
"""


class Host:
    """The booted machine with the daemon on it."""

    def __init__(self, machine: nspawn.Machine, commits: list[str]) -> None:
        self.machine = machine
        self.commits = commits

    def mirrord(
        self, *args: str, user: str | None = "alice", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return self.machine.run(MIRRORD, *args, user=user, env=USER, check=check)

    def json(self, *args: str, user: str | None = "alice") -> Any:
        return json.loads(self.mirrord(*args, "--json", user=user).stdout)

    def shell(self, script: str, user: str | None = "alice", *, check: bool = True) -> str:
        return self.machine.run("sh", "-c", script, user=user, env=USER, check=check).stdout.rstrip(
            "\n"
        )

    def pid(self, unit: str = "mirrord.service") -> int:
        return int(self.machine.show(unit, "MainPID"))

    def wait_for_another(self, pid: int, unit: str = "mirrord.service") -> None:
        nspawn.wait_until(lambda: self.pid(unit) not in (0, pid), f"{unit} runs again")
        nspawn.wait_until(
            lambda: self.machine.show(unit, "ActiveState") == "active", f"{unit} is ready"
        )


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mirrord-boot-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def _units(directory: Path) -> Path:
    """The units as they are, enabled."""
    directory.mkdir()
    for unit in [*UNITS.glob("*.service"), *UNITS.glob("*.socket")]:
        shutil.copy(unit, directory)
    for target, names in {
        "multi-user.target": ["mirrord.service"], "sockets.target": ["mirrord.socket", "mirrord-mount.socket", "mirrord-docker.socket", "mirrord-build.socket"],
    }.items():  # fmt: skip
        wants = directory / f"{target}.wants"
        wants.mkdir()
        for name in names:
            (wants / name).symlink_to(f"../{name}")
    return directory


def _directory(path: Path, files: dict[str, str]) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def host(scratch: Path) -> Iterator[Host]:
    upstream = Upstream(scratch / "upstreams" / "psf__requests")
    commits = [
        upstream.commit({"README": f"{n}\n", "src/main.py": "print(1)\n", "docs/a.txt": "a\n"})
        for n in (1, 2)
    ]
    wheel(scratch / "upstreams" / "packages", "tiny", "1.0", {"tiny.py": "x = 1\n"})
    installed.install(scratch / "environment")
    (scratch / "state").mkdir()
    binds = {
        "/opt/mirrord": scratch / "environment",
        installed.LIBRARIES_INSIDE: installed.LIBRARIES,
        "/srv/upstreams": scratch / "upstreams",
        "/opt/attacks/redteam": ATTACKERS,
        "/opt/attacks/mount_table.py": ATTACKERS.parent / "support/mount_table.py",
        "/run/systemd/system": _units(scratch / "units"),
        "/run/sysusers.d": _directory(
            scratch / "sysusers",
            {"mirrord.conf": (UNITS / "mirrord.sysusers").read_text(), "users.conf": USERS},
        ),
        "/run/tmpfiles.d": _directory(
            scratch / "tmpfiles", {"mirrord.conf": (UNITS / "mirrord.tmpfiles").read_text()}
        ),
        "/etc/mirrord": _directory(scratch / "etc", {"config.toml": CONFIG}),
    }
    (scratch / "etc").chmod(0o750)
    with nspawn.booted(scratch, binds=binds, writable={STATE: scratch / "state"}) as machine:
        host = Host(machine, commits)
        host.mirrord("mirror", "add", "psf/requests", user=None)
        yield host


@pytest.fixture(scope="module")
def checkout(host: Host) -> dict[str, Any]:
    """A checkout of alice's, of the first commit; it is held to the end."""
    made: dict[str, Any] = host.json("checkout", f"psf/requests@{host.commits[0]}")
    return made


def test_the_units_start_and_say_that_they_are_ready(host: Host) -> None:
    """Type=notify: active means that READY was heard; the daemon is not root, and mounts all the same."""
    assert host.machine.show("mirrord.service", "ActiveState") == "active"
    assert host.machine.show("mirrord.service", "StatusText")
    status = host.json("status", user=None)
    assert (status["backend"], status["uid"] != 0, status["health"]["status"]) == (
        "overlay",
        True,
        "ok",
    ), host.machine.journal()


def test_a_user_sees_writes_and_resets_an_overlay_checkout(
    host: Host, checkout: dict[str, Any]
) -> None:
    """The mount is seen outside of the daemon's namespace, and every file in it is the user's."""
    path = checkout["path"]
    assert checkout["backend"] == "overlay"
    assert host.shell(
        f"cat {path}/README; stat -c %u {path} {path}/README {path}/.git {path}/src"
    ) == "1\n" + "\n".join(["12345"] * 4)
    assert (
        host.shell(f"git -C {path} status --porcelain; git -C {path} log --format=%H")
        == host.commits[0]
    )
    host.shell(
        f"cd {path} && echo mine > README && rm -r docs && mkdir new && echo x > new/x && chmod 000 new && git add README"
    )
    patch = host.mirrord("diff", checkout["id"]).stdout
    assert "+mine" in patch
    assert "docs/a.txt" in patch
    answer = host.json("reset", checkout["id"])
    assert answer["proof"]["head"] == host.commits[0]
    assert (
        host.shell(f"cd {path} && cat README docs/a.txt && git status --porcelain --ignored && ls")
        == "1\na\nREADME\ndocs\nsrc"
    )
    host.mirrord("reset", checkout["id"], host.commits[1])
    assert host.shell(f"cat {path}/README") == "2"
    host.mirrord("reset", checkout["id"], host.commits[0])


def test_a_released_checkout_leaves_nothing(host: Host) -> None:
    """What a user wrote, with modes that shut others out, is removed by a daemon that is not root."""
    made = host.json("checkout", f"psf/requests@{host.commits[0]}")
    host.shell(f"cd {made['path']} && mkdir -p a/b && echo x > a/b/c && chmod 000 a/b/c a/b a")
    host.mirrord("release", made["id"])
    nspawn.wait_until(
        lambda: made["id"] not in host.shell(f"ls -A {STATE}/checkouts", None),
        "it is removed",
        bound_s=20,
    )
    assert not any(made["id"] in line for line in mount_lines(host.machine.leader))


def test_a_user_attaches_a_checkout_that_the_mount_service_gives(host: Host) -> None:
    """In a namespace of the user's own, where it follows a reset that is asked for outside."""
    made = host.json("checkout", f"psf/requests@{host.commits[0]}")
    script = (
        f"set -e; mkdir /tmp/at; {MIRRORD} attach {made['id']} /tmp/at >/dev/null; cd /; "
        "cat /tmp/at/README; touch /tmp/attached;"
        " until [ -e /tmp/moved ]; do sleep 0.05; done; cat /tmp/at/README; echo mine >/tmp/at/README"
    )
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    inside = host.machine.start(*enter, user="alice", env=USER)
    nspawn.wait_until(
        lambda: inside.poll() is not None or host.shell("ls /tmp/attached", check=False), "attached"
    )
    assert inside.poll() is None, inside.communicate()
    host.mirrord("reset", made["id"], host.commits[1])
    host.shell("touch /tmp/moved")
    out, err = inside.communicate(timeout=60)
    assert out == "1\n2\n", err
    assert "+mine" in host.mirrord("diff", made["id"]).stdout
    host.mirrord("release", made["id"])


def test_a_unit_that_binds_a_checkouts_directory_follows_its_resets(host: Host) -> None:
    """`BindPaths=` is recursive, and units are slaves of the host's mounts."""
    made = host.json("checkout", f"psf/requests@{host.commits[0]}")
    host.machine.run(
        *("systemd-run", "--unit=follower", "--uid=alice", "--property=PrivateTmp=yes"),
        "--property=Type=exec",  # returns when its mounts are made
        *(f"--property=BindPaths={made['directory']}:/mnt", "sleep", "1000"),
    )
    become = ["setpriv", "--reuid=alice", "--regid=alice", "--clear-groups"]
    within = ["nsenter", "--mount", "--target", str(host.pid("follower.service")), *become]
    assert host.machine.run(*within, "cat", "/mnt/tree/README").stdout == "1\n"
    host.mirrord("reset", made["id"], host.commits[1])
    assert host.machine.run(*within, "cat", "/mnt/tree/README").stdout == "2\n"
    host.machine.run(*within, "sh", "-c", "echo mine >/mnt/tree/README")
    assert "+mine" in host.mirrord("diff", made["id"]).stdout
    host.machine.run("systemctl", "stop", "follower")
    host.mirrord("release", made["id"])


@pytest.mark.timeout(600)
def test_no_attack_from_outside_succeeds(host: Host) -> None:
    """As a stranger, a member, the owner of a checkout, and root of a container."""
    env = {**USER, "PYTHONPATH": "/opt/attacks", "PYTHONDONTWRITEBYTECODE": "1"}
    words = (PYTHON, "-m", "redteam", "--mirrord", MIRRORD)
    done = host.machine.run(*words, env=env, check=False, bound_s=400)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr + host.machine.journal("mirrord.service")
    assert len(lines) == len(ATTACKS)
    assert [line for line in lines if not line.startswith("held")] == []
    assert "nothing ran" not in done.stdout


def test_the_pool_serves_other_users_too(host: Host) -> None:
    """The daemon's capabilities are enough to give files away, and to take them back."""
    made = host.json("checkout", f"psf/requests@{host.commits[0]}", "--backend", "pool")
    assert made["backend"] == "pool"
    host.shell(f"cd {made['path']} && rm README && mkdir x && chmod 000 x")
    assert host.json("reset", made["id"])["proof"]["head"] == host.commits[0]
    assert host.shell(f"cat {made['path']}/README; stat -c %u {made['path']}/README") == "1\n12345"
    host.mirrord("release", made["id"])


def test_trees_that_were_kept_warm_are_gone_after_a_restart(host: Host) -> None:
    """What the pool keeps for the next checkout is rubbish to the next daemon, whichever backend made it."""
    warm = f"ls -A {STATE}/checkouts | grep -v -x '[a-z2-7]*'"
    assert host.shell(warm, None, check=False)
    host.machine.run("systemctl", "restart", "mirrord")
    nspawn.wait_until(lambda: not host.shell(warm, None, check=False), "they are removed")


def test_root_gets_a_checkout_that_the_mount_service_would_not_make(host: Host) -> None:
    """The mount service never shows files as root's, so that the pool serves root."""
    made = host.json("checkout", f"psf/requests@{host.commits[0]}", user=None)
    assert (made["backend"], made["owner_uid"]) == ("pool", 0)
    host.mirrord("release", made["id"], user=None)


def test_a_directory_that_systemd_run_binds_follows_resets(
    host: Host, checkout: dict[str, Any]
) -> None:
    """In a service of the agent's uid, with a mount namespace of its own."""
    tree, seen = "/run/task/tree", "/tmp/seen-by-agent"
    script = f"""cd {tree} && echo junk > junk && touch {seen}.1
        until [ -e {seen}.2 ]; do sleep 0.02; done; cd {tree} && ls > {seen}.3 && echo work > new"""
    bind = f"--property=BindPaths={checkout['directory']}:/run/task"
    options = ("--unit=agent", "--uid=alice", bind, "sh", "-c", script)
    host.machine.run("systemd-run", "--quiet", *options)
    nspawn.wait_until(lambda: host.shell(f"ls {seen}.1", check=False) != "", "the agent works")
    host.mirrord("reset", checkout["id"])
    host.shell(f"touch {seen}.2")
    ended = "systemctl is-active agent || true"
    nspawn.wait_until(lambda: host.shell(ended, None) == "inactive", "the agent ends")
    assert host.shell(f"cat {seen}.3; rm {seen}.*") == "README\ndocs\nsrc"
    assert "+work" in host.mirrord("diff", checkout["id"]).stdout
    host.mirrord("reset", checkout["id"])


def test_volumes_are_served_at_a_socket_of_root_only(host: Host) -> None:
    """The daemon, which is not root, takes that socket from systemd."""
    ask = "curl -sS --unix-socket /run/docker/plugins/mirrord.sock http://d/VolumeDriver"
    made = f'{{"Name": "task", "Opts": {{"instance": "psf/requests@{host.commits[0]}"}}}}'
    assert host.shell(f"{ask}.List -d '{{}}' || echo refused") == "refused"
    assert json.loads(host.shell(f"{ask}.Create -d '{made}'", None)) == {"Err": ""}
    answer = json.loads(host.shell(f'{ask}.Mount -d \'{{"Name": "task", "ID": "a"}}\'', None))
    assert host.shell(f"cat {answer['Mountpoint']}/README", None) == "1"
    host.shell(f'{ask}.Remove -d \'{{"Name": "task"}}\'', None)


def test_an_environment_is_built_by_a_unit_of_its_own(host: Host) -> None:
    """The daemon may make no namespace; the unit may, as a user of its own, and root builds too."""
    host.shell(f"cat >/tmp/recipes.toml <<'END'\n{recipe('k', 'tiny')}END", None)
    host.mirrord("environment", "import", "/tmp/recipes.toml", user=None)
    done = host.mirrord("environment", "build", "k", user=None, check=False)
    assert done.returncode == 0, host.mirrord("environment", "log", "k", user=None).stdout
    found = host.json("environment", "show", "k")
    prefix = f"{STATE}/templates/.environments/{found['digest']}/files"
    assert host.shell(f"cat {prefix}/lib/python3.11/site-packages/tiny.py", None) == "x = 1"
    assert host.shell(f"stat -c %U {prefix}", None) == "mirrord"
    assert "mirrord-build@" in host.shell("journalctl --unit='mirrord-build@*' -o short", None)


def test_a_checkout_is_found_again_after_a_restart(host: Host, checkout: dict[str, Any]) -> None:
    """The mount, what was written, and the lease outlive the daemon, whether it was asked to stop or killed."""
    path = checkout["path"]
    host.shell(f"echo mine > {path}/README")
    for stop in (
        ["systemctl", "restart", "mirrord"],
        ["systemctl", "kill", "--signal=KILL", "mirrord"],
    ):
        before = host.pid()
        host.machine.run(*stop)
        host.wait_for_another(before)
        assert host.shell(f"cat {path}/README") == "mine"
        assert [each["id"] for each in host.json("checkouts")] == [checkout["id"]]
    host.mirrord("reset", checkout["id"])
    assert host.shell(f"cat {path}/README") == "1"


def test_requests_through_restarts_see_no_error(host: Host) -> None:
    """PID 1 holds the socket: who asks while nobody serves waits a moment."""
    asker = host.machine.start("/opt/mirrord/bin/python", "-c", ASKER, user="alice", env=USER)
    for _ in range(2):
        host.machine.run("systemctl", "restart", "mirrord")
    host.shell("touch /tmp/stop", None)
    output, errors = asker.communicate(timeout=60)
    host.shell("rm /tmp/stop", None)
    assert (output.split()[1], errors) == ("0", ""), output


def test_the_mount_service_may_be_killed(host: Host, checkout: dict[str, Any]) -> None:
    """It keeps nothing: the next request finds another one, and mounts stay."""
    unit = "mirrord-mount.service"
    before = host.pid(unit)
    host.machine.run("systemctl", "kill", "--signal=KILL", unit)
    assert host.shell(f"cat {checkout['path']}/README") == "1"
    host.wait_for_another(before, unit)
    host.mirrord("reset", checkout["id"])
    assert host.shell(f"cat {checkout['path']}/README") == "1"


HOLDER = """
import mirrord, os, time
with mirrord.Client() as client, client.checkout("psf/requests@main", bind="process") as one:
    print(one.id, os.getpid(), flush=True)
    time.sleep(1000)
"""


def test_a_lease_ends_with_its_process_through_a_restart(host: Host) -> None:
    """The daemon sees no /proc of other users (ProtectProc), and knows the process by its pidfd all the same."""
    holder = host.machine.start("/opt/mirrord/bin/python", "-c", HOLDER, user="alice", env=USER)
    assert holder.stdout is not None
    held, pid = holder.stdout.readline().split()
    before = host.pid()
    host.machine.run("systemctl", "restart", "mirrord")
    host.wait_for_another(before)
    assert held in host.mirrord("checkouts").stdout
    host.shell(f"kill -KILL {pid}")
    holder.communicate()
    nspawn.wait_until(
        lambda: held not in host.mirrord("checkouts").stdout, "the lease has ended", bound_s=5
    )


def test_a_subordinate_uid_gets_an_overlay_and_no_socket(host: Host) -> None:
    """Alice hands a checkout to a uid of hers, by the mount service and by newuidmap; it cannot ask the daemon."""
    host.shell("echo alice:200000:65536 | tee /etc/subuid > /etc/subgid", user=None)
    made = host.json("checkout", f"psf/requests@{host.commits[0]}", "--owner", "200001")
    assert (made["backend"], made["owner_uid"], made["owner_gid"]) == ("overlay", 200001, 200001)
    host.mirrord("release", made["id"])
    script = "id -u; id -G; echo more >> README; ! ls -d /run/mirrord 2>/dev/null"
    ran = host.mirrord(
        "exec", f"psf/requests@{host.commits[0]}", "--owner", "200001", "--", "sh", "-c", script
    )
    assert ran.stdout.splitlines() == ["200001", "200001"]


def test_strangers_are_refused(host: Host, checkout: dict[str, Any]) -> None:
    """Who is not in the group gets exit status 3; nobody but the daemon's user reaches the mount service or the state."""
    refused = host.mirrord("checkout", "psf/requests@HEAD", user="mallory", check=False)
    assert (refused.returncode, "not" in refused.stderr or "cannot" in refused.stderr) == (
        3,
        True,
    ), refused.stderr
    connect = "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect('/run/mirrord/mount.sock')"
    for user in ("alice", "mallory"):
        done = host.machine.run(
            "/opt/mirrord/bin/python", "-c", connect, user=user, env=USER, check=False
        )
        assert "PermissionError" in done.stderr
        assert (
            host.shell(
                f"ls {STATE}/templates {STATE}/mirrors {STATE}/leases {STATE}/checkouts 2>/dev/null",
                user,
                check=False,
            )
            == ""
        )
    assert host.shell(f"ls {STATE}/checkouts/{checkout['id']}/layer 2>/dev/null", check=False) == ""


def test_the_daemon_and_the_mount_service_are_confined(host: Host) -> None:
    """The daemon cannot write outside its state, nor mount; the mount service has no network."""
    status = Path(f"/proc/{_outside(host, host.pid())}/status").read_text()
    effective = next(
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")
    )
    assert not effective >> 21 & 1
    mounts = "\n".join(mount_lines(_outside(host, host.pid())))
    assert any(
        line.split()[4] == "/usr" and "ro," in line.split()[5] + "," for line in mounts.splitlines()
    )
    service = _outside(host, host.pid("mirrord-mount.service"))
    assert (
        Path(f"/proc/{service}/ns/mnt").readlink()
        == Path(f"/proc/{host.machine.leader}/ns/mnt").readlink()
    )
    assert (
        Path(f"/proc/{service}/ns/net").readlink()
        != Path(f"/proc/{host.machine.leader}/ns/net").readlink()
    )


def test_git_gets_no_capability_of_the_daemons(host: Host) -> None:
    """What git parses comes from upstream: it has no more rights than any user's process."""
    caps = "+chown,+dac_override"
    become = [
        "setpriv",
        "--reuid=mirrord",
        "--regid=mirrord",
        "--clear-groups",
        f"--inh-caps={caps}",
        f"--ambient-caps={caps}",
    ]
    host.machine.run(*become, "/opt/mirrord/bin/python", "-c", CAPABILITIES)
    own, of_git = (
        line.split()[1] for line in host.shell("grep CapEff /tmp/capabilities", None).splitlines()
    )
    assert int(own, 16) != 0
    assert int(of_git, 16) == 0


def _outside(host: Host, inside: int) -> int:
    """The process id here of a process that has `inside` there."""
    namespace = Path(f"/proc/{host.machine.leader}/ns/pid").readlink()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            ids = next(
                line
                for line in (entry / "status").read_text().splitlines()
                if line.startswith("NSpid:")
            ).split()
            if ids[-1] == str(inside) and (entry / "ns/pid").readlink() == namespace:
                return int(entry.name)
        except (OSError, StopIteration):
            continue
    raise AssertionError(f"no process {inside} there")


def test_what_clients_write_is_bound_before_the_daemon_starts(host: Host) -> None:
    """By the part that mounts; the configuration is closed to a member, and the daemon reads it all the same."""
    for name in ("checkouts", "leases"):
        found = host.shell(
            f"findmnt --noheadings --output OPTIONS,PROPAGATION --mountpoint {STATE}/{name}", None
        )
        assert {"nosuid", "nodev"} <= {*found.split()[0].split(",")}, found
        assert "shared" in found
    assert "Permission denied" in host.shell("cat /etc/mirrord/config.toml 2>&1", check=False)


def test_the_journal_is_json(host: Host) -> None:
    """Every line of the daemon is one object with its event, for whoever reads the journal by program."""
    lines = host.machine.run(
        "journalctl", "--output=cat", "--no-pager", "_SYSTEMD_UNIT=mirrord.service"
    ).stdout.splitlines()
    assert lines
    assert [line for line in lines if not line.startswith("{")] == []
    assert all("event" in json.loads(line) for line in lines)


def test_the_journal_knows_how_bad_a_line_is(host: Host) -> None:
    """By the unit's name and the line's level, not by `python` and 6 for all."""
    host.mirrord("mirror", "add", "no/such", user=None, check=False)
    shown = ["journalctl", "--no-pager", "--identifier=mirrord", "--output=cat"]
    warnings = host.machine.run(*shown, "--priority=warning").stdout
    assert "mirror.failed" in warnings
    assert "daemon.started" not in warnings
    assert "daemon.started" in host.machine.run(*shown).stdout
    host.mirrord("mirror", "remove", "no/such", user=None)


def test_the_doctor_and_a_support_bundle_know_the_units(host: Host) -> None:
    """Enabled, of this release; and what the daemon and the mount service wrote to the journal."""
    found = host.mirrord("doctor", "--json", user=None, check=False).stdout
    checks = {check["name"]: check for check in json.loads(found)}
    assert (checks["systemd"]["verdict"], checks["drop-ins"]["verdict"]) == ("ok", "ok")
    assert "enabled" in checks["systemd"]["fact"]
    assert [name for name, check in checks.items() if check["verdict"] == "fail"] == []
    host.mirrord("doctor", "--report", "/run/bundle.tar.gz", user=None)
    journal = host.shell("tar xzOf /run/bundle.tar.gz mirrord-support/journal.jsonl", None)
    lines = [json.loads(line) for line in journal.splitlines()]
    events = {line["message"]["event"] for line in lines if isinstance(line["message"], dict)}
    assert {"daemon.started", "mirror.synced"} <= events
    assert "mirrord-mount.service" in {line["unit"] for line in lines}


def test_a_reload_of_a_bad_configuration_fails(host: Host, scratch: Path) -> None:
    """In the words of `mirrord config reload`, and the daemon goes on as it is."""
    before = host.pid()
    file = scratch / "etc" / "config.toml"
    try:
        file.write_text(f"{CONFIG}[checkouts]\nmax = 0\n")
        assert host.machine.run("systemctl", "reload", "mirrord", check=False).returncode != 0
        assert "checkouts.max: must be greater than or equal to 1" in host.machine.journal(
            "mirrord.service"
        )
    finally:
        file.write_text(CONFIG)
    host.machine.run("systemctl", "reload", "mirrord")
    assert host.pid() == before


def test_stopping_the_socket_stops_the_daemon_for_good(host: Host) -> None:
    """A client does not start it again, as it does after `systemctl stop mirrord.service`."""
    host.machine.run("systemctl", "stop", "mirrord.socket")
    assert host.mirrord("status", user=None, check=False).returncode == 9
    assert host.machine.show("mirrord.service", "ActiveState") == "inactive"
    host.machine.run("systemctl", "start", "mirrord.socket")
    assert host.json("status", user=None)["health"]["status"] == "ok"


def test_a_daemon_that_hangs_is_restarted(host: Host, checkout: dict[str, Any]) -> None:
    """The watchdog kills it, systemd starts another, and the checkout is still there."""
    drop_in = "/etc/systemd/system/mirrord.service.d"
    fast = "[Service]\nWatchdogSec=2s\nTimeoutAbortSec=1s\n"
    host.shell(
        f"mkdir -p {drop_in} && printf '{fast}' > {drop_in}/fast.conf && systemctl daemon-reload",
        None,
    )
    host.machine.run("systemctl", "restart", "mirrord")
    before = host.pid()
    host.machine.run("systemctl", "kill", "--signal=STOP", "mirrord")
    host.wait_for_another(before)
    assert "watchdog" in host.machine.journal("mirrord.service").lower()
    assert [each["id"] for each in host.json("checkouts")] == [checkout["id"]]
    host.shell(f"rm -r {drop_in} && systemctl daemon-reload", None)
