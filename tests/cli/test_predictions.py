"""Files of predictions as they are written in the field, and the report on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from httpserver import Handler, Route, serving
from waiting import until

from mirrord import Client
from mirrord.cli.main import run
from mirrord.cli.predictions import grade_all
from mirrord.cli.session import Session
from mirrord.errors import AccessError, InstanceNotFoundError, PatchConflictError, UsageError
from mirrord.model import SteeringKind
from mirrord.protocol import Grade, Steering
from mirrord.quoting import quote_name
from mirrord.runs.prediction_file import Fault, Prediction, read_predictions
from mirrord.runs.predictions import GradedPrediction, GradingReport, State

ROWS = [
    {"instance_id": f"psf__requests-{n}", "model_patch": f"diff {n}\n", "model_name_or_path": "m"}
    for n in range(3)
]
READ = [Prediction(n + 1, f"psf__requests-{n}", "m", f"diff {n}\n".encode()) for n in range(3)]
BY_ID = {row["instance_id"]: {k: v for k, v in row.items() if k != "instance_id"} for row in ROWS}
LAYOUTS = {
    "lines": "".join(json.dumps(row) + "\n" for row in ROWS),
    "lines without an end": "\n".join(map(json.dumps, ROWS)),
    "an array": json.dumps(ROWS),
    "an array over lines": json.dumps(ROWS, indent=2),
    "an array with a row on each line": "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
    "by id": json.dumps(BY_ID),
    "by id over lines": json.dumps(BY_ID, indent=4),
    "by id, with ids inside": json.dumps({row["instance_id"]: row for row in ROWS}),
    "a byte order mark": "\ufeff" + "".join(json.dumps(row) + "\n" for row in ROWS),
}


def read(tmp_path: Path, content: str | bytes) -> list[Prediction | Fault]:
    file = tmp_path / "predictions"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_predictions(file))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_field_is_read(tmp_path: Path, layout: str) -> None:
    assert read(tmp_path, LAYOUTS[layout]) == READ


PATCH = "diff 0\n"
ROW = Prediction(1, "psf__requests-0", "m", PATCH.encode())
SHAPES: dict[str, Any] = {
    "SWE-bench Pro": {"instance_id": ROW.instance, "patch": PATCH, "prefix": "m"},
    "Multi-SWE-bench": {"org": "psf", "repo": "requests", "number": 0, "fix_patch": PATCH},
    "Multi-SWE-bench, text": {"org": "psf", "repo": "requests", "number": "0", "fix_patch": PATCH},
    "OpenHands": {
        "instance_id": ROW.instance,
        "instance": {"patch": "gold", "instance_id": "x"},
        "test_result": {"git_patch": PATCH},
        "metadata": {"llm_config": {"model": "m"}},
    },
    "beside the gold patch": {**ROWS[0], "patch": "gold"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("indent", [None, 2])
def test_rows_of_other_harnesses_are_read(tmp_path: Path, shape: str, indent: int | None) -> None:
    """On a line, in an array, and one row over several lines."""
    row = SHAPES[shape]
    expected = [ROW._replace(model="") if "org" in row else ROW]
    assert read(tmp_path, json.dumps(row, indent=indent)) == expected
    assert read(tmp_path, json.dumps([row], indent=indent)) == expected


@pytest.mark.parametrize("indent", [None, 1])
def test_patches_by_id_are_rows(tmp_path: Path, indent: int | None) -> None:
    patch = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n"
    assert read(tmp_path, json.dumps({"a": None, "b": patch}, indent=indent)) == [
        Prediction(1, "a", "", b""),
        Prediction(2, "b", "", patch.encode()),
    ]


@pytest.mark.parametrize("patch", ["NaN", "null", '""', '" \\n"', '"nan"', '"None"'])
def test_what_is_no_patch_is_an_empty_one(tmp_path: Path, patch: str) -> None:
    rows = (
        '"instance_id": "i", "model_patch": %s',
        '"instance_id": "i", "patch": %s, "prefix": ""',
        '"instance_id": "i", "test_result": {"git_patch": %s}',
    )
    for row in rows:
        assert read(tmp_path, "{" + row % patch + "}\n") == [Prediction(1, "i", "", b"")]
    assert read(tmp_path, '{"instance_id": "i", "test_result": {}}') == [
        Prediction(1, "i", "", b"")
    ]


def test_a_directory_of_patches_is_read_by_their_names(tmp_path: Path) -> None:
    """Also as SWE-agent lays them out, a directory for each instance."""
    for name in ("a.patch", "b/b.patch", "c/patch.diff", "c/run.log", "empty.diff"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"" if "empty" in name else b"diff\xff\r\n")
    found = list(read_predictions(tmp_path))
    assert found == [
        Prediction(1, "a", "", b"diff\xff\r\n"),
        Prediction(2, "b", "", b"diff\xff\r\n"),
        Prediction(3, "c", "", b"diff\xff\r\n"),
        Prediction(4, "empty", "", b""),
    ]
    with pytest.raises(UsageError, match=r"without files ID\.patch"):
        bare = tmp_path / "bare"
        bare.mkdir()
        list(read_predictions(bare))


def test_a_directory_that_an_agent_wrote_is_read_as_its_predictions(tmp_path: Path) -> None:
    """SWE-agent's rows, one of them without a patch beside it; else the file of all."""
    for name, patch in (("a", "diff\n"), ("b", None)):
        (tmp_path / name).mkdir()
        row = {"instance_id": name, "model_name_or_path": "m", "model_patch": patch}
        (tmp_path / name / f"{name}.pred").write_text(json.dumps(row))
    (tmp_path / "a/a.patch").write_text("diff\n")
    found = [Prediction(1, "a", "m", b"diff\n"), Prediction(2, "b", "m", b"")]
    assert list(read_predictions(tmp_path)) == found
    rows = {"c": {"model_name_or_path": "m", "instance_id": "c", "model_patch": "diff\n"}}
    (tmp_path / "preds.json").write_text(json.dumps(rows))
    assert list(read_predictions(tmp_path)) == [Prediction(1, "c", "m", b"diff\n")]


