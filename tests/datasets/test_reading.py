"""Reading dataset files: every container, every rule of a field, and hostile content."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
import zlib
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from dataset_rows import BASE, SETUP, Case, lines, reasons, row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from mirrord import protocol
from mirrord.datasets import elements, reading
from mirrord.datasets.elements import iter_elements
from mirrord.datasets.fields import Fields, RowError
from mirrord.datasets.reading import read_dataset
from mirrord.errors import DiskFullError, InvalidDatasetError
from mirrord.model import MirrorName


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


# -- containers ------------------------------------------------------------------------------------


CONTAINERS: dict[str, bytes] = {
    "JSON lines": lines([row(1), row(2)]),
    "JSON lines without a last newline": lines([row(1), row(2)])[:-1],
    "JSON lines with CRLF and blank lines": lines([row(1), row(2)]).replace(b"\n", b"\r\n\r\n"),
    "JSON lines after a byte order mark": b"\xef\xbb\xbf" + lines([row(1), row(2)]),
    "an array": json.dumps([row(1), row(2)]).encode(),
    "an indented array": json.dumps([row(1), row(2)], indent=4).encode(),
    "an array after a byte order mark": b"\xef\xbb\xbf" + json.dumps([row(1), row(2)]).encode(),
    "an object of rows": json.dumps(
        {f"psf__requests-{n}": row(n, instance_id=...) for n in (1, 2)}
    ).encode(),
    "an indented object of rows": json.dumps({"x": row(1), "y": row(2)}, indent=1).encode(),
    "an object with an array": json.dumps({"instances": [row(1), row(2)]}).encode(),
    "an indented object with an array": json.dumps(
        {"instances": [row(1), row(2)]}, indent=2
    ).encode(),
    "an object with a version and an array": json.dumps(
        {"version": 1, "instances": [row(1), row(2)]}, indent=2
    ).encode(),
    "gzip": gzip.compress(lines([row(1), row(2)])),
    "gzip of an array": gzip.compress(json.dumps([row(1), row(2)]).encode()),
    "Zstandard": pyarrow.compress(lines([row(1), row(2)]), codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_is_read_by_its_content_whatever_its_name(
    case: Case, container: str
) -> None:
    result = case.read(CONTAINERS[container], name="misleading.parquet")
    assert (result.format, result.row_count, result.fault_count) == ("swe-bench", 2, 0)
    assert case.ids == ["psf__requests-1", "psf__requests-2"]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_single_row_is_a_dataset(case: Case, indent: int | None) -> None:
    assert case.read(json.dumps(row(), indent=indent).encode()).row_count == 1


def test_parquet_is_read_by_its_content_and_only_where_needed(case: Case) -> None:
    rows = [row(n, FAIL_TO_PASS=["a"], image="x" * 1000) for n in range(200)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), case.directory / "f.json")
    result = case.read_path(case.directory / "f.json")
    assert (result.row_count, result.fault_count, case.rows[7]["fail"]) == (200, 0, ["a"])


def test_a_column_that_is_not_text_in_parquet_is_a_fault_of_its_row(case: Case) -> None:
    good, bad = b"ok", b"\xff\xfe"
    schema = pyarrow.schema(
        [(name, pyarrow.string()) for name in ("instance_id", "repo", "base_commit", "patch")]
    )
    patch = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pyarrow.py_buffer(good + bad)],
    )
    table = pyarrow.Table.from_arrays(
        [*map(pyarrow.array, (["a", "b"], ["o/n", "o/n"], [BASE, BASE])), patch], schema=schema
    )
    parquet.write_table(table, case.directory / "f")
    result = case.read_path(case.directory / "f")
    assert case.ids == ["a"]
    assert "not UTF-8" in reasons(result)[2]


# -- files that are not what they should be --------------------------------------------------------


REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "only spaces": (b" \n\n ", "no rows"),
    "only a byte order mark": (b"\xef\xbb\xbf", "empty"),
    "an empty array": (b"[]", "no rows"),
    "an empty object": (b"{}", "no known format"),
    "text": (b"hello world\n", "neither JSON lines"),
    "binary": (bytes(range(256)) * 10, "neither JSON lines"),
    "NUL bytes": (b"\0" * 5000, "neither JSON lines"),
    "UTF-16": (json.dumps([row()]).encode("utf-16"), "UTF-16"),
    "a number": (b"42\n", "neither JSON lines"),
    "an array of numbers": (b"[1, 2, 3]", "not an object"),
    "an array of arrays": (b"[[1], [2]]", "not an object"),
    "cut-off array": (b"[", "truncated"),
    "two rows in a line": (lines([row()])[:-1] + lines([row()])[:-1], "Extra data"),
    "cut-off row": (lines([row()])[:50], "truncated"),
    "no repository and no commit": (lines([{"instance_id": "a", "x": 1}]), "no known format"),
    "deeply nested": (b'{"a":' + b"[" * 100_000, "line 1"),
    "a deeply nested array": (b"[" * 100_000, "nested too deeply"),
    "cut-off Parquet": (b"PAR1" + b"\0" * 100, "not a whole Parquet"),
    "cut-off gzip": (gzip.compress(os.urandom(100))[:20], "damaged|neither"),
    "every row bad": (
        lines([row(1, base_commit="1234"), row(2, base_commit="")]),
        "none of its rows",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_of_which_nothing_can_be_used_is_refused_with_a_hint(case: Case, kind: str) -> None:
    content, fact = REFUSED[kind]
    with pytest.raises(InvalidDatasetError, match=fact) as caught:
        case.read(content)
    assert caught.value.hint
    assert caught.value.message.startswith("cannot ")


def test_a_file_that_is_no_regular_file_is_refused(case: Case) -> None:
    os.mkfifo(case.directory / "pipe")
    with pytest.raises(InvalidDatasetError, match="not a regular file"):
        case.read_path(case.directory / "pipe")


def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    path = tmp_path / "f.jsonl"
    path.write_bytes(lines([row(n) for n in range(200)]))
    code = """
