"""Files and requests that nobody sends in good faith: each is read, or answered with its class of error."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirrord.bundles.bundle_file import read_header
from mirrord.cli.main import run
from mirrord.config import Settings, setting_keys
from mirrord.datasets.fields import parse_mapping
from mirrord.datasets.reading import read_dataset
from mirrord.environments.recipes import recipes_of_toml
from mirrord.errors import (
    InvalidBundleError,
    InvalidDatasetError,
    InvalidRecipeError,
    InvalidRequestError,
    UsageError,
)
from mirrord.patches.parse import NeedsGitError, named_paths, parse
from mirrord.patches.repairs import recount, to_lf, unwrap
from mirrord.runs.prediction_file import read_predictions

pytestmark = pytest.mark.slow

# Seeds are fixed: a run in CI tries what the last one tried.
fuzzed = settings(
    max_examples=200, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

_COLUMNS = (
    "instance_id", "repo", "base_commit", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS",
    "version", "created_at", "environment_setup_commit", "commits", "direction", "org", "base",
    "parsed_commit_content", "before_repo_set_cmd", "commit_urls", "image_name", "task.yaml",
    "responses_create_params", "install_config", "model_patch", "model_name_or_path",
)  # fmt: skip
_ODD_TEXT = st.sampled_from(
    ["", "..", "../../etc", "psf/requests", "-u/x", "a/b\0", "\x1b[31m", "\u202e", "1" * 40, "g" * 40, "9" * 5000,
     "ext::sh", "https://a:b@h/x", "2024-13-99", "[" * 3000, "'", "\ud800", "[1, 2", "refs/mirrord/x", "\uffff"]
)  # fmt: skip
_LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | _ODD_TEXT
_VALUE = st.recursive(
    _LEAF,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(_COLUMNS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=4,
)
_ROW = st.dictionaries(st.sampled_from(_COLUMNS), _VALUE, min_size=1, max_size=4)
_GOOD = {
    "instance_id": "o__r-1",
    "repo": "o/r",
    "base_commit": "1" * 40,
    "patch": "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "",
}


def _spoiled(content: bytes, chance: random.Random) -> bytes:
    """Cut, flipped, doubled, or packed."""
    if not content or (deed := chance.randrange(6)) == 0:
        return content
    at = chance.randrange(len(content))
    return (
        content[:at],
        content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :],
        content[:at] + content,
        gzip.compress(content)[: -chance.randrange(1, 12)],
        b"PAR1" + content,
    )[deed - 1]


_ROWS = st.builds(
    lambda rows, whole, chance: _spoiled(
        json.dumps(rows).encode()
        if whole
        else b"".join(json.dumps(row).encode() + b"\n" for row in rows),
        chance,
    ),
    st.lists(_ROW | _ROW.map(lambda row: _GOOD | row), max_size=2),
    st.booleans(),
    st.randoms(use_true_random=False),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@fuzzed
@given(content=_ROWS | st.binary(max_size=300))
def test_a_dataset_is_read_or_refused(scratch: Path, content: bytes) -> None:
    """Rows that are not read are counted, each with its line."""
    file, spool = scratch / "rows", scratch / "spool"
    file.write_bytes(content)
    spool.unlink(missing_ok=True)
    with suppress(InvalidDatasetError):
        result = read_dataset(file, "rows.jsonl", None, spool)
        assert result.row_count
        assert len(result.faults) == result.fault_count
    for row in read_predictions_or_none(file):
        assert row.line >= 1


def read_predictions_or_none(file: Path) -> list[Any]:
    try:
        return list(read_predictions(file))
    except UsageError:
        return []


_KEYS = [key for key, _ in setting_keys(Settings)]
_TOML = (
    st.integers().map(str)
    | st.floats().map(str)
    | st.text(max_size=20).map(json.dumps)
    | st.sampled_from(
        ['"1h"', '"-1h"', '"999999999999w"', '"1GiB"', "true", "[]", "[[]]", "{}", "'", '"""', "1e400", "0x10",
         '"\\UFFFFFFFF"', "1979-05-27", '["a", 1]', '"/"', '"/etc/\\u0000"', '"~root"', "inf", "9" * 400]
    )
)  # fmt: skip


