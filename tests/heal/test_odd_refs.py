"""What git believes without looking: the peeled values of packed-refs, and the empty tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from daemons import daemon
from gitrepos import Upstream, git

from mirrord import Client
from mirrord.model import AuditLevel
from mirrord.protocol import Audit

pytestmark = pytest.mark.slow


class Place(NamedTuple):
    client: Client
    mirror: Path
    upstream: Upstream

    def audit(self, *, heal: bool) -> Audit:
        started = self.client.start_audit("o/r", level=AuditLevel.CONTENT, heal=heal)
        ended = self.client.wait(started)
        assert ended.result is not None
        return self.client.get_audit(ended.result["id"])

    @property
    def packed(self) -> Path:
        return self.mirror / "packed-refs"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    upstream = Upstream(tmp_path / "o__r")
    upstream.git("commit", "--quiet", "--allow-empty", "-m", "of the empty tree")
    upstream.commit({"a": "1\n"})
    upstream.git("tag", "-a", "v1", "-m", "one")
    upstream.git("tag", "-a", "v2", "-m", "of a tag", "v1")
    upstream.git("tag", "-a", "tree", "-m", "of a tree", "HEAD^{tree}")
    upstream.git("tag", "light")
    config = f'[upstream]\nurl = "file://{tmp_path}/{{owner}}__{{name}}"\n'
    with daemon(config) as running, Client(str(running.socket)) as client:
        client.wait(client.add_mirror("o/r"))
        mirror = running.state_dir / "mirrors/o__r"
        git(mirror, "pack-refs", "--all")
        yield Place(client, mirror, upstream)


def of_another_commit(text: str, other: str) -> str:
    return re.sub(r"\^[0-9a-f]{40}", f"^{other}", text, count=1)


def of_no_tag(text: str, _: str) -> str:
    """git takes it for a ref to a commit then, because the header says that all tags are peeled."""
    return re.sub(r"\^[0-9a-f]{40}\n", "", text, count=1)


def of_a_commit(text: str, other: str) -> str:
    return re.sub(r"(refs/heads/main\n)", rf"\1^{other}\n", text)


@pytest.mark.parametrize("damage", [of_another_commit, of_no_tag, of_a_commit])
def test_wrong_peeled_values_are_found_and_healed(
    place: Place, damage: Callable[[str, str], str]
) -> None:
    shown = git(place.upstream.path, "show-ref", "--tags", "-d")
    assert not place.audit(heal=False).findings
    other = git(place.mirror, "rev-parse", "main^")
    text = place.packed.read_text()
    place.packed.write_text(damage(text, other))
    assert place.packed.read_text() != text
    (finding,) = place.audit(heal=False).findings
    assert finding.subject == "packed-refs"
    assert "leads to" in finding.detail
    healed = place.audit(heal=True)
    assert healed.repairs[0].files == ["packed-refs"]
    assert not healed.findings
    assert git(place.mirror, "show-ref", "--tags", "-d") == shown


def test_the_empty_tree_survives_a_heal(place: Place) -> None:
    """git reads it without having it, and its fsck misses it."""
    git(place.mirror, "repack", "-adq")
    (pack,) = (place.mirror / "objects/pack").glob("*.pack")
    pack.chmod(0o600)
    content = bytearray(pack.read_bytes())
    content[-30] ^= 0xFF
    pack.write_bytes(content)
    for loose in (place.mirror / "objects/4b").glob("*"):
        loose.unlink()
    healed = place.audit(heal=True)
    assert healed.repairs
    assert not healed.findings
    git(place.mirror, "fsck", "--full", "--strict")
