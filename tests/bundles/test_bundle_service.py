"""Bundles: a mirror as one file from one daemon into another, and what bad files do."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from waiting import BOUND_S, until

from mirrord import Client
from mirrord.bundles.bundle_file import header_bytes, read_header
from mirrord.cli.main import run
from mirrord.errors import (
    InvalidRequestError,
    MirrordError,
    NoDaemonError,
    NotFoundError,
    UsageError,
)
from mirrord.model import View
from mirrord.protocol import Progress

pytestmark = pytest.mark.slow

NAME = "demo__project"


class Pair:
    """Two daemons that know nothing of each other; the first has a mirror of everything that a
    bundle carries.
    """

    def __init__(self, one: Daemon, other: Daemon, upstream: Upstream, root: Path) -> None:
        self.one, self.other, self.upstream, self.root = one, other, upstream, root
        self.file = root / "project.bundle"

    def mirror(self, at: Daemon) -> Path:
        return at.state_dir / "mirrors" / NAME

    def refs(self, at: Daemon) -> dict[str, str]:
        lines = git(
            self.mirror(at), "for-each-ref", "--format=%(objectname) %(refname)"
        ).splitlines()
        return {ref: oid for oid, ref in (line.split() for line in lines)}

    def bundle(self, since: str | None = None, file: Path | None = None) -> Any:
        with Client(self.one.socket) as client:
            return client.create_bundle(NAME, file or self.file, since=since)

    def take(self, file: Path | None = None, mirror: str | None = None) -> Any:
        with Client(self.other.socket) as client:
            ended = client.wait(client.import_bundle(file or self.file, mirror=mirror))
        assert ended.result is not None
        return ended.result

    def sync(self) -> None:
        with Client(self.one.socket) as client:
            client.wait(client.sync_mirror(NAME))

    def audit(self, at: Daemon) -> Any:
        with Client(at.socket) as client:
            return client.wait(client.start_audit(heal=False)).result


class Source(NamedTuple):
    daemon: Daemon
    upstream: Upstream
    dataset: Path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """A daemon whose mirror has all that a bundle carries: pins of a dataset and of a person, a
    kept tip, a history.
    """
    root = tmp_path_factory.mktemp("source")
    upstream = Upstream(root / "demo+project")
    commits = upstream.history(4)
    upstream.git("tag", "-a", "v1", "-m", "one", "HEAD~1")
    rows = [
        {
            "repo": "demo/project",
            "instance_id": f"demo__project-{n}",
            "base_commit": commits[n],
            "environment_setup_commit": commits[0],
            "patch": "p\n",
            "test_patch": "t\n",
            **dict.fromkeys(("FAIL_TO_PASS", "PASS_TO_PASS"), "[]"),
            **dict.fromkeys(("problem_statement", "hints_text", "created_at", "version"), ""),
        }
        for n in (1, 2)
    ]
    dataset = root / "tiny.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f'[upstream]\nurl = "file://{root}/{{owner}}+{{name}}"\n[checkouts]\nprewarm = false\n'
    with daemon(text) as running, Client(running.socket) as client:
        client.wait(client.import_dataset(dataset))
        client.pin(NAME, commits[3], "the paper's")
        upstream.git("reset", "--quiet", "--hard", commits[1])
        upstream.commit({"other": "way"})
        client.wait(client.sync_mirror(NAME))
        yield Source(running, upstream, dataset)


@pytest.fixture(scope="module")
def other() -> Iterator[Daemon]:
    with daemon(
        '[upstream]\nurl = "file:///nonexistent/{owner}/{name}"\n[checkouts]\nprewarm = false\n'
    ) as running:
        yield running


@pytest.fixture
def pair(tmp_path: Path, source: Source, other: Daemon) -> Iterator[Pair]:
    """The second daemon forgets what each test brought it."""
    yield Pair(source.daemon, other, source.upstream, tmp_path)
    with Client(other.socket) as client:
        for dataset in client.list_datasets():
            client.remove_dataset(dataset.name)
        for pin in client.list_pins():
            client.unpin(pin.mirror, pin.commit, pin.owner)
        for mirror in client.list_mirrors():
            client.remove_mirror(mirror.name)
    until(lambda: not any((other.state_dir / "mirrors").iterdir()))


def test_a_bundle_restores_the_whole_mirror_elsewhere(pair: Pair) -> None:
    """Every ref, pins with owner and reason, kept tips, the ref history, the dataset's instances;
    and an audit finds nothing.
    """
    made = pair.bundle()
    assert made.size_bytes == pair.file.stat().st_size
    assert pair.file.stat().st_mode & 0o777 == 0o600
    result = pair.take()
    assert (result["created"], result["datasets"], result["datasets_refused"]) == (
        True,
        {"tiny": 2},
        [],
    )
    assert pair.refs(pair.other) == pair.refs(pair.one)
    with Client(pair.one.socket) as one, Client(pair.other.socket) as other:
        assert other.list_pins() == one.list_pins()
        assert other.log_refs(NAME) == one.log_refs(NAME)
        assert made.record == one.log_refs(NAME)[0].id
        shown = other.get_mirror(NAME)
        assert (shown.url, shown.state, shown.default_branch) == (
            pair.upstream.url,
            "ready",
            "main",
        )
        assert (shown.ref_count, shown.kept_count, shown.pin_count) == (2, 1, 4)
        one_row, other_row = (
            client.get_instance("demo__project-1", view=View.GRADER) for client in (one, other)
        )
        assert one_row == other_row
    found = pair.audit(pair.other)
    assert (found["findings"], found["affected"]) == ([], [])
    git(pair.mirror(pair.other), "fsck", "--full", "--strict", "--no-dangling")
    assert not list((pair.other.state_dir / "quarantine").iterdir())
    assert not list((pair.one.state_dir / "quarantine").iterdir())


def test_a_bundle_of_what_is_there_adds_no_pack(pair: Pair) -> None:
    """Whatever packs it came in."""
    pair.bundle()
    directory = pair.mirror(pair.one) / "objects/pack"
    packs, refs = set(directory.iterdir()), pair.refs(pair.one)
    with Client(pair.one.socket) as client:
        client.wait(client.import_bundle(pair.file))
    assert set(directory.iterdir()) == packs
    assert pair.refs(pair.one) == refs


def test_what_was_restored_survives_a_restart(pair: Pair) -> None:
    """Pins of datasets are dropped at a start when no dataset records their commits: these are
    recorded.
    """
    pair.bundle()
    pair.take()
    before = pair.refs(pair.other)
    pair.other.kill()
    pair.other.start()
    assert pair.refs(pair.other) == before


@pytest.mark.parametrize("moment", ["import.checking", "import.moving", "import.ended"])
def test_a_kill_in_an_import_leaves_what_the_same_import_finishes(pair: Pair, moment: str) -> None:
    """Killed while objects are checked, while rows are, or at the end: no half mirror, and nothing
    is lost.
    """
    pair.bundle()
    signs: dict[str, Callable[[], bool]] = {
        "import.checking": lambda: any(
            pair.other.state_dir.glob("quarantine/import-*/repository/objects/pack/*")
        ),
        "import.moving": lambda: any(pair.other.state_dir.glob("quarantine/import-*/rows*")),
        "import.ended": pair.mirror(pair.other).exists,
    }
    with Client(pair.other.socket) as client:
        client.import_bundle(pair.file)
        deadline = time.monotonic() + BOUND_S
        while (
            not signs[moment]()
            and not pair.mirror(pair.other).exists()
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
    pair.other.kill()
    pair.other.start()
    assert not list((pair.other.state_dir / "quarantine").iterdir())
    if pair.mirror(pair.other).exists():
        git(pair.mirror(pair.other), "fsck", "--full", "--strict", "--no-dangling")
    pair.take()
    assert pair.refs(pair.other).keys() >= pair.refs(pair.one).keys()
    assert pair.audit(pair.other)["findings"] == []
    with Client(pair.one.socket) as one, Client(pair.other.socket) as other:
        ours = {(pin.mirror, pin.commit, pin.owner, pin.reason) for pin in other.list_pins()}
        assert {(pin.mirror, pin.commit, pin.owner, pin.reason) for pin in one.list_pins()} <= ours


def test_an_import_makes_a_mirror_that_was_registered_and_never_synced(pair: Pair) -> None:
    """As a crash of the first import leaves one: it knows its branch and when its upstream was last
    seen.
    """
    pair.bundle()
    pair.other.json(
        "POST",
        "/v1/mirrors",
        {"repo": NAME, "url": pair.upstream.url.replace("file://", "file:///nonexistent")},
    )
    result = pair.take()
    assert result["created"]
    with Client(pair.one.socket) as one, Client(pair.other.socket) as other:
        shown = other.get_mirror(NAME)
        assert shown.default_branch == "main"
        assert shown.synced_at == one.log_refs(NAME)[0].at


def test_plain_git_reads_a_bundle(pair: Pair) -> None:
    """It verifies it, clones it, and shows the records."""
    pair.bundle()
    git(pair.upstream.path, "bundle", "verify", str(pair.file))
    git(pair.root, "clone", "--quiet", str(pair.file), "clone")
    assert git(pair.root / "clone", "rev-parse", "HEAD") == pair.upstream.git("rev-parse", "main")
    git(pair.root / "clone", "fetch", "--quiet", str(pair.file), f"refs/mirrord/records/{NAME}")
    records = json.loads(git(pair.root / "clone", "show", "FETCH_HEAD:mirror.json"))
    assert records["mirror"] == NAME
    assert {pin["reason"] for pin in records["pins"]} > {"the paper's"}


def test_an_incremental_bundle_holds_what_is_new(pair: Pair) -> None:
    """It is small, needs the first one, and brings the other mirror to the same refs."""
    first = pair.bundle()
    pair.upstream.commit({"large": os.urandom(1000)})
    pair.upstream.git("branch", "feature")
    pair.sync()
    later = pair.root / "later.bundle"
    made = pair.bundle(since=first.record, file=later)
    assert made.record != first.record
    with pytest.raises(InvalidRequestError) as caught:
        pair.take(later)
    assert "builds on" in caught.value.message
    pair.take()
    result = pair.take(later)
    assert result["summary"] == "1 created, 1 forwarded"
    assert pair.refs(pair.other) == pair.refs(pair.one)
    whole = len(git(pair.mirror(pair.one), "rev-list", "--objects", "--all").splitlines())
    assert len(_objects_in(later)) < whole / 2


def _objects_in(file: Path) -> list[str]:
    """The objects of a bundle's pack, without what it builds on."""
    pack = file.read_bytes()[read_header(file).pack_at :]
    return ["object"] * int.from_bytes(pack[8:12], "big")


