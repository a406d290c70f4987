"""Text of files: git's conversions between blob and disk, and the hunks between two texts.

Follows convert.c of git 2.39 with `core.autocrlf=false` and without filter drivers, but for LFS: a
pointer whose object the mirror has is replaced. Only the tree's own `.gitattributes` count. Line
ends, `$Id$` and encodings are converted here, because libgit2 (1.9) does not know
`working-tree-encoding`.
"""

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pygit2
from pygit2.enums import DiffOption

from ...presence import is_dir
from .. import lfs
from ..lfs import read_target
from ..patterns import Attributes, State
from .repository import Objects
from .trees import TreeEntry

_EXPANDED = re.compile(rb"\$Id:[^$\n]*\$")


class Conversion(NamedTuple):
    """How git converts one file.

    With `text`, CRLF becomes LF on the way into git: `text` always, `auto` and `auto input`
    (`eol=lf`) only in text files. With `crlf`, LF becomes CRLF on the way to the disk. `lfs` is
    the git directory whose objects replace pointers, on the way to the disk only.
    """

    text: str | None
    crlf: bool
    ident: bool
    encoding: str | None
    lfs: Path | None = None

    @property
    def changes_files(self) -> bool:
        """Return whether the bytes on the disk may differ from the blob."""
        return self.crlf or self.ident or self.encoding is not None or self.lfs is not None

    def smudge(self, data: bytes, oid: str) -> bytes:
        """Return the bytes that git would write for the blob `oid`."""
        if self.lfs is not None and (target := read_target(self.lfs, data)) is not None:
            return target
        if self.ident and b"$Id" in data:
            # git streams a file that needs nothing else, and then expands `$Id$` by other rules
            is_read_whole = self.encoding is not None or self.text == "auto"
            expand = _expand_ident if is_read_whole else _stream_ident
            data = expand(data, b": %s $" % oid.encode())
        if self.crlf:
            data = _to_crlf(data, self.text)
        if self.encoding is not None and data:
            data = _encode(data, self.encoding)
        return data

    def clean(self, data: bytes, read_before: Callable[[], bytes]) -> bytes:
        """Return the blob that git would make of a file. `read_before` reads the indexed blob.

        Raises ValueError, with git's reason, if the bytes are not in their encoding.
        """
        if self.encoding is not None and data:
            data = _decode(data, self.encoding)
        if self.text and b"\r\n" in data:
            # has_crlf_in_index: a file committed with CRLF keeps it
            is_kept = False
            if self.text != "text" and not (is_kept := _is_binary(data)):
                before = read_before()
                is_kept = b"\r\n" in before and not _is_binary(before)
            data = data if is_kept else data.replace(b"\r\n", b"\n")
        return _EXPANDED.sub(b"$Id$", data) if self.ident else data


def find_conversion(attributes: Attributes, path: bytes) -> Conversion | None:
    """Find how git converts the file at a path (convert_attrs); None if it does not."""
    states = attributes.find(path)
    if not states:
        return None
    text = _text(states.get("text"))
    if text is None:
        text = _text(states.get("crlf"))
    crlf = False
    if text != "" and states.get("eol") in ("lf", "crlf"):
        crlf = states["eol"] == "crlf"
        text = text or "text" if crlf or text != "auto" else "auto input"
    encoding = states.get("working-tree-encoding")
    if not isinstance(encoding, str) or encoding.lower() in ("", "utf-8", "utf8"):
        encoding = None
    conversion = Conversion(text or None, crlf, states.get("ident") is True, encoding)
    return conversion if any(conversion) else None


def _text(state: State) -> str | None:
    """Return `text`, `auto`, or "" for binary; None if unspecified (git_path_check_crlf)."""
    if isinstance(state, str):
        return {"input": "text", "auto": "auto"}.get(state)
    return {True: "text", False: ""}.get(state) if state is not None else None


_RELEVANT = re.compile(rb"crlf|ident|encoding")
_LFS = re.compile(rb"filter=lfs")


class Conversions:
    """The conversions of one commit's paths; `find` returns None where bytes are unchanged."""

    def __init__(self, objects: Objects, attribute_files: list[TreeEntry]) -> None:
        files = {
            entry.path.rpartition(b"/")[0]: objects.read_blob(entry.oid)
            for entry in attribute_files
        }
        self._attributes = Attributes(files.get)
        has_lfs = any(map(_LFS.search, files.values()))
        has_lfs = has_lfs and is_dir(objects.git_dir / lfs.OBJECTS)
        self._lfs = objects.git_dir if has_lfs else None
        self.is_empty = not has_lfs and not any(map(_RELEVANT.search, files.values()))

    def find(self, path: bytes) -> Conversion | None:
        if self.is_empty:
            return None
        conversion = find_conversion(self._attributes, path)
        if self._lfs and is_of_lfs(self._attributes, path):
            conversion = (conversion or _NONE)._replace(lfs=self._lfs)
        return conversion if conversion and conversion.changes_files else None


