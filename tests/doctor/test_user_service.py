"""`service install --user`, as an ordinary user; systemd reads the unit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyone
import pytest

from mirrord.cli.main import run

UID = 34599


def test_the_steps_of_an_ordinary_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "config"
    os.environ["XDG_CONFIG_HOME"] = str(home)
    try:
        assert run(["service", "install", "--user", "--dry-run"]) == 0
    finally:
        del os.environ["XDG_CONFIG_HOME"]
    done = capsys.readouterr()
    unit = f"{home}/systemd/user/mirrord.service"
    assert done.out.splitlines() == [
        f"write {unit}",
        "run systemctl --user daemon-reload",
        "run systemctl --user enable mirrord.service",
        "run systemctl --user restart mirrord.service",
    ]
    assert "loginctl enable-linger" in done.err
    assert not home.exists()


@pytest.mark.root
def test_root_and_a_user_without_a_manager_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["service", "install", "--user"]) == 2
    assert "cannot use --user as root" in capsys.readouterr().err
    command = [*anyone.python(), "-P", "-m", "mirrord", "service", "install", "--user"]
    become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--"]
    done = subprocess.run([*become, *command], capture_output=True, text=True, cwd="/", check=False)
    assert (done.returncode, "no systemd runs for user 34599" in done.stderr) == (7, True), done
    assert "`mirrord serve --detach`" in done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mirrord.doctor import user_service

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    user_service.plan_install(Path(sys.prefix))[0].act()
    command = ["systemd-analyze", "verify", "--user", "--man=no", str(user_service.unit_path())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert "mirrord.service" not in done.stderr
