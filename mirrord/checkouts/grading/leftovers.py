"""What is in an agent's tree and in no change: ignored files, odd files, its `.git`.

None of it reaches a grade. What would steer tests in the agent's own tree is named all the same, so
that a reader learns of the attempt. Read as the tree's owner, through no link and no mount, and
bounded; what the owner may not read is passed over.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from ...errors import CheckoutBusyError, DiffTooLargeError
from ...host.credentials import ActingAs
from ...host.files import opened
from ...protocol import Steering
from ..files.reader import TreeReader
from ..patches.fit import Change
from ..patches.worktree import Worktree
from ..stores.store import CONFIG
from .conditions import Look
from .rules import RuleBook
from .steering import cut, iter_findings, noted

LOOKED_AT = 5_000
NAMED = 3
"""Findings of one rule; an ignored directory may hold thousands."""
_CONFIG_BYTES = 64 * 1024
_SETTINGS = re.compile(
    rb"^[ \t]*(?:\[[ \t]*(?:filter|include|includeif|alias|diff|merge|url|credential)\b"
    rb"|(?:hookspath|fsmonitor|attributesfile|excludesfile|sshcommand|worktree|gitproxy|pager"
    rb"|editor|external|program)[ \t]*=)",
    re.MULTILINE | re.IGNORECASE,
)


def find_leftovers(
    tree: Worktree, changed: Iterable[bytes], look: Look, book: RuleBook
) -> list[Steering]:
    """What to name of an open checkout; `changed` are all paths that may differ."""
    with tree.owner:
        found = [*_in_git_directory(tree.reader, tree.owner, book)]
        files = list(islice(_iter_files(tree, changed), LOOKED_AT))
    seen: dict[tuple[str, str], Steering] = {}
    for path, mode in files:  # as the daemon: the owner may not read the mirror
        for each in _judged(path, mode, look, book):
            seen[each.rule, each.path] = each
    return [*found, *cut(seen.values(), NAMED)]


def _iter_files(tree: Worktree, changed: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """What is no directory, at and below each changed path, with its `st_mode`."""
    for top in changed:
        if mode := tree.modes.get(top):
            yield top, mode
            continue
        with suppress(PermissionError, CheckoutBusyError, DiffTooLargeError):
            for path, kind in tree.reader.iter_below(top, lambda _path, _error: None):
                if kind == stat.S_IFDIR:
                    continue
                if mode := tree.modes.get(path):
                    yield path, mode
                elif found := tree.reader.find_stat(path):
                    yield path, found.st_mode


def _judged(path: bytes, mode: int, look: Look, book: RuleBook) -> Iterator[Steering]:
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        yield noted(book.named("special-file"), path, "left", "a pipe, socket or device")
        return
    if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
        yield noted(book.named("special-file"), path, "left", "set-id bits")
    parts = path.split(b"/")
    if b".git" in parts:
        nested = b"/".join(parts[: parts.index(b".git") + 1])
        yield noted(book.named("git-directory"), nested, "left", "a repository in the tree")
    elif path not in look.changes and look.base.find(path) is None:
        for rule, detail in iter_findings(book, Change(path, 0o100644, b"", None), look):
            yield noted(rule, path, "left", detail or "ignored")


def _in_git_directory(reader: TreeReader, owner: ActingAs, book: RuleBook) -> Iterator[Steering]:
    """What git, run by anybody in the agent's tree, would obey."""
    rule = book.named("git-directory")
    found = reader.find_stat(b".git")
    if found is None or not stat.S_ISDIR(found.st_mode):
        yield noted(rule, b".git", "left", "replaced" if found else "removed")
        return
    with suppress(OSError, CheckoutBusyError, DiffTooLargeError):
        for name in reader.names_in(b".git/hooks") if _is_directory(reader, b".git/hooks") else ():
            if not name.endswith(b".sample"):
                yield noted(rule, b".git/hooks/" + name, "left", "a hook")
    for path in (b".git/info/attributes", b".git/info/exclude"):
        lines = _read(reader, owner, path).splitlines()
        if any(line.strip() and not line.startswith(b"#") for line in lines):
            yield noted(rule, path, "left", "has rules")
    config = _read(reader, owner, b".git/config")
    if config != CONFIG and (setting := _SETTINGS.search(config)):
        said = setting[0].decode(errors="replace").strip(" \t[=")
        yield noted(rule, b".git/config", "left", f"sets {said}")


def _is_directory(reader: TreeReader, path: bytes) -> bool:
    found = reader.find_stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _read(reader: TreeReader, owner: ActingAs, path: bytes) -> bytes:
    """The begin of a file; nothing where there is none to be read."""
    with suppress(OSError, CheckoutBusyError):
        directory, name = reader.locate(path)
        with opened(owner.open_regular(directory, name)) as file:
            return os.pread(file, _CONFIG_BYTES, 0)
    return b""
