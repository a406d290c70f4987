"""A catalog lost, damaged or older than the mirrors, with a whole daemon: nothing else is lost."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from typed import typed
from waiting import BOUND_S

pytestmark = pytest.mark.slow


class World:
    """Two datasets of two commits and a person's pin; the catalog was copied before the second."""

    def __init__(self, running: Daemon, commits: list[str]) -> None:
        self.daemon = running
        self.commits = commits
        self.catalog = running.state_dir / "catalog.sqlite3"
        self.older = running.root / "older.sqlite3"

    def furnish(self) -> None:
        self.bring("first", self.commits[0:2])
        paper = {"mirror": "owner/name", "commit": self.commits[4], "reason": "paper"}
        assert self.daemon.request("POST", "/v1/pins", paper)[0] == 201
        self.daemon.stop()
        shutil.copy(self.catalog, self.older)
        self.daemon.start()
        self.bring("second", self.commits[2:4])
        self.daemon.stop()

    def bring(self, name: str, commits: list[str]) -> None:
        rows = [
            {
                "instance_id": oid[:9],
                "repo": "owner/name",
                "base_commit": oid,
                "patch": "",
                "test_patch": "",
            }
            for oid in commits
        ]
        body = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        answer = self.daemon.json("POST", f"/v1/datasets?name={name}&filename={name}.jsonl", body)
        while answer["state"] == "running":
            time.sleep(0.02)
            answer = self.daemon.json("GET", f"/v1/operations/{answer['id']}")
        assert answer["state"] == "done"

    def remove_catalog(self) -> None:
        for file in self.catalog.parent.glob("catalog.sqlite3*"):
            file.unlink()

    def call(self, *words: str) -> tuple[int, Any]:
        """The command line, answering in JSON."""
        done = typed("--config", self.daemon.config, "--json", *words)
        return done.returncode, json.loads(done.stdout or "null")

    def doctor(self) -> dict[str, str]:
        return next(check for check in self.call("doctor")[1] if check["name"] == "catalog")

    def pins(self) -> set[str]:
        """The pins, read from refs."""
        refs = git(self.mirror, "for-each-ref", "--format=%(refname)", "refs/mirrord/pins")
        return {ref.removeprefix("refs/mirrord/pins/") for ref in refs.splitlines()}

    @property
    def mirror(self) -> Path:
        return self.daemon.state_dir / "mirrors/owner__name"


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    upstream = Upstream(tmp_path_factory.mktemp("upstreams") / "owner+name")
    url = f"file://{upstream.path.parent}/{{owner}}+{{name}}"
    with daemon(f'[upstream]\nurl = "{url}"\n[audit]\nheal = false\n') as running:
        made = World(running, upstream.history(5))
        made.furnish()
        running.state_dir.rename(running.root / "furnished")
        yield made


@pytest.fixture
def world(furnished: World) -> Iterator[World]:
    """A stopped daemon with the furnished state."""
    running = furnished.daemon
    shutil.copytree(running.root / "furnished", running.state_dir, symlinks=True)
    running.log_path.unlink(missing_ok=True)
    yield furnished
    if running.process is not None:
        running.stop()
    shutil.rmtree(running.state_dir)


@pytest.mark.parametrize(
    ("loss", "unknown"), [("deleted", ["first", "second"]), ("older", ["second"])]
)
def test_what_the_mirrors_pin_and_the_catalog_lacks_is_told_until_it_is_imported(
    world: World, loss: str, unknown: list[str]
) -> None:
    """The doctor (before and after the start), the log and health report it; no pin is removed."""
    before = world.pins()
    world.remove_catalog()
    if loss == "older":
        shutil.copy(world.older, world.catalog)
    told = world.doctor()
    assert told["verdict"] == ("fail" if loss == "deleted" else "warn")
    assert all(f"mirrord dataset import FILE --name {name}" in told["remedy"] for name in unknown)

    world.daemon.start()
    assert any(
        line["event"] == "datasets.unknown" and line["datasets"] == unknown
        for line in world.daemon.log_lines
    )
    assert world.doctor()["verdict"] == "warn"
    assert f"import again: {', '.join(unknown)}" in str(
        world.daemon.json("GET", "/v1/health")["reasons"]
    )
    assert world.pins() == before

    world.bring("first", world.commits[0:2])
    world.bring("second", world.commits[2:4])
    assert world.doctor()["verdict"] == "ok"
    assert "import again" not in str(world.daemon.json("GET", "/v1/health")["reasons"])
    assert world.pins() == before
    status, audit = world.call("audit", "--level", "content")
    assert (status, audit["counts"], audit["findings"]) == (0, {"ok": 4}, [])


def test_an_audit_looks_at_what_only_pins_still_tell(world: World) -> None:
    """A missing object of a pinned commit is reported although no dataset records the commit."""
    world.remove_catalog()
    world.daemon.start()
    git(world.mirror, "unpack-objects", "-q", stdin=_taken_apart(world.mirror))
    tree = git(world.mirror, "rev-parse", f"{world.commits[3]}^{{tree}}")
    (world.mirror / f"objects/{tree[:2]}/{tree[2:]}").unlink()
    _, audit = world.call("audit", "--no-heal")
    assert world.commits[3] in {finding["commit"] for finding in audit["findings"]}


def test_a_truncated_catalog_is_refused_and_made_again(world: World) -> None:
    """The daemon gives the remedy and changes nothing. After that the case is a deleted catalog."""
    before = world.pins()
    world.remove_catalog()
    world.catalog.write_bytes(world.older.read_bytes()[:20_000])
    told = world.doctor()
    assert (told["verdict"], "damaged" in told["fact"], "move" in told["remedy"]) == (
        "fail",
        True,
        True,
    )
    world.daemon.start(wait=False)
    assert world.daemon.process is not None
    assert world.daemon.process.wait(BOUND_S) == 8
    assert "move the file away" in world.daemon.log
    assert (world.catalog.stat().st_size, world.pins()) == (20_000, before)
    world.remove_catalog()
    world.daemon.start()
    assert world.pins() == before


def _taken_apart(mirror: Path) -> bytes:
    """Move the packs out of a mirror. Return one that has all objects."""
    git(mirror, "repack", "-adq")
    (pack,) = (mirror / "objects/pack").glob("*.pack")
    content = pack.read_bytes()
    for file in (mirror / "objects/pack").iterdir():
        file.unlink()
    return content
