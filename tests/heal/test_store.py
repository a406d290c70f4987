"""The object store of a fleet as a donor of heals: after other mirrors, before any upstream."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import s3
from gitrepos import git
from heal_parts import Furnished, House, refs_of, truncate

from mirrord.catalog import Generation
from mirrord.config import StoreSettings
from mirrord.errors import DiskFullError
from mirrord.fleet.exchange import Exchange
from mirrord.fleet.generations import (
    index_key,
    manifest_key,
    pack_key,
    read_generation,
    read_manifest,
)
from mirrord.fleet.objects import ObjectStore
from mirrord.model import CommitState
from mirrord.protocol import Audit

pytestmark = pytest.mark.slow

SOUND: tuple[dict[CommitState, int], list[object]] = ({CommitState.OK: 3}, [])
HOLES = ["main~1", "main~1:docs", "main~1^{tree}", "main:docs/page1.txt", "main"]


class Published:
    """A store with two generations of the furnished mirror: the second adds a pack."""

    def __init__(self, url: str, furnished: Furnished) -> None:
        self.url, self.store, self.furnished = url, ObjectStore(url), furnished
        furnished.live(self._publish)

    async def _publish(self, house: House) -> None:
        self.use(house)
        repository = house.mirrors.repository(house.name)
        refs, head = await repository.all_refs(), await repository.head()
        exchange = Exchange(self.store, house.mirrors.quarantine)
        older = {"refs/heads/main": git(house.mirror, "rev-parse", "main~1")}

        async def accept(_: Generation) -> bool:
            return True

        self.newest = None
        for published, at in ((older, "refs/heads/main"), (refs, head)):
            self.newest = await exchange.publish(
                repository, published, at, url=house.upstream.url, epoch=1,
                previous=self.newest, accept=accept,
            )  # fmt: skip

    @property
    def packs(self) -> list[str]:
        """The keys of the packs, the older first."""
        name = self.furnished.house.name
        assert self.newest
        return [pack_key(name, it) for it in read_manifest(self.store, name, self.newest).packs]

    @property
    def indexes(self) -> list[str]:
        name = self.furnished.house.name
        assert self.newest
        return [index_key(name, it) for it in read_manifest(self.store, name, self.newest).packs]

    def use(self, house: House) -> None:
        """Have the daemon use the store, until the mirror is restored for the next test."""
        house.settings = house.settings.model_copy(update={"store": StoreSettings(url=self.url)})


@pytest.fixture(params=["directory", "s3"])
def published(
    request: pytest.FixtureRequest,
    furnished: Furnished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Published:
    if request.param == "directory":
        return Published(f"file://{tmp_path}/store", furnished)
    server = s3.shared()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return Published(server.create(), furnished)


only_directory = pytest.mark.parametrize("published", ["directory"], indirect=True)


def file_of(published: Published, key: str) -> Path:
    return Path(published.url.removeprefix("file://")) / key


def lose_packs(house: House) -> None:
    for file in (house.mirror / "objects/pack").iterdir():
        file.unlink()


def from_store(audit: Audit) -> int:
    return audit.repairs[0].objects.get("the store", 0)


def must_be_whole(house: House, furnished: Furnished) -> None:
    git(house.mirror, "fsck", "--full")
    assert refs_of(house.mirror) == furnished.refs


def test_holes_are_filled_while_upstream_is_away(
    furnished: Furnished, published: Published
) -> None:
    async def body(house: House) -> None:
        furnished.lose(*HOLES)
        with house.without_upstream():
            published.use(house)
            healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert from_store(healed) == len(HOLES)
        must_be_whole(house, furnished)

    furnished.live(body)


def test_upstream_is_not_asked_for_what_the_store_has(
    furnished: Furnished, published: Published
) -> None:
    """A whole mirror's objects, with the ref history and the kept tips, which upstream lacks."""

    async def body(house: House) -> None:
        lose_packs(house)
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert [*healed.repairs[0].objects] == ["the store"]
        assert healed.repairs[0].history == ""
        must_be_whole(house, furnished)

    furnished.live(body)


