"""Files, shards, tables and standard input as one stream that the daemon's readers read back."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, ipc, parquet

from mirrord.datasets.reading import ReadResult, read_dataset
from mirrord.errors import InvalidDatasetError, UsageError
from mirrord.sources.opening import Source, open_sources

BASE = "a" * 40


def row(number: int, **changes: Any) -> dict[str, Any]:
    known = {"instance_id": f"o__n-{number}", "repo": "o/n", "base_commit": BASE}
    return {**known, "patch": "", "hints_text": "h", **changes}


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


def read(source: Source, directory: Path) -> tuple[ReadResult, list[dict[str, Any]]]:
    """Return the daemon's result and rows."""
    stream, spool = directory / "stream", directory / "spool"
    stream.write_bytes(source.file.read_bytes() if source.file else b"".join(source.pieces()))
    spool.unlink(missing_ok=True)
    result = read_dataset(stream, source.label, None, spool)
    return result, [json.loads(line) for line in spool.read_bytes().splitlines()]


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [each["id"] for each in rows]


def test_one_plain_file_is_sent_as_it_is(tmp_path: Path) -> None:
    source = open_sources([jsonl(tmp_path / "rows.jsonl", row(1))])
    assert (source.label, source.name, source.file) == ("rows.jsonl", None, tmp_path / "rows.jsonl")


def test_shards_are_one_dataset_and_faults_name_file_and_line(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([row(1), row(2, instance_id="")])
    parquet.write_table(table, tmp_path / "a.parquet")
    second = tmp_path / "b.jsonl"
    second.write_text(json.dumps(row(3)) + "\n{cut\n" + json.dumps(row(1, patch="other")) + "\n")
    source = open_sources([str(tmp_path / "a.parquet"), str(second)])
    assert (source.label, source.name) == ("a.parquet, b.jsonl", None)
    result, rows = read(source, tmp_path)
    assert ids(rows) == ["o__n-1", "o__n-3"]
    found = {(fault.file, fault.line): fault.reason for fault in result.faults}
    assert found.keys() == {("a.parquet", 2), ("b.jsonl", 2), ("b.jsonl", 3)}
    assert "that of a.parquet:1, which" in found["b.jsonl", 3]


def test_the_same_row_in_two_shards_is_one(tmp_path: Path) -> None:
    words = [jsonl(tmp_path / f"{name}.jsonl", row(1)) for name in "ab"]
    result, rows = read(open_sources(words), tmp_path)
    assert (ids(rows), result.rules["the same row again, ignored"]) == (["o__n-1"], 1)


def test_a_folder_of_rows_is_one_dataset(tmp_path: Path) -> None:
    """One instance a file; what cannot be read is named by its file."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"{number}.json").write_text(json.dumps(row(number), indent=2))
    (folder / "3.json").write_text("{")
    (folder / "README.md").write_text("not rows")
    source = open_sources([str(folder)])
    assert (source.label, source.name) == ("mine", "mine")
    result, rows = read(source, tmp_path)
    assert ids(rows) == ["o__n-1", "o__n-2"]
    assert [fault.file for fault in result.faults] == ["3.json"]


def test_csv_values_are_text_and_lines_count(tmp_path: Path) -> None:
    patch = "diff --git a/x b/x\n+1,2\n"
    text = "instance_id,repo,base_commit,patch\n"
    text += f'o__n-1,o/n,{BASE},"{patch}"\nshort,row\no__n-2,o/n,{BASE},\n'
    for name in ("rows.csv", "rows.csv.gz"):
        data = text.encode("utf-8-sig")
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        source = open_sources([str(tmp_path / name)])
        result, rows = read(source, tmp_path)
        assert source.name == "rows"
        assert [(each["id"], each["patch"]) for each in rows] == [
            ("o__n-1", patch),
            ("o__n-2", None),
        ]
        (fault,) = result.faults
        assert (fault.line, fault.reason) == (5, "it has 2 values for 4 columns")


def test_arrow_files_streams_and_feather_are_read(tmp_path: Path) -> None:
    when = datetime(2020, 1, 2, tzinfo=timezone.utc)
    tests = {"FAIL_TO_PASS": ["t"], "created_at": when}
    table = pyarrow.Table.from_pylist([row(n, **tests) for n in range(5)])
    feather.write_feather(table, str(tmp_path / "f.feather"))
    for name, new in (("a.arrow", ipc.new_file), ("s.arrow", ipc.new_stream)):
        with new(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    for name in ("f.feather", "a.arrow", "s.arrow"):
        result, rows = read(open_sources([str(tmp_path / name)]), tmp_path)
        assert (len(rows), result.fault_count) == (5, 0)
        assert (rows[0]["fail"], rows[0]["created"]) == (["t"], when.isoformat())
    whole = (tmp_path / "s.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(whole[: len(whole) * 2 // 3])
    result, rows = read(open_sources([str(tmp_path / "cut.arrow")]), tmp_path)
    assert rows
    assert "damaged from here on" in result.faults[0].reason


def test_standard_input_is_read_in_any_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([row(1)]), out)
    for data in (out.getvalue(), json.dumps([row(1)]).encode()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        source = open_sources(["-"])
        assert (source.label, source.name) == ("standard input", None)
        _, rows = read(source, tmp_path)
        assert ids(rows) == ["o__n-1"]


def test_a_stream_holds_a_batch_and_not_the_shards(tmp_path: Path) -> None:
    words = [jsonl(tmp_path / f"{n}.jsonl", *(row(n, text="x" * 10_000),) * 1000) for n in (1, 2)]
    source = open_sources(words)
    tracemalloc.start()
    size = sum(map(len, source.pieces()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 20_000_000
    assert peak < 4_000_000


def test_a_row_cannot_pretend_to_be_another_files(tmp_path: Path) -> None:
    """A stream's fault member is removed from rows; an invalid one is an ordinary column."""
    rows = [row(1), {**row(2), "mirrord:origin": "here"}, {**row(3), "mirrord:fault": "x"}]
    result, read_rows = read(open_sources([jsonl(tmp_path / "rows.jsonl", *rows)]), tmp_path)
    assert ids(read_rows) == ["o__n-1", "o__n-2", "o__n-3"]
    assert result.fault_count == 0


def test_what_is_no_source_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        open_sources([str(tmp_path / "missing")])
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(InvalidDatasetError, match="it is empty"):
        list(open_sources([str(tmp_path / "empty.csv")]).pieces())
