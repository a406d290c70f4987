"""Refs as git allows them: kept byte for byte, or told as a fault of that ref alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from typed import typed
from waiting import until

from mirrord.quoting import unquote_name

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]

LATIN = b"caf\xe9"


def _point(upstream: Upstream, ref: bytes, oid: str) -> None:
    """Write a ref as git's own files have it, also where `git update-ref` refuses it."""
    upstream.git("pack-refs", "--all", "--prune")
    path = os.fsencode(upstream.path / ".git") + b"/" + ref
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(os.fsdecode(path)).write_text(f"{oid}\n")


def not_utf8(upstream: Upstream) -> None:
    _point(upstream, b"refs/heads/" + LATIN, upstream.git("rev-parse", "main"))


def long_and_not_utf8(upstream: Upstream) -> None:
    for length in (60, 61, 200, 239):
        _point(
            upstream, b"refs/tags/" + LATIN + b"x" * (length - 4), upstream.git("rev-parse", "main")
        )


def too_long(upstream: Upstream) -> None:
    _point(upstream, b"refs/heads/" + b"x" * 250, upstream.git("rev-parse", "main"))


def symbolic(upstream: Upstream) -> None:
    upstream.git("symbolic-ref", "refs/heads/alias", "refs/heads/main")
    upstream.git("symbolic-ref", "refs/heads/dangling", "refs/heads/nowhere")


def blobs_and_trees(upstream: Upstream) -> None:
    for name, what in (
        ("tags/blob", "main:a"),
        ("tags/tree", "main^{tree}"),
        ("heads/tree", "main^{tree}"),
    ):
        _point(upstream, f"refs/{name}".encode(), upstream.git("rev-parse", what))
    upstream.git("tag", "-a", "-m", "of a blob", "blob-tag", upstream.git("rev-parse", "main:a"))


def named_head(upstream: Upstream) -> None:
    for name in ("HEAD", "refs/heads/x", "heads/main", "tags/v1", "@", "-x", "main.lock.d"):
        _point(upstream, f"refs/heads/{name}".encode(), upstream.git("rev-parse", "main"))


def tags_of_tags(upstream: Upstream) -> None:
    upstream.git("tag", "-a", "-m", "one", "one", "main")
    upstream.git("tag", "-a", "-m", "two", "two", "one")
    upstream.git("tag", "main", "main")  # of the name of a branch


def head_names_nothing(upstream: Upstream) -> None:
    upstream.git("symbolic-ref", "HEAD", "refs/heads/unborn")


def head_detached(upstream: Upstream) -> None:
    upstream.git("checkout", "--quiet", "--detach", "main")


def replaced(upstream: Upstream) -> None:
    first = upstream.git("rev-list", "--max-parents=0", "main")
    upstream.git("replace", upstream.git("rev-parse", "main"), first)


def many(upstream: Upstream) -> None:
    tip = upstream.git("rev-parse", "main")
    # more than SQLite binds in a statement, and than a command's arguments can name
    lines = sorted(f"{tip} refs/tags/{'t' * 60}{number}\n" for number in range(33_000))
    header = "# pack-refs with: sorted \n"
    (upstream.path / ".git/packed-refs").write_text("".join([header, *lines]))


KINDS = [
    not_utf8, long_and_not_utf8, too_long, symbolic, blobs_and_trees, named_head, tags_of_tags,
    head_names_nothing, head_detached, replaced, many,
]  # fmt: skip
FAULTS: dict[Callable[[Upstream], None], set[str]] = {
    too_long: {"refs/heads/" + "x" * 250},
    blobs_and_trees: {"refs/heads/tree"},
}


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with daemon("[checkouts]\nprewarm = false\n") as made:
        yield made


def operation(running: Daemon, path: str, body: Any) -> dict[str, Any]:
    at = f"/v1/operations/{running.json('POST', path, body)['id']}"
    until(lambda: running.json("GET", at)["state"] in {"done", "failed"}, bound_s=200)
    answer: dict[str, Any] = running.json("GET", at)
    return answer