def test_a_mirror_that_is_gone_comes_from_the_store(
    furnished: Furnished, published: Published
) -> None:
    """With the ref history and kept tips, and without upstream."""

    async def body(house: House) -> None:
        shutil.rmtree(house.mirror)
        await house.catalog.update_mirror(house.name.key, synced_at=None)
        with house.without_upstream():
            published.use(house)
            healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert read_generation(house.mirror) == published.newest
        must_be_whole(house, furnished)
        row = await house.mirrors.describe(house.name)
        assert (row.state, row.error) == ("ready", None)

    furnished.live(body)


@only_directory
def test_a_gone_mirror_whose_generation_is_damaged_comes_from_upstream(
    furnished: Furnished, published: Published
) -> None:
    async def body(house: House) -> None:
        shutil.rmtree(house.mirror)
        truncate(file_of(published, published.packs[1]))
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert read_generation(house.mirror) is None
        git(house.mirror, "fsck", "--full")

    furnished.live(body)


@only_directory
def test_packs_without_what_is_missing_are_not_downloaded(
    furnished: Furnished, published: Published
) -> None:
    """The older pack is damaged, which no audit has found."""

    async def body(house: House) -> None:
        truncate(file_of(published, published.packs[0]))
        furnished.lose("main:after", "v1")
        with house.without_upstream():
            published.use(house)
            healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert (from_store(healed), healed.repairs[0].refusals) == (2, {})
        assert published.newest
        file_of(published, manifest_key(house.name, published.newest)).unlink()
        furnished.lose("main:after", "v1")
        healed = await house.heal()  # the older generation has neither
        assert (healed.counts, healed.findings) == SOUND
        assert (from_store(healed), healed.repairs[0].refusals) == (0, {})

    furnished.live(body)


@only_directory
@pytest.mark.parametrize("damage", ["pack", "index", "gone"])
def test_what_is_damaged_in_the_store_is_refused_and_upstream_heals(
    furnished: Furnished, published: Published, damage: str
) -> None:
    async def body(house: House) -> None:
        keys = published.indexes if damage == "index" else published.packs
        for file in (file_of(published, key) for key in keys):
            file.unlink() if damage == "gone" else truncate(file)
        furnished.lose(*HOLES)
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert "of the store" in healed.repairs[0].refusals["the store"]
        assert from_store(healed) == 0
        must_be_whole(house, furnished)

    furnished.live(body)


@only_directory
def test_a_damaged_pack_does_not_stop_the_others(
    furnished: Furnished, published: Published
) -> None:
    """All packs are lost and upstream is away: the store gives what it has, upstream the others later."""

    async def body(house: House) -> None:
        older = furnished.object("main~1")
        lose_packs(house)
        truncate(file_of(published, published.packs[1]))
        with house.without_upstream():
            published.use(house)
            damaged = await house.heal()
        assert damaged.repairs[0].unhealed_count
        assert from_store(damaged) > 5
        assert git(house.mirror, "rev-list", "--objects", older)
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND

    furnished.live(body)


@only_directory
def test_a_store_that_fails_is_asked_once_in_a_heal(
    furnished: Furnished, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be reached, or a disk that is full: upstream heals by id."""

    async def body(house: House) -> None:
        asked: list[str] = []

        def refuse(_: ObjectStore, key: str, *_args: object, **_options: object) -> None:
            asked.append(key)
            raise DiskFullError("cannot write quarantine: no space left on device")

        monkeypatch.setattr(ObjectStore, "download", refuse)
        furnished.lose(*HOLES)
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert "no space" in healed.repairs[0].refusals["the store"]
        assert len(asked) == 1
        furnished.lose("v1")
        house.settings = house.settings.model_copy(
            update={"store": StoreSettings(url="s3://bucket/prefix")}
        )
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        healed = await house.heal()
        assert healed.findings == []
        assert "store" in healed.repairs[0].refusals["the store"]

    furnished.live(body)


@only_directory
def test_without_the_extra_the_store_is_refused(
    furnished: Furnished, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mirrord.fleet.restore", None)

    async def body(house: House) -> None:
        furnished.lose("v1")
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert "obstore" in healed.repairs[0].refusals["the store"]

    furnished.live(body)
