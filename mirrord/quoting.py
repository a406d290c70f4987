"""Names of refs and paths, which git keeps as bytes: as text inside, in a printable form outside.

Inside, a name is a `str` in which each byte that is not UTF-8 is a lone surrogate (PEP 383), as
Python names files. Outside, wherever text must be UTF-8 (JSON, databases, logs, pages, TOML), it is
in git's own quotes: `refs/heads/café` stays as it is, the byte 0xe9 alone makes it
`"refs/heads/caf\\351"`. A name is quoted if it has a character that cannot be printed, or begins
with a quote, so the form can always be read back.
"""

import codecs
import re

# as git's quote.c has them; other control characters are octal
_ESCAPES = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r"}
_ESCAPED = {
    ord(escape[1]): code for code, escape in _ESCAPES.items()
}  # `\"` and `\\` are as they are
_QUOTED = re.compile(rb'"((?:[^"\\]|\\[abtnvfr"\\]|\\[0-3][0-7]{2})*)"', re.DOTALL)
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)", re.DOTALL)


def decode_name(name: bytes) -> str:
    """Return a name as text; every byte comes back by `encode_name`."""
    return name.decode("utf-8", "surrogateescape")


def encode_name(name: str) -> bytes:
    """Return the bytes of a name; raises UnicodeEncodeError for a surrogate that is no byte."""
    return name.encode("utf-8", "surrogateescape")


def quote_name(name: str | bytes) -> str:
    """Return a name in the printable form, which is UTF-8, one line, and read by `unquote_name`."""
    text = decode_name(name) if isinstance(name, bytes) else name
    if text.isprintable() and not text.startswith('"'):
        return text
    return f'"{"".join(map(_quoted, text))}"'


def unquote_name(text: str) -> str:
    """Return the name of a printable form; any other text is a name as it is.

    Raises UnicodeEncodeError, a ValueError, for a surrogate that is no byte.
    """
    if text.isascii() and not text.startswith('"'):
        return text
    data = encode_name(text)
    match unquoted(data):
        case name, b"":
            return decode_name(name)
    return decode_name(data)


def unquoted(text: bytes) -> tuple[bytes, bytes] | None:
    """Split a leading quoted name from what follows; None without one (git's unquote_c_style)."""
    match = _QUOTED.match(text)
    return (_ESCAPE.sub(_unescaped, match[1]), text[match.end() :]) if match else None


def legible(text: str) -> str:
    """Escape what a terminal or a page would interpret, in text of which names are a part."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _octal(c) or ascii(c)[1:-1] for c in text)


def as_utf8(text: str) -> str:
    """Escape lone surrogates only, as a last resort for text that must be UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "mirrord.octal").decode()


def _quoted(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    codes = encode_name(character)
    return "".join(_ESCAPES.get(code) or f"\\{code:03o}" for code in codes)


def _unescaped(escape: re.Match[bytes]) -> bytes:
    form = escape[1]
    return bytes([int(form, 8) if len(form) == 3 else _ESCAPED.get(form[0], form[0])])


def _octal(character: str) -> str | None:
    """Return the escape of a byte that is not UTF-8; None for any other character."""
    return f"\\{ord(character) & 0xFF:03o}" if "\udc80" <= character <= "\udcff" else None


def _escape_surrogates(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(_octal(c) or f"\\u{ord(c):04x}" for c in wrong), error.end


codecs.register_error("mirrord.octal", _escape_surrogates)
