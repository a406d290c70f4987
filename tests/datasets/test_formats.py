"""All formats of dataset rows: detection, fields, and real files."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from dataset_rows import BASE, DATA, SETUP, Case, reasons, row
from pyarrow import parquet

from mirrord.datasets.fields import STANDARD, parse_mapping
from mirrord.datasets.formats import COLUMNS, FORMATS, format_infos
from mirrord.errors import InvalidDatasetError, InvalidRequestError
from mirrord.model import MirrorName
from mirrord.sources.opening import open_sources

GOLD = "c0ffee1234" * 4
PLAIN = {"instance_id": "psf__requests-1", "repo": "psf/requests", "base_commit": BASE}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def read_one(case: Case, value: dict[str, Any], **options: Any) -> dict[str, Any]:
    result = case.read([value], **options)
    assert (result.row_count, result.fault_count) == (1, 0)
    return case.rows[0] | {"format": result.format}


# -- how each is recognised -------------------------------------------------------------------------


SMITH = {"instance_id": "psf__requests.1a2b3c4d.pr_1", "repo": "swesmith/psf__requests.1a2b3c4d"}
PRO_ID = f"instance_psf__requests-{GOLD}-v626ec2a48416b10a88641359a169d99e935ff037"
PRO_COMMAND = (
    f"git reset --hard {BASE}\ngit clean -fd \ngit checkout {BASE} \n"
    f"git checkout {GOLD} -- test/a.py test/b.py"
)
MULTI = {"org": "psf", "repo": "requests", "number": 12, "base": {"ref": "main", "sha": BASE}}
NEMO = {"responses_create_params": {"metadata": {"instance_dict": json.dumps(row())}}}
GSO = {**PLAIN, "base_commit": f"{GOLD}^", "opt_commit": GOLD, "gt_diff": "d", "api": "x"}
SCALE = {
    "instance_id": "psf_requests_pr1",
    "user": "psf",
    "repo": "requests",
    "parent_commit": BASE,
    "pr_commit": GOLD,
    "f2p_patch": "t",
    "image_url": "i",
    "patch": "d",
    "FAIL_TO_PASS": "['a']",
    "PASS_TO_PASS": "[]",
    "workdir": "/workspace/requests",
}
COMMIT0 = {
    "instance_id": "commit-0/minitorch",
    "repo": "commit-0/minitorch",
    "base_commit": BASE,
    "reference_commit": GOLD,
    "setup": {"python": "3.12"},
    "src_dir": "minitorch",
}
CL = {
    "metadata": {**PLAIN, "created_at": "2020-01-01T00:00:00", "difficulty": "<15 min fix"},
    "task": {"problem_statement": "p"},
    "evaluation": {"patch": "d", "test_patch": "t", "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": []},
    "continual_learning": {"sequence_position": 1, "dependencies": [], "modified_files": ["a"]},
}
LANCER = {
    "question_id": "16912_4", "variant": "swe_manager", "prompt": "[]", "cwd": "/app/expensify",
    "manager_data": "{}", "manager_commit": GOLD, "acceptable_folders": "[]",
}  # fmt: skip

DETECTED: dict[str, list[dict[str, Any]]] = {
    "swe-bench": [row(), row(FAIL_TO_PASS=["a"], responses_create_params={"input": []})],
    "swe-bench-multilingual": [
        row(environment_setup_commit=..., FAIL_TO_PASS=["a"], created_at="2023-01-23 04:10:47"),
        row(environment_setup_commit=..., hints_text="", log_parser="x"),
    ],
    "swe-bench-multimodal": [
        row(environment_setup_commit=..., image_assets='{"problem_statement": []}')
    ],
    "swe-gym": [
        row(environment_setup_commit=..., hints_text="h"),
        row(environment_setup_commit=..., hints_text="", PASS_TO_PASS=[]),
    ],
    "swe-rebench": [
        row(install_config={"python": "3.9"}),
        row(FAIL_TO_FAIL=[]),
        row(PASS_TO_FAIL=[], environment_setup_commit=""),
        row(install_config={}, image_name="i", language="go", environment_setup_commit=...),
    ],
    "generic": [  # the second as NeMo Gym writes DeepSWE
        row(environment_setup_commit=..., created_at=...),
        {**PLAIN, "patch": "d", "language": "go", **NEMO},
    ],
    "swe-smith": [SMITH, {**SMITH, "image_name": "x"}, {**SMITH, "base_commit": BASE}],
    "image": [
        {"instance_id": "x", "docker_image": "o/i", "base_commit": ""},
        {"instance_id": "x", "image_url": f"docker://h/o/i:{GOLD}", "patch": "d"},
    ],
    "swe-minisandbox": [
        {**PLAIN, "image_name": "x", "python_version": "3.9"},
        {"instance_id": BASE, "repo": "psf/requests", "image_name": "x"},
    ],
    "swe-bench-pro": [
        {"instance_id": PRO_ID, "before_repo_set_cmd": PRO_COMMAND},
        row(before_repo_set_cmd="git checkout x", fail_to_pass="['a']"),
    ],
    "swe-bench-live": [row(commit_urls=[])],
    "swe-polybench": [row(F2P="['a']", P2P="[]", FAIL_TO_PASS=..., PASS_TO_PASS=...)],
    "multi-swe-bench": [MULTI],
    "r2e-gym": [{"repo_name": "pandas", "commit_hash": GOLD, "parsed_commit_content": "{}"}],
    "gso": [GSO],
    "scale-swe": [SCALE, {**SCALE, "parent_commit": None, "base_commit": BASE}],
    "commit0": [COMMIT0],
    "nemo-gym": [NEMO],
    "swe-bench-cl": [CL],
    "swe-lancer": [LANCER],
    "nested": [
        {"prompt": [], "instance": row(), "ability": "x"},
        {"prompt": [{"role": "user"}], "instance_id": "x", "instance": json.dumps(row())},
        {"data_source": "x", "extra_info": {"index": 1, "instance": row()}},
    ],
    "swe-bench-tasks": [row(task_folder="swe-bench-tasks")],
    "harbor": [row(task_folder="harbor")],
    "mirrord": [row(direction="forward", commits=[{"commit": BASE, "role": "base"}])],
}


@pytest.mark.parametrize("name", DETECTED)
def test_a_format_is_told_by_its_columns(case: Case, name: str) -> None:
    for value in DETECTED[name]:
        assert read_one(case, value)["format"] == name


def test_every_format_is_tried_and_shown() -> None:
    names = [info.name for info in format_infos()]
    assert names == [f.name for f in FORMATS]
    assert sorted(names) == sorted(DETECTED)


def test_a_format_that_is_asked_for_is_taken(case: Case) -> None:
    result = case.read([row()], asked="swe-gym")
    assert result.format == "swe-gym"
    assert result.commits == {"psf__requests": {BASE: "base", SETUP: "environment-setup"}}


def test_an_unknown_format_is_refused_with_the_nearest_one(case: Case) -> None:
    with pytest.raises(InvalidDatasetError) as caught:
        case.read([row()], asked="swe-bnech")
    assert "did you mean swe-bench?" in str(caught.value.hint)


def test_the_first_row_may_be_bad_and_the_format_is_told_all_the_same(case: Case) -> None:
    assert case.read([{"comment": "x"}, row(1)]).row_count == 1


def test_lower_case_lists_are_read_where_there_are_no_others(case: Case) -> None:
    found = read_one(case, row(FAIL_TO_PASS=..., fail_to_pass="['a']"))
    assert found["fail"] == ["a"]
    assert "fail_to_pass: fail_to_pass" in found["rules"]


@pytest.mark.parametrize("name", DETECTED)
def test_parquet_is_read_as_jsonl_is(case: Case, name: str) -> None:
    for value in DETECTED[name]:
        expected = read_one(case, value)
        # Parquet has no empty objects, and other columns are read for no row
        kept = {k: json.dumps(v) if v == {} else v for k, v in value.items()}
        table = pyarrow.Table.from_pylist([{**kept, "problem_statement": "x" * 1000}])
        parquet.write_table(table, case.directory / "f.parquet")
        assert case.read_path(case.directory / "f.parquet").format == name
        assert case.rows[0] | {"format": name} == expected


def test_only_columns_that_some_format_reads_are_read_from_parquet() -> None:
    assert {"repo", "created_at", "base_commit", "base", "before_repo_set_cmd"} <= COLUMNS
    assert {"problem_statement", "hints_text", "interface"}.isdisjoint(COLUMNS)


# -- what becomes of their values -------------------------------------------------------------------


def test_a_smith_row_names_a_branch_and_its_patch_brings_the_bug(case: Case) -> None:
    found = read_one(case, {**SMITH, "image_name": "swesmith.x86_64.x", "patch": "diff"})
    assert (found["mirror"], found["base"]) == ("swesmith__psf__requests.1a2b3c4d", None)
    assert (found["revision"], found["commits"]) == (SMITH["instance_id"], [])
    assert (found["direction"], found["history"]) == ("reverse", "squashed")
    assert (found["environment"], found["test_patch"]) == ("swesmith.x86_64.x", None)
    assert "revision: {instance_id} by default" in found["rules"]
    name = MirrorName.parse(SMITH["repo"])
    assert (name.owner, name.name) == ("swesmith", "psf__requests.1a2b3c4d")
    assert MirrorName.parse(str(name)) == name


def test_a_custom_row_is_at_the_commit_that_its_id_is_and_has_a_python(case: Case) -> None:
    custom = {"instance_id": BASE, "repo": "psf/requests", "image_name": "i", "patch": "d"}
    found = read_one(case, custom)
    assert (found["base"], found["revision"], found["commits"]) == (BASE, None, [[BASE, "base"]])
    assert (found["environment"], found["python"]) == ("i", "3.11")
    assert found["direction"] == "reverse"
    found = read_one(case, custom | PLAIN | {"python_version": "3.9", "direction": "forward"})
    assert (found["base"], found["python"], found["direction"]) == (BASE, "3.9", "forward")


def test_a_row_with_only_an_image_has_the_mirror_of_that(case: Case) -> None:
    """Named without commits, which may be the fix; the same for every row of the image."""
    image = f"h/o/i:{GOLD}"
    plain = read_one(case, {"instance_id": "x", "image_name": image})
    inner = json.dumps({"instance_id": "y", "docker_image": image})
    found = read_one(case, {"responses_create_params": {"metadata": {"instance_dict": inner}}})
    assert (found["mirror"], found["base"], found["revision"]) == (
        plain["mirror"],
        None,
        "image-head",
    )
    assert re.fullmatch(r"from-image__h-o-i-[0-9a-f]{12}", found["mirror"])
    assert found["environment"] == image


def test_columns_of_another_meaning_do_not_spoil_a_row(case: Case) -> None:
    other: dict[str, Any] = {"history": [{"role": "user"}], "direction": "ltr", "version": {"a": 1}}
    other |= {
        "revision": 7,
        "python_version": [3, 9],
        "gold_commits": {"a": 1},
        "image": b"x".hex(),
    }
    found = read_one(case, PLAIN | other)
    assert (found["direction"], found["history"], found["version"]) == ("forward", None, None)
    assert read_one(case, SMITH | other | {"revision": None})["direction"] == "reverse"


def test_a_revision_that_no_branch_can_have_is_a_bad_row(case: Case) -> None:
    rows = [{**SMITH, "instance_id": bad} for bad in ("a b", "-a", "a^{tree}", "a:b", "a\\b")]
    result = case.read([SMITH, *rows])
    assert (result.row_count, result.fault_count) == (1, 5)
    assert "cannot be the name of a branch" in reasons(result)[2]


def test_a_pro_row_has_its_commits_in_a_command_and_in_its_id(case: Case) -> None:
    partial = {"instance_id": PRO_ID, "before_repo_set_cmd": PRO_COMMAND}
    found = read_one(case, partial)
    assert (found["mirror"], found["base"]) == ("psf__requests", BASE)
    assert found["commits"] == [[BASE, "base"], [GOLD, "gold"]]
    assert "base_commit: from before_repo_set_cmd" in found["rules"]
    assert found["install"] == {"restored_files": ["test/a.py", "test/b.py"]}
    more = f"{PRO_COMMAND}\ncd web && npm ci\ngit checkout {SETUP}"
    found = read_one(case, {**partial, "before_repo_set_cmd": more})
    assert found["install"]["before_script"] == f"cd web && npm ci\ngit checkout {SETUP}"
    full = {**partial, "repo": "PSF/requests", "base_commit": SETUP, "fail_to_pass": "['a']"}
    found = read_one(case, full | {"dockerhub_tag": "psf.requests-1"})
    assert (found["mirror"], found["base"]) == ("PSF__requests", SETUP)
    assert (found["fail"], found["environment"]) == (["a"], "psf.requests-1")
    found = read_one(case, full | {"before_repo_set_cmd": ""})
    assert found["commits"] == [[SETUP, "base"], [GOLD, "gold"]]
    assert "gold_commits: from instance_id" in found["rules"]


def test_a_multi_row_has_organisation_and_repository_apart(case: Case) -> None:
    tests = {"t1": {"run": "FAIL", "fix": "PASS"}, "t2": None}
    found = read_one(
        case, {**MULTI, "fix_patch": "d", "fixed_tests": tests, "p2p_tests": {"name": ["p"]}}
    )
    assert (found["id"], found["mirror"], found["base"]) == (
        "psf__requests-12",
        "psf__requests",
        BASE,
    )
    assert (found["patch"], found["fail"], found["pass"]) == ("d", ["t1"], ["p"])
    found = read_one(case, {**MULTI, "number": "501-502-503", "instance_id": ""})
    assert found["id"] == "psf__requests-501-502-503"
    bad = case.read([MULTI, {**MULTI, "number": 2, "base": {"sha": "0" * 40}}])
    assert reasons(bad) == {2: f"base.sha '{'0' * 40}' is not a full commit id"}


def test_a_gso_row_is_at_the_parent_of_its_answer(case: Case) -> None:
    found = read_one(case, GSO)
    assert (found["base"], found["revision"], found["patch"]) == (None, f"{GOLD}^", "d")
    assert found["commits"] == [[GOLD, "gold"]]
    # a tag is no image: that of the format is named after the instance
    assert read_one(case, {**GSO, "instance_image_tag": "latest"})["environment"] is None


@pytest.mark.parametrize("column", ["golden_patch", "gold_patch"])
def test_a_patch_of_another_name_is_the_patch(case: Case, column: str) -> None:
    found = read_one(case, {**row(patch=...), column: "d"})
    assert found["patch"] == "d"
    assert read_one(case, {**row(patch="p"), column: "d"})["patch"] == "p"


def test_a_scale_row_has_its_owner_apart(case: Case) -> None:
    found = read_one(case, SCALE)
    assert (found["mirror"], found["base"]) == ("psf__requests", BASE)
    assert found["commits"] == [[BASE, "base"], [GOLD, "gold"]]
    assert (found["patch"], found["test_patch"], found["environment"]) == ("d", "t", "i")
    assert found["fail"] == ["a"]


def test_a_commit0_row_is_named_like_its_repository(case: Case) -> None:
    found = read_one(case, COMMIT0)
    assert (found["id"], found["mirror"]) == ("commit-0/minitorch", "commit-0__minitorch")
    assert found["commits"] == [[BASE, "base"], [GOLD, "gold"]]
    assert found["python"] == "3.12"


@pytest.mark.parametrize(
    "column", [{"owner": "psf"}, {"org": "psf"}, {"github_url": "https://github.com/psf/requests"}]
)
def test_the_owner_of_a_repository_may_be_in_another_column(
    case: Case, column: dict[str, str]
) -> None:
    found = read_one(case, {**row(repo="requests"), **column})
    assert found["mirror"] == "psf__requests"


@pytest.mark.parametrize("indent", [None, 1])
def test_tasks_in_sequences_are_rows(case: Case, indent: int | None) -> None:
    """As in SWE-Bench-CL, after what the file says of itself."""
    tasks = [{**CL, "metadata": {**PLAIN, "instance_id": f"i-{n}"}} for n in range(3)]
    sequences = [
        {"id": "s", "repo": "psf/requests", "tasks": tasks[:2], "statistics": {"rate": 1}},
        {"id": "t", "repo": "psf/requests", "tasks": tasks[2:]},
    ]
    file = {"metadata": {"name": "x"}, "evaluation_metrics": {"a": {}}, "sequences": sequences}
    result = case.read(json.dumps(file, indent=indent).encode())
    assert (case.ids, result.fault_count) == (["i-0", "i-1", "i-2"], 0)
    found = case.rows[0]
    assert (found["patch"], found["test_patch"], found["fail"]) == ("d", "t", ["a"])
    by_id = {"metadata": row(instance_id=...), "other": row(instance_id=...)}
    case.read(json.dumps(by_id, indent=indent).encode())
    assert case.ids == ["metadata", "other"]


def test_a_lancer_row_is_where_its_files_say(case: Case, tmp_path: Path) -> None:
    found = read_one(case, LANCER)
    assert (found["mirror"], found["revision"]) == ("Expensify__App", f"{GOLD}^")
    assert found["commits"] == [[GOLD, "gold"]]
    rows = [{**LANCER, "question_id": each, "manager_commit": ""} for each in ("1", "2_3", "4")]
    with (tmp_path / "tasks.csv").open("w") as file:
        table = csv.DictWriter(file, [*LANCER])
        table.writeheader()
        table.writerows(rows)
    for name, revert in (("1", f"git reset --hard {BASE}\n"), ("2_3", "")):
        (tmp_path / "issues" / name).mkdir(parents=True)
        (tmp_path / "issues" / name / "commit_id.txt").write_text(GOLD)
        (tmp_path / "issues" / name / "revert_command.txt").write_text(revert)
    result = case.read(b"".join(open_sources([str(tmp_path / "tasks.csv")]).pieces()))
    assert (case.rows[0]["base"], case.rows[0]["commits"][1:]) == (BASE, [[GOLD, "gold"]])
    assert case.rows[1]["base"] == GOLD
    assert [*reasons(result).values()] == [
        "its commit is in issues/ID/commit_id.txt, which is not beside the table"
    ]


VIEWER = {
    "features": [{"feature_idx": 0, "name": "repo", "type": {"dtype": "string"}}],
    "rows": [
        {"row_idx": n, "row": {**PLAIN, "instance_id": f"i-{n}"}, "truncated_cells": []}
        for n in range(3)
    ],
    "num_rows_total": 3,
}


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_of_the_hubs_viewer_are_unwrapped(case: Case, indent: int | None) -> None:
    """What the viewer truncated is not a row."""
    assert case.read(json.dumps(VIEWER, indent=indent).encode()).row_count == 3
    assert case.ids == ["i-0", "i-1", "i-2"]
    rows = [dict(each) for each in VIEWER["rows"]]  # type: ignore[attr-defined]
    rows[1]["truncated_cells"] = ["patch"]
    result = case.read(rows)
    assert (result.row_count, reasons(result)) == (
        2,
        {2: "the Hub's viewer truncated patch; fetch the file"},
    )


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_pandas", [False, True])
def test_an_object_of_columns_has_a_row_at_each_place(
    case: Case, indent: int | None, is_pandas: bool
) -> None:
    """As `to_dict` of datasets and `to_json` of pandas write it."""
    rows = [{**PLAIN, "instance_id": f"i-{n}", "FAIL_TO_PASS": [f"t{n}"]} for n in range(3)]
    columns: dict[str, Any] = {name: [each[name] for each in rows] for name in rows[0]}
    if is_pandas:
        columns = {k: {str(n): each for n, each in enumerate(v)} for k, v in columns.items()}
    assert case.read(json.dumps(columns, indent=indent).encode()).row_count == 3
    assert case.ids == ["i-0", "i-1", "i-2"]
    columns["repo"] = columns["repo"][:2] if not is_pandas else {"0": "a/b"}
    with pytest.raises(InvalidDatasetError):
        case.read(json.dumps(columns, indent=indent).encode())


@pytest.mark.parametrize("indent", [None, 2])
def test_one_row_with_objects_in_its_lists_is_one_row(case: Case, indent: int | None) -> None:
    value = {**MULTI, "resolved_issues": [{"number": 1, "title": "t"}]}
    assert case.read(json.dumps(value, indent=indent).encode()).row_count == 1


UNKNOWN: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "an owner apart": (
        {"task_id": "t", "owner": "psf", "name": "requests", "project": "requests", "sha": BASE},
        {"instance_id": "task_id", "repo": "{owner}/{project}", "base_commit": "sha"},
    ),
    "objects": (
        {
            "uid": "t",
            "repository": {"full_name": "psf/requests"},
            "solution": "d",
            "pull": {"base_sha": BASE},
            "merge_commit_sha": GOLD,
            "F2P": ["a"],
        },
        {
            "instance_id": "uid",
            "repo": "repository.full_name",
            "base_commit": "pull.base_sha",
            "gold_commits": "merge_commit_sha",
            "patch": "solution",
            "fail_to_pass": "F2P",
        },
    ),
    "a bug and its fix": (
        {"bug_id": "b-1", "repo": "psf/requests", "commit_hash": GOLD, "revision_buggy": BASE},
        {"instance_id": "bug_id", "base_commit": "revision_buggy"},
    ),
    "a URL and a number": (
        {"repo_url": "https://github.com/psf/requests", "pr_number": 7, "Parent-Commit": BASE},
        {"repo": "repo_url", "base_commit": "Parent-Commit"},
    ),
    "capitals": (
        {"taskId": "t", "repoName": "psf/requests", "baseCommit": BASE, "failToPass": ["a"]},
        {"instance_id": "taskId", "base_commit": "baseCommit", "fail_to_pass": "failToPass"},
    ),
    "only a fix": (
        {"id": "5", "repo_addr": "https://github.com/psf/requests", "fixing_commit": GOLD},
        {"repo": "repo_addr", "base_commit": "{fixing_commit}^", "gold_commits": "fixing_commit"},
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_unknown_shape_is_answered_with_a_mapping_to_use(
    case: Case, kind: str, suffix: str
) -> None:
    value, expected = UNKNOWN[kind]
    path = case.directory / f"f.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([value]), path)
    else:
        path.write_text(json.dumps(value) + "\n")
    with pytest.raises(InvalidDatasetError) as caught:
        case.read_path(path)
    mapping = caught.value.facts["mapping"]
    assert mapping.strip() in str(caught.value.hint)
    for field, column in expected.items():
        assert f'{field} = "{column}"' in mapping
    result = case.read_path(path, parse_mapping(mapping))
    assert (result.row_count, list(result.names)) == (1, ["psf__requests"])
    read = case.rows[0]["base"], case.rows[0]["revision"]
    assert read == ((None, f"{GOLD}^") if "^" in mapping else (BASE, None))


def test_a_guess_says_which_fields_are_missing(case: Case) -> None:
    with pytest.raises(InvalidDatasetError) as caught:
        case.read([{"comment": "x", 'a"b{c}': "y"}])
    assert caught.value.facts["mapping"].count("no column looks like it") == 3
    parse_mapping(caught.value.facts["mapping"])


def test_a_live_row_keeps_the_commits_of_its_pull_request_as_gold(case: Case) -> None:
    urls = [f"https://api.github.com/repos/psf/requests/git/commits/{c}" for c in (GOLD, BASE)]
    found = read_one(case, row(commit_urls=urls, docker_image="i", environment_setup_commit=...))
    assert found["commits"] == [[BASE, "base"], [GOLD, "gold"]]
    assert found["environment"] == "i"


def test_a_poly_row_has_its_tests_as_python_literals(case: Case) -> None:
    found = read_one(case, {**PLAIN, "F2P": "['a', \"b\"]", "P2P": "['c']"})
    assert (found["fail"], found["pass"]) == (["a", "b"], ["c"])


FILE = {
    "header": {"file": {"path": "src/a.py"}},
    "index_line": {"old_commit_hash": "1234567", "new_commit_hash": "89abcde", "mode": "100644"},
    "minus_file": {"path": "a/src/a.py"},
    "plus_file": {"path": "b/src/a.py"},
    "is_binary_file": False,
    "hunks": [
        {
            "descriptor": {
                "old_range": {"start": 1, "length": 2},
                "new_range": {"start": 1, "length": None},
                "section": "def f():",
            },
            "line_group": {
                "all_lines": [
                    {"content": "kept", "type": "context"},
                    {"content": "old", "type": "deleted"},
                    {"content": "No newline at end of file", "type": "note"},
                ]
            },
        }
    ],
}
FILE_PATCH = """\
diff --git a/src/a.py b/src/a.py
index 1234567..89abcde 100644
--- a/src/a.py
+++ b/src/a.py
@@ -1,2 +1 @@ def f():
 kept
