"""The directories of sandboxes whose client was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mirrord.sandbox.box import ScratchDirectory, sweep_scratch

_HOLD = (
    "from mirrord.sandbox.box import ScratchDirectory as S; print(S().path, flush=True); input()"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def client(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with such a directory, which is not new any more."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        path = Path(process.stdout.readline().strip())
        (path / "pipe").touch()
        _age(path)
        yield process, path


def _age(path: Path) -> None:
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))


def test_what_a_killed_client_left_goes_and_what_a_live_one_has_stays(temporary: Path) -> None:
    with client(temporary) as (process, path):
        assert sweep_scratch() == []
        process.kill()
        process.wait()
        assert sweep_scratch(dry_run=True) == [str(path)]
        assert path.exists()
        assert sweep_scratch() == [str(path)]
    assert list(temporary.iterdir()) == []


def test_a_new_one_stays_because_its_lock_may_come(temporary: Path) -> None:
    new = temporary / "mirrord-sandbox-new"
    new.mkdir()
    assert sweep_scratch() == []
    _age(new)
    assert sweep_scratch() == [str(new)]


def test_a_link_is_not_followed(temporary: Path) -> None:
    """Anybody may write to the temporary directory."""
    victim = temporary / "victim"
    (victim / "inner").mkdir(parents=True)
    _age(victim)
    (temporary / "mirrord-sandbox-link").symlink_to(victim)
    assert sweep_scratch() == []
    assert (victim / "inner").exists()


@pytest.mark.root
def test_another_users_stay_but_for_root(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = temporary / "mirrord-sandbox-theirs"
    theirs.mkdir()
    os.chown(theirs, 65533, 65533)
    _age(theirs)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 65534)
        assert sweep_scratch() == []
    assert sweep_scratch() == [str(theirs)]


def test_one_that_is_removed_leaves_nothing(temporary: Path) -> None:
    made = ScratchDirectory()
    assert os.stat(made.path).st_mode & 0o777 == 0o711
    made.remove()
    assert list(temporary.iterdir()) == []
