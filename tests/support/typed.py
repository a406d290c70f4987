"""A verb as it is typed, in this process: a start of its own costs 0.2 s, one of `doctor` 1.1 s."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

from mirrord.cli.main import run


def typed(
    *words: str | Path, stdin: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `mirrord WORDS`; what it prints is bytes at the end, as for a process."""
    command = [*map(str, words)]
    out, err = (
        io.TextIOWrapper(
            io.BytesIO(), encoding="utf-8", errors="surrogateescape", write_through=True
        )
        for _ in range(2)
    )
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    try:
        with redirect_stdout(out), redirect_stderr(err), chdir(cwd or Path.cwd()):
            status = run(command)
    finally:
        sys.stdin = before
    said = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(command, status, *said)
