"""The doctor on this host, and on a state directory that is not well."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mirrord import doctor
from mirrord.cli.main import run
from mirrord.config import CheckoutSettings, DockerSettings, EnvironmentSettings, Settings
from mirrord.daemon.main import state_lock
from mirrord.doctor import Check, examine, host
from mirrord.errors import BackendUnavailableError
from mirrord.host.mount_tables import read_overlays
from mirrord.host.mounting import LocalMounter
from mirrord.host.mounts import may_mount
from mirrord.model import Backend


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is tested apart."""
    monkeypatch.setitem(doctor._CHECKS, "its speed", lambda _: ("ok", "not measured", ""))


def _checks(state_dir: Path, socket: Path | None = None) -> dict[str, Check]:
    settings = Settings(state_dir=state_dir, socket=socket or state_dir / "s")
    return {check.name: check for check in examine(settings)}


def test_every_check_answers_and_what_is_not_well_has_a_remedy(tmp_path: Path) -> None:
    """A verdict alone helps nobody."""
    checks = _checks(tmp_path / "state")
    assert len(checks) == 49
    assert all(check.fact for check in checks.values())
    assert all(check.remedy for check in checks.values() if check.verdict != "ok")
    assert {checks[name].verdict for name in ("git", "libgit2", "python packages", "kernel")} <= {
        "ok",
        "warn",
    }


def test_volumes_that_nobody_serves_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirrord.doctor.service.DOCKER_SOCKET", tmp_path / "nobody")
    settings = Settings(state_dir=tmp_path, docker=DockerSettings(volumes=True))
    (check,) = [check for check in examine(settings) if check.name == "volumes"]
    assert check.verdict == "warn"
    assert "mirrord-docker.socket" in check.remedy


