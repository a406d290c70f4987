"""Names of git as text and back; JSON that is always UTF-8, and bounded in depth."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gitrepos import ENV
from hypothesis import example, given
from hypothesis import strategies as st

from mirrord import jsontext
from mirrord.model import shown
from mirrord.protocol import RefChange, RestorePaths, canonical, to_bytes
from mirrord.quoting import as_utf8, decode_name, encode_name, legible, quote_name, unquote_name

BYTES = [bytes([code]) for code in range(256)]
ODD = [b'"', b'""', b'"a"', b'"\\351"', b"\\", b"caf\xe9", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80\xff", b"\xe2\x80\xa8"]  # fmt: skip


def must_come_back(name: bytes) -> None:
    text = decode_name(name)
    form = quote_name(text)
    assert form == quote_name(name)
    assert form.isprintable()
    assert encode_name(unquote_name(form)) == name
    change = RefChange(ref=text, kind="created")
    sent = to_bytes(change)
    assert json.loads(sent.decode())["ref"] == form
    assert RefChange.from_json(json.loads(sent)) == change
    assert RestorePaths.of(commit="c", paths=[text]).paths == [text]
    assert canonical(change).decode()


def test_every_byte_comes_back() -> None:
    for byte in [*BYTES, *ODD]:
        for name in (byte, b"a" + byte, byte + b"z", byte * 200, b'"' + byte):
            must_come_back(name)


@given(st.binary(min_size=1, max_size=40))
@example(b'"\\')
def test_any_bytes_come_back(name: bytes) -> None:
    must_come_back(name)


def test_the_printable_form_is_gits(tmp_path: Path) -> None:
    """git reads it where it reads quoted paths, so a person can paste it there."""
    names = [b"p" + byte + b"q" for byte in BYTES if byte not in (b"\0", b"/")]
    blob = b"0" * 39 + b"1"
    lines = [b"100644 " + blob + b"\t" + quote_name(name).encode() + b"\n" for name in names]

    def run(*words: str, stdin: bytes = b"") -> bytes:
        done = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(done, input=stdin, capture_output=True, check=True, env=ENV).stdout

    run("init", "--quiet")
    run("update-index", "--add", "--index-info", stdin=b"".join(lines))
    assert run("ls-files", "-z").split(b"\0")[:-1] == sorted(names)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("ref caf\udce9 moved", "ref caf\\351 moved"),
        ("\ud800", "\\ud800"),
        ("plain é 😀", "plain é 😀"),
    ],
)
def test_other_text_is_escaped(text: str, safe: str) -> None:
    assert as_utf8(text) == safe
    assert json.loads(to_bytes({"detail": [text]}).decode()) == {"detail": [safe]}
    assert json.loads(jsontext.dumps({text: text}, indent=1)) == {safe: safe}
    assert legible(f"{text}\x1b[31m").endswith("\\x1b[31m")


def test_a_message_shows_a_byte_as_an_octal_escape() -> None:
    assert shown("caf\udce9\udcff") == "'caf\\351\\377'"
    assert shown("\\udce9") == "'\\\\udce9'"


@pytest.mark.parametrize("opening", ['{"a":', "["])
@pytest.mark.parametrize("depth", [101, 900, 100_000])
def test_deep_json_is_refused(opening: str, depth: int) -> None:
    closing = "}" if opening.startswith("{") else "]"
    text = opening * depth + "1" + closing * depth
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match="nested too deeply"):
            jsontext.loads(content)


@pytest.mark.parametrize("value", [[[[]]], {"a": [1, {}]}, 1, [[]] * 5000, "[" * 500])
def test_other_json_is_read(value: Any) -> None:
    assert jsontext.loads(json.dumps(value)) == value