def test_a_mirror_that_went_on_is_not_moved_back(pair: Pair) -> None:
    """Newer tips stay, tips that differ are kept, pins are added; the same bundle again changes
    nothing.
    """
    pair.bundle()
    ours = Upstream(pair.root / "ours")
    ours.git(
        "fetch",
        "--quiet",
        str(pair.mirror(pair.one)),
        "+refs/heads/*:refs/remotes/o/*",
        "+refs/tags/*:refs/tags/*",
    )
    ours.git("reset", "--quiet", "--hard", "o/main")
    newer = ours.commit({"newer": "1"})
    ours.git("checkout", "--quiet", "--orphan", "feature")
    ours.commit({"feature": "ours"})
    with Client(pair.other.socket) as client:
        client.wait(client.add_mirror("demo/project", ours.url))
    before = pair.refs(pair.other)
    result = pair.take()
    after = pair.refs(pair.other)
    assert (result["created"], result["pins"]) == (False, 4)
    assert after["refs/heads/main"] == newer
    assert after["refs/heads/feature"] == before["refs/heads/feature"]
    pinned = {
        ref
        for ref in pair.refs(pair.one)
        if ref.startswith(("refs/mirrord/pins/", "refs/mirrord/kept/", "refs/tags/"))
    }
    assert pinned <= after.keys()
    again = pair.take()
    assert (again["summary"], pair.refs(pair.other)) == ("no change", after)
    assert pair.audit(pair.other)["findings"] == []