import os, sys
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from mirrord.datasets.reading import read_dataset
class Full(type(Path())):
    def open(self, mode="r", *args, **kwargs):
        return super().open(mode.replace("x", "w"), *args, **kwargs)
read_dataset(Path(sys.argv[1]), "f", None, Full(sys.argv[2]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, path, full], capture_output=True, text=True, check=False
    )
    assert DiskFullError.__name__ in done.stderr


# -- bad rows among good ones ----------------------------------------------------------------------


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no id": (row(instance_id=...), "instance_id is missing"),
    "empty id": (row(instance_id=""), "instance_id is missing"),
    "id of control characters": (row(instance_id="a\x1b[31m"), "control characters"),
    "id with NUL": (row(instance_id="a\0b"), "control characters"),
    "id with a newline": (row(instance_id="a\n"), "control characters"),
    "id of 501 letters": (row(instance_id="a" * 501), "501 characters"),
    "id that is not whole": (row(instance_id=7.5), "a number"),
    "no repository": (row(repo=...), "repo is missing"),
    "null repository": (row(repo=None), "repo is missing"),
    "repository of dots": (row(repo="../.."), "not owner/name"),
    "repository with dots inside": (row(repo="psf/..requests"), "not owner/name"),
    "repository with an empty part": (row(repo="psf//x"), "not owner/name"),
    "repository without owner": (row(repo="requests"), "not owner/name"),
    "repository with control characters": (row(repo="psf/req\x07uests"), "not owner/name"),
    "repository with NUL": (row(repo="psf/requests\0"), "not owner/name"),
    "repository of 300 letters": (row(repo="psf/" + "r" * 300), "not owner/name"),
    "repository with an option": (row(repo="--upload-pack=x/y"), "not owner/name"),
    "repository with a line": (row(repo="psf/req\nuests"), "not owner/name"),
    "repository of other letters": (row(repo="psf/réquests"), "not owner/name"),
    "repository that is a list": (row(repo=["psf/requests"]), "a list"),
    "no commit": (row(base_commit=...), "base_commit is missing"),
    "abbreviated commit": (row(base_commit="a1b2c3d"), "abbreviated"),
    "commit of 39 digits": (row(base_commit="a" * 39), "abbreviated"),
    "commit of 41 digits": (row(base_commit="a" * 41), "not a full commit id"),
    "commit of two words": (row(base_commit="the main"), "not a full commit id"),
    "abbreviated commit's parent": (row(base_commit="a1b2c3d^"), "not a full commit id"),
    "commit that is an option": (row(base_commit="--all"), "not a full commit id"),
    "commit that is NaN": (row(base_commit=float("nan")), "base_commit is missing"),
    "commit of zeros": (row(base_commit="0" * 40), "not a full commit id"),
    "commit of other digits": (row(base_commit="１" * 40), "not a full commit id"),
    "commit that is a number": (row(base_commit=int("1" * 40)), "a number"),
    "abbreviated setup commit": (
        row(environment_setup_commit="b" * 10),
        "environment_setup_commit",
    ),
    "patch that is a number": (row(patch=3), "patch is a number"),
    "patch with half a character": (row(patch="\ud800"), "lone surrogate"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_told_with_file_and_line_and_the_others_are_read(
    case: Case, kind: str
) -> None:
    bad, reason = BAD_ROWS[kind]
    result = case.read([row(1001), bad, row(1002)])
    assert case.ids == ["psf__requests-1001", "psf__requests-1002"]
    assert result.fault_count == 1
    fault = result.faults[0]
    assert (fault.file, fault.line) == ("1-f.jsonl", 2)
    assert reason in fault.reason
    protocol.to_bytes(fault)


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"garbage", "not JSON"),
    "a number": (b"3", "not an object"),
    "an array": (b"[1]", "not an object"),
    "NUL bytes": (b"\0\0\0", "not JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8"),
    "an endless number": (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
    "deep nesting": (b'{"a":' + b"[" * 20_000 + b"}", "nested too deeply|not JSON"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_line_that_is_no_row_is_told_and_the_others_are_read(
    case: Case, kind: str, place: int
) -> None:
    content = [lines([row(1)]), lines([row(2)])]
    content.insert(place, BAD_LINES[kind][0] + b"\n")
    result = case.read(b"".join(content))
    assert case.ids == ["psf__requests-1", "psf__requests-2"]
    assert list(reasons(result)) == [place + 1]
    import re

    assert re.search(BAD_LINES[kind][1], reasons(result)[place + 1])


def test_a_truncated_last_line_is_told_and_the_rows_before_it_are_read(case: Case) -> None:
    result = case.read(lines([row(1), row(2)])[:-30])
    assert case.ids == ["psf__requests-1"]
    assert "truncated" in reasons(result)[2]


def test_a_truncated_array_is_told_and_the_rows_before_it_are_read(case: Case) -> None:
    result = case.read(json.dumps([row(1), row(2)]).encode()[:-30])
    assert case.ids == ["psf__requests-1"]
    assert "in the middle of a row" in reasons(result)[2]


def test_a_bad_element_of_an_array_costs_only_itself(case: Case) -> None:
    good = [json.dumps(row(n)).encode() for n in (1, 2)]
    result = case.read(b"[" + good[0] + b', {"a" 1}, 5, "a, b", null, ' + good[1] + b"] junk")
    assert case.ids == ["psf__requests-1", "psf__requests-2"]
    assert {line: reason.split(":")[0] for line, reason in reasons(result).items()} == {
        2: "it is not JSON",
        3: "it is not an object",
        4: "it is not an object",
        5: "it is not an object",
        7: "the file continues after its closing bracket; the rest is not read",
    }


def test_a_damaged_gzip_gives_the_rows_before_the_damage(case: Case) -> None:
    random.seed(1)
    content = gzip.compress(lines([row(n, patch=random.randbytes(200).hex()) for n in range(2000)]))
    result = case.read(content[: len(content) // 2])
    assert 500 < result.row_count < 2000
    assert "damaged from here on" in result.faults[-1].reason


def test_damaged_parquet_gives_the_rows_before_the_damage(case: Case) -> None:
    random.seed(1)
    rows = [row(n, patch=random.randbytes(500).hex()) for n in range(1000)]
    path = case.directory / "f"
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, row_group_size=100, compression="gzip"
    )
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 5000] = os.urandom(5000)
    path.write_bytes(content)
    result = case.read_path(path)
    assert 100 <= result.row_count < 1000
    assert result.fault_count == 1
    assert "damaged from here on" in result.faults[0].reason


def test_a_row_longer_than_the_limit_is_told_and_the_next_one_is_read(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in ("elements", "parquet", "readers"):
        monkeypatch.setattr(f"mirrord.datasets.{reader}.ELEMENT_LIMIT_BYTES", 100_000)
    result = case.read([row(1), row(2, patch="x" * 1_000_000), row(3)])
    assert case.ids == ["psf__requests-1", "psf__requests-3"]
    assert "longer than" in reasons(result)[2]


def test_an_element_longer_than_the_limit_ends_the_array(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elements, "ELEMENT_LIMIT_BYTES", 1_000_000)
    result = case.read(json.dumps([row(1), row(2, patch="x" * 4_000_000), row(3)]).encode())
    assert case.ids == ["psf__requests-1"]
    assert "longer than" in reasons(result)[2]


def test_only_so_many_faults_are_told_but_all_are_counted(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "FAULTS_KEPT", 3)
    result = case.read([row(0), *(row(n, repo="x") for n in range(1, 10))])
    assert (len(result.faults), result.fault_count) == (3, 9)


def test_an_id_used_twice_keeps_its_first_row(case: Case) -> None:
    result = case.read([row(1), row(1, base_commit="c" * 40), row(1), row(2)])
    assert [(line["id"], line["base"]) for line in case.rows] == [
        ("psf__requests-1", BASE),
        ("psf__requests-2", BASE),
    ]
    assert "that of line 1" in reasons(result)[2]
    assert result.rules["the same row again, ignored"] == 1


# -- rules of fields -------------------------------------------------------------------------------


LISTS: dict[str, tuple[Any, tuple[str, ...], str | None]] = {
    "a list": (["a", "b"], ("a", "b"), None),
    "JSON": ('["a", "b"]', ("a", "b"), "string holding JSON"),
    "a Python literal": ("['a', \"b\"]", ("a", "b"), "Python literal"),
    "a Python literal with an escape": ("['a\\d']", ("a\\d",), "Python literal"),
    "a Python set": ("{'b', 'a'}", ("a", "b"), "Python literal"),
    "keys of an object": ({"a": {"run": "PASS"}, "b": {}}, ("a", "b"), "keys of an object"),
    "keys of an object in JSON": ('{"a": 1}', ("a",), "keys of an object"),
    "a map of Parquet": ([("a", "PASS"), ("b", "PASS")], ("a", "b"), "keys of an object"),
    "nothing": (None, (), None),
    "an empty string": ("", (), None),
    "an empty list": ([], (), None),
    "NaN": (float("nan"), (), None),
    "NaN as text": ("nan", (), None),
    "a test name alone": ("test_a.py::test", ("test_a.py::test",), "one name"),
    "a name with spaces": ("test_a (mod.Case)", ("test_a (mod.Case)",), "one name"),
    "a name in brackets": ("[unit] adds", ("[unit] adds",), "one name"),
    "a name in JSON": ('"a.py::t"', ("a.py::t",), "one name"),
    "a name per line": ("t.py::a\r\n\n t.py::b\n", ("t.py::a", "t.py::b"), "a name per line"),
    "names in a line": ("t.py::a d/t.py::C::b", ("t.py::a", "d/t.py::C::b"), "names in a line"),
    "names with commas": ("t.py::a, t.py::b", ("t.py::a", "t.py::b"), "names in a line"),
    "names with commas alone": ("t.py::a,t.py::b", ("t.py::a", "t.py::b"), "names in a line"),
    "parameters with spaces": ("t.py::a[x, y]", ("t.py::a[x, y]",), "one name"),
    "JSON in JSON": (json.dumps(json.dumps(["a", "b"])), ("a", "b"), "string holding JSON"),
    "a literal in JSON": (json.dumps("['a', 'b']"), ("a", "b"), "Python literal"),
    "numpy's text": ("['a' 'b c'\n \"it's\"]", ("a", "b c", "it's"), "an array"),
    "numpy's notation": ("array(['a', 'b'], dtype=object)", ("a", "b"), "an array"),
    "numpy's notation of nothing": ("array([], dtype='<U1')", (), "an array"),
    "a frozen set": ("frozenset({'b', 'a'})", ("a", "b"), "an array"),
    "a tuple": ("('a', 'b')", ("a", "b"), "Python literal"),
    "bytes": (b'["a"]', ("a",), "string holding JSON"),
    "a list with gaps": (["a", None, float("nan"), "b"], ("a", "b"), None),
    "a truncated array": ("['a' 'b' ... 'y' 'z']", (), "not readable"),
    "a truncated list": ("['a', 'b', ...]", (), "not readable"),
    "a list that was cut": ('["a", "b', (), "not readable"),
    "a list without quotes": ("[a, b]", (), "not readable"),
    "a number": (7, (), "not readable"),
    "a list of lists": ([["a"], ["b"]], (), "not readable"),
    "a hostile literal": ("(" * 5000, (), "not readable"),
    "a call": (
        "__import__('os').system('true')",
        ("__import__('os').system('true')",),
        "one name",
    ),
    "a list of numbers": ([1, 2], (), "not readable"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_are_read_in_every_spelling_and_the_rule_is_counted(kind: str) -> None:
    value, expected, rule = LISTS[kind]
    fields = Fields({"FAIL_TO_PASS": value})
    assert fields.names("fail_to_pass") == expected
    assert any(rule in name for name in fields.rules) if rule else not fields.rules


@pytest.mark.parametrize("value", [float("nan"), "nan", "None", "<NA>", "", None])
def test_what_pandas_writes_for_nothing_is_nothing(case: Case, value: Any) -> None:
    names = ("version", "patch", "test_patch", "created_at", "environment_setup_commit")
    case.read([row(**dict.fromkeys(names, value))])
    [line] = case.rows
    assert (line["version"], line["patch"], line["test_patch"]) == (None, None, None)
    assert (line["created"], line["commits"]) == (None, [[BASE, "base"]])


def test_numbers_that_were_text_are_text_again(case: Case) -> None:
    case.read([row(instance_id=7, version=3.1), row(instance_id=8.0, version=4)])
    assert [(line["id"], line["version"]) for line in case.rows] == [("7", "3.1"), ("8", "4")]
    fields = Fields({"version": Decimal("3.10"), "created_at": date(2020, 1, 2)})  # of Parquet
    assert fields.text("version") == "3.10"
    assert fields.time("created_at") == datetime(2020, 1, 2, tzinfo=timezone.utc)


REVISIONS = [f"{BASE}^", f"{BASE}~2", f"{BASE}^2~1", "main", "v1.0", "release/1.x", "v1.0~2"]


@pytest.mark.parametrize("text", REVISIONS)
def test_a_base_commit_may_be_a_revision(case: Case, text: str) -> None:
    case.read([row(base_commit=text)])
    [line] = case.rows
    assert (line["base"], line["revision"], line["direction"]) == (None, text, "forward")


@pytest.mark.parametrize(
    "text", ["https://github.com/psf/requests", "git@github.com:psf/requests.git", "psf/requests"]
)
def test_a_repository_may_be_a_url(text: str) -> None:
    assert Fields({"repo": text}).repository()[0] == MirrorName("psf", "requests")


@pytest.mark.parametrize(
    "text", [" psf/requests\n", "psf/requests/", "https://github.com/psf/requests.git/"]
)
def test_spaces_and_a_slash_at_its_end_belong_to_no_repository(text: str) -> None:
    assert Fields({"repo": text}).repository()[0] == MirrorName("psf", "requests")


def test_www_is_no_other_host() -> None:
    """GitHub's redirect from there would be another mirror, of another host."""
    found = Fields({"repo": "https://www.github.com/psf/requests"}).repository()
    assert found == (MirrorName("psf", "requests"), "https://github.com/psf/requests")


@pytest.mark.parametrize(
    "text",
    ["https://github.com/", "https://github.com/../x", "file:///etc/passwd", "ext::sh -c x/y"],
)
def test_a_hostile_url_is_no_repository(text: str) -> None:
    with pytest.raises(RowError):
        Fields({"repo": text}).repository()


def test_two_spellings_of_a_repository_are_one_mirror_called_as_first_seen(case: Case) -> None:
    result = case.read([row(1, repo="PSF/Requests"), row(2, repo="psf/requests")])
    assert result.names == {"psf__requests": MirrorName("PSF", "Requests")}
    assert {line["mirror"] for line in case.rows} == {"PSF__Requests"}
    assert result.rules["repo: another letter case of the same repository"] == 1


def test_a_row_keeps_its_version_its_date_in_utc_and_where_it_runs(case: Case) -> None:
    more = {"image_name": "swe/requests:1", "python_version": 3.9, "version": "2.0"}
    result = case.read(
        [
            row(1, **more, created_at="2020-01-01 02:00:00+02:00"),
            row(2, created_at="2020-01-01 00:00:00"),
            row(3, created_at="last week"),
        ]
    )
    kept = [case.rows[0][name] for name in ("environment", "python", "version", "created")]
    assert kept == ["swe/requests:1", "3.9", "2.0", "2020-01-01T00:00:00+00:00"]
    assert [line["created"] for line in case.rows[1:]] == ["2020-01-01T00:00:00+00:00", None]
    assert result.rules["created_at: not readable as a date, left empty"] == 1
    assert "created_at: not readable as a date, left empty" in case.rows[2]["rules"]


def test_a_commit_in_capitals_is_the_same_commit(case: Case) -> None:
    case.read([row(base_commit=f" {BASE.upper()}\n")])
    assert case.rows[0]["base"] == BASE


def test_every_commit_of_a_row_is_kept_with_its_role(case: Case) -> None:
    result = case.read([row(1), row(2, base_commit=SETUP)])
    assert result.commits == {"psf__requests": {BASE: "base", SETUP: "base, environment-setup"}}
    assert case.rows[0]["commits"] == [[BASE, "base"], [SETUP, "environment-setup"]]
    assert case.rows[0]["direction"] == "forward"


def test_patches_are_kept_byte_for_byte(case: Case) -> None:
    patch = "diff\r\n\0GIT binary patch\nü\u2028 no newline"
    case.read([row(patch=patch)])
    assert case.rows[0]["patch"] == patch
    assert case.rows[0]["test_patch"] is None


# -- streaming -------------------------------------------------------------------------------------


class Trickle(io.RawIOBase):
    """Reads a few bytes at a time, so that every token is split."""

    def __init__(self, content: bytes, size: int) -> None:
        self.content, self.size, self.at = content, size, 0

    def read(self, size: int = -1, /) -> bytes:
        self.at += self.size
        return self.content[self.at - self.size : self.at]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.dictionaries(st.text(), _VALUES, max_size=3), max_size=4),
    st.integers(1, 50),
    st.booleans(),
)
def test_elements_come_out_as_they_went_in_wherever_the_bytes_are_cut(
    rows: list[Any], size: int, ascii_only: bool
) -> None:
    content = json.dumps(rows, ensure_ascii=ascii_only, indent=1).encode("utf-8", "surrogatepass")
    found = list(iter_elements(Trickle(content, size)))
    assert [element.fault for element in found] == [None] * len(rows)
    assert [json.loads(element.text.decode("utf-8", "surrogatepass")) for element in found] == rows


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.binary(max_size=200).map(lambda tail: b"[" + tail)
    | st.text('[]{},:"\\ a1', max_size=60).map(lambda t: b"[" + t.encode())
)
def test_no_bytes_make_the_scanner_fail(content: bytes) -> None:
    for element in iter_elements(Trickle(content, 7)):
        assert element.fault or element.text


_READ_LARGE = """
import sys
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from mirrord.datasets.reading import read_dataset
read_dataset(Path(sys.argv[2]), "warm", None, Path(sys.argv[3] + ".warm"))
def peak_kib():  # not ru_maxrss: that begins with the peak of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak_kib()
result = read_dataset(Path(sys.argv[1]), "large", None, Path(sys.argv[3]))
print(result.row_count, (peak_kib() - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("container", ["lines", "array", "parquet"])
def test_a_large_file_is_read_in_bounded_memory(tmp_path: Path, container: str) -> None:
    """25 MB of distinct rows; only ids and commits accumulate in memory, and a group of rows of a table."""
    rows = [row(n, patch=f"{n:5}" * 2000, base_commit=f"{n + 1:040x}") for n in range(2_500)]
    for name, part in {"large": rows, "warm": rows[:100]}.items():
        path = tmp_path / name
        if container == "lines":
            path.write_bytes(lines(part))
        elif container == "array":
            path.write_text(json.dumps(part))
        else:
            parquet.write_table(
                pyarrow.Table.from_pylist(part),
                path,
                row_group_size=200,
                use_dictionary=False,
                compression="none",
            )
    command = [
        sys.executable,
        "-c",
        _READ_LARGE,
        *(str(tmp_path / name) for name in ("large", "warm", "spool")),
    ]
    count, grown_mib = map(
        int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )
    assert count == 2_500
    assert grown_mib < 20


def test_a_long_row_takes_a_few_times_its_size_and_the_next_ones_nothing(tmp_path: Path) -> None:
    """In a process of its own, as in a worker."""
    size = 24 << 20
    long = [row(0, patch="x" * size), *(row(n) for n in range(1, 3000))]
    for name, part in {"large": long, "warm": long[1:100]}.items():
        (tmp_path / name).write_bytes(lines(part))
    command = [sys.executable, "-c", _READ_LARGE]
    command += [str(tmp_path / name) for name in ("large", "warm", "spool")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    count, grown_mib = map(int, done.stdout.split())
    assert count == 3000
    assert grown_mib < 5.5 * (size >> 20)


def test_reading_json_loads_no_pyarrow(case: Case) -> None:
    case.read([row()])
    code = (
        "import sys; from mirrord.datasets import reading;"
        " assert not {'pyarrow', 'alembic', 'pygit2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_pyarrow_all_but_tables_is_read(tmp_path: Path) -> None:
    """It is an extra: JSON under Zstandard is read, Parquet and Arrow are refused by its name."""
    (tmp_path / "rows.jsonl.zst").write_bytes(CONTAINERS["Zstandard"])
    parquet.write_table(pyarrow.Table.from_pylist([row()]), tmp_path / "rows.parquet")
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from mirrord.datasets.readers import iter_rows\n"
        "from mirrord.errors import ResourceError\n"
        "assert len(list(iter_rows(Path('rows.jsonl.zst'), 'zst'))) == 2\n"
        "try: list(iter_rows(Path('rows.parquet'), 'table'))\n"
        "except ResourceError as error: print(error.hint)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "pip install 'mirrord[parquet]', or convert the file to JSON Lines" in done.stdout


# -- bombs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dictionary_that_stands_for_gigabytes_is_refused(tmp_path: Path) -> None:
    """One value of 40 MiB for each of 64 rows: the reader holds one row, and stops at the bound."""
    bomb = pyarrow.table(
        {
            "instance_id": [f"a__b-{n}" for n in range(64)],
            "repo": ["a/b"] * 64,
            "base_commit": ["a" * 40] * 64,
            "patch": pyarrow.DictionaryArray.from_arrays(
                pyarrow.array([0] * 64, pyarrow.int32()), ["x" * (40 << 20)]
            ),
        }
    )
    path = tmp_path / "bomb.parquet"
    parquet.write_table(bomb, path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    message, peak = done.stdout.splitlines()
    assert "unpack to more than 25" in message
    assert int(peak) < 700 << 20


READ = """
import resource, sys
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from mirrord.datasets.reading import read_dataset
from mirrord.errors import MirrordError
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_dataset(path, path.name, None, path.with_suffix(".spool"))
except MirrordError as error:
    print(error.message)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [b"[" * 1024, b'{"instance_id": "a", "patch": "' + b"x" * 1024], ids=["nested", "long"]
)
def test_a_gzip_bomb_is_refused(tmp_path: Path, text: bytes) -> None:
    """600 MiB of JSON in less than 3 MiB. Deep nesting ends at once, length at the bound."""
    path = tmp_path / "bomb.json.gz"
    deflate = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    parts = [
        deflate.compress(part) + deflate.flush(zlib.Z_FULL_FLUSH)
        for part in (text, text[-1:] * (1 << 20))
    ]
    path.write_bytes(parts[0] + parts[1] * 600)  # a whole flush: what follows may come again
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    message, peak = done.stdout.splitlines()
    assert "nested too deeply" in message or "MiB" in message
    assert int(peak) < 1 << 30


def test_rows_in_text_that_shrinks_well_are_read(tmp_path: Path) -> None:
    """The bound is far above the compression of real datasets."""
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number in range(2000):
            row = {
                "instance_id": f"a__b-{number}",
                "repo": "a/b",
                "base_commit": f"{number + 1:040x}",
                "patch": "line\n" * 2000,
            }
            file.write(json.dumps(row) + "\n")
    result = read_dataset(path, path.name, None, tmp_path / "spool")
    assert (result.row_count, result.fault_count) == (2000, 0)
