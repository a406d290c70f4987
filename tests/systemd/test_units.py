"""The unit files we ship, as systemd's own tools see them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"

needs_analyze = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not on this machine"
)


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units, with programs that exist here: verify looks for them."""
    for unit in [*UNITS.glob("*.service"), *UNITS.glob("*.socket")]:
        (tmp_path / unit.name).write_text(
            unit.read_text().replace("/opt/mirrord/bin/python", "/bin/true")
        )
    return sorted(tmp_path.iterdir())


@needs_analyze
def test_units_verify_with_nothing_to_say(units: list[Path]) -> None:
    """systemd-analyze exits 0 on unknown keys: only an empty stderr is a pass."""
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, units)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_analyze
@pytest.mark.parametrize(
    ("name", "threshold"),
    [("mirrord.service", 21), ("mirrord-mount.service", 42), ("mirrord-build@.service", 45)],
)
def test_the_services_are_confined(units: list[Path], name: str, threshold: int) -> None:
    """What faces clients and the network may do little beyond its own files; what mounts can be confined less."""
    service = next(unit for unit in units if unit.name == name)
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={threshold}",
        str(service),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_daemon_that_waits_for_its_catalog_is_started_again_for_ever() -> None:
    """It ends with status 7 while PostgreSQL is away."""
    lines = (UNITS / "mirrord.service").read_text().splitlines()
    assert {"Restart=on-failure", "StartLimitIntervalSec=0"} <= {*lines}
    (never,) = (line for line in lines if line.startswith("RestartPreventExitStatus="))
    assert "7" not in never.partition("=")[2].split()


def test_what_mounts_stays_in_the_mount_namespace_of_its_clients() -> None:
    """Each of these gives a service a namespace of its own, whose mounts nobody else sees (systemd.exec(5))."""
    private: tuple[str, ...] = (
        "ProtectSystem",
        "ProtectHome",
        "ProtectKernel",
        "ProtectControl",
        "ProtectProc",
        "ProcSubset",
        "PrivateTmp",
        "PrivateDevices",
        "PrivateMounts",
        "PrivateUsers",
        "PrivateIPC",
        "ReadOnly",
        "ReadWrite",
    )
    private += (
        "Inaccessible",
        "NoExec",
        "ExecPaths",
        "TemporaryFileSystem",
        "Bind",
        "Mount",
        "Root",
        "DynamicUser",
        "StateDirectory",
    )
    lines = (UNITS / "mirrord-mount.service").read_text().splitlines()
    assert [line for line in lines if line.startswith(private)] == []


def test_no_service_has_what_filters_cannot_see_into() -> None:
    """io_uring is past the reach of the filter; neither keys nor userfaultfd are needed by anything here."""
    for service in UNITS.glob("*.service"):
        lines = service.read_text().splitlines()
        denied = {
            call
            for line in lines
            if line.startswith("SystemCallFilter=~")
            for call in line.partition("~")[2].split()
        }
        assert {"@aio", "@keyring", "userfaultfd"} <= denied, service.name


def test_what_may_hold_passwords_is_closed_to_members() -> None:
    """The configuration's directory; the daemon itself reads it by capability."""
    assert "ConfigurationDirectoryMode=0750" in (UNITS / "mirrord.service").read_text().splitlines()
    (line,) = [
        line
        for line in (UNITS / "mirrord.tmpfiles").read_text().splitlines()
        if "/etc/mirrord" in line
    ]
    assert line.split()[2:5] == ["0750", "root", "root"]


def test_what_mounts_is_there_before_the_daemon() -> None:
    """It binds directories nosuid,nodev, which nobody shall have opened before; without it the daemon starts all the same."""
    lines = (UNITS / "mirrord.service").read_text().splitlines()
    for key in ("Wants=", "After="):
        assert any(
            line.startswith(key) and "mirrord-mount.service" in line.split() for line in lines
        )
    assert "Type=notify" in (UNITS / "mirrord-mount.service").read_text().splitlines()


@pytest.mark.skipif(
    not shutil.which("systemd-sysusers"), reason="systemd-sysusers is not on this machine"
)
def test_the_user_fragment_is_understood(tmp_path: Path) -> None:
    """sysusers makes the user in an empty root."""
    (tmp_path / "etc").mkdir()
    command = ["systemd-sysusers", f"--root={tmp_path}", str(UNITS / "mirrord.sysusers")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mirrord:x:" in (tmp_path / "etc/passwd").read_text()
    assert "mirrord:x:" in (tmp_path / "etc/group").read_text()


def test_the_socket_is_named_and_open_to_connect() -> None:
    """Access is decided per request, so that a refusal can say what to do."""
    text = (UNITS / "mirrord.socket").read_text()
    assert "ListenStream=/run/mirrord/mirrord.sock" in text
    assert "SocketMode=0666" in text
