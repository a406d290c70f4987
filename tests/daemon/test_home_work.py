"""What an ordinary user's daemon does in its home with environments, for clients outside of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyone
import pytest
from gitrepos import Upstream
from harness_daemon import (
    FIX,
    INSTANCE,
    ROLLOUTS,
    TEST,
    environment,
    make_instance,
    mini_swe_agent,
    roll_out_at,
)
from homes import UID, Home, home
from python_packages import wheel

pytestmark = [pytest.mark.root, pytest.mark.slow]

CONFIG = '[environments]\nindex = "ROOT/packages"\nnetwork = false\n'


def fill(root: Path) -> None:
    row = make_instance(root, Upstream(root / "up" / "acme" / "shapes"))
    prediction = {"instance_id": INSTANCE, "model_name_or_path": "m", "model_patch": row["patch"]}
    (root / "predictions.jsonl").write_text(json.dumps(prediction) + "\n")
    wheel(root / "packages", "tiny", "1.0", {"tiny/__init__.py": "x = 1\n"})


@pytest.fixture(scope="module")
def built() -> Iterator[Home]:
    """With an environment of the instance, and what its recipe installs as a prepared layer."""
    with home(CONFIG, fill=fill) as made:
        ask(
            made,
            "client.wait(client.import_dataset(root / 'shapes.jsonl'))",
            "client.import_recipes(root / 'recipes.toml')",
            "client.wait(client.build_environments(INSTANCE))",
        )
        yield made


def ask(made: Home, *lines: str) -> Any:
    """Run a script as the user, outside of the home; answers what it leaves in `answer`."""
    script = [
        "import json, pathlib",
        "from mirrord import Client, Sandbox",
        f"root, INSTANCE, answer = pathlib.Path({str(made.root)!r}), {INSTANCE!r}, None",
        "with Client() as client:",
        *(f"    {line}" for line in "\n".join(lines).splitlines()),
        "print(json.dumps(answer))",
    ]
    return json.loads(made.run("-c", "\n".join(script)).stdout.splitlines()[-1])


CHECKOUT = "client.checkout(INSTANCE, environment='auto', sandbox=True)"


def test_a_prepared_environment_is_there_after_a_reset_and_is_saved(built: Home) -> None:
    script = "cat $VIRTUAL_ENV/made.txt; python -c 'import tiny; print(tiny.x)'; rm $VIRTUAL_ENV/made.txt; > $VIRTUAL_ENV/lib/python3.11/site-packages/tiny/__init__.py"
    answer = ask(
        built,
        f"with {CHECKOUT} as held, Sandbox(held) as box:",
        f"    answer = [box.exec({script!r}).stdout.decode()]",
        "    box.reset()",
        f"    answer += [held.lease.layer.split('-')[0], held.diff().decode(), box.exec({script!r}).stdout.decode()]",
        "    box.reset()",
        "    box.exec('echo s > $VIRTUAL_ENV/s')",
        "    held.write('saved', b'saved\\n')",
        "    client.save_layer(held.id, 'mine')",
        "    box.reset(layer='mine')",
        "    answer += [box.exec('cat saved $VIRTUAL_ENV/s').stdout.decode(), held.diff().decode()]",
    )
    assert answer == ["made\n1\n", "environment", "", "made\n1\n", "saved\ns\n", ""]


def test_grades_receipt_and_seal(built: Home) -> None:
    """A checkout and a patch are graded with the environment, which is asked what it loads."""
    held = ask(
        built,
        "held = client.checkout(INSTANCE, environment='auto', sandbox=True, auto_renew=False)",
        f"Sandbox(held).exec({FIX!r})",
        "(root / 'receipt').write_bytes(held.receipt().canonical())",
        "answer = {'id': held.id, 'path': str(held.path), 'commit': held.lease.commit, 'grades': []}",
        "for how in (held.grade(sandbox=True), client.grade(INSTANCE, held.diff(), environment='auto', sandbox=True)):",
        "    with how as grade, Sandbox(grade) as box:",
        f"        found = [grade.report.backend, grade.report.judged_by, box.exec({TEST!r}).exit_code]",
        "        answer['grades'].append(found)",
        "with client.grade(INSTANCE, held.diff()) as grade:",
        "    answer['plain'] = [grade.report.backend, (grade.path / 'tests/test_area.py').read_text()]",
    )
    assert held["grades"] == [["overlay", "loading", 0]] * 2
    assert held["plain"][0] == "pool"
    assert "test_half" in held["plain"][1]
    grade = built.run("-m", "mirrord", "grade", held["id"], "--attach")
    assert "mirrord enter" in grade.stderr
    assert Path(grade.stdout.strip()).stat().st_mode & 0o777 == 0
    built.cli("receipt", "--verify", str(built.root / "receipt"))
    verify = ("verify-seal", held["path"], "--base", held["commit"])
    closed = built.run("-m", "mirrord", *verify, check=False).stderr
    assert ("Permission denied" in closed, "by `mirrord enter" in closed) == (True, True), closed
    built.cli("enter", "--", *anyone.python(), "-P", "-m", "mirrord", *verify)


def test_predictions_and_a_rehearsal_run_tests(built: Home) -> None:
    file = str(built.root / "predictions.jsonl")
    assert "resolved" in built.cli("grade", "--predictions", file, "--run")
    assert "1 ready; none failed" in built.cli("rehearse", INSTANCE, "--run")


def test_harnesses(built: Home) -> None:
    python = [str(environment()), "-P"]
    # wherever the clone is: a private directory may be read by this capability
    reading = ("setpriv", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    become = (f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--")
    row = (built.root / "shapes.jsonl").read_text()

    def run(*words: str) -> str:
        return built.execute(
            [*reading, *become, *python, *words], user=0, INSTANCE=row, HF_HUB_OFFLINE="1",
            OPENAI_API_KEY="key-of-the-harness", MSWEA_SILENT_STARTUP="1",
            CHECKS="read_file_is_directory",  # the whole suite takes a minute
        ).stdout  # fmt: skip

    def roll_out(name: str) -> Any:
        return json.loads(run(str(ROLLOUTS / f"{name}.py")).splitlines()[-1])

    roll_out_at("home", roll_out)
    run(*mini_swe_agent(built.root))
    predictions = f"{built.root}/mini/preds.json"
    assert "1 resolved" in built.cli("grade", "--predictions", predictions, "--run")