def test_one_prediction_is_a_line_and_no_document(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(ROWS[0])) == READ[:1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "it is not a JSON object"),
        ("[1]", "it is not a JSON object"),
        ("7", "it is not a JSON object"),
        ('{"model_patch": "x"}', "it has no instance_id"),
        ('{"instance_id": 7, "model_patch": "x"}', "it has no instance_id"),
        ('{"instance_id": "", "model_patch": "x"}', "it has no instance_id"),
        ('{"instance_id": "i"}', "it has no model_patch"),
        ('{"instance_id": "i", "model_patch": ["x"]}', "it has no model_patch"),
        (
            '{"instance_id": "i", "model_patch": "\\ud800"}',
            "its model_patch is not valid Unicode",
        ),
        ("[" * 100_000, "it is not a JSON object"),
        (b"\xff\xfe", "it is not a JSON object"),
    ],
)
def test_a_bad_row_is_reported_by_its_line_and_skipped(
    tmp_path: Path, row: str | bytes, reason: str
) -> None:
    """Blank lines count, and are no rows."""
    bad = row if isinstance(row, bytes) else row.encode()
    lines = [json.dumps(ROWS[0]).encode(), b"", bad, json.dumps(ROWS[1]).encode()]
    found = read(tmp_path, b"\n".join(lines))
    assert found == [READ[0], Fault(3, reason), READ[1]._replace(line=4)]


def test_a_bad_first_line_spoils_no_other(tmp_path: Path) -> None:
    found = read(tmp_path, "{bad\n" + json.dumps(ROWS[0]) + "\n")
    assert found == [Fault(1, "it is not a JSON object"), READ[0]._replace(line=2)]


def test_a_long_document_on_one_line_is_told_from_a_long_row(tmp_path: Path) -> None:
    """By its first member; the rest is not read for that."""
    long = {**ROWS[0], "model_patch": "+" * 3_000_000}
    for content in (json.dumps({"i": long}), json.dumps(long), json.dumps([long])):
        (found,) = read(tmp_path, content)
        assert isinstance(found, Prediction)
        assert (found.line, len(found.patch)) == (1, 3_000_000)