def _setting(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    return f"[{section}]\n{name} = {value}\n" if section else f"{name} = {value}\n"


_CONFIGURATION = st.lists(
    st.builds(_setting, st.sampled_from(_KEYS), _TOML)
    | st.builds("[[{}]]\n{} = {}\n".format, st.sampled_from(["mirror", "grading.rules", "access"]),
                st.sampled_from(["repo", "url", "name", "paths"]), _TOML)
    | st.text(alphabet="[]{}=\"'\\.#,\n aU0-9_:x", max_size=30),
    max_size=5,
).map("".join)  # fmt: skip


@fuzzed
@given(text=_CONFIGURATION)
def test_a_configuration_is_read_or_its_faults_are_told(scratch: Path, text: str) -> None:
    """By the command that a person asks; 1 would be a bug."""
    file = scratch / "config.toml"
    file.write_text(text, errors="replace")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = run(["--config", str(file), "config", "check"])
    err.flush()
    said = err.buffer.getvalue().decode()
    assert status in {0, 2}, (text, said)
    assert (status == 2) == said.startswith("mirrord: ")


_MAPPING = st.dictionaries(st.sampled_from([*_COLUMNS, "fields", "rules"]), _VALUE, max_size=5)


@fuzzed
@given(text=_CONFIGURATION | _MAPPING.map(json.dumps) | st.text(max_size=80))
def test_a_mapping_and_a_recipe_are_read_or_refused(text: str) -> None:
    with suppress(InvalidRequestError):
        parse_mapping(text)
    for source in (text, f"[[recipe]]\n{text}", f'[recipe.x]\npython = "3.11"\n{text}'):
        with suppress(InvalidRecipeError):
            recipes_of_toml(source, "recipes.toml")


_PATCH_LINES = st.lists(
    st.sampled_from(
        [b"diff --git a/f b/f", b"--- a/f", b"+++ b/f", b"--- /dev/null", b"+++ /dev/null", b"@@ -1 +1 @@",
         b"@@ -0,0 +1,999999999 @@", b"@@ -1,2 +1", b"new file mode 100644", b"old mode 120000", b"index 1..2 160000",
         b"rename from ../x", b"rename to .git/config", b"copy from \"a\\", b"GIT binary patch", b"literal 9", b"-- ",
         b"similarity index 100%", b'--- "a/\\377\\0"', b"+x", b"-x", b" x", b"\\ No newline", b"", b"\r", b"\0"]
    )
    | st.binary(max_size=12),
    max_size=14,
).map(lambda lines: b"\n".join(lines) + b"\n")  # fmt: skip


@fuzzed
@given(patch=_PATCH_LINES)
def test_a_patch_is_parsed_or_left_to_git(patch: bytes) -> None:
    for text in (patch, recount(patch), unwrap(patch), to_lf(patch)):
        for as_patch in (False, True):
            with suppress(NeedsGitError):
                parse(text, as_patch=as_patch)
        named_paths(text)


_HEAD_LINES = st.lists(
    st.sampled_from(
        [b"# v2 git bundle", b"# v3 git bundle", b"@object-format=sha1", b"@filter=blob:none", b"-" + b"1" * 40,
         b"1" * 40 + b" refs/heads/x", b"1" * 40 + b" ../../x", b"1" * 40 + b" ", b"PACK", b"", b"x" * 9000, b"\xff"]
    ),
    max_size=6,
)  # fmt: skip


@fuzzed
@given(lines=_HEAD_LINES, sign=st.booleans())
def test_a_bundles_header_is_read_or_refused(scratch: Path, lines: list[bytes], sign: bool) -> None:
    file = scratch / "bundle"
    file.write_bytes(b"\n".join([b"# v2 git bundle"] * sign + lines) + b"\n")
    with suppress(InvalidBundleError):
        assert read_header(file).refs


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with daemon() as made:
        yield made


def _of_schema(schema: dict[str, Any], chance: random.Random, odd: Callable[[], Any]) -> Any:
    """A value that fits in parts: each property is of its type, or anything."""
    if chance.random() < 0.3:
        return odd()
    if "properties" in schema:
        chosen = [key for key in schema["properties"] if chance.random() < 0.6]
        return {key: _of_schema(schema["properties"][key], chance, odd) for key in chosen}
    if any_of := schema.get("anyOf"):
        return _of_schema(chance.choice(any_of), chance, odd)
    plain = {
        "string": "x",
        "integer": 7,
        "boolean": True,
        "array": ["x"],
        "null": None,
        "object": {},
    }
    return chance.choice(schema.get("enum", [plain.get(schema.get("type", ""), "x")]))


@pytest.mark.root
def test_every_route_answers_whatever_it_is_sent(running: Daemon) -> None:
    """As root, whom nothing is refused: no answer is a bug, and each is documented for its route."""
    document = running.json("GET", "/v1/openapi.json")
    schemas = document["components"]["schemas"]
    chance = random.Random(16)
    leaves = [
        "",
        "..",
        "%2e%2e",
        "x" * 5000,
        "\x1b[1m",
        "1" * 40,
        -1,
        2**70,
        1.5,
        None,
        [],
        {},
        [[]],
        "o/r",
        "\ud800",
    ]
    asked = 0
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            if method not in {"get", "post", "delete"} or path == "/v1/events":
                continue
            content = described.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            schema = schemas.get(reference.rpartition("/")[2], {})
            for _ in range(8):
                words = (
                    chance.choice(["x", "%00", "..%2f..", "a" * 300, "1" * 40, "%ff"])
                    for _ in iter(int, 1)
                )
                target = re.sub(r"\{[^}]*\}", lambda _, w=words: next(w), path)  # type: ignore[misc]
                if chance.random() < 0.5:
                    target += f"?limit={chance.choice(['-1', 'x', '%00', '9' * 30])}&view=%1b&x=[]"
                odd = lambda: chance.choice(leaves)  # noqa: E731
                body: Any = _of_schema(schema, chance, odd) if method == "post" else None
                if content and not schema:
                    body = chance.randbytes(chance.randrange(200))
                status, headers, answer = running.request(method.upper(), target, body)
                asked += 1
                assert status < 500 or status in {503, 504, 507}, (method, target, body, answer)
                if status >= 400:
                    assert headers["content-type"] == "application/problem+json"
    assert asked > 400
    assert not [line for line in running.log_lines if line["event"] == "request.crashed"]
    assert running.get("/v1/health")[0] == 200
