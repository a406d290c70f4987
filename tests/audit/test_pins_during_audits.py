"""Datasets and pins that come and go while an audit or a heal is at work: nobody's pin comes back,
nobody's is lost.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from gitrepos import Upstream, git
from heal_parts import House, refs_of

from mirrord.audit.report import MirrorJudgement
from mirrord.audit.service import Audits, Repairer, Scrubber
from mirrord.datasets.service import DatasetFile, Datasets
from mirrord.model import AuditLevel, CommitId, MirrorName
from mirrord.protocol import Audit, ProgressSink, Repair, StartAudit

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OTHER = MirrorName("owner", "other")
PERSON = "person/7"
EVERYTHING = StartAudit(heal=True, level=AuditLevel.CONTENT)
WHEN = pytest.mark.parametrize("when", ["before", "during"])


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    upstream = Upstream(tmp_path / "name")
    upstream.history(5)
    house = House(tmp_path, upstream)
    await house.open()
    await house.furnish()
    yield house
    await house.close()


@pytest.fixture
def datasets(house: House) -> Datasets:
    return Datasets(house.mirrors)


def auditing(house: House, repair: Repairer, scrub: Scrubber | None = None) -> Audits:
    return Audits(house.mirrors, repair, scrub)


def lose_a_blob(house: House) -> None:
    """One that only upstream has then, and that every recorded commit needs."""
    lost = git(house.mirror, "rev-parse", "main:docs/page0.txt")
    packs = list((house.mirror / "objects/pack").glob("pack-*"))
    streams = [pack.read_bytes() for pack in packs if pack.suffix == ".pack"]
    for file in packs:
        file.unlink()
    for stream in streams:
        git(house.mirror, "unpack-objects", "-q", stdin=stream)
    (house.mirror / "objects" / lost[:2] / lost[2:]).unlink()


async def heal_while(
    house: House, change: Callable[[], Coroutine[Any, Any, object]], when: str
) -> Audit:
    """Heal a lost blob; `change` happens before the heal begins, or is asked for while it has the
    mirror.
    """
    lose_a_blob(house)

    async with anyio.create_task_group() as tasks:

        async def change_during_heal(name: MirrorName) -> None:
            while not house.mirrors.is_busy(name):
                await anyio.sleep(0.001)
            await change()

        async def repair(judged: MirrorJudgement, progress: ProgressSink | None) -> Repair:
            if when == "before":
                await change()
            else:
                tasks.start_soon(change_during_heal, judged.name)
            return await house.heals.repair(judged, progress)

        return await auditing(house, repair).run(EVERYTHING)
    raise AssertionError  # a task group may swallow, says its type


def pins_of(house: House, owner: str) -> set[str]:
    prefix = f"refs/mirrord/pins/{owner}/"
    return {ref.removeprefix(prefix) for ref in refs_of(house.mirror) if ref.startswith(prefix)}


async def said_of(house: House, owner: str) -> set[str]:
    return {pin.commit for pin in await house.catalog.list_pins(owner=owner)}


@WHEN
async def test_a_dataset_removed_during_a_heal_has_no_pin_after_it(
    house: House, datasets: Datasets, when: str
) -> None:
    """Its mirror can be removed then, and nothing says that the catalog was lost."""
    audit = await heal_while(house, lambda: datasets.remove("lite"), when)
    assert audit.repairs, "nothing was healed"
    assert audit.findings == []
    assert (pins_of(house, "dataset/lite"), await said_of(house, "dataset/lite")) == (set(), set())
    await datasets.open()
    assert datasets.warnings() == []
    first = CommitId(house.upstream.git("rev-list", "--max-parents=0", "HEAD"))
    await house.mirrors.unpin(house.name, [first], owner=PERSON)
    await house.mirrors.remove(house.name)


@WHEN
async def test_a_dataset_imported_again_during_a_heal_has_exactly_its_pins(
    house: House, datasets: Datasets, when: str
) -> None:
    tip = house.upstream.git("rev-parse", "HEAD")
    rows = house.root / "lite.jsonl"
    row = {
        "instance_id": "owner__name-0",
        "repo": "owner/name",
        "base_commit": tip,
        "patch": "",
        "test_patch": "",
    }
    rows.write_text(json.dumps(row))

    async def shrink() -> None:
        await datasets.import_file(DatasetFile(rows, "lite.jsonl", "lite"))

    await heal_while(house, shrink, when)
    assert (pins_of(house, "dataset/lite"), await said_of(house, "dataset/lite")) == ({tip}, {tip})


@WHEN
async def test_a_pin_removed_by_a_person_during_a_heal_stays_removed(
    house: House, when: str
) -> None:
    first = CommitId(house.upstream.git("rev-list", "--max-parents=0", "HEAD"))
    await heal_while(house, lambda: house.mirrors.unpin(house.name, [first], owner=PERSON), when)
    assert (pins_of(house, PERSON), await said_of(house, PERSON)) == (set(), set())
    assert len(pins_of(house, "dataset/lite")) == 3


async def test_an_audit_asks_what_is_recorded_when_it_comes_to_a_mirror(
    house: House, datasets: Datasets
) -> None:
    """A dataset that was removed since the audit began affects no instance, and no pin of it is
    made again.
    """
    upstream = Upstream(house.root / "other")
    await house.mirrors.add(OTHER.repo)
    rows = house.root / "more.jsonl"
    base = upstream.history(1)[0]
    row = {
        "instance_id": "other-1",
        "repo": OTHER.repo,
        "base_commit": base,
        "patch": "",
        "test_patch": "",
    }
    rows.write_text(json.dumps(row))
    await datasets.import_file(DatasetFile(rows, "more.jsonl", "more"))

    async def remove_once(_: MirrorName) -> Mapping[str, str]:
        if await house.catalog.find_dataset("more"):
            await datasets.remove("more")
        return {}

    audit = await auditing(house, house.heals.repair, remove_once).run(EVERYTHING)
    assert (audit.mirrors, audit.findings, audit.repairs) == (
        ["owner__name", "owner__other"],
        [],
        [],
    )
    assert refs_of(house.mirrors.path(OTHER)).keys() & {"refs/heads/main"}
    assert not [
        ref for ref in refs_of(house.mirrors.path(OTHER)) if ref.startswith("refs/mirrord/pins/")
    ]


async def test_a_mirror_that_was_removed_during_an_audit_is_not_added_again(
    house: House, datasets: Datasets
) -> None:
    """Nothing records it any more by the time that the heal would bring it back."""
    upstream = Upstream(house.root / "other")
    upstream.history(1)
    await house.mirrors.add(OTHER.repo)
    await house.mirrors.sync(OTHER)
    git(house.mirrors.path(OTHER), "update-ref", "-d", "refs/mirrord/history")

    async def remove_first(judged: MirrorJudgement, progress: ProgressSink | None) -> Repair:
        await house.mirrors.remove(OTHER)
        return await house.heals.repair(judged, progress)

    request = StartAudit(mirrors=[str(OTHER)], heal=True, level=AuditLevel.CONTENT)
    audit = await auditing(house, remove_first).run(request)
    assert await house.catalog.find_mirror(OTHER.key) is None
    assert (audit.findings, house.mirrors.path(OTHER).exists()) == ([], False)


async def test_a_pin_made_again_without_a_reason_keeps_the_one_it_has(house: House) -> None:
    first = CommitId(house.upstream.git("rev-list", "--max-parents=0", "HEAD"))
    before = await house.catalog.list_pins(owner=PERSON)
    await house.mirrors.pin(house.name, [first], owner=PERSON, reason="")
    assert await house.catalog.list_pins(owner=PERSON) == before
    await house.mirrors.pin(house.name, [first], owner=PERSON, reason="another paper")
    assert [pin.reason for pin in await house.catalog.list_pins(owner=PERSON)] == ["another paper"]


async def test_a_pin_that_a_person_removes_during_an_audit_is_no_finding(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit read the catalog before, and the refs after."""
    first = CommitId(house.upstream.git("rev-list", "--max-parents=0", "HEAD"))
    workers = house.mirrors.workers
    run = workers.run

    async def run_later(*args: Any, **options: Any) -> Any:
        await house.mirrors.unpin(house.name, [first], owner=PERSON)
        monkeypatch.undo()
        return await run(*args, **options)

    monkeypatch.setattr(workers, "run", run_later)
    audit = await auditing(house, house.heals.repair).run(StartAudit(heal=False))
    assert audit.findings == []
    assert await said_of(house, PERSON) == set()
