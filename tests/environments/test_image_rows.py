"""Images that rows of datasets name: imported once, continued after a cancel, and their tests run."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import images
import pytest
from gitrepos import Upstream, git
from image_bench import Bench, image_bench, static_registry
from sandbox_here import needs_sandbox
from waiting import until

from mirrord import Sandbox
from mirrord.environments.images.upstreams import find_repository
from mirrord.errors import CancelledError, InvalidImageError
from mirrord.protocol import BuildReport, DatasetImported

MISSING = [name for name in ("skopeo", "umoci") if not shutil.which(name)]
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
    needs_sandbox,
]
AGENT = 34541
PARSING = """printf '{"tests": [' > "$3"; comma=
while read is dash name; do
  status=PASSED; [ "$is" = ok ] || status=FAILED
  printf '%s{"name": "%s", "status": "%s"}' "$comma" "${name#- }" $status >> "$3"; comma=,
done < "$1"; printf ']}' >> "$3"
"""
PARSER = """from enum import Enum
class Status(Enum):
    PASSED = "PASSED"
    FAILED = "failed"
def parse_log_own(log):
    told = [line.rpartition("ok - ") for line in log.splitlines() if "ok - " in line]
    return {name: Status.FAILED if "not" in before else Status.PASSED for before, _, name in told}
"""
FORGED = """+add() { echo 3; }
+for it in run_script parsing_script; do echo : > "$MIRRORD_FILES/$it" || echo not changed >&2; done
+echo 'echo "{\\"tests\\": [{\\"name\\": \\"adds\\", \\"status\\": \\"PASSED\\"}]}" > "$6"' > /bin/python3"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with image_bench(tmp_path_factory.mktemp("images")) as made:
        yield made


def test_a_cancelled_import_continues_with_what_it_has(bench: Bench, tmp_path: Path) -> None:
    layers = [images.layer([(name, name.encode() * 99, {})]) for name in ("x", "y")]
    images.oci(tmp_path / "i", layers)
    first, second = [hashlib.sha256(each).hexdigest() for each in layers]
    with static_registry(tmp_path / "i") as served:
        served.held, source = second, f"docker://{served.host}/o/i:1"
        running = bench.client.import_image(source, key="cut")
        kept = bench.made.root / "state/environments/images"
        until(lambda: served.asked[second] and list(kept.glob(f"*/blobs/sha256/{first}")))
        bench.client.cancel_operation(running.id)
        with pytest.raises(CancelledError):
            bench.client.wait(running)
        assert bench.client.list_environments() == []
        served.held = ""
        served.may_answer.set()
        assert bench.imported(source, "cut").failed == []
        assert served.asked[first] == 1
    bench.remove("cut")


def test_a_row_with_only_an_image_has_a_mirror_of_its_repository(
    bench: Bench, tmp_path: Path
) -> None:
    """The HEAD in the image is the base commit; what its remotes have is later, and hidden."""
    upstream = Upstream(tmp_path / "up")
    past, base, later = [upstream.commit({"x": f"{number}\n"}) for number in range(3)]
    root = images.root(tmp_path / "root")
    subprocess.run(["git", "clone", "-q", upstream.path, root / "app"], check=True)
    git(root / "app", "checkout", "--quiet", base)
    git(root / "app", "branch", "--quiet", "-D", "main")
    (root / "app/built").write_text("built")
    images.oci(tmp_path / "i", [images.layer([], above=root)], {"WorkingDir": "/app"})
    row = json.dumps({"instance_id": "only-1", "docker_image": "o/i", "problem_statement": "p"})
    ended = bench.client.wait(bench.client.import_dataset([row.encode()], name="only"))
    (refused,) = DatasetImported.from_json(ended.result).dataset.unpinned
    assert "environment build" in refused.reason
    with static_registry(tmp_path / "i") as served:
        for _ in range(2):
            told = bench.client.wait(
                bench.client.build_environments(
                    "only-1", images=True, image_name=f"docker://{served.host}/{{image}}:latest"
                )
            )
            report = BuildReport.from_json(told.result)
            assert (report.failed, report.prepared) == ([], [base])
    (mirror,) = [each for each in bench.client.list_mirrors() if each.name.startswith("from-image")]
    with bench.client.checkout(f"{mirror.name}@from-image/remotes/origin/main") as known:
        assert known.commit == later
    with (
        bench.client.checkout("only-1", environment="auto", owner=AGENT) as checkout,
        Sandbox(checkout) as sandbox,
    ):
        assert (checkout.commit, bench.client.get_seal(checkout.id).sealed) == (base, True)
        said = sandbox.exec(f"cat x built; echo; git log --format=%H; git cat-file -e {later}")
        assert said.stdout.decode().split() == ["1", "built", base, past]
        assert said.exit_code
    (prepared,) = bench.client.get_environment(report.ready[0]).prepared
    assert prepared.findings == []
    bench.remove(report.ready[0])