def test_nothing_is_changed(tmp_path: Path) -> None:
    """Not even the state directory is made, and no mount is left."""
    _checks(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []
    assert not [path for path in read_overlays() if Path(path).is_relative_to(tmp_path)]


@pytest.mark.root
def test_an_overlay_is_tried_and_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may know overlay and refuse it here; where it was asked for, that is a failure."""
    expected = "ok" if may_mount() else "warn"
    assert _checks(tmp_path)["overlay"].verdict == expected

    def refuse(*_: object) -> None:
        raise BackendUnavailableError("cannot mount: the file system is no good below an overlay")

    monkeypatch.setattr("mirrord.host.mounts.make_overlay", refuse)
    monkeypatch.setattr(
        "mirrord.doctor.host.choose_mounter", lambda state_dir, _: LocalMounter(state_dir)
    )
    check = _checks(tmp_path)["overlay"]
    assert (check.verdict, "no good" in check.fact, "pool" in check.remedy) == ("warn", True, True)
    asked = Settings(
        state_dir=tmp_path,
        socket=tmp_path / "s",
        checkouts=CheckoutSettings(backend=Backend.OVERLAY),
    )
    assert host.overlay(asked)[0] == "fail"


def test_a_state_directory_that_others_may_write_to_fails(tmp_path: Path) -> None:
    """Whoever may write there can replace a template."""
    tmp_path.chmod(0o777)
    checks = _checks(tmp_path)
    assert checks["state directory"].verdict == "fail"
    assert "chmod 0711" in checks["state directory"].remedy
    (tmp_path / "inner").mkdir(mode=0o711)
    assert _checks(tmp_path / "inner")["its parents"].verdict == "fail"


def test_a_lease_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Half-made and released ones are not."""
    for name, content in (("a", '{"id": '), ("b", None), (".trash-c", "{")):
        (tmp_path / "leases" / name).mkdir(parents=True)
        if content is not None:
            (tmp_path / "leases" / name / "lease.json").write_text(content)
    check = _checks(tmp_path)["leases"]
    assert check.verdict == "warn"
    assert check.fact == "1 unreadable: checkout a: cannot read its lease.json: it is damaged"


def test_a_socket_path_that_is_too_long_fails(tmp_path: Path) -> None:
    """The kernel would refuse it only at the start."""
    assert _checks(tmp_path, Path("/" + "x" * 150))["socket"].verdict == "fail"


@pytest.mark.root
def test_it_is_judged_what_the_daemons_user_may_and_not_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may ask how root's daemon is: that its socket's directory is not his is as it should
    be.
    """
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert _checks(state, tmp_path / "s")["socket"].verdict == "fail"
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert _checks(state, tmp_path / "s")["socket"].verdict == "ok"
    os.chown(state, 65533, 65533)
    assert _checks(state, tmp_path / "s")["socket"].verdict == "fail"


@pytest.mark.root
def test_it_is_tried_whether_a_sandbox_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package's name where it is missing."""
    assert _checks(tmp_path)["exec"].verdict == "ok"
    monkeypatch.setenv("PATH", "/nowhere")
    found = _checks(tmp_path)["exec"]
    assert (found.verdict, found.fact) == ("warn", "bwrap is not installed")
    assert "bubblewrap" in found.remedy
    images = _checks(tmp_path)["images"]
    assert (images.verdict, images.fact) == ("warn", "skopeo and umoci not installed")


def test_what_builds_of_environments_lack_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(index: str) -> Check:
        settings = Settings(state_dir=tmp_path, environments=EnvironmentSettings(index=index))
        return {each.name: each for each in examine(settings)}["builds"]

    assert check(f"file://{tmp_path}").verdict == "ok"
    assert "is not a directory" in check(f"{tmp_path}/absent").fact
    monkeypatch.setitem(sys.modules, "uv", None)
    found = check("")
    assert (found.verdict, found.fact) == ("warn", "uv is not installed")
    assert "mirrord[environments]" in found.remedy
    monkeypatch.setattr(sys, "prefix", "/usr/lib/mirrord")  # as the Debian package has it
    assert check("").remedy.endswith("install the Debian package mirrord-full")


def test_a_daemon_that_holds_the_state_directory_is_named(tmp_path: Path) -> None:
    """By what it wrote into its lock."""
    assert _checks(tmp_path)["daemon"].fact == "not running"
    with state_lock(tmp_path):
        assert '"pid"' in _checks(tmp_path)["daemon"].fact


def test_unfinished_packs_are_leftovers(tmp_path: Path) -> None:
    """Old ones only: a young one may be at work."""
    import os

    pack = tmp_path / "mirrors/a__b/objects/pack/tmp_pack_1"
    pack.parent.mkdir(parents=True)
    pack.touch()
    assert _checks(tmp_path)["unfinished"].verdict == "ok"
    os.utime(pack, (0, 0))
    assert _checks(tmp_path)["unfinished"].verdict == "warn"


def test_the_verb_ends_with_seven_when_something_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And prints all checks, as lines or as JSON."""
    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\nsocket = "{"/" + "x" * 150}"\n')
    assert run(["doctor", "--config", str(config)]) == 7
    assert "choose a shorter" in capsys.readouterr().out
    assert run(["doctor", "--config", str(config), "--json"]) == 7
    assert {"name", "verdict", "fact", "remedy"} == set(json.loads(capsys.readouterr().out)[0])


def test_a_catalog_that_is_gone_or_damaged_can_be_made_again(tmp_path: Path) -> None:
    """And the remedy says how."""
    (tmp_path / "mirrors/owner__name").mkdir(parents=True)
    assert _checks(tmp_path)["catalog"].verdict == "fail"
    assert "it adopts mirrors and pins" in _checks(tmp_path)["catalog"].remedy
    (tmp_path / "catalog.sqlite3").write_bytes(b"SQLite format 3\0" + b"garbage" * 500)
    damaged = _checks(tmp_path)["catalog"]
    assert damaged.verdict == "fail"
    assert "move" in damaged.remedy


@pytest.mark.parametrize(
    ("requirement", "is_needed"),
    [
        ("anyio>=4.10", True),
        ("uv>=0.13; extra == 'environments'", False),
        ("backports-zstd>=1.8; python_version < '3.11'", False),
        ('backports-zstd>=1.8; python_version < "3.99"', True),
    ],
)
def test_a_requirement_of_older_pythons_is_not_missed(requirement: str, is_needed: bool) -> None:
    """3.14 has Zstandard itself."""
    assert host.is_needed(requirement) is is_needed
