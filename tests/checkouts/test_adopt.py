"""A build's result is adopted: copied, hashed, shared by content, without what could lead out."""

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirrord.environments.bounds import find_excess
from mirrord.errors import LimitReachedError
from mirrord.templates import adoption
from mirrord.templates.adoption import Adopted, adopt, sweep_shared


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Path]:
    source = tmp_path / "built"
    (source / "lib/pkg").mkdir(parents=True)
    (source / "bin").mkdir()
    (source / "lib/pkg/__init__.py").write_text("")
    (source / "lib/pkg/code.py").write_text("x = 1\n")
    (source / "bin/tool").write_text("#!/bin/sh\n")
    (source / "bin/tool").chmod(0o700)
    (source / "bin/python").symlink_to("/usr/bin/python3.11")
    (source / "lib64").symlink_to("lib")
    yield source
    subprocess.run(["rm", "-rf", source], check=True)  # shutil cannot, of a deep one


def take(source: Path, name: str) -> tuple[Adopted, Path]:
    target = source.parent / name
    target.mkdir()
    return adopt(source, Path("/nowhere/tree"), target, source.parent / "shared"), target


def test_equal_files_of_two_environments_are_one_on_disk(built: Path) -> None:
    first, one = take(built, "one")
    (built / "lib/pkg/more.py").write_text("y = 2\n")
    second, two = take(built, "two")
    assert (first.files, second.files, second.shared_bytes) == (3, 4, 16)
    inodes = [(each / "files/lib/pkg/code.py").stat().st_ino for each in (one, two)]
    assert len(set(inodes)) == 1
    assert first.manifest != second.manifest
    again, _ = take(built, "again")
    assert again.manifest == second.manifest


def test_modes_and_times_do_not_tell_builds_apart(built: Path) -> None:
    first, one = take(built, "one")
    (built / "lib/pkg/code.py").chmod(0o666)
    os.utime(built / "lib/pkg/code.py", (1, 1))
    second, _ = take(built, "two")
    assert first.manifest == second.manifest
    modes = {stat.S_IMODE((one / "files" / each).stat().st_mode) for each in ("bin/tool", "bin")}
    assert modes == {0o755}


def test_what_could_lead_out_is_left_out_and_reported(built: Path) -> None:
    (built / "bin/su").write_text("#!/bin/sh\n")
    (built / "bin/su").chmod(0o4755)
    os.mkfifo(built / "pipe")
    (built / "key").symlink_to("/etc/shadow")
    (built / "up").symlink_to("../../../../etc")
    adopted, target = take(built, "one")
    assert adopted.dropped == {
        "set-id bits": 1, "devices, pipes and sockets": 1, "links that lead out": 2,
    }  # fmt: skip
    assert sorted(os.listdir(target / "files")) == ["bin", "lib", "lib64"]
    assert stat.S_IMODE((target / "files/bin/su").stat().st_mode) == 0o755
    assert os.readlink(target / "files/bin/python") == "/usr/bin/python3.11"


def test_a_damaged_file_is_not_shared_again(built: Path) -> None:
    first, one = take(built, "one")
    (one / "files/lib/pkg/code.py").write_text("x = 2\n")
    second, two = take(built, "two")
    assert (two / "files/lib/pkg/code.py").read_text() == "x = 1\n"
    assert first.manifest == second.manifest


def test_files_that_no_environment_has_go(built: Path) -> None:
    _, one = take(built, "one")
    shared = built.parent / "shared"
    assert sweep_shared(shared) == 0
    shutil.rmtree(one)
    assert sweep_shared(shared) > 0
    assert not [path for path in shared.rglob("*") if path.is_file()]


def deep(path: Path) -> None:
    """3,000 nested directories, which no path can name."""
    at = os.open(path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deeper", dir_fd=at)
        below = os.open("deeper", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def sparse(path: Path) -> None:
    with (path / "hole").open("wb") as file:
        file.truncate(15 << 40)


def long_names(path: Path) -> None:
    (path / "/".join(["n" * 250] * 14)).mkdir(parents=True)


def many(path: Path) -> None:
    for number in range(500):
        (path / str(number)).touch()


EXCESSES = {
    deep: "more than 400 nested directories",
    sparse: "more than 20480 MiB",
    long_names: "more than 3072 bytes in a path",
    many: "more than 500 files",
}


@pytest.mark.parametrize("exceed", EXCESSES)
def test_a_result_is_bounded(exceed: object, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of what was copied is left, but for shared files, which a sweep removes."""
    monkeypatch.setattr(adoption, "ENVIRONMENT_FILES_LIMIT", 500)
    assert callable(exceed)
    exceed(built)
    with pytest.raises(
        LimitReachedError, match=f"cannot keep what was built: it has {EXCESSES[exceed]}"
    ):
        take(built, "one")
    assert os.listdir(built.parent / "one") == []


def test_what_a_build_has_on_disk_is_measured(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole is no disk."""
    sparse(built)
    assert find_excess([str(built)]) is None
    monkeypatch.setattr("mirrord.environments.bounds.ENVIRONMENT_FILES_LIMIT", 8)
    assert find_excess([str(built)]) == "it has more than 8 files"
    monkeypatch.undo()
    monkeypatch.setattr("mirrord.environments.bounds.ENVIRONMENT_BYTES_LIMIT", 1 << 20)
    (built / "large").write_bytes(bytes(2 << 20))
    assert find_excess([str(built)]) == "it has more than 1 MiB"
    monkeypatch.undo()
    deep(built)
    assert find_excess([str(built)]) == "it has more than 400 nested directories"
