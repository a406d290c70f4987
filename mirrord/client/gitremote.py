#!/usr/bin/python3 -IS
"""git-remote-mirrord: what git runs to read `mirrord::ADDRESS`, as its caller, and to read only.

Serves a sealed store: of the checkout that this process lives in (MIRRORD_TREE, default /testbed;
MIRRORD_REPOSITORY and MIRRORD_INSTANCE say what it is), else of a checkout of the instance, made
for this call. Never a mirror: git's protocol gives any object to who knows its id. git sees a
directory of ours with links to the store, so no configuration and no hook of an agent counts.

This file alone runs in sandboxes and containers: it imports the standard library of Python 3.8, and
the client where it asks a daemon.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

_FORGE = re.compile(r"(?:[a-z+]+://[^/]+/+|[^/@]+@[^/:]+:)(?:.*/)?([^/]+/[^/]+?)(?:\.git)?/*")
_COMMIT = re.compile(r"[0-9a-f]{40}\n?")
_BRANCH = "refs/heads/main"


class AddressRefusedError(Exception):
    """A sentence for whoever called git."""


def main() -> None:
    """Answer git's commands on stdin (gitremote-helpers); argv has the remote and its address."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        sys.exit(_converse(sys.argv[-1]))
    except AddressRefusedError as error:
        sys.exit(f"mirrord: {error}")


def _converse(address: str) -> int:
    while command := _read_line():
        if command == "capabilities":
            _answer("connect\n\n")
        elif command == "connect git-upload-pack":
            with _store(address) as git, _served(git) as directory:
                _answer("\n")  # from here on stdin and stdout are git's
                return subprocess.run(
                    ["git", "upload-pack", directory],
                    env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
                    check=False,
                ).returncode
        else:
            what = "push to" if command == "connect git-receive-pack" else f"{command} at"
            hint = "take changes out with `mirrord diff`"
            raise AddressRefusedError(f"cannot {what} {address!r}: it can be read only; {hint}")
    return 0


def _read_line() -> str:
    """One line, and no byte of what follows: that is for git."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line.decode(errors="replace").rstrip("\n")


def _answer(text: str) -> None:
    os.write(1, text.encode())


# -- which store -----------------------------------------------------------------------------------


@contextmanager
def _store(address: str) -> Iterator[Path]:
    """The `.git` that an address means: a forge's URL, a repository's name or an instance's."""
    repository = os.environ.get("MIRRORD_REPOSITORY", "").lower()
    instance = os.environ.get("MIRRORD_INSTANCE", "")
    tree = Path(os.environ.get("MIRRORD_TREE", "/testbed"))
    is_forge = _FORGE.fullmatch(address)
    name = (is_forge[1] if is_forge else address).lower()
    is_own = name in {repository, repository.replace("/", "__"), instance.lower()} - {""}
    if is_own and (tree / ".git").exists():
        yield _sealed(tree / ".git")
        return
    if is_own and instance:
        address = instance
    elif is_forge:
        fact = f"this is a checkout of {repository}" if repository else "no checkout is here"
        raise AddressRefusedError(f"cannot read {address!r}: {fact}; name an instance")
    try:
        errors, client = import_module("mirrord.errors"), import_module("mirrord").Client()
    except ImportError as error:
        fact = "the tree here is of another one, and there is no mirrord to ask"
        raise AddressRefusedError(f"cannot find {address!r}: {fact}") from error
    try:
        with client, client.checkout(address, bind="process") as checkout:
            yield _sealed(Path(checkout.path, ".git"))
    except errors.MirrordError as error:
        raise AddressRefusedError(": ".join(filter(None, [error.message, error.hint]))) from error


def _sealed(git: Path) -> Path:
    """Refuse a store that leads elsewhere, as that of a linked checkout does: to a mirror."""
    objects = git / "objects"
    leads_out = git.is_symlink() or objects.is_symlink() or (objects / "info/alternates").exists()
    if leads_out or not objects.is_dir():
        raise AddressRefusedError(f"cannot serve {git}: it is no sealed store")
    return git


@contextmanager
def _served(git: Path) -> Iterator[str]:
    """A bare repository of ours with the store's objects, HEAD as a branch, and its tags."""
    with tempfile.TemporaryDirectory(prefix="mirrord-git-") as made:
        packed = _lines(git / "packed-refs")
        (Path(made) / "refs").mkdir()
        (Path(made) / "objects").symlink_to(git.resolve() / "objects")
        (Path(made) / "HEAD").write_text(f"ref: {_BRANCH}\n")
        tags = [line for line in packed if line[40:].startswith(" refs/tags/")]
        refs = [f"{_head(git, packed)} {_BRANCH}", *tags]
        (Path(made) / "packed-refs").write_text("".join(f"{line}\n" for line in refs))
        yield made


def _head(git: Path, packed: list[str]) -> str:
    """The commit of HEAD; a branch that an agent made counts."""
    text = "".join(_lines(git / "HEAD"))
    ref = text[len("ref: ") :] if text.startswith("ref: refs/") and ".." not in text else ""
    if ref:
        known = (line[:40] for line in packed if line[41:] == ref)
        text = "".join(_lines(git / ref)) or next(known, "")
    if not _COMMIT.fullmatch(text):
        raise AddressRefusedError(f"cannot serve {git}: its HEAD names no commit")
    return text


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    main()
