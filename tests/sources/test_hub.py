"""Datasets of the Hub through the real huggingface_hub, from a server on loopback and from its cache."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hubserver import COMMIT, LATER, Hub, HubDataset, hub
from pyarrow import parquet

from mirrord.errors import UsageError
from mirrord.sources.hub import HubName

pytestmark = pytest.mark.slow

_SCRIPT = """
import json, sys
from mirrord.errors import MirrordError
from mirrord.sources.opening import open_sources
for word in sys.argv[1:]:
    try:
        source = open_sources([word])
        rows = [row.value or row.fault for row in source.rows()]
        found = {"label": source.label, "name": source.name, "rows": rows, "plain": bool(source.file)}
    except MirrordError as error:
        found = {"code": error.code, "message": error.message, "hint": error.hint}
    print(json.dumps(found))
"""
_CARD = """---
configs:
- config_name: default
  data_files:
  - split: dev
    path: data/dev-*
  - split: test
    path: [data/test-*]
- config_name: lite
  data_files: lite/*.jsonl
---
# A dataset
"""


def _parquet(*ids: str) -> bytes:
    out = io.BytesIO()
    rows = [{"instance_id": each, "repo": "o/n", "base_commit": "a" * 40} for each in ids]
    parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def _lines(*ids: str) -> bytes:
    return b"".join(json.dumps({"instance_id": each}).encode() + b"\n" for each in ids)


_TASK = {
    "tasks/o__n-1/task.toml": b'[metadata]\nrepo = "o/n"\nbase_commit = "' + b"a" * 40 + b'"\n',
    "tasks/o__n-1/instruction.md": b"do",
    "tasks/o__n-1/solution/patch.diff": b"diff --git a/x b/x\n",
}
DATASETS = {
    "o/listed": HubDataset(
        {
            COMMIT: {
                "README.md": _CARD.encode(),
                "data/dev-00000-of-00001.parquet": _parquet("d1"),
                "data/test-00000-of-00002.parquet": _parquet("t1", "t2"),
                "data/test-00001-of-00002.parquet": _parquet("t3"),
                "lite/rows.jsonl": _lines("l1"),
            },
            LATER: {"test.jsonl": _lines("later")},
        },
        refs={"main": COMMIT, "next": LATER},
    ),
    "o/plain": HubDataset(
        {COMMIT: {"train.jsonl": _lines("x1"), "README.md": b"no card", "notes.txt": b""}}
    ),
    "o/directories": HubDataset(
        {
            COMMIT: {
                "README.md": b"---\nconfigs:\n- config_name: en\n  data_dir: en\n---\n",
                "en/test.jsonl": _lines("e1"),
                "en_us/test.jsonl": _lines("u1"),
            }
        }
    ),
    "o/patterns": HubDataset(
        {
            COMMIT: {
                "README.md": b"""---
configs:
- config_name: top
  data_files: "data/*.jsonl"
- config_name: all
  data_files: "data/**/*.jsonl"
---
""",
                "data/rows.jsonl": _lines("r1"),
                "data/old/rows.jsonl": _lines("o1"),
                "rows.jsonl": _lines("other"),
            }
        }
    ),
    "o/tasks": HubDataset({COMMIT: _TASK}),
    "o/none": HubDataset({COMMIT: {"notes.txt": b"nothing"}}),
    "o/private": HubDataset({COMMIT: {"train.jsonl": _lines("p1")}}, token="hf_right"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub(DATASETS) as running:
        yield running


def _open(server: Hub, home: Path, *words: str, **environment: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *words],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "127.0.0.1",
            **environment,
        },
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")  # no bars where nobody looks
    return [json.loads(line) for line in done.stdout.splitlines()]


def _ids(found: dict[str, Any]) -> list[str]:
    return [row["instance_id"] for row in found["rows"]]


def test_splits_configs_and_revisions_are_chosen_and_the_label_names_the_commit(
    server: Hub, tmp_path: Path
) -> None:
    test, lite, later, plain, tasks = _open(
        server,
        tmp_path,
        "hf://o/listed?split=test",
        "hf://datasets/o/listed?config=lite",
        "hf://o/listed@next",
        f"hf://o/plain@{COMMIT}",
        "hf://o/tasks",
    )
    assert _ids(test) == ["t1", "t2", "t3"]
    assert test["label"] == f"hf://o/listed@{COMMIT}?split=test"
    assert test["name"] == "listed-test"
    assert (_ids(lite), lite["plain"]) == (["l1"], True)
    assert (_ids(later), later["label"]) == (["later"], f"hf://o/listed@{LATER}")
    assert (_ids(plain), plain["name"]) == (["x1"], "plain")
    (task,) = tasks["rows"]
    assert (task["repo"], task["patch"]) == ("o/n", "diff --git a/x b/x\n")


def test_the_files_of_a_config_are_those_in_its_directory(server: Hub, tmp_path: Path) -> None:
    (found,) = _open(server, tmp_path, "hf://o/directories?config=en")
    assert _ids(found) == ["e1"]


def test_only_two_asterisks_cross_directories(server: Hub, tmp_path: Path) -> None:
    top, everything = _open(
        server, tmp_path, *(f"hf://o/patterns?config={n}" for n in ("top", "all"))
    )
    assert _ids(top) == ["r1"]
    assert sorted(_ids(everything)) == ["o1", "r1"]


def test_what_cannot_be_chosen_or_read_is_said(server: Hub, tmp_path: Path) -> None:
    several, unknown, missing, revision, none = _open(
        server,
        tmp_path,
        "hf://o/listed",
        "hf://o/listed?split=train",
        "hf://o/missing",
        "hf://o/plain@nowhere",
        "hf://o/none",
    )
    assert (several["code"], several["hint"]) == ("usage", "add split= with one of dev, test")
    assert "there is no train" in unknown["message"]
    assert (missing["code"], "HF_TOKEN" in missing["hint"]) == ("upstream-not-found", True)
    assert revision["code"] == "upstream-not-found"
    assert (none["code"], "no files of rows" in none["message"]) == ("invalid-dataset", True)


def test_without_a_network_the_cache_answers_and_says_what_it_lacks(
    server: Hub, tmp_path: Path
) -> None:
    word = "hf://o/listed?split=test"
    (before,) = _open(server, tmp_path, word)
    asked = len(server.seen)
    again, other = _open(server, tmp_path, word, "hf://o/listed?split=dev", HF_HUB_OFFLINE="1")
    assert len(server.seen) == asked
    assert again == before
    assert other["code"] == "upstream-failed"


def test_a_private_dataset_needs_its_token(server: Hub, tmp_path: Path) -> None:
    (denied,) = _open(server, tmp_path, "hf://o/private")
    (found,) = _open(server, tmp_path, "hf://o/private", HF_TOKEN="hf_right")
    assert denied["code"] == "upstream-not-found"
    assert _ids(found) == ["p1"]


def test_without_huggingface_hub_the_error_says_how_to_get_it(server: Hub, tmp_path: Path) -> None:
    """A package that fails to import shadows the real one."""
    broken = tmp_path / "broken/huggingface_hub"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('none')")
    project = Path(__file__).parents[2]
    path = f"{broken.parent}:{project}"
    (found,) = _open(server, tmp_path, "hf://o/plain", PYTHONPATH=path)
    assert (found["code"], "mirrord[hub]" in found["hint"]) == ("resource", True)


@pytest.mark.parametrize(
    "word", ["hf://name", "hf://o/n?splits=test", "hf://o/n?split=", "hf://o/n/m", "hf://o/n@"]
)
def test_other_forms_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        HubName.parse(word)
