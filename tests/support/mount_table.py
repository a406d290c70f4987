"""The mount table of a process, as lines."""

from __future__ import annotations

from pathlib import Path


def mount_lines(process: int | str = "self") -> list[str]:
    """Return the lines of /proc/PROCESS/mountinfo; bytes that are not UTF-8 are surrogates.

    Tests beside this one mount at names of any bytes.
    """
    return Path(f"/proc/{process}/mountinfo").read_text(errors="surrogateescape").split("\n")[:-1]