def test_a_row_may_begin_with_an_object(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps({"info": {"a": {}}, **ROWS[0]}) + "\n") == READ[:1]


def test_null_is_an_empty_patch_and_a_model_may_be_missing(tmp_path: Path) -> None:
    assert read(tmp_path, '{"instance_id": "i", "model_patch": null}\n') == [
        Prediction(1, "i", "", b"")
    ]


@pytest.mark.parametrize("content", ["", "\n\n", "[]", "{}", '{"instance": "diff"}'])
def test_a_file_without_predictions_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError):
        read(tmp_path, content)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot read the predictions in"):
        list(read_predictions(tmp_path / name))


# -- many at once ----------------------------------------------------------------------------------


class Desk:
    """Answers for a daemon: grades, held until they are released."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.asked: list[dict[str, str]] = []
        self.reports: list[dict[str, Any]] = []
        self.most = self.now = 0
        self.lock = threading.Lock()
        self.hold = threading.Event()
        self.hold.set()
        self.hold_at: int | None = None

    def grade(self, handler: Handler) -> None:
        query = dict(parse_qsl(urlsplit(handler.path).query))
        instance = query["instance"]
        with self.lock:
            self.asked.append(query)
            identity = f"{len(self.asked):016}"
            self.now += 1
            self.most = max(self.most, self.now)
            if len(self.asked) == self.hold_at:
                self.hold.clear()
        time.sleep(0.01)
        self.hold.wait(90)
        with self.lock:
            self.now -= 1
        if instance.startswith("unknown"):
            handler.problem(404, "instance-not-found")
        elif instance.startswith("conflict"):
            handler.problem(409, "patch-conflict")
        elif instance.startswith("refused"):
            handler.problem(409, "steering-refused")
        elif instance.startswith("denied"):
            handler.problem(403, "not-allowed")
        elif instance.startswith("gone") and query["bind"] == "process":
            handler.problem(409, "process-gone")
        else:
            self.held.add(identity)
            changed = 0 if instance.startswith("empty") else 1
            handler.answer(replace(graded(changed=changed), id=identity).to_json())

    def report(self, handler: Handler) -> None:
        """Refused: that fails nothing else."""
        self.reports.append(json.loads(handler.server.seen[-1].body))
        handler.problem(507, "disk-full")

    def release(self, handler: Handler) -> None:
        self.held.remove(handler.path.rpartition("/")[2])
        handler.send_response(204)
        handler.send_header("content-length", "0")
        handler.end_headers()


@pytest.fixture
def desk(path: Path) -> Iterator[Desk]:
    made = Desk()
    routes: dict[tuple[str, str], Route] = {("POST", "/v1/grades"): made.grade}
    routes["POST", "/v1/reports"] = made.report
    routes |= {("DELETE", f"/v1/checkouts/{n:016}"): made.release for n in range(100)}
    with serving(path, routes):
        yield made


def grade_them(
    socket: Path, tmp_path: Path, instances: list[str], **choices: Any
) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and the lines of the report without the totals."""
    predictions, lines = tmp_path / "predictions.jsonl", tmp_path / "lines.jsonl"
    rows = [{"instance_id": name, "model_patch": "x"} for name in instances]
    predictions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session, status = Session(socket=str(socket)), 0
    known: dict[str, Any] = {"dataset": None, "jobs": 3, "keep": False}
    try:
        grade_all(session, predictions, reports=[lines], **{**known, **choices})
    except SystemExit as end:
        status = int(str(end.code))
    finally:
        session.close()
    return status, [json.loads(line) for line in lines.read_text().splitlines()][:-1]


def test_each_prediction_is_graded_and_released(desk: Desk, path: Path, tmp_path: Path) -> None:
    """So many at a time, tolerantly, with the choices of the command line."""
    names = [f"i-{n}" for n in range(20)]
    status, rows = grade_them(path, tmp_path, names, policy="drop", owner=65534)
    assert status == 0
    assert sorted(row["instance"] for row in rows) == sorted(names)
    assert {row["state"] for row in rows} == {"prepared"}
    assert desk.held == set()
    assert desk.most == 3
    wanted = {"strategy": "tolerant", "policy": "drop", "owner": "65534", "bind": "process"}
    assert all(query.items() >= wanted.items() for query in desk.asked)