_NONE = Conversion(None, crlf=False, ident=False, encoding=None)


def is_of_lfs(attributes: Attributes, path: bytes) -> bool:
    return attributes.find(path).get("filter") == "lfs"


def _to_crlf(data: bytes, how: str | None) -> bytes:
    crlf = data.count(b"\r\n")
    if data.count(b"\n") == crlf:
        return data
    if how == "auto" and (b"\r" in data or _is_binary(data)):
        return data
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


# gather_stats: text is what is printable, or one of tab, newline, carriage return, backspace,
# escape, form feed
_UNPRINTABLE = bytes([*(c for c in range(32) if c not in b"\b\t\n\r\x0c\x1b"), 127])


def _is_binary(data: bytes) -> bool:
    """convert_is_binary: a NUL, a lone CR, or more than one unprintable byte in 128."""
    returns = data.count(b"\r")
    if returns and returns != data.count(b"\r\n"):
        return True
    unprintable = len(data) - len(data.translate(None, _UNPRINTABLE))
    printable = len(data) - data.count(b"\n") - returns - unprintable
    # the end-of-file mark of DOS, which git does not count at the end of a file
    unprintable -= data.endswith(b"\x1a")
    return b"\0" in data or printable >> 7 < unprintable


_IDENT = re.compile(rb"\$Id(?:\$|:([^$\n]*)\$)")


def _expand_ident(data: bytes, expansion: bytes) -> bytes:
    """ident_to_worktree: `$Id$` and `$Id: any$` become `$Id: <blob> $`; a foreign id is kept."""
    parts, position = [], 0
    while match := _IDENT.search(data, position):
        inner = match.group(1)
        if inner is not None and b" " in inner[1:-1]:  # foreign: another system's, with spaces
            parts.append(data[position : match.start() + 1])
            position = match.start() + 1
            continue
        parts += [data[position : match.start()], b"$Id", expansion]
        position = match.end()
    return b"".join([*parts, data[position:]])


_FOREIGN = re.compile(rb"\$Id: .*[ \t\n\r](?!\$)", re.DOTALL)  # is_foreign_ident: an inner space
_DOLLAR, _COLON = b"$:"


