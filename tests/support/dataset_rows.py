"""Dataset files that are written and read, and the rows that come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mirrord.datasets.fields import Columns
from mirrord.datasets.reading import ReadResult, read_dataset

BASE = "a" * 40
SETUP = "b" * 40
DATA = Path(__file__).parents[3] / "shared" / "data"


def row(number: int = 1, **changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = {
        "instance_id": f"psf__requests-{number}",
        "repo": "psf/requests",
        "base_commit": BASE,
        "environment_setup_commit": SETUP,
        "patch": "diff --git a/a b/a\r\n",
        "test_patch": "",
        "FAIL_TO_PASS": '["t1", "t2"]',
        "PASS_TO_PASS": "[]",
        "created_at": "2020-01-01T00:00:00Z",
    }
    value |= changes
    return {key: inner for key, inner in value.items() if inner is not ...}


class Case:
    """Writes a file, reads it, and knows the rows that came out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0

    def read(
        self,
        content: bytes | list[dict[str, Any]],
        asked: str | Columns | None = None,
        name: str = "f.jsonl",
    ) -> ReadResult:
        self.count += 1
        path = self.directory / f"{self.count}-{name}"
        path.write_bytes(content if isinstance(content, bytes) else lines(content))
        return self.read_path(path, asked)

    def read_path(self, path: Path, asked: str | Columns | None = None) -> ReadResult:
        self.spool = self.directory / f"spool-{self.count}-{path.name}"
        self.spool.unlink(missing_ok=True)
        return read_dataset(path, path.name, asked, self.spool)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.spool.read_bytes().splitlines()]

    @property
    def ids(self) -> list[str]:
        return [line["id"] for line in self.rows]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in rows)


def reasons(result: ReadResult) -> dict[int, str]:
    return {fault.line: fault.reason for fault in result.faults}