def test_a_tip_that_differs_is_kept_beside(pair: Pair) -> None:
    """Neither side's main is lost."""
    theirs = pair.upstream.git("rev-parse", "main")
    pair.bundle()
    ours = Upstream(pair.root / "ours")
    own = ours.commit({"another": "main"})
    with Client(pair.other.socket) as client:
        client.wait(client.add_mirror("demo/project", ours.url))
    assert theirs in pair.take()["kept"]
    after = pair.refs(pair.other)
    assert after["refs/heads/main"] == own
    assert after[f"refs/mirrord/kept/{theirs}"] == theirs


def test_pins_of_a_dataset_that_differs_go_to_who_imports(pair: Pair, source: Source) -> None:
    """The other dataset of that name stays as it is, and no pin is lost, nor by a restart."""
    pair.bundle()
    other = pair.root / "tiny.jsonl"
    other.write_text(source.dataset.read_text().splitlines()[0] + "\n")
    with Client(pair.other.socket) as client:
        client.wait(client.import_dataset(other))
        result = pair.take()
        assert result["datasets_refused"] == ["tiny"]
        assert len(client.get_dataset("tiny").mirrors) == 1
        assert client.get_dataset("tiny").instance_count == 1
        pair.other.kill()
        pair.other.start()
        pinned = {
            ref.rpartition("/")[2]
            for ref in pair.refs(pair.one)
            if ref.startswith("refs/mirrord/pins/")
        }
        assert pinned <= {pin.commit for pin in client.list_pins()}