@pytest.mark.parametrize(
    ("name", "state", "status"),
    [
        ("empty", "empty", 0),
        ("conflict", "conflict", 5),
        ("refused", "refused", 5),
        ("unknown", "unknown", 4),
        ("gone", "prepared", 0),
    ],
)
def test_what_became_of_a_prediction_is_named(
    desk: Desk, path: Path, tmp_path: Path, name: str, state: str, status: int
) -> None:
    """And others are graded all the same."""
    ended, rows = grade_them(path, tmp_path, ["i-1", name, "i-2"])
    assert ended == status
    assert {row["instance"]: row["state"] for row in rows} == {
        "i-1": "prepared",
        name: state,
        "i-2": "prepared",
    }
    assert desk.held == set()


def test_a_name_that_is_no_text_is_in_no_report_to_the_daemon(
    desk: Desk, path: Path, tmp_path: Path
) -> None:
    """Nor one that is longer than ids are; the others are."""
    names = ["unknown", "unknown\x00", "unknown" * 100]
    assert grade_them(path, tmp_path, names)[0] == 4
    [report] = desk.reports
    assert report["results"] == {"unknown": 3}
    assert report["faults"] == {"unknown": "unknown"}


def test_the_status_is_that_of_the_first_without_a_grade(
    desk: Desk, path: Path, tmp_path: Path
) -> None:
    assert grade_them(path, tmp_path, ["i", "unknown", "conflict"])[0] == 4


def test_the_last_row_of_an_instance_counts(desk: Desk, path: Path, tmp_path: Path) -> None:
    """As for SWE-bench; the earlier ones are named."""
    status, rows = grade_them(path, tmp_path, ["i", "j", "i"])
    assert status == 0
    assert {row["line"]: (row["state"], row["counts"]) for row in rows} == {
        1: ("duplicate", 3),
        2: ("prepared", None),
        3: ("prepared", None),
    }


def test_kept_grades_stay(desk: Desk, path: Path, tmp_path: Path) -> None:
    """Bound to no process."""
    _, rows = grade_them(path, tmp_path, ["i", "j"], keep=True)
    assert desk.held == {row["checkout"] for row in rows}
    assert {query["bind"] for query in desk.asked} == {"lease"}


def test_what_would_stop_all_stops_at_once(desk: Desk, path: Path, tmp_path: Path) -> None:
    """Missing rights, above all."""
    names = ["i", "denied", *(f"j-{n}" for n in range(80))]
    with pytest.raises(AccessError):
        grade_them(path, tmp_path, names)
    assert len(desk.asked) < len(names)


def test_an_interruption_leaves_a_report_and_no_grade(
    desk: Desk, path: Path, tmp_path: Path
) -> None:
    """The report says how far it goes."""
    names = [f"i-{n}" for n in range(20)]

    def interrupt() -> None:
        until(lambda: not desk.hold.is_set() and desk.now >= 3)
        os.kill(os.getpid(), signal.SIGINT)

    desk.hold_at = 7
    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        grade_them(path, tmp_path, names)
    helper.join()
    *rows, last = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert (last["totals"]["done"], last["totals"]["total"]) == (len(rows), 20)
    assert 0 < len(rows) < 20
    assert desk.held == set()  # the daemon releases what it could not hand over


# -- the report ------------------------------------------------------------------------------------

HOSTILE = '<script>alert(1)</script>"&\x1b[2J'


def graded(strategy: str = "exact", changed: int = 1, **members: Any) -> Grade:
    lease = {
        "id": "a" * 16, "path": "/c/tree", "directory": "/c", "mirror": "psf__requests", "commit": "c" * 40,
        "tree": "d" * 40, "history": "sealed", "view": "grader", "backend": "overlay", "owner_uid": 0, "owner_gid": 0,
        "taken_by": 0, "created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-01T01:00:00Z",
    }  # fmt: skip
    grade = Grade.from_json({**lease, "strategy": strategy, "changed": changed})
    return replace(grade, **members)