def run(running: Daemon, *words: str) -> str:
    done = typed("--socket", running.socket, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refs_of(path: Path, *patterns: str) -> dict[str, str]:
    listing = git(path, "for-each-ref", "--format=%(objectname) %(refname)", *patterns)
    return {
        ref: oid for oid, _, ref in (line.partition(" ") for line in listing.split("\n") if line)
    }


FOLLOWED = ("refs/heads", "refs/tags")


def must_be_whole(running: Daemon, name: str, upstream: Path, faults: set[str]) -> None:
    """The mirror has what upstream has, and an audit takes all of it."""
    mirror = running.state_dir / f"mirrors/o__{name}"
    shown = running.json("GET", f"/v1/mirrors/o__{name}")
    assert {unquote_name(it["ref"]) for it in shown["ref_faults"]} == faults
    wanted = {ref: oid for ref, oid in refs_of(upstream, *FOLLOWED).items() if ref not in faults}
    assert refs_of(mirror, *FOLLOWED) == wanted
    audit = operation(running, "/v1/audits", {"mirrors": [f"o/{name}"], "level": "content"})
    assert audit["result"]["findings"] == []


def must_travel(running: Daemon, name: str) -> None:
    """A bundle and the ref history take all refs of the mirror."""
    wanted = refs_of(running.state_dir / f"mirrors/o__{name}", *FOLLOWED)
    bundle = running.root / f"{name}.bundle"
    run(running, "bundle", "create", f"o/{name}", str(bundle))
    copy = f"{name}-{len(list(running.state_dir.glob('mirrors/copy__*')))}"
    run(running, "bundle", "import", str(bundle), "--mirror", f"copy/{copy}")
    assert refs_of(running.state_dir / f"mirrors/copy__{copy}", *FOLLOWED) == wanted
    log = json.loads(run(running, "ref", "log", f"o/{name}", "--json"))
    assert log
    run(running, "ref", "diff", f"o/{name}", log[0]["id"], "latest")
    assert not [line for line in running.log_lines if line["event"] == "request.crashed"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_refs_of_every_kind_are_kept_or_told(
    make_upstream: Callable[..., Upstream], running: Daemon, kind: Callable[[Upstream], None]
) -> None:
    upstream = make_upstream("up")
    upstream.commit({"a": "1"})
    upstream.commit({"a": "2"})
    name = kind.__name__.replace("_", "-")
    kind(upstream)
    added = operation(running, "/v1/mirrors", {"repo": f"o/{name}", "url": upstream.url})
    assert added["state"] == "done", str(added["error"]["detail"])
    must_be_whole(running, name, upstream.path, FAULTS.get(kind, set()))
    upstream.git("update-ref", "refs/heads/later", "main")
    assert operation(running, f"/v1/mirrors/o__{name}/sync", {})["state"] == "done"
    must_be_whole(running, name, upstream.path, FAULTS.get(kind, set()))
    must_travel(running, name)


def test_a_branch_becomes_a_directory_and_a_branch_again(
    make_upstream: Callable[..., Upstream], running: Daemon
) -> None:
    upstream = make_upstream("up")
    upstream.commit({"a": "1"})
    upstream.git("branch", "x")
    assert (
        operation(running, "/v1/mirrors", {"repo": "o/dir", "url": upstream.url})["state"] == "done"
    )
    for old, new in (("x", "x/y"), ("x/y", "x/y/z"), ("x/y/z", "x")):
        upstream.git("branch", "--move", old, new)
        assert operation(running, "/v1/mirrors/o__dir/sync", {})["state"] == "done"
        must_be_whole(running, "dir", upstream.path, set())
        must_travel(running, "dir")


def test_an_empty_upstream_is_told_and_then_gets_its_first_push(
    make_upstream: Callable[..., Upstream], running: Daemon
) -> None:
    upstream = make_upstream("up")
    added = operation(running, "/v1/mirrors", {"repo": "o/empty", "url": upstream.url})
    assert (added["state"], added["error"]["code"]) == ("failed", "upstream-empty")
    upstream.commit({"a": "1"})
    assert operation(running, "/v1/mirrors/o__empty/sync", {})["state"] == "done"
    must_be_whole(running, "empty", upstream.path, set())
    must_travel(running, "empty")