# -- bad files -------------------------------------------------------------------------------------


def _truncated(raw: bytes) -> bytes:
    return raw[: len(raw) - 100]


def _flipped(raw: bytes) -> bytes:
    at = len(raw) - 300
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def _beheaded(raw: bytes) -> bytes:
    return raw[100:]


def _half_a_head(raw: bytes) -> bytes:
    return raw[:70]


def _no_pack(raw: bytes) -> bytes:
    return raw[: raw.index(b"\n\n") + 2]


def _another_tip(raw: bytes) -> bytes:
    return raw.replace(b"\n\nPACK", b"\n" + b"1" * 40 + b" refs/heads/evil\n\nPACK")


def _no_text(raw: bytes) -> bytes:
    return os.urandom(len(raw))


def test_a_damaged_bundle_changes_nothing(pair: Pair) -> None:
    """No mirror, no row, no pin, no leftovers; and the error says that the bundle is bad."""
    pair.bundle()
    whole = pair.file.read_bytes()
    for damage in (
        _truncated,
        _flipped,
        _beheaded,
        _half_a_head,
        _no_pack,
        _another_tip,
        _no_text,
        lambda _: b"",
    ):
        pair.file.write_bytes(damage(whole))
        with pytest.raises(InvalidRequestError) as caught:
            pair.take()
        assert caught.value.exit_status == 2
    with Client(pair.other.socket) as client:
        assert (client.list_mirrors(), client.list_pins(), client.list_datasets()) == ([], [], [])
    assert not list((pair.other.state_dir / "mirrors").iterdir())
    assert not list((pair.other.state_dir / "quarantine").iterdir())


def _hand_made(at: Path, refs: dict[str, str], *extra: str) -> Path:
    """A bundle of a repository with whatever refs one likes."""
    file = at / "hand.bundle"
    wanted = "".join(f"{oid}\n" for oid in [*refs.values(), *extra]).encode()
    pack = subprocess.run(
        ["git", "pack-objects", "--revs", "--stdout", "-q"],
        cwd=at,
        input=wanted,
        capture_output=True,
        check=True,
    )
    file.write_bytes(header_bytes([], refs) + pack.stdout)
    return file


def test_a_hostile_bundle_plants_nothing(pair: Pair) -> None:
    """Replace refs, names that climb out, pins that lie, others of our names: all left out; a
    history is taken as it is.
    """
    upstream = pair.upstream
    tip, old = upstream.git("rev-parse", "main"), upstream.git("rev-parse", "main~1")
    refs = {
        "refs/heads/main": tip,
        f"refs/replace/{tip}": old,
        "refs/heads/../../config": tip,
        "refs/mirrord/incoming/x": tip,
        f"refs/mirrord/kept/{old}": tip,
        f"refs/mirrord/pins/person/0/{old}": tip,
        f"refs/mirrord/pins/root/{tip}": tip,
    }
    file = _hand_made(upstream.path, refs)
    pair.take(file, mirror="demo/project")
    assert {ref for ref in pair.refs(pair.other) if ref != "refs/mirrord/history"} == {
        "refs/heads/main"
    }
    blob = upstream.git("hash-object", "-w", "--stdin", stdin=b"x")
    raw = b"100644 .git\0" + bytes.fromhex(blob)
    tree = upstream.git("hash-object", "-t", "tree", "-w", "--stdin", "--literally", stdin=raw)
    evil = upstream.git("commit-tree", "-m", "evil", tree)
    pair.take(_hand_made(upstream.path, {"refs/heads/evil": evil}), mirror="demo/project")
    assert pair.refs(pair.other)["refs/heads/main"] == tip


