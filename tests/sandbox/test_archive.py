"""Archives from a sandbox: what tar writes is taken, everything else is refused whole, by one error."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from forgedtar import END, ROOT, member, negative, sparse

from mirrord.errors import LimitReachedError, UsageError
from mirrord.sandbox import archive
from mirrord.sandbox.archive import Capped, unpack

DEEP = "/".join(["d"] * 257)
PAX = b"40 GNU.sparse.realsize=none-of-a-number\n"
HOSTILE = {
    "a sparse file": (sparse(), "type 'S'"),
    "a hard link": (member("a", tarfile.LNKTYPE, linkname="/etc/shadow"), "type '1'"),
    "an extended header": (member("x", tarfile.XHDTYPE, PAX), "type 'x'"),
    "a global header": (member("x", tarfile.XGLTYPE, PAX), "type 'g'"),
    "a volume label": (member("x", b"V"), "type 'V'"),
    "a name that leads out": (member("../out"), "leads out"),
    "a long name without end": (member("x", tarfile.GNUTYPE_LONGNAME, b"n" * 5000), "more than 4096 bytes"),
    "a name with NUL in a long name": (member("x", tarfile.GNUTYPE_LONGNAME, b"../out\0x") + member("y"), "leads out"),
    "too deep": (member(DEEP), "256 directories deep"),
    "one name twice": (member("a") + member("a"), "damaged: File exists"),
    "a file as a directory": (member("a") + member("a/b"), "damaged: Not a directory"),
    "no such directory": (member("a/b"), "damaged: No such file"),
    "through a link": (member("l", tarfile.SYMTYPE, linkname="/tmp") + member("l/x"), "damaged: No such file"),
    "a link to nothing": (member("l", tarfile.SYMTYPE, linkname=""), "damaged: No such file"),
    "a name too long for the disk": (member("n" * 300), "damaged: File name too long"),
    "cut off": (member("a", content=b"x" * 5000)[:1024], "cut off"),
    "a cut header": (b"x" * 100, "damaged: truncated header"),
    "noise": (b"\xff" * 512, "damaged: bad checksum"),
    "a negative size": (negative(), "negative size"),
    "no end": (member("a"), "damaged: empty header"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_tar_does_not_write_is_refused_whole(what: str, tmp_path: Path) -> None:
    content, fact = HOSTILE[what]
    end = b"" if "cut" in what or what in ("noise", "no end") else END
    with pytest.raises(LimitReachedError, match=f"cannot download d: .*{fact}"):
        unpack(io.BytesIO(ROOT + content + end), "d", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_bytes_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "DOWNLOAD_FILES", 10)
    monkeypatch.setattr(archive, "DOWNLOAD_BYTES", 1000)
    many = b"".join(member(str(number)) for number in range(10))
    with pytest.raises(LimitReachedError, match="cannot download d: it has more than 10 files"):
        unpack(io.BytesIO(ROOT + many + END), "d", tmp_path / "out")
    capped = Capped(io.BytesIO(), "d")
    capped.write(bytes(1000))
    with pytest.raises(LimitReachedError, match="cannot download d: it has more than 1000 bytes"):
        capped.write(b"x")
    assert os.listdir(tmp_path) == []


def test_what_tar_writes_is_taken(tmp_path: Path) -> None:
    """Names of many bytes, links, programs, odd letters; a hole is as many zeros."""
    source = tmp_path / "in"
    directory = source / "/".join(["long-name-of-a-directory"] * 10)
    directory.mkdir(parents=True)
    (directory / os.fsdecode(b"b\xff")).write_bytes(b"x" * 1000)
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("t" * 300)
    os.mkfifo(source / "pipe")
    with (source / "hole").open("wb") as file:
        file.truncate(100_000)
    command = ["tar", "-c", "--format=gnu", "--hard-dereference", "-C", str(source), "."]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    unpack(io.BytesIO(packed), "d", tmp_path / "out")
    (source / "pipe").unlink()
    done = subprocess.run(["diff", "-r", "--no-dereference", source, tmp_path / "out"], check=False)
    assert done.returncode == 0
    assert os.access(tmp_path / "out/run", os.X_OK)


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/kept").touch()
    for local in (tmp_path / "out", tmp_path / "none/out"):
        with pytest.raises(UsageError, match="cannot download d to"):
            unpack(io.BytesIO(ROOT + END), "d", local)
    assert os.listdir(tmp_path / "out") == ["kept"]
