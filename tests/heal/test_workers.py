"""What a worker keeps open of a mirror is what is on disk: whoever replaces or removes packs, the next call reads them."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gitrepos import git
from heal_parts import Furnished, House, flip, write
from worker_calls import LONG, unreadable

from mirrord.mirrors.quarantine import accept_objects

pytestmark = pytest.mark.slow


def objects_of(mirror: Path) -> dict[str, str]:
    listing = git(
        mirror, "cat-file", "--batch-all-objects", "--batch-check=%(objectname) %(objecttype)"
    )
    return dict(line.split() for line in listing.splitlines())


async def heal(house: House, _: Furnished) -> None:
    audit = await house.heal()
    assert (audit.findings, audit.affected) == ([], [])


async def put_index_back(_: House, it: Furnished) -> None:
    """What an operator does with a backup."""
    pristine = it.pristine / "objects/pack"
    for index in pristine.glob("*.idx"):
        write(it.mirror / "objects/pack" / index.name, index.read_bytes())


async def repack(house: House, it: Furnished) -> None:
    """git, and with it the round that packs a mirror, replaces all packs."""
    await put_index_back(house, it)
    git(it.mirror, "repack", "-adq")
    (it.mirror / "mirrord-repacked").unlink(missing_ok=True)
    await house.mirrors.maintain(house.name)


async def take_in(_: House, it: Furnished) -> None:
    """As a bundle and a generation are imported: packs are moved in, those of that name went before."""
    for file in (it.mirror / "objects/pack").iterdir():
        file.unlink()
    shutil.copytree(it.pristine / "objects", it.root / "incoming")
    accept_objects(it.root / "incoming", it.mirror / "objects")
    shutil.rmtree(it.root / "incoming")


async def add_again(_: House, it: Furnished) -> None:
    """Another directory in its place, maybe with the same inode."""
    it.restore_files()


@pytest.mark.parametrize("change", [heal, put_index_back, repack, take_in, add_again])
def test_a_worker_reads_what_replaced_a_damaged_index(
    furnished: Furnished, change: Callable[[House, Furnished], Awaitable[None]]
) -> None:
    async def body(house: House) -> None:
        wanted = objects_of(furnished.mirror)
        index = furnished.pack().with_suffix(".idx")
        (index.parent / "multi-pack-index").unlink()  # which would be read in its place
        flip(index, 0.5)
        assert await house.workers.run(unreadable, furnished.mirror, wanted, timeout=LONG)
        await change(house, furnished)
        assert not await house.workers.run(unreadable, furnished.mirror, wanted, timeout=LONG)

    furnished.live(body)
