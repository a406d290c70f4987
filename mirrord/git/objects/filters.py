"""What `git checkout` changes in a file on its way to the disk: line ends, `$Id$`, encoding.

Follows convert.c of git 2.39 with `core.autocrlf=false` and without filter drivers, as checkouts
are made: a driver such as git-lfs is a program of the machine's, so its pointer files stay. Only
the commit's own `.gitattributes` count. libgit2 matches their patterns; it does not know
`working-tree-encoding`, so the conversions are done here.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

import pygit2
from pygit2.enums import AttrCheck

from .repository import Objects
from .trees import TreeEntry

_FLAGS = AttrCheck.INDEX_ONLY | AttrCheck.NO_SYSTEM | AttrCheck.INCLUDE_COMMIT
_RELEVANT = re.compile(rb"crlf|ident|encoding")
_IDENT = re.compile(rb"\$Id(?:\$|:([^$\n]*)\$)")
_FOREIGN = re.compile(rb"\$Id: .*[ \t\n\r](?!\$)", re.DOTALL)  # is_foreign_ident: an inner space
_DOLLAR, _COLON = b"$:"
_BOMS = {
    "utf-16le-bom": (codecs.BOM_UTF16_LE, "utf-16-le"),
    "utf-16be-bom": (codecs.BOM_UTF16_BE, "utf-16-be"),
}
# gather_stats: text is what is printable, or one of tab, newline, carriage return, backspace,
# escape, form feed
_UNPRINTABLE = bytes([*(c for c in range(32) if c not in b"\b\t\n\r\x0c\x1b"), 127])


class Conversion(NamedTuple):
    """`crlf` is `text` (every lone newline becomes CRLF), or `auto`: only if the file is text."""

    crlf: str | None
    ident: bool
    encoding: str | None

    def apply(self, data: bytes, oid: str) -> bytes:
        """The bytes that git would write for the blob `oid`."""
        if self.ident and b"$Id" in data:
            # git streams a file that needs nothing else, and then expands `$Id$` by other rules
            is_read_whole = self.encoding is not None or self.crlf == "auto"
            expand = _expand_ident if is_read_whole else _stream_ident
            data = expand(data, b": %s $" % oid.encode())
        if self.crlf is not None:
            data = _to_crlf(data, self.crlf)
        if self.encoding is not None and data:
            data = _encode(data, self.encoding)
        return data


class Conversions:
    """The conversions of one commit's paths; `find` answers None where the bytes stay."""

    def __init__(self, objects: Objects, commit: str, attribute_files: list[TreeEntry]) -> None:
        self._repository = objects.repository
        self._commit = pygit2.Oid(hex=commit)
        self.is_empty = not any(
            _RELEVANT.search(objects.read_blob(entry.oid)) for entry in attribute_files
        )

    def find(self, path: bytes) -> Conversion | None:
        if self.is_empty:
            return None
        # convert_attrs: `eol=crlf` decides, unless the file is binary; `text=auto` asks its content
        crlf = None
        if self._attribute(path, "eol") == "crlf":
            text = self._attribute(path, "text")
            if text not in (True, False, "input", "auto"):
                text = self._attribute(path, "crlf")
            if text is not False:
                crlf = "auto" if text == "auto" else "text"
        ident = self._attribute(path, "ident") is True
        encoding = self._attribute(path, "working-tree-encoding")
        if not isinstance(encoding, str) or encoding.lower() in ("", "utf-8", "utf8"):
            encoding = None
        return Conversion(crlf, ident, encoding) if crlf or ident or encoding else None

    def _attribute(self, path: bytes, name: str) -> bool | str | None:
        return self._repository.get_attr(path, name, _FLAGS, self._commit)


def _to_crlf(data: bytes, how: str) -> bytes:
    crlf = data.count(b"\r\n")
    if data.count(b"\n") == crlf:
        return data
    if how == "auto" and (b"\r" in data or _is_binary(data)):
        return data
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def _is_binary(data: bytes) -> bool:
    """convert_is_binary without carriage returns: a NUL, or over one unprintable byte in 128."""
    unprintable = len(data) - len(data.translate(None, _UNPRINTABLE))
    if data.endswith(b"\x1a"):
        unprintable -= 1
    printable = len(data) - data.count(b"\n") - (unprintable + data.endswith(b"\x1a"))
    return b"\0" in data or printable >> 7 < unprintable


def _expand_ident(data: bytes, expansion: bytes) -> bytes:
    """ident_to_worktree: `$Id$` and `$Id: any$` become `$Id: <blob> $`; a foreign id stays."""
    parts, position = [], 0
    while found := _IDENT.search(data, position):
        inner = found.group(1)
        if inner is not None and b" " in inner[1:-1]:  # spaces inside: a foreign id
            parts.append(data[position : found.start() + 1])
            position = found.start() + 1
            continue
        parts += [data[position : found.start()], b"$Id", expansion]
        position = found.end()
    return b"".join([*parts, data[position:]])


def _stream_ident(data: bytes, expansion: bytes) -> bytes:
    """ident_filter_fn, oddities included: after `$$` it sees no `$Id$`, and `$Id` with one byte
    before the next `$Id:` swallows that byte. `held` is not written yet.
    """
    done, held = bytearray(), bytearray()
    matched, skipping = 0, False
    for byte in data:
        if skipping:
            held.append(byte)
            if byte not in b"\n$":
                continue
            if byte == _DOLLAR and not _FOREIGN.match(held):
                held[3:] = expansion
            skipping = False
        elif matched < 3 and byte == b"$Id"[matched]:
            matched += 1
            continue
        else:
            held += b"$Id"[:matched]
            whole, matched = matched == 3, 0
            if whole and byte == _DOLLAR:
                held += expansion
            else:
                held.append(byte)
                skipping = whole and byte == _COLON
                if whole:
                    continue
        done += held
        held.clear()
    return bytes(done + held + b"$Id"[:matched])


def _encode(data: bytes, encoding: str) -> bytes:
    """As git does: bytes that do not convert stay."""
    bom, codec = _BOMS.get(encoding.lower(), (b"", encoding))
    try:
        return bom + data.decode().encode(codec)
    except (UnicodeError, LookupError):
        return data
