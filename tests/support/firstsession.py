"""The first session on an installed mirrord: every command of the documents, by who types it.

Root and an ordinary user's own daemon may do all of it. A member does what needs no administrator, the owner of a
checkout works in it, a stranger is refused. Nobody meets a bug.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gitrepos import Upstream
from sessions import Ran, Shell, blocks, localized, session

INSTANCE, KEY = "psf__requests-2317", "psf__requests-2.3"
NOT_RUN = {
    "make setup": "it was installed",
    "mirrord serve": "the daemon runs",
    "docker run": "tests/integrations/test_containers.py runs it",
    "podman ": "it does so too",
}
REPLACED = {
    "run-agent": "cat /testbed/setup.py",
    "COMMAND": "sh -c 'cat /*/task/tree/setup.py'",
    "--uid=agent": "--uid=$(id -u)",
    r"docker inspect --format '{{.State.Pid}}' NAME": "cat /tmp/container",
    "python3 -c": "/usr/lib/mirrord/bin/python -c",
    "python -P": "env PYTHONPATH=/srv/libraries python3 -P",
}
_TESTS = """\
diff --git a/tests/test_news.py b/tests/test_news.py
new file mode 100644
--- /dev/null
+++ b/tests/test_news.py
@@ -0,0 +1,2 @@
+def test_news():
+    assert open('NEWS').read() == 'fixed\\n'
"""
_PATCH = """\
diff --git a/NEWS b/NEWS
new file mode 100644
--- /dev/null
+++ b/NEWS
@@ -0,0 +1 @@
+fixed
"""
_RECIPE = f"""\
[[environment]]
key = "{KEY}"
python = "3.11"
test_command = "test \\"$(cat NEWS)\\" = fixed && echo PASSED tests/test_news.py::test_news"
"""
_BUGS = re.compile(r"Traceback|a bug|this is a bug|unexpected error|Permission denied: '/var")
_VERB = re.compile(r"\bmirrord ((?:mirror |dataset |environment )?[a-z-]+)")
_REFUSED = {"audit", "dataset import", "environment build", "grade", "rehearse"}
_ALLOWED = {
    "checkout": {0, 3}, "diff": {0}, "reset": {0}, "verify-seal": {0}, "release": {0, 2},
    "grade": {2, 3}, "environment log": {0}, "environment show": {0}, "attach": {0, 3}, "exec": {0},
}  # fmt: skip
_KEPT_OUT = {
    "checkout": {3}, "diff": {4}, "reset": {4}, "verify-seal": {4}, "release": {2, 4},
    "grade": {2, 3}, "environment log": {3}, "environment show": {3}, "attach": {2}, "exec": {3},
}  # fmt: skip
STATUSES: dict[str, dict[str, set[int]]] = {
    "bob": {verb: {3} for verb in _REFUSED} | _ALLOWED,
    "mallory": {verb: {3} for verb in _REFUSED} | _KEPT_OUT,
}
"""How the verbs end that a member (bob) and a stranger (mallory) type."""


def upstream(path: Path) -> tuple[Upstream, list[str]]:
    """A repository whose checkout takes longer than the removal of one that failed; the documents' base commits."""
    made = Upstream(path)
    made.write({f"package/module{number}.py": f"x = {number}\n" for number in range(1500)})
    lines = [f"# line {number}" for number in range(1, 58)] + ["setup("]
    made.write({"setup.py": "\n".join([*lines, "    classifiers=(", "", "    ),", ")"]) + "\n"})
    made.commit({"README": "first\n"}, "history update")
    bases = [made.commit({"VERSION": f"{v}\n"}, f"v{v}") for v in ("2.3.0", "2.31.0")]
    made.git("tag", "v2.3.0", bases[0])
    made.commit({"README": "second\n"})
    return made, bases


def write_datasets(directory: Path, bases: Sequence[str]) -> None:
    """The instances that the documents take for granted."""
    row: dict[str, Any] = {
        "instance_id": INSTANCE, "repo": "psf/requests", "base_commit": bases[0], "version": "2.3",
        "patch": _PATCH, "test_patch": _TESTS, "PASS_TO_PASS": "[]",
        "FAIL_TO_PASS": '["tests/test_news.py::test_news"]',
    }  # fmt: skip
    (directory / "lite.jsonl").write_text(json.dumps(row) + "\n")
    (directory / "recipes.toml").write_text(_RECIPE)


def prepare(shell: Shell, directory: str) -> None:
    """What an administrator does before the others come, with commands that the documents describe."""
    shell.run(f"mirrord dataset import {directory}/lite.jsonl")
    shell.run(f"mirrord environment import {directory}/recipes.toml")
    shell.run("mkdir -p /mnt /testbed; unshare --mount sleep 900 & echo $! >/tmp/container")


def documented(bases: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the commands of the five documents and what they print there."""
    yield from _session_of("README.md", bases)
    yield "cd", ""
    yield from _session_of("docs/grading.md", bases)
    yield "cd", ""
    for document in ("docs/datasets.md", "docs/environments.md"):
        for block in blocks(document, "sh"):
            yield from ((line, "") for line in block.splitlines())
    for block in (*blocks("docs/integrations.md", "text"), *blocks("docs/sandboxes.md", "text")):
        for line in localized(block, bases).replace("\\\n", "").splitlines():
            yield line.removeprefix("$ ").removeprefix("# "), ""
    yield f"mirrord exec {INSTANCE} -- cat setup.py", ""
    yield (
        f"mirrord exec {INSTANCE} --environment auto -- sh -c 'test -x $VIRTUAL_ENV/bin/python'",
        "",
    )


def _session_of(document: str, bases: Sequence[str]) -> Iterator[tuple[str, str]]:
    for block in blocks(document, "console"):
        yield from session(localized(block, bases))


def type_session(
    shell: Shell, bases: Sequence[str], *, owner: str = "", is_short: bool = False
) -> Iterator[Ran]:
    """Type the documents' commands; yield how each ended.

    `owner` is an ordinary user for whom to ask where a mount is needed. A short session is that of
    README.md.
    """
    shown_tree = tree = ""
    commands = _session_of("README.md", bases) if is_short else documented(bases)
    for typed, shown in commands:
        command = re.sub(r"  +#.*$", "", typed, flags=re.MULTILINE) if "\n" not in typed else typed
        if any(command.startswith(prefix) for prefix in NOT_RUN):
            continue
        if owner:
            command = re.sub(
                r"(--attach|--environment auto|--run)", rf"\1 --owner {owner}", command
            )
        for word, here in REPLACED.items():
            command = command.replace(word, here)
        if shown_tree:
            command = command.replace(shown_tree, tree)
        ran = shell.try_run(command)
        if _BUGS.search(ran.printed):
            log = shell.try_run("journalctl --unit mirrord --no-pager --lines 100")
            raise AssertionError(f"{ran}\n{log.printed}")
        if command.startswith("mirrord checkout ") and shown and ran.status == 0:
            shown_tree, tree = shown.strip(), ran.printed.strip()
        if command.startswith("id="):
            shell.try_run(f"directory=$(dirname $(mirrord checkout {INSTANCE}))")
        yield ran


def verbs_of(ran: Ran) -> list[str]:
    """The verbs in a command whose status is the command's, if it is one of the program's."""
    return (
        []
        if re.search("[|;]", ran.command)
        else [found[1] for found in _VERB.finditer(ran.command)][:1]
    )