def test_records_that_lie_change_nothing(pair: Pair) -> None:
    """A row that is none, a dataset with a bad name, a URL that starts a program, a history that is
    none, a later format.
    """
    upstream = pair.upstream
    good = {
        "name": "d",
        "format": "f",
        "source": "s",
        "sha256": "0" * 64,
        "imported_at": "2026-01-01T00:00:00Z",
    }
    lies: list[tuple[dict[str, Any], bytes, str]] = [
        ({"datasets": [good]}, b'{"id": 1}\n', "refs/heads/x"),
        ({"datasets": [good]}, b"not json\n", "refs/heads/x"),
        ({"datasets": [{**good, "name": "../../x"}]}, b"", "refs/heads/x"),
        ({"url": "ext::sh -c evil"}, b"", "refs/heads/x"),
        ({"format": 99}, b"", "refs/heads/x"),
        ({}, b"", "refs/mirrord/history"),
    ]
    for records, rows, ref in lies:
        files = {
            "mirror.json": json.dumps({"mirror": NAME, **records}).encode(),
            "dataset-d.jsonl": rows,
        }
        blobs = {
            name: upstream.git("hash-object", "-w", "--stdin", stdin=content)
            for name, content in files.items()
        }
        tree = upstream.git(
            "mktree",
            stdin="".join(
                f"100644 blob {oid}\t{name}\n" for name, oid in sorted(blobs.items())
            ).encode(),
        )
        commit = upstream.git("commit-tree", "-m", "records", tree)
        refs = {
            "refs/heads/main": upstream.git("rev-parse", "main"),
            f"refs/mirrord/records/{NAME}": commit,
        }
        with pytest.raises(UsageError):
            pair.take(_hand_made(upstream.path, {**refs, ref: refs["refs/heads/main"]}))
    with Client(pair.other.socket) as client:
        assert (client.list_mirrors(), client.list_pins(), client.list_datasets()) == ([], [], [])


def test_a_bundle_of_plain_git_becomes_a_mirror(pair: Pair) -> None:
    """If the request names its mirror; without one, the error has a hint."""
    file = pair.root / "plain.bundle"
    pair.upstream.git("bundle", "create", "--quiet", str(file), "--all", "HEAD")
    with pytest.raises(InvalidRequestError) as caught:
        pair.take(file)
    assert "--mirror" in (caught.value.hint or "")
    assert pair.take(file, mirror="some/thing")["created"]
    with Client(pair.other.socket) as client:
        assert client.get_mirror("some/thing").default_branch == "main"


# -- out -------------------------------------------------------------------------------------------


def test_a_mirror_that_lacks_objects_is_no_bundle(pair: Pair) -> None:
    """The error comes in place of the file."""
    with Client(pair.one.socket) as client:
        with pytest.raises(NotFoundError):
            client.create_bundle(NAME, pair.file, since="2000-01-01")
        assert not pair.file.exists()
        client.wait(client.add_mirror("broken/project", pair.upstream.url))
        mirror = pair.one.state_dir / "mirrors/broken__project"
        blob = git(mirror, "rev-parse", "main:README")
        git(mirror, "unpack-objects", "-q", stdin=_pack_of(mirror))
        (mirror / "objects" / blob[:2] / blob[2:]).unlink()
        with pytest.raises(MirrordError, match="cannot bundle mirror") as caught:
            client.create_bundle("broken/project", pair.file)
        assert not isinstance(caught.value, NoDaemonError)
    assert not [path for path in pair.root.iterdir() if "bundle" in path.name]


def _pack_of(mirror: Path) -> bytes:
    """The only pack of a mirror, taken out of it."""
    for file in sorted((mirror / "objects/pack").iterdir()):
        content = file.read_bytes()
        file.unlink()
        if file.suffix == ".pack":
            found = content
    return found


def test_the_command_line_makes_and_takes_bundles(pair: Pair) -> None:
    """With facts for a reader and JSON for a program; a bad file ends with two."""

    def call(at: Daemon, *words: str | Path) -> tuple[int, str, str]:
        out, err = (
            io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
        )
        with redirect_stdout(out), redirect_stderr(err):
            status = run(["--socket", str(at.socket), *map(str, words)])
        return status, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()

    status, out, _ = call(pair.one, "bundle", "create", "demo/project", pair.file, "--json")
    assert (status, json.loads(out)["mirror"]) == (0, NAME)
    status, out, _ = call(
        pair.one, "bundle", "create", "demo/project", pair.root / "next", "--since", "latest"
    )
    assert status == 0
    assert "since" in out
    status, out, err = call(pair.other, "bundle", "import", pair.file)
    assert (status, err) == (0, "")
    assert f"created mirror {NAME}" in out
    pair.file.write_bytes(b"nothing")
    status, out, err = call(pair.other, "bundle", "import", pair.file)
    assert (status, out) == (2, "")
    assert "cannot read the bundle" in err


def test_progress_tells_of_the_bytes(pair: Pair) -> None:
    seen: list[Progress] = []
    with Client(pair.one.socket) as client:
        made = client.create_bundle(NAME, pair.file, progress=seen.append)
    assert seen[-1].done == made.size_bytes