def steered(kind: SteeringKind, path: str, action: str = "applied") -> Steering:
    return Steering(rule=f"rule-{kind}", kind=kind, path=path, action=action, detail=HOSTILE)  # type: ignore[arg-type]


OUTCOMES = [
    GradedPrediction(2, State.EMPTY, "i-2", "m", graded(changed=0)),
    GradedPrediction(
        1,
        State.PREPARED,
        HOSTILE,
        "m",
        graded(
            "fuzz",
            dropped=["conftest.py"],
            steering=[
                steered(SteeringKind.TESTS, f"tests/{HOSTILE}"),
                steered(SteeringKind.RUNNER, "conftest.py", "dropped"),
                steered(SteeringKind.RUNNER, "tests/test_x.py", "restored"),
            ],
        ),
        seconds=0.0123456789,
    ),
    GradedPrediction(
        3, State.CONFLICT, "i-3", HOSTILE, error=PatchConflictError(HOSTILE, hint=HOSTILE)
    ),
    GradedPrediction(4, State.UNKNOWN, "i-4", "m", error=InstanceNotFoundError("cannot find i-4")),
    GradedPrediction(5, State.DUPLICATE, "i-3", "m", counts=3),
]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [tmp_path / "report.jsonl", tmp_path / "report.html"]


def write(
    files: list[Path], outcomes: list[GradedPrediction], total: int | None = None
) -> GradingReport:
    total = len(outcomes) if total is None else total
    report = GradingReport(files, source=HOSTILE, dataset="lite", total=total)
    for outcome in outcomes:
        report.add(outcome)
    report.close()
    return report


def test_the_lines_have_a_row_for_each_prediction_and_totals(files: list[Path]) -> None:
    """In the order in which they ended; the totals are last."""
    report = write(files, OUTCOMES)
    *rows, last = map(json.loads, files[0].read_text().splitlines())
    assert [row["line"] for row in rows] == [2, 1, 3, 4, 5]
    assert rows[1]["touched_tests"] == [quote_name(f"tests/{HOSTILE}"), "tests/test_x.py"]
    assert (rows[1]["strategy"], rows[1]["dropped"]) == ("fuzz", ["conftest.py"])
    assert rows[1]["seconds"] == 0.012346
    assert rows[1]["checkout"] is None
    assert rows[2]["error"]["code"] == "patch-conflict"
    assert rows[4]["counts"] == 3
    totals = last["totals"]
    assert totals["states"] == dict.fromkeys(
        ("empty", "prepared", "conflict", "unknown", "duplicate"), 1
    )
    assert totals["strategies"] == {"exact": 1, "fuzz": 1}
    assert totals["steering"] == {"rule-tests": 1, "rule-runner": 1}
    assert (totals["touched_tests"], totals["dropped"]) == (1, 1)
    assert (totals["total"], totals["done"]) == (5, 5)
    assert report.exit_status == PatchConflictError.exit_status


def test_a_kept_grade_is_in_the_report(files: list[Path]) -> None:
    write(files, [GradedPrediction(1, State.PREPARED, "i", "m", graded(), is_kept=True)])
    row = json.loads(files[0].read_text().splitlines()[0])
    assert (row["checkout"], row["path"]) == ("a" * 16, "/c/tree")
    assert "/c/tree" in files[1].read_text()


def test_a_row_is_on_the_disk_when_its_prediction_is_done(files: list[Path]) -> None:
    """So a kill leaves a report of what was done."""
    report = GradingReport(files, source="p", dataset=None, total=9)
    report.add(OUTCOMES[0])
    assert json.loads(files[0].read_text())["line"] == 2
    report.close()


