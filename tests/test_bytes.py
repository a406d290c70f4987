"""Bytes are bytes: names of refs and paths with every byte that git allows, through everything that reads, writes or shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import ENV, Upstream
from web_daemon import page, page_daemon

import mirrord
from mirrord.fleet.generations import list_published, read_manifest
from mirrord.fleet.objects import ObjectStore
from mirrord.model import AuditLevel, MirrorName
from mirrord.protocol import Audit, Checkout, RefDiff, Synced
from mirrord.quoting import decode_name, encode_name, quote_name

pytestmark = [pytest.mark.slow, pytest.mark.root]

NAME = "owner__name"
_PARTS = [
    b"\xe2\x80\xa8", b"\xc2\x85", b"\xe3\x80\x80", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xf0\x9f\x98\x80\xff",
    b'"q"', b'q"q', b"a" * 100 + b"\xe9" * 100, b"a" * 61 + b"\xe9",
]  # fmt: skip
_NOT_IN_REFS = b" ~^:?*[\\\x7f" + bytes(range(0x20))
REFS = {
    b"refs/heads/x" + bytes([code]) + b"y" for code in range(1, 256) if code not in _NOT_IN_REFS
} | {b"refs/tags/" + part for part in _PARTS} | {b"refs/heads/main", b"refs/heads/caf\xe9"}  # fmt: skip
PATHS = {b"x" + bytes([code]) + b"y" for code in range(1, 256) if code != ord("/")}
PATHS |= {*_PARTS, b"\n", b'"\xe9/in"', b"\xe9\n/\x01", b'"a"', b"t\xe9/conftest.py"}


@dataclass
class World:
    daemon: Daemon
    port: int
    upstream: Upstream
    store: ObjectStore
    client: mirrord.Client
    first: Synced

    def cli(self, *words: str | bytes, status: int = 0) -> str:
        """Run the command line; what it prints is text."""
        command = [sys.executable, "-m", "mirrord", "--config", str(self.daemon.config), *words]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == status, (words, done)
        done.stderr.decode()
        return done.stdout.decode()

    def cli_json(self, *words: str | bytes) -> Any:
        return must_be_json(self.cli(*words, "--json").encode())

    def wait(self, operation: Any) -> dict[str, Any]:
        ended = self.client.wait(operation.id)
        assert ended.state == "done", ended
        return ended.result or {}


def must_be_json(content: bytes) -> Any:
    """JSON that every reader takes: UTF-8, without lone surrogates."""
    value = json.loads(content.decode())
    json.dumps(value, ensure_ascii=False).encode()
    return value


def git(repository: Path, *words: str, stdin: bytes = b"", status: int = 0) -> bytes:
    command = ["git", "-C", str(repository), *words]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, env=ENV)
    assert done.returncode == status, done
    return done.stdout


def set_refs(repository: Path, refs: set[bytes], value: str) -> None:
    lines = [b"update %s\0%s\0\0" % (ref, value.encode()) for ref in sorted(refs)]
    git(repository, "update-ref", "--stdin", "-z", stdin=b"".join(lines))


def refs_of(repository: Path) -> dict[bytes, bytes]:
    listed = git(repository, "for-each-ref", "--format=%(refname) %(objectname)")
    rows = (line.rpartition(b" ") for line in listed.split(b"\n")[:-1])
    return {ref: oid for ref, _, oid in rows if not ref.startswith(b"refs/mirrord/")}


def files_below(root: str | Path) -> dict[bytes, bytes]:
    top = os.fsencode(root)
    found = {}
    for above, directories, names in os.walk(top):
        if b".git" in directories:
            directories.remove(b".git")
        for path in (os.path.join(above, name) for name in names):
            with open(path, "rb") as file:
                found[os.path.relpath(path, top)] = file.read()
    return found


def write_files(root: str | Path, paths: set[bytes], content: bytes) -> None:
    for path in paths:
        place = os.path.join(os.fsencode(root), path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "ab") as file:
            file.write(content)


def names(texts: list[str]) -> set[bytes]:
    return set(map(encode_name, texts))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("bytes")
    upstream = Upstream(root / "up" / NAME)
    upstream.commit({"plain": "1\n"})
    write_files(upstream.path, PATHS, b"1\n")
    upstream.git("add", "--all")
    upstream.git("commit", "--quiet", "-m", "every byte \udce9")
    set_refs(upstream.path, REFS, upstream.git("rev-parse", "HEAD"))
    upstream.git("symbolic-ref", "HEAD", "refs/heads/caf\udce9")
    config = f'[upstream]\nurl = "file://{root}/up/{{owner}}__{{name}}"\n[store]\nurl = "file://{root}/store"\n'
    with ExitStack() as stack:
        running, port = stack.enter_context(page_daemon(config))
        client = stack.enter_context(mirrord.Client(str(running.socket)))
        ended = client.wait(client.add_mirror("owner/name").id)
        assert ended.state == "done", ended
        store = ObjectStore(f"file://{root}/store")
        first = Synced.from_json(ended.result)
        yield World(running, port, upstream, store, client, first)
        for line in running.log_lines:
            json.dumps(line, ensure_ascii=False).encode()
            assert "crashed" not in line["event"], line


def test_refs_arrive_byte_by_byte(world: World) -> None:
    mirror = world.daemon.state_dir / "mirrors" / NAME
    assert {encode_name(change.ref) for change in world.first.changes} == REFS
    assert not world.first.faults
    assert refs_of(mirror) == refs_of(world.upstream.path)
    # by name, as git finds them in packed-refs by bisection
    git(mirror, "pack-refs", "--all")
    asked = git(mirror, "cat-file", "--batch-check", stdin=b"".join(ref + b"\n" for ref in REFS))
    assert b"missing" not in asked
    manifest = read_manifest(world.store, MirrorName("owner", "name"), list_published(world.store, MirrorName("owner", "name"))[-1])  # fmt: skip
    assert {ref for ref in map(encode_name, manifest.refs) if b"mirrord" not in ref} == REFS
    assert manifest.head == "refs/heads/caf\udce9"


def test_a_mirror_is_shown_as_text(world: World) -> None:
    assert world.client.get_mirror(NAME).default_branch == "caf\udce9"
    assert '"caf\\351"' in world.cli("mirror", "show", NAME)
    assert world.cli_json("mirror", "show", NAME)["default_branch"] == '"caf\\351"'
    for words in (["mirror", "list"], ["status"], ["ref", "log", NAME], ["operation", "list"]):
        world.cli(*words)
        world.cli_json(*words)
    for path in ("/v1/mirrors", "/v1/status", "/v1/operations", "/v1/activity", "/v1/openapi.json"):
        must_be_json(world.daemon.get(path)[2])
    assert "&#34;caf\\351&#34;" in page(world.port, f"/mirrors/{NAME}")
    for path in ("/", "/mirrors", "/activity", "/metrics"):
        page(world.port, path)


def test_changes_are_recorded_kept_and_restored(world: World) -> None:
    set_refs(world.upstream.path, REFS, world.upstream.commit({"plain": "2\n"}))
    gone = {ref for ref in REFS if ref.startswith(b"refs/tags")}
    lines = b"".join(b"delete %s\0\0" % ref for ref in gone)
    git(world.upstream.path, "update-ref", "--stdin", "-z", stdin=lines)
    with world.daemon.connect() as events:
        events.sendall(b"GET /v1/events HTTP/1.1\r\nhost: m\r\n\r\n")
        synced = Synced.from_json(world.wait(world.client.sync_mirror(NAME)))
        received = b""
        while b"mirror.synced" not in received:
            received += events.recv(65536)
        received.decode()
    assert {encode_name(each.ref) for each in synced.changes if each.kind == "deleted"} == gone
    newest, oldest, *_ = world.client.log_refs(NAME)
    found = world.client.diff_refs(NAME, oldest.id, newest.id)
    assert {encode_name(each.ref) for each in found.changes} == REFS
    assert RefDiff.from_json(world.cli_json("ref", "diff", NAME, oldest.id, newest.id)) == found
    shown = world.cli("ref", "diff", NAME, oldest.id, newest.id)
    assert all(f" {quote_name(ref)}\n" in shown for ref in REFS)
    moved = RefDiff.from_json(world.wait(world.client.restore_refs(NAME, oldest.id)))
    assert {encode_name(each.ref) for each in moved.changes} == REFS
    assert set(refs_of(world.daemon.state_dir / "mirrors" / NAME)) == REFS


def test_lost_refs_are_found_and_healed(world: World) -> None:
    mirror = world.daemon.state_dir / "mirrors" / NAME
    lost = sorted(refs_of(mirror))[-5:]
    before = refs_of(mirror)
    lines = b"".join(b"delete %s\0\0" % ref for ref in lost)
    git(mirror, "update-ref", "--stdin", "-z", stdin=lines)

    def audit(*, heal: bool) -> Audit:
        made = world.wait(world.client.start_audit(NAME, level=AuditLevel.CONTENT, heal=heal))
        return world.client.get_audit(made["id"])

    assert names([each.subject for each in audit(heal=False).findings]) == set(lost)
    assert all(each.subject == "" or quote_name(each.subject) in each.detail for each in audit(heal=False).findings)  # fmt: skip
    page(world.port, "/audits")
    page(world.port, f"/mirrors/{NAME}")
    world.cli("audit", NAME, "--no-heal", status=8)
    healed = audit(heal=True)
    assert names(healed.repairs[0].refs) == set(lost)
    assert not healed.findings
    assert refs_of(mirror) == before


def test_a_bundle_and_the_store_have_every_name(world: World, tmp_path: Path) -> None:
    mirror = world.daemon.state_dir / "mirrors" / NAME

    def clients(other: Daemon) -> mirrord.Client:
        return mirrord.Client(str(other.socket))

    def must_be_alike(other: Daemon, client: mirrord.Client) -> None:
        assert refs_of(other.state_dir / "mirrors" / NAME) == refs_of(mirror)
        assert client.get_mirror(NAME).default_branch == "caf\udce9"

    file = tmp_path / "b\udce9.bundle"
    world.client.create_bundle(NAME, file)
    listed = git(mirror, "bundle", "list-heads", os.fsdecode(os.fsencode(file)))
    assert set(refs_of(mirror)) <= {line.partition(b" ")[2] for line in listed.split(b"\n")}
    lost = '[upstream]\nurl = "file:///nonexistent/{name}"\n'
    with daemon(f'{lost}[store]\nurl = "{world.store.shown}"\n') as other, clients(other) as client:
        client.wait(client.start_restore().id)
        must_be_alike(other, client)
    with daemon(lost) as other, clients(other) as client:
        client.wait(client.import_bundle(file).id)
        must_be_alike(other, client)


@pytest.mark.parametrize("backend", ["overlay", "pool"])
def test_paths_are_served_changed_and_put_back(world: World, backend: str, tmp_path: Path) -> None:
    made = world.cli("checkout", os.fsencode(f"{NAME}@caf\udce9"), "--backend", backend, "--view", "grader")  # fmt: skip
    tree = Path(made.rstrip("\n"))
    held = next(each for each in world.client.list_checkouts() if each.path == str(tree))
    clean = files_below(tree)
    assert clean.keys() >= PATHS
    write_files(tree, PATHS, b"2\n")
    changed = files_below(tree)
    status = world.cli("diff", str(tree), "--name-status").split("\n")
    assert len(status) == len(PATHS) + 1
    world.cli("diff", str(tree), "--stat")
    world.cli_json("diff", str(tree))
    patch = world.client.diff_checkout(held.id)
    world.client.make_snapshot(held.id, "s1")
    fork = world.client.fork_checkout(held.id, auto_renew=False)
    assert files_below(fork.path) == changed
    graded = world.client.grade_checkout(held.id, policy="drop", auto_renew=False)
    assert encode_name(graded.report.steering[0].path) == b"t\xe9/conftest.py"
    assert names(graded.report.dropped) == {b"t\xe9/conftest.py"}
    assert '"t\\351/conftest.py"' in json.dumps(must_be_json(world.cli("grade", str(tree), "--json").encode()), ensure_ascii=False).replace("\\\\", "\\").replace('\\"', '"')  # fmt: skip
    reset = world.client.reset_checkout(held.id)
    assert files_below(tree) == clean
    assert names(reset.proof.refs) == {ref for ref in REFS if ref.startswith(b"refs/tags/")} or backend == "pool"  # fmt: skip
    world.client.apply_patch(held.id, patch)
    assert files_below(tree) == changed
    world.client.pin(NAME, held.commit)
    wanted = sorted(map(decode_name, PATHS))
    assert names(world.client.restore_paths(held.id, held.commit, *wanted)) == PATHS
    assert files_below(tree) == clean
    write_files(tree, {b'"\xe9/in"'}, b"3\n")
    answer = world.cli_json("restore", str(tree), quote_name(b'"\xe9/in"'), "--commit", held.commit)
    assert answer == {"paths": [quote_name(b'"\xe9/in"')]}
    world.client.reset_checkout(held.id, to="s1")
    assert files_below(tree) == changed
    world.client.reset_checkout(held.id)
    assert world.client.verify_receipt(world.client.get_receipt(held.id)).holds
    world.cli("verify-seal", str(tree), "--base", held.commit)
    for each in (held.id, fork.id, graded.report.id):
        world.client.release_checkout(each)


@pytest.mark.parametrize("name", ['owner/name@"caf\\351"', '"owner/name@caf\\351"', 'owner/name@"refs/heads/caf\\351"'])  # fmt: skip
def test_a_printed_name_can_be_asked_for(world: World, name: str) -> None:
    made = Checkout.from_json(world.daemon.json("POST", "/v1/checkouts", {"instance": name}))
    world.client.release_checkout(made.id)
