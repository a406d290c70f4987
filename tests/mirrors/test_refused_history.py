"""Upstreams whose history has what git's fsck refuses: mirrored, found by audits, checked where it
is served.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from typed import typed
from waiting import until

from mirrord.git.fsck import RULES, Severity
from mirrord.git.modules import is_sound_url

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]

PROJECT = Path(__file__).parents[2]
CONFIG = "[checkouts]\nprewarm = false\n"
BAD_MODULES = b'[submodule "x"]\n\tpath = x\n\turl = https:///example.com/o/x.git\n'


def write(upstream: Upstream, kind: str, raw: bytes) -> str:
    words = ("hash-object", "-t", kind, "-w", "--stdin", "--literally")
    return upstream.git(*words, stdin=raw)


def tree_of(upstream: Upstream, *entries: tuple[bytes, bytes, str]) -> str:
    raw = b"".join(mode + b" " + name + b"\0" + bytes.fromhex(oid) for mode, name, oid in entries)
    return write(upstream, "tree", raw)


def refused_object(upstream: Upstream, rule: str) -> tuple[str, str]:
    """Write an object with a fault, in the tree of a commit; return both."""
    blob = write(upstream, "blob", b"content\n")
    file = (b"100644", b"a", blob)
    if rule == "missingEmail":
        tree = tree_of(upstream, file)
        raw = f"tree {tree}\nauthor A 1 +0000\ncommitter A <a@b> 1 +0000\n\nold\n"
        commit = write(upstream, "commit", raw.encode())
        return commit, commit
    if rule == "gitmodulesUrl":
        found = write(upstream, "blob", BAD_MODULES)
        tree = tree_of(upstream, (b"100644", b".gitmodules", found), file)
    else:
        inner = {
            "duplicateEntries": [file, file],
            "treeNotSorted": [(b"100644", b"b", blob), file],
            "zeroPaddedFilemode": [(b"0100644", b"a", blob)],
            "hasDotgit": [(b"100644", b".git", blob)],
        }[rule]
        found = tree_of(upstream, *inner)
        tree = tree_of(upstream, (b"40000", b"dir", found), (b"100644", b"z", blob))
    return found, upstream.git("commit-tree", "-m", "old", tree)


def operation(running: Daemon, path: str, body: Any) -> dict[str, Any]:
    asked = running.json("POST", path, body)
    at = f"/v1/operations/{asked['id']}"
    until(lambda: running.json("GET", at)["state"] in {"done", "failed"}, bound_s=120)
    answer: dict[str, Any] = running.json("GET", at)
    return answer


def run(running: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("--socket", running.socket, *words)


@pytest.mark.parametrize(
    "rule",
    ["gitmodulesUrl", "duplicateEntries", "treeNotSorted", "zeroPaddedFilemode", "missingEmail",
     "hasDotgit"],
)  # fmt: skip
def test_an_old_sin_stops_only_checkouts_of_its_own_tree(
    make_upstream: Callable[..., Upstream], tmp_path: Path, rule: str
) -> None:
    """It is mirrored, bundled, told with object and commit, accepted, and served or not."""
    upstream = make_upstream("up")
    url = f"file://{upstream.path.parent}/{{name}}"
    upstream.commit({"a": "1\n"})
    oid, old = refused_object(upstream, rule)
    tree = upstream.git("rev-parse", "HEAD^{tree}")
    tip = upstream.git("commit-tree", "-m", "new", "-p", old, "-p", "HEAD", tree)
    upstream.git("update-ref", "refs/heads/main", tip)
    rows = tmp_path / "rows.jsonl"
    lines = [{"instance_id": name, "repo": "some/up", "base_commit": commit}
             for name, commit in (("new", tip), ("old", old))]  # fmt: skip
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with daemon(CONFIG + f'[upstream]\nurl = "{url}"\n') as running:
        assert run(running, "dataset", "import", str(rows)).returncode == 0
        assert running.json("GET", "/v1/mirrors/some__up")["ref_faults"] == []
        assert run(running, "checkout", "new").returncode == 0
        asked = run(running, "checkout", "old")
        severity = RULES[rule]
        assert (asked.returncode == 0) == (severity is Severity.IGNORED), asked.stderr
        if severity is not Severity.IGNORED:
            assert oid in asked.stderr
        found = operation(running, "/v1/audits", {"level": "content"})["result"]
        if severity is Severity.IGNORED:
            assert found["findings"] == []
        else:
            (finding,) = found["findings"]
            assert (finding["kind"], finding["subject"]) == ("object-refused", oid)
            assert finding["instances"] == found["affected"] == ["old"]
            assert rule in finding["detail"]
            assert old in finding["detail"]
            assert found["repairs"] == []  # nothing to heal
            accept = f'[audit]\naccept = ["object-refused some/up {oid}"]\n'
            running.write_config(CONFIG + f'[upstream]\nurl = "{url}"\n{accept}')
            running.json("POST", "/v1/reload")
            found = operation(running, "/v1/audits", {"level": "content"})["result"]
            assert (found["open_count"], found["affected"]) == (0, [])
            asked = run(running, "checkout", "old")
            assert (asked.returncode == 0) == (severity is Severity.ACCEPTABLE), asked.stderr
        bundle = tmp_path / "b"
        assert run(running, "bundle", "create", "some/up", str(bundle)).returncode == 0
        taken = run(running, "bundle", "import", str(bundle), "--mirror", "other/copy")
        assert taken.returncode == 0, taken.stderr
        assert git(running.state_dir / "mirrors/other__copy", "rev-parse", "main") == tip


def test_the_document_has_each_rule_with_its_severity() -> None:
    text = (PROJECT / "docs/security-inside.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    documented = {
        name.strip("`"): row[1]
        for row in rows
        if len(row) == 3 and row[1] in set(Severity)
        for name in row[0].removeprefix("| ").split(", ")
    }
    assert documented == RULES


@pytest.mark.parametrize(
    ("url", "is_sound"),
    [
        ("https://example.com/o/x.git", True), ("../x.git", True), ("../../o/x", True),
        ("git@example.com:o/x", True), ("/srv/x", True), ("git://h/x", True),
        ("https:///example.com/o/x.git", False), ("-u./payload", False), ("http://", False),
        ("../../../:x", False), ("https://h/%0aprotocol=https", False), ("../%0ax", False),
        ("https::https:///x", False),
    ],
)  # fmt: skip
def test_urls_of_submodules_are_judged_as_git_does(
    url: str, is_sound: bool, make_upstream: Callable[..., Upstream], tmp_path: Path
) -> None:
    """Beside git's own judgement, of a pack with such a blob."""
    upstream = make_upstream("judge")
    raw = f'[submodule "x"]\n\tpath = x\n\turl = "{url}"\n'.encode()
    tree = tree_of(upstream, (b"100644", b".gitmodules", write(upstream, "blob", raw)))
    upstream.git("update-ref", "refs/heads/main", upstream.git("commit-tree", "-m", "x", tree))
    done = subprocess.run(["git", "fsck"], cwd=upstream.path, capture_output=True, check=False)
    assert (b"gitmodulesUrl" not in done.stderr + done.stdout) is is_sound, done.stderr
    assert is_sound_url(url) is is_sound