@pytest.mark.parametrize(
    ("tree", "repositories", "told"),
    [
        ("/app", ["/app", "/opt/x"], "/app"),
        ("/srv", [], "it has no repository"),
        ("/srv", ["/a", "/b"], "it has 2 repositories, and none at /srv: /a, /b"),
    ],
)
def test_the_repository_of_an_image_is_found_or_asked_for(
    tree: str, repositories: list[str], told: str
) -> None:
    try:
        assert find_repository({"tree": tree, "repositories": repositories}) == told
    except InvalidImageError as error:
        assert error.message.endswith(told)


def test_the_images_of_rows_run_their_tests(bench: Bench, tmp_path: Path) -> None:
    """A shell project that says its results by TAP; most rows have one image, one has none. Its tests
    run by a command, by SWE-bench's script, or by those of SWE-bench Pro.
    """
    buggy, test = "add() { echo 3; }\n", ". ./lib.sh; . ./built.sh; . ./helper.sh\n"
    upstream = Upstream(tmp_path / "sh")
    base = upstream.commit({"lib.sh": buggy, "run.sh": test, "helper.sh": ":\n"})
    ended = bench.client.wait(bench.client.add_mirror("o/sh", url=upstream.url))
    assert ended.error is None
    check = 'check() { [ "$2" = "$3" ] && echo "ok - $1" || { echo "not ok - $1"; false; }; }\n'
    root = images.root(tmp_path / "root")
    subprocess.run(["git", "clone", "-q", upstream.path, root / "app"], check=True)
    (root / "app/built.sh").write_text(check)
    (root / "bin/python3").write_text('#!/bin/sh\nshift 2\nexec sh "$@"\n')  # -E -s parsing_script
    (root / "bin/python3").chmod(0o755)
    images.oci(tmp_path / "i", [images.layer([], above=root)], {"WorkingDir": "/app"})
    change = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1{1} @@\n"
    row = {
        "instance_id": "o__sh-1", "repo": "o/sh", "base_commit": base, "image_name": "o/i",
        "patch": change.format("lib.sh", "") + f"-{buggy}+add() {{ echo $(($1 + $2)); }}\n",
        "test_patch": change.format("run.sh", ",3") + f" {test}+check adds $(add 2 2) 4; a=$?\n"
        "+check three $(add 1 2) 3 && exit $a\n",
        "FAIL_TO_PASS": ["adds"], "PASS_TO_PASS": ["three"],
        "install_config": {"test_cmd": "sh run.sh", "log_parser": "tap"},
    }  # fmt: skip
    plain = {name: value for name, value in row.items() if name != "install_config"}
    applied = f"git checkout {base} run.sh\ngit apply -v - <<'E'\n{row['test_patch']}E\n"
    marked = "set -x\ngit show\necho ok - other\n{}: '>>>>> Start Test Output'\nsh run.sh\n{}{}"
    end = ": '>>>>> End Test Output'\necho not ok - three\n"
    scripts: list[dict[str, object]] = [
        {"log_parser": "parse_log_own", "eval_script": marked.format(applied, end, "git status\n")},
        {"before_script": "echo before; export after=$PWD",
         "run_script": "echo $* $after >&2; sh run.sh", "parsing_script": PARSING,
         "selected_test_files_to_run": '["run.sh", "b"]', "restored_files": ["helper.sh", "no"]},
        {"before_script": f"cat-file() {{ git $@; }}; cat-file checkout {base[::-1]}; echo on",
         "run_script": "sh run.sh", "log_parser": "tap"},
    ]  # fmt: skip
    others = {"o__sh-2": "o/i", "o__sh-3": "o/absent", "o__sh-4": None}
    rows = [row, *({**row, "instance_id": each, "image_name": of} for each, of in others.items())]
    rows += [{**plain, **each, "instance_id": f"o__sh-{5 + n}"} for n, each in enumerate(scripts)]
    ended = bench.client.wait(
        bench.client.import_dataset((json.dumps(each).encode() + b"\n" for each in rows), name="sh")
    )
    assert ended.error is None
    with static_registry(tmp_path / "i") as served:
        name = f"docker://{served.host}/{{image}}:latest"
        for _ in range(2):
            told = bench.client.wait(
                bench.client.build_environments(dataset="sh", images=True, image_name=name)
            )
            report = BuildReport.from_json(told.result)
            assert (len(report.ready), len(report.failed)) == (1, 2)
        assert set(served.asked.values()) == {1}, "the second time nothing is fetched"
    socket = ("--socket", str(bench.made.socket))
    named, logs = ("o__sh-1", "o__sh-5", "o__sh-6"), tmp_path / "logs"
    (tmp_path / "own.py").write_text(PARSER)
    parsers = ("--log-parsers", str(tmp_path / "own.py"))
    words = ("rehearse", *named, "o__sh-7", "--dataset", "sh", "--run", "--json", "--times", "2")
    command = [sys.executable, "-m", "mirrord", *socket, *words, "--logs", str(logs), *parsers]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 8, ran
    answer = json.loads(ran.stdout)
    unready = answer["instances"].pop()
    assert "its before_repo_set_cmd failed: fatal: reference is not a tree" in unready["reason"]
    (group,) = answer["totals"]["repositories"]
    assert (group["passed"]["tests before"], group["passed"]["tests after"]) == (3, 3)
    image = bench.client.get_environment(report.ready[0])
    assert group["environments"] == {
        "count": 1, "leaking": 0, "size_bytes": image.size_bytes,
        "disk_bytes": (image.size_bytes or 0) - image.shared_bytes,
    }  # fmt: skip
    assert len(answer["instances"]) == len(named)
    for told_of in answer["instances"]:
        steps = {each["name"]: each["outcome"] for each in told_of["steps"]}
        assert (steps["tests before"], steps["tests after"]) == ("ok", "ok")
        assert (told_of["contradictions"], told_of["flaky"], len(told_of["logs"])) == ([], [], 4)
        outcomes = [
            json.loads((logs / told_of["instance"] / f"tests-{phase}.json").read_bytes())
            for phase in ("before", "after-2")
        ]
        assert outcomes[0] == {"adds": "failed", "three": "passed"}
        assert outcomes[1] == {"adds": "passed", "three": "passed"}
    assert "before\nrun.sh,b /app\n" in (logs / "o__sh-6/tests-after.log").read_text()
    forged = str(row["patch"]).replace("+1 @@", "+1,3 @@").partition("+add")[0] + f"{FORGED}\n"
    forged += change.format("helper.sh", "") + "-:\n+check() { echo ok - $1; }\n"
    models = [("gold", name, row["patch"]) for name in named] + [("forged", "o__sh-6", forged)]
    (tmp_path / "predictions.jsonl").write_text("".join(
        f"{json.dumps({'model_name_or_path': model, 'instance_id': name, 'model_patch': patch})}\n"
        for model, name, patch in models
    ))  # fmt: skip
    grade = ("grade", "--predictions", str(tmp_path / "predictions.jsonl"), "--run", "--json")
    command = [sys.executable, "-m", "mirrord", *socket, *grade, "--logs", str(logs), *parsers]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    *gold, caught = json.loads(ran.stdout)["predictions"]
    assert [each["state"] for each in gold] == ["resolved"] * len(named), gold
    assert caught["tests"]["reason"] == "1 of 1 FAIL_TO_PASS do not pass, such as adds", caught
    assert Path(caught["tests"]["log"]).read_text().count("not changed\n") == 2
    with bench.client.checkout("o__sh-2", environment="auto", owner=AGENT) as checkout:
        assert str(checkout.lease.environment) == report.ready[0]
    bench.remove(report.ready[0])
