#!/usr/bin/python3 -IS
"""git-remote-mirrord: the remote helper by which git reads `mirrord::ADDRESS`.

Serves the sealed store of the checkout around this process, else that of a temporary checkout of
the instance. Never serves a mirror, because git's protocol sends any object whose id is known. This
file runs alone in sandboxes and containers: it imports only the standard library of Python 3.8, and
the client to ask a daemon.
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
from pathlib import Path


class AddressRefusedError(Exception):
    """An address that is not served; the message is for the user of git."""


def main() -> None:
    """Answer git's commands on stdin, see gitremote-helpers(7); argv has remote and address."""
    # an exit removes the temporary directory and ends a checkout; a death by signal would not
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
                _answer("\n")  # git uses stdin and stdout from now on
                return subprocess.run(
                    ["git", "upload-pack", directory],
                    # git sets GIT_DIR for its helpers; variables can also configure it
                    env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
                    check=False,
                ).returncode
        else:
            verb = "push to" if command == "connect git-receive-pack" else f"{command} at"
            hint = "save changes with `mirrord diff`"
            raise AddressRefusedError(f"cannot {verb} {address!r}: it is read-only; {hint}")
    return 0


def _read_line() -> str:
    """Read a line and no byte more: what follows is for git."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line.decode(errors="replace").rstrip("\n")


def _answer(text: str) -> None:
    os.write(1, text.encode())


# -- which store -----------------------------------------------------------------------------------


_FORGE = re.compile(r"(?:[a-z+]+://[^/]+/+|[^/@]+@[^/:]+:)(?:.*/)?([^/]+/[^/]+?)(?:\.git)?/*")


@contextmanager
def _store(address: str) -> Iterator[Path]:
    """Yield the `.git` for an address: a URL of a forge, the name of a repository or instance."""
    repository = os.environ.get("MIRRORD_REPOSITORY", "").lower()
    instance = os.environ.get("MIRRORD_INSTANCE", "")
    tree = Path(os.environ.get("MIRRORD_TREE", "/testbed"))
    forge_url = _FORGE.fullmatch(address)
    name = (forge_url[1] if forge_url else address).lower()
    is_own = name in {repository, repository.replace("/", "__"), instance.lower()} - {""}
    if is_own and (tree / ".git").exists():
        yield _sealed(tree / ".git")
        return
    if is_own and instance:
        address = instance
    elif forge_url:
        fact = f"this is a checkout of {repository}" if repository else "this is not a checkout"
        raise AddressRefusedError(f"cannot read {address!r}: {fact}; name an instance")
    try:
        # not needed for this checkout, and not installed in every sandbox
        from mirrord import Bind, Client, errors  # noqa: PLC0415
    except ImportError as error:
        fact = "it is not this checkout, and mirrord is not installed here"
        raise AddressRefusedError(f"cannot find {address!r}: {fact}") from error
    try:
        with Client() as client, client.checkout(address, bind=Bind.PROCESS) as checkout:
            yield _sealed(Path(checkout.path, ".git"))
    except errors.MirrordError as error:
        raise AddressRefusedError(": ".join(filter(None, [error.message, error.hint]))) from error


def _sealed(git: Path) -> Path:
    """Return a sealed store; raises AddressRefusedError for one with links, as to a mirror.

    The `.git` of a pool tree may borrow from one sealed store, which leads no further.
    """
    objects = git / "objects"
    lenders = [Path(line) for line in _lines(objects / "info/alternates")]
    leads_out = git.is_symlink() or objects.is_symlink() or not objects.is_dir()
    if leads_out or len(lenders) > 1 or not all(map(_is_store, lenders)):
        raise AddressRefusedError(f"cannot serve {git}: it is not a sealed store")
    return git


def _is_store(objects: Path) -> bool:
    is_named = objects.is_absolute() and objects.parts[-2:] == (".git", "objects")
    is_plain = objects.is_dir() and not (objects.is_symlink() or objects.parent.is_symlink())
    return is_named and is_plain and not (objects / "info/alternates").exists()


_BRANCH = "refs/heads/main"


@contextmanager
def _served(git: Path) -> Iterator[str]:
    """Yield a temporary bare repository with the store's objects, HEAD as a branch, and tags."""
    with tempfile.TemporaryDirectory(prefix="mirrord-git-") as made:
        packed = _lines(git / "packed-refs")
        (Path(made) / "refs").mkdir()
        (Path(made) / "objects").symlink_to(git.resolve() / "objects")
        (Path(made) / "HEAD").write_text(f"ref: {_BRANCH}\n")
        tags = [line for line in packed if line[40:].startswith(" refs/tags/")]
        refs = [f"{_head(git, packed)} {_BRANCH}", *tags]
        text = "".join(f"{line}\n" for line in refs)  # tags need not be UTF-8
        (Path(made) / "packed-refs").write_text(text, "utf-8", "surrogateescape")
        yield made


_COMMIT = re.compile(r"[0-9a-f]{40}\n?")


def _head(git: Path, packed: list[str]) -> str:
    """Return the commit of HEAD, which may be on a branch of the agent."""
    text = "".join(_lines(git / "HEAD"))
    ref = text[len("ref: ") :] if text.startswith("ref: refs/") and ".." not in text else ""
    if ref:
        text = "".join(_lines(git / ref)) or next(
            (line[:40] for line in packed if line[41:] == ref), ""
        )
    if not _COMMIT.fullmatch(text):
        raise AddressRefusedError(f"cannot serve {git}: its HEAD is not a commit")
    return text


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return text.removesuffix("\n").split("\n") if text else []  # U+2028 may be in a name


if __name__ == "__main__":
    main()