-old
\\ No newline at end of file
"""


def r2e(**changes: Any) -> dict[str, Any]:
    tests = {**FILE, "header": {"file": {"path": "tests/test_a.py"}, "misc_line": "new file"}}
    parsed: dict[str, Any] = {
        "file_diffs": [FILE, tests, {**FILE, "is_binary_file": True}],
        "old_commit_hash": f"{GOLD}^",
        "new_commit_hash": GOLD,
        "commit_date": "2020-01-01T00:00:00",
    }
    content = json.dumps(parsed | changes)
    image = f"namanjain12/pandas_final:{GOLD}"
    return {"repo_name": "pandas", "docker_image": image, "parsed_commit_content": content}


def test_an_r2e_row_is_at_the_parent_of_its_commit(case: Case) -> None:
    found = read_one(case, r2e())
    assert (found["mirror"], found["id"]) == ("pandas-dev__pandas", f"pandas-dev__pandas-{GOLD}")
    assert (found["base"], found["revision"]) == (None, f"{GOLD}^")
    assert found["commits"] == [[GOLD, "gold"]]
    assert found["patch"] == FILE_PATCH
    assert found["test_patch"].startswith(
        "diff --git a/tests/test_a.py b/tests/test_a.py\nnew file\n"
    )
    assert found["created"] == "2020-01-01T00:00:00+00:00"
    found = read_one(case, r2e(old_commit_hash=BASE, file_diffs=[]))
    assert (found["base"], found["patch"]) == (BASE, None)


def test_an_r2e_row_that_cannot_be_read_says_why(case: Case) -> None:
    content = "parsed_commit_content"
    rows = [r2e(), r2e() | {content: "{"}, r2e() | {"repo_name": "left-pad"}]
    rows += [r2e(new_commit_hash="") | {"docker_image": "x"}, r2e(file_diffs=[{"hunks": 1}])]
    found = reasons(case.read(rows))
    assert found[2] == "parsed_commit_content is not a JSON object"
    assert "'left-pad' is not a known repository" in found[3]
    assert "full commit id" in found[4]
    assert "unknown shape" in found[5]


def test_a_wrapped_row_is_read_by_the_table_again(case: Case) -> None:
    found = read_one(case, NEMO)
    assert (found["id"], found["base"], found["fail"]) == ("psf__requests-1", BASE, ["t1", "t2"])
    assert "row inside: swe-bench" in found["rules"]
    inner = {"before_repo_set_cmd": PRO_COMMAND}
    outer = {"metadata": {"instance_id": PRO_ID, "instance_dict": inner}}
    found = read_one(case, {"responses_create_params": json.dumps(outer)})
    assert found["commits"] == [[BASE, "base"], [GOLD, "gold"]]
    assert found["rules"][0] == "row inside: swe-bench-pro"
    found = read_one(case, {"task_folder": "harbor", **PLAIN, "F2P": "['a']", "P2P": "[]"})
    assert found["fail"] == ["a"]
    broken = {"responses_create_params": {"metadata": {"instance_dict": "{"}}}
    assert case.read([NEMO, broken]).fault_count == 1


def test_a_task_folder_without_a_commit_is_a_bad_row(case: Case) -> None:
    folder = {"task_folder": "harbor", "instance_id": "a", "repo": "psf/requests"}
    result = case.read([row(task_folder="harbor"), {**folder, "image_name": "python:3.11"}])
    assert reasons(result) == {2: "base_commit is missing"}


# -- a mapping --------------------------------------------------------------------------------------


MAPPING = """
instance_id = ["name", "{org}__{repo}-{nr}"]
repo = "{org}/{repo}"
base_commit = "base.sha"
patch = "fix"
FAIL_TO_PASS = "meta.tests"
direction = "reverse"

