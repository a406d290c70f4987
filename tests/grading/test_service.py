"""Grades through the daemon: whose they are, what they hold, what they say and to whom."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from graded_project import (
    AGENT,
    GRADER,
    HIDDEN,
    HONEST,
    INSTANCE,
    PROJECT,
    RIGHT,
    WRONG,
    GradingLab,
    give_away,
    grading_lab,
    outcome,
    write,
)
from waiting import until

from mirrord import (
    AccessError,
    AsyncClient,
    Backend,
    Checkout,
    CheckoutNotFoundError,
    ConflictError,
    InstanceAmbiguousError,
    InstanceNotFoundError,
    InvalidPatchError,
    InvalidRequestError,
    NotFoundError,
    PatchConflictError,
    SteeringRefusedError,
    TooLargeError,
)
from mirrord.cli.main import run
from mirrord.model import DiffFormat

pytestmark = pytest.mark.root

_OWN = """[grading]
policies = { git = "drop" }

[[grading.rule]]
name = "readme"
paths = ["/README"]
policy = "refuse"
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GradingLab]:
    with grading_lab(tmp_path_factory.mktemp("grades")) as lab:
        yield lab


def files_of(tree: Path) -> dict[str, str]:
    found = (path for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(tree)): path.read_text() for path in found}


@pytest.mark.parametrize("backend", [Backend.OVERLAY, Backend.POOL])
def test_a_grade_is_base_change_and_tests(lab: GradingLab, backend: Backend) -> None:
    """Whole, owned by the grader, with git's modes; and nothing of the agent's besides."""
    with lab.agent(backend=backend) as checkout:
        write(checkout.path / "shapes/more/deep.py", "x = 1\n")
        write(checkout.path / "build/ignored", "x")
        (checkout.path / "README").unlink()
        (checkout.path / "shapes/area.py").chmod(0o4777)
        give_away(checkout.path)
        with checkout.grade(owner=GRADER, backend=backend) as grade:
            expected = (
                PROJECT | HIDDEN | {"shapes/area.py": WRONG, "shapes/more/deep.py": "x = 1\n"}
            )
            del expected["README"]
            assert files_of(grade.path) == expected
            found = (grade.path / "shapes/area.py").stat()
            assert (found.st_mode & 0o7777, found.st_uid) == (0o755, GRADER)
            assert {
                path.lstat().st_uid for path in grade.path.rglob("*") if ".git" not in path.parts
            } == {GRADER}
            assert grade.lease.owner_uid == GRADER
            assert (grade.view, grade.backend, grade.parent) == ("grader", backend, checkout.id)
            assert grade.report.tests == sorted(HIDDEN)
            assert grade.report.changed == 3
            assert b"test_right_angle" in grade.diff()


def test_the_right_solution_passes(lab: GradingLab) -> None:
    with lab.agent() as checkout:
        write(checkout.path / "shapes/area.py", RIGHT)
        with checkout.grade(policy="drop") as grade:
            assert outcome(grade.path)[0] == 0


def test_a_run_that_wrote_into_the_tree_is_undone_by_a_roll_back(lab: GradingLab) -> None:
    """`graded` is the first state; a plain reset is clean, as everywhere."""
    with lab.agent() as checkout, checkout.grade() as grade:
        before = files_of(grade.path)
        write(grade.path / "shapes/area.py", "broken")
        grade.reset(to="graded")
        assert files_of(grade.path) == before
        assert outcome(grade.path) == HONEST
        grade.reset()
        assert files_of(grade.path) == PROJECT
        grade.reset(to="graded")
        with grade.fork() as fork:
            assert files_of(fork.path) == before


