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


# name -> forms as latin-1 texts; the first one of a commit is its first digits
Forms = dict[str, list[str]]


class Canaries:
    """Planted secrets by name."""

    def __init__(self) -> None:
        self.forms: Forms = {}

    def plant(self, name: str) -> str:
        """A new word, which occurs nowhere else."""
        digest = hashlib.sha256(name.encode()).digest()[:14]
        word = "zq" + base64.b32encode(digest).decode().lower().rstrip("=")
        self.forms[name] = [word, word[::-1], *_in_base64(word)]
        return word

    def plant_commit(self, name: str, commit: str) -> None:
        raw = bytes.fromhex(commit)[:8].decode("latin-1")
        self.forms[name] = [commit[:7], raw, commit[::-1][:20], *_in_base64(commit)]

    def plant_text(self, name: str, text: str) -> None:
        """A text that was there before, such as a line of a real patch."""
        forms = (text.lower(), text, json.dumps(text)[1:-1])
        self.forms[name] = [form.encode().decode("latin-1") for form in forms]

    def found_in(self, content: bytes | str) -> set[str]:
        return found_in(self.forms, content.encode() if isinstance(content, str) else content)


def _in_base64(text: str) -> list[str]:
    """As it is encoded at each offset, without what depends on its neighbours."""
    shifted = (b"\0" * shift + text.encode() for shift in range(3))
    return [base64.b64encode(each)[4:-4].decode() for each in shifted]


def found_in(forms: Forms, content: bytes) -> set[str]:
    lowered = content.lower()
    found = set()
    for name, each in forms.items():
        first, *others = (form.encode("latin-1") for form in each)
        starts_a_word = first in lowered and re.search(rb"(?<![0-9a-f])" + first, lowered)
        if starts_a_word or any(form in content for form in others):
            found.add(name)
    return found


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


def _search(forms: Forms, roots: list[str]) -> dict[str, object]:
    """Where which secret is found, and all that was read."""
    found: dict[str, list[str]] = {}
    paths = []
    for place, content in _contents(roots):
        paths.append(place)
        if names := found_in(forms, content):
            found[place] = sorted(names)
    return {"found": found, "read": paths}


if __name__ == "__main__":
    print(json.dumps(_search(*json.load(sys.stdin))))