class Page(HTMLParser):
    """The elements and the texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.opened: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in {"meta", "br"}:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_and_nothing_in_it_runs_or_loads(files: list[Path]) -> None:
    """Whatever a model wrote into names, paths and patches."""
    write(files, OUTCOMES)
    page = Page(files[1].read_text())
    assert page.opened == []
    assert not {"script", "img", "link", "iframe", "a"} & set(page.elements)
    assert not {
        name for name in page.attributes if name.startswith("on") or name in {"src", "href"}
    }
    text = "".join(page.texts)
    assert "<script>alert(1)</script>" in text
    for word in ("i-2", "conflict", "fuzz", "rule-runner", "line 3 counts", "dataset lite"):
        assert word in text
    assert "\x1b" not in text
    assert "Interrupted" not in text


def test_the_page_stays_short_where_a_change_has_thousands_of_findings(files: list[Path]) -> None:
    """The lines have them all."""
    many = [steered(SteeringKind.COMPILED, f"{n}.pyc") for n in range(2500)]
    write(files, [GradedPrediction(1, State.PREPARED, "i", "m", graded(steering=many))])
    assert "and 2,400 more" in files[1].read_text()
    assert len(json.loads(files[0].read_text().splitlines()[0])["steering"]) == 2500


def test_an_interrupted_report_says_so(files: list[Path]) -> None:
    write(files, OUTCOMES[:2], total=40)
    assert "Interrupted: this covers 2 of 40 predictions." in files[1].read_text()
    totals = json.loads(files[0].read_text().splitlines()[-1])["totals"]
    assert (totals["done"], totals["total"]) == (2, 40)


def test_a_report_of_nothing_is_whole(files: list[Path]) -> None:
    write(files, [], total=3)
    assert Page(files[1].read_text()).opened == []


@pytest.mark.parametrize("name", ["report.txt", "report", "missing/report.html"])
def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        GradingReport([tmp_path / name], source="p", dataset=None, total=1)


# -- against a daemon ------------------------------------------------------------------------------

SOURCE = "".join(f"line {n}\n" for n in range(20))
TESTS = "def test_x():\n    assert True\n"


class World(NamedTuple):
    daemon: Daemon
    gold: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Forty instances of one commit, whose test patch changes tests/test_x.py."""
    root = tmp_path_factory.mktemp("predictions")
    upstream = Upstream(root / "up" / "demo+project")
    base = upstream.commit({"src.py": SOURCE, "tests/test_x.py": TESTS})
    fixed = upstream.commit({"src.py": SOURCE.replace("line 7", "LINE 7")})
    tested = upstream.commit({"tests/test_x.py": TESTS.replace("True", "1")})
    gold, test_patch = (
        upstream.git("diff", *pair) + "\n" for pair in ((base, fixed), (fixed, tested))
    )
    rows = [
        {
            "repo": "demo/project",
            "instance_id": f"demo__project-{n}",
            "base_commit": base,
            "patch": gold,
            "test_patch": test_patch,
        }
        for n in range(40)
    ]
    file = root / "lite.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f'[upstream]\nurl = "file://{root}/up/{{owner}}+{{name}}"\n'
    with daemon(text) as running, Client(running.socket) as client:
        client.wait(client.import_dataset(file, name="lite"))
        yield World(running, gold)


