"""Repairs of patches that people and models have damaged: counts, text around, line ends, blanks.

A line of a hunk begins with a blank, a sign or a backslash, or is empty; anything else ends it.
No line is invented: each is kept as it is, or left out. Pure.
"""

import re

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_FILE = re.compile(rb"(?m)^(?:diff --git |--- )")
_INDENTED = re.compile(rb"(?m)^([ \t]+)(?:diff --git |--- )")
# what the lines `---` and `+++` cannot say
_NEEDS_GIT = re.compile(rb"(?:old|new) mode |(?:new|deleted) file mode |(?:copy|rename) ")
_BINARY = b"GIT binary patch"
_SIGNATURE = re.compile(rb"\d+\.\d+")  # below `-- ` at the end of a mail
_BLANKS = re.compile(rb"\s+")
_LF_ENDED = re.compile(rb"(?<!\r)\n")


def recount(patch: bytes) -> bytes:
    """Rewrite each hunk's counts from all lines that may belong to it."""
    return _rewritten(patch, trusts_counts=False, keeps_prose=True)


def unwrap(patch: bytes) -> bytes:
    """Remove text around the patch, and its indentation; keeps the counts that are right."""
    if not _FILE.search(patch) and (indented := _INDENTED.search(patch)):
        patch = re.sub(rb"(?m)^" + indented[1], b"", patch)
    return _rewritten(patch, trusts_counts=True, keeps_prose=False)


def to_lf(patch: bytes) -> bytes:
    return patch.replace(b"\r\n", b"\n")


def has_crlf_headers(patch: bytes) -> bool:
    """Return whether the patch itself has CRLF, not only a file in it; as GNU patch decides."""
    return bool(re.search(rb"(?m)^(?:\+\+\+ |@@ -).*\r$", patch))


def to_crlf(line: bytes) -> bytes:
    return _LF_ENDED.sub(b"\r\n", line)


def strip_blanks(line: bytes) -> bytes:
    """Return a line without trailing blanks; keeps its newline, if any."""
    return line[:-1].rstrip(b" \t") + b"\n" if line.endswith(b"\n") else line.rstrip(b" \t")


def squeeze_blanks(line: bytes) -> bytes:
    """Return a line as `git apply --ignore-space-change` compares it."""
    return _BLANKS.sub(b" ", line.rstrip())


_EXTENDED = re.compile(
    rb"(?:old|new) mode |(?:new|deleted) file mode |(?:copy|rename) "
    rb"|(?:dis)?similarity index |index |--- |\+\+\+ "
)


def _rewritten(patch: bytes, *, trusts_counts: bool, keeps_prose: bool) -> bytes:
    lines = patch.removesuffix(b"\n").split(b"\n")
    done: list[bytes] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        if header := HUNK.match(line):
            body = _body(lines, number + 1)
            counted = _counted(body, header) if trusts_counts else None
            done += _hunk_lines(header, counted or _trimmed(body))
            number += 1 + len(counted or body)
        elif line.startswith(b"diff --git "):
            end = number + 1
            while end < len(lines) and _EXTENDED.match(lines[end]):
                end += 1
            done += lines[number:end] if keeps_prose else _needed(lines[number:end])
            number = end
        elif line == _BINARY:
            end = number
            while end < len(lines) and not lines[end].startswith(b"diff --git "):
                end += 1
            done += lines[number:end]
            number = end
        else:
            if keeps_prose or _is_file(lines, number) or (number and _is_file(lines, number - 1)):
                done.append(line)
            number += 1
    return b"\n".join([*done, b""])


def _is_file(lines: list[bytes], number: int) -> bool:
    """Return whether a traditional header begins at a line."""
    starts = (b"--- ", b"+++ ", b"@@ -")
    return all(
        line.startswith(start)
        for line, start in zip(lines[number : number + 3], starts, strict=False)
    )


def _needed(header: list[bytes]) -> list[bytes]:
    """Return a git header without its redundant lines; `--- /dev/null` says more."""
    names = [line for line in header if line.startswith((b"--- ", b"+++ "))]
    return [b"", *names] if names and not any(map(_NEEDS_GIT.match, header)) else header


def _body(lines: list[bytes], begin: int) -> list[bytes]:
    """Return the lines from `begin` on that may belong to a hunk."""
    end = begin
    while end < len(lines) and lines[end][:1] in (b" ", b"+", b"-", b"\\", b"", b"\r"):
        is_signature = lines[end] == b"-- " and _SIGNATURE.match(b"".join(lines[end + 1 : end + 2]))
        if is_signature or (lines[end].startswith(b"--- ") and _is_file(lines, end)):
            break
        end += 1
    return lines[begin:end]


def _counted(body: list[bytes], header: re.Match[bytes]) -> list[bytes] | None:
    """Return as many lines as the header says; None where its counts are wrong."""
    old, new = (int(header[number]) if header[number] else 1 for number in (2, 4))
    for number, line in enumerate(body):
        if old <= 0 and new <= 0 and not line.startswith(b"\\"):
            return body[:number] if old == new == 0 else None
        old -= not line.startswith((b"+", b"\\"))
        new -= not line.startswith((b"-", b"\\"))
    return body if old == new == 0 else None


def _trimmed(body: list[bytes]) -> list[bytes]:
    """Remove trailing empty lines, which more likely separate two hunks."""
    while body and body[-1] in (b"", b"\r"):
        body = body[:-1]
    return body


def _hunk_lines(header: re.Match[bytes], body: list[bytes]) -> list[bytes]:
    """Return a hunk with the right counts; empty where it changes nothing."""
    signs = [line[:1] for line in body]
    if b"+" not in signs and b"-" not in signs:
        return []
    old = sum(sign not in (b"+", b"\\") for sign in signs)
    new = sum(sign not in (b"-", b"\\") for sign in signs)
    numbers = int(header[1]), old, int(header[3]), new
    body = [b" \r" if line == b"\r" else line for line in body]
    return [b"@@ -%d,%d +%d,%d @@" % numbers + header[5], *body]