@pytest.mark.parametrize("strategy", ["exact", "tolerant"])
def test_a_patch_is_graded_without_a_checkout(lab: GradingLab, strategy: str) -> None:
    with lab.agent() as checkout:
        write(checkout.path / "conftest.py", "x = 1\n")
        give_away(checkout.path)
        patch = checkout.diff()
    if strategy == "tolerant":
        patch = patch.replace(b"\n", b"\r\n")
        with pytest.raises(PatchConflictError):
            lab.client.grade(INSTANCE, patch, strategy="exact")
    with lab.client.grade(INSTANCE, patch, strategy=strategy, policy="drop", owner=GRADER) as grade:
        assert files_of(grade.path) == PROJECT | HIDDEN | {"shapes/area.py": WRONG}
        assert grade.strategy == ("exact" if strategy == "exact" else "crlf")
        assert (grade.parent, grade.dropped) == (None, ["conftest.py"])


def test_an_empty_patch_is_the_base_commit_with_the_tests(lab: GradingLab) -> None:
    with lab.client.grade(INSTANCE, b"") as grade:
        assert files_of(grade.path) == PROJECT | HIDDEN
        assert (grade.report.changed, grade.strategy) == (0, None)


@pytest.fixture
def others(lab: GradingLab, tmp_path: Path) -> Iterator[str]:
    """Two more datasets: `other` has other tests of the instance, `late` those of one without."""
    row = {"instance_id": INSTANCE, "repo": "acme/shapes", "base_commit": lab.commit}
    other = lab.test_patch.replace("test_right_angle", "test_other_angle")
    rows = {
        "other": row | {"test_patch": other},
        "late": row | {"instance_id": "acme__shapes-0", "test_patch": lab.test_patch},
    }
    for name, content in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(content))
        lab.client.wait(lab.client.import_dataset(tmp_path / f"{name}.jsonl"))
    yield "test_other_angle"
    for name in rows:
        lab.client.remove_dataset(name)


def test_whoever_needs_tests_that_datasets_record_differently_names_one(
    lab: GradingLab, others: str
) -> None:
    """The checkout is the same; what it is graded by is chosen, and then remembered."""
    with lab.agent() as checkout:
        assert checkout.receipt().dataset is None
        for refused in (checkout.grade, partial(lab.client.grade, INSTANCE, b"")):
            with pytest.raises(InstanceAmbiguousError) as error:
                refused()
            assert error.value.facts["datasets"] == ["shapes", "other"]
        with pytest.raises(InstanceNotFoundError):
            checkout.grade(dataset="late")
        with checkout.grade(dataset="other") as grade:
            assert others.encode() in grade.diff()
            assert grade.receipt().dataset == "other"
        checkout.reset()
        with checkout.grade(dataset="shapes") as grade:
            assert others.encode() not in grade.diff()
        checkout.reset(INSTANCE, dataset="other")
        with checkout.grade() as grade:
            assert others.encode() in grade.diff()
    with lab.agent(dataset="shapes") as checkout, checkout.grade() as grade:
        assert others.encode() not in grade.diff()
    bare = lab.client.checkout(f"acme/shapes@{lab.commit}")
    with bare, pytest.raises(InvalidRequestError):
        bare.grade(dataset="other")


def test_the_only_dataset_with_tests_grades_though_another_came_first(
    lab: GradingLab, others: str
) -> None:
    with lab.client.checkout("acme__shapes-0", owner=AGENT) as checkout:
        assert checkout.receipt().dataset == "late"
        with checkout.grade() as grade:
            assert grade.report.tests == sorted(HIDDEN)
    bare = lab.client.checkout("acme__shapes-0", owner=AGENT, dataset="shapes")
    with bare, bare.grade() as grade:
        assert grade.report.tests is None


def test_a_bare_commit_has_no_tests(lab: GradingLab) -> None:
    """Nor has an instance without a test patch; the answer says so."""
    for named in (f"acme/shapes@{lab.commit}", "acme__shapes-0"):
        with lab.client.grade(named, b"") as grade:
            assert grade.report.tests is None
            assert files_of(grade.path) == PROJECT
    with (
        lab.client.checkout(f"acme/shapes@{lab.commit}", owner=AGENT) as checkout,
        checkout.grade() as grade,
    ):
        assert grade.report.tests is None


