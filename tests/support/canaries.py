"""Secrets that tests plant, and a search for them: in bytes, and in all files that a user can read.

Each secret has a name that says where it was planted. A text is found as it is, reversed, and in
base64; a commit by its first seven digits at the start of a word, by its bytes, and as a text.
Run as a program (its source with `python -c`), it searches as the user that it runs as.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

_FILE_BYTES = 64 * 1024**2


class Canaries:
    """Planted secrets by name."""

    def __init__(self) -> None:
        self.patterns: dict[str, list[str]] = {}

    def plant(self, name: str) -> str:
        """A new word, which occurs nowhere else."""
        digest = hashlib.sha256(name.encode()).digest()[:14]
        word = "zq" + base64.b32encode(digest).decode().lower().rstrip("=")
        encoded = [base64.b64encode(b"\0" * shift + word.encode())[4:-4] for shift in range(3)]
        forms = [word.encode(), word[::-1].encode(), *encoded]
        self.patterns[name] = [re.escape(form).decode() for form in forms]
        return word

    def plant_commit(self, name: str, commit: str) -> None:
        raw = "".join(f"\\x{byte:02x}" for byte in bytes.fromhex(commit)[:8])
        forms = [f"(?i:(?<![0-9a-f]){commit[:7]})", raw, commit[::-1][:20]]
        encoded = [base64.b64encode(b"\0" * shift + commit.encode())[4:-4] for shift in range(3)]
        self.patterns[name] = [*forms, *(re.escape(form).decode() for form in encoded)]

    def found_in(self, content: bytes | str) -> set[str]:
        return found_in(self.patterns, content.encode() if isinstance(content, str) else content)


def found_in(patterns: dict[str, list[str]], content: bytes) -> set[str]:
    return {
        name
        for name, forms in patterns.items()
        if any(re.search(form.encode(), content) for form in forms)
    }


def _contents(roots: list[str]) -> Iterator[tuple[str, bytes]]:
    """The files below `roots`, names of files included; what a loose object holds; all objects of
    repositories."""
    for root in roots:
        walk = (
            os.walk(root)
            if os.path.isdir(root)
            else [(*os.path.split(root)[:1], [], [os.path.basename(root)])]
        )
        for directory, directories, names in walk:
            yield f"names in {directory}", "\n".join([*directories, *names]).encode()
            for path in (Path(directory, name) for name in names):
                try:
                    if path.is_symlink() or not path.is_file():
                        continue
                    with path.open("rb") as file:
                        content = file.read(_FILE_BYTES)
                except OSError:
                    continue
                yield str(path), content
                if content[:1] == b"\x78":
                    try:
                        yield f"{path}, inflated", zlib.decompressobj().decompress(content)
                    except zlib.error:
                        pass
            if ".git" in directories:
                words = ["git", "-C", directory, "cat-file", "--batch-all-objects", "--batch"]
                done = subprocess.run(words, capture_output=True, check=False)
                yield f"objects of {directory}", done.stdout


def _search(patterns: dict[str, list[str]], roots: list[str]) -> dict[str, list[str]]:
    """Where which secret is found; `files` counts what was read."""
    found: dict[str, list[str]] = {}
    paths = []
    for place, content in _contents(roots):
        paths.append(place)
        if names := found_in(patterns, content):
            found[place] = sorted(names)
    return {"found": found, "read": paths}


if __name__ == "__main__":
    print(json.dumps(_search(*json.load(sys.stdin))))
