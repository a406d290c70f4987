"""Writes the synchronous client from the asynchronous one: `python tests/support/unasync.py`. A test holds the two equal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "mirrord/client"
SOURCE, TARGET = CLIENT / "_async", CLIENT / "_sync"

RULES: list[tuple[str, str]] = [
    (
        r"\bfor asyncio, written by hand\b",
        "for threads, generated from the one for asyncio by tests/support/unasync.py",
    ),
    (r"\bconcurrent tasks\b", "threads"),
    (r"\bPending\[(\w+)\]", r"\1"),
    (r"\bPending\((.*)\)$", r"\1"),
    (r"\bPending, ", ""),
    (r"\bawait async_to_end\((.*)\)$", r"\1"),
    (
        r"^from \.\.primitives_async import async_in_thread, async_to_end$",
        "from ..primitives_sync import in_thread",
    ),
    (
        r"^from \.\.primitives_async import AsyncWorker, async_to_end$",
        "from ..primitives_sync import Worker",
    ),
    (r"\bprimitives_async\b", "primitives_sync"),
    (r"\bawait ", ""),
    (r"\[piece async for piece in (.*)\]\)", r"\1)"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\basync_(in_thread|pause|pieces|readable|receive|send|write)\b", r"\1"),
    (r"\bAsyncGenerator\[([\w.]+|tuple\[.*\])\]", r"Generator[\1, None, None]"),
    (r"\bAsyncGenerator\[bytes\]", "Generator[bytes, None, None]"),
    (r"\bAsync(\w+)", r"\1"),
]


def synchronous(source: str) -> str:
    """One module, rule by rule, then laid out by ruff."""
    lines = source.split("\n")
    for pattern, replacement in RULES:
        lines = [re.sub(pattern, replacement, line) for line in lines]
    return _formatted("\n".join(lines))


def _formatted(source: str) -> str:
    for step in (["check", "--quiet", "--select=I", "--fix"], ["format", "--quiet"]):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *step,
            "--stdin-filename",
            str(TARGET / "client.py"),
            "-",
        ]
        source = subprocess.run(
            command, input=source, capture_output=True, text=True, check=True
        ).stdout
    return source


def generated() -> dict[Path, str]:
    """Every file of the synchronous client as it should be."""
    header = (
        "# @generated from ../_async/{} by tests/support/unasync.py: edit that file, then run it.\n"
    )
    return {
        TARGET / path.name: header.format(path.name) + synchronous(path.read_text())
        for path in sorted(SOURCE.glob("*.py"))
    }


if __name__ == "__main__":
    for target, text in generated().items():
        target.write_text(text)