[defaults]
python_version = 3.12
image_name = "img-{nr}"
"""


def test_a_mapping_says_which_column_is_what(case: Case) -> None:
    columns = parse_mapping(MAPPING)
    mine = {"org": "psf", "repo": "requests", "nr": 7, "base": json.dumps({"sha": BASE})}
    mine |= {"fix": "diff", "meta": {"tests": ["a"]}, "version": "1.0"}
    found = read_one(case, mine, asked=columns)
    assert (found["format"], found["id"], found["mirror"]) == (
        "mapping",
        "psf__requests-7",
        "psf__requests",
    )
    assert (found["base"], found["patch"], found["fail"]) == (BASE, "diff", ["a"])
    assert (found["direction"], found["python"], found["environment"]) == (
        "reverse",
        "3.12",
        "img-7",
    )
    assert found["version"] == "1.0", "what a mapping does not name is in SWE-bench's columns"
    table = pyarrow.Table.from_pylist([{**mine, "other": "x"}])
    parquet.write_table(table, case.directory / "f.parquet")
    assert case.read_path(case.directory / "f.parquet", columns).row_count == 1
    assert case.rows[0]["fail"] == ["a"]
    result = case.read([mine, {"org": "psf", "repo": "x", "nr": 1}], asked=columns)
    assert reasons(result) == {2: "base.sha is missing"}


BAD_MAPPINGS = {
    "repo = ": "not TOML",
    "repo = 3": "repo must be a column",
    "repo = []": "repo must be a column",
    'repoo = "a"': "did you mean repo?",
    'repo = "{org}/{"': "each { } must name a column",
    'repo = "{}"': "each { } must name a column",
    "defaults = 1": "defaults is not a table",
    '[defaults]\ndirection = "sideways"': "must be one of forward, reverse",
    '[defaults]\nversion = ["a"]': "defaults.version must be text or a number",
    '[defaults]\nnothing = "a"': "'nothing' is not a field",
    "x = [" * 1600: "not TOML",
    "#" * 9000: "longer than 8 KiB",
}


@pytest.mark.parametrize("text", BAD_MAPPINGS, ids=lambda text: text[:20])
def test_a_bad_mapping_is_refused_with_its_faults(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(BAD_MAPPINGS[text])):
        parse_mapping(text)


def test_all_faults_of_a_mapping_are_told_at_once() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_mapping('repo = 1\nxyz = "a"\n')
    assert "repo must be" in caught.value.message
    assert "'xyz' is not a field" in caught.value.message


def test_a_mapping_of_every_field_is_taken() -> None:
    text = "".join(f'{field} = "my_{field}"\n' for field in STANDARD.sources)
    assert parse_mapping(text).names() == {f"my_{field}" for field in STANDARD.sources}


# -- real files -------------------------------------------------------------------------------------


REAL = {
    "swe-bench/SWE-bench_Lite__test.parquet": ("swe-bench", 300, 12),
    "swe-bench/SWE-bench_Lite__dev.parquet": ("swe-bench", 23, 6),
    "swe-bench/SWE-bench_Multilingual__test.parquet": ("swe-bench-multilingual", 300, 41),
    "swe-bench/requests-flask.jsonl": ("swe-bench", 17, 2),
    "formats/sweagent__swe-bench-dev-easy.json": ("swe-bench", 4, 3),
    "formats/nemo-gym.swebench.example.jsonl": ("swe-bench", 5, 1),
    "formats/swe-gym.from-nemo-gym-swerl_gen.jsonl": ("swe-gym", 5, 5),
    "formats/swesmith__pandas-dev__pandas.95280573.pr_53652.json": ("swe-smith", 1, 1),
    "formats/swe-bench-pro.partial-runtime-fields.jsonl": ("swe-bench-pro", 5, 5),
}


def count_rows(file: Path) -> int:
    if file.suffix == ".parquet":
        return int(parquet.read_metadata(file).num_rows)
    if file.suffix == ".jsonl":
        return len(file.read_text().splitlines())
    value = json.loads(file.read_text())
    return len(value) if isinstance(value, list) else 1


NO_PATCHES = {"formats/swe-bench-pro.partial-runtime-fields.jsonl"}


@pytest.mark.parametrize("file", REAL)
def test_real_files_are_read_whole(case: Case, file: str) -> None:
    if not (DATA / file).exists():
        pytest.skip("the real dataset files are not on this machine")
    result = case.read_path(DATA / file)
    assert (result.format, result.row_count, len(result.names)) == REAL[file]
    again = result.rules.get("the same row again, ignored", 0)
    assert (result.fault_count, result.row_count + again) == (0, count_rows(DATA / file))
    for line in case.rows:
        assert bool(line["base"]) != bool(line["revision"])
        if file not in NO_PATCHES:
            assert line["patch"]
            assert line["fail"] or line["pass"]
            assert line["test_patch"] or line["direction"] == "reverse"


def test_a_made_up_row_of_multi_swe_bench_is_whole_but_for_its_commit(case: Case) -> None:
    file = DATA / "formats/multi-swe-bench.SYNTHETIC-schema-fixture.jsonl"
    if not file.exists():
        pytest.skip("the real dataset files are not on this machine")
    with pytest.raises(InvalidDatasetError) as caught:
        case.read_path(file)
    [fault] = caught.value.facts["faults"]
    assert (fault["line"], fault["instance"]) == (1, "acme__calc-12")
    assert fault["reason"] == f"base.sha '{'0' * 40}' is not a full commit id"
    content = file.read_bytes().replace(b"0" * 40, BASE.encode())
    found = read_one(case, json.loads(content))
    assert (found["id"], found["mirror"], found["base"]) == ("acme__calc-12", "acme__calc", BASE)
    assert (found["fail"], found["pass"]) == (["t"], [])


def test_what_installs_a_row_is_kept_and_nothing_else_of_its_column(case: Case) -> None:
    config = {"python": 3.9, "pre_install": None, "install": ["a", 1], "env_vars": {"A": 1}}
    found = read_one(case, row(install_config={**config, "patch": "secret"}, log_parser="django"))
    assert found["install"] == {
        "python": "3.9",
        "install": ["a", "1"],
        "env_vars": {"A": "1"},
        "log_parser": "django",
    }
    assert "install" not in read_one(case, row(install_config=[1]))
    assert "install" not in read_one(case, row(install_config={"install": "x" * 70_000}))