def predict(file: Path, patches: list[str]) -> Path:
    """A file with one prediction for each patch."""
    rows = [
        {"instance_id": f"demo__project-{n}", "model_patch": patch, "model_name_or_path": "m"}
        for n, patch in enumerate(patches)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def command(world: World, predictions: Path, *words: object) -> list[str]:
    named = ["--socket", str(world.daemon.socket), "--predictions", str(predictions)]
    return ["grade", *named, "--dataset", "lite", *map(str, words)]


def held(world: World) -> list[str]:
    with Client(world.daemon.socket) as client:
        return [checkout.path for checkout in client.list_checkouts()]


def new_file(path: str, line: str) -> str:
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1 @@\n+{line}\n"


@pytest.mark.slow
def test_predictions_are_graded_as_the_report_says(
    world: World, tmp_path: Path, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exact and tolerant, empty, steering, against the tests, and without a grade."""
    gold = world.gold
    edited = gold.replace("src.py", "tests/test_x.py").replace(
        gold[gold.index("@@") :], "@@ -1,2 +1,2 @@\n def test_x():\n-    assert True\n+    pass\n"
    )
    patches = {
        "exact": gold,
        "prose": f"Here it is:\n```diff\n{gold}```\nGood luck!\n",
        "crlf": gold.replace("\n", "\r\n"),
        "empty": "",
        "cheat": gold + new_file("conftest.py", "import os"),
        "tests": gold + edited,
        "conflict": gold.replace("line 7", "line 77"),
    }
    file = predict(tmp_path / "p.jsonl", list(patches.values()))
    with file.open("a") as more:
        more.write('{"instance_id": "demo__project-99", "model_patch": "x"}\nnonsense\n')
    reports = [word for name in files for word in ("--report", name)]
    words = command(world, file, *reports, "--policy", "runner=drop", "--json")
    assert run(words) == PatchConflictError.exit_status
    answer = json.loads(capsys.readouterr().out)
    *rows, last = map(json.loads, files[0].read_text().splitlines())
    assert answer["totals"]["states"] == last["totals"]["states"]
    assert sorted(rows, key=lambda row: row["line"]) == answer["predictions"]
    by_name = dict(zip(patches, answer["predictions"], strict=False))
    states = [row["state"] for row in answer["predictions"]]
    assert states == ["prepared"] * 3 + ["empty"] + ["prepared"] * 2 + [
        *("conflict", "unknown", "invalid")
    ]
    assert by_name["exact"]["strategy"] == "exact"
    assert by_name["crlf"]["strategy"] == "crlf"
    assert by_name["cheat"]["dropped"] == ["conftest.py"]
    assert by_name["exact"]["touched_tests"] == []
    assert by_name["tests"]["touched_tests"] == ["tests/test_x.py"]
    assert by_name["conflict"]["error"]["code"] == "patch-conflict"
    assert Page(files[1].read_text()).opened == []
    assert held(world) == []
    with Client(world.daemon.socket) as client:
        shown = client.list_reports()[0]  # on the page
    assert (shown.kind, shown.total, shown.results) == ("grading", 9, last["totals"]["states"])
    assert shown.mirrors == {"demo__project": {"prepared": 5, "empty": 1}}
    assert sorted(shown.faults.values()) == ["conflict", "unknown"]


@pytest.mark.slow
def test_kept_grades_can_be_tested(world: World, tmp_path: Path, files: list[Path]) -> None:
    """They have the prediction and the tests."""
    file = predict(tmp_path / "p.jsonl", [world.gold, world.gold])
    assert run(command(world, file, "--report", files[0], "--keep", "--ttl", "5m")) == 0
    *rows, _ = map(json.loads, files[0].read_text().splitlines())
    assert {row["path"] for row in rows} == set(held(world))
    for row in rows:
        assert "LINE 7" in (Path(row["path"]) / "src.py").read_text()
        assert "assert 1" in (Path(row["path"]) / "tests/test_x.py").read_text()
    with Client(world.daemon.socket) as client:
        for row in rows:
            client.release_checkout(row["checkout"])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_leaves_no_checkout(
    world: World, tmp_path: Path, files: list[Path], number: int, status: int
) -> None:
    """And the rows that it had, each whole; asked to end, also the totals."""
    file = predict(tmp_path / "p.jsonl", [world.gold] * 40)
    words = command(world, file, "--report", files[0], "--jobs", "4")
    process = subprocess.Popen([sys.executable, "-m", "mirrord", *words])
    while not files[0].exists() or files[0].read_text().count("\n") < 4:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait(90) == status
    lines = files[0].read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    assert ("totals" in rows[-1]) == (number == signal.SIGINT)
    until(lambda: not held(world))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--dataset", "none"], 4),
        (["--jobs", "0"], 2),
        (["--jobs", "x"], 2),
        (["--report", "report.txt"], 2),
        (["--patch", "p"], 2),
        (["demo__project-1"], 2),
    ],
)
def test_wrong_words_grade_nothing(
    world: World, tmp_path: Path, words: list[str], status: int
) -> None:
    file = predict(tmp_path / "p.jsonl", [world.gold])
    assert run(command(world, file, *words)) == status
    assert held(world) == []
