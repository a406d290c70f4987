"""`mirrord doctor --fix` does what it says, and touches nothing that a daemon has."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from faults.disks import run as host
from faults.disks import unmount

from mirrord import doctor
from mirrord.cli.main import run
from mirrord.config import Settings
from mirrord.daemon.main import state_lock
from mirrord.doctor.repairs import config_file, repair
from mirrord.host.mount_tables import mounts_below
from mirrord.places import Layout


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other sandboxes may run here, and nobody's group is made."""
    monkeypatch.setattr("mirrord.doctor.repairs._accounts", lambda _: ())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setitem(doctor._CHECKS, "its speed", lambda _: ("ok", "not measured", ""))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a state directory that a daemon made and a kill ended."""
    made = Settings(state_dir=tmp_path / "state", socket=tmp_path / "s")
    layout = Layout(made.state_dir)
    layout.make_root()
    layout.make()
    (made.state_dir / "daemon.lock").touch(mode=0o600)
    return made


def _damage(settings: Settings) -> list[Path]:
    """What a killed daemon and a careless hand left; answers what is to go."""
    layout = Layout(settings.state_dir)
    layout.leases.chmod(0o755)
    trash = [layout.checkouts / ".trash-1", layout.templates / "o__r" / "gits" / ".trash-2"]
    scratch = layout.root / ".doctor-old"
    for path in (*trash, scratch, layout.checkouts / "held", layout.leases / "held"):
        (path / "inner").mkdir(parents=True)
    (layout.leases / "held" / "lease.json").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(settings.socket))
    return [*trash, scratch, settings.socket]


def test_a_dry_run_lists_it_and_changes_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirrord.doctor.repairs._SCRATCH_MAX_AGE_S", -60.0)
    doomed = _damage(settings)
    planned = repair(settings, None, dry_run=True)
    assert {each.state for each in planned} == {"planned"}
    told = "\n".join(each.what for each in planned)
    assert f"{settings.state_dir}/leases from 0755 to 0700" in told
    assert all(f"remove {path}" in told for path in doomed)
    assert len(planned) == 1 + len(doomed)
    assert all(os.path.lexists(path) for path in doomed)
    assert Layout(settings.state_dir).leases.stat().st_mode & 0o777 == 0o755


def test_what_was_listed_is_done_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout with a lease stays."""
    monkeypatch.setattr("mirrord.doctor.repairs._SCRATCH_MAX_AGE_S", -60.0)
    doomed = _damage(settings)
    assert {each.state for each in repair(settings, None, dry_run=False)} == {"done"}
    assert not any(os.path.lexists(path) for path in doomed)
    assert (settings.state_dir / "checkouts/held/inner").is_dir()
    assert repair(settings, None, dry_run=False) == []


def test_a_running_daemons_things_stay(settings: Settings) -> None:
    """Its own trash, say; the modes it sets itself are put right all the same."""
    _damage(settings)
    with state_lock(settings.state_dir):
        found = repair(settings, None, dry_run=True)
    assert [each.what.split()[:2] for each in found] == [["set", "the"]]


@pytest.mark.root
def test_a_mount_without_a_lease_is_unmounted(settings: Settings) -> None:
    layout = Layout(settings.state_dir)
    for name in ("lost", "held"):
        (layout.checkouts / name / "tree").mkdir(parents=True)
        host("mount", "-t", "tmpfs", "none", layout.checkouts / name / "tree")
    try:
        (layout.leases / "held").mkdir()
        (layout.leases / "held" / "lease.json").touch()
        (done,) = repair(settings, None, dry_run=False)
        assert (done.state, "lost/tree" in done.what) == ("done", True)
        assert mounts_below(str(layout.checkouts)) == [str(layout.checkouts / "held/tree")]
    finally:
        unmount(layout.checkouts)


def test_a_configuration_with_a_password_is_nobody_elses(
    settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[upstream]\nurl = "https://me:secret@forge/{owner}/{name}"\n')
    path.chmod(0o644)
    verdict, fact, remedy = config_file(settings, path)
    assert (verdict, "password" in fact, "chmod o-r" in remedy) == ("warn", True, True)
    (done,) = repair(settings, path, dry_run=False)
    assert "from 0644 to 0640" in done.what
    assert config_file(settings, path)[0] == "ok"
    path.write_text("")
    path.chmod(0o644)
    assert config_file(settings, path)[0] == "ok"


def test_the_verb_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And needs --fix for that."""
    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\nsocket = "{tmp_path}/s"\n')
    words = ["doctor", "--config", str(config)]
    assert run([*words, "--dry-run"]) == 2
    assert run([*words, "--fix", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"planned  make {tmp_path}/state with mode 0711" in out
    assert not (tmp_path / "state").exists()
    assert run([*words, "--fix", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in answer["repairs"]] == ["done"]
    assert {"name", "verdict", "fact", "remedy"} == set(answer["checks"][0])
    assert (tmp_path / "state").is_dir()
