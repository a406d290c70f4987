"""What the doctor reads from systemd's files, and from git's version."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mirrord import __version__
from mirrord.config import Settings
from mirrord.doctor import host, units

_UNIT = "[Service]\nExecStart={}\n[Install]\nWantedBy=multi-user.target\n"


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of /etc/systemd/system."""
    monkeypatch.setattr("mirrord.doctor.units.RUNNING", tmp_path)
    monkeypatch.setattr("mirrord.doctor.units.PLACES", [tmp_path])
    monkeypatch.setattr("mirrord.doctor.units.SHIPPED", [])
    return tmp_path


def _install(etc: Path, program: str = "/bin/true") -> None:
    for name in ("mirrord.service", "mirrord-mount.service"):
        (etc / name).write_text(_UNIT.format(program))


def test_units_are_there_enabled_and_start_something(etc: Path) -> None:
    assert units.units(Settings()) == ("ok", "none is installed", "")
    _install(etc)
    assert units.units(Settings())[:2] == ("warn", f"2 of 7 in {etc}, not enabled")
    (etc / "multi-user.target.wants").mkdir()
    (etc / "multi-user.target.wants" / "mirrord.service").symlink_to(etc / "mirrord.service")
    assert units.units(Settings())[0] == "ok"
    (etc / "mirrord-mount.service").unlink()
    assert "without the mount service" in units.units(Settings())[1]
    _install(etc, "/opt/gone/bin/python")
    verdict, fact, _ = units.units(Settings())
    assert (verdict, "/opt/gone/bin/python, which does not exist" in fact) == ("fail", True)


def test_units_of_another_release_are_told(
    etc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever their programs are."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    _install(shipped, "/opt/mirrord/bin/python")
    _install(etc)
    monkeypatch.setattr("mirrord.doctor.units.SHIPPED", [shipped])
    (etc / "multi-user.target.wants").mkdir()
    (etc / "multi-user.target.wants" / "mirrord.service").symlink_to(etc / "mirrord.service")
    assert units.units(Settings())[0] == "ok"
    with (etc / "mirrord.service").open("a") as file:
        file.write("NoNewPrivileges=no\n")
    verdict, fact, _ = units.units(Settings())
    assert (verdict, f"not those of mirrord {__version__}: {etc}/mirrord.service" in fact) == (
        "warn",
        True,
    )


@pytest.mark.parametrize(
    ("unit", "text", "verdict"),
    [
        ("mirrord.service", "[Service]\nPrivateTmp=yes\n", "ok"),
        ("mirrord-mount.service", "[Service]\nMemoryMax=1G\n", "ok"),
        ("mirrord-mount.service", "[Service]\nPrivateTmp=no\n", "ok"),
        ("mirrord-mount.service", "[Service]\nProtectSystem=strict\n", "fail"),
        ("mirrord.service", "[Service]\nExecStart=\nExecStart=/opt/old/bin/python -m x\n", "fail"),
        ("mirrord-old.service", "[Service]\nMemoryMax=1G\n", "warn"),
    ],
)
def test_a_drop_in_that_breaks_something_is_named(
    etc: Path, unit: str, text: str, verdict: str
) -> None:
    _install(etc)
    path = etc / f"{unit}.d" / "local.conf"
    path.parent.mkdir()
    path.write_text(text)
    found, fact, _ = units.drop_ins(Settings())
    assert (found, str(path) in fact) == (verdict, True)


@pytest.mark.parametrize(
    ("version", "package", "verdict"),
    [
        ("2.38.1", None, "warn"),
        ("2.39.5", None, "ok"),
        ("2.39.3", None, "warn"),
        ("2.39.2", "2.39.2-1+deb12u9", "ok"),
        ("2.45.0.rc1", None, "warn"),
        ("2.45.1", None, "ok"),
        ("2.46", None, "ok"),
        ("2.55.0.windows.5", None, "ok"),
    ],
)
def test_a_git_with_known_faults_is_told_unless_its_distribution_mends_it(
    monkeypatch: pytest.MonkeyPatch, version: str, package: str | None, verdict: str
) -> None:
    answer = SimpleNamespace(stdout=f"git version {version}\n".encode())
    monkeypatch.setattr("mirrord.doctor.host.run_git_sync", lambda *_: answer)
    monkeypatch.setattr("mirrord.doctor.host._git_package", lambda: package)
    assert host.git(Settings())[0] == verdict


def test_the_distributions_git_is_known() -> None:
    """By dpkg's own list, which names its revision."""
    if not Path("/var/lib/dpkg/info/git.list").exists():
        pytest.skip("git is no Debian package here")
    assert "-" in str(host._git_package())