def test_a_submodule_of_a_patch_is_an_empty_directory(lab: GradingLab) -> None:
    patch = f"diff --git a/x b/x\nnew file mode 160000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+Subproject commit {'1' * 40}\n"
    with lab.client.grade(INSTANCE, patch) as grade:
        assert [(found.rule, found.action) for found in grade.steering] == [
            ("submodule", "applied")
        ]
        assert list((grade.path / "x").iterdir()) == []
    with lab.client.grade(INSTANCE, patch, policy={"git": "drop"}) as grade:
        assert not (grade.path / "x").exists()


# -- rights -------------------------------------------------------------------------------------------


def test_a_grade_never_belongs_to_the_agent(lab: GradingLab) -> None:
    with lab.agent() as checkout:
        with pytest.raises(AccessError) as caught:
            checkout.grade(owner=AGENT)
        assert "--owner" in str(caught.value.hint)
        assert len(lab.client.list_checkouts()) == 1


def test_root_may_grade_what_it_ran_itself(lab: GradingLab) -> None:
    with lab.client.checkout(INSTANCE) as checkout, checkout.grade() as grade:
        assert grade.lease.owner_uid == checkout.lease.owner_uid == 0


def test_others_than_administrators_may_not_grade(lab: GradingLab) -> None:
    """Not even what they own: the tree would show the tests."""
    with lab.agent() as checkout:
        for path in (f"/v1/checkouts/{checkout.id}/grade", f"/v1/grades?instance={INSTANCE}"):
            done = subprocess.run(
                ["curl", "-s", "--unix-socket", lab.running.socket, "-X", "POST", f"http://x{path}"],
                user=AGENT, group=AGENT, extra_groups=[], capture_output=True, check=True,
            )  # fmt: skip
            assert json.loads(done.stdout)["code"] == "not-allowed"


def test_an_agent_learns_nothing_of_a_grade(lab: GradingLab) -> None:
    """Its events, its list of checkouts, its own checkout are as if there were none."""

    def asked(path: str) -> str:
        done = subprocess.run(
            ["curl", "-s", "--max-time", "2", "--unix-socket", lab.running.socket, f"http://x/v1/{path}"],
            user=AGENT, group=AGENT, extra_groups=[], capture_output=True, check=False,
        )  # fmt: skip
        return done.stdout.decode()

    with lab.agent() as checkout:
        write(checkout.path / "conftest.py", "# a secret remark\n")
        give_away(checkout.path)
        before = [asked("checkouts"), asked(f"checkouts/{checkout.id}/snapshots")]
        with checkout.grade(owner=GRADER) as grade:
            assert [asked("checkouts"), asked(f"checkouts/{checkout.id}/snapshots")] == before
            for path in (f"checkouts/{grade.id}", f"checkouts/{grade.id}/diff"):
                assert json.loads(asked(path))["code"] == "checkout-not-found"
            assert grade.id not in asked("events?after=0&follow=false")
        events = [
            event
            for event in lab.client.events(after="0", follow=False)
            if event.name == "checkout.graded"
        ]
        assert events[-1].fields["owner_uid"] == GRADER
        assert (events[-1].fields["steering"], events[-1].fields["changed"]) == (1, 2)
        assert checkout.id not in str(events[-1].fields)
        assert "conftest" not in str(events[-1].fields)


# -- what is refused ------------------------------------------------------------------------------------


def test_a_refusal_leaves_nothing(lab: GradingLab) -> None:
    layers = lab.running.state_dir / "templates/.layers"

    def found() -> set[str]:  # those of released grades are removed in the background
        names = {path.name for path in layers.iterdir()} if layers.exists() else set()
        return {name for name in names if not name.startswith(".trash")}

    with lab.agent() as checkout:
        write(checkout.path / "conftest.py", "x = 1\n")
        give_away(checkout.path)
        before = found()
        with pytest.raises(SteeringRefusedError) as caught:
            checkout.grade(policy="refuse")
        assert isinstance(caught.value, ConflictError)
        assert caught.value.facts["steering"][0]["path"] == "conftest.py"
        assert len(lab.client.list_checkouts()) == 1
        assert found() <= before
        with checkout.grade(policy={"runner": "report"}) as grade:
            assert (grade.path / "conftest.py").exists()


