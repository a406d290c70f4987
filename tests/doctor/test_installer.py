"""What `service install` would do, and where it refuses; tests/packaging/test_package.py does it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from mirrord.cli.main import run
from mirrord.doctor import installer
from mirrord.doctor.units import NAMES
from mirrord.errors import AccessError, ResourceError

pytestmark = pytest.mark.root
SOURCE = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment as units want it, but for where it is."""
    for directory in (tmp_path.parent, tmp_path):
        directory.chmod(0o755)
    made = tmp_path / "environment"
    (made / "bin").mkdir(parents=True)
    (made / "bin/python").symlink_to("/usr/bin/python3")
    return made


def test_every_unit_starts_the_environment_that_it_is_installed_from() -> None:
    for name in NAMES:
        text = installer.render_unit((SOURCE / "systemd" / name).read_text(), Path("/srv/m"))
        programs = re.findall(r"(?m)^Exec\w+=(\S+)", text)
        assert set(programs) <= {"/srv/m/bin/python"}
        assert bool(programs) == name.endswith(".service")
    assert {path.name for path in (SOURCE / "systemd").iterdir()} == {
        *NAMES,
        *("mirrord.sysusers", "mirrord.tmpfiles"),
    }


@pytest.mark.parametrize(
    ("mode", "uid", "fact"),
    [
        (0o755, 0, "units cannot access /tmp"),
        (0o700, 0, "user mirrord cannot enter"),
        (0o755, 65534, "others than root may change"),
        (0o757, 0, "others than root may change"),
    ],
)
def test_an_environment_that_units_cannot_use_is_refused(
    environment: Path, monkeypatch: pytest.MonkeyPatch, mode: int, uid: int, fact: str
) -> None:
    monkeypatch.setattr("mirrord.doctor.installer._HIDDEN", ("/tmp", str(environment.parents[1])))
    environment.chmod(mode)
    os.chown(environment, uid, 0)
    expected = fact.replace("/tmp", str(environment.parents[1]))
    with pytest.raises(ResourceError, match=re.escape(expected)) as caught:
        installer.plan_install(environment)
    assert caught.value.hint


def test_an_interpreter_that_units_do_not_see_is_refused(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uv's own Pythons below root's home."""
    monkeypatch.setattr("mirrord.doctor.installer._HIDDEN", ("/usr",))
    with pytest.raises(
        ResourceError, match=r"units for /usr/bin/python3.* units cannot access /usr"
    ):
        installer.refuse_environment(environment)


def test_a_path_that_units_would_read_as_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="characters"):
        installer.refuse_environment(tmp_path / "100% mine")


def test_it_refuses_without_systemd_or_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mirrord.doctor.installer.RUNNING", tmp_path / "none")
    with pytest.raises(ResourceError, match="systemd is not running"):
        installer.refuse_host()
    monkeypatch.setattr("mirrord.doctor.installer.RUNNING", tmp_path)
    installer.refuse_host()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(AccessError, match="only root may"):
        installer.refuse_host()


def test_a_dry_run_names_every_file_and_command_and_writes_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mirrord.doctor.installer.UNITS", tmp_path / "units")
    monkeypatch.setattr("mirrord.doctor.installer.CONFIG", tmp_path / "config.toml")
    monkeypatch.setattr("mirrord.doctor.installer._HIDDEN", ())
    monkeypatch.setattr("mirrord.doctor.installer._refuse_part", lambda *_: None)
    assert run(["service", "install", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("mirrord.service")][:1] == [
        f"write {tmp_path}/units/mirrord.service"
    ]
    assert f"write {tmp_path}/config.toml" in lines
    assert f"link /usr/local/bin/mirrord to {sys.prefix}/bin/mirrord" in lines
    assert lines[-1] == "run systemctl restart mirrord-mount.service mirrord.service"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "units").mkdir()
    (tmp_path / "units/mirrord.service").touch()
    assert run(["service", "uninstall", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "run systemctl disable --now mirrord.service",
        f"remove {tmp_path}/units/mirrord.service",
    ]
    assert (tmp_path / "units/mirrord.service").exists()