def _stream_ident(data: bytes, expansion: bytes) -> bytes:
    """ident_filter_fn, with its faults: it misses `$Id$` after a `$`, and drops the byte between
    `$Id` and a following `$Id:`. `held` is not written yet.
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


# git's own names; Python has no codecs that write a mark and a given order
_BOMS = {
    "utf-16le-bom": (codecs.BOM_UTF16_LE, "utf-16-le"),
    "utf-16be-bom": (codecs.BOM_UTF16_BE, "utf-16-be"),
}


def _encode(data: bytes, encoding: str) -> bytes:
    """Encode as git does: bytes that do not convert are kept."""
    bom, codec = _BOMS.get(encoding.lower(), (b"", encoding))
    try:
        return bom + data.decode().encode(codec)
    except (UnicodeError, LookupError):
        return data


_MARKS = {
    "16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
}
_UTF = re.compile(r"utf-?(16|32)(?:-?([bl]e)(-bom)?)?", re.IGNORECASE)


def _decode(data: bytes, encoding: str) -> bytes:
    """encode_to_git; raises ValueError where git dies."""
    codec = encoding
    if match := _UTF.fullmatch(encoding):
        width, order, marked = match.groups()
        marks = _MARKS[width]
        if order and not marked and data.startswith(marks):
            raise ValueError(f"BOM is prohibited if encoded as {encoding}")
        if not order and not data.startswith(marks):
            raise ValueError(f"BOM is required if encoded as {encoding}")
        # a codec with an order in its name would keep the mark as a character
        codec = f"utf-{width}" if marked else encoding
    try:
        return data.decode(codec).encode()
    except (UnicodeError, LookupError) as error:
        raise ValueError(f"failed to encode from {encoding} to UTF-8") from error


# -- hunks -----------------------------------------------------------------------------------------
#
# libgit2 has git's xdiff, which a change in one place does not need. The text after `@@` is found
# here: libgit2 truncates it differently, and reads a driver only from a repository's attributes.

_FLAGS = DiffOption.FORCE_TEXT | DiffOption.INDENT_HEURISTIC
_HEADER = re.compile(rb"\n@@ -(\d+)(?:,(\d+))? (\S+) @@[^\n]*")
# xdiff cuts the function name after @@ there (xemit.c)
_NAME_BYTES = 80
_NO_END = b"\n\\ No newline at end of file\n"
# def_ff of xdiff, and userdiff.c; the other drivers have lists of rules, with negative ones
_NAMES = {
    None: re.compile(rb"([A-Za-z_$].*)"),
    "python": re.compile(rb"[ \t]*((?:class|(?:async[ \t]+)?def)[ \t].*)"),
}
# the values of the attribute `diff` that `hunks` supports; None is plain text
DRIVERS = frozenset(_NAMES)


def hunks(old: bytes, new: bytes, driver: str | None) -> bytes:
    """Return the hunks between two texts, without a file header; empty if they are equal."""
    if not old or not new:
        return _whole_file(old or new, b"-" if old else b"+")
    text = _only_hunk(old, new)
    if text is None:
        text = pygit2.Patch.create_from(old, new, flag=_FLAGS).data
    begin = text.find(b"\n@@ ")
    return b"".join(_named(text[begin:], old, driver)) if begin >= 0 else b""


_CONTEXT_LINES = 3


def _only_hunk(old: bytes, new: bytes) -> bytes | None:
    """Return the hunk of a change in one place, after an empty line; None where xdiff has a choice.

    It has none, between the lines that both texts begin and end with (xdl_trim_ends), if no line is
    both removed and added, and if neither part fits a line higher or lower (xdl_change_compact).
    libgit2 hashes both texts and each of their lines: 9 ms for 0.9 MB.
    """
    start = old.rfind(b"\n", 0, _shared_start(old, new)) + 1
    tail = _shared_end(old, new, min(len(old), len(new)) - start)
    end = len(old) - tail
    removed, added = _lines(old[start:end]), _lines(new[start : len(new) - tail])
    top, bottom = start, end
    for _ in range(_CONTEXT_LINES):
        top = old.rfind(b"\n", 0, max(top - 1, 0)) + 1
        bottom = old.find(b"\n", bottom) + 1 or len(old)
    before, after = _lines(old[top:start]), _lines(old[end:bottom])
    parts = [lines for lines in (removed, added) if lines]
    is_loose = any(lines[-1:] == before[-1:] or lines[:1] == after[:1] for lines in parts)
    if not parts or is_loose or not set(removed).isdisjoint(added):
        return None
    first, around = old.count(b"\n", 0, top) + 1, len(before) + len(after)
    sizes = around + len(removed), around + len(added)
    spans = (b"%d" % first if size == 1 else b"%d,%d" % (first, size) for size in sizes)
    signed = ((b" ", before), (b"-", removed), (b"+", added), (b" ", after))
    body = (sign + line for sign, lines in signed for line in lines)
    ended = (line if line.endswith(b"\n") else line + _NO_END for line in body)
    return b"\n@@ -%s +%s @@\n" % tuple(spans) + b"".join(ended)


def _lines(text: bytes) -> list[bytes]:
    """Split at line feeds alone, which stay."""
    *whole, last = text.split(b"\n")
    return [line + b"\n" for line in whole] + ([last] if last else [])


def _shared_start(old: bytes, new: bytes) -> int:
    """Return how many bytes two texts begin with alike."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shared_end(old: bytes, new: bytes, most: int) -> int:
    """Return how many bytes, at most `most`, the lines have that two texts end with alike."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if old[len(old) - middle : len(old) - low] == new[len(new) - middle : len(new) - low]:
            low = middle
        else:
            high = middle - 1
    starts = (text[-low - 1 : -low] in (b"", b"\n") for text in (old, new))
    if low == 0 or all(starts):
        return low
    within = old.find(b"\n", len(old) - low) + 1
    return len(old) - within if within else 0


def _named(text: bytes, old: bytes, driver: str | None) -> Iterator[bytes]:
    """Add git's text after each `@@`: the last line above the hunk that matches the driver.

    A driver's expression matches only lines of UTF-8, in a UTF-8 locale.
    """
    lines, names = old.split(b"\n"), _NAMES[driver]
    name, above, position = b"", -1, 1
    for header in _HEADER.finditer(text):
        start, count, new = header.groups()
        first = int(start) - (count != b"0")  # xdl_emit_hunk_hdr
        for line in range(first - 1, above, -1):
            match = names.match(lines[line])
            if match and (driver is None or _utf8_part(lines[line]) == lines[line]):
                name = b" " + _utf8_part(match[1][:_NAME_BYTES].rstrip(b" \t\r"))
                break
        above = first - 1
        span = start if count is None else start + b"," + count
        yield b"%s@@ -%s %s @@%s" % (text[position : header.start() + 1], span, new, name)
        position = header.end()
    yield text[position:]


def _utf8_part(text: bytes) -> bytes:
    """Cut before the first byte that is not UTF-8 (sane_truncate_line of diff.c)."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def _whole_file(text: bytes, sign: bytes) -> bytes:
    """Make the hunk of an added or removed file without a diff: large ones are common."""
    if not text:
        return b""
    count = text.count(b"\n") + (not text.endswith(b"\n"))
    span = b"1" if count == 1 else b"1,%d" % count
    head = b"@@ -%s +0,0 @@\n" % span if sign == b"-" else b"@@ -0,0 +%s @@\n" % span
    end = b"\n" if text.endswith(b"\n") else _NO_END
    body = text.removesuffix(b"\n").replace(b"\n", b"\n" + sign)
    return b"".join((head, sign, body, end))