@pytest.mark.parametrize("policy", ["never", "runner=never", "kind=drop", "drop,", "=drop"])
def test_an_unknown_policy_is_refused(lab: GradingLab, policy: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        lab.client.grade(INSTANCE, b"", policy=policy)
    assert "report, drop, refuse" in str(caught.value.hint) or "runner" in str(caught.value.hint)


def test_bad_requests_are_refused(lab: GradingLab) -> None:
    with pytest.raises(InstanceNotFoundError):
        lab.client.grade("no-such-instance", b"")
    with pytest.raises(InvalidPatchError):
        lab.client.grade(INSTANCE, b"no patch at all\n")
    answer = lab.running.json("POST", "/v1/grades", b"")
    assert answer["code"] == "invalid-request"
    assert (
        lab.running.json("POST", f"/v1/grades?instance={INSTANCE}&nothing=1", b"")["code"]
        == "invalid-request"
    )


def test_settings_are_live_and_own_rules_count(lab: GradingLab) -> None:
    config = lab.running.config
    text = config.read_text()
    try:
        config.write_text(text + _OWN)
        assert {"grading.policies", "grading.rule"} <= {
            *lab.client.reload().applied,
            "grading.policies",
            "grading.rule",
        }
        with lab.agent() as checkout:
            write(checkout.path / ".gitattributes", "*.py text\n")
            give_away(checkout.path)
            with checkout.grade() as grade:
                assert grade.dropped == [".gitattributes"]
            write(checkout.path / "README", "other\n")
            with pytest.raises(SteeringRefusedError) as caught:
                checkout.grade()
            assert "README (readme)" in caught.value.message
    finally:
        config.write_text(text)
        lab.client.reload()


# -- elsewhere --------------------------------------------------------------------------------------------


def test_a_daemon_that_was_killed_keeps_its_grades(tmp_path: Path) -> None:
    with grading_lab(tmp_path) as lab, lab.agent() as checkout:
        grade = checkout.grade(owner=GRADER)
        before = files_of(grade.path)
        layers = lab.running.state_dir / "templates/.layers"
        (layers / "halfmade22222222").mkdir()
        lab.running.kill()
        lab.running.start()
        assert files_of(grade.path) == before
        assert lab.client.get_checkout(grade.id).parent == checkout.id
        grade.reset(to="graded")
        assert files_of(grade.path) == before
        until(lambda: not (layers / "halfmade22222222").exists())
        grade.release()


def test_asyncio_grades_many_at_once(lab: GradingLab) -> None:
    async def one(client: AsyncClient, number: int) -> bytes:
        async with client.checkout(INSTANCE, owner=AGENT) as checkout:
            write(checkout.path / "shapes/area.py", f"number = {number}\n")
            async with checkout.grade(owner=GRADER) as grade:
                assert (grade.path / "shapes/area.py").read_text() == f"number = {number}\n"
                return await grade.diff()

    async def all_of_them() -> list[bytes]:
        async with AsyncClient(lab.running.socket) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    assert len(set(asyncio.run(all_of_them()))) == 16
    assert lab.client.list_checkouts() == []


def test_the_command_line(
    lab: GradingLab, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    """The path on stdout, findings on stderr; with --json all of it on stdout."""
    socket = ("--socket", str(lab.running.socket))
    with lab.agent() as checkout:
        write(checkout.path / "conftest.py", "x = 1\n")
        give_away(checkout.path)
        assert (
            run(
                [
                    "grade",
                    str(checkout.path),
                    "--owner",
                    str(GRADER),
                    "--policy",
                    "runner=drop",
                    *socket,
                ]
            )
            == 0
        )
        out, err = capfdbinary.readouterr()
        assert out.decode().strip().endswith("/tree")
        *table, judged = err.decode().splitlines()
        assert " ".join(table).split() == [
            *("ACTION", "RULE", "PATH", "DETAIL"),
            *("dropped", "pytest-conftest", "conftest.py", "-"),
        ]
        assert judged == "judged by names of paths: no environment said what it loads"
        assert (
            run(["grade", checkout.id, "--policy", "runner=refuse", "--policy", "drop", *socket])
            == 5
        )
        assert b"--policy drop" in capfdbinary.readouterr().err
        assert run(["grade", checkout.id, "--strategy", "tolerant", *socket]) == 2
        capfdbinary.readouterr()
    file = tmp_path / "empty.patch"
    file.write_bytes(b"")
    assert run(["grade", f"acme/shapes@{lab.commit}", "--patch", str(file), "--json", *socket]) == 0
    answer = json.loads(capfdbinary.readouterr().out)
    assert (answer["tests"], answer["changed"], answer["steering"]) == (None, 0, [])
    assert answer["judged_by"] == "names"
    for held in lab.client.list_checkouts():
        lab.client.release_checkout(held.id)


def test_an_agent_cannot_convert_the_tests(tmp_path: Path) -> None:
    """Files are written by the base commit's attributes, which still hold for the change."""
    with grading_lab(tmp_path, attributes="*.txt text eol=crlf\n") as lab, lab.agent() as checkout:
        write(checkout.path / "words.txt", "a\r\nb\r\n")
        write(checkout.path / ".gitattributes", "*.py working-tree-encoding=UTF-16LE-BOM\n")
        write(checkout.path / "shapes/area.py", WRONG.encode("utf-16"))
        give_away(checkout.path)
        with checkout.grade() as grade:
            assert (grade.path / "words.txt").read_bytes() == b"a\r\nb\r\n"
            assert (grade.path / "tests/test_hidden.py").read_text() == HIDDEN[
                "tests/test_hidden.py"
            ]
            assert os.stat(grade.path / "shapes/area.py").st_size == len(WRONG)


# -- turns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [Backend.OVERLAY, Backend.POOL])
def test_a_turn_ends_in_one_request(lab: GradingLab, backend: Backend) -> None:
    """The same diff and grade as by themselves; of checkout and daemon nothing else is left."""
    with lab.agent(backend=backend) as checkout:
        patch = checkout.diff()
        before = _requests(lab)
        finished = checkout.finish(diff=True, grade={"owner": GRADER, "backend": backend})
        assert _requests(lab) - before == Counter(take_turns=1)
        assert finished.grade is not None
        with finished.grade as grade:
            assert (finished.diff, finished.diff_by, finished.released) == (patch, "libgit2", True)
            assert files_of(grade.path) == PROJECT | HIDDEN | {"shapes/area.py": WRONG}
            assert grade.lease.parent == checkout.id
            assert [each.id for each in lab.client.list_checkouts()] == [grade.id]
    assert lab.client.list_checkouts() == []


def _requests(lab: GradingLab) -> Counter[str]:
    """Count the requests so far by endpoint; renewals come when they are due."""
    found = re.findall(
        r'^mirrord_requests_total\{endpoint="(\w+)".*\} (\S+)$', lab.client.metrics(), re.MULTILINE
    )
    return Counter(
        {name: int(float(n)) for name, n in found if name not in {"get_metrics", "renew_checkout"}}
    )


def test_a_turn_moves_and_many_are_one_request(lab: GradingLab) -> None:
    with lab.agent() as one, lab.agent() as other:
        commit = f"acme/shapes@{lab.commit}"
        taken = lab.client.turn(
            [
                one.ending(diff=DiffFormat.NAME_STATUS, reset={"commit": lab.commit}),
                other.ending(snapshot="kept", reset=True, release=True),
            ],
            [commit, "acme__shapes-none", INSTANCE],
        )
        first, second = taken.turns
        assert (first.diff, first.released, first.error) == (b"M\tshapes/area.py\n", False, None)
        assert first.proof is not None and one.lease.resets == 1
        assert files_of(one.path) == PROJECT
        assert second.snapshot is not None and second.snapshot.name == "kept"
        assert (second.proof, second.released) == (None, True)
        made, missing, also = taken.checkouts
        assert isinstance(missing, InstanceNotFoundError)
        assert isinstance(made, Checkout) and isinstance(also, Checkout)
        with made, also:
            assert {made.instance, also.instance} == {None, INSTANCE}
    names = [event.name for event in lab.client.events(after="0", follow=False)
             if event.fields.get("checkout") == other.id]  # fmt: skip
    assert "checkout.reset" not in names


def test_what_fails_ends_a_turn_and_loses_nothing(lab: GradingLab) -> None:
    with lab.agent() as checkout:
        write(checkout.path / "conftest.py", "x = 1\n")
        give_away(checkout.path)
        grade = {"policy": "refuse", "owner": GRADER}
        (turn,) = lab.client.turn([checkout.ending(diff=True, grade=grade, release=True)]).turns
        assert isinstance(turn.error, SteeringRefusedError)
        assert (turn.grade, turn.released) == (None, False)
        assert turn.diff == checkout.diff()
        with pytest.raises(SteeringRefusedError):
            checkout.finish(grade=grade)
        with pytest.raises(NotFoundError):
            checkout.finish(grade={"owner": GRADER}, reset={"to": "none"})
        assert [each.id for each in lab.client.list_checkouts()] == [checkout.id]
        (gone,) = lab.client.turn([checkout.ending(release=True)]).turns
        assert gone.released
        (late,) = lab.client.turn([checkout.ending(diff=True, release=True)]).turns
        assert isinstance(late.error, CheckoutNotFoundError)


def test_a_turn_with_a_long_diff_asks_for_it_apart(lab: GradingLab) -> None:
    with lab.agent() as checkout:
        write(checkout.path / "long.txt", "x\n" * 600_000)
        give_away(checkout.path)
        (turn,) = lab.client.turn([checkout.ending(diff=True, release=True)]).turns
        assert isinstance(turn.error, TooLargeError)
        finished = checkout.finish(grade={"owner": GRADER})
        assert finished.grade is not None
        with finished.grade as grade:
            assert finished.released
            assert finished.diff is not None and len(finished.diff) > 1_200_000
            assert (grade.path / "long.txt").stat().st_size == 1_200_000


def test_an_agent_ends_its_turn_without_a_grade(lab: GradingLab) -> None:
    """Its own checkout's diff and release are its own; a grade or another checkout is not."""
    with lab.agent() as checkout:
        turns = [
            {"checkout": checkout.id, "grade": {}},
            {"checkout": checkout.id, "diff": "patch"},
        ]
        body = json.dumps({"turns": turns, "checkouts": [{"instance": INSTANCE}]})
        done = subprocess.run(
            ["curl", "-s", "--unix-socket", lab.running.socket, "-d", body, "http://x/v1/turns"],
            user=AGENT, group=AGENT, extra_groups=[], capture_output=True, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        graded, shown = answer["turns"]
        assert (graded["problem"]["code"], graded["grade"]) == ("not-allowed", None)
        assert (shown["problem"], b64decode(shown["diff"])) == (None, checkout.diff())
        assert answer["checkouts"][0]["problem"]["code"] == "not-allowed"


def test_the_end_of_a_block_ends_a_turn(lab: GradingLab) -> None:
    """In asyncio too; what a failed grade leaves is released as well."""

    async def turns() -> None:
        async with AsyncClient(lab.running.socket) as client:
            async with client.checkout(INSTANCE) as checkout:
                write(checkout.path / "new", "x")
                checkout.at_exit(diff=True)
                before = _requests(lab)
            assert _requests(lab) - before == Counter(take_turns=1)
            assert checkout.finished is not None and b"+x" in (checkout.finished.diff or b"")
            with pytest.raises(SteeringRefusedError):
                async with client.checkout(INSTANCE) as refused:
                    write(refused.path / "conftest.py", "x = 1\n")
                    refused.at_exit(grade={"policy": "refuse", "owner": GRADER})
            with pytest.raises(ZeroDivisionError):
                async with client.checkout(INSTANCE) as broken:
                    broken.at_exit()
                    raise ZeroDivisionError
            assert (refused.finished, broken.finished) == (None, None)
            assert await client.list_checkouts() == []

    asyncio.run(turns())
