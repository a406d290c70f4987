"""The table that `git diff --stat` prints, and names as git quotes them. Follows git 2.39."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_COLUMNS = 80
_ODD = re.compile(rb'[\x00-\x1f"\\\x7f-\xff]')
_ESCAPES = dict(zip(b'\a\b\t\n\v\f\r"\\', b'abtnvfr"\\', strict=True))


class FileStat(NamedTuple):
    """Lines added and removed; of a binary file, the bytes of its new and of its old content."""

    name: bytes
    is_binary: bool
    added: int
    removed: int


def quoted(path: bytes, prefix: bytes = b"") -> bytes:
    """As `core.quotePath` has it: in quotes where a byte is odd or not ASCII."""
    if not _ODD.search(path):
        return prefix + path
    return b'"%s%s"' % (prefix, _ODD.sub(_escaped, path))


def _escaped(found: re.Match[bytes]) -> bytes:
    byte = found[0][0]
    return b"\\%c" % _ESCAPES[byte] if byte in _ESCAPES else b"\\%03o" % byte


def stat_name(old: bytes, new: bytes) -> bytes:
    """The name in the table: of a rename `a/{b => c}/d` (pprint_rename)."""
    if old == new:
        return quoted(new)
    if _ODD.search(old) or _ODD.search(new):
        return quoted(old) + b" => " + quoted(new)
    shortest = min(len(old), len(new))
    prefix = 0
    for at in range(shortest):
        if old[at] != new[at]:
            break
        if old[at] == ord("/"):
            prefix = at + 1
    # The suffix may share the slash of the prefix.
    suffix, left = 0, shortest - max(prefix - 1, 0)
    for length in range(1, left + 1):
        if old[-length] != new[-length]:
            break
        if old[-length] == ord("/"):
            suffix = length
    middle = [path[prefix : max(prefix, len(path) - suffix)] for path in (old, new)]
    if not prefix and not suffix:
        return old + b" => " + new
    tail = old[len(old) - suffix :]
    return b"%s{%s => %s}%s" % (old[:prefix], *middle, tail)


def stat_table(files: Sequence[FileStat]) -> bytes:
    """The rows and the summary (show_stats); nothing where nothing changed."""
    if not files:
        return b""
    most = max((file.added + file.removed for file in files if not file.is_binary), default=0)
    sizes = [len(f"{file.added}{file.removed}") for file in files if file.is_binary]
    number_width = max(len(str(most)), 3 if sizes else 0)
    name_width = max(len(file.name) for file in files)
    bin_width = 14 + max(sizes, default=-14)
    graph_width = most if most + 4 > bin_width else bin_width - 4
    width = max(_COLUMNS, 16 + 6 + number_width)
    if name_width + number_width + 6 + graph_width > width:
        graph_width = min(graph_width, max(6, width * 3 // 8 - number_width - 6))
        if name_width > width - number_width - 6 - graph_width:
            name_width = width - number_width - 6 - graph_width
        else:
            graph_width = width - number_width - 6 - name_width
    rows = []
    for file in files:
        name = _shortened(file.name, name_width)
        if file.is_binary:
            number, graph = b"Bin", b""
            if file.added or file.removed:
                graph = b" %d -> %d bytes" % (file.removed, file.added)
        else:
            number = b"%d" % (file.added + file.removed)
            graph = _graph(file.added, file.removed, graph_width, most)
        rows.append(b" %s | %s%s\n" % (name, number.rjust(number_width), graph))
    return b"".join(rows) + _summary(files)


def _shortened(name: bytes, width: int) -> bytes:
    """A name that is too long loses its beginning, to the next slash where there is one."""
    if len(name) <= width:
        return name.ljust(width)
    rest = name[len(name) - width + 3 :]
    return b"..." + rest[max(0, rest.find(b"/")) :].ljust(width - 3)


def _graph(added: int, removed: int, width: int, most: int) -> bytes:
    if not added and not removed:
        return b""

    def scaled(lines: int) -> int:
        return 1 + lines * (width - 1) // most if lines else 0

    if width <= most:
        total = scaled(added + removed)
        if total < 2 and added and removed:
            total = 2
        if added < removed:
            added = scaled(added)
            removed = total - added
        else:
            removed = scaled(removed)
            added = total - removed
    return b" " + b"+" * added + b"-" * removed


def _summary(files: Sequence[FileStat]) -> bytes:
    added = sum(file.added for file in files if not file.is_binary)
    removed = sum(file.removed for file in files if not file.is_binary)
    text = f" {len(files)} file{'s' * (len(files) != 1)} changed"
    if added or not removed:
        text += f", {added} insertion{'s' * (added != 1)}(+)"
    if removed or not added:
        text += f", {removed} deletion{'s' * (removed != 1)}(-)"
    return text.encode() + b"\n"
