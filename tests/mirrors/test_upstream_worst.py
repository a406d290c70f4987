"""Upstream does its worst, and after each of it every recorded commit is still served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import misfortunes
import pytest
from forge import Forge, serving
from gitrepos import Upstream, git
from mirror_parts import NAME, Builder, House
from misfortunes import BRANCHES, Misfortune, furnish

from mirrord.errors import (
    MirrordError,
    UpstreamAuthError,
    UpstreamEmptyError,
    UpstreamLossError,
    UpstreamNotFoundError,
)
from mirrord.mirrors.refs import Offer
from mirrord.mirrors.sync import must_not_vanish
from mirrord.model import CommitId
from mirrord.protocol import RefFault, RefRecord, Synced

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    made = Upstream(tmp_path_factory.mktemp("furnished") / "owner+name")
    furnish(made)
    return made


@pytest.fixture
def upstream(furnished: Upstream, tmp_path: Path) -> Upstream:
    return furnished.copy(tmp_path / "upstreams/owner+name")


@pytest.fixture
def forge(upstream: Upstream) -> Iterator[Forge]:
    with serving(upstream.path.parent) as made:
        yield made


class Story:
    """One mirror whose tips are all recorded, what happens to its upstream, and what has to stand
    afterwards.
    """

    def __init__(self, it: House, upstream: Upstream, forge: Forge) -> None:
        self.it, self.upstream, self.forge = it, upstream, forge
        self.commits: list[CommitId] = []

    async def begin(self) -> None:
        await self.it.mirrors.add("owner/name", f"{self.forge.url}/owner+name/.git")
        await self.it.mirrors.sync(NAME)
        lines = self.upstream.git(
            "for-each-ref", "--format=%(objectname)%(*objectname)", "refs/heads"
        ).splitlines()
        self.commits = sorted({CommitId(line[:40]) for line in lines})
        assert await self.it.mirrors.pin(NAME, self.commits, owner="dataset/d", reason="test") == {}

    async def sync(self, *, accept_loss: bool = False) -> Synced | MirrordError:
        try:
            return await self.it.mirrors.sync(NAME, accept_loss=accept_loss)
        except MirrordError as error:
            return error

    async def end(self) -> None:
        """Serve on: every commit resolves, its closure is whole, also after maintenance."""
        await self.it.mirrors.maintain(NAME)
        path = self.it.mirrors.path(NAME)
        for commit in self.commits:
            assert (await self.it.mirrors.resolve(NAME, commit))[0] == commit
        git(path, "-c", "core.commitGraph=false", "rev-list", "--objects", "--quiet", *self.commits)
        git(path, "fsck", "--full", "--strict", "--no-dangling")
        assert {pin.commit for pin in await self.it.mirrors.list_pins(NAME)} == set(self.commits)


@pytest.mark.parametrize(
    "misfortune",
    [
        misfortunes.force_push,
        misfortunes.delete_some,
        misfortunes.rename_to_directory,
        misfortunes.redirect,
        misfortunes.another_project,
        misfortunes.break_objects,
    ],
)
def test_what_a_mirror_follows_loses_nothing(
    house: Builder, upstream: Upstream, forge: Forge, misfortune: Misfortune
) -> None:
    """Upstream did what upstreams do: the mirror goes along, and keeps."""

    async def body(it: House) -> None:
        story = Story(it, upstream, forge)
        await story.begin()
        misfortune(upstream, forge)
        result = await story.sync()
        assert isinstance(result, Synced), result
        if misfortune is misfortunes.redirect:
            assert result.redirected_to == f"{forge.url}/owner+name-new/.git"
            assert it.events.counts["mirror.redirected"] == 1
        if misfortune is misfortunes.break_objects:
            assert [fault.ref for fault in result.faults] == ["refs/heads/bad"]
        await story.end()

    house.run(body)


REFUSED = [
    (misfortunes.delete_repository, UpstreamNotFoundError),
    (misfortunes.make_private, UpstreamAuthError),
    (misfortunes.empty, UpstreamEmptyError),
    (misfortunes.most_refs_vanish, UpstreamLossError),
    (misfortunes.all_branches_vanish, UpstreamLossError),
]


@pytest.mark.parametrize(("misfortune", "error"), REFUSED, ids=lambda it: it.__name__)
def test_what_a_mirror_does_not_follow_changes_nothing(
    house: Builder,
    upstream: Upstream,
    forge: Forge,
    misfortune: Misfortune,
    error: type[MirrordError],
) -> None:
    """The refs stay; the row has the problem and what to do; and asking again says it again."""

    async def body(it: House) -> None:
        story = Story(it, upstream, forge)
        await story.begin()
        before = await it.mirrors.refs_log(NAME)
        misfortune(upstream, forge)
        for _ in range(2):
            assert type(await story.sync()) is error
        shown = await it.mirrors.describe(NAME)
        assert (shown.state, shown.error.code if shown.error else None) == ("failed", error.code)
        assert await it.mirrors.refs_log(NAME) == before
        await story.end()

    house.run(body)


def test_the_last_branch_is_guarded_however_few_refs_there_are() -> None:
    """One ref of four is not most of them; but nobody would have a `main`. A branch that is only
    damaged is not gone.
    """
    tags = {f"refs/tags/v{n}": f"{n}" * 40 for n in range(3)}
    before = {"refs/heads/main": "a" * 40, **tags}
    with pytest.raises(UpstreamLossError, match="no branch any more"):
        must_not_vanish(NAME, before, Offer(tags, None, []))
    must_not_vanish(NAME, before, Offer({"refs/heads/trunk": "b" * 40, **tags}, None, []))
    must_not_vanish(
        NAME,
        before,
        Offer(tags, None, [RefFault(ref="refs/heads/main", commit="b" * 40, reason="damaged")]),
    )
    must_not_vanish(NAME, tags, Offer({}, None, []))


@pytest.mark.parametrize(
    "misfortune", [misfortunes.empty, misfortunes.most_refs_vanish, misfortunes.all_branches_vanish]
)
def test_an_accepted_loss_is_followed_and_kept(
    house: Builder, upstream: Upstream, forge: Forge, misfortune: Misfortune
) -> None:
    """Once a person said so: the refs are upstream's, all that it left is kept, the record says
    that it was accepted.
    """

    async def body(it: House) -> None:
        story = Story(it, upstream, forge)
        await story.begin()
        misfortune(upstream, forge)
        refused = await story.sync()
        assert isinstance(refused, MirrordError)
        assert "--accept-loss" in (refused.hint or "")
        result = await story.sync(accept_loss=True)
        assert isinstance(result, Synced), result
        shown = await it.mirrors.describe(NAME)
        assert shown.state == "ready"
        assert (shown.kept_count or 0) >= BRANCHES - 1
        latest: RefRecord = (await it.mirrors.refs_log(NAME))[0]
        assert latest.summary.startswith("sync, loss accepted: ")
        assert isinstance(await story.sync(), Synced)
        await story.end()
        records = await it.mirrors.refs_log(NAME)
        diff = await it.mirrors.refs_restore(NAME, records[-1].id)
        assert diff.changes
        assert (await it.mirrors.describe(NAME)).state == "ready"

    house.run(body)


def test_a_small_project_may_tidy_up(house: Builder, upstream: Upstream, forge: Forge) -> None:
    """Most of a few refs is no catastrophe."""
    upstream.git("branch", "-D", *(f"topic{n}" for n in range(5, BRANCHES)))

    async def body(it: House) -> None:
        story = Story(it, upstream, forge)
        await story.begin()
        upstream.git("branch", "-D", *(f"topic{n}" for n in range(5)))
        assert isinstance(await story.sync(), Synced)
        await story.end()

    house.run(body)


@pytest.fixture
def house(tmp_path: Path) -> Builder:
    return Builder(tmp_path, "file:///nonexistent/{owner}+{name}")
